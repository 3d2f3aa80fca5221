"""The few operations on files that a checkpoint is made of, in one place, so that a test can record or fail each."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.slotfile.format import ALIGNMENT

_DIRECT = getattr(os, "O_DIRECT", 0)
# Without the times of the file, which cost a commit of the journal: content and size are what a reader needs.
_sync_data = getattr(os, "fdatasync", os.fsync)


class Files:
    """Operations of the operating system, by path and descriptor. All raise OSError."""

    def create(self, path: Path) -> int:
        """Open for writing; made if absent. Never follows a link."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        """All of `data`; a short write is continued."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(fd, rest, offset)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += count
            rest = rest[count:]

    def truncate(self, fd: int, size: int) -> None:
        """Set the size to `size` bytes; added bytes read as zeros."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """Content and size of a file are durable."""
        _sync_data(fd)

    def close(self, fd: int) -> None:
        """Not durable by itself: see `fsync`."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic within a filesystem, replacing `new`; durable after `sync_folder`. Source: rename(2)."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """The name is gone at once, and after `sync_folder` also behind a power loss."""
        os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Make renames in `folder` durable: without it an acknowledged file can be gone after a power loss."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def direct(self, path: Path) -> int | None:
        """A second descriptor that writes past the page cache, or None if the filesystem has no such way."""
        if not _DIRECT:
            return None
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | _DIRECT)
        except OSError as fault:
            if fault.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise


def refuse_unwritable(folder: Path, purpose: str, variable: str = "") -> None:
    """Make `folder`; ConfigError (with `purpose`) if it cannot be written to: before a step is trained, not after.

    `variable`: the one of the environment that can name another folder.
    """
    refuse_no_folder(folder, purpose, variable)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "it is read-only, or another user's"
    except OSError as fault:
        reason = fault.strerror or str(fault)
    if reason:
        raise ConfigError(
            f"{purpose} in {folder}: {reason}",
            next_step=f"{_give(variable)} that this user may write to, or see `mount` and `ls -ld`",
        )


def refuse_no_folder(folder: Path, purpose: str, variable: str = "") -> None:
    """ConfigError (with `purpose`) if a file has its name, or the name of a parent. Makes nothing."""
    place = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
    if place is None or os.path.isdir(place):
        return
    name = "it" if place == folder else str(place)
    if os.path.exists(place):
        reason, step = f"{name} is a file, not a folder", f"move {place} away"
    else:
        reason, step = (
            f"{name} is a link to nothing",
            f"make the folder that `readlink {place}` names, or remove the link",
        )
    raise ConfigError(f"{purpose} in {folder}: {reason}", next_step=f"{step}, or {_give(variable)}")


def _give(variable: str) -> str:
    return f"name a folder in {variable}" if variable else "give a folder"


def open_regular(path: Path, direct: bool = False) -> int:
    """Open for reading; OSError if it is a link or no regular file (a pipe would block for ever)."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | (_DIRECT if direct else 0))
    except OSError as fault:
        if not direct or fault.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_into(fd: int, view: memoryview, offset: int) -> int:
    """Read until `view` is full or the file ends; returns the bytes read."""
    position = 0
    while position < len(view):
        count = os.preadv(fd, [view[position:]], offset + position)
        if count == 0:
            break
        position += count
        if position % ALIGNMENT and position < len(view):
            break  # the end of the file: O_DIRECT refuses to ask from an odd place
    return position
