"""What a Ctrl-C, another process, or a limit of this one may not do: lose a save, break one, or condemn a good file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training import checkpoint
from spotheal.training.checkpoint import Loaded, Outcome, SaveFailed, Store
from spotheal.training.slotfile import slots
from spotheal.training.slotfile.copying import Copy
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.format import BrokenCheckpoint
from spotheal.training.slotfile.outcome import LoadFailed
from spotheal.training.slotfile.slots import alone_in
from spotheal.training.slotfile.workers import Workers


def tree(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((300_000,), float(value))}


def loaded_by(store: Store) -> Loaded:
    loaded = store.load()
    assert loaded is not None
    return loaded


def content(path: Path) -> tuple[int, float | None]:
    """The step in the file, and the value that all its numbers have; None where they differ."""
    header, image = slots.read(path)
    (numbers,) = [one for one in image.tensors(header.layout, header.data_at).values() if one.dtype == torch.float32]
    return header.step, float(numbers[0]) if bool((numbers == numbers[0]).all()) else None


def interrupted(call: Callable[[], object]) -> None:
    """`call` waits; a signal's handler raises KeyboardInterrupt there."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("wait", ["flush", "save_now", "close"])
def test_after_a_ctrl_c_while_a_save_is_waited_for_no_other_shares_its_buffer(wait: str, tmp_path: Path) -> None:
    go_on, ends = threading.Event(), list[Outcome]()
    store = Store(tmp_path, on_end=ends.append, before_commit=lambda: None if not held else held_up())
    held: list[bool] = []

    def held_up() -> None:
        held.clear()
        assert go_on.wait(60)

    store.save_now(1, tree(1))
    held.append(True)
    if wait == "save_now":
        interrupted(lambda: store.save_now(2, tree(2)))
    else:
        assert store.save(2, tree(2))
        if wait == "close":  # waits for its threads all the same: they may not be left at work
            threading.Timer(0.5, go_on.set).start()
        interrupted(getattr(store, wait))
    if wait != "close":
        assert store.busy and not store.save(3, tree(3))
        go_on.set()
        assert store.save_now(3, tree(3)).path is not None
        assert loaded_by(store).step == 3
        store.close()
    assert [outcome.fault for outcome in ends] == [None] * len(ends)
    for step, path in Store(tmp_path).slots.found():
        assert content(path) == (step, float(step))


def test_after_a_ctrl_c_in_prepare_the_next_save_has_a_buffer_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, went_on, copied, real, runs = *(threading.Event() for _ in range(3)), Copy.run, list[Copy]()

    def run(copy: Copy, *threads: Any) -> None:
        runs.append(copy)
        if copy is runs[0]:
            go_on.wait(60)
        real(copy, *threads)
        (went_on if copy is runs[0] else copied).set()

    def before_commit() -> None:  # all is copied and summed up; now the one that was interrupted goes on
        copied.wait(60)
        go_on.set()
        went_on.wait(60)

    monkeypatch.setattr(Copy, "run", run)
    store = Store(tmp_path, before_commit=before_commit)
    interrupted(lambda: store.prepare(tree(-1)))
    path = store.save_now(1, tree(1)).path
    assert path is not None and content(path) == (1, 1.0)
    store.close()


def test_after_a_ctrl_c_while_threads_are_started_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[threading.Barrier]()
    real = threading.Barrier.wait

    def wait(self: threading.Barrier, timeout: float | None = None) -> int:
        if threading.current_thread() is threading.main_thread():
            made.append(self)
            raise KeyboardInterrupt
        return real(self, timeout)

    workers = Workers(4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Barrier, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            workers.start()
    assert made[0].broken  # those that wait in it go on, and end
    assert workers.start().submit(lambda: 3).result(30) == 3
    workers.end()


def test_a_step_whose_file_no_scan_would_find_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="999999999999999999"):
        store.save(10**18, tree(1))
    assert store.save_now(10**18 - 1, tree(1)).path is not None
    assert loaded_by(store).step == 10**18 - 1
    store.close()


def test_a_step_older_than_what_lies_there_is_no_checkpoint(tmp_path: Path) -> None:
    """It would be acknowledged, written over by the next one, and never be loaded."""
    store = Store(tmp_path)
    store.save_now(300, tree(1))
    store.close()
    fresh = Store(tmp_path)
    with pytest.raises(SaveFailed, match="a load would take step 300") as refused:
        fresh.save_now(1, tree(2))
    assert "folder of its own" in refused.value.next_step
    assert fresh.save_now(300, tree(3)).path is not None
    assert float(loaded_by(fresh).tree["x"][0]) == 3.0
    fresh.close()


def test_a_store_may_save_behind_its_own_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.save_now(6, tree(6))
    store.save_now(5, tree(5))
    assert "step 5 is saved behind step 6" in caplog.text
    assert loaded_by(store).step == 6
    store.close()


