"""States, memory and filesystems at the edge: what is acknowledged can be loaded, and what cannot be is told."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training import checkpoint
from spotheal.training.checkpoint import Outcome, SaveFailed, Store
from spotheal.training.slotfile import format
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.packing import UnsavableState


def test_a_state_that_no_reader_would_take_is_not_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format ends at a header of 100 MB: eleven million numbers in a list are more."""
    monkeypatch.setattr(format, "HEADER_BYTES_MAX", 1_000_000)
    store = Store(tmp_path)
    store.save_now(1, {"ids": list(range(10))})
    with pytest.raises(SaveFailed, match=r"step 2 .* tensor"):
        store.save_now(2, {"ids": list(range(200_000))})
    loaded = store.load()
    assert loaded is not None and loaded.step == 1
    store.close()


class Wrapped(torch.Tensor):
    """As DTensor and torchao make theirs: a tensor around another, without memory of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return call(*(one.inner if isinstance(one, Wrapped) else one for one in given), **(named or {}))


@pytest.mark.parametrize("kind", ["wrapped", "meta"])
def test_a_tensor_without_memory_of_its_own_is_refused_by_name_and_ends_no_process(kind: str, tmp_path: Path) -> None:
    tensor = Wrapped(torch.ones(100)) if kind == "wrapped" else torch.ones(100, device="meta")
    store = Store(tmp_path)
    for call in (store.prepare, partial(store.save, 1)):
        with pytest.raises(UnsavableState, match="layer/weight"):
            call({"layer": {"weight": tensor}, "empty": torch.ones(0)})
    assert store.save_now(1, {"empty": torch.ones(0)}).path is not None
    store.close()


def test_a_save_without_memory_for_its_buffer_is_told_as_failed_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    told: list[Outcome] = []
    store = Store(tmp_path, on_end=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Image", no_memory)
        assert store.prepare({"x": torch.ones(3)}) > 0
        assert store.save(1, {"x": torch.ones(3)})
        store.wait_copied()
        outcome = store.flush()
    assert outcome is not None and outcome.fault is not None and "memory" in outcome.fault.message
    assert told == [outcome] and store.load() is None
    assert store.save_now(2, {"x": torch.ones(3)}).path is not None
    store.close()


def test_a_filesystem_that_refuses_direct_reads_only_when_they_are_made_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = Store(tmp_path), os.preadv
    store.save_now(1, {"x": torch.arange(9)})
    refused = []

    def preadv(fd: int, into: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, into, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    loaded = store.load()
    assert refused and loaded is not None and torch.equal(loaded.tree["x"], torch.arange(9))
    store.close()


def test_a_nesting_that_only_its_json_is_too_deep_for_is_refused_by_the_stores_own_error(tmp_path: Path) -> None:
    deep: Any = torch.ones(2)
    for _ in range(400):
        deep = {1: deep}
    store = Store(tmp_path)
    with pytest.raises(UnsavableState):
        store.save(1, {"x": deep})
    store.close()


def test_a_copy_that_fails_in_its_thread_holds_up_neither_the_step_nor_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer waited for the end of a copy that had none, and at the notice so did the final save."""

    def no_memory(*_: Any) -> int:
        raise MemoryError

    tensors = {"x": torch.ones(40_000), "y": torch.ones(40_000)}
    store = Store(tmp_path, chunk_bytes=1 << 17)
    outcomes: list[Outcome | None] = []

    def save() -> None:
        store.save(1, tensors, later=tensors.values())
        store.wait_copied()
        outcomes.append(store.flush())

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", no_memory)
        training = threading.Thread(target=save, daemon=True)
        training.start()
        training.join(30)
        assert not training.is_alive()
    assert outcomes and outcomes[0] is not None and outcomes[0].fault is not None
    assert "MemoryError" in outcomes[0].fault.message and store.load() is None
    assert store.save_now(2, tensors).path is not None
    store.close()


