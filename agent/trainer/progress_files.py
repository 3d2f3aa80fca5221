"""What a trainer's files tell: growth, the newest checkpoint, files that grew elsewhere; and what is done to them.

The trainer owns these folders: links in them are never followed, and what cannot be read is left out.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.foreign_text import printable

_PROGRESS_BYTES_MAX = 1 << 20
_SMALL_BYTES = 1024
_METRICS_BYTES_MAX = 1 << 30  # a larger file is left as it is: it was read whole, and 40 GiB of zeros ended the agent
_LINE_BYTES_MAX = 1 << 20
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
    return printable(path)


def files_below(folder: Path) -> Iterator[Seen]:
    """All regular files below `folder`; links are not followed."""
    for path, status in untrusted_folders.files(folder, NOT_GROWTH):
        yield Seen(path, status.st_size, status.st_mtime)


def mark_of(folders: Iterable[Path]) -> Mark:
    """What changes when a checkpoint is written: the large files, each with size and time.

    Small ones (an event file, a configuration written at each start) say nothing about progress.
    """
    return mark_of_files((str(folder), file) for folder in folders for file in files_below(folder))


def mark_of_files(files: Iterable[tuple[str, Seen]]) -> Mark:
    """The same of (folder, file) each."""
    listed = list(files)
    largest = max((file.size for _, file in listed), default=0)
    return frozenset((top, file.path, file.size, file.changed) for top, file in listed if file.size * 10 >= largest)


def newest(folder: Path) -> Seen | None:
    return max(files_below(folder), key=lambda seen: (seen.changed, seen.path), default=None)


def describe(file: Seen) -> str:
    """`checkpoint-500/model.safetensors (0 bytes, written 2026-11-21T08:00:00Z)`."""
    try:
        time = rfc3339(datetime.fromtimestamp(file.changed, timezone.utc))
    except (ValueError, OverflowError, OSError):  # a trainer sets any time
        time = "at no time"
    return f"{file.shown} ({file.size} bytes, written {time})"


def grown_elsewhere(clone: Path, since: float, count: int = 5) -> list[Seen]:
    """The largest files in the clone that were written after `since` (seconds since 1970)."""
    files = [s for s in files_below(clone) if s.changed >= since and s.size >= _SMALL_BYTES]
    return sorted(files, key=lambda seen: (-seen.size, seen.path))[:count]


def progress_of(path: Path) -> tuple[Progress, int] | None:
    """The progress document and a number that changes whenever it is written anew; None where there is none."""
    try:
        with (
            untrusted_folders.file(path.parent, path.name) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
        ):
            status = os.fstat(descriptor)  # of what is open: a name may mean another file a moment later
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
    with untrusted_folders.file(path.parent, path.name) as descriptor, open(descriptor, "rb", closefd=False) as file:
        status = os.fstat(descriptor)
        if status.st_size > _METRICS_BYTES_MAX:
            return 0
        dropped = sum(_is_dropped(line, step) for line in _lines(file))
        if not dropped:
            return 0
        file.seek(0)
        part_file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(part_file, "wb") as new_file:
            new_file.writelines(line for line in _lines(file) if not _is_dropped(line, step))
            os.fchmod(new_file.fileno(), stat.S_IMODE(status.st_mode))
            if os.geteuid() == 0:
                os.fchown(new_file.fileno(), status.st_uid, status.st_gid)
    os.replace(name, path)
    return dropped


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.readline(_LINE_BYTES_MAX), b"")


def _is_dropped(line: bytes, step: int) -> bool:
    """A line without an end is half of one, or none of a trainer's: the next would be glued to it."""
    if not line.endswith(b"\n"):
        return True
    try:
        at = bounded_json.parse_object(line).get("step")
    except ValueError:
        return False
    return isinstance(at, (int, float)) and at > step
