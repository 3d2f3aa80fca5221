"""A folder into the store, in parts of one tar stream: an upload that was cut short sends only what is missing.

The stream is the same for the same files (order, names, sizes, times, modes), so each part is known by its checksum; a
part that is there is read here again and not sent.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.run.table import size_of

PART_BYTES = 64 * 2**20
_END = object()
Progress = Callable[[int, bool], None]  # bytes of the stream done so far, whether they were sent or there already


@dataclass(frozen=True)
class Folder:
    """The files to upload, in the order of their names, and their total size."""

    root: Path
    files: tuple[Path, ...]
    size: int


def scan(root: Path) -> Folder:
    """ConfigError if the folder is empty. Links are kept as links; sockets, pipes and devices are left out."""
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder", next_step="name the folder with the datasets")
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders.sort()
        entries = [Path(folder, name) for name in sorted(names)]
        paths += [path for path in entries if path.is_file() or path.is_symlink()]
    if not paths:
        raise ConfigError(f"{root} holds no file", next_step="name the folder with the datasets")
    return Folder(root, tuple(paths), sum(path.lstat().st_size for path in paths))


def check_room(folder: Folder, size_gib: int) -> None:
    """ConfigError if the volume cannot hold the files. The holes of sparse ones count: they are sent as zeros."""
    if folder.size > size_gib << 30:
        raise ConfigError(
            f"{size_of(folder.size)} are to be uploaded, and the volume has {size_gib} GiB",
            next_step="a larger volume: `fleetctl volume create --size GIB`; or a folder with less in it",
        )


def upload(store: Store, folder: Folder, progress: Progress, part_bytes: int = PART_BYTES) -> tuple[list[str], int]:
    """Send the missing parts; returns the keys of all parts, in order, and the bytes of the stream."""
    sizes = dict(store.sizes("parts/"))
    keys: list[str] = []
    bytes_done = 0
    for part in parts(folder, part_bytes):
        key = f"parts/{len(keys):06d}-{hashlib.sha256(part).hexdigest()[:32]}"
        is_new = sizes.get(key) != len(part)
        if is_new:
            store.put_bytes(key, part)
        keys.append(key)
        bytes_done += len(part)
        progress(bytes_done, is_new)
    return keys, bytes_done


def parts(folder: Folder, part_bytes: int) -> Iterator[bytes]:
    """The tar stream in parts; only one part, and the buffers of tarfile, are in memory."""
    queue: Queue[Any] = Queue(maxsize=2)
    stop = threading.Event()
    fault: list[BaseException] = []

    def write() -> None:
        try:
            with (
                _Cut(queue, part_bytes, stop) as cut,  # closed last: it hands over the rest
                tarfile.open(fileobj=cut, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ):
                for path in folder.files:
                    archive.add(path, str(path.relative_to(folder.root)), recursive=False, filter=_anybody)
        except (OSError, ValueError, tarfile.TarError) as error:
            fault.append(error)
        finally:
            queue.put(_END)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    pending = b""
    try:
        while (data := queue.get()) is not _END:
            pending += data
            while len(pending) >= part_bytes:
                yield pending[:part_bytes]
                pending = pending[part_bytes:]
        if fault:
            raise ConfigError(f"{folder.root} cannot be read: {fault[0]}", next_step="correct it; the sent parts stay")
        if pending:
            yield pending
    finally:
        stop.set()
        while writer.is_alive() and not queue.empty():
            queue.get()


def _anybody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """No owner: the instance has other users, and the stream must be the same for every sender."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


class _Cut(io.RawIOBase):
    """Takes the bytes that tarfile writes, and hands them over in pieces."""

    def __init__(self, queue: Queue[Any], part_bytes: int, stop: threading.Event) -> None:
        self._queue, self._part_bytes, self._stop, self._buffer = queue, part_bytes, stop, bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._stop.is_set():
            raise OSError("the upload was given up")
        self._buffer += data
        if len(self._buffer) >= self._part_bytes:
            self._hand_over()
        return len(data)

    def close(self) -> None:
        if not self.closed and self._buffer:
            self._hand_over()
        super().close()

    def _hand_over(self) -> None:
        self._queue.put(bytes(self._buffer))
        self._buffer.clear()


def name_of(target: str) -> str:
    """The folder of the store for uploads to `target`, so that two uploads do not mix."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-.") or "data"


def delete(store: Store, keys: list[str]) -> None:
    """Delete the upload from the store: its files are on the volume now."""
    for key in keys:
        store.delete(key)
