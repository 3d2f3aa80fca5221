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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from spotheal.training.slotfile.checksum import BLOCK_BYTES, checksum, sum_blocks
from spotheal.training.slotfile.format import Entry, Layout, chunk_count
from spotheal.training.slotfile.image import FORMAT_DTYPE, Image
from spotheal.training.slotfile.packing import UnsavableState, refuse_unsavable

# Taking the GIL back costs more than to copy so few bytes while holding it: hundreds of small tensors are the rule.
HELD_BYTES_MAX = 64 << 10
# Small enough to be added up from the cache it was just copied through; below 512 KiB glibc's memmove goes around it.
PIECE_BYTES = 512 << 10
_held_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)
_size = torch.Tensor.size
_OWN_MEMORY = (torch.Tensor, torch.nn.Parameter)  # what detaching gives of another class is that class's affair


class Plan:
    """The place of every tensor of states of one shape. Made once, used for each save of a state of the same shape."""

    def __init__(self, names: Sequence[str], sources: Sequence[torch.Tensor], chunk_bytes: int) -> None:
        """For tensors like `sources`, by their `names`. UnsavableState names the one that no file can hold."""
        for name, source in zip(names, sources, strict=True):
            refuse_unsavable(source, name)
        self.names, self.specs = tuple(names), [(source.dtype, _size(source)) for source in sources]
        self.devices = {source.device for source in sources if not source.is_cpu}
        self.chunk_bytes = chunk_bytes
        specs = zip(names, self.specs, strict=True)
        self.layout = Layout.of({name: (FORMAT_DTYPE[dtype], tuple(size)) for name, (dtype, size) in specs})
        self.chunks = chunk_count(self.layout.data_bytes, chunk_bytes)
        number = {name: index for index, name in enumerate(names)}
        # By place, so that the chunks become complete in order. The padding has no tensor.
        self.places: tuple[tuple[int, Entry], ...] = tuple(
            (number[entry.name], entry)
            for entry in self.layout.entries
            if entry.name in number and entry.begin < entry.end
        )
        self._are_later: list[bool] | None = None
        self._parts = Parts([], [], [], [], [])

    def fits(self, names: Sequence[str], sources: Sequence[torch.Tensor]) -> bool:
        """Whether these have the names, dtypes and shapes that the plan was made of."""
        return tuple(names) == self.names and self.takes(sources, range(len(sources)))

    def takes(self, sources: Sequence[torch.Tensor], numbers: Iterable[int]) -> bool:
        """Whether those of the `sources` with these numbers have the dtypes and shapes that the plan was made of."""
        specs = self.specs
        try:
            return all((sources[number].dtype, _size(sources[number])) == specs[number] for number in numbers)
        except RuntimeError:  # a nested tensor has no size; a new plan names its place
            return False

    def chunk(self, index: int) -> tuple[int, int]:
        """Begin and end of chunk `index` in the data."""
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.layout.data_bytes)

    def parts(self, are_later: list[bool]) -> Parts:
        """`are_later` says of every tensor whether it is copied later; the same from save to save."""
        if are_later != self._are_later:
            immediate = [
                (number, entry, entry.end - entry.begin) for number, entry in self.places if not are_later[number]
            ]
            later = [place for place in self.places if are_later[place[0]]]
            numbers: tuple[list[int], list[int]] = ([], [])
            for number, is_later in enumerate(are_later):
                numbers[is_later].append(number)
            self._are_later, self._parts = are_later, Parts(*numbers, immediate, later, self._pieces(later))
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
    """Tensors (their number) and places: to be copied now (with the size), later, and the pieces of each chunk.

    Tensors without content have a number and no place.
    """

    now_numbers: list[int]
    later_numbers: list[int]
    now: list[tuple[int, Entry, int]]
    later: list[tuple[int, Entry]]
    pieces: list[list[Piece]]


