"""The disk image that virtual machines boot: the Debian root with a kernel, as an ext4 filesystem on a bare disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from debian_root import FILES, CannotMake, debian_root, write_files

LABEL = "spotheal-root"
SIZE = "3G"
# A shell on the second serial line: what an operator has by ssh.
_SHELL = """[Unit]
Description=The operator's shell
[Service]
ExecStart=/bin/sh
StandardInput=tty-force
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
Environment=PS1= LANG=C.UTF-8
Restart=always
SendSIGHUP=yes
TimeoutStopSec=2
[Install]
WantedBy=multi-user.target
"""
_FILES = {
    "etc/fstab": f"LABEL={LABEL} / ext4 defaults,noatime 0 1\n",
    "etc/systemd/system/operator.service": _SHELL,
}
_MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer")
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "qemu-img": "qemu-utils", "mkfs.ext4": "e2fsprogs",
            "dnsmasq": "dnsmasq-base", "ip": "iproute2"}  # fmt: skip


@dataclass(frozen=True)
class Image:
    """Files that virtual machines read and never write."""

    disk: Path
    kernel: Path
    initrd: Path


def image() -> Image:
    """Made once; CannotMake says what is missing."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise CannotMake(f"{program} is not installed (apt-get install {package})")
    root = debian_root(kernel=True)
    (kernel,) = sorted((root / "boot").glob("vmlinuz-*"))[-1:]
    (initrd,) = sorted((root / "boot").glob("initrd.img-*"))[-1:]
    files = "\n".join(f"{name}={text}" for name, text in sorted({**FILES, **_FILES}.items()))
    digest = hashlib.sha256(f"{SIZE}{_MASKED}{files}".encode()).hexdigest()
    disk = root.with_name(f"{root.name.replace('debian', 'disk')}-{digest[:12]}")
    with root.with_suffix(".disk.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not disk.exists():
            for old in root.parent.glob("disk-*"):
                old.unlink()
            _make(root, disk)
    return Image(disk, kernel, initrd)


def _make(root: Path, disk: Path) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        copy, part = Path(folder, "root"), Path(folder, "disk")
        subprocess.run(["cp", "-a", "--reflink=auto", str(root), str(copy)], check=True)
        write_files(copy)
        for name, text in _FILES.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_text(text)
        system = copy / "etc/systemd/system"
        for unit in _MASKED:
            (system / unit).unlink(missing_ok=True)
            (system / unit).symlink_to("/dev/null")
        (system / "multi-user.target.wants").mkdir(exist_ok=True)
        (system / "multi-user.target.wants/operator.service").symlink_to("/etc/systemd/system/operator.service")
        made = subprocess.run(
            ["mkfs.ext4", "-q", "-L", LABEL, "-d", str(copy), str(part), SIZE], capture_output=True, text=True
        )
        if made.returncode != 0:
            raise CannotMake(f"mkfs.ext4: {made.stderr.strip()}")
        os.rename(part, disk)
