"""Which files a trainer wrote, recorded on the volume: the next machine knows what is missing, also after a kill.

    <volume>/.spotheal/files.json    of this run: what the trainer wrote and what of it lasts, as of the last look

Names are compared without digits (steps, ranks, times) and host names; logs, caches and temporary files do not count.
A name counts once two looks in a row have seen it. What a machine cannot walk (more than `FILES_MAX` files) is left
out, and then nothing is said of it: a list that is cut would call the rest missing.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.trainer.progress_files import Seen, files_below, shown

FILES_MAX = 50_000
NAMES_MAX = 500  # of a record: one for each name without its digits
TOLD_MAX = 20  # of an event in the ledger
_PATH_MAX = 200
_RECORD = "files.json"
_LEFT_OUT_FOLDERS = frozenset(("wandb", "mlruns", "logs", "log", "tmp", "temp"))
_LEFT_OUT_NAMES = re.compile(r"\.|.*(tmp|tfevents|\.(log|out|err|lock|pid|part|pyc|swp)$|~$)", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")

Files = Mapping[str, Seen]  # by place and path: `working-copy/last.pt`


def files_of(folders: Folders, home: Path) -> Iterator[tuple[str, Seen]]:
    """All files in the places that a trainer can write, by place and path, less logs, caches and temporary files."""
    for place, folder in _places(folders, home).items():
        for file in files_below(folder):
            *above, name = Path(file.path).parts
            hidden = any(part.startswith(".") or part in _LEFT_OUT_FOLDERS for part in above)
            if not hidden and not _LEFT_OUT_NAMES.match(name):
                yield f"{place}/{file.path}", file


def path_of(folders: Folders, home: Path, name: str) -> Path:
    """Where the file lies that `files_of` names so."""
    place, _, path = name.partition("/")
    return _places(folders, home)[place] / path


def _places(folders: Folders, home: Path) -> dict[str, Path]:
    return {"working-copy": folders.clone, "home": home, "checkpoints": folders.checkpoints, "keep": folders.keep,
            "results": folders.results}  # fmt: skip


def is_written(first: Files, name: str, file: Seen) -> bool:
    """Whether the file is new or another one than in `first`, the list at the trainer's start."""
    earlier = first.get(name)
    return earlier is None or (earlier.size, earlier.changed) != (file.size, file.changed)


def missing(lasting: Iterable[str], present: Iterable[str]) -> tuple[str, ...]:
    """The names that have no namesake among those that are present."""
    names = {masked(name) for name in present}
    return tuple(sorted(name for name in lasting if masked(name) not in names))


def masked(name: str) -> str:
    return _DIGITS.sub("0", name.replace(socket.gethostname(), "host"))


@dataclass(frozen=True)
class Record:
    run: str
    instance: str
    attempt: int
    written: tuple[str, ...]  # in the attempts of that instance
    written_count: int
    lasting: tuple[str, ...]  # of these and of what earlier ones wrote

    @classmethod
    def read(cls, path: Path, run: str) -> Record | None:
        """None if there is none, it cannot be read, or it is another run's."""
        try:
            record = cls(**bounded_json.parse_object(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if record.run != run:
            return None
        return replace(record, written=tuple(record.written), lasting=tuple(record.lasting))


class WrittenFiles:
    """`predecessor` before the trainer starts, which waits for it; then `look` now and again, from a thread."""

    def __init__(self, folders: Folders, home: Path, run: str, instance: str, over: Stop) -> None:
        self._folders, self._home, self._over = folders, home, over
        self._run, self._instance = run, instance
        self._path = folders.private / _RECORD
        self._recorded = Record.read(self._path, run)
        self._known = frozenset(self._recorded.lasting if self._recorded else ())
        self._first: Files | None = None
        self._last: Files = {}

    def predecessor(self) -> dict[str, Any]:
        """What the machine before wrote and what of it is missing here, for the ledger; empty if that is nothing."""
        self._first = self._files()
        if self._first is None or self._recorded is None:
            return {}
        record, lost = self._recorded, missing(self._known, self._first)
        if not record.written and not lost:
            return {}
        return {
            "predecessor": record.instance,
            "attempt": record.attempt,
            "written": list(record.written[:TOLD_MAX]),
            "written_count": record.written_count,
            "missing": list(lost[:TOLD_MAX]),
            "missing_count": len(lost),
        }

    def look(self, attempt: int) -> None:
        """Record what the trainer has written since the first list here. OSError if the volume is full or gone."""
        files = self._files() if self._first is not None else None
        if files is None or self._first is None:
            return
        kept_names = [name for name in files if name in self._last and len(name) <= _PATH_MAX and shown(name) == name]
        written = [name for name in kept_names if is_written(self._first, name, files[name])]
        lasting = [name for name in kept_names if name in self._known] + written
        self._last = files
        names = _bounded(written)
        record = Record(self._run, self._instance, attempt, names, len(written), _bounded(lasting))
        if record != self._recorded and (lasting or self._recorded is not None):
            publish(self._path, json.dumps(asdict(record)), durable=True)
            self._recorded = record

    def _files(self) -> Files | None:
        """None if there are too many, or the look must end."""
        files: dict[str, Seen] = {}
        for name, file in files_of(self._folders, self._home):
            if len(files) >= FILES_MAX or self._over.is_set():
                return None
            files[name] = file
        return files


def _bounded(names: Iterable[str]) -> tuple[str, ...]:
    """The last of the names that differ in digits alone, sorted."""
    by_mask = {masked(name): name for name in sorted(set(names))}
    return tuple(sorted(by_mask.values())[:NAMES_MAX])
