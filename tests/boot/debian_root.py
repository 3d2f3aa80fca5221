"""A Debian root with systemd, cloud-init and what an image for training has, made once and kept in the user's cache.

The machine's own apt configuration says where packages come from. Root and mmdebstrap are needed; about a minute, once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

PACKAGES = (
    "systemd-sysv", "dbus", "libpam-systemd", "udev", "cloud-init", "python3", "git", "ca-certificates", "iproute2",
    "ifupdown", "e2fsprogs", "xfsprogs", "nftables", "kmod", "procps", "util-linux", "mount",
)  # fmt: skip
KERNEL = ("linux-image-cloud-amd64", "initramfs-tools", "zstd")
# The cloud is at an address of the rehearsal's network, and no DNS is there to find amazonaws.com.
CLOUD = "http://10.0.0.1"
FILES = {
    # As an image for EC2 has it: no other cloud is looked for.
    "etc/cloud/cloud.cfg.d/90_ec2.cfg": "datasource_list: [ Ec2 ]\n",
    "etc/systemd/system.conf.d/cloud.conf": f"[Manager]\nDefaultEnvironment=AWS_ENDPOINT_URL={CLOUD}\n",
    "etc/systemd/journald.conf.d/kept.conf": "[Journal]\nStorage=persistent\n",
    "etc/network/interfaces": "auto lo\niface lo inet loopback\nsource /etc/network/interfaces.d/*\n",
    "etc/resolv.conf": "nameserver 10.0.0.1\n",
    "etc/hostname": "localhost\n",
    "etc/machine-id": "",
    # Modules that take seconds and change nothing here: locales, keys of an ssh server that is not there, apt.
    "etc/cloud/cloud.cfg.d/95_small.cfg": "cloud_config_modules: []\n"
    "cloud_init_modules: [bootcmd, write-files, set_hostname, users-groups]\n"
    "cloud_final_modules: [scripts-per-boot, scripts-per-instance, scripts-user, final-message]\n",
}
_EXCLUDED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_KEPT = 3


class CannotMake(Exception):
    """Why this machine cannot make a root, in one line."""


def debian_root(suite: str = "", *, kernel: bool = False) -> Path:
    """The folder of the unpacked root, which nobody writes to; with `kernel`, one that a virtual machine boots.

    `suite`: `testing` for the newest Debian; "" for this machine's own. The newest one is fetched again after a month.
    """
    if os.geteuid() != 0:
        raise CannotMake("needs root, to make a Debian root")
    if shutil.which("mmdebstrap") is None:
        raise CannotMake("mmdebstrap is not installed (apt-get install mmdebstrap)")
    own = _suite()
    suite = suite or own
    dhcp = "isc-dhcp-client" if suite == own else "dhcpcd-base"  # the newest Debian has no ISC client any more
    packages = sorted((*PACKAGES, dhcp, *(KERNEL if kernel else ())))
    asked = "\n".join([suite, *packages, *([] if suite == own else [time.strftime("%Y-%m")])])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotheal"
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / f"debian-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            sources = _sources(own) if suite == own else [_sources_of(suite, own, root.with_suffix(".sources"))]
            _make(root, suite, packages, sources)
            _forget_old(cache)
    os.utime(root)
    return root


def _make(root: Path, suite: str, packages: list[str], sources: list[str]) -> None:
    part = root.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    argv = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(packages)}"]
    # A mirror that stands still is as good as another: what is signed stays signed.
    argv += ['--aptopt=Acquire::Check-Valid-Until "false"']
    argv += ["--dpkgopt=force-unsafe-io"]  # a root that was cut short is not kept
    argv += [f"--dpkgopt=path-exclude={path}" for path in _EXCLUDED]
    done = subprocess.run([*argv, suite, str(part), *sources], capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        said = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()
        raise CannotMake(f"mmdebstrap failed: {said[-1] if said else done.returncode}")
    part.rename(root)


def write_files(root: Path) -> None:
    """What an image for EC2 has beside its packages."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _forget_old(cache: Path) -> None:
    roots = sorted((path for path in cache.glob("debian-*") if not path.suffix), key=lambda root: root.stat().st_mtime)
    for root in roots[:-_KEPT]:
        shutil.rmtree(root, ignore_errors=True)


def _suite() -> str:
    fields = dict(line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines())
    if fields.get("ID") != "debian" or not fields.get("VERSION_CODENAME"):
        raise CannotMake("this machine is no Debian: its apt configuration names no place for Debian's packages")
    return fields["VERSION_CODENAME"].strip('"')


def _sources(suite: str) -> list[str]:
    """The files that name places for this suite; others (of vendors) have no base system."""
    folder = Path("/etc/apt")
    found = sorted([folder / "sources.list", *(folder / "sources.list.d").glob("*")])
    return [str(path) for path in found if path.suffix in (".list", ".sources") and _names(path, suite)]


def _sources_of(suite: str, own: str, file: Path) -> str:
    """A file that names, for `suite`, the place from which this machine gets the packages of `own`."""
    found = []
    for path in _sources(own):
        for stanza in Path(path).read_text().split("\n\n"):
            if own in stanza.split():
                found.append(re.sub(rf"\b{own}(-\w+)?\b *", "", stanza).replace("Suites:", f"Suites: {suite}"))
    if not found or "Suites:" not in found[0]:
        raise CannotMake("this machine's apt configuration has no .sources file that names its Debian")
    file.write_text(found[0] + "\n")
    return str(file)


def _names(path: Path, suite: str) -> bool:
    return path.is_file() and suite in path.read_text(errors="replace").split()
