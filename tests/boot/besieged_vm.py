"""Part of `make boot-vm`: sockets that belong to nobody, under Debian's own kernel, which has AF_SMC.

A red team's AF_SMC socket went past the cage's rules to the metadata service. Ends with 1 where a fact does not hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from debian_root import CannotMake
from vm_image import LABEL, Image, image

HERE = Path(__file__).resolve().parent
AGENT = HERE.parents[1] / "agent"
SECONDS_MAX = 600.0
_INIT = "mount -t tmpfs tmpfs /run; mkdir /run/siege; tar -x -f /dev/nvme1n1 -C /run/siege; " \
        "exec python3 /run/siege/besieged_guest.py"  # fmt: skip


def outcome(found: Image) -> dict[str, Any]:
    """What the guest printed."""
    with tempfile.TemporaryDirectory(prefix="sp-vm-") as folder:
        payload, root, console = Path(folder, "payload"), Path(folder, "root"), Path(folder, "console")
        with tarfile.open(payload, "w") as archive:
            archive.add(HERE / "besieged_guest.py", "besieged_guest.py")
            archive.add(AGENT, "spotheal/agent", filter=lambda info: None if "__pycache__" in info.name else info)
        with payload.open("ab") as file:
            file.truncate(file.tell() + (1 << 20) - file.tell() % (1 << 20))
        backed = ["-b", str(found.disk), "-F", "raw", str(root)]
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *backed], check=True, capture_output=True)
        argv = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "Nehalem", "-smp", "2",
            "-m", "768M", "-nodefaults", "-display", "none", "-no-user-config", "-no-reboot",
            "-kernel", str(found.kernel), "-initrd", str(found.initrd),
            "-append", f'root=LABEL={LABEL} rw console=ttyS0 mitigations=off quiet init=/bin/sh -- -c "{_INIT}"',
            "-chardev", f"file,id=console,path={console}", "-serial", "chardev:console", "-device", "virtio-rng-pci",
            "-drive", f"if=none,id=root,file={root},format=qcow2,cache=unsafe",
            "-device", "nvme,drive=root,serial=root",
            "-drive", f"if=none,id=payload,file={payload},format=raw", "-device", "nvme,drive=payload,serial=payload",
        ]  # fmt: skip
        subprocess.run(argv, check=True, timeout=SECONDS_MAX, capture_output=True)
        said = console.read_text(errors="replace").splitlines()
    lines = [line.partition("SIEGE ")[2] for line in said if line.startswith("SIEGE ")]
    if not lines:
        raise AssertionError("the guest said nothing:\n" + "\n".join(said[-40:]))
    answer: dict[str, Any] = json.loads(lines[0])
    return answer


def facts(found: dict[str, Any]) -> dict[str, bool]:
    words = ("without", "rules", "cage", "root")
    without, rules, cage, root = (dict(_split(line) for line in found[word]) for word in words)
    made = [cage[f"{way} {place}"] for way in ("smc", "upgraded") for place in ("imds", "nfs")]
    return {
        "without rules an SMC socket reaches the metadata service": "REAL" in without["smc imds"],
        "the rules alone keep sockets of nobody from it": rules["smc imds"] in ("ECONNREFUSED", "ETIMEDOUT"),
        "the cage makes no such socket": all(said.startswith("no socket") for said in made),
        "a trainer's TCP comes to the relay": cage["tcp imds"] == "relay",
        "a trainer's TCP does not come to NFS": "NFS" not in cage["tcp nfs"],
        "the agent itself reaches the service": "REAL" in root["tcp imds"],
        "a mount of EFS reaches its server": bool(found["efs"]),
        "the log names what was refused": found["told"]
        == ["socket(family 43, type 1, protocol 0)", "setsockopt(TCP_ULP)"],
    }


def _split(line: str) -> tuple[str, str]:
    way, place, said = line.split(" ", 2)
    return f"{way} {place}", said


def main() -> int:
    try:
        found = outcome(image())
    except CannotMake as why:
        print(f"boot-vm: {why}")
        return 2
    if "fault" in found:
        print(found["fault"])
        return 1
    held = facts(found)
    for fact, holds in held.items():
        print(f"boot-vm: {'holds' if holds else 'DOES NOT HOLD'}: {fact}")
    print(json.dumps(found))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