def test_several_threads_get_their_own_outcomes_and_prepare_waits_for_a_save(tmp_path: Path) -> None:
    store, acknowledged, numbers = Store(tmp_path, slots=40), list[tuple[int, int]](), iter(range(1, 31))
    turn, ended = threading.Lock(), threading.Event()

    def save() -> None:
        while True:
            with turn:
                step = next(numbers, 0)
            if not step:
                return
            acknowledged.append((step, store.save_now(step, {"x": torch.full((20_000,), float(step))}).step))

    def prepare() -> None:
        while not ended.is_set():
            store.prepare({"x": torch.full((20_000,), -1.0)})

    threads = [threading.Thread(target=save) for _ in range(3)]
    other = threading.Thread(target=prepare)
    for thread in [other, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    other.join()
    assert len(acknowledged) == 30 and all(asked == got for asked, got in acknowledged)
    for step, path in store.slots.found():
        assert content(path) == (step, float(step))
    store.close()


def test_save_now_tells_how_its_own_save_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flush` and `last` may by then be of another thread's."""
    store = Store(tmp_path)
    monkeypatch.setattr(store, "flush", lambda: Outcome(999, 0.0, 0))
    assert store.save_now(1, tree(1)).step == 1
    monkeypatch.undo()
    store.close()


def test_a_file_that_a_trainer_moves_while_it_is_read_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, reader = Store(tmp_path, slots=2), Store(tmp_path)
    for step in (1, 2):
        trainer.save_now(step, tree(step))
    real, seen = checkpoint.read, list[Path]()

    def read(path: Path, *more: Any) -> Any:
        seen.append(path)
        if len(seen) == 1:  # two slots: step 2's file is taken for step 4
            trainer.save_now(3, tree(3))
            trainer.save_now(4, tree(4))
        return real(path, *more)

    monkeypatch.setattr(checkpoint, "read", read)
    assert loaded_by(reader).step == 4 and not reader.set_aside
    assert [path.name for path in seen] == ["step-000000002.safetensors", "step-000000004.safetensors"]
    trainer.close()
    reader.close()


def test_a_folder_that_changes_at_every_look_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.save_now(1, tree(1))

    def read(*_: Any) -> Any:
        raise BrokenCheckpoint("its header is being written")

    monkeypatch.setattr(checkpoint, "read", read)
    times = iter(range(1, 10_000))
    monkeypatch.setattr(checkpoint, "_identity", lambda _: (0, 0, next(times)))
    with pytest.raises(LoadFailed, match="change faster"):
        store.load()
    assert not store.set_aside
    store.close()


class ReadOnly(Files):
    def rename(self, old: Path, new: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(old))


def test_in_a_folder_mounted_read_only_a_broken_file_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        store.save_now(step, tree(step))
    store.close()
    store.slots.path(2).write_bytes(b"nothing")
    reader = Store(tmp_path, files=ReadOnly())
    assert loaded_by(reader).step == 1
    assert [path for path, _ in reader.set_aside] == [store.slots.path(2)]
    assert "cannot be set aside (Read-only file system)" in caplog.text
    reader.close()


@pytest.mark.parametrize(
    ("fault", "next_step"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (PermissionError(errno.EACCES, "Permission denied"), "ls -ld"),
    ],
)
@pytest.mark.parametrize("load", ["load", "load_best"])
def test_a_limit_of_this_process_says_nothing_about_the_file(
    load: str, fault: Exception, next_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.save_now(1, tree(1), best=True)

    def no_room(*_: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_to_fill", no_room)
        with pytest.raises(LoadFailed) as failed:
            getattr(store, load)()
    assert isinstance(failed.value, OSError) and isinstance(failed.value, SpothealError)
    assert failed.value.errno == (getattr(fault, "errno", None) or errno.ENOMEM)
    assert next_step in failed.value.next_step and not store.set_aside
    assert loaded_by(store).step == 1
    store.close()


def test_a_descriptor_that_cannot_be_had_leaves_none_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    path = store.save_now(1, tree(1)).path
    assert path is not None
    real = slots.open_regular

    def second_fails(path: Path, direct: bool = False) -> int:
        if direct:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path)

    monkeypatch.setattr(slots, "open_regular", second_fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many"):
        slots.read(path)
    assert len(os.listdir("/proc/self/fd")) == before
    store.close()


def test_a_best_one_under_another_steps_name_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        store.save_now(step, tree(step), best=True)
    store.best.path(1).rename(store.best.path(9))
    best = store.load_best()
    assert best is not None and best.step == 2
    assert "its name says step 9, its content step 1; passed over" in caplog.text
    assert store.best.path(9).exists()
    store.close()


def test_a_step_that_is_durable_is_not_called_lost_where_only_the_best_one_failed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(1, tree(1))
    store.best.temporary.mkdir()
    with pytest.raises(SaveFailed, match=r"step 2 is saved as .*step-000000002.*\.best\.tmp"):
        store.save_now(2, tree(2), best=True)
    assert store.last is not None and store.last.path == store.slots.path(2)
    assert loaded_by(store).step == 2
    store.close()


KILLED_WHILE_SAVING = """
import os, sys, time
from pathlib import Path
from spotheal.training.slotfile.slots import alone_in
with alone_in(Path(sys.argv[1])):
    if os.fork() == 0:      # a DataLoader's worker, which does not notice that its parent is gone
        time.sleep(600)
    print("forked", flush=True)
    time.sleep(600)
"""


def test_a_worker_that_outlives_a_killed_trainer_does_not_keep_the_next_one_out(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_SAVING, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "forked\n"
        try:
            with pytest.raises(OSError, match="another process"), alone_in(tmp_path):
                pass
            trainer.kill()
            os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
            with alone_in(tmp_path):
                pass
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
