"""Where the small files that a trainer reads at its start lie on the volume's device.

    <volume>/.spotheal/extents.json    {"extents": [[offset, bytes], ...]}, as of some minutes after the trainer's start

A moved volume loads each block at its first read, which takes milliseconds. File by file that is a wait for each folder
and inode, too. The next machine reads these extents from the device itself, many at once, before any file. Each is
rounded to 512 KiB, the size of a block of a snapshot (EBS direct APIs, `BlockSize`): that covers the folders and inodes
nearby, too. Nothing read so is used: a wrong record costs time, and no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.repository.working_copy import files_of_commit
from spotheal.agent.volume.read_ahead import BLOCK_BYTES, EXTENTS, Extent, bounded, newest

FILE_BYTES_MAX = 4 << 20  # a larger file is read at full speed anyway
FILES_MAX = 50_000
_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP; linux/fiemap.h
_HEAD, _EXTENT = struct.Struct("=QQIIII"), struct.Struct("=QQQQQIIII")
_NO_PLACE = 0x2 | 0x4 | 0x200  # UNKNOWN, DELALLOC, DATA_INLINE
_OF_A_FILE_MAX = 64


def record(folders: Folders, over: Stop) -> None:
    """Of the commit's files with their byte code, then of the newest environment. OSError if it cannot be written."""
    commit = files_of_commit(folders)
    copy = _extents_below(folders.clone, "", over, lambda path: path in commit or path.endswith(".pyc"))
    extents = merged(copy)
    if environment := newest(folders.environments, "env-"):
        extents += merged(_extents_below(folders.environments, environment, over, lambda path: True))
    if extents and not over.is_set():
        publish(folders.private / EXTENTS, json.dumps({"extents": bounded(extents)}))


def _extents_below(top: Path, below: str, over: Stop, selects: Callable[[str], bool]) -> Iterator[Extent]:
    for count, (path, status) in enumerate(untrusted_folders.files(top, (".git",), below=below, selects=selects)):
        if over.is_set() or count >= FILES_MAX:
            return
        if status.st_size <= FILE_BYTES_MAX:
            with contextlib.suppress(OSError), untrusted_folders.file(top, os.path.join(below, path)) as file:
                yield from _extents_of(file)


def _extents_of(file: int) -> Iterator[Extent]:
    room = bytearray(_HEAD.size + _OF_A_FILE_MAX * _EXTENT.size)
    _HEAD.pack_into(room, 0, 0, (1 << 64) - 1, 0, 0, _OF_A_FILE_MAX, 0)
    fcntl.ioctl(file, _FIEMAP, room)
    count = _HEAD.unpack_from(room)[3]
    for number in range(count):
        _, offset, size, _, _, flags, *_ = _EXTENT.unpack_from(room, _HEAD.size + number * _EXTENT.size)
        if not flags & _NO_PLACE:
            yield offset, size


def merged(extents: Iterable[Extent]) -> list[Extent]:
    """Whole blocks, in the device's order, neighbours as one."""
    whole: list[Extent] = []
    for offset, size in sorted(extents):
        begin, end = offset // BLOCK_BYTES * BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES) * BLOCK_BYTES
        if whole and begin <= sum(whole[-1]):
            begin, end = whole[-1][0], max(sum(whole.pop()), end)
        whole.append((begin, end - begin))
    return whole
