"""What a trainer wrote, and whether the next machine has it: the files of each machine, looked at while it lives.

A script that saves to its home, or clears at its start what it saved, trains as well as any other until its machine
goes. So the rehearsal lists what lies below the places that a trainer can write, as the trainer starts and until its
machine ends, and compares one machine's last list with the next one's first, by the rule of `agent.written_files`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from spotheal.agent.folders import Folders
from spotheal.agent.lost_work import FilesLost
from spotheal.agent.trainer_files import Seen
from spotheal.agent.written_files import Files, files_of, is_written, missing

LIST_SECONDS = 1.0  # between two lists of one machine: a working copy may have thousands of files
SETTLE_SECONDS = 3.0  # after a save that is seen: its other files follow
_SAVE_BYTES_MIN = 1024
_MARK = b"starting the trainer"


@dataclass
class _Machine:
    started: float | None = None  # monotonic: when the trainer's start was seen
    saved: float | None = None  # when something that can be a save was seen to be written since
    listed: float = float("-inf")
    first: Files = field(default_factory=dict)
    before_last: Files = field(default_factory=dict)
    last: Files = field(default_factory=dict)


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
            machine.started, machine.first = now, dict(files_of(folders, folders.home))
        elif now - machine.listed < LIST_SECONDS:
            return
        machine.listed, machine.before_last = now, machine.last
        machine.last = dict(files_of(folders, folders.home)) or machine.last  # an unmounted volume shows nothing
        if machine.saved is None and any(_is_save(machine.first, *item) for item in machine.last.items()):
            machine.saved = now

    def has_saved(self, instance: str) -> bool:
        """Whether its trainer has something to lose, and a moment has passed since."""
        machine = self._machines.get(instance, _Machine())
        return machine.saved is not None and time.monotonic() - machine.saved >= SETTLE_SECONDS

    def lost(self) -> list[FilesLost]:
        """For each machine whose trainer started, what the one before it had at its end and this one had not."""
        started = [(name, machine) for name, machine in self._machines.items() if machine.started is not None]
        return [
            FilesLost(name, successor, files)
            for (name, machine), (successor, following) in pairwise(started)
            if (files := missing(_lasting(machine), following.first))
        ]


def _lasting(machine: _Machine) -> list[str]:
    """What was there twice in a row, so it is no temporary file."""
    return [name for name in machine.last if name in machine.before_last]


def _is_save(first: Files, name: str, seen: Seen) -> bool:
    return is_written(first, name, seen) and (seen.size >= _SAVE_BYTES_MIN or name.startswith("checkpoints/"))


def _holds(log: Path, mark: bytes) -> bool:
    try:
        with open(log, "rb") as file:
            return any(mark in line for line in file)
    except OSError:
        return False
