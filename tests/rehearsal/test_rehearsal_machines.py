"""Machines of the rehearsal: processes that run user data, and end with nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotheal.fleet.rehearsal.machines.machines import Launch, Machine, Machines
from spotheal.fleet.rehearsal.machines.volumes import GIB, Volumes
from spotheal.fleet.rehearsal.programs.init import descendants
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

pytestmark = pytest.mark.processes


def eventually(fact: Callable[[], object], seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if fact():
            return True  # asked once: a moment later it may not hold any more
        time.sleep(0.02)
    return bool(fact())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    machines = Machines(tmp_path / "instances", boot_seconds=0.0)
    count = iter(range(1, 100))

    def start(user_data: str) -> Machine:
        machine = machines.launch(Launch(f"i-{next(count)}", "eu-west-1a", "m5.large", user_data.encode()))
        assert eventually(lambda: machine.started_at is not None)
        return machine

    yield start
    machines.close()


def test_user_data_runs_with_its_root_and_the_stand_ins_first(launch: Callable[[str], Machine]) -> None:
    machine = launch('#!/bin/sh\necho "$SPOTHEAL_ROOT"; command -v lsblk; echo "${SSH_AUTH_SOCK-clean}"; exit 3\n')
    assert eventually(lambda: machine.user_data_exit() is not None)
    assert machine.user_data_exit() == 3
    expected = [str(machine.root), str(machine.folder / "bin/lsblk"), "clean"]
    assert (machine.folder / "console.log").read_text().splitlines() == expected


def test_a_terminated_machine_leaves_no_process_not_even_one_in_its_own_session_with_an_empty_environment(
    launch: Callable[[str], Machine], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    machine = launch(
        f'#!/bin/sh\nfor n in 1 2 3; do env -i setsid sh -c \'trap "" TERM INT HUP; echo $$ >> {pids}; '
        "while :; do sleep 60; done' & done\nexit 0\n"
    )
    assert eventually(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    assert eventually(lambda: machine.user_data_exit() == 0)
    found = [int(pid) for pid in pids.read_text().split()]
    assert all(alive(pid) for pid in found)
    machine.end()
    assert [pid for pid in found if alive(pid)] == []
    assert machine.ended_at is not None


def test_no_process_outlives_a_rehearsal_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from spotheal.fleet.rehearsal.machines.machines import Launch, Machines
        machines = Machines(Path({str(tmp_path)!r}), 0.0)
        machines.launch(Launch("i-1", "z", "t", b"#!/bin/sh\\nenv -i setsid sleep 300 &\\nsleep 300\\n"))
        time.sleep(300)
        """
    )
    rehearsal = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ".ci/import_path"})
    try:
        first = tmp_path / "i-1/init.pid"
        assert eventually(lambda: first.exists() and first.read_text() and len(descendants(int(first.read_text()))) > 2)
        pids = [int(first.read_text()), *descendants(int(first.read_text()))]
    finally:
        rehearsal.kill()
        rehearsal.wait()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_orphans_end_with_the_machine_also_when_its_first_process_is_killed(
    launch: Callable[[str], Machine], tmp_path: Path
) -> None:
    machine = launch(f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path / 'pid'}\nwait\n")
    assert eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(int((machine.folder / "init.pid").read_text()), signal.SIGKILL)
    assert eventually(lambda: machine.ended_at is not None)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_shut_down_lets_the_agent_end_by_itself(launch: Callable[[str], Machine], tmp_path: Path) -> None:
    keeper = tmp_path / "bootstrap.py"
    keeper.write_text(f"#!/bin/sh\ntrap 'echo saved > {tmp_path / 'said'}; exit 0' TERM\nsleep 300 & wait\n")
    machine = launch(f"#!/bin/sh\nsh {keeper} keep & echo started; wait\n")
    assert eventually(lambda: "started" in (machine.folder / "console.log").read_text())
    time.sleep(0.2)  # the shell sets its trap
    machine.shut_down(seconds_max=1.0)
    assert (tmp_path / "said").read_text() == "saved\n"
    assert not machine.running


def test_a_machine_that_powers_itself_off_is_seen_to(launch: Callable[[str], Machine]) -> None:
    machine = launch("#!/bin/sh\nsleep 300 &\nsystemctl poweroff\nsleep 300\n")
    assert eventually(lambda: machine.ended_at is not None)
    assert machine.powered_off


def test_a_machine_that_was_ended_before_its_boot_never_boots(tmp_path: Path) -> None:
    machines = Machines(tmp_path, boot_seconds=0.05)
    machine = machines.launch(Launch("i-1", "z", "t", b"#!/bin/sh\ntouch booted\n"))
    machine.end()
    time.sleep(0.15)
    assert machine.started_at is None
    machines.close()


def test_a_snapshot_is_one_moment_of_a_volume_and_a_restored_one_may_be_larger(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path)
    disk = volumes.create("vol-1", 1)
    (disk.files / "checkpoint").write_text("step 10")
    volumes.snapshot("vol-1", "snap-1")
    (disk.files / "checkpoint").write_text("step 20")
    copy = volumes.create("vol-2", 2, "snap-1")
    assert (copy.files / "checkpoint").read_text() == "step 10"
    assert (disk.size_bytes, copy.size_bytes) == (GIB, 2 * GIB)
    assert copy.image.stat().st_blocks * 512 < GIB // 100  # still sparse
    volumes.delete_snapshot("snap-1")
    volumes.delete("vol-1")
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["vol-2"]


def test_an_attached_volume_appears_beside_the_machine_s_own_disks_and_goes_again(tmp_path: Path) -> None:
    disk = Volumes(tmp_path / "cloud").create("vol-0a", 1)
    machine = Machine(tmp_path / "i-1", Launch("i-1", "z", "t", b"#!/bin/sh\n"))
    path = machine.attach(disk)
    assert machine.attach(disk) == path
    assert os.path.getsize(path) == GIB
    serials = [row["serial"] for row in json.loads((machine.folder / "devices.json").read_text())["devices"]]
    assert serials[2:] == ["vol0a"]
    machine.detach("vol-0a")
    assert not os.path.lexists(path)


def test_no_time_passes_any_more_while_the_machines_of_a_cloud_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick of that time asks for a machine in place of one that was ended, and none can be launched any more."""
    ticking: list[str] = []
    monkeypatch.setattr(Machines, "close", lambda _: ticking.extend(one.name for one in threading.enumerate()))
    with Cloud(tmp_path, "us-west-2", ("us-west-2a",), seed=0):
        assert "time of the rehearsal" in {one.name for one in threading.enumerate()}
    assert ticking and "time of the rehearsal" not in ticking
