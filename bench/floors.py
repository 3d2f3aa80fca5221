"""What the machine can do with as many bytes: a copy, a direct write, touching fresh memory, a cold raw read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 16 << 20


class Floors:
    """What the machine can do with as many bytes, at this very moment."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size - size % CHUNK
        self.path = folder / "raw"
        self.memory = large_pages(2 * self.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, 1, 2 * self.size)
        self.copy()

    def copy(self) -> float:
        return timed(lambda: ctypes.memmove(self.address, self.address + self.size, self.size))

    def write(self) -> float:
        def write() -> None:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            for at in range(0, self.size, CHUNK):
                os.pwrite(fd, memoryview(self.memory)[at : at + CHUNK], at)
            os.fsync(fd)
            os.close(fd)

        return timed(write)

    def fresh(self) -> float:
        """Seconds to touch as many bytes that this process did not have: the machine's share of any load."""

        def touch() -> None:
            memory = large_pages(self.size)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, self.size)

        return timed(touch)

    def read(self, path: Path) -> float:
        def read() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            at = 0
            while count := os.preadv(fd, [memoryview(self.memory)[:CHUNK]], at):
                at += count
                if count % 4096:
                    break
            os.close(fd)

        drop_cache(path)
        return timed(read)


def large_pages(size: int) -> mmap.mmap:
    """Fresh memory in the largest pages that the kernel gives, as ours: floors on small pages would be too easy."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def drop_cache(path: Path) -> None:
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
