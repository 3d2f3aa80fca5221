"""EFS on an instance: mounted at one place, found to be that file system, and never waited for without end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from efs_world import FS, NAME, EfsApi, NfsHost, efs

from spotheal.agent.machine import efs as module
from spotheal.agent.machine.host import Host
from spotheal.agent.processes.programs import TimedOut
from spotheal.agent.protocol.errors import Fatal, Interrupted, Retryable
from spotheal.agent.protocol.names import EfsUrl, StoreUrl, parse_results
from spotheal.agent.record.results import OnEfs

TARGETS = (("us-west-2a", "10.0.0.5"), ("us-west-2b", "10.0.1.5"))


@pytest.fixture
def host(tmp_path: Path) -> NfsHost:
    (tmp_path / "export").mkdir()
    return NfsHost(tmp_path / "export")


# ----------------------------------------------------------------------------------------------------------- the place
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("efs://fs-0123456789abcdef0", EfsUrl("fs-0123456789abcdef0")),
        ("efs://fs-0123456789abcdef0/", EfsUrl("fs-0123456789abcdef0")),
        ("efs://fs-01234567/team/vision/", EfsUrl("fs-01234567", "team/vision")),
        ("s3://bucket/prefix", StoreUrl("bucket", "prefix")),
    ],
)
def test_a_place_for_results_is_s3_or_efs(text: str, place: object) -> None:
    found = parse_results(text)
    assert found == place
    assert parse_results(str(found)) == place


@pytest.mark.parametrize(
    "text",
    ["efs://fs-xyz", "efs://", "efs://fs-01234567/../etc", "efs://fs-01234567/a b", "nfs://host/path", "results"],
)
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/prefix|efs://fs-"):
        parse_results(text)


# ----------------------------------------------------------------------------------------------------------- the mount
def test_the_options_are_those_of_the_article_and_of_the_guide(tmp_path: Path, host: NfsHost) -> None:
    host.client_missing = True
    efs(tmp_path, host, EfsApi()).mount()
    assert host.mounts == [
        "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport,nosuid,nodev " + f"{NAME}:/"
    ]


@pytest.mark.parametrize(("for_trainer", "mode"), [(False, 0o700), (True, 0o755)])
def test_a_trainer_has_a_way_to_it_only_where_it_works_there(
    tmp_path: Path, host: NfsHost, for_trainer: bool, mode: int
) -> None:
    disk = efs(tmp_path, host, EfsApi(), for_trainer=for_trainer)
    disk.mount()
    assert stat.S_IMODE(disk.mount_point.parent.stat().st_mode) == mode


def test_mounted_already_is_success_also_for_another_life_of_the_agent(tmp_path: Path, host: NfsHost) -> None:
    assert efs(tmp_path, host, EfsApi()).mount() == efs(tmp_path, host, EfsApi()).mount()
    assert len(host.mounts) == 1


def test_without_dns_the_mount_target_of_this_zone_is_taken(tmp_path: Path, host: NfsHost) -> None:
    host.resolving = False
    efs(tmp_path, host, EfsApi(*TARGETS)).mount()
    efs(tmp_path, host, EfsApi(*TARGETS)).mount()
    assert (host.source, len(host.mounts)) == ("10.0.1.5:/", 1)


def test_without_a_target_in_this_zone_another_serves(tmp_path: Path, host: NfsHost) -> None:
    host.resolving = False
    efs(tmp_path, host, EfsApi(TARGETS[0])).mount()
    assert host.source == "10.0.0.5:/"


def test_another_file_system_at_the_place_is_taken_away(tmp_path: Path, host: NfsHost) -> None:
    host.mount_nfs("fs-0ffffffffffffffff.efs.us-west-2.amazonaws.com:/", str(tmp_path / module.MOUNT_POINT), "", 1)
    efs(tmp_path, host, EfsApi(*TARGETS)).mount()
    assert host.source == f"{NAME}:/"


def test_a_mount_that_fails_for_a_while_is_tried_again(tmp_path: Path, host: NfsHost) -> None:
    host.faults = [Retryable("mount.nfs4: Connection timed out")] * 3
    efs(tmp_path, host, EfsApi()).mount()
    assert host.source == f"{NAME}:/"


@pytest.mark.parametrize("fault", [TimedOut("`mount` had not ended after 60 s"), Retryable("Connection refused")])
def test_a_closed_port_ends_in_bounded_time_and_names_port_and_rule(
    tmp_path: Path, host: NfsHost, fault: Retryable
) -> None:
    host.resolving, host.faults = False, [fault] * 1000
    with pytest.raises(Retryable, match=r"port 2049 at 10\.0\.1\.5 \(mount target fsmt-1\)") as found:
        efs(tmp_path, host, EfsApi(*TARGETS)).mount(300)
    assert "--protocol tcp --port 2049" in found.value.next_step
    assert 10 < len(host.mounts) < 40


def test_a_file_system_that_is_not_there_is_no_matter_of_waiting(tmp_path: Path, host: NfsHost) -> None:
    host.resolving = False
    with pytest.raises(Fatal, match=f"no file system {FS}") as found:
        efs(tmp_path, host, EfsApi(missing=True)).mount()
    assert "fleetctl results create-efs" in found.value.next_step


def test_a_policy_that_forbids_the_mount_is_no_matter_of_waiting(tmp_path: Path, host: NfsHost) -> None:
    host.faults = [Retryable("mounting failed: mount.nfs4: access denied by server while mounting fs:/")]
    with pytest.raises(Fatal, match="refuses the mount"):
        efs(tmp_path, host, EfsApi()).mount()


def test_a_machine_that_goes_away_does_not_wait_for_a_mount(tmp_path: Path, host: NfsHost) -> None:
    gone = threading.Event()
    gone.set()
    host.faults = [Retryable("Connection timed out")] * 9
    with pytest.raises(Interrupted):
        efs(tmp_path, host, EfsApi(), stop=gone).mount()
    assert len(host.mounts) == 1


# ---------------------------------------------------------------------------------------------------- the NFS client
def _program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("installer", ["apt-get", "dnf", "yum"])
def test_the_nfs_client_is_installed_with_what_the_image_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    bin_ = tmp_path / "bin"
    client = f"{bin_}/mount.nfs4"
    install = f'echo "$@" >> {tmp_path}/said; case "$@" in *nfs-*) : > {client}; /bin/chmod +x {client};; esac'
    _program(bin_, installer, install)
    monkeypatch.setenv("PATH", str(bin_))
    monkeypatch.setattr("spotheal.agent.processes.programs.SYSTEM_FOLDERS", ())
    Host().install_nfs_client()
    assert ("nfs-common" if installer == "apt-get" else "nfs-utils") in (tmp_path / "said").read_text()


def test_a_package_that_cannot_be_fetched_is_worth_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "bin", "dnf", "echo 'Cannot download repomd.xml' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("spotheal.agent.processes.programs.SYSTEM_FOLDERS", ())
    with pytest.raises(Retryable, match=r"Cannot download repomd\.xml"):
        Host().install_nfs_client()


def test_an_image_that_installs_nothing_is_told_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("spotheal.agent.processes.programs.SYSTEM_FOLDERS", ())
    with pytest.raises(Fatal, match=r"mount\.nfs4 is not on this machine") as found:
        Host().install_nfs_client()
    assert "nfs-common" in found.value.next_step


# --------------------------------------------------------------------------------------------------------- its files
def test_the_runs_folder_is_made_below_the_place_and_nobody_elses(tmp_path: Path, host: NfsHost) -> None:
    disk = efs(tmp_path, host, EfsApi(), "team")
    folder = disk.folder("job", "run")
    assert folder == tmp_path / module.MOUNT_POINT / "team/job/run"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o770
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755
    assert disk.folder("job", "run") == folder


def test_files_are_copied_whole_with_their_sums(tmp_path: Path, host: NfsHost) -> None:
    disk = efs(tmp_path, host, EfsApi())
    folder = disk.folder("job", "run")
    bodies = {"model/a.bin": os.urandom(9 << 20), "empty": b"", "b.txt": b"text"}
    for name, body in bodies.items():
        (tmp_path / "volume" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "volume" / name).write_bytes(body)
    came = list(disk.put(["job", "run"], [(name, tmp_path / "volume" / name) for name in bodies]))
    assert [one.sha256 for one in came] == [hashlib.sha256(body).hexdigest() for body in bodies.values()]
    there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert there == bodies


def test_a_link_or_a_pipe_of_a_trainer_is_not_followed(tmp_path: Path, host: NfsHost) -> None:
    disk = efs(tmp_path, host, EfsApi())
    folder = disk.folder("job", "run")
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "good").write_text("good")
    came = list(disk.put(["job", "run"], [(name, tmp_path / name) for name in ("link", "pipe", "good")]))
    assert [bool(one.fault) for one in came] == [True, True, False]
    assert os.listdir(folder) == ["good"]


def test_a_link_that_a_trainer_put_on_the_file_system_is_not_followed(tmp_path: Path, host: NfsHost) -> None:
    """Where checkpoints lie there too, the run's folder is the trainer's, and the agent is root."""
    disk = efs(tmp_path, host, EfsApi())
    folder = disk.folder("job", "run")
    (tmp_path / "elsewhere").mkdir()
    (folder / "model").symlink_to(tmp_path / "elsewhere")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "elsewhere/metrics.jsonl")
    (tmp_path / "source").write_text("x")
    names = ("model/model.bin", "metrics.jsonl")
    came = [list(disk.put(["job", "run"], [(name, tmp_path / "source")])) for name in names]
    assert [bool(one.fault) for (one,) in came] == [True, False]
    assert os.listdir(tmp_path / "elsewhere") == [] and not (folder / "metrics.jsonl").is_symlink()
    with pytest.raises(Retryable):
        disk.folder("job", "run", "model", "deeper")


def test_a_killed_copy_leaves_the_file_that_was_there_and_no_other(tmp_path: Path, host: NfsHost) -> None:
    disk = efs(tmp_path, host, EfsApi())
    folder = disk.folder("job", "run")
    source = tmp_path / "model.bin"
    source.write_bytes(b"old")
    assert [one.fault for one in disk.put(["job", "run"], [("model.bin", source)])] == [""]
    source.write_bytes(bytes(64 << 20))
    argv = [sys.executable, "-I", "-S", str(module._FILES), "put"]
    program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None and program.stdout is not None
    order = {"top": str(folder), "folder": [], "files": [[str(source), "model.bin"]]}
    program.stdin.write(json.dumps(order).encode())
    program.stdin.close()
    program.stdout.readline()  # the first bytes are there
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    assert (folder / "model.bin").read_bytes() == b"old"
    source.write_bytes(b"new")
    assert [one.fault for one in disk.put(["job", "run"], [("model.bin", source)])] == [""]
    assert (os.listdir(folder), (folder / "model.bin").read_bytes()) == (["model.bin"], b"new")


def test_a_server_that_falls_silent_is_given_up(tmp_path: Path, host: NfsHost) -> None:
    silent = "import sys, time; sys.stdin.read(); print('{\"bytes\": 1}', flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", silent]
    began = time.monotonic()
    with pytest.raises(Retryable, match="taken nothing"):
        list(module._spoken(argv, "{}", 0.3))
    assert time.monotonic() - began < 30


def test_a_large_file_is_copied_no_further_when_the_machine_goes_away(tmp_path: Path, host: NfsHost) -> None:
    disk = efs(tmp_path, host, EfsApi())
    folder = disk.folder("job", "run")
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    asked: list[bool] = []

    def halt() -> str:
        asked.append((folder / "large").exists())
        return "this machine goes away" if len(asked) > 1 else ""

    with pytest.raises(Retryable, match="this machine goes away"):
        list(disk.put(["job", "run"], [("large", tmp_path / "large")], halt))
    assert asked == [False, False] and not (folder / "large").exists()
    stopped = list(OnEfs(disk, ["job", "run"], "", lambda: None).put([("large", tmp_path / "large")], halt))
    assert [(one.fault, one.again) for one in stopped] == [("this machine goes away", True)]


def test_a_full_file_system_is_worth_another_try(tmp_path: Path, host: NfsHost) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small file system is mounted by root")
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", full], check=True)
    try:
        host.export = full
        disk = efs(tmp_path, host, EfsApi())
        folder = disk.folder("job", "run")
        source = tmp_path / "model.bin"
        source.write_bytes(bytes(4 << 20))
        (came,) = disk.put(["job", "run"], [("model.bin", source)])
        assert (came.fault, came.again) == ("No space left on device", True)
        assert os.listdir(folder) == []
    finally:
        subprocess.run(["umount", full], check=True)
