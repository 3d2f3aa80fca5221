"""The host with programs that a test writes: missing, hanging, old, failing. No root is needed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.files.paths import Paths
from spotheal.agent.machine.host import Host
from spotheal.agent.machine.mount_holders import holders, kill
from spotheal.agent.processes import programs
from spotheal.agent.protocol.errors import Conflict, Fatal, Retryable

Write = Callable[[str, str], None]
SERIAL = "vol0123456789abcdef0"
VOLUME = "vol-0123456789abcdef0"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`program(name, script)`: all that this machine has beside the shell's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", ())

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(Paths(tmp_path / "root"), by_id=tmp_path / "by-id", sys_block=tmp_path / "sys")


def lsblk(*devices: tuple[str, str], **more: object) -> str:
    rows = [{"name": path[5:], "path": path, "serial": serial, "size": 1, **more} for path, serial in devices]
    return f"echo '{json.dumps({'blockdevices': rows})}'"


def findmnt(source: str, options: str = "rw,nosuid") -> str:
    return f"echo '{json.dumps({'filesystems': [{'source': source, 'target': '/m', 'options': options}]})}'"


# ------------------------------------------------------------------------------------------------ running programs
@pytest.mark.parametrize("name, package", [("mkfs.xfs", "xfsprogs"), ("lsblk", "util-linux"), ("git", "git")])
def test_a_missing_program_is_named_with_its_package(program: Write, name: str, package: str) -> None:
    with pytest.raises(Fatal, match=name) as caught:
        programs.run([name], seconds_max=1)
    assert f"apt-get install {package}" in caught.value.next_step and "dnf install" in caught.value.next_step


def test_a_program_in_the_working_directory_is_not_run(
    program: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("lsblk", "exit 0")
    monkeypatch.chdir(tmp_path / "bin")
    for path in ("", ".", "::", "bin"):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(Fatal):
            programs.find("lsblk")


def test_a_program_that_hangs_is_ended(program: Write) -> None:
    program("sync", "exec /bin/sleep 60")
    began = time.monotonic()
    with pytest.raises(programs.TimedOut, match="had not ended after"):
        programs.run(["sync", "-f", "/m"], seconds_max=0.2)
    assert time.monotonic() - began < 10


def test_a_program_stands_in_the_root_folder_and_speaks_english(program: Write) -> None:
    program("lsblk", 'echo "$PWD $LC_ALL"; cat')
    assert programs.run(["lsblk"], seconds_max=5).out == "/ C\n"


def test_arguments_are_passed_without_a_shell(program: Write) -> None:
    program("umount", 'printf "%s|" "$@"')
    assert programs.run(["umount", "/a b; reboot", "$(id)"], seconds_max=5).out == "/a b; reboot|$(id)|"


# -------------------------------------------------------------------------------------------------------- devices
def test_a_device_is_found_and_lost_with_its_serial(program: Write, host: Host) -> None:
    program("lsblk", lsblk(("/dev/nvme0n1", "vol0aaaaaaaaaaaaaaaa"), ("/dev/nvme1n1", SERIAL)))
    assert host.find_device(VOLUME) == "/dev/nvme1n1"
    program("lsblk", lsblk(("/dev/nvme0n1", "vol0aaaaaaaaaaaaaaaa"), ("/dev/nvme1n1", "AWS6AF4B6C2CC20D3A1F")))
    assert host.find_device(VOLUME) is None


def test_udev_links_are_followed(program: Write, host: Host, tmp_path: Path) -> None:
    (tmp_path / "by-id").mkdir()
    (tmp_path / "by-id" / f"nvme-Amazon_Elastic_Block_Store_{SERIAL}").symlink_to("/dev/nvme7n1")
    (tmp_path / "by-id" / "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS6A").symlink_to("/dev/nvme1n1")
    program("lsblk", lsblk(("/dev/nvme1n1", ""), ("/dev/nvme7n1", "")))
    assert host.find_device(VOLUME) == "/dev/nvme7n1"


def test_a_serial_that_udev_has_not_told_yet_is_read_from_the_kernel(
    program: Write, host: Host, tmp_path: Path
) -> None:
    program("lsblk", lsblk(("/dev/nvme1n1", ""), ("/dev/nvme2n1", "")))
    for name, serial in (("nvme1n1", "AWS6AF4B6C2CC20D3A1F"), ("nvme2n1", f"{SERIAL}\n")):
        (tmp_path / "sys" / name / "device").mkdir(parents=True)
        (tmp_path / "sys" / name / "device" / "serial").write_text(serial)
    (tmp_path / "by-id").mkdir()
    (tmp_path / "by-id" / f"nvme-Amazon_Elastic_Block_Store_{SERIAL}").symlink_to("/dev/nvme1n1")
    assert host.find_device(VOLUME) == "/dev/nvme2n1"


def test_an_lsblk_that_knows_no_mountpoints_is_asked_for_less(program: Write, host: Host) -> None:
    old = lsblk(("/dev/nvme1n1", SERIAL), mountpoint="/dltraining")
    program("lsblk", f'case "$*" in *MOUNTPOINTS*) echo "lsblk: unknown column: MOUNTPOINTS" >&2; exit 1;; esac; {old}')
    assert host.devices()[0].mountpoints == ("/dltraining",)


def test_an_lsblk_that_fails_is_retryable(program: Write, host: Host) -> None:
    program("lsblk", "echo 'lsblk: failed to access sysfs directory' >&2; exit 1")
    with pytest.raises(Retryable, match="failed to access sysfs"):
        host.devices()


# ------------------------------------------------------------------------------------------------------ is it blank
@pytest.fixture
def device(program: Write, tmp_path: Path) -> Path:
    """A file that stands for a device of 5 MiB without a signature."""
    path = tmp_path / "nvme1n1"
    path.write_bytes(bytes(5 * 2**20))
    program("lsblk", lsblk((str(path), SERIAL)))
    program("blkid", "exit 2")
    program("mkfs.xfs", f"echo formatted > {tmp_path}/mkfs")
    program("mkfs.ext4", f"echo formatted > {tmp_path}/mkfs")
    return path


def test_zeroes_without_a_signature_are_blank_and_are_formatted(host: Host, device: Path, tmp_path: Path) -> None:
    assert host.is_blank(str(device))
    host.make_filesystem(str(device), "xfs")
    assert (tmp_path / "mkfs").exists()


@pytest.mark.parametrize("at", [0, 511, 2**20 - 1, 4 * 2**20, 5 * 2**20 - 1])
def test_one_byte_in_the_first_or_last_mib_is_not_blank(host: Host, device: Path, tmp_path: Path, at: int) -> None:
    with device.open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")
    assert_not_formatted(host, device, tmp_path)


@pytest.mark.parametrize("blkid", ["echo TYPE=ext4", "echo PTTYPE=gpt", "echo USAGE=raid"])
def test_a_signature_is_not_blank(program: Write, host: Host, device: Path, tmp_path: Path, blkid: str) -> None:
    program("blkid", blkid)
    assert_not_formatted(host, device, tmp_path)


@pytest.mark.parametrize("blkid", ["exit 8", "echo 'error: No such file' >&2; exit 2", "exit 4"])
def test_where_blkid_is_not_sure_nothing_is_formatted(
    program: Write, host: Host, device: Path, tmp_path: Path, blkid: str
) -> None:
    program("blkid", blkid)
    with pytest.raises((Fatal, Retryable)):
        host.make_filesystem(str(device), "xfs")
    assert not (tmp_path / "mkfs").exists()


@pytest.mark.parametrize("more", [{"children": [{"name": "p1"}]}, {"mountpoints": ["/data"]}, {"fstype": "swap"}])
def test_what_lsblk_shows_in_use_is_not_blank(
    program: Write, host: Host, device: Path, tmp_path: Path, more: dict[str, object]
) -> None:
    program("lsblk", lsblk((str(device), SERIAL), **more))
    assert_not_formatted(host, device, tmp_path)


def test_a_device_that_lsblk_does_not_show_or_that_is_empty_is_not_blank(
    program: Write, host: Host, device: Path, tmp_path: Path
) -> None:
    program("lsblk", lsblk())
    assert_not_formatted(host, device, tmp_path)
    program("lsblk", lsblk((str(device), SERIAL)))
    device.write_bytes(b"")
    assert_not_formatted(host, device, tmp_path)


@pytest.mark.parametrize("fstype", ["", "btrfs", "vfat", "xfs -f"])
def test_only_filesystems_we_know_are_made(host: Host, device: Path, tmp_path: Path, fstype: str) -> None:
    with pytest.raises(Fatal, match="no filesystem we make"):
        host.make_filesystem(str(device), fstype)
    assert not (tmp_path / "mkfs").exists()


def answer(says: dict[str, programs.Result], ran: list[str], argv: list[str], *, seconds_max: float) -> programs.Result:
    ran.append(argv[0])
    return says.get(argv[0], programs.Result(0, "", ""))


def test_in_a_thousand_layouts_nothing_but_a_blank_device_is_formatted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    """What lsblk and blkid say and where the bytes are is made up by chance."""
    device, formatted = tmp_path / "nvme1n1", 0
    for seed in range(1000):
        rng = random.Random(seed)
        size = rng.choice([0, 4096, 2**20, 2**20 + 512, 3 * 2**20])
        with device.open("wb") as file:
            file.truncate(size)
        at = rng.choice([None, rng.randrange(max(1, size))])
        if at is not None and size:
            with device.open("r+b") as disk:
                disk.seek(at)
                disk.write(bytes([rng.randrange(1, 256)]))
        uses: list[dict[str, Any]] = [{"children": [{"name": "p1"}]}, {"fstype": "xfs"}, {"mountpoint": "/x"}]
        more = rng.choice([{}, {}, {}, {}, *uses])
        listed = rng.random() < 0.95
        rows = [{"name": "x", "path": str(device), "serial": SERIAL, "size": size, **more}] if listed else []
        blkid = rng.choice([(2, "", "")] * 5 + [(0, "TYPE=xfs", ""), (0, "PTTYPE=gpt", ""), (0, "", ""), (8, "", ""),
                                                (2, "", "error"), (4, "", "usage")])  # fmt: skip
        says = {"lsblk": programs.Result(0, json.dumps({"blockdevices": rows}), ""), "blkid": programs.Result(*blkid)}
        ran: list[str] = []

        monkeypatch.setattr(programs, "run", partial(answer, says, ran))
        monkeypatch.setattr(programs, "find", lambda name: name)
        clean = at is None or 2**20 <= at < size - 2**20
        blank = bool(size and clean and not more and listed and blkid == (2, "", ""))
        with contextlib.suppress(Fatal, Retryable):
            host.make_filesystem(str(device), "xfs")
        assert ("mkfs.xfs" in ran) == blank, f"seed {seed}: {size} {at} {more} {listed} {blkid}"
        formatted += blank
    assert formatted > 50


@pytest.mark.parametrize(("fstype", "force"), [("xfs", "-f"), ("ext4", "-F")])
@pytest.mark.parametrize("signature", ["exit 2", "echo TYPE=xfs", "echo TYPE=ext4"])
def test_what_an_unfinished_mkfs_left_is_formatted_over(
    program: Write, host: Host, device: Path, tmp_path: Path, fstype: str, force: str, signature: str
) -> None:
    program("blkid", signature)
    program(f"mkfs.{fstype}", f'echo "$@" > {tmp_path}/mkfs')
    device.write_bytes(b"\x01" * 5 * 2**20)
    host.make_filesystem(str(device), fstype, again=True)
    assert (tmp_path / "mkfs").read_text() == f"-q {force} {device}\n"


@pytest.mark.parametrize("blkid", ["echo TYPE=btrfs", "echo PTTYPE=gpt", "echo USAGE=raid", "exit 8", "exit 4"])
def test_a_foreign_signature_is_not_formatted_over(
    program: Write, host: Host, device: Path, tmp_path: Path, blkid: str
) -> None:
    program("blkid", blkid)
    with pytest.raises((Fatal, Retryable)):
        host.make_filesystem(str(device), "xfs", again=True)
    assert not (tmp_path / "mkfs").exists()


@pytest.mark.parametrize("more", [{"children": [{"name": "p1"}]}, {"mountpoints": ["/data"]}, {"fstype": "swap"}])
def test_what_lsblk_shows_in_use_is_not_formatted_over(
    program: Write, host: Host, device: Path, tmp_path: Path, more: dict[str, object]
) -> None:
    program("lsblk", lsblk((str(device), SERIAL), **more))
    with pytest.raises(Fatal, match="not blank"):
        host.make_filesystem(str(device), "xfs", again=True)
    assert not (tmp_path / "mkfs").exists()


def assert_not_formatted(host: Host, device: Path, tmp_path: Path) -> None:
    assert not host.is_blank(str(device))
    with pytest.raises(Fatal, match="not blank"):
        host.make_filesystem(str(device), "ext4")
    assert not (tmp_path / "mkfs").exists()


# ---------------------------------------------------------------------------------------------------------- mounts
def test_the_serial_is_looked_at_again_before_the_mount(
    program: Write, host: Host, device: Path, tmp_path: Path
) -> None:
    program("blkid", "echo TYPE=xfs")
    program("mount", f"echo yes > {tmp_path}/mounted")
    program("findmnt", "exit 1")
    program("lsblk", lsblk((str(device), "AWS6AF4B6C2CC20D3A1F")))
    with pytest.raises(Retryable, match="is not vol-0123456789abcdef0"):
        host.mount(str(device), str(tmp_path / "m"), "xfs", volume=VOLUME)
    assert not (tmp_path / "mounted").exists()


@pytest.mark.parametrize("fstype, options", [("xfs", "nosuid,nodev,noatime,nouuid"), ("ext4", "nosuid,nodev,noatime")])
def test_a_mount_allows_no_setuid_and_no_devices(
    program: Write, host: Host, device: Path, tmp_path: Path, fstype: str, options: str
) -> None:
    program("blkid", f"echo TYPE={fstype}")
    program("mount", f'echo "$@" > {tmp_path}/mounted')
    program("findmnt", f"test -e {tmp_path}/mounted || exit 1; {findmnt(str(device))}")
    host.mount(str(device), str(tmp_path / "m"), "xfs", volume=VOLUME)
    assert (tmp_path / "mounted").read_text().split() == ["-t", fstype, "-o", options, str(device), str(tmp_path / "m")]


def test_mounted_already_is_success_and_another_device_there_is_a_conflict(
    program: Write, host: Host, device: Path, tmp_path: Path
) -> None:
    program("mount", "exit 1")
    program("fsfreeze", "echo 'unfreeze failed: Invalid argument' >&2; exit 1")
    program("findmnt", findmnt(str(device)))
    host.mount(str(device), str(tmp_path / "m"))
    program("findmnt", findmnt("/dev/nvme9n1"))
    with pytest.raises(Conflict, match="/dev/nvme9n1 is mounted"):
        host.mount(str(device), str(tmp_path / "m"))


def test_a_mount_that_ends_read_only_is_undone_and_told(
    program: Write, host: Host, device: Path, tmp_path: Path
) -> None:
    program("blkid", "echo TYPE=xfs")
    program("mount", f"echo yes > {tmp_path}/mounted; echo 'WARNING: source write-protected, mounted read-only.' >&2")
    program("umount", f"rm {tmp_path}/mounted")
    (tmp_path / "bin" / "rm").symlink_to("/bin/rm")
    program("findmnt", f"test -e {tmp_path}/mounted || exit 1; {findmnt(str(device), 'ro,nosuid')}")
    with pytest.raises(Fatal, match="read-only"):
        host.mount(str(device), str(tmp_path / "m"))
    assert not (tmp_path / "mounted").exists()


@pytest.mark.parametrize("found, said", [("", "no filesystem"), ("ntfs", "ntfs")])
def test_a_filesystem_that_is_not_ours_is_not_mounted(
    program: Write, host: Host, device: Path, tmp_path: Path, found: str, said: str
) -> None:
    program("blkid", f"echo TYPE={found}" if found else "exit 2")
    program("findmnt", "exit 1")
    with pytest.raises(Fatal, match=f"holds {said}"):
        host.mount(str(device), str(tmp_path / "m"), "xfs")


def test_an_unmount_that_fails_otherwise_than_busy_is_told(program: Write, host: Host) -> None:
    program("findmnt", findmnt("/dev/nvme1n1"))
    program("umount", "echo 'umount: /m: must be superuser to unmount.' >&2; exit 32")
    with pytest.raises(Retryable, match="superuser"):
        host.unmount("/m")
    program("umount", "echo 'umount: /m: target is busy.' >&2; exit 32")
    assert host.unmount("/m") is False


def test_the_root_filesystem_is_never_frozen(program: Write, host: Host, tmp_path: Path) -> None:
    """fsfreeze freezes the filesystem of any folder it is given, also of one where nothing is mounted any more."""
    (tmp_path / "m").mkdir()
    program("fsfreeze", f"echo frozen > {tmp_path}/frozen")
    program("sync", f"echo synced > {tmp_path}/synced")
    program("findmnt", "exit 1")
    for do in (host.freeze, host.sync):
        with pytest.raises(Retryable, match="nothing is mounted"):
            do(str(tmp_path / "m"))
    with pytest.raises(Retryable, match="cannot be opened"):
        host.freeze(str(tmp_path / "gone"))
    assert not (tmp_path / "frozen").exists() and not (tmp_path / "synced").exists()
    program("findmnt", findmnt("/dev/nvme1n1"))
    host.freeze(str(tmp_path / "m"))
    assert (tmp_path / "frozen").exists()


# --------------------------------------------------------------------------------------------------------- holders
@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a file below `tmp_path`/m open."""
    (tmp_path / "m").mkdir()
    code = "import sys; f = open(sys.argv[1], 'w'); print(1, flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", code, str(tmp_path / "m" / "log")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_who_has_a_file_open_is_found_through_a_link_too(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "m")
    assert holders(str(tmp_path / "link")) == (holder.pid,)
    assert kill(holders(str(tmp_path / "link"))) == (holder.pid,)
    assert holder.wait(5) == -9


