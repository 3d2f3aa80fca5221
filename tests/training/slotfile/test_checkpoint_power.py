"""Power loss, a full disk, failing disks: no acknowledged checkpoint is lost, no broken one is taken."""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from checkpoint_faults import Disk, FailingFiles, Op, RecordingFiles, step_in, tree_of

from spotheal.training.checkpoint import SaveFailed, Store
from spotheal.training.slotfile.files import Files

CHUNK = 4096


def record(folder: Path, slots: int, saves: int, size: int) -> list[Op]:
    """The operations of the real writer for steps 1 to `saves`."""
    files = RecordingFiles()
    store = Store(folder, slots, files=files, chunk_bytes=CHUNK)
    for step in range(1, saves + 1):
        store.save_now(step, tree_of(step, size))
        files.acknowledged(step)
    store.close()
    return files.ops


def losses(ops: list[Op], folder: Path) -> tuple[int, list[str]]:
    """How many states were tried, and what was lost or wrongly taken at the first operation where anything was."""
    disk, seen, found = Disk(), set(), []
    for number, op in enumerate(ops):
        disk.does(op)
        if found:
            break
        for names in disk.after_power_loss():
            mark = hashlib.sha256(repr((sorted(names.items()), disk.acknowledged)).encode()).digest()
            if mark in seen:
                continue
            seen.add(mark)
            at = folder / "after"
            at.mkdir(exist_ok=True)
            for old in at.iterdir():
                old.unlink()
            for name, content in names.items():
                (at / name).write_bytes(content)
            loaded = Store(at).load()
            step = 0 if loaded is None else step_in(loaded.tree)
            if step is None or step < disk.acknowledged or (loaded is not None and step != loaded.step):
                found.append(
                    f"after operation {number} ({op.kind}): step {disk.acknowledged} acknowledged, {step} found"
                )
    return len(seen), found


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize("slots", [2, 3])
def test_no_power_loss_loses_an_acknowledged_checkpoint(slots: int, tmp_path: Path) -> None:
    ops = record(tmp_path / "saves", slots, saves=slots + 2, size=3500)
    states, found = losses(ops, tmp_path)
    assert found == []
    assert states > 200


def without(*kinds: str) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [op for op in ops if op.kind not in kinds]


@pytest.mark.parametrize(
    "spoil", [without("fsync"), without("sync_folder"), without("fsync", "sync_folder")], ids=["file", "folder", "both"]
)
def test_the_enumeration_finds_what_a_missing_fsync_loses(
    spoil: Callable[[list[Op]], list[Op]], tmp_path: Path
) -> None:
    """Checks the check: the same enumeration over a writer that leaves out an fsync."""
    ops = spoil(record(tmp_path / "saves", 2, saves=2, size=1500))
    _, found = losses(ops, tmp_path)
    assert found != []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_whatever_operation_fails_nothing_is_acknowledged_and_the_old_one_is_intact(
    number: int, tmp_path: Path
) -> None:
    at = 0
    while True:
        folder = tmp_path / f"at-{at}"
        good = Store(folder, 2, chunk_bytes=CHUNK)
        for step in (1, 2):
            good.save_now(step, tree_of(step))
        good.close()
        failing = FailingFiles(at, number)
        store = Store(folder, 2, files=failing, chunk_bytes=CHUNK)
        try:
            store.save_now(3, tree_of(3))
        except SaveFailed as fault:
            assert fault.message.startswith("step 3 could not be saved")
            assert fault.next_step
        else:
            assert failing.asked == at, "an operation failed and the save was acknowledged"
            break
        assert store.last is not None
        assert store.last.path is None
        loaded = Store(folder).load()
        assert loaded is not None
        assert step_in(loaded.tree) == loaded.step
        assert loaded.step in (2, 3)
        assert store.save_now(4, tree_of(4)).path is not None, "the next save is none the worse"
        store.close()
        after = Store(folder).load()
        assert after is not None
        assert (after.step, step_in(after.tree)) == (4, 4)
        at += 1
    assert at > 10


def test_a_disk_that_refuses_direct_writes_is_written_through_the_cache(tmp_path: Path) -> None:
    class NoDirect(Files):
        direct_fd: int | None = None

        def direct(self, path: Path) -> int | None:
            self.direct_fd = super().direct(path)
            return self.direct_fd

        def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
            if fd == self.direct_fd:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            super().write(fd, data, offset)

    store = Store(tmp_path, files=NoDirect())
    store.save_now(1, tree_of(1))
    loaded = store.load()
    assert loaded is not None
    assert step_in(loaded.tree) == 1
