"""The stand-in programs of a rehearsed machine answer as util-linux does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spotheal.agent.files.paths import Paths
from spotheal.agent.machine.host import Host
from spotheal.fleet.rehearsal import programs
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.machines.volumes import Volumes

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class World:
    def __init__(self, folder: Path) -> None:
        self.volumes = Volumes(folder / "cloud")
        self.machine = Machine(folder / "i-1", Launch("i-1", "z", "t", b"#!/bin/sh\n"))
        self.disk = self.volumes.create("vol-0123456789abcdef0", 1)
        self.device = self.machine.attach(self.disk)
        self.target = self.machine.root / "dltraining"
        self.target.mkdir()

    def run(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        path = f"{self.machine.folder / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, programs.INSTANCE_DIR: str(self.machine.folder)}
        words = [str(word) for word in argv]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False)

    def ok(self, *argv: str | Path) -> str:
        done = self.run(*argv)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def mounted(self) -> None:
        self.ok("mkfs.xfs", "-q", self.device)
        self.ok("mount", "-t", "xfs", self.device, self.target)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_lsblk_shows_the_root_disk_the_instance_store_and_the_volume_by_serial(world: World) -> None:
    rows = json.loads(world.ok("lsblk", "--json", "--bytes", "--output", "PATH,SERIAL,SIZE,FSTYPE,MOUNTPOINTS"))
    serials = {row["serial"]: row for row in rows["blockdevices"]}
    assert set(serials) == {"vol00000000000000001", "AWS00000000000000001", "vol0123456789abcdef0"}
    expected = {
        "path": world.device,
        "serial": "vol0123456789abcdef0",
        "size": 2**30,
        "fstype": None,
        "mountpoints": [None],
    }
    assert serials["vol0123456789abcdef0"] == expected
    assert serials["vol00000000000000001"]["children"][0]["mountpoints"] == ["/"]


def test_a_new_volume_reads_as_zeros_and_has_no_signature(world: World) -> None:
    with open(world.device, "rb") as device:
        assert device.read(2**20) == bytes(2**20)
    assert world.run("blkid", "-p", "-o", "value", "-s", "TYPE", world.device).returncode == 2


@pytest.mark.parametrize("fstype", ["xfs", "ext4"])
def test_a_filesystem_made_is_found_mounted_written_and_unmounted(world: World, fstype: str) -> None:
    world.ok(f"mkfs.{fstype}", "-q", world.device)
    assert world.ok("blkid", "-p", "-o", "value", "-s", "TYPE", world.device) == f"{fstype}\n"
    world.ok("mount", "-t", fstype, world.device, world.target)
    (world.target / "file").write_text("content")
    assert (world.disk.files / "file").read_text() == "content"
    found = json.loads(world.ok("findmnt", "--json", "--mountpoint", world.target))["filesystems"]
    assert [(entry["source"], entry["fstype"]) for entry in found] == [(world.device, fstype)]
    world.ok("umount", world.target)
    assert os.listdir(world.target) == []
    assert world.run("findmnt", "--json", "--mountpoint", world.target).returncode == 1


def test_a_second_mkfs_is_refused_where_a_filesystem_is(world: World) -> None:
    world.ok("mkfs.xfs", world.device)
    assert "existing filesystem" in world.run("mkfs.xfs", world.device).stderr


def test_a_blank_device_and_a_missing_mount_point_cannot_be_mounted(world: World) -> None:
    assert world.run("mount", world.device, world.target).returncode == 32
    world.ok("mkfs.xfs", world.device)
    assert "does not exist" in world.run("mount", world.device, f"{world.target}/none").stderr


def test_a_busy_filesystem_cannot_be_unmounted(world: World) -> None:
    world.mounted()
    with subprocess.Popen(["sleep", "60"], cwd=world.target) as holder:
        refused = world.run("umount", world.target)
        holder.kill()
    assert (refused.returncode, refused.stderr.strip()) == (32, f"umount: {world.target}: target is busy.")
    world.ok("umount", world.target)


def test_a_copy_of_a_mounted_xfs_needs_nouuid_beside_its_source(world: World, tmp_path: Path) -> None:
    world.mounted()
    world.volumes.snapshot("vol-0123456789abcdef0", "snap-1")
    copy = world.machine.attach(world.volumes.create("vol-0123456789abcdef1", 1, "snap-1"))
    beside = tmp_path / "beside"
    beside.mkdir()
    assert "duplicate UUID" in world.run("mount", "-t", "xfs", copy, beside).stderr
    world.ok("mount", "-t", "xfs", "-o", "nouuid", copy, beside)


def test_a_filesystem_is_frozen_once(world: World) -> None:
    world.mounted()
    world.ok("fsfreeze", "-f", world.target)
    assert world.run("fsfreeze", "-f", world.target).returncode == 1
    world.ok("fsfreeze", "-u", world.target)


def test_an_unknown_option_is_an_error_and_not_ignored(world: World) -> None:
    assert "unrecognized option" in world.run("umount", "--lazy", world.target).stderr


def test_the_agents_own_host_formats_mounts_and_unmounts_through_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{world.machine.folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv(programs.INSTANCE_DIR, str(world.machine.folder))
    host, target = Host(Paths(world.machine.root)), str(world.target)
    device = host.find_device("vol-0123456789abcdef0")
    assert device == world.device
    assert host.is_blank(device)
    host.make_filesystem(device, "xfs")
    assert not host.is_blank(device)
    host.mount(device, target, "xfs", volume="vol-0123456789abcdef0")
    host.mount(device, target, "xfs", volume="vol-0123456789abcdef0")
    assert (host.mounted_at(target), world.machine.has_mounted("vol-0123456789abcdef0")) == (device, True)
    with subprocess.Popen(["sleep", "60"], cwd=target) as holder:
        assert holder.pid in host.holders(target)
        assert not host.unmount(target)
        host.freeze(target)
        host.thaw(target)
        host.kill([holder.pid])
    host.sync(target)
    assert host.unmount(target)
    assert (host.mounted_at(target), world.machine.has_mounted("vol-0123456789abcdef0")) == (None, False)
