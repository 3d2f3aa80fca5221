"""What is done to files on a network file system, in a process of its own: NFS hangs where its server is away.

    efs_files.py folder PATH UID GID MODE      the folder, made with its parents; what is there keeps its owner and mode
    efs_files.py put < {"files": [[source, target], …]}

Each file is written beside its place, written out and renamed: whoever looks sees all of it or nothing, also after a
kill. `put` prints a JSON line whenever something reached the server: {"bytes"} on the way, then of each file
{"done", "size", "sha256"} or {"failed", "errno", "text"}. Standard library only, started with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys

CHUNK_BYTES = 4 << 20
PARTIAL = ".partial"
SERVER_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN)


def main() -> None:
    order, arguments = sys.argv[1], sys.argv[2:]
    if order == "folder":
        path, uid, gid, mode = arguments
        try:
            make_folder(path, int(uid), int(gid), int(mode, 8))
        except OSError as error:
            say({"failed": path, "errno": error.errno, "text": error.strerror or str(error)})
            sys.exit(1)
    else:
        for source, target in json.load(sys.stdin)["files"]:
            try:
                size, digest = put(source, target)
            except OSError as error:
                said = {"failed": source, "errno": error.errno, "text": error.strerror or str(error)}
                say(said | {"server": error.errno in SERVER_FAULTS})
                if error.errno in SERVER_FAULTS:
                    return  # for the others too
            else:
                say({"done": source, "size": size, "sha256": digest})


def make_folder(path: str, uid: int, gid: int, mode: int) -> None:
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for index, folder in enumerate(reversed(missing), 1):
        with contextlib.suppress(FileExistsError):  # another machine of the run makes it too
            os.mkdir(folder, 0o755)
            if index == len(missing):
                if uid >= 0:
                    os.chown(folder, uid, gid)
                os.chmod(folder, mode)


def put(source: str, target: str) -> tuple[int, str]:
    """Size and sha256 of what was copied. A trainer may have put a link or a pipe there: only files count."""
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as original:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "is no file")
        _drop_leftovers(folder, target)
        beside = f"{folder}/.{os.path.basename(target)[:200]}.{os.getpid()}{PARTIAL}"
        digest, size = hashlib.sha256(), 0
        try:
            with open(beside, "wb") as file:
                while chunk := original.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                    say({"bytes": size})
                os.fsync(file.fileno())
            with contextlib.suppress(PermissionError):  # a server that takes root's power away
                os.chown(beside, seen.st_uid, seen.st_gid)
            os.chmod(beside, stat.S_IMODE(seen.st_mode) & 0o777)
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        _sync_folder(folder)
    return size, digest.hexdigest()


def _drop_leftovers(folder: str, target: str) -> None:
    """Of a copy that was killed. One machine writes to a run's folder."""
    prefix = f".{os.path.basename(target)[:200]}."
    for name in os.listdir(folder):
        if name.startswith(prefix) and name.endswith(PARTIAL):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def say(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
