"""Reads from a copied volume what a trainer needs at its start, so that it does not wait for each block alone.

    read_ahead.py < {"device", "extents", "copy", "record", "environments", "checkpoints", "bytes_max", "seconds_max"}

The first reading of a block of such a volume takes milliseconds, however small it is (EBS User Guide, "Initialize
Amazon EBS volumes"), and many at once take no longer than one. First come whole blocks of the device, as an earlier
machine recorded them (`extents`): by files alone, each folder and inode is a wait, too. Then come the status of the
commit's files, which the agent asks for one after the other before the trainer starts; the byte code, which is what an
import opens; the commit's files, the environment of `setup`, and the newest checkpoint. A process of its own, so that
the volume is free once it has ended; it has no output, and no fault of it is a fault of the boot.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol import bounded_json

READERS = 16  # 48 took 0.2 s more of the processors that the trainer needs, and gained nothing
CHUNK_BYTES = 1 << 20
NAMES_AT_ONCE = 64  # XFS reads 64 inodes at once
BLOCK_BYTES = 1 << 19  # of a snapshot; EBS direct APIs, `BlockSize`
EXTENTS = "extents.json"  # in the agent's folder on the volume; by `extents`
EXTENTS_BYTES_MAX = 512 << 20  # of one record
_RECORD_BYTES_MAX = 1 << 20

Extent = tuple[int, int]  # offset and bytes


def main() -> None:
    order = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_REAL, order["seconds_max"])  # whose signal ends this process
    read_all(order, Reader(order["bytes_max"]))


def read_all(order: dict[str, str], reader: Reader) -> None:
    with contextlib.suppress(OSError, ValueError):
        read_device(order["device"], order["extents"], reader)
    files: list[str] = []
    with contextlib.suppress(OSError, ValueError, KeyError), open(order["record"], encoding="utf-8") as file:
        files = list(json.load(file)["files"])
    copy, environments, checkpoints = (Path(order[name]) for name in ("copy", "environments", "checkpoints"))
    reader.all_of([partial(reader.look, copy, folder, names) for folder, names in _by_folder(files)])
    modules = {os.path.dirname(path) for path in files if path.endswith(".py")}
    reader.all_of([partial(reader.walk, copy, os.path.join(folder, "__pycache__")) for folder in sorted(modules)])
    reader.all_of([partial(reader.read, copy, path) for path in files])
    if environment := newest(environments, "env-"):
        reader.all_of([partial(reader.walk, environments, environment)])
    if checkpoint := newest(checkpoints):
        reader.all_of([partial(work, checkpoints, checkpoint) for work in (reader.walk, reader.read)])


def read_device(device: str, record: str, reader: Reader) -> None:
    """Without the page cache, which is not the one that a file is read from. OSError, ValueError without a record."""
    with open(record, encoding="utf-8") as file:
        text = file.read(_RECORD_BYTES_MAX + 1)
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        extents = recorded(text, os.lseek(fd, 0, os.SEEK_END))
        places = (place for offset, size in extents for place in range(offset, offset + size, BLOCK_BYTES))
        reader.all_of([partial(reader.read_block, fd, place) for place in places])
    finally:
        os.close(fd)


def recorded(text: str, device_bytes: int) -> list[Extent]:
    """The extents of a record: whole blocks within the device, within the bound. ValueError if it is no record."""
    rows = bounded_json.parse_object(text, bytes_max=_RECORD_BYTES_MAX).get("extents")
    if not isinstance(rows, list):
        raise ValueError("no list of extents")
    return bounded((row[0], row[1]) for row in rows if _is_within(row, device_bytes))


def _is_within(row: object, device_bytes: int) -> bool:
    if not isinstance(row, list) or len(row) != 2 or not all(type(number) is int for number in row):
        return False
    offset, size = row
    whole = offset % BLOCK_BYTES == size % BLOCK_BYTES == 0
    end = -(-device_bytes // BLOCK_BYTES) * BLOCK_BYTES
    return bool(whole and offset >= 0 and size > 0 and offset + size <= end)


def bounded(extents: Iterable[Extent]) -> list[Extent]:
    """The first of them, `EXTENTS_BYTES_MAX` in all."""
    bytes_left, found = EXTENTS_BYTES_MAX, []
    for offset, size in extents:
        if size > bytes_left:
            break
        bytes_left -= size
        found.append((offset, size))
    return found


def _by_folder(files: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """`NAMES_AT_ONCE` names of one folder each."""
    names: dict[str, list[str]] = {}
    for path in files:
        folder, name = os.path.split(path)
        names.setdefault(folder, []).append(name)
    for folder, all_names in names.items():
        for begin in range(0, len(all_names), NAMES_AT_ONCE):
            yield folder, all_names[begin : begin + NAMES_AT_ONCE]


def newest(folder: Path, prefix: str = "") -> str:
    """The name of what was changed last in `folder`; "" if there is nothing that a trainer would load."""
    with contextlib.suppress(OSError), untrusted_folders.folder(folder) as fd, os.scandir(fd) as entries:
        candidates = [e for e in entries if e.name.startswith(prefix) and e.name[0] != "." and not e.is_symlink()]
        return max(candidates, key=lambda e: e.stat(follow_symlinks=False).st_mtime).name if candidates else ""
    return ""


class Reader:
    """`READERS` at once; `bytes_max` in all. The trainer owns the folders: what is a link, or no file, is left out."""

    def __init__(self, bytes_max: int) -> None:
        self._left, self._lock = bytes_max, threading.Lock()
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue()
        for _ in range(READERS):
            threading.Thread(target=self._work, daemon=True).start()

    def all_of(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Until they are done, and what they have begun."""
        for task in tasks:
            self._tasks.put(task)
        self._tasks.join()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            with contextlib.suppress(OSError, ValueError):
                task()
            self._tasks.task_done()

    def read_block(self, device: int, offset: int) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as room:  # whole pages, which a direct read needs
            os.preadv(device, [room], offset)

    def look(self, top: Path, below: str, names: Iterable[str]) -> None:
        with untrusted_folders.folder(top, below) as fd:
            for name in names:
                untrusted_folders.status_of(fd, name)

    def walk(self, top: Path, below: str) -> None:
        with untrusted_folders.folder(top, below) as fd, os.scandir(fd) as entries:
            for entry in entries:
                work = self.walk if entry.is_dir(follow_symlinks=False) else self.read
                self._tasks.put(partial(work, top, os.path.join(below, entry.name)))

    def read(self, top: Path, path: str) -> None:
        with untrusted_folders.file(top, path) as fd:
            size = os.fstat(fd).st_size
            with self._lock:
                if size > self._left:
                    return
                self._left -= size
            os.pread(fd, CHUNK_BYTES, 0)
        for offset in range(CHUNK_BYTES, size, CHUNK_BYTES):
            self._tasks.put(partial(_read_at, top, path, offset))


def _read_at(top: Path, path: str, offset: int) -> None:
    with untrusted_folders.file(top, path) as fd:
        os.pread(fd, CHUNK_BYTES, offset)


if __name__ == "__main__":
    main()
