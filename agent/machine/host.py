"""This machine's disks, mounts and power: the only module that runs lsblk, blkid, mount and their like.

Mounts are read with findmnt, never from /proc: what the programs say is what counts. Device contents are read, never
written, except by mkfs on a device that `is_blank`, or that holds only what an unfinished mkfs of ours left.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from spotheal.agent.files.paths import Paths
from spotheal.agent.machine import devices as decide
from spotheal.agent.machine import mount_holders
from spotheal.agent.machine.devices import Device
from spotheal.agent.processes import programs
from spotheal.agent.protocol.errors import Conflict, Fatal, MountRefused, Retryable

BY_ID = Path("/dev/disk/by-id")
SYS_BLOCK = Path("/sys/block")
FILESYSTEMS = ("xfs", "ext4")
_FORCE = {"xfs": "-f", "ext4": "-F"}  # mkfs's word for "over what is there"
MIB = 1024 * 1024
QUERY_SECONDS = 20.0
MKFS_SECONDS = 600.0
MOUNT_SECONDS = 900.0  # a log replay on a volume that is still loaded from its snapshot reads at 10 MB/s
UMOUNT_SECONDS = 300.0  # flushes what is still in memory
INSTALL_SECONDS = 300.0

# cloud-init and unattended-upgrades hold Debian's lock at boot.
_NFS_CLIENT = {
    "apt-get": ("update -q", "install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 nfs-common"),
    "dnf": ("install -y -q nfs-utils",),
    "yum": ("install -y -q nfs-utils",),
}
_COLUMNS = "NAME,PATH,SERIAL,SIZE,FSTYPE,UUID,MOUNTPOINTS,TYPE"
_OLD_COLUMNS = "NAME,SERIAL,SIZE,FSTYPE,UUID,MOUNTPOINT,TYPE"  # util-linux before 2.37 (Ubuntu 20.04, Amazon Linux 2)


class Host:
    """The machine the agent runs on. Every call is bounded; a program that is missing is a clear Fatal."""

    def __init__(self, paths: Paths | None = None, by_id: Path = BY_ID, sys_block: Path = SYS_BLOCK) -> None:
        self._paths = paths or Paths.from_environment()
        self._by_id, self._sys_block = by_id, sys_block
        self._leaving: dict[str, str] = {}  # mount point: the device that an unmount was begun for

    # -------------------------------------------------------------------------------------------------------- devices
    def devices(self) -> tuple[Device, ...]:
        """All disks lsblk shows."""
        process = programs.run(["lsblk", "--json", "--bytes", "--output", _COLUMNS], seconds_max=QUERY_SECONDS)
        if process.code != 0 and "unknown column" in process.err:
            process = programs.run(["lsblk", "--json", "--bytes", "--output", _OLD_COLUMNS], seconds_max=QUERY_SECONDS)
        if process.code != 0:
            raise Retryable(f"lsblk failed: {process.said}")
        devices = decide.parse_lsblk(process.out)
        return tuple(device if device.serial else self._with_serial(device) for device in devices)

    def _with_serial(self, device: Device) -> Device:
        """The same with the kernel's serial: lsblk may ask udev, which learns of a new disk later."""
        try:
            file = self._sys_block / os.path.basename(device.path) / "device" / "serial"
            return replace(device, serial=decide.plain_serial(file.read_text(encoding="ascii", errors="replace")))
        except OSError:
            return device

    def find_device(self, volume: str, attached_as: str = "") -> str | None:
        """The path of the disk that is `volume`, None while it is not there (udev may need seconds after the attach).

        `attached_as` (the name given to AttachVolume, /dev/sdf) is needed only on Xen machines.
        """
        device = decide.choose(self.devices(), self._links(), volume, attached_as)
        return None if device is None else device.path

    def device_at(self, path: str) -> Device | None:
        """What lsblk says of the disk at `path`."""
        real = os.path.realpath(path)
        return next((device for device in self.devices() if os.path.realpath(device.path) == real), None)

    def _links(self) -> dict[str, str]:
        try:
            names = [name for name in os.listdir(self._by_id) if name.startswith(decide.LINK_PREFIX)]
        except OSError:
            return {}
        return {name: os.path.realpath(self._by_id / name) for name in names}

    # ----------------------------------------------------------------------------------------------------- filesystems
    def filesystem(self, device: str) -> str:
        """The signature on `device` itself (xfs, ext4, …), "" where it has none; Fatal where it is ambivalent.

        Asked of the device, not of udev's memory, which may be older than the last mkfs.
        """
        process = programs.run(["blkid", "-p", "-o", "export", device], seconds_max=QUERY_SECONDS)
        if process.code == 2 and not process.err.strip():
            return ""
        tags = dict(line.partition("=")[::2] for line in process.out.splitlines() if "=" in line)
        if process.code == 0:
            return tags.get("TYPE") or f"a {tags.get('PTTYPE', 'strange')} partition table"
        if process.code == 8:
            raise Fatal(f"{device} carries signatures of several filesystems", next_step=f"look at `wipefs {device}`")
        raise Retryable(f"blkid cannot read {device}: {process.said}")

    def is_blank(self, device: str) -> bool:
        """Whether nothing was ever written to `device`: no signature, no partition, first and last MiB zero."""
        target = self.device_at(device)
        if target is None or target.has_children or target.mountpoints or target.fstype or self.filesystem(device):
            return False
        try:
            with open(device, "rb", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                return size > 0 and not any(_holds_bytes(file.fileno(), at) for at in (0, max(0, size - MIB)))
        except OSError as fault:
            raise Retryable(f"{device} cannot be read: {fault.strerror}") from fault

    def make_filesystem(self, device: str, fstype: str, again: bool = False) -> None:
        """Format `device`; Fatal, and nothing done, if it is not blank.

        `again`: the caller knows that a mkfs of ours was cut short on it. Then bytes and a signature of ours are
        formatted over; a partition, a mount or another signature is refused as always.
        """
        if fstype not in FILESYSTEMS:
            raise Fatal(f"{fstype!r} is no filesystem we make", next_step=f"use one of {', '.join(FILESYSTEMS)}")
        programs.find(f"mkfs.{fstype}")
        blank = self.is_blank(device)
        if not (blank or (again and self._may_be_unfinished(device))):
            raise Fatal(f"{device} is not blank and is not formatted", next_step=f"look at `blkid -p {device}`")
        force = [] if blank else [_FORCE[fstype]]
        process = programs.run([f"mkfs.{fstype}", "-q", *force, device], seconds_max=MKFS_SECONDS)
        if process.code != 0:
            raise Retryable(f"mkfs.{fstype} failed on {device}: {process.said}")

    def _may_be_unfinished(self, device: str) -> bool:
        """Whether there is nothing on `device` that a mkfs of ours could not have left there."""
        target = self.device_at(device)
        if target is None or target.has_children or target.mountpoints:
            return False
        return {target.fstype or "", self.filesystem(device)} <= {"", *FILESYSTEMS}

    # ---------------------------------------------------------------------------------------------------------- mounts
    def mounted_at(self, mountpoint: str) -> str | None:
        """The device that is mounted at `mountpoint`, None where none is."""
        return self._mount_entry(mountpoint)[0] or None

    def is_read_only(self, mountpoint: str) -> bool:
        """Whether what is mounted there cannot be written (a filesystem goes read-only by itself after an error)."""
        return "ro" in self._mount_entry(mountpoint)[1]

    def free_bytes(self, mountpoint: str) -> int:
        """What an ordinary user can still write there."""
        status = os.statvfs(mountpoint)
        return status.f_bavail * status.f_frsize

    def mount(self, device: str, mountpoint: str, fstype: str = "", volume: str = "", attached_as: str = "") -> None:
        """Mount `device`, writable; "already so" is success.

        With `volume` the device's serial is looked at once more, in the last moment. The filesystem found on the device
        wins over `fstype`. Raises Retryable where the device is another volume by now or the mount fails, Fatal where
        it has no filesystem of ours or can only be read.
        """
        if volume and (newest := self.find_device(volume, attached_as)) != device:
            raise Retryable(f"{device} is not {volume} (that is {newest or 'not there'}); it is not mounted")
        source, options = self._mount_entry(mountpoint)
        if source and os.path.realpath(source) != os.path.realpath(device):
            raise Conflict(f"{source} is mounted at {mountpoint}, not {device}", next_step=f"`umount {mountpoint}`")
        if source:
            with contextlib.suppress(Retryable):  # left frozen by an agent that died; else "not frozen"
                self.thaw(mountpoint)
        else:
            self._mount(device, mountpoint, fstype)
            source, options = self._mount_entry(mountpoint)
        if os.path.realpath(source) != os.path.realpath(device):
            raise Retryable(f"{device} was mounted at {mountpoint}, but {source or 'nothing'} is there")
        if "ro" in options:
            self.unmount(mountpoint)
            raise Fatal(
                f"{device} can only be mounted read-only", next_step="look at `dmesg`; the volume may be damaged"
            )

    def _mount(self, device: str, mountpoint: str, fstype: str) -> None:
        filesystem = self.filesystem(device)
        if filesystem not in FILESYSTEMS:
            raise Fatal(
                f"{device} holds {filesystem or 'no filesystem'}, not {fstype or ' or '.join(FILESYSTEMS)}",
                next_step="a volume holds one filesystem on the whole device; copy the data to such a one",
            )
        # nosuid, nodev: the trainer writes here, and so can a snapshot's maker. nouuid: an XFS copy has its source's
        # UUID, and the kernel refuses a second one; which device it is was settled by the serial.
        options = "nosuid,nodev,noatime" + (",nouuid" if filesystem == "xfs" else "")
        try:
            os.makedirs(mountpoint, exist_ok=True)
        except OSError as fault:
            raise Fatal(f"the mount point {mountpoint} cannot be made: {fault.strerror}") from fault
        argv = ["mount", "-t", filesystem, "-o", options, device, mountpoint]
        process = programs.run(argv, seconds_max=MOUNT_SECONDS)
        if process.code != 0:
            raise MountRefused(f"mounting {device} at {mountpoint} failed: {process.said}", next_step="look at `dmesg`")

    # --------------------------------------------------------------------------------------------------------- network
    def resolves(self, name: str) -> bool:
        """Whether the name server has an address for `name`, asked by a program that can be given up."""
        try:
            process = programs.run(["getent", "ahostsv4", name], seconds_max=QUERY_SECONDS)
        except Retryable:
            return False
        return process.code == 0 and bool(process.out.strip())

    def install_nfs_client(self) -> None:
        """mount.nfs4, where it is missing; Retryable where the package cannot be fetched, Fatal where nothing installs
        packages here."""
        if programs.exists("mount.nfs4"):
            return
        for installer, orders in _NFS_CLIENT.items():
            if programs.exists(installer):
                fault = ""
                for order in orders:
                    argv = [installer, *order.split()]
                    process = programs.run(argv, seconds_max=INSTALL_SECONDS, DEBIAN_FRONTEND="noninteractive")
                    fault = "" if process.code == 0 else f"`{' '.join(argv)}` failed: {process.said}"
                if programs.exists("mount.nfs4"):
                    return
                raise Retryable(
                    f"the NFS client cannot be installed: {fault or 'mount.nfs4 is still missing'}",
                    next_step="the machine needs a way to its package mirror, or an AMI that has the NFS client",
                )
        programs.find("mount.nfs4")

    def mount_nfs(self, source: str, mountpoint: str, options: str, seconds_max: float) -> None:
        """`mount -t nfs4`; Retryable with mount's own words, TimedOut after `seconds_max`."""
        try:
            os.makedirs(mountpoint, exist_ok=True)
        except OSError as fault:
            raise Fatal(f"the mount point {mountpoint} cannot be made: {fault.strerror}") from fault
        argv = ["mount", "-t", "nfs4", "-o", options, source, mountpoint]
        process = programs.run(argv, seconds_max=seconds_max)
        if process.code != 0:
            raise Retryable(f"mounting {source} failed: {process.said}")

    def nfs_source(self, mountpoint: str) -> str:
        """What NFS has mounted there (`host:/path`), "" where nothing is; Conflict where something else is."""
        source, fstype = self._mount_entry(mountpoint, "fstype")
        if source and not fstype[0].startswith("nfs"):
            raise Conflict(f"{source} is mounted at {mountpoint}, no NFS", next_step=f"`umount {mountpoint}`")
        return source

    def _mount_entry(self, mountpoint: str, column: str = "options") -> tuple[str, tuple[str, ...]]:
        process = programs.run(
            ["findmnt", "--json", "--output", "SOURCE,TARGET,FSTYPE,OPTIONS", "--mountpoint", mountpoint],
            seconds_max=QUERY_SECONDS,
        )
        if process.code != 0 and not process.err.strip():
            return "", ()
        try:
            entry = json.loads(process.out)["filesystems"][-1]  # the last one hides those below it
            return str(entry["source"]), tuple(str(entry[column]).split(","))
        except (ValueError, KeyError, TypeError, IndexError) as fault:
            raise Retryable(f"findmnt cannot tell what is mounted at {mountpoint}: {process.said}") from fault

    def unmount(self, mountpoint: str, seconds_max: float = UMOUNT_SECONDS) -> bool:
        """Whether nothing is mounted there now; False while it is busy. Never lazy: what is off is written.

        Raises Retryable where memory is still being written out after `seconds_max`, or where the filesystem lives on
        in another mount namespace.
        """
        for _ in range(8):  # several may lie one above the other
            device = self.mounted_at(mountpoint)
            if device is None:
                self._see_released(mountpoint)
                return True
            self._leaving[mountpoint] = device
            process = programs.run(["umount", mountpoint], seconds_max=seconds_max)
            if "busy" in process.err:
                return False
            if process.code != 0 and self.mounted_at(mountpoint) is not None:
                raise Retryable(f"unmounting {mountpoint} failed: {process.said}")
        raise Retryable(f"{mountpoint} is mounted more often than can be undone")

    def _see_released(self, mountpoint: str) -> None:
        """The kernel takes a mount out of the table first and writes out memory afterwards; only then is the device
        free for an exclusive open."""
        device = self._leaving.get(mountpoint, "")
        try:
            if device:
                os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
        except OSError as fault:
            if fault.errno == errno.EBUSY:
                raise Retryable(f"{device} is off {mountpoint}, but the kernel still uses it") from fault
        self._leaving.pop(mountpoint, None)

    def holders(self, mountpoint: str) -> tuple[int, ...]:
        """Processes that keep `mountpoint` busy, we ourselves among them."""
        return mount_holders.holders(mountpoint)

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]:
        """SIGKILL, but never to process 1, to us, or to those that started us; returns who was sent it."""
        return mount_holders.kill(pids)

    def sync(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        """Write out what memory holds of the filesystem mounted at `mountpoint`."""
        self._see_mounted(mountpoint)
        self._do(["sync", "-f", mountpoint], seconds_max)

    def freeze(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        """Stop all writes to the filesystem. Whoever writes there then hangs, we too, until `thaw`.

        fsfreeze takes any folder: where nothing is mounted it would freeze the machine's root. The open folder keeps
        the mount where it is between the look and the act.
        """
        try:
            folder = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as fault:
            raise Retryable(f"{mountpoint} cannot be opened: {fault.strerror}") from fault
        try:
            self._see_mounted(mountpoint)
            self._do(["fsfreeze", "-f", mountpoint], seconds_max)
        finally:
            os.close(folder)

    def thaw(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        """Undo `freeze`."""
        self._do(["fsfreeze", "-u", mountpoint], seconds_max)

    def _see_mounted(self, mountpoint: str) -> None:
        if self.mounted_at(mountpoint) is None:
            raise Retryable(f"nothing is mounted at {mountpoint}")

    def _do(self, argv: list[str], seconds_max: float) -> None:
        process = programs.run(argv, seconds_max=seconds_max)
        if process.code != 0:
            raise Retryable(f"`{' '.join(argv)}` failed: {process.said}")

    # ----------------------------------------------------------------------------------------------------------- power
    def power_off(self) -> None:
        """Switch the machine off. Refused where the agent runs below another root with the machine's own programs:
        then the machine is somebody's desk."""
        shutdown = programs.find("shutdown")
        if not self._paths.is_whole_machine and os.path.dirname(shutdown) in programs.SYSTEM_FOLDERS:
            raise Fatal("this machine is not the agent's to switch off")
        self._do(["shutdown", "-h", "now"], 30.0)


def _holds_bytes(descriptor: int, at: int) -> bool:
    block = os.pread(descriptor, MIB, at)
    return block.count(0) != len(block)