class Copy:
    """One copy of a state into `image`, from its first byte on. Made in the training's thread, run in others.

    Every look at a tensor costs the training what its memory is away: some 500 of them, a millisecond. So with `replan`
    those that are copied later are looked at later as well (`settle`), in the writer's thread.
    """

    def __init__(
        self,
        plan: Plan,
        image: Image,
        sources: Sequence[torch.Tensor],
        later: Iterable[torch.Tensor] = (),
        replan: Callable[[Sequence[torch.Tensor]], tuple[Plan, Image]] | None = None,
    ) -> None:
        """`later` are tensors that only the optimizer step changes; all else is copied now. UnsavableState.

        Without `replan` the sources are known to fit the plan. With it only their number is known: `replan` gives a
        plan and an image for them if one has another dtype or shape. Then call `settle` before `run` and `checksum`.
        """
        self.copied = threading.Event()  # the sources are free again
        self.hurry = False  # somebody waits for `copied`: leave the checksums for after it
        self._fault: Exception | None = None
        self._replan = replan
        self._are_later = _are_later(sources, later)
        self._sources = list(sources)
        self._found_at = list(map(torch.Tensor.data_ptr, compress(sources, self._are_later)))
        self._from: list[int] | None = self._pointers(plan) if replan is None else None
        self._lay_out(plan, image)

    def _lay_out(self, plan: Plan, image: Image) -> None:
        """Take the plan (or another, if the tensors that are copied now do not fit it), and copy them."""
        self._parts = plan.parts(self._are_later)
        if self._replan is not None and not plan.takes(self._sources, self._parts.now_numbers):
            plan, image = self._replan(self._sources)
            self._parts, self._replan = plan.parts(self._are_later), None
        self.plan, self.image = plan, image
        self._sums: list[int | None] = [None] * plan.chunks
        self._complete: list[bool] = [False] * plan.chunks
        self._turns = iter(range(plan.chunks))  # of the threads that copy
        self._finished: list[int] = []
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        devices = set(plan.devices)
        held_move, pointer_of, sources = _held_move, torch.Tensor.data_ptr, self._sources
        for number, entry, size in self._parts.now:
            source = sources[number]
            pointer = pointer_of(source)
            if not pointer:
                _refuse_without_memory(plan.names[number], source)
            if size <= HELD_BYTES_MAX and _is_plain(source):
                held_move(image.address + entry.begin, pointer, size)
            else:
                self._copy(number, entry, pointer)
                devices |= set() if source.is_cpu else {source.device}
        # They begin after all that is queued so far, the copies just made included.
        self._streams = {device: _side_stream(device) for device in devices}

    def settle(self) -> None:
        """Look at the tensors that are copied later, and make the plan again if their shapes changed. In any thread.

        UnsavableState, OSError, or the errors of `replan`; a thread that waits for the copy goes on then.
        """
        try:
            if self._from is None:
                self._settle()
        except RuntimeError as fault:  # torch's
            sources = self._sources
            self.give_up(fault)
            for name, source in zip(self.plan.names, sources, strict=False):
                refuse_unsavable(source, name)  # a sparse tensor has no pointer
            raise self._not_copied(fault) from fault
        except Exception as fault:
            self.give_up(fault)
            raise

    def _settle(self) -> None:
        if self._replan is not None and not self.plan.takes(self._sources, self._parts.later_numbers):
            for stream in self._streams.values():
                stream.synchronize()
            for number in self._parts.now_numbers:  # as they were then: the training has gone on since
                dtype, size = self.plan.specs[number]
                self._sources[number] = torch.empty(size, dtype=dtype)
            for number, entry, _ in self._parts.now:
                self._sources[number].copy_(self.image.tensor(entry, 0))
            plan, image = self._replan(self._sources)
            self._replan = None
            self._lay_out(plan, image)
            for device in self._streams:  # one may be on a device where none was, and this thread knows no stream of it
                torch.cuda.synchronize(device)
        self._from = self._pointers(self.plan)

    def _pointers(self, plan: Plan) -> list[int]:
        """Where the content of each source begins that is copied later, else 0. UnsavableState if it has none.

        Its memory is ours as well from now on: the training may give a parameter other memory (`.data =`) and let go of
        what it had. Where that has happened since the save was asked for, UnsavableState too: it has another content.
        """
        pointers, data_ptr = [0] * len(self._sources), torch.Tensor.data_ptr
        for number, found_at in zip(compress(range(len(pointers)), self._are_later), self._found_at, strict=True):
            source = self._sources[number]
            if not source.numel():
                continue
            if type(source) in _OWN_MEMORY:
                source = self._sources[number] = source.detach()
            pointers[number] = data_ptr(source)
            if not pointers[number]:
                _refuse_without_memory(plan.names[number], source)
            if pointers[number] != found_at:
                raise UnsavableState(
                    f"{plan.names[number]} was given other memory before it was copied",
                    next_step="call `wait_copied` before `.data = …`, as before each optimizer step",
                )
        return pointers

    def run(self, threads: Executor | None = None) -> None:
        """Copy the rest; each piece is added up while it is still in the cache. With `threads` two at a time.

        Two, for the training's own threads share every piece of work evenly: as much is taken from each of them.
        """
        try:
            self._run(threads)
        except Exception as fault:  # a device that failed, no memory
            self.give_up(fault)
            raise

    def _run(self, threads: Executor | None) -> None:
        odd = self._copy_odd()
        if not self.plan.chunks:
            self._end()
        helper = beside(threads, self._copy_chunks, odd) if self.plan.chunks > 1 else None
        try:
            self._copy_chunks(odd)
        finally:
            fault = helper.exception() if helper is not None and not helper.cancel() else None
        if fault is not None:
            raise fault

    def checksum(self, index: int) -> int:
        """Chunk `index`'s checksum, once it is complete. OSError if copying failed. One caller at a time."""
        while not self._complete[index]:
            self._news.get()
        if self._fault is not None:
            raise self._not_copied(self._fault)
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

    def give_up(self, fault: Exception) -> None:
        """End the wait of threads that wait for the copy."""
        self._fault = fault
        self._complete = [True] * self.plan.chunks
        self._end()

    @staticmethod
    def _not_copied(fault: Exception) -> OSError:
        return OSError(errno.EIO, f"the state could not be copied: {str(fault) or type(fault).__name__}")

    def _copy_odd(self) -> set[int]:
        """Copy the tensors that are not one run of bytes in this machine's memory; their numbers."""
        odd = set()
        pointers = self._from or []
        for number, entry in self._parts.later:
            source = self._sources[number]
            if not _is_plain(source):
                odd.add(number)
                if not source.is_cpu and source.device not in self._streams:  # it came there since the plan was made
                    torch.cuda.synchronize(source.device)
                    self._streams[source.device] = _side_stream(source.device)
                stream = self._streams.get(source.device)
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._copy(number, entry, pointers[number])
        for stream in self._streams.values():
            stream.synchronize()
        return odd

    def _copy_chunks(self, odd: set[int]) -> None:
        """Take the next chunk until none is left."""
        origin, target = self._from or [], self.image.address
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

    def _copy(self, number: int, entry: Entry, pointer: int) -> None:
        source, size = self._sources[number], entry.end - entry.begin
        if _is_plain(source):
            ctypes.memmove(self.image.address + entry.begin, pointer, size)
        else:
            with torch.no_grad():
                self.image.tensor(entry, 0).copy_(source, non_blocking=True)

    def _end(self) -> None:
        self._sources = []
        self.copied.set()
        self._news.put(None)


