"""What is done to files on a network file system, in a process of its own: NFS hangs where its server is away.

    efs_files.py folder TOP UID GID MODE PART…      TOP/PART/…, what is missing of it made; UID -1 leaves the owner
    efs_files.py put < {"top", "folder": [part, …], "files": [[source, name], …]}

Each file is written beside its place, written out and renamed: whoever looks sees all of it or nothing, also after a
kill. `put` prints a JSON line whenever something reached the server: {"bytes"} on the way, then of each file
{"done", "size", "sha256"} or {"failed", "errno", "text"}. No link below TOP is followed: folders there may be a
trainer's, and we may be root. Standard library only, started with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

CHUNK_BYTES = 4 << 20
PARTIAL = ".partial"
SERVER_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def main() -> None:
    if sys.argv[1] == "folder":
        top, uid, gid, mode, *parts = sys.argv[2:]
        try:
            make_folder(top, parts, int(uid), int(gid), int(mode, 8))
        except OSError as error:
            say({"failed": parts[-1], "errno": error.errno, "text": error.strerror or str(error)})
            sys.exit(1)
        return
    order = json.load(sys.stdin)
    for source, name in order["files"]:
        try:
            size, digest = put(source, order["top"], [*order["folder"], *name.split("/")])
        except OSError as error:
            line = {"failed": source, "errno": error.errno, "text": error.strerror or str(error)}
            say(line | {"server": error.errno in SERVER_FAULTS})
            if error.errno in SERVER_FAULTS:
                return  # for the others too
        else:
            say({"done": source, "size": size, "sha256": digest})


@contextlib.contextmanager
def descended(top: str, parts: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """A descriptor of TOP/part/…, made as root's where it is missing, and whether the last part was made."""
    descriptor, is_new = os.open(top, _FOLDER), False
    try:
        for part in parts:
            is_new = False
            try:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another machine of the run makes it too
                    os.mkdir(part, 0o755, dir_fd=descriptor)
                    is_new = True
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor, is_new
    finally:
        os.close(descriptor)


def make_folder(top: str, parts: Sequence[str], uid: int, gid: int, mode: int) -> None:
    """One that is there keeps its owner and its mode."""
    with descended(top, parts) as (folder, is_new):
        if is_new:
            if uid >= 0:
                os.fchown(folder, uid, gid)
            os.fchmod(folder, mode)


def put(source: str, top: str, parts: Sequence[str]) -> tuple[int, str]:
    """Size and sha256 of what was copied. A trainer may have put a link or a pipe there: only files count."""
    with _opened(source) as original, descended(top, parts[:-1]) as (folder, _):
        status = os.fstat(original.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no file")
        mark = hashlib.sha256(parts[-1].encode("utf-8", "surrogateescape")).hexdigest()[:16]
        _drop_leftovers(folder, mark)
        part = f".{mark}.{os.getpid()}{PARTIAL}"
        digest, size = hashlib.sha256(), 0
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), "wb") as file:
                while chunk := original.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                    say({"bytes": size})
                with contextlib.suppress(PermissionError):  # a server that takes root's power away
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode) & 0o777)
                os.fsync(file.fileno())
            os.rename(part, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        os.fsync(folder)
    return size, digest.hexdigest()


def _opened(source: str) -> BinaryIO:
    """Folder by folder: between the listing and now a trainer's folder may have become a link."""
    *folders, name = source.strip("/").split("/")
    here = os.open("/", _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
            os.close(here)
            here = inner
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
        return open(descriptor, "rb")
    finally:
        os.close(here)


def _drop_leftovers(folder: int, mark: str) -> None:
    """Of a copy that was killed. One machine at a time writes a file of a run."""
    for name in os.listdir(folder):
        if name.startswith(f".{mark}.") and name.endswith(PARTIAL):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def say(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
