"""Files in folders that the trainer's user may write, touched by root: no link is followed at any depth.

A check of a path is worth nothing there: a moment later a folder of that path can be a link to root's own files. So
the kernel resolves each path below an open folder (openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, Linux
5.6), and all else is done to descriptors. Without openat2 the folders are opened one after the other, each without
following a link.

Limits: a folder whose path is longer than PATH_MAX, and what lies beyond `WALK_BYTES_MAX`, is left out. A trainer that
makes such folders hides its own files only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from spotheal.agent.processes import programs

WALK_BYTES_MAX = 256 << 20  # of all paths of one walk; each counts `_ENTRY_BYTES` more. About a million files
REMOVE_SECONDS_MAX = 1800.0
HOLES_BYTES_MAX = 64 << 30  # of a file that is sent all the same
_ENTRY_BYTES = 160
_OPENAT2 = 437  # the same number on every architecture; include/uapi/asm-generic/unistd.h
_BENEATH = 0x02 | 0x04 | 0x08  # RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH; linux/openat2.h
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY  # a pipe is not waited for
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW
_LATER = (errno.EAGAIN, errno.EINTR)  # something was renamed meanwhile; openat2(2)
_TRIES_MAX = 16


class _How(ctypes.Structure):
    """struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@contextlib.contextmanager
def folder(top: Path, below: str = "") -> Iterator[int]:
    """A descriptor of the folder `below` in `top`, until the block ends. OSError if it is none, or a link.

    `top` itself may be a link that root or we have made: the machine's owner may have moved it.
    """
    descriptor = _open_top(top)
    try:
        if below:
            inner = opened(descriptor, below, _FOLDER)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file(top: Path | int, path: str) -> Iterator[int]:
    """A descriptor of the regular file `path` below `top`, for reading. OSError if there is none."""
    with contextlib.ExitStack() as stack:
        below = top if isinstance(top, int) else stack.enter_context(folder(top))
        descriptor = opened(below, path, _FILE)
        stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        yield descriptor


@contextlib.contextmanager
def file_without_links(path: Path) -> Iterator[int]:
    """As `file`, of a whole path in which nothing is a link: what `resolved` has made of a trainer's folder."""
    with folder(Path("/")) as root, file(root, str(path)[1:]) as descriptor:
        yield descriptor


def opened(top: int, path: str, flags: int) -> int:
    """open(2) of `path` below the open folder `top`; OSError (ELOOP) if a link is on the way or at the end."""
    if path.startswith("/") or ".." in path.split("/"):
        raise OSError(errno.EXDEV, "leads out of its folder", path)
    if sys.platform == "linux":
        try:
            return _by_openat2(top, path, flags | _ALWAYS)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # an old kernel, a container's filter
                raise
    return _step_by_step(top, path, flags | _ALWAYS)