def test_who_works_below_and_who_maps_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "m" / "deep").mkdir(parents=True)
    (tmp_path / "m" / "data").write_bytes(bytes(4096))
    code = ("import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()\n"
            "print(1, flush=True); sys.stdin.read()")  # fmt: skip
    arguments = [[sys.executable, "-c", code, str(tmp_path / "m" / "data")], ["/bin/sleep", "60"]]
    for argv, folder in zip(arguments, ["/", str(tmp_path / "m" / "deep")], strict=True):
        with subprocess.Popen(argv, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            if folder == "/":
                assert process.stdout is not None
                process.stdout.readline()
            assert process.pid in holders(str(tmp_path / "m"))
            process.kill()


def test_a_neighbour_with_a_longer_name_is_no_holder(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "mm").mkdir()
    os.rename(tmp_path / "m", tmp_path / "mount")
    (tmp_path / "m").mkdir()
    assert holders(str(tmp_path / "m")) == () and holders(str(tmp_path / "moun")) == ()


def test_we_our_parents_and_process_one_are_never_killed() -> None:
    assert kill([0, 1, os.getpid(), os.getppid()]) == ()


# ----------------------------------------------------------------------------------------------------------- power
def test_somebodys_desk_is_not_switched_off(
    program: Write, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("shutdown", f'echo "$@" > {tmp_path}/off')
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path / "bin"),))
    with pytest.raises(Fatal, match="not the agent's"):
        host.power_off()
    assert not (tmp_path / "off").exists()


def test_our_own_machine_is_switched_off(program: Write, tmp_path: Path) -> None:
    program("shutdown", f'echo "$@" > {tmp_path}/off')
    Host(Paths(Path("/")), by_id=tmp_path).power_off()
    assert (tmp_path / "off").read_text() == "-h now\n"
