"""Copy a state into the image while the training goes on, and hand the chunks on as they become complete.

What the optimizer step changes (parameters, optimizer state) may be copied behind the training's back until the next
`optimizer.step`, which waits for it. Everything else (BatchNorm's statistics!) changes in the forward pass already and
is copied at once: a peer that overlaps those saves them of the wrong step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spotheal.training.checksum import checksum
from spotheal.training.format import Header
from spotheal.training.image import Image


@dataclass
class Piece:
    """Bytes `begin` to `end` of the image's data; `offset` is where they begin in a plain source."""

    source: torch.Tensor
    target: torch.Tensor | None  # where it is not plain
    begin: int
    end: int
    offset: int
    plain: bool  # one run of bytes in this machine's memory

    def copy(self, image_address: int) -> None:
        if self.plain:
            ctypes.memmove(image_address + self.begin, self.source.data_ptr() + self.offset, self.end - self.begin)
        elif self.target is not None:
            self.target.copy_(self.source, non_blocking=True)


class Copy:
    """One copy of a state into the data region of `image`. Made in the training's thread, run in another."""

    def __init__(self, header: Header, image: Image, tensors: Mapping[str, torch.Tensor], later: set[int]) -> None:
        """`later` holds the data_ptr of each storage that only the optimizer step changes; all else is copied now."""
        self.header, self.image = header, image
        self.copied = threading.Event()  # the sources are free again
        self.hurry = False  # somebody waits for `copied`: leave the checksums for after it
        self._fault: RuntimeError | None = None
        self._address = image.bytes.data_ptr() + header.data_at
        count = len(header.checksums)
        self._sums: list[int | None] = [None] * count
        self._ready = [threading.Event() for _ in range(count)]
        self._devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._pieces: list[Piece] = []
        with torch.no_grad():
            for entry in header.layout.entries:
                if (tensor := tensors.get(entry.name)) is None or not tensor.numel():
                    continue
                plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()
                target = None if plain else image.tensor(entry, header.data_at)
                piece = Piece(tensor, target, entry.begin, entry.end, 0, plain)
                if tensor.untyped_storage().data_ptr() in later:
                    self._pieces.append(piece)
                else:
                    piece.copy(self._address)
        self._streams = {device: _side_stream(device) for device in self._devices}

    @torch.no_grad()
    def run(self) -> None:
        """Copy what is left, chunk by chunk, with the checksum while a chunk is still in the cache."""
        done = 0  # chunks complete
        try:
            for piece in self._split():
                done = self._announce(done, piece.begin)
                stream = self._streams.get(piece.source.device)
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    piece.copy(self._address)
            for stream in self._streams.values():
                stream.synchronize()
        except RuntimeError as fault:  # a device that failed
            self._fault = fault
            for event in self._ready:
                event.set()
            raise
        finally:
            self.copied.set()
        self._announce(done, self.header.layout.data_bytes)

    def checksum(self, index: int) -> int:
        """Chunk `index`'s checksum, once the chunk is complete. OSError where copying it failed."""
        self._ready[index].wait()
        if self._fault is not None:
            raise OSError(errno.EIO, f"the state could not be copied: {self._fault}")
        return self._sum(index)

    def _sum(self, index: int) -> int:
        value = self._sums[index]
        if value is None:
            begin = self.header.data_at + index * self.header.chunk_bytes
            value = checksum(self.image.bytes[begin : min(begin + self.header.chunk_bytes, self.header.file_bytes)])
            self._sums[index] = value
        return value

    def wait(self) -> None:
        """Return when the state's own tensors may be changed."""
        if not self.copied.is_set():
            self.hurry = True
            self.copied.wait()

    def _announce(self, done: int, upto: int) -> int:
        """Chunks that end at or before `upto` are complete; returns their number."""
        if self._devices and not self.copied.is_set():
            return done  # copies from a device are only queued yet
        chunk_bytes, last = self.header.chunk_bytes, len(self._ready)
        while done < last and min((done + 1) * chunk_bytes, self.header.layout.data_bytes) <= upto:
            if not self.hurry and not self.copied.is_set():
                self._sum(done)
            self._ready[done].set()
            done += 1
        return done

    def _split(self) -> list[Piece]:
        """Plain pieces cut at the ends of chunks."""
        chunk = self.header.chunk_bytes
        parts = []
        for piece in self._pieces:
            if not piece.plain:
                parts.append(piece)
                continue
            at = piece.begin
            while at < piece.end:
                stop = min(piece.end, (at // chunk + 1) * chunk)
                parts.append(Piece(piece.source, piece.target, at, stop, at - piece.begin, True))
                at = stop
        return parts


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that begins after all that is queued so far, so the training's stream need not stop for the copy."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
