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
from collections.abc import Iterable, Mapping

import torch

from spotheal.training.checksum import checksum
from spotheal.training.format import Entry, Layout, chunk_count
from spotheal.training.image import FORMAT_DTYPE, Image

# Taking the GIL back costs more than to copy so few bytes while holding it: hundreds of small tensors are the rule.
HELD_BYTES_MAX = 64 << 10
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

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return tuple(tensors) == self.names and _specs(tensors) == self.specs

    def chunk(self, index: int) -> tuple[int, int]:
        """Begin and end of chunk `index` in the data."""
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.layout.data_bytes)


class Copy:
    """One copy of a state into `image`, from its first byte on. Made in the training's thread, run in another."""

    def __init__(
        self, plan: Plan, image: Image, tensors: Mapping[str, torch.Tensor], later: Iterable[torch.Tensor] = ()
    ) -> None:
        """`later` are tensors that only the optimizer step changes; all else is copied now."""
        self.plan, self.image = plan, image
        self.copied = threading.Event()  # the sources are free again
        self.hurry = False  # somebody waits for `copied`: leave the checksums for after it
        self._fault: RuntimeError | None = None
        self._sums: list[int | None] = [None] * plan.chunks
        self._complete = 0  # chunks that the writer knows to be complete
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        waiting = {tensor.data_ptr() for tensor in later}
        sources = list(tensors.values())
        self._left: list[tuple[torch.Tensor, Entry]] = []
        devices = set()
        with torch.no_grad():
            for index, entry in plan.places:
                source = sources[index]
                if not source.is_cpu:
                    devices.add(source.device)
                if source.data_ptr() in waiting:
                    self._left.append((source, entry))
                else:
                    self._copy(source, entry, entry.begin, entry.end)
        # They begin after all that is queued so far, the copies just made included.
        self._streams = {device: _side_stream(device) for device in devices}

    @torch.no_grad()
    def run(self) -> None:
        """Copy what is left, chunk by chunk, with the checksum while a chunk is still in the cache."""
        done, step = 0, self.plan.chunk_bytes
        try:
            for source, entry in self._left:
                stream = self._streams.get(source.device) if self._streams else None
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    at = entry.begin
                    while at < entry.end:
                        done = self._announce(done, at)
                        stop = min(entry.end, (at // step + 1) * step) if _is_plain(source) else entry.end
                        self._copy(source, entry, at, stop)
                        at = stop
            for stream in self._streams.values():
                stream.synchronize()
        except RuntimeError as fault:  # a device that failed
            self._fault = fault
            self._ready.put(self.plan.chunks)
            raise
        finally:
            self.copied.set()
            self._left = []
        self._announce(done, self.plan.layout.data_bytes)

    def checksum(self, index: int) -> int:
        """Chunk `index`'s checksum, once the chunk is complete. OSError where copying it failed."""
        while self._complete <= index:
            self._complete = self._ready.get()
        if self._fault is not None:
            raise OSError(errno.EIO, f"the state could not be copied: {self._fault}")
        return self._sum(index)

    def wait(self) -> None:
        """Return when the state's own tensors may be changed."""
        if not self.copied.is_set():
            self.hurry = True
            self.copied.wait()

    def _copy(self, source: torch.Tensor, entry: Entry, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of the image, which lie in `entry`; all of it where it is not one run of bytes."""
        if _is_plain(source):
            move = _held_move if end - begin <= HELD_BYTES_MAX else ctypes.memmove
            move(self.image.address + begin, source.data_ptr() + begin - entry.begin, end - begin)
        else:
            self.image.tensor(entry, 0).copy_(source, non_blocking=True)

    def _sum(self, index: int) -> int:
        value = self._sums[index]
        if value is None:
            begin, end = self.plan.chunk(index)
            value = self._sums[index] = checksum(self.image.bytes[begin:end])
        return value

    def _announce(self, done: int, upto: int) -> int:
        """Chunks that end at or before `upto` are complete; returns their number."""
        if self._streams and not self.copied.is_set():
            return done  # copies from a device are only queued yet
        while done < self.plan.chunks and self.plan.chunk(done)[1] <= upto:
            if not self.hurry:
                self._sum(done)
            done += 1
            self._ready.put(done)
        return done


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors.values()]


def _is_plain(tensor: torch.Tensor) -> bool:
    """One run of bytes in this machine's memory, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that begins after all that is queued so far, so the training's stream need not stop for the copy."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
