"""Which block device is an EBS volume: pure decisions on what `lsblk` and udev say.

A Nitro instance shows a volume as an NVMe disk whose serial is the volume's id without the dash; its number depends on
the order of discovery, and GPU instances have instance-store disks of the same kind beside it. Nothing is ever chosen
by position, size, or because it is the only one left.
Source: EC2 User Guide, "Amazon EBS volumes and NVMe" and "Device names for volumes".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.errors import Fatal, Retryable

LINK_PREFIX = "nvme-Amazon_Elastic_Block_Store_"
_EBS_SERIAL = re.compile(r"vol[0-9a-f]{8,17}")


@dataclass(frozen=True)
class Device:
    """A whole disk as lsblk shows it; `mountpoints` are its own, not its partitions'."""

    path: str
    serial: str
    size_bytes: int
    fstype: str
    uuid: str
    mountpoints: tuple[str, ...]
    has_children: bool


def parse_lsblk(text: str) -> tuple[Device, ...]:
    """The disks in lsblk's JSON; Retryable where it is none."""
    try:
        rows = bounded_json.parse_object(text)["blockdevices"]
        return tuple(_device(row) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise Retryable(f"lsblk printed what cannot be read: {text[:200]!r}") from fault


def _device(row: Mapping[str, object]) -> Device:
    mounted = row.get("mountpoints", [row.get("mountpoint")])  # a list since util-linux 2.37
    if not isinstance(mounted, list):
        raise TypeError("mountpoints is a list")
    return Device(
        path=str(row.get("path") or f"/dev/{row['name']}"),  # no PATH before 2.33
        serial=plain_serial(str(row.get("serial") or "")),
        size_bytes=int(str(row.get("size") or 0)),
        fstype=str(row.get("fstype") or ""),
        uuid=str(row.get("uuid") or ""),
        mountpoints=tuple(str(path) for path in mounted if path),
        has_children=bool(row.get("children")),
    )


def plain_serial(serial: str) -> str:
    """`vol0123…` also where udev gave the long form, `Amazon_Elastic_Block_Store_vol0123…_1`."""
    short = re.sub(r"^Amazon[ _]Elastic[ _]Block[ _]Store[ _]", "", serial.strip())
    return re.sub(r"_\d+$", "", short) if short.startswith("vol") else short


def serial_of(volume: str) -> str:
    """The NVMe serial of volume `vol-…`; Fatal where that is no volume id."""
    serial = volume.replace("-", "", 1)
    if not volume.startswith("vol-") or not _EBS_SERIAL.fullmatch(serial):
        raise Fatal(f"{volume!r} is no volume id")
    return serial


def choose(devices: tuple[Device, ...], links: Mapping[str, str], volume: str, attached_as: str = "") -> Device | None:
    """The disk that is `volume`, None where it is not (yet) there; Retryable where two claim to be.

    `links` are udev's by-id names and the real paths behind them. `attached_as` is the name given to AttachVolume; it
    counts only on a Xen machine, where disks have no serial.
    """
    serial = serial_of(volume)
    by_path = {device.path: device for device in devices}
    found = {device.path: device for device in devices if device.serial == serial}
    for name in (LINK_PREFIX + serial, f"{LINK_PREFIX}{serial}_1"):
        linked = by_path.get(links.get(name, ""))
        if linked is not None and not linked.serial:  # a link to a disk of another serial is older than the disk
            found[linked.path] = linked
    if len(found) > 1:
        raise Retryable(  # the kernel may keep a disk for seconds that was detached
            f"{', '.join(sorted(found))} all claim to be {volume}",
            next_step="look at `lsblk -o +SERIAL`, then reboot the instance",
        )
    if found:
        return next(iter(found.values()))
    return _xen(devices, attached_as)


def _xen(devices: tuple[Device, ...], attached_as: str) -> Device | None:
    """The disk `attached_as` names on a Xen machine; None on a Nitro one, where that name means nothing."""
    match = re.fullmatch(r"/dev/(?:sd|xvd)([a-z]{1,2})", attached_as)
    nvme = [device for device in devices if os.path.basename(device.path).startswith("nvme")]
    if not match or any(not device.serial or _EBS_SERIAL.fullmatch(device.serial) for device in nvme):
        return None  # EBS volumes are NVMe disks here, or one disk does not say what it is
    path = f"/dev/xvd{match.group(1)}"
    return next((device for device in devices if device.path == path and not device.serial), None)