def _are_later(sources: Sequence[torch.Tensor], later: Iterable[torch.Tensor]) -> list[bool]:
    """Of every source whether it is one of `later`: that very tensor, or one of the same memory.

    One that is taken for none of them is copied at once, which is only slower.
    """
    tensors = list(later)
    ids = set(map(id, tensors))
    flags = list(map(ids.__contains__, map(id, sources)))
    if sum(flags) < len(ids):  # `state_dict` gives parameters that are detached, tensors of their own
        memory = set()
        for tensor in tensors:
            try:
                memory.add(_memory(tensor))
            except (RuntimeError, ValueError):  # sparse, nested, lazy: it cannot be saved
                continue
        flags = [_memory(tensor) in memory for tensor in sources]
    return flags


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common of which one is as good as the other. RuntimeError for a sparse one."""
    return torch.Tensor.data_ptr(tensor), tensor.dtype, _size(tensor), tensor.stride()


def _refuse_without_memory(name: str, tensor: torch.Tensor) -> None:
    """A tensor that wraps others, or has no content, has the pointer 0: a copy from there would end the process."""
    refuse_unsavable(tensor, name)  # says of one on the meta device what it is
    raise UnsavableState(
        f"{name or 'the state'} is a {type(tensor).__name__} on {tensor.device} without memory of its own",
        next_step="save the tensors it wraps; DTensors by ShardedSession of spotheal.training.sharded_session",
    )


def beside(threads: Executor | None, call: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
    """`call` in another thread; None if there is none, or if the interpreter ends and gives none any more."""
    if threads is None:
        return None
    try:
        return threads.submit(call, *arguments)
    except RuntimeError:
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """One run of bytes in this machine's memory, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that begins after all that is queued so far, so the training's stream need not stop for the copy."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