class Failing:
    """A pool whose submit raises after `allowed` calls, as threading does at the limit of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        self.left, real = allowed, threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith("checkpoint"):
                if not self.left:
                    raise RuntimeError("can't start new thread")
                self.left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_without_threads_no_save_is_acknowledged_that_is_not_and_nothing_waits_for_ever(
    allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 3 of 4 a save was acknowledged whose last chunks nobody had waited for; at 1 and 0 the training hung."""
    tree = {"x": torch.arange(400_000.0)}
    store = Store(tmp_path, chunk_bytes=1 << 17)
    with monkeypatch.context() as patch:
        Failing(patch, allowed)
        assert store.save(1, tree, later=[tree["x"]])
        store.wait_copied()
        outcome = store.flush()
        assert outcome is not None and outcome.fault is not None and "thread" in outcome.fault.message
        assert store.load() is None
    assert store.save_now(2, tree).path is not None
    with monkeypatch.context() as patch:
        Failing(patch, allowed)
        other = Store(tmp_path)
        loaded = other.load()
        assert loaded is not None and torch.equal(loaded.tree["x"], tree["x"])
        other.close()
    store.close()


def test_a_closed_store_says_so_and_the_next_step_does_not_wait(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(1, {"x": torch.ones(3)})
    store.close()
    with pytest.raises(SpothealError, match="closed"):
        store.save(2, {"x": torch.ones(3)})
    store.wait_copied()
    with pytest.raises(SpothealError, match="closed"):
        store.load()
    with pytest.raises(SpothealError, match="closed"):
        store.load_best()


AT_EXIT = """
import atexit, sys, torch
from spotheal.training.checkpoint import Store
store, tree = Store(sys.argv[1], chunk_bytes=1 << 17), {"x": torch.arange(100_000)}
store.save_now(1, tree)

def ending(store):
    store.save(2, tree)
    print(store.flush().fault)
    print(store.load().step, torch.equal(store.load().tree["x"], tree["x"]))

atexit.register(lambda: ending(Store(sys.argv[1])))
atexit.register(lambda: ending(store))
"""


def test_what_a_handler_of_atexit_asks_for_is_answered(tmp_path: Path) -> None:
    """The interpreter ends its threads before its handlers: a save says so, a load goes on without."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and lines[2::3] == ["1 True", "1 True"], done.stdout
    assert all("no checkpoint can be saved: there is no thread" in line for line in lines[::3])
    assert all("not in a handler of `atexit`" in line for line in lines[1::3])


def test_a_failed_save_says_what_is_left_and_how_much_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tree = Store(tmp_path), {"x": torch.ones(1_000_000)}
    monkeypatch.setattr(Files, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
    with pytest.raises(SaveFailed) as first:
        store.save_now(1, tree)
    assert first.value.next_step.startswith("there is none before it; a save takes 4 MB: ")
    monkeypatch.undo()
    store.save_now(1, tree)
    monkeypatch.setattr(Files, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
    with pytest.raises(SaveFailed) as second:
        store.save_now(2, tree)
    assert second.value.next_step.startswith("step-000000001.safetensors and those before it are intact; ")
    store.close()


def test_a_failure_before_the_commit_leaves_no_copy_running_beside_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(400_000)
    go_on, failing = threading.Event(), [True]

    def before_commit() -> None:
        if failing.pop():
            raise SpothealError("the metrics cannot be written")

    real = checkpoint.Copy.run

    def run(copy: Any, threads: Any = None) -> None:
        go_on.wait(20)
        real(copy, threads)

    store = Store(tmp_path, chunk_bytes=1 << 17, before_commit=before_commit)
    monkeypatch.setattr(checkpoint.Copy, "run", run)
    assert store.save(1, {"x": tensor}, later=[tensor])
    assert store.busy and not store.save(2, {"x": tensor})  # the copy goes on: the buffer is not free
    go_on.set()
    outcome = store.flush()
    assert outcome is not None and outcome.fault is not None and "metrics" in outcome.fault.message
    store.close()


def test_all_broken_is_said_to_be_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    path = store.save_now(1, {"x": torch.ones(3)}).path
    assert path is not None
    os.truncate(path, 3000)
    assert store.load() is None
    assert "no valid checkpoint is left" in caplog.text
    store.close()
