"""The checkpoint store: saves that cost the training a copy at most, and a load that takes no file on trust.

    store = Store("checkpoints")
    loaded = store.load()                 # the newest valid one, or None
    store.save(step, tree)                # returns at once; True once begun, False while another save is pending
    store.wait_copied()                   # before optimizer.step, where `tree` may still be being copied
    store.flush()                         # until it is durable

Source of the order of operations: slots.py. What a tree may hold: state.py.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.slotfile.copying import Copy, Plan, beside
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.format import BrokenCheckpoint, Header
from spotheal.training.slotfile.image import Image
from spotheal.training.slotfile.outcome import (
    Outcome,
    SaveFailed,
    never_still,
    no_memory,
    no_thread,
    not_as_it_was,
    not_beside,
    not_json,
    not_readable,
    not_the_newest,
    not_written,
)
from spotheal.training.slotfile.packing import pack, to_json, unpack
from spotheal.training.slotfile.skeleton import Skeleton
from spotheal.training.slotfile.slots import STEP_MAX, Payload, Series, alone_in, read, read_header, set_aside
from spotheal.training.slotfile.workers import Workers

CHUNK_BYTES = 16 << 20
THREADS = 4  # two copy, and two write in turns: the disk has the next chunk before it is done with one

SCANS_MAX = 100  # of a folder that another process saves into
# What a fault of opening or reading says about the file; any other is of the process or the machine.
_OF_THE_FILE = (errno.EIO, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.ENOENT)

log = logging.getLogger("spotheal.training")


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint. Its tensors share one buffer, which lives as long as any of them does."""

    step: int
    path: Path
    tree: Any
    info: Any
    seconds: float
    data_bytes: int


