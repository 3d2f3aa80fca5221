"""Launchers of several machines on loopback addresses: one is killed, one joins, one gets a notice, the host goes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import pytest

from spotheal.agent.nodes.meeting import Rendezvous, Timing, free_port
from spotheal.agent.nodes.plan import Place
from spotheal.agent.protocol import contract

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.processes]
QUICK = Timing(join=30, last_call=1, keep_alive=1, missed=6, read=10)
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


def launch(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """What `python -m spotheal.training.launch` does."""
    os.setsid()
    os.environ.update(environment)
    said = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    from spotheal.training.launch import main

    sys.exit(main(arguments))


@dataclass
class Machines:
    """Each a launcher in a process group of its own; `worlds()` is what their ranks were told last."""

    folder: Path
    port: int
    running: dict[str, BaseProcess]

    def start(self, name: str, *, hosts: bool = False, least: int = 1) -> None:
        place = Place(1, "1", "127.0.0.1", self.port)
        where = Rendezvous("run", place, f"127.0.0.{name}", hosts, least, 3, QUICK)
        program = ["--nproc_per_node=1", "--no_python", sys.executable, str(self.folder / "rank.py")]
        environment = {"TEST_FOLDER": str(self.folder), "TEST_MACHINE": name, "OMP_NUM_THREADS": "1",
                       contract.NOTICE_FILE: str(self.notice(name))}  # fmt: skip
        log = self.folder / f"{name}.log"
        log.touch()
        given = ([*where.options(), *program], environment, log)
        process = forked.context().Process(target=launch, args=given)
        process.start()
        self.running[name] = process

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
        self._end(self.running.pop(name))
        (self.folder / f"{name}.json").unlink()

    def until(self, holds: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS_MAX
        while not holds():
            assert time.monotonic() < limit, {name: self.said(name)[-2000:] for name in self.running}
            time.sleep(0.05)

    def ends(self, name: str) -> int | None:
        program = self.running[name]
        program.join(SECONDS_MAX)
        assert not program.is_alive(), self.said(name)[-2000:]
        return self.running.pop(name).exitcode

    def close(self) -> None:
        (self.folder / "over").touch()
        for program in self.running.values():
            self._end(program)

    def _end(self, program: BaseProcess) -> None:
        assert program.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.kill()
        program.join()


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
