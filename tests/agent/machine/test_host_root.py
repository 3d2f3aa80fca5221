"""The host on real block devices: loop devices with ext4 and XFS. Needs root; elsewhere skipped with the reason."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handover_world import FakeImds
from imds_server import wait_until

from spotheal.agent.interruption import handover
from spotheal.agent.interruption.handover import Steps, hand_over
from spotheal.agent.interruption.watcher import Watcher
from spotheal.agent.machine.host import Host
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Conflict, Fatal, MountRefused, Retryable

pytestmark = pytest.mark.root
MIB = 2**20
SIZE = 320 * MIB  # mkfs.xfs refuses less than 300 MiB


def shell(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


class Loops:
    """Loop devices of one test; all are unmounted and detached at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.devices, self.mounts = folder, [], []  # type: Path, list[str], list[str]

    def attach(self, image: Path, *options: str) -> str:
        for tries_left in (4, 3, 2, 1, 0):  # another process may take the free device that losetup has found
            try:
                self.devices.append(shell("losetup", "--find", "--show", *options, str(image)))
                break
            except subprocess.CalledProcessError:
                if not tries_left:
                    raise
        return self.devices[-1]

    def blank(self, name: str = "image") -> str:
        image = self.folder / name
        with image.open("wb") as file:
            file.truncate(SIZE)
        return self.attach(image)

    def copy_image(self) -> None:
        shell("cp", "--sparse=always", str(self.folder / "image"), str(self.folder / "copy"))

    def mount_point(self, name: str = "mnt") -> str:
        self.mounts.append(str(self.folder / name))
        return self.mounts[-1]

    def close(self) -> None:
        for path in self.mounts:
            subprocess.run(["fsfreeze", "-u", path], capture_output=True, timeout=60)
            while subprocess.run(["umount", path], capture_output=True, timeout=60).returncode == 0:
                pass
        for device in self.devices:
            subprocess.run(["losetup", "--detach", device], capture_output=True, timeout=60)


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    if os.geteuid() != 0:
        pytest.skip("needs root: loop devices and mounts")
    # One at a time on a machine: a new mount namespace of one test would hold the mounts of all others.
    with Path(tempfile.gettempdir(), "spotheal-loop-devices.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = Loops(tmp_path)
        try:
            found.blank("probe")
        except (subprocess.CalledProcessError, FileNotFoundError) as fault:
            pytest.skip(f"no loop devices here: {getattr(fault, 'stderr', fault)}")
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(params=["ext4", "xfs"])
def fstype(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(f"mkfs.{name}") is None:
        pytest.skip(f"mkfs.{name} is not installed (apt-get install {'xfsprogs' if name == 'xfs' else 'e2fsprogs'})")
    if f"\t{name}\n" not in Path("/proc/filesystems").read_text() and name != "xfs":
        pytest.skip(f"this kernel has no {name}")
    return name


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def device(loops: Loops, host: Host, fstype: str) -> str:
    """A formatted one."""
    path = loops.blank()
    host.make_filesystem(path, fstype)
    return path


class Holder:
    """A process with a file open on the volume."""

    def __init__(self, path: str) -> None:
        code = "import sys; f = open(sys.argv[1], 'w'); print(1, flush=True); sys.stdin.read()"
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code, path], stdin=pipe, stdout=pipe, cwd="/")
        assert self.process.stdout is not None and self.process.stdout.readline()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


# ---------------------------------------------------------------------------------------------------- a blank disk
def test_a_blank_disk_is_formatted_once(loops: Loops, host: Host, fstype: str) -> None:
    device = loops.blank()
    assert host.is_blank(device)
    host.make_filesystem(device, fstype)
    assert host.filesystem(device) == fstype
    assert not host.is_blank(device)
    before = shell("blkid", "-p", "-s", "UUID", "-o", "value", device)
    with pytest.raises(Fatal, match="not blank"):
        host.make_filesystem(device, fstype)
    assert shell("blkid", "-p", "-s", "UUID", "-o", "value", device) == before


def test_a_mkfs_that_was_cut_short_can_be_made_again_and_mounted(loops: Loops, host: Host, fstype: str) -> None:
    """xfs: the superblock is on the device and nothing else is; ext4: all but the superblock is."""
    device, mountpoint = loops.blank(), loops.mount_point()
    host.make_filesystem(device, fstype)
    with open(device, "r+b") as disk:
        first = 4096 if fstype == "xfs" else 0
        disk.seek(first)
        disk.write(bytes(8 * MIB if fstype == "xfs" else 2048))
    assert host.filesystem(device) == ("xfs" if fstype == "xfs" else "")
    assert not host.is_blank(device)
    with pytest.raises(MountRefused if fstype == "xfs" else Fatal):
        host.mount(device, mountpoint)
    host.make_filesystem(device, fstype, again=True)
    host.mount(device, mountpoint)
    assert host.mounted_at(mountpoint) == device


