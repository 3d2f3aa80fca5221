"""Slots: a fixed number of checkpoint files overwritten in place, so that the next snapshot of the volume stays small.

The order, after which no crash and no power loss can lose an acknowledged checkpoint (tests enumerate them all):
rename the oldest slot to `.tmp`, fsync the folder; zero its header, fsync; payload, fsync; header, fsync;
rename to `step-N`, fsync the folder. While one slot is written the others are untouched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spotheal.training.slotfile.checksum import checksum
from spotheal.training.slotfile.copying import beside
from spotheal.training.slotfile.files import Files, open_regular, read_into
from spotheal.training.slotfile.format import (
    ALIGNMENT,
    BrokenCheckpoint,
    Header,
    Layout,
    header_bytes,
    header_length,
    header_room,
    parse_header,
)
from spotheal.training.slotfile.image import TORCH_DTYPE, Image
from spotheal.training.slotfile.packing import to_json

SUFFIX = ".safetensors"
BROKEN = "broken-"
STEP_MAX = 10**18 - 1  # of the name; more digits would never be found again


@dataclass(frozen=True)
class Payload:
    """The content to write: the data, from the first byte of the image on, and the parts of the header.

    `state` is values for JSON, or gives their text: made by the writer, for the training need not wait for it.
    """

    image: Image
    layout: Layout
    chunk_bytes: int
    step: int
    state: Any
    info_json: str

    @functools.cached_property
    def state_json(self) -> str:
        """The state's values as JSON, made at the first use: in the writer's thread."""
        return str(self.state()) if callable(self.state) else to_json(self.state)


@dataclass(frozen=True)
class Series:
    """One series of files in a folder: `step-` (the slots), `best-`, `milestone-`. `kept` 0 keeps every one."""

    folder: Path
    prefix: str
    kept: int

    def path(self, step: int) -> Path:
        """The path of `step`: steps have 9 digits, so that names sort as numbers up to a thousand million."""
        return self.folder / f"{self.prefix}{step:09d}{SUFFIX}"

    @property
    def temporary(self) -> Path:
        """The slot while it is written; its content after a crash was never acknowledged."""
        return self.folder / f".{self.prefix.rstrip('-')}.tmp"

    def found(self) -> list[tuple[int, Path]]:
        """Step and path of every file of the series, newest first, by name alone."""
        pattern = re.compile(re.escape(self.prefix) + r"(\d{1,18})" + re.escape(SUFFIX))
        matches = ((pattern.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)

    # ---------------------------------------------------------------------------------------------------------- write
    def write(
        self, files: Files, payload: Payload, checksums: Callable[[int], int], threads: Executor | None = None
    ) -> Path:
        """Write `payload` as step `payload.step`, durably; the path once it is acknowledged.

        `checksums(i)` gives chunk i's checksum and may wait until that chunk of the image is complete.
        OSError if it fails: nothing is acknowledged then, and the files before are as they were.
        """
        final = self.path(payload.step)
        self._free_a_slot(files, final)
        write_file(files, self.temporary, payload, checksums, threads)
        files.rename(self.temporary, final)
        files.sync_folder(self.folder)
        return final

    def _free_a_slot(self, files: Files, final: Path) -> None:
        """Turn the oldest slot into `.tmp`, unless a crash left one or there is still room for another slot."""
        if self.temporary.is_symlink():
            files.unlink(self.temporary)
        if self.temporary.exists():
            return
        # A file of the very step that is written stays until the new one replaces it: it may be the only good one.
        paths = [path for _, path in self.found() if path != final]
        if self.kept and len(paths) >= max(self.kept, 2):
            files.rename(paths[-1], self.temporary)
            files.sync_folder(self.folder)


def write_file(
    files: Files, path: Path, payload: Payload, checksums: Callable[[int], int], threads: Executor | None = None
) -> None:
    """The file itself, made or overwritten, its header last; OSError if it fails, and then it is gone.

    With `threads` two chunks are written at a time. `checksums` is called in order, by one thread at a time.
    """
    layout = payload.layout
    texts = payload.state_json, payload.info_json
    room = header_room(layout, *texts, payload.chunk_bytes)
    fd = files.create(path)
    direct = None
    try:
        files.write(fd, bytes(ALIGNMENT), 0)
        if os.fstat(fd).st_size != room + layout.data_bytes:
            files.truncate(fd, room + layout.data_bytes)
        files.fsync(fd)
        direct = files.direct(path)
        sums = _write_chunks(files, (fd, direct), payload, room, checksums, threads)
        files.fsync(fd)
        whole = header_bytes(layout, payload.step, *texts, payload.chunk_bytes, sums, room)
        files.write(fd, whole, 0)
        files.fsync(fd)
    except OSError:
        # After a failed fsync the kernel may have dropped the pages: this file's content is no longer known.
        with contextlib.suppress(OSError):
            files.unlink(path)
        raise
    finally:
        files.close(fd)
        if direct is not None:
            files.close(direct)


def _write_chunks(
    files: Files,
    descriptors: tuple[int, int | None],
    payload: Payload,
    room: int,
    checksums: Callable[[int], int],
    threads: Executor | None,
) -> list[int]:
    """Write the data as its chunks become complete; their checksums. When this returns or raises no write is left."""
    fd, direct = descriptors
    sums: list[int] = []
    rest = iter(range(0, payload.layout.data_bytes, payload.chunk_bytes))
    turn = threading.Lock()
    failed = threading.Event()

    def write_in_turn() -> None:
        out = fd if direct is None else direct
        try:
            while True:
                with turn:
                    begin = next(rest, None)
                    if begin is None or failed.is_set():
                        return
                    sums.append(checksums(len(sums)))
                end = min(begin + payload.chunk_bytes, payload.layout.data_bytes)
                out = _write_chunk(files, fd, out, payload.image.view[begin:end], room + begin)
        except BaseException:
            failed.set()
            raise

    helper = beside(threads, write_in_turn) if payload.layout.data_bytes > payload.chunk_bytes else None
    try:
        write_in_turn()
    finally:
        fault = helper.exception() if helper is not None and not helper.cancel() else None
    if fault is not None:
        raise fault
    return sums


def _write_chunk(files: Files, fd: int, out: int, data: memoryview, at: int) -> int:
    """Write past the page cache (`out`) if that works; returns the descriptor to go on with."""
    try:
        files.write(out, data, at)
        return out
    except OSError as fault:
        if out == fd or fault.errno != errno.EINVAL:  # some filesystems refuse O_DIRECT only at the first write
            raise
    files.write(fd, data, at)
    return fd


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While one writer is inside, another (a trainer started twice, one left over) gets OSError EBUSY.

    They would rename one `.tmp` between them, and acknowledge what the other is still writing. Filesystems without
    locks are taken as they are. Unlocked before it is closed: who was forked in C meanwhile has the descriptor too.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _LOCKS.add(fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another process saves into this folder at this moment") from None
        except OSError:
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        _LOCKS.discard(fd)
        os.close(fd)


_LOCKS: set[int] = set()  # descriptors of `alone_in`


def _leave_locks_to_the_parent() -> None:
    """In a forked child: with its descriptor a worker that outlives a killed trainer would keep the next one out."""
    for fd in _LOCKS:
        with contextlib.suppress(OSError):
            os.close(fd)
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def read_header(path: Path) -> Header:
    """The header alone, checked against its own checksum. BrokenCheckpoint or OSError."""
    fd = open_regular(path)
    try:
        return _header(fd, path)
    finally:
        Files().close(fd)


def read(
    path: Path, image_for: Callable[[int], Image] = Image, threads: Executor | None = None
) -> tuple[Header, Image]:
    """The whole file, every checksum verified, into `image_for(bytes)`. BrokenCheckpoint or OSError.

    With `threads` several chunks are read and verified at a time.
    """
    files = Files()
    fd = open_regular(path)
    try:
        direct = open_regular(path, direct=True)
    except OSError:
        files.close(fd)
        raise
    futures: list[Future[int]] = []
    try:
        header = _header(fd, path)
        image = image_for(header.file_bytes)

        def chunk_sum(begin: int) -> int:
            at, size = header.data_at + begin, min(header.chunk_bytes, header.layout.data_bytes - begin)
            if _read_chunk(fd, direct, image.view[at : at + size], at) != size:
                raise BrokenCheckpoint("it ends early")
            return checksum(image.bytes[at : at + size])

        begins = range(0, header.layout.data_bytes, header.chunk_bytes)
        for begin in begins:
            if (future := beside(threads, chunk_sum, begin)) is None:
                break
            futures.append(future)
        sums: list[Callable[[], int]] = [future.result for future in futures]
        sums += [partial(chunk_sum, begin) for begin in begins[len(futures) :]]
        for index, chunk_checksum in enumerate(sums):
            if chunk_checksum() != header.checksums[index]:
                raise BrokenCheckpoint(f"the checksum of chunk {index} of {len(sums)} does not match")
        image.keep_on_fork()  # the tensors in it are given away
        return header, image
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # none may read on into the image, or from a descriptor that means another file by then
        files.close(fd)
        files.close(direct)


def _read_chunk(fd: int, direct: int, view: memoryview, at: int) -> int:
    """Past the page cache where that works, as `_write_chunk`: else what was written so could never be read."""
    try:
        return read_into(direct, view, at)
    except OSError as fault:
        if fault.errno != errno.EINVAL:
            raise
    return read_into(fd, view, at)


def set_aside(path: Path, files: Files) -> Path:
    """Rename a broken file so that no scan finds it again; its content stays for people who want to look."""
    names = (path.with_name(f"{BROKEN}{path.name}{extra}") for extra in ("", *(f".{n}" for n in range(1, 1000))))
    aside = next(name for name in names if not name.exists())
    files.rename(path, aside)
    files.sync_folder(path.parent)
    return aside


def _header(fd: int, path: Path) -> Header:
    size = os.fstat(fd).st_size
    first = bytearray(8)
    read_into(fd, memoryview(first), 0)
    whole = bytearray(header_length(bytes(first), size))
    read_into(fd, memoryview(whole), 0)
    header = parse_header(bytes(whole), size)
    unknown: Iterable[Any] = {entry.dtype for entry in header.layout.entries} - TORCH_DTYPE.keys()
    for dtype in unknown:
        raise BrokenCheckpoint(f"it holds tensors of type {dtype}, which this torch does not have")
    if header.data_at % ALIGNMENT:
        raise BrokenCheckpoint("its data does not begin at a page")
    return header
