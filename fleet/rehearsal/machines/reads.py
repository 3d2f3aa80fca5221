"""Whether a file was read before it was written again: Linux's inotify tells both, in their order.

The time of access alone does not: a script that saves and then copies its save to `model_best.pth.tar` reads what it
wrote itself (pytorch/examples' imagenet). Reads through a map of memory cause no event, but change the time of access.
Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ACCESS, _MODIFY, _OVERFLOW, _DONT_FOLLOW = 0x1, 0x2, 0x4000, 0x02000000
_HEAD = struct.Struct("iIII")  # watch, mask, cookie, bytes of a name
_BUFFER_BYTES = 64 * 1024


@dataclass(frozen=True)
class _File:
    path: Path
    read_ns: int
    written_ns: int

    def was_mapped(self) -> bool:
        status = self.path.stat()
        return status.st_mtime_ns == self.written_ns and status.st_atime_ns != self.read_ns


def tells_reads(folder: Path) -> bool:
    """Whether this file system changes the times of access: with `noatime` it does not."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / "probe"
    probe.write_bytes(b"x")
    os.link(probe, folder / "probe-link")
    before = probe.stat().st_atime_ns
    probe.read_bytes()
    return probe.stat().st_atime_ns != before


class Reads:
    """Watches the content that `paths` have now; `close` frees the watches."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[_File] = []
        self._any = False
        self._unchanged: set[int] = set()
        libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._queue = -1 if libc is None else libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in paths:
            status = path.stat(follow_symlinks=False)
            self._files.append(_File(path, status.st_atime_ns, status.st_mtime_ns))
            if libc is not None and self._queue >= 0:
                watch = libc.inotify_add_watch(self._queue, os.fsencode(path), _ACCESS | _MODIFY | _DONT_FOLLOW)
                self._unchanged.add(watch)

    def any(self) -> bool:
        """Whether any of the files was read while it had its first content; also True if that is unknown.

        It is unknown outside Linux, and if the system gives no more watches.
        """
        if not self._any and self._files:
            known = self._queue >= 0 and -1 not in self._unchanged
            self._any = not known or self._told() or any(file.was_mapped() for file in self._files)
        return self._any

    def _told(self) -> bool:
        while True:
            try:
                events = os.read(self._queue, _BUFFER_BYTES)
            except BlockingIOError:
                return False
            offset = 0
            while offset < len(events):
                watch, mask, _, length = _HEAD.unpack_from(events, offset)
                offset += _HEAD.size + length
                if mask & _OVERFLOW or (mask & _ACCESS and watch in self._unchanged):
                    return True
                if mask & _MODIFY:
                    self._unchanged.discard(watch)

    def close(self) -> None:
        if self._queue >= 0:
            os.close(self._queue)
            self._queue = -1