def _by_openat2(top: int, path: str, flags: int) -> int:
    options = _How(flags=flags, mode=0, resolve=_BENEATH)
    name = ctypes.c_char_p(os.fsencode(path))
    for _ in range(_TRIES_MAX):
        descriptor = int(_SYSCALL(_OPENAT2, top, name, ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options))))
        if descriptor >= 0:
            return descriptor
        if ctypes.get_errno() not in _LATER:
            break
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _step_by_step(top: int, path: str, flags: int) -> int:
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
    descriptor = os.dup(top)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER | _ALWAYS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        return os.open(name, flags, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _open_top(top: Path) -> int:
    """A link is looked at by its descriptor: the name may mean another one a moment later."""
    if sys.platform != "linux":
        return os.open(top, _FOLDER | os.O_CLOEXEC)
    descriptor = os.open(top, os.O_PATH | _ALWAYS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISLNK(status.st_mode):
            return os.open(".", _FOLDER | _ALWAYS, dir_fd=descriptor)
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(top))
        return os.open(top.parent / os.readlink("", dir_fd=descriptor), _FOLDER | os.O_CLOEXEC)
    finally:
        os.close(descriptor)


def walk(
    top: Path, missed: Callable[[str], None] = lambda path: None, *, below: str = ""
) -> Iterator[tuple[str, list[str], list[str], int]]:
    """Each folder from `below` in `top` down: its path below that ("" first), the names of folders, all other names,
    and its descriptor, open until the next one.

    As of os.walk a name that is taken out of the folders is not walked. `missed` is told the path of a folder that
    could not be listed, at the limit that of the folder in which the walk ends. No recursion: os.walk ended at a depth
    of 1000 folders with a RecursionError, which a trainer can make.
    """
    budget = WALK_BYTES_MAX
    with contextlib.ExitStack() as stack:
        try:
            root = stack.enter_context(folder(top, below))
        except OSError:
            missed("")
            return
        waiting: list[tuple[str, list[str]]] = [("", [""])]
        while waiting:
            above, names = waiting[-1]
            if not names:
                waiting.pop()
                continue
            path = os.path.join(above, names.pop())
            try:
                descriptor = opened(root, path or ".", _FOLDER)
            except OSError:
                missed(path)
                continue
            try:
                inner, files, budget = _listed(descriptor, budget, len(path))
                yield path, inner, files, descriptor
            finally:
                os.close(descriptor)
            if budget < 0:
                missed(path)
                return
            waiting.append((path, inner[::-1]))


def _listed(descriptor: int, budget: int, depth: int) -> tuple[list[str], list[str], int]:
    folders: list[str] = []
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(descriptor) as entries:
        for entry in entries:
            budget -= depth + len(entry.name) + _ENTRY_BYTES
            if budget < 0:
                break
            with contextlib.suppress(OSError):  # it is gone
                (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
    return folders, names, budget


def status_of(folder: int, name: str) -> os.stat_result | None:
    """Of the entry itself, if it is a link; None if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def holes(status: os.stat_result) -> str:
    """Why a sparse file is not sent, or "": its holes would be sent as zeros, a TiB for nothing on the disk."""
    if status.st_size - status.st_blocks * 512 <= HOLES_BYTES_MAX:
        return ""
    return f"sparse: {status.st_size >> 30} GiB, of which {status.st_blocks * 512 >> 30} GiB are written"


def files(
    top: Path,
    leave_out: Container[str] = (),
    missed: Callable[[str], None] = lambda path: None,
    *,
    below: str = "",
    selects: Callable[[str], bool] = lambda path: True,
) -> Iterator[tuple[str, os.stat_result]]:
    """Path below the folder and status of every regular file that is in no folder of a name in `leave_out`.

    Only a path that is `wanted` is asked for its status: on a copied volume each first one takes milliseconds.
    """
    for path, folders, names, descriptor in walk(top, missed, below=below):
        folders[:] = [name for name in folders if name not in leave_out]
        for name in names:
            if selects(file := os.path.join(path, name)):
                status = status_of(descriptor, name)
                if status is not None and stat.S_ISREG(status.st_mode):
                    yield file, status


def rename(top: Path, path: str, target_folder: int, name: str) -> None:
    """Move `path` below `top` to `name` in the open folder `there`; OSError if something of that name is there."""
    if status_of(target_folder, name) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    with folder(top, os.path.dirname(path)) as descriptor:
        os.rename(os.path.basename(path), name, src_dir_fd=descriptor, dst_dir_fd=target_folder)


def give(path: Path, uid: int, gid: int) -> None:
    """Make `path` and all below it the account's: links themselves, never what they name.

    A file of root's that has a second name stays root's: that name may be one of the agent's own records.
    """
    for _, folders, names, descriptor in walk(path):
        for name in (*folders, *names):
            status = status_of(descriptor, name)
            if status is None or (status.st_uid == 0 and status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode)):
                continue
            with contextlib.suppress(FileNotFoundError):
                os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)
    with contextlib.suppress(FileNotFoundError):
        os.lchown(path, uid, gid)


def remove(path: Path) -> None:
    """The file or folder `path` with all in it; OSError if something is left. Harmless if there is none.

    By `rm`: shutil.rmtree of Python 3.12 and older recurses, so a deep folder ended the agent.
    """
    if not os.path.lexists(path):
        return
    ended = programs.run(["rm", "-rf", "--one-file-system", "--", str(path)], seconds_max=REMOVE_SECONDS_MAX)
    if ended.code != 0:
        raise OSError(errno.EIO, ended.said, str(path))


_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSCALL = _LIBC.syscall
_SYSCALL.restype = ctypes.c_long
