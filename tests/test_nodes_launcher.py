"""Launchers of several machines on loopback addresses: one is killed, one joins, one gets a notice, the host goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotheal.agent import contract
from spotheal.agent.nodes.meeting import Rendezvous, Timing, free_port
from spotheal.agent.nodes.plan import Place

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.processes]
IMPORTS = Path(__file__).resolve().parent.parent / ".ci" / "import_path"
QUICK = Timing(join=30, last_call=1, keep_alive=1, missed=3, read=10)
SECONDS_MAX = 60.0
# A rank that needs no torch: it trains until it is told that all is over, and saves and stops at a notice.
RANK = """
import json, os, signal, sys, time

def told(*_):
    global leave
    leave = True

leave, limit = False, time.monotonic() + 180  # the tests that began it may have been killed
signal.signal(signal.SIGTERM, told)
folder, me = os.environ["TEST_FOLDER"], os.environ["TEST_MACHINE"]
world = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK")}
name = os.path.join(folder, f"{me}.json")
with open(name + ".tmp", "w") as file:
    json.dump({**world, "pid": os.getpid(), "host": os.environ["MASTER_ADDR"]}, file)
os.replace(name + ".tmp", name)
while not os.path.exists(os.path.join(folder, "over")):
    if leave or os.path.exists(os.environ["SPOTHEAL_NOTICE_FILE"]) or (
        world["WORLD_SIZE"] > 1 and os.path.exists(os.path.join(folder, "leave"))
    ):
        sys.exit(75)
    if os.path.exists(os.path.join(folder, "fail")) or time.monotonic() > limit:
        sys.exit(3)
    time.sleep(0.02)
"""


@dataclass
class Machines:
    """Each a launcher in a process group of its own; `worlds()` is what their ranks were told last."""

    folder: Path
    port: int
    running: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str, *, hosts: bool = False, least: int = 1) -> None:
        place = Place(1, "1", "127.0.0.1", self.port)
        where = Rendezvous("run", place, f"127.0.0.{name}", hosts, least, 3, QUICK)
        launcher = [sys.executable, "-m", "spotheal.training.launch", *where.options(), "--nproc_per_node=1"]
        environment = {
            **os.environ, "PYTHONPATH": str(IMPORTS), "TEST_FOLDER": str(self.folder), "TEST_MACHINE": name,
            contract.NOTICE_FILE: str(self.notice(name)), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [*launcher, "--no_python", sys.executable, str(self.folder / "rank.py")],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def notice(self, name: str) -> Path:
        return self.folder / f"notice-{name}.json"

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def worlds(self, *names: str) -> list[tuple[int, int]]:
        found = []
        for name in names:
            with suppress(OSError):
                world = json.loads((self.folder / f"{name}.json").read_text())
                alive = Path(f"/proc/{world['pid']}").exists()
                found.append((world["RANK"], world["WORLD_SIZE"]) if alive else (-1, -1))
        return sorted(found)

    def kill(self, name: str) -> None:
        """As a machine that vanishes: its ranks too, which torchrun gives sessions of their own."""
        os.kill(json.loads((self.folder / f"{name}.json").read_text())["pid"], signal.SIGKILL)
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running.pop(name).wait()
        (self.folder / f"{name}.json").unlink()

    def until(self, holds: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS_MAX
        while not holds():
            assert time.monotonic() < limit, {name: self.said(name)[-2000:] for name in self.running}
            time.sleep(0.05)

    def ends(self, name: str) -> int:
        return self.running.pop(name).wait(SECONDS_MAX)

    def close(self) -> None:
        (self.folder / "over").touch()
        for program in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "rank.py").write_text(RANK)
    made = Machines(tmp_path, free_port("127.0.0.1"), {})
    yield made
    made.close()


def test_machines_come_and_go_and_the_others_go_on(machines: Machines) -> None:
    """A kill, a replacement, a notice, and a program that fails: one rendezvous for all of it."""
    machines.start("1", hosts=True)
    machines.start("2")
    machines.until(lambda: machines.worlds("1", "2") == [(0, 2), (1, 2)])
    machines.kill("2")
    machines.until(lambda: machines.worlds("1") == [(0, 1)])
    assert "1 machine(s) of this world are gone" in machines.said("1")
    machines.start("3")
    machines.until(lambda: machines.worlds("1", "3") == [(0, 2), (1, 2)])
    assert "another machine joins" in machines.said("1")
    assert "world 2 = 2 machines x 1 process" in machines.said("3")
    machines.notice("3").write_text("{}")
    (machines.folder / "leave").touch()  # the ranks agree on a step, and all of them end there
    assert machines.ends("3") == contract.EXIT_SAVED_AND_STOPPED
    (machines.folder / "leave").unlink()
    machines.until(lambda: machines.worlds("1") == [(0, 1)])
    (machines.folder / "fail").touch()
    assert machines.ends("1") == 1
    assert "error: rank 0 ended with exit code 3; all machines of this world are there" in machines.said("1")


def test_a_host_that_goes_ends_the_rendezvous_and_is_no_failure(machines: Machines) -> None:
    machines.start("1", hosts=True)
    machines.start("2")
    machines.until(lambda: machines.worlds("1", "2") == [(0, 2), (1, 2)])
    machines.kill("1")
    assert machines.ends("2") == contract.EXIT_RANKS_LOST
    assert "the rendezvous at 127.0.0.1" in machines.said("2")


def test_a_rendezvous_that_cannot_be_reached_is_said_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    from spotheal.training import elastic

    place = Place(1, "1", "127.0.0.1", free_port("127.0.0.1"))
    options = Rendezvous("run", place, "127.0.0.1", False, 2, 3, Timing(read=1)).options()
    assert elastic.main([*options, "--nproc_per_node=1", "--no_python", "true"]) == contract.EXIT_RANKS_LOST
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ranks:")]
    assert len(said) == 1 and "cannot be reached" in said[0]