DOS_PARTITION = bytes([0, 1, 1, 0, 0x83, 0xFE, 0xFF, 0xFF, 0, 8, 0, 0, 0, 32, 0, 0])  # from sector 2048, 8192 sectors


def test_a_partition_table_is_never_formatted(loops: Loops, host: Host) -> None:
    device = loops.blank()
    with open(device, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), DOS_PARTITION, 446)
        os.pwrite(file.fileno(), b"\x55\xaa", 510)
    assert host.filesystem(device) == "a dos partition table"
    with pytest.raises(Fatal, match="not blank"):
        host.make_filesystem(device, "ext4")
    with pytest.raises(Fatal, match="holds a dos partition table"):
        host.mount(device, loops.mount_point())


@pytest.mark.parametrize("make", ["mkswap", "mkfs.ext2", "mkfs.btrfs", "mkfs.vfat", "pvcreate"])
def test_a_disk_with_a_foreign_signature_is_never_formatted(loops: Loops, host: Host, make: str) -> None:
    if shutil.which(make) is None:
        pytest.skip(f"{make} is not installed")
    device = loops.blank()
    shell(make, device)
    with pytest.raises(Fatal, match="not blank"):
        host.make_filesystem(device, "ext4")


def test_a_byte_anywhere_in_the_first_or_last_mib_forbids_the_format(loops: Loops, host: Host) -> None:
    device, rng = loops.blank(), random.Random(5)
    places = [0, MIB - 1, SIZE - MIB, SIZE - 1] + [rng.randrange(MIB) for _ in range(4)]
    places += [SIZE - 1 - rng.randrange(MIB) for _ in range(4)]
    with open(device, "r+b", buffering=0) as file:
        for at in places:
            os.pwrite(file.fileno(), b"\x80", at)
            assert not host.is_blank(device), at
            os.pwrite(file.fileno(), b"\x00", at)
    assert host.is_blank(device)


# ---------------------------------------------------------------------------------------------------------- mounts
def test_mount_use_unmount_and_mount_again(loops: Loops, host: Host, device: str, fstype: str) -> None:
    at = loops.mount_point()
    assert host.mounted_at(at) is None
    for _ in range(2):  # twice is once
        host.mount(device, at, fstype)
    assert host.mounted_at(at) == device
    Path(at, "step-7").write_bytes(b"weights")
    assert shell("findmnt", "-n", "-o", "TARGET", "--source", device).splitlines() == [at]
    options = shell("findmnt", "-n", "-o", "OPTIONS", "--mountpoint", at).split(",")
    assert {"nosuid", "nodev", "noatime"} <= set(options)
    assert (host.unmount(at), host.unmount(at), host.mounted_at(at)) == (True, True, None)
    host.mount(device, at, "xfs" if fstype == "ext4" else "ext4")  # what is on the disk wins
    assert Path(at, "step-7").read_bytes() == b"weights"


def test_a_copy_taken_while_in_use_is_mounted_beside_its_source(loops: Loops, host: Host, device: str) -> None:
    """What a snapshot of a mounted volume is: the log must be replayed, and the UUID is there twice."""
    at, beside = loops.mount_point(), loops.mount_point("beside")
    host.mount(device, at)
    for number in range(20):
        with open(f"{at}/step-{number}", "wb") as file:
            file.write(os.urandom(10_000))
            file.flush()
            os.fsync(file.fileno())
    loops.copy_image()
    copy = loops.attach(loops.folder / "copy")
    host.mount(copy, beside)
    assert host.mounted_at(beside) == copy
    for number in range(20):
        assert Path(beside, f"step-{number}").read_bytes() == Path(at, f"step-{number}").read_bytes()


def test_another_device_at_the_mount_point_is_a_conflict(loops: Loops, host: Host, device: str) -> None:
    at, other = loops.mount_point(), loops.blank("other")
    host.make_filesystem(other, "ext4")
    host.mount(device, at)
    with pytest.raises(Conflict, match=f"{device} is mounted"):
        host.mount(other, at)
    assert host.mounted_at(at) == device


def test_a_blank_device_is_not_mounted(loops: Loops, host: Host) -> None:
    with pytest.raises(Fatal, match="holds no filesystem"):
        host.mount(loops.blank(), loops.mount_point(), "xfs")


def test_a_device_without_the_right_serial_is_not_mounted(loops: Loops, host: Host, device: str) -> None:
    at = loops.mount_point()
    with pytest.raises(Retryable, match="is not vol-0123456789abcdef0"):
        host.mount(device, at, volume="vol-0123456789abcdef0")
    assert host.mounted_at(at) is None


def test_a_device_that_can_only_be_read_is_refused_and_left_unmounted(loops: Loops, host: Host, fstype: str) -> None:
    at, device = loops.mount_point(), loops.blank()
    host.make_filesystem(device, fstype)
    shell("losetup", "--detach", device)
    locked = loops.attach(loops.folder / "image", "--read-only")
    with pytest.raises((Fatal, Retryable), match=r"read-only|write-protected|failed"):
        host.mount(locked, at)
    assert host.mounted_at(at) is None


