"""What a trainer's files tell: growth, the newest checkpoint, files that grew elsewhere; and what is done to them.

The trainer owns these folders: links in them are never followed, and what cannot be read is left out.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from spotheal.agent.clock import rfc3339
from spotheal.agent.contract import Progress

_PROGRESS_BYTES_MAX = 1 << 20
_SMALL_BYTES = 1024
NOT_GROWTH = {".git", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules"}


Mark = frozenset[tuple[str, str, int, float]]


@dataclass(frozen=True)
class Seen:
    """One file, by its path below the folder that was looked at."""

    path: str
    size: int
    changed: float  # seconds since 1970

    @property
    def shown(self) -> str:
        return shown(self.path)


def shown(path: str) -> str:
    """The path for people: a trainer may name a file as it likes, with line ends and commands for terminals."""
    return "".join(c if c.isprintable() else "?" for c in path)


def files_below(folder: Path) -> Iterator[Seen]:
    """All regular files below `folder`; links are not followed."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_GROWTH]
        for name in names:
            if (seen := seen_at(str(folder), os.path.relpath(os.path.join(place, name), folder))) is not None:
                yield seen


def seen_at(folder: str, path: str) -> Seen | None:
    """The regular file `path` below `folder`; None if there is none."""
    try:
        status = os.lstat(os.path.join(folder, path))
    except OSError:
        return None
    return Seen(path, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None


def mark_of(folders: Iterable[Path]) -> Mark:
    """What changes when a checkpoint is written: the large files, each with size and time.

    Small ones (an event file, a configuration written at each start) say nothing about progress.
    """
    return mark_of_files((str(folder), seen) for folder in folders for seen in files_below(folder))


def mark_of_files(files: Iterable[tuple[str, Seen]]) -> Mark:
    """The same of (folder, file) each."""
    found = list(files)
    largest = max((seen.size for _, seen in found), default=0)
    return frozenset((top, seen.path, seen.size, seen.changed) for top, seen in found if seen.size * 10 >= largest)


def newest(folder: Path) -> Seen | None:
    return max(files_below(folder), key=lambda seen: (seen.changed, seen.path), default=None)


def describe(seen: Seen) -> str:
    """`checkpoint-500/model.safetensors (0 bytes, written 2026-11-21T08:00:00Z)`."""
    return f"{seen.shown} ({seen.size} bytes, written {rfc3339(datetime.fromtimestamp(seen.changed, timezone.utc))})"


def grown_elsewhere(clone: Path, since: float, count: int = 5) -> list[Seen]:
    """The largest files in the clone that were written after `since` (seconds since 1970)."""
    found = [s for s in files_below(clone) if s.changed >= since and s.size >= _SMALL_BYTES]
    return sorted(found, key=lambda seen: (-seen.size, seen.path))[:count]


def progress_of(path: Path) -> tuple[Progress, int] | None:
    """The progress document and a number that changes whenever it is written anew; None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())  # of what is open: a name may mean another file a moment later
            if not stat.S_ISREG(status.st_mode):
                return None  # a pipe would hold the agent up
            text = file.read(_PROGRESS_BYTES_MAX + 1)
        if len(text) > _PROGRESS_BYTES_MAX:
            return None
        progress = Progress.from_json(text.decode("utf-8"))
    except (OSError, ValueError):
        return None
    return progress, hash((status.st_ino, status.st_mtime_ns, status.st_size))


def drop_metrics_after(path: Path, step: int) -> int:
    """Drop the lines of a metrics file whose `step` lies after `step`: these steps are done again. Returns how many.

    By rename; the file keeps its owner and mode. A file that is a link or cannot be read is left as it is.
    """
    try:
        return _drop_after(path, step)
    except OSError:  # a folder, a full volume: the lines stay
        return 0


def _drop_after(path: Path, step: int) -> int:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return 0
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        lines = file.readlines()
    # A last line without an end is half of one: the next would be glued to it.
    kept = [line for line in lines if line.endswith(b"\n") and not _is_after(line, step)]
    if len(kept) == len(lines):
        return 0
    beside, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(beside, "wb") as file:
        file.writelines(kept)
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
        if os.geteuid() == 0:
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
    os.replace(name, path)
    return len(lines) - len(kept)


def _is_after(line: bytes, step: int) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    at = found.get("step") if isinstance(found, dict) else None
    return isinstance(at, (int, float)) and at > step