class Store:
    """One rank's checkpoints in one folder. One thread saves and loads; `on_end` is called from the writer's thread.

    `slots` files are overwritten in place, at least 2; with 2 a single older one is left while one is written.
    `best` and `milestone` are series of their own: see `save`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        slots: int = 3,
        *,
        files: Files | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        on_end: Callable[[Outcome], None] | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        if slots < 2:
            raise ValueError("a store needs 2 slots: while one is written another must be whole")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.slots = Series(self.folder, "step-", slots)
        self.best = Series(self.folder, "best-", 2)
        self.milestones = Series(self.folder, "milestone-", 0)
        self.set_aside: list[tuple[Path, str]] = []  # broken files and what is wrong with them
        self.last: Outcome | None = None
        self._files = files or Files()
        self._chunk_bytes = chunk_bytes
        self._on_end, self._before_commit = on_end, before_commit
        self._image: Image | None = None
        self._plan: Plan | None = None
        self._skeleton: Skeleton | None = None
        self._planned: Skeleton | None = None
        self._held_seconds = self._worked_seconds = 0.0
        self._highest = -1  # step that this store has saved
        self._closed = False
        self._start()

    def _start(self) -> None:
        """What belongs to one process: its threads, and the save they are at."""
        self._pid = os.getpid()
        self._workers = Workers(THREADS)
        self._copy: Copy | None = None
        self._pending: Future[Outcome] | None = None
        self._beginning = threading.Lock()  # two saves at once would share the buffer

    def _settle_after_fork(self) -> None:
        """In a forked child the threads that save are not there, and would be waited for without end: the parent's save
        is the parent's. What the child saves or loads it does with threads and a buffer of its own."""
        if self._pid == os.getpid():
            return
        if self._pending is not None:
            log.warning("process %d was forked from %d, which saves a checkpoint: neither waited for nor ended here",
                        os.getpid(), self._pid)  # fmt: skip
        self._of_parent = (self._workers, self._image, self._copy, self._pending)  # kept, so that nothing finalizes
        self._image = None
        self._start()

    # ----------------------------------------------------------------------------------------------------------- save
    @property
    def busy(self) -> bool:
        """A save is pending: copying, writing or waiting for the disk."""
        self._settle_after_fork()
        return self._pending is not None and not self._pending.done()

    @property
    def taken_seconds(self) -> float:
        """What the last save took from the training: while it was held, and its share of the work behind it.

        Training shares its work evenly among the processors, so it loses what the store's threads used, divided by
        their number. Known when the save has ended; 0 where the system does not tell a thread's time.
        """
        return self._held_seconds + self._worked_seconds / (os.cpu_count() or 1)

    def prepare(self, tree: Any) -> int:
        """Make and touch the buffer for states like `tree`, so the first save is as quick as any; returns the bytes of
        one, padding included. UnsavableState as of `save`."""
        while True:
            self.flush()
            with self._beginning:
                if not self.busy:  # nor has another thread begun a save since
                    return self._prepare(tree)

    def _prepare(self, tree: Any) -> int:
        names, sources, _ = self._apart(tree)
        plan = self._plan_for(names, sources)
        try:
            image = self._image_for(plan.layout.data_bytes)
        except SaveFailed as fault:  # each save tries again, and says it as its outcome
            log.warning("%s", fault)
            return plan.layout.data_bytes
        copy = Copy(plan, image, sources, sources)
        try:
            threads = self._pool()
        except SaveFailed as fault:
            log.warning("%s", fault)
            return plan.layout.data_bytes
        if plan.chunks:  # once for practice: threads are started, libraries loaded, the layout has its text
            runs: list[Future[Any]] = [
                threads.submit(copy.run),
                threads.submit(lambda: (copy.checksum(0), plan.layout.json)),
            ]
            try:
                for run in runs:
                    run.result()
            except BaseException:  # an interrupt: what still copies must not do so into the next save's buffer
                self._image = None
                raise
        return plan.layout.data_bytes

    def save(
        self,
        step: int,
        tree: Any,
        *,
        info: Any = None,
        later: Iterable[torch.Tensor] = (),
        best: bool = False,
        milestone: bool = False,
    ) -> bool:
        """Begin to save `tree` as `step` and return: False, with nothing done, where a save is pending.

        `later` are tensors that nothing changes before the next `wait_copied`, nor gives other memory (`.data =`): they
        are copied in the background.
        `best` and `milestone` write the same state into those series as well. `info` is JSON, readable with the header
        alone. Raises UnsavableState; a fault of the disk comes with the outcome (`flush`, `on_end`, `last`).
        """
        options = {"info": info, "later": later, "best": best, "milestone": milestone}
        return self._try_save(step, tree, **options) is not None

    def _try_save(self, step: int, tree: Any, **options: Any) -> Future[Outcome] | None:
        """As `save`, but what will be that very save's outcome; None if another is pending."""
        if not 0 <= operator.index(step) <= STEP_MAX:
            raise ValueError(f"step {step}: a step is from 0 to {STEP_MAX}")
        self._settle_after_fork()
        if not self._beginning.acquire(blocking=False):
            return None
        try:
            return None if self.busy else self._begin(operator.index(step), tree, **options)
        finally:
            self._beginning.release()

    def _begin(
        self,
        step: int,
        tree: Any,
        *,
        info: Any = None,
        later: Iterable[torch.Tensor] = (),
        best: bool = False,
        milestone: bool = False,
    ) -> Future[Outcome]:
        start = time.monotonic()
        names, sources, text = self._apart(tree)
        info_json = to_json(info)
        planned = self._plan if self._skeleton is not None and self._skeleton is self._planned else None
        plan = planned or self._plan_for(names, sources)
        replan = partial(self._plan_again, names) if planned is not None else None
        try:
            copy = Copy(plan, self._image_for(plan.layout.data_bytes), sources, later, replan)
        except SaveFailed as fault:
            return self._failed(Outcome(step, time.monotonic() - start, plan.layout.data_bytes, None, fault))
        except RuntimeError:
            pack(tree)  # says of a sparse tensor, which has no pointer, where it is
            raise
        series = [self.slots, *([self.best] if best else []), *([self.milestones] if milestone else [])]
        pending: Future[Outcome] = Future()
        try:
            self._copy, self._pending = copy, pending
            self._pool().submit(self._end_with, pending, copy, step, text, info_json, series, start)
        except BaseException as fault:  # no thread to be had, a signal: begun it goes on, else it never will
            if pending.cancel():
                copy.give_up(fault if isinstance(fault, Exception) else RuntimeError("interrupted"))
                self._copy = self._pending = None
            failure = no_thread(fault) if isinstance(fault, RuntimeError) else fault
            if isinstance(failure, SaveFailed):
                return self._failed(Outcome(step, time.monotonic() - start, plan.layout.data_bytes, None, failure))
            raise
        self._held_seconds = time.monotonic() - start
        return pending

    def _pool(self) -> ThreadPoolExecutor:
        """The store's threads, all of them started. SaveFailed where the system gives none; SpothealError after
        `close`."""
        self._refuse_closed()
        try:
            return self._workers.start()
        except RuntimeError as fault:
            raise no_thread(fault) from fault

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SpothealError(f"the store of {self.folder} is closed", next_step="make a new Store of the folder")

    def _end_with(self, pending: Future[Outcome], *arguments: Any) -> None:
        """`_write`, whose outcome is `pending`'s; nothing where that was cancelled."""
        if pending.set_running_or_notify_cancel():
            try:
                pending.set_result(self._write(*arguments))
            except BaseException as fault:  # raised where the outcome is asked for; here it only ends this task
                pending.set_exception(fault)
                raise

    def _failed(self, outcome: Outcome) -> Future[Outcome]:
        """A save that ended as it began is told like any other."""
        self._held_seconds, self._worked_seconds = outcome.seconds, 0.0
        self._pending = pending = Future[Outcome]()
        pending.set_result(outcome)
        if self._on_end is not None:
            self._on_end(outcome)
        return pending

    def wait_copied(self) -> None:
        """Return when the tensors given to the last `save` may be changed again: call it before `optimizer.step`."""
        self._settle_after_fork()
        copy = self._copy
        if copy is not None:
            start = time.monotonic()
            copy.wait()
            self._held_seconds += time.monotonic() - start
            if self._copy is copy:  # no newer one, begun in another thread
                self._copy = None

    def ended(self) -> Outcome | None:
        """The outcome of a save that has ended since the last call; None if there is none. Never waits."""
        self._settle_after_fork()
        return self.flush() if self._pending is not None and self._pending.done() else None

    def flush(self) -> Outcome | None:
        """Wait for the pending save and return the outcome of the last one; None if there was none.

        A forked child waits for no save of its parent's, and says so in the log."""
        self._settle_after_fork()
        pending = self._pending
        if pending is not None:
            self._wait_for(pending)
        return self.last

    def _wait_for(self, pending: Future[Outcome]) -> Outcome:
        """Its outcome. Forgotten only once it has ended: after Ctrl-C here no save may share its buffer."""
        try:
            self.last = outcome = pending.result()
            return outcome
        finally:
            if pending.done():
                with self._beginning:  # never forget one that another thread has begun since
                    if self._pending is pending:
                        self._pending = None

    def save_now(self, step: int, tree: Any, **options: Any) -> Outcome:
        """Save and wait until it is durable. SaveFailed where it is not."""
        self.flush()
        while (pending := self._try_save(step, tree, **options)) is None:  # another thread's save
            self.flush()
        outcome = self._wait_for(pending)
        if outcome.fault is not None:
            raise outcome.fault
        return outcome

    def close(self) -> None:
        """Finish the pending save and end the threads; a fault of it is in `last` and not raised. Again is harmless.

        A closed store neither saves nor loads."""
        try:
            self.flush()
        finally:
            self._closed = True
            self._workers.end()

    def _write(
        self, copy: Copy, step: int, text: Callable[[], str], info_json: str, series: Sequence[Series], start: float
    ) -> Outcome:
        worked, pool = self._workers.processor_seconds(), self._workers.pool
        paths: list[Path] = []
        copying: Future[Any] | None = None
        fault = None
        try:
            copy.settle()
            # From here, so that the training's thread wakes only one other.
            copying = beside(pool, copy.run, pool)
            if copying is None:
                copy.run()
            payload = Payload(copy.image, copy.plan.layout, copy.plan.chunk_bytes, step, text, info_json)
            with alone_in(self.folder):
                self._refuse_older(step)
                for target in series:
                    if self._before_commit is not None and not paths:
                        self._before_commit()
                    paths.append(target.write(self._files, payload, copy.checksum, pool))
                    self._highest = max(self._highest, step)
        except (OSError, MemoryError) as error:
            fault = (
                not_beside(step, paths[0], error)
                if paths
                else not_written(step, self.folder, error, self._remainder(), copy.plan.layout.data_bytes)
            )
        except SaveFailed as error:
            fault = error
        except SpothealError as error:
            fault = not_as_it_was(step, error)
        except (ValueError, RecursionError) as error:  # of the state's text, which is made here
            fault = not_json(step, error, self._remainder())
        finally:
            if copying is not None:  # or it would go on into the image, beside the next save
                copying.exception()
        self._worked_seconds = max(0.0, self._workers.processor_seconds() - worked)
        size = copy.plan.layout.data_bytes
        outcome = Outcome(step, time.monotonic() - start, size, paths[0] if paths else None, fault)
        if self._on_end is not None:
            self._on_end(outcome)
        return outcome

    def _refuse_older(self, step: int) -> None:
        """SaveFailed where a newer step lies here that this store has not saved: a load would never give this one."""
        newest, path = next(iter(self.slots.found()), (step, self.folder))
        if newest > max(step, self._highest):
            raise not_the_newest(step, path, newest)
        if newest > step:
            log.warning("step %d is saved behind step %d: a load takes the highest", step, newest)

    def _remainder(self) -> str:
        """What a failed save leaves, for its message."""
        try:
            newest = next((path.name for _, path in self.slots.found()), None)
        except OSError:
            return "the folder cannot be listed"
        return f"{newest} and those before it are intact" if newest else "there is none before it"

    def _apart(self, tree: Any) -> tuple[Sequence[str], list[torch.Tensor], Callable[[], str]]:
        """The tensors of `tree` with their names, and what gives the text of the rest. UnsavableState."""
        skeleton = self._skeleton
        leaves = skeleton.leaves(tree) if skeleton is not None else None
        if skeleton is None or leaves is None:
            skeleton, self._skeleton = Skeleton(tree), None
            leaves = skeleton.leaves(tree) if skeleton.exact else None
            if leaves is None:
                tensors = skeleton.tensors
                return tuple(tensors), list(tensors.values()), partial(to_json, skeleton.values)
            self._skeleton = skeleton
        return skeleton.names, skeleton.sources(leaves), partial(skeleton.text, skeleton.plain(leaves))

    def _plan_for(self, names: Sequence[str], sources: Sequence[torch.Tensor]) -> Plan:
        """A plan that fits these tensors, known to be that of this skeleton from now on."""
        if self._plan is None or not self._plan.fits(names, sources):
            self._plan = Plan(names, sources, self._chunk_bytes)
        self._planned = self._skeleton
        return self._plan

    def _plan_again(self, names: Sequence[str], sources: Sequence[torch.Tensor]) -> tuple[Plan, Image]:
        """For a state of the same skeleton whose tensors have other shapes or types. UnsavableState, SaveFailed."""
        plan = self._plan_for(names, sources)
        return plan, self._image_for(plan.layout.data_bytes)

    def _image_for(self, size: int) -> Image:
        """SaveFailed where there is no memory for it."""
        if self._image is None or self._image.size < size:
            self._image = None  # let the old pages go first
            try:
                self._image = Image(size)
            except (OSError, MemoryError) as fault:
                raise no_memory(size, fault) from fault
        return self._image

    # ----------------------------------------------------------------------------------------------------------- load
    def load(self) -> Loaded | None:
        """The newest valid checkpoint of the slots, every byte verified; None if there is none.

        A broken one is renamed to `broken-…`, logged with what is wrong, listed in `set_aside`, and the one before it
        is taken, where there is one. LoadFailed if this process cannot read them: nothing is set aside then.
        """
        self.flush()
        self._refuse_closed()
        aside_before = len(self.set_aside)
        loaded = self._newest(self.slots, self._put_aside)
        if loaded is None and len(self.set_aside) > aside_before:
            log.warning("no valid checkpoint is left in %s: the training begins at its first step", self.folder)
        return loaded

    def _newest(self, series: Series, put_aside: Callable[[Path, str], None]) -> Loaded | None:
        """The newest valid one of `series`. A trainer may save there meanwhile: what it moves is looked for again."""
        passed: set[Path] = set()
        for _ in range(SCANS_MAX):
            try:
                checkpoints = series.found()
            except OSError as fault:
                raise not_readable(self.folder, fault) from fault
            for step, path in checkpoints:
                if path in passed:
                    continue
                before = _identity(path)
                try:
                    return self._read(step, path)
                except BrokenCheckpoint as fault:
                    flaw = fault.message
                except (OSError, MemoryError) as fault:
                    if not isinstance(fault, OSError) or fault.errno not in _OF_THE_FILE:
                        raise not_readable(path, fault) from fault  # says nothing about what is in it
                    flaw = f"it cannot be read: {fault.strerror or fault}"
                if before is None or _identity(path) != before:
                    break
                passed.add(path)
                put_aside(path, flaw)
            else:
                return None
        raise never_still(self.folder)

    def _read(self, step: int, path: Path) -> Loaded:
        start = time.monotonic()
        header, image = read(path, _to_fill, self._reading())
        if header.step != step:
            raise BrokenCheckpoint(f"its name says step {step}, its content step {header.step}")
        tree = _tree(header, image)
        return Loaded(step, path, tree, header.info, time.monotonic() - start, header.layout.data_bytes)

    def _reading(self) -> ThreadPoolExecutor | None:
        """Threads to read with; None if the system gives none, which is only slower."""
        try:
            return self._pool()
        except SaveFailed:
            return None

    def load_best(self) -> Loaded | None:
        """The newest valid one of the `best` series, None if there is none; broken ones are named in the log and
        passed over. LoadFailed as of `load`."""
        self.flush()
        self._refuse_closed()
        return self._newest(self.best, _pass_over)

    def newest_info(self) -> Any:
        """`info` of the newest checkpoint whose header is whole, without reading the rest; None if there is none."""
        for step, path in self.slots.found():
            with contextlib.suppress(BrokenCheckpoint, OSError):
                header = read_header(path)
                if header.step == step:
                    return header.info
        return None

    def _put_aside(self, path: Path, flaw: str) -> None:
        try:
            aside = set_aside(path, self._files)
        except OSError as fault:  # a volume that is mounted to be read only
            self.set_aside.append((path, flaw))
            log.warning("checkpoint %s is broken: %s; it cannot be set aside (%s), the one before it is next", path,
                        flaw, fault.strerror or fault)  # fmt: skip
            return
        self.set_aside.append((aside, flaw))
        log.warning("checkpoint %s is broken: %s; set aside as %s, the one before it is next", path, flaw, aside.name)


def _tree(header: Header, image: Image) -> Any:
    tensors = image.tensors(header.layout, header.data_at)
    try:
        return unpack(header.state, tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as fault:
        raise BrokenCheckpoint(f"its state cannot be put together: {type(fault).__name__}: {fault}") from fault


def _pass_over(path: Path, flaw: str) -> None:
    log.warning("checkpoint %s is broken: %s; passed over", path, flaw)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Of what lies there now; another one once a trainer has moved or replaced it."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _to_fill(size: int) -> Image:
    """For a load, which gives the image away: pages that the read itself touches, several threads at a time."""
    return Image(size, touched=False)