def test_a_damaged_filesystem_is_an_error_and_no_mount(loops: Loops, host: Host, device: str, fstype: str) -> None:
    with open(device, "r+b", buffering=0) as file:
        if fstype == "xfs":
            os.pwrite(file.fileno(), os.urandom(400), 100)  # the signature stays
        else:
            os.pwrite(file.fileno(), b"\xff" * 40, 1024 + 0x10)
        os.fsync(file.fileno())
    at = loops.mount_point()
    with pytest.raises((Fatal, Retryable)):
        host.mount(device, at)
    assert host.mounted_at(at) is None


def test_a_full_disk_is_seen_and_can_be_unmounted_and_mounted(loops: Loops, host: Host, device: str) -> None:
    at = loops.mount_point()
    host.mount(device, at)
    Path(at, "step-1").write_bytes(b"weights")
    with pytest.raises(OSError, match="No space left"), open(f"{at}/fill", "wb", buffering=0) as file:
        for step in (64 * MIB, 4 * MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
        file.seek(0, os.SEEK_END)
        file.write(bytes(8 * MIB))
    assert host.free_bytes(at) < MIB and not host.is_read_only(at)
    assert host.unmount(at)
    host.mount(device, at)
    assert Path(at, "step-1").read_bytes() == b"weights"


def test_a_filesystem_that_went_read_only_is_seen(loops: Loops, host: Host, device: str) -> None:
    at = loops.mount_point()
    host.mount(device, at)
    shell("mount", "-o", "remount,ro", at)
    assert host.is_read_only(at)
    assert host.unmount(at)


# ---------------------------------------------------------------------------------------------------------- leaving
def test_a_busy_mount_stays_until_its_holder_is_gone(loops: Loops, host: Host, device: str) -> None:
    at = loops.mount_point()
    host.mount(device, at)
    with Holder(f"{at}/log") as holder:
        assert host.unmount(at) is False
        assert host.mounted_at(at) == device
        assert host.holders(at) == (holder.process.pid,)
        assert host.kill(host.holders(at)) == (holder.process.pid,)
        holder.process.wait(10)
        assert host.unmount(at)


def test_a_filesystem_that_lives_on_elsewhere_is_not_taken_for_unmounted(
    loops: Loops, host: Host, device: str
) -> None:
    """A service with a mount namespace of its own keeps the filesystem after we unmounted it."""
    at = loops.mount_point()
    host.mount(device, at)
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; read line"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as other:
        assert other.stdout is not None and other.stdin is not None
        if not other.stdout.readline():
            pytest.skip("no mount namespaces here")
        for _ in range(2):
            with pytest.raises(Retryable, match="the kernel still uses it"):
                host.unmount(at)
        other.stdin.close()
        other.wait(10)

    def released() -> bool:
        with contextlib.suppress(Retryable):  # the kernel takes a namespace apart in its own time
            return host.unmount(at)
        return False

    assert wait_until(released, 20)


def test_a_frozen_volume_keeps_what_was_written_and_a_new_mount_thaws_it(
    loops: Loops, host: Host, device: str
) -> None:
    at = loops.mount_point()
    host.mount(device, at)
    Path(at, "step-1").write_bytes(b"weights")
    host.sync(at)
    host.freeze(at)
    loops.copy_image()  # the snapshot
    host.mount(device, at)
    Path(at, "step-2").write_bytes(b"later")
    beside = loops.mount_point("beside")
    host.mount(loops.attach(loops.folder / "copy"), beside)
    assert [path.name for path in Path(beside).glob("step-*")] == ["step-1"]
    assert Path(beside, "step-1").read_bytes() == b"weights"


def test_a_handover_of_a_real_volume_kills_who_holds_it(
    loops: Loops, host: Host, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "BUSY_SECONDS", 0.6)
    at, clock, history = loops.mount_point(), SystemClock(), []  # type: str, SystemClock, list[str]
    host.mount(device, at)
    watcher = Watcher(FakeImds(), clock)
    watcher.shutdown(clock.now())
    interruption = watcher.interruption
    assert interruption is not None

    def snapshot() -> str:
        history.append("snapshot")
        assert host.mounted_at(at) is None
        loops.copy_image()
        return "snap-1"

    with Holder(f"{at}/log") as holder:
        steps = Steps(lambda until: None, lambda: None, snapshot, lambda: history.append("detach"), lambda result: None)
        Path(at, "step-1").write_bytes(b"weights")
        result = hand_over(interruption, at, host, steps, clock, watcher)
        assert holder.process.wait(10) == -9
    assert (result.killed, result.unmounted, history) == ((holder.process.pid,), True, ["snapshot", "detach"])
    beside = loops.mount_point("beside")
    host.mount(loops.attach(loops.folder / "copy"), beside)
    assert Path(beside, "step-1").read_bytes() == b"weights"
