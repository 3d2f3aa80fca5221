"""A process forked while its parent saves: it waits for nothing that is not there, and the parent's save is durable."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spotheal.training.checkpoint import Store

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")]
SECONDS_MAX = 30.0  # then a child hangs


class Held:
    """A store whose save waits before its commit until `go`."""

    def __init__(self, folder: Path) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.store = Store(folder, before_commit=self._wait)

    def _wait(self) -> None:
        self.began.set()
        self.go.wait(SECONDS_MAX)


def in_a_fork(act: Callable[[], Any]) -> Any:
    """What `act` returns in a forked process; fails where that does not end."""
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=lambda: answers.put(act()))
    child.start()
    child.join(SECONDS_MAX)
    hangs = child.is_alive()
    child.kill()
    child.join()
    assert not hangs and child.exitcode == 0, f"hangs: {hangs}, exit {child.exitcode}"
    return answers.get()


@pytest.fixture
def held(tmp_path: Path) -> Any:
    held = Held(tmp_path)
    held.store.save(1, {"weights": torch.arange(1000.0)})
    assert held.began.wait(SECONDS_MAX)
    yield held
    held.go.set()
    held.store.close()


ASKED: dict[str, Callable[[Store], Any]] = {
    "flush": lambda store: store.flush(),
    "close": lambda store: store.close(),
    "ended": lambda store: store.ended(),
    "busy": lambda store: store.busy or None,
    "wait_copied": lambda store: store.wait_copied(),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_forked_child_waits_for_no_save_of_its_parents(held: Held, name: str) -> None:
    assert in_a_fork(lambda: ASKED[name](held.store)) is None


def test_the_parents_save_is_durable_whatever_the_child_closed(held: Held) -> None:
    in_a_fork(held.store.close)
    held.go.set()
    outcome = held.store.flush()
    assert outcome is not None and outcome.fault is None
    assert outcome.path is not None and outcome.path.exists()


def test_a_child_says_that_the_save_is_its_parents(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> str:
        held.store.flush()
        held.store.flush()
        return "; ".join(record.getMessage() for record in caplog.records)

    said = in_a_fork(told)
    assert said.count(f"was forked from {os.getpid()}") == 1


def test_a_child_loads_and_saves_with_threads_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(1, {"weights": torch.arange(1000.0)})

    def child() -> tuple[int, float, int]:
        torch.set_num_threads(1)  # OpenMP's threads are not there either
        loaded = store.load()
        assert loaded is not None
        outcome = store.save_now(2, loaded.tree)
        return loaded.step, float(loaded.tree["weights"][999]), outcome.step

    assert in_a_fork(child) == (1, 999.0, 2)
    again = store.load()
    assert again is not None and again.step == 2
    store.close()
    if sys.platform == "linux":
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint")] == []
