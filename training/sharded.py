"""Checkpoints of state that no rank has whole (FSDP2, DTensor): every rank writes its part, one mark commits the set.

    store = ShardedStore("checkpoints", ranks=ranks)   # on every rank, of one folder that all of them see
    loaded = store.load(like)                          # the newest valid set, resharded to this world; None: none
    store.save(step, tree)                             # plans, begins to copy, returns
    store.wait_copied()                                # before optimizer.step
    store.advance()                                    # once no rank is `working`: twice a save; or flush()

Every method named here is a collective: all ranks call it at the same place. torch.distributed.checkpoint plans and
reshards (sharded_dcp.py), the order of operations is that of sharded_sets.py. A set is whole on the disk or does not
exist: a rank that dies or has no space left leaves the sets before it as they were, and every rank hears of it.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.checkpoint import CHUNK_BYTES, Loaded
from spotheal.training.distributed import Ranks, is_sharded
from spotheal.training.shards.sharded_dcp import ShardReader, ShardWriter, load_planner, save_planner
from spotheal.training.shards.sharded_manifest import Manifest, ShardFile, digest_of
from spotheal.training.shards.sharded_sets import Sets
from spotheal.training.slotfile.copying import Copy, Plan
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.format import BrokenCheckpoint
from spotheal.training.slotfile.image import TORCH_DTYPE, Image
from spotheal.training.slotfile.outcome import Outcome, SaveFailed
from spotheal.training.slotfile.packing import pack, to_json, unpack
from spotheal.training.slotfile.slots import STEP_MAX, Payload, read_header, write_file

log = logging.getLogger("spotheal.training")


@dataclass(frozen=True)
class _Save:
    """A save that has begun, in `folder`. `manifest` on rank 0 alone: it has no files yet. `committing`: all ranks have
    written."""

    step: int
    began: float
    folder: Path
    work: Future[Any]
    manifest: Manifest | None
    committing: bool = False


@dataclass(frozen=True)
class LoadedSet(Loaded):
    """`own`: what this rank gave as its own, None if the set has no such rank; `world`: how many ranks saved."""

    own: Any = None
    world: int = 1


class ShardedStore:
    """One training's sets in one folder, at most `slots` of them (2 at least). Rank 0 commits and sets aside.

    `on_end` is called on rank 0, from another thread. Waits for other ranks are limited by `ranks`: RankLost.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        slots: int = 3,
        *,
        ranks: Ranks | None = None,
        files: Files | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        on_end: Callable[[Outcome], None] | None = None,
    ) -> None:
        if slots < 2:
            raise ValueError("a store needs 2 slots: while one is written another must be whole")
        self.ranks = ranks or Ranks()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.set_aside: list[tuple[Path, str]] = []  # broken sets and what is wrong with them
        self.last: Outcome | None = None
        self.sets = Sets(self.folder, slots, files or Files())
        self._chunk_bytes, self._on_end = chunk_bytes, on_end
        self._image: Image | None = None
        self._plan: Plan | None = None
        self._copy: Copy | None = None
        self._save: _Save | None = None
        self._held_seconds = self._worked_seconds = 0.0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="checkpoint")

    # ----------------------------------------------------------------------------------------------------------- save
    @property
    def busy(self) -> bool:
        """A save has begun and has not ended: the same on every rank."""
        return self._save is not None

    @property
    def working(self) -> bool:
        """This rank is still writing: while that holds on any, `advance` would wait. No collective."""
        return self._save is not None and not self._save.work.done()

    def save(
        self, step: int, tree: Any, *, own: Any = None, info: Any = None, later: Iterable[torch.Tensor] = ()
    ) -> bool:
        """Begin to save `tree` as `step`; False, with nothing done, where a save is pending.

        DTensors are saved by those who hold them; all else of `tree` must be alike on all ranks, and is that of rank 0.
        `own` is what this rank has alone (its generators). `later` as for `Store.save`. UnsavableState; a fault of a
        disk comes with the outcome.
        """
        if not 0 <= step <= STEP_MAX:
            raise ValueError(f"step {step}: a step is from 0 to {STEP_MAX}")
        if self._save is not None:
            return False
        start = time.monotonic()
        (tensors, values), (alone, own_values) = pack(tree), pack(own)
        to_json(info)
        tensors |= {_own_prefix(self.ranks.rank) + name: tensor for name, tensor in alone.items()}
        writer = ShardWriter(self.ranks.rank, lambda: self.sets.free(self.ranks.size, step))
        try:
            self._collective(state_dict_saver.save, tensors, storage_writer=writer, planner=save_planner())
        except CheckpointException as fault:
            self._end(Outcome(step, time.monotonic() - start, 0, None, self._failed(step, _reasons(fault))))
            return True
        names, sources = list(writer.parts), list(writer.parts.values())
        if self._plan is None or not self._plan.fits(names, sources):
            self._plan = Plan(names, sources, self._chunk_bytes)
        image = self._image_for(self._plan.layout.data_bytes)
        copy = self._copy = Copy(self._plan, image, sources, [local(tensor) for tensor in later])
        payload = Payload(image, self._plan.layout, self._chunk_bytes, step, own_values, "null")
        manifest = Manifest(step, (), writer.tensors, values, info) if self.ranks.rank == 0 else None
        folder = self.folder / writer.folder
        self._save = _Save(step, start, folder, self._threads.submit(self._write, folder, payload, copy), manifest)
        self._held_seconds = time.monotonic() - start
        return True

    @property
    def taken_seconds(self) -> float:
        """What the last save took from this rank's training, as Store.taken_seconds. Known when it has ended."""
        return self._held_seconds + self._worked_seconds / (os.cpu_count() or 1)

    def wait_copied(self) -> None:
        """Return when the tensors given to the last `save` may be changed again. No collective."""
        if self._copy is not None:
            start = time.monotonic()
            self._copy.wait()
            self._held_seconds += time.monotonic() - start
            self._copy = None

    def advance(self) -> Outcome | None:
        """What comes next of a pending save: all tell what they wrote, or rank 0 how its commit ended: the outcome."""
        save = self._save
        if save is None:
            return None
        if not save.committing:
            written: list[ShardFile | str] = self.ranks.all(save.work.result())
            faults = {rank: result for rank, result in enumerate(written) if isinstance(result, str)}
            if faults:
                seconds = time.monotonic() - save.began
                return self._end(Outcome(save.step, seconds, 0, None, self._failed(save.step, faults)))
            files = tuple(result for result in written if isinstance(result, ShardFile))
            work: Future[Any] = Future()
            if save.manifest is not None:
                manifest = replace(save.manifest, files=files)
                work = self._threads.submit(self._commit, save.folder, manifest, save.began)
            else:
                work.set_result(None)
            self._save = replace(save, work=work, committing=True)
            return None
        outcome: Outcome = self.ranks.first(save.work.result())
        return self._end(outcome, is_told=outcome.fault is None)

    def flush(self) -> Outcome | None:
        """Wait for the pending save on all ranks; the outcome of the last one, None if there was none."""
        while self.busy:
            self.advance()
        return self.last

    def save_now(self, step: int, tree: Any, **options: Any) -> Outcome:
        """Save and wait until it is durable. SaveFailed on every rank where it is not."""
        self.flush()
        self.save(step, tree, **options)
        outcome = self.flush()
        assert outcome is not None
        if outcome.fault is not None:
            raise outcome.fault
        return outcome

    def close(self) -> None:
        """End the threads. No collective: a pending save is not committed; `flush` first."""
        self._threads.shutdown()

    def _write(self, folder: Path, payload: Payload, copy: Copy) -> ShardFile | str:
        """This rank's file: what was written, or why it was not."""
        start, copying = time.thread_time(), self._threads.submit(_timed, copy.run)
        path = folder / Sets.file(self.ranks.rank)
        try:
            write_file(self.sets.files, path, payload, copy.checksum)
            self.sets.files.sync_folder(folder)
            header = read_header(path)
        except (OSError, BrokenCheckpoint) as fault:
            copying.exception()
            return (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
        self._worked_seconds = copying.result() + time.thread_time() - start
        return ShardFile(header.file_bytes, digest_of(header))

    def _commit(self, folder: Path, manifest: Manifest, start: float) -> Outcome:
        size = sum(file.file_bytes for file in manifest.files)
        try:
            path = self.sets.commit(folder, manifest)
        except OSError as fault:
            failure = self._failed(manifest.step, {0: fault.strerror or str(fault)})
            return Outcome(manifest.step, time.monotonic() - start, size, None, failure)
        outcome = Outcome(manifest.step, time.monotonic() - start, size, path)
        if self._on_end is not None:
            self._on_end(outcome)  # at once: it is durable, whatever becomes of the other ranks
        return outcome

    def _end(self, outcome: Outcome, is_told: bool = False) -> Outcome:
        self._save, self.last = None, outcome
        if not is_told and self._on_end is not None and self.ranks.rank == 0:
            self._on_end(outcome)
        return outcome

    def _failed(self, step: int, faults: Mapping[int, str]) -> SaveFailed:
        ranks = "; ".join(f"rank {rank}: {reason}" for rank, reason in faults.items())
        return SaveFailed(
            f"step {step} could not be saved in {self.folder}: {ranks}",
            next_step="the sets before it are intact; see `df -h` and `dmesg` on these ranks' machines",
        )

    def _image_for(self, size: int) -> Image:
        if self._image is None or self._image.size < size:
            self._image = None  # let the old pages go first
            self._image = Image(size)
        return self._image

    # ----------------------------------------------------------------------------------------------------------- load
    def load(self, like: Callable[[], Any]) -> LoadedSet | None:
        """The newest valid set, every byte that is used verified; None if there is none. On every rank.

        `like()` is a tree as it would be saved now: into its DTensors is loaded, whatever number of ranks wrote them;
        they are touched only after the set was seen to be whole. All else is new. A broken set is renamed, logged and
        listed in `set_aside`, and the one before it is taken. SpothealError where the set is of another model.
        """
        self.flush()
        tensors: Mapping[str, torch.Tensor] | None = None
        while True:
            start = time.monotonic()
            newest = self._newest()
            if newest is None:
                return None
            path, manifest = newest
            tensors = pack(like())[0] if tensors is None else tensors
            targets = _targets(manifest, tensors, self.ranks.rank)
            reader = ShardReader(path, manifest, self.ranks.rank)
            try:
                self._collective(state_dict_loader.load, targets, storage_reader=reader, planner=load_planner())
                tree = unpack(manifest.state, targets)
                prefix = _own_prefix(self.ranks.rank)
                alone = {name[len(prefix) :]: item for name, item in targets.items() if name.startswith(prefix)}
                own_state = unpack(reader.own, alone)
            except (CheckpointException, KeyError, ValueError, TypeError, RecursionError) as fault:
                broken = [flaw for flaw in self.ranks.all(reader.broken) if flaw]
                if isinstance(fault, CheckpointException) and not broken:
                    raise SpothealError(f"{path.name} cannot be loaded: {_reasons(fault)}") from fault
                self._put_aside(path, broken[0] if broken else f"its state cannot be put together: {fault}")
                continue
            size = sum(file.file_bytes for file in manifest.files)
            seconds = time.monotonic() - start
            return LoadedSet(manifest.step, path, tree, manifest.info, seconds, size, own_state, len(manifest.files))

    def _newest(self) -> tuple[Path, Manifest] | None:
        """The newest set whose commit mark is whole, as rank 0 sees it."""
        newest: Any = None
        fault = ""
        if self.ranks.rank == 0:
            try:
                newest = self._look()
            except OSError as error:
                fault = f"{self.folder} cannot be read: {error.strerror or error}"
        newest, fault = self.ranks.first((newest, fault))
        if fault:
            raise SpothealError(fault, next_step="see the folder's permissions on rank 0's machine")
        return None if newest is None else (self.folder / newest[0], newest[1])

    def _look(self) -> tuple[str, Manifest] | None:
        for _, path in self.sets.found():
            try:
                return path.name, self.sets.manifest(path)
            except BrokenCheckpoint as fault:
                self._put_aside(path, fault.message)
            except PermissionError:
                raise
            except OSError as fault:
                self._put_aside(path, f"its commit mark cannot be read: {fault.strerror or fault}")
        return None

    def _put_aside(self, path: Path, flaw: str) -> None:
        """On rank 0; the others wait for it at the next collective."""
        if self.ranks.rank != 0:
            return
        aside = self.sets.set_aside(path)
        self.set_aside.append((aside, flaw))
        log.warning("the set %s is broken: %s; set aside as %s, the one before it is used", path, flaw, aside.name)

    def _collective(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        options |= {"process_group": self.ranks.group, "no_dist": self.ranks.size == 1}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return self.ranks.met(lambda: call(*arguments, **options))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _timed(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _own_prefix(rank: int) -> str:
    """The beginning of the names of tensors that only one rank has."""
    return f"rank-{rank:05d}/"


def _targets(manifest: Manifest, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What is loaded into: the DTensors of this run, and new tensors for all that every rank has whole."""
    targets = {}
    foreign = tuple(_own_prefix(number) for number in range(len(manifest.files)) if number != rank)
    for name, stored in manifest.tensors.items():
        if name.startswith(foreign):
            continue
        tensor = tensors.get(name)
        if tensor is not None and is_sharded(tensor):
            if tuple(tensor.shape) != stored.shape:
                raise SpothealError(
                    f"the checkpoint does not fit: its {name} is {list(stored.shape)}, this run's {list(tensor.shape)}",
                    next_step="start with the model of the run that wrote it, or with an empty checkpoint folder",
                )
            targets[name] = tensor
        else:
            targets[name] = torch.empty(stored.shape, dtype=TORCH_DTYPE[stored.dtype])
    return targets


def _reasons(fault: CheckpointException) -> dict[int, str]:
    errors = {rank: error for rank, (error, _) in fault.failures.items()}
    return {
        rank: getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}" for rank, cause in errors.items()
    }
