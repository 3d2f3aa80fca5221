"""What a trainer wrote, and whether the next machine has it: the files of each machine, looked at while it lives.

A script that saves to its home, or clears at its start what it saved, trains as well as any other until its machine
goes. So the rehearsal lists what lies below the places that a trainer can write, as the trainer starts and until its
machine ends, and compares one machine's last list with the next one's first. Names are compared without digits (steps,
ranks, times) and host names; logs, caches and temporary files do not count.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from spotheal.agent.folders import Folders
from spotheal.agent.trainer_files import Seen, files_below

LIST_SECONDS = 1.0  # between two lists of one machine: a working copy may have thousands of files
SETTLE_SECONDS = 3.0  # after a save that is seen: its other files follow
_SAVE_BYTES_MIN = 1024
_LEFT_OUT_FOLDERS = frozenset(("wandb", "mlruns", "logs", "log", "tmp", "temp"))
_LEFT_OUT_NAMES = re.compile(r"\.|.*(tmp|tfevents|\.(log|out|err|lock|pid|part|pyc|swp)$|~$)", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_MARK = b"starting the trainer"

Files = Mapping[str, Seen]  # by place and path: `working-copy/last.pt`


@dataclass
class _Machine:
    started: float | None = None  # monotonic: when the trainer's start was seen
    saved: float | None = None  # when something that can be a save was seen to be written since
    listed: float = float("-inf")
    first: Files = field(default_factory=dict)
    before_last: Files = field(default_factory=dict)
    last: Files = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """Files that `instance` had when it went and `successor` had not when its trainer started."""

    instance: str
    successor: str
    files: tuple[str, ...]


class Survival:
    """`look` at each living machine often; all else answers from what was seen."""

    def __init__(self) -> None:
        self._machines: dict[str, _Machine] = {}

    def look(self, instance: str, folders: Folders, log: Path) -> None:
        machine = self._machines.setdefault(instance, _Machine())
        now = time.monotonic()
        if machine.started is None:
            if not _holds(log, _MARK):
                return
            machine.started, machine.first = now, _files(folders)
        elif now - machine.listed < LIST_SECONDS:
            return
        machine.listed, machine.before_last = now, machine.last
        machine.last = _files(folders) or machine.last  # an unmounted volume shows nothing
        if machine.saved is None and any(_is_save(machine.first, *item) for item in machine.last.items()):
            machine.saved = now

    def has_saved(self, instance: str) -> bool:
        """Whether its trainer has something to lose, and a moment has passed since."""
        machine = self._machines.get(instance, _Machine())
        return machine.saved is not None and time.monotonic() - machine.saved >= SETTLE_SECONDS

    def lost(self) -> list[Lost]:
        """For each machine whose trainer started, what the one before it had at its end and this one had not."""
        started = [(name, machine) for name, machine in self._machines.items() if machine.started is not None]
        return [
            Lost(name, successor, files)
            for (name, machine), (successor, following) in pairwise(started)
            if (files := missing(machine.before_last, machine.last, following.first))
        ]


def missing(before_last: Files, last: Files, first: Files) -> tuple[str, ...]:
    """What was there twice in a row, so it is no temporary file, and has no namesake at the next start."""
    there = {_masked(name) for name in first}
    return tuple(sorted(name for name in last if name in before_last and _masked(name) not in there))


def _files(folders: Folders) -> dict[str, Seen]:
    places = {"working-copy": folders.clone, "home": folders.home, "checkpoints": folders.checkpoints,
              "keep": folders.keep, "results": folders.results}  # fmt: skip
    return dict(_named(places))


def _named(places: Mapping[str, Path]) -> Iterator[tuple[str, Seen]]:
    for place, folder in places.items():
        for seen in files_below(folder):
            *above, name = Path(seen.path).parts
            hidden = any(part.startswith(".") or part in _LEFT_OUT_FOLDERS for part in above)
            if not hidden and not _LEFT_OUT_NAMES.match(name):
                yield f"{place}/{seen.path}", seen


def _is_save(first: Files, name: str, seen: Seen) -> bool:
    known = first.get(name)
    changed = known is None or (known.size, known.changed) != (seen.size, seen.changed)
    return changed and (seen.size >= _SAVE_BYTES_MIN or name.startswith("checkpoints/"))


def _masked(name: str) -> str:
    return _DIGITS.sub("0", name.replace(socket.gethostname(), "host"))


def _holds(log: Path, mark: bytes) -> bool:
    try:
        with open(log, "rb") as file:
            return any(mark in line for line in file)
    except OSError:
        return False
