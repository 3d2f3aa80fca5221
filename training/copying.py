"""Copy a state into the image while the training goes on, and hand the chunks on as they become complete.

What the optimizer step changes (parameters, optimizer state) may be copied behind the training's back until the next
`optimizer.step`, which waits for it. Everything else (BatchNorm's statistics!) changes in the forward pass already and
is copied at once: a peer that overlaps those saves them of the wrong step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch

from spotheal.training.checksum import BLOCK_BYTES, checksum, sum_blocks
from spotheal.training.format import Entry, Layout, chunk_count
from spotheal.training.image import FORMAT_DTYPE, Image
from spotheal.training.state import UnsavableState

# Taking the GIL back costs more than to copy so few bytes while holding it: hundreds of small tensors are the rule.
HELD_BYTES_MAX = 64 << 10
# Small enough to be added up from the cache it was just copied through; below 512 KiB glibc's memmove goes around it.
PIECE_BYTES = 512 << 10
_held_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


class Plan:
    """Where every tensor of states of one shape goes. Made once, used for each save of a state of the same shape."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> None:
        self.names, self.specs = tuple(tensors), _specs(tensors)
        self.chunk_bytes = chunk_bytes
        self.layout = Layout.of({name: (FORMAT_DTYPE[item.dtype], tuple(item.shape)) for name, item in tensors.items()})
        self.chunks = chunk_count(self.layout.data_bytes, chunk_bytes)
        number = {name: index for index, name in enumerate(tensors)}
        # By place, so that the chunks become complete in order. The padding has no tensor.
        self.places: tuple[tuple[int, Entry], ...] = tuple(
            (number[entry.name], entry)
            for entry in self.layout.entries
            if entry.name in number and entry.begin < entry.end
        )
        self._are_later: list[bool] | None = None
        self._parts = Parts([], [], [])

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these have the names, dtypes and shapes that the plan was made of."""
        return tuple(tensors) == self.names and _specs(tensors) == self.specs

    def chunk(self, index: int) -> tuple[int, int]:
        """Begin and end of chunk `index` in the data."""
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.layout.data_bytes)

    def parts(self, are_later: list[bool]) -> Parts:
        """`are_later` says of every tensor whether it is copied later; the same from save to save."""
        if are_later != self._are_later:
            now = [(number, entry, entry.end - entry.begin) for number, entry in self.places if not are_later[number]]
            later = [place for place in self.places if are_later[place[0]]]
            self._are_later, self._parts = are_later, Parts(now, later, self._pieces(later))
        return self._parts

    def _pieces(self, places: Sequence[tuple[int, Entry]]) -> list[list[Piece]]:
        pieces = []
        rest = deque(places)
        for index in range(self.chunks):
            begin, stop = self.chunk(index)
            pieces.append([Piece(at, min(at + PIECE_BYTES, stop), []) for at in range(begin, stop, PIECE_BYTES)])
            for piece in pieces[-1]:
                while rest and rest[0][1].begin < piece.end:
                    number, entry = rest[0]
                    begin, end = max(entry.begin, piece.begin), min(entry.end, piece.end)
                    piece.moves.append((number, begin - entry.begin, begin, end - begin))
                    if entry.end > piece.end:
                        break
                    rest.popleft()
        return pieces


@dataclass(frozen=True)
class Piece:
    """A run of bytes of the image that is copied, and then added up: `moves` are tensor, offset in it, place, size."""

    begin: int
    end: int
    moves: list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Parts:
    """Tensors (their number) and places: to be copied now (with the size), later, and the pieces of each chunk."""

    now: list[tuple[int, Entry, int]]
    later: list[tuple[int, Entry]]
    pieces: list[list[Piece]]


class Copy:
    """One copy of a state into `image`, from its first byte on. Made in the training's thread, run in others."""

    def __init__(
        self, plan: Plan, image: Image, tensors: Mapping[str, torch.Tensor], later: Iterable[torch.Tensor] = ()
    ) -> None:
        """`later` are tensors that only the optimizer step changes; all else is copied now. UnsavableState."""
        self.plan, self.image = plan, image
        self.copied = threading.Event()  # the sources are free again
        self.hurry = False  # somebody waits for `copied`: leave the checksums for after it
        self._fault: Exception | None = None
        self._sums: list[int | None] = [None] * plan.chunks
        self._complete: list[bool] = [False] * plan.chunks
        self._turns = iter(range(plan.chunks))  # of the threads that copy
        self._finished: list[int] = []
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sources = list(tensors.values())
        self._from = list(map(torch.Tensor.data_ptr, self._sources))
        if 0 in self._from:
            _refuse_without_memory(tensors)
        waiting = set(map(torch.Tensor.data_ptr, later))
        self._parts = plan.parts([pointer in waiting for pointer in self._from])
        held_move, target, pointers, sources = _held_move, image.address, self._from, self._sources
        for number, entry, size in self._parts.now:
            if size <= HELD_BYTES_MAX and _is_plain(sources[number]):
                held_move(target + entry.begin, pointers[number], size)
            else:
                self._copy(number, entry)
        devices = {source.device for source in self._sources if not source.is_cpu}
        # They begin after all that is queued so far, the copies just made included.
        self._streams = {device: _side_stream(device) for device in devices}

    def run(self, threads: Executor | None = None) -> None:
        """Copy what is left, each piece added up while it is still in the cache. With `threads` two at a time.

        Two, for the training's own threads share every piece of work evenly: as much is taken from each of them.
        """
        try:
            self._run(threads)
        except Exception as fault:  # a device that failed, no memory: whoever waits for the copy must not wait on
            self._fault = fault
            self._complete = [True] * self.plan.chunks
            self._end()
            raise

    def _run(self, threads: Executor | None) -> None:
        odd = self._copy_odd()
        if not self.plan.chunks:
            self._end()
        other = beside(threads, self._copy_chunks, odd) if self.plan.chunks > 1 else None
        try:
            self._copy_chunks(odd)
        finally:
            fault = other.exception() if other is not None and not other.cancel() else None
        if fault is not None:
            raise fault

    def checksum(self, index: int) -> int:
        """Chunk `index`'s checksum, once it is complete. OSError where copying failed. One caller at a time."""
        while not self._complete[index]:
            self._news.get()
        if self._fault is not None:
            raise OSError(errno.EIO, f"the state could not be copied: {str(self._fault) or type(self._fault).__name__}")
        value = self._sums[index]
        if value is None:
            begin, end = self.plan.chunk(index)
            value = self._sums[index] = checksum(self.image.bytes[begin:end])
        return value

    def wait(self) -> None:
        """Return when the state's own tensors may be changed."""
        if not self.copied.is_set():
            self.hurry = True
            self.copied.wait()

    def _copy_odd(self) -> set[int]:
        """Copy the tensors that are not one run of bytes in this machine's memory; their numbers."""
        odd = set()
        for number, entry in self._parts.later:
            source = self._sources[number]
            if not _is_plain(source):
                odd.add(number)
                stream = self._streams.get(source.device)
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._copy(number, entry)
        for stream in self._streams.values():
            stream.synchronize()
        return odd

    def _copy_chunks(self, odd: set[int]) -> None:
        """Take the next chunk until none is left."""
        origin, target = self._from, self.image.address
        if len(odd) == len(self._parts.later):
            self.copied.set()
        for index in self._turns:
            value = 0 if self.image.blocks is not None else None
            for piece in self._parts.pieces[index]:
                for number, offset, at, size in piece.moves:
                    if number not in odd:
                        move = _held_move if size <= HELD_BYTES_MAX else ctypes.memmove
                        move(target + at, origin[number] + offset, size)
                if self.hurry and not self.copied.is_set():
                    value = None
                elif value is not None and self.image.blocks is not None:
                    value = sum_blocks(self.image.blocks[piece.begin // BLOCK_BYTES : piece.end // BLOCK_BYTES], value)
            self._sums[index], self._complete[index] = value, True
            self._finished.append(index)
            if len(self._finished) == self.plan.chunks:
                self._end()
            self._news.put(None)

    def _copy(self, number: int, entry: Entry) -> None:
        source, size = self._sources[number], entry.end - entry.begin
        if _is_plain(source):
            ctypes.memmove(self.image.address + entry.begin, self._from[number], size)
        else:
            with torch.no_grad():
                self.image.tensor(entry, 0).copy_(source, non_blocking=True)

    def _end(self) -> None:
        self._sources = []
        self.copied.set()
        self._news.put(None)


def _refuse_without_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """A tensor that wraps others, or has no content, has the pointer 0: a copy from there would end the process."""
    for name, tensor in tensors.items():
        if tensor.numel() and torch.Tensor.data_ptr(tensor) == 0:
            raise UnsavableState(
                f"{name or 'the state'} is a {type(tensor).__name__} on {tensor.device} without memory of its own",
                next_step="save the tensors it wraps; DTensors by ShardedSession of spotheal.training.sharded_session",
            )


def beside(threads: Executor | None, call: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
    """`call` in another thread; None where there is none, or where the interpreter ends and gives none any more."""
    if threads is None:
        return None
    try:
        return threads.submit(call, *arguments)
    except RuntimeError:
        return None


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors.values()]


def _is_plain(tensor: torch.Tensor) -> bool:
    """One run of bytes in this machine's memory, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that begins after all that is queued so far, so the training's stream need not stop for the copy."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
