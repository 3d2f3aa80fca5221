"""What a trainer wrote, and whether the next machine has it: the files of each machine, looked at while it lives.

A script that saves to its home, or clears at its start what it saved, trains as well as any other until its machine
goes. So the rehearsal lists what lies below the places that a trainer can write, as the trainer starts and until its
machine ends, and compares one machine's last list with the next one's first, by the rule of `agent.written_files`.

A script that saves and never loads writes its saves again without reading any, or writes them into a new folder that
is named by the time or by Lightning's `version_<n>`. Links to what earlier machines wrote,
made before the trainer starts, are watched for that. A link changes the file's status time, so that the next access
counts also with `relatime`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from spotheal.agent.files.folders import Folders
from spotheal.agent.record.lost_work import FilesLost
from spotheal.agent.trainer.progress_files import Seen
from spotheal.agent.trainer.saved_files import is_save
from spotheal.agent.trainer.written_files import Files, files_of, is_written, missing, path_of
from spotheal.fleet.rehearsal.machines.reads import Reads, tells_reads

LIST_SECONDS = 1.0  # between two lists of one machine: a working copy may have thousands of files
SETTLE_SECONDS = 3.0  # after a save that is seen: its other files follow
_SAVE_BYTES_MIN = 1024
_LINKS_MAX = 500  # of the newest files
_MARK = b"starting the trainer"
# Lightning writes its options, and examples write pictures, before the first save: these alone are no work.
_NO_SAVE = re.compile(r".*\.(ya?ml|toml|ini|cfg|md|html|png|jpe?g|gif|svg|pdf|mp4)", re.IGNORECASE)
# A time, or Lightning's number: not the number of a fold, which a script may rightly skip without a read.
_ATTEMPT = re.compile(r"version_\d+|\d+-\d\d-\d\d|\d{6,}")


@dataclass
class _Machine:
    started: float | None = None  # monotonic: when the trainer's start was seen
    saved: float | None = None  # when something that can be a save was seen to be written since
    listed: float = float("-inf")
    first: Files = field(default_factory=dict)
    before_last: Files = field(default_factory=dict)
    last: Files = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # of all sizes
    links: dict[str, Path] = field(default_factory=dict)  # to what was there, by its name
    reads: Reads | None = None  # of these
    begun_anew: str = ""  # the save that its trainer wrote as if there were none, without having read any


class Survival:
    """`look` at each living machine often; all else answers from what was seen."""

    def __init__(self, links: Path | None = None) -> None:
        """`links`: a folder beside the volumes; None: nothing is known of what a trainer reads."""
        self._machines: dict[str, _Machine] = {}
        self._links = links if links is not None and tells_reads(links) else None
        self._is_late = False

    def look(self, instance: str, folders: Folders, log: Path) -> None:
        machine = self._machines.setdefault(instance, _Machine())
        moment = time.monotonic()
        if machine.started is None:
            new = {} if machine.links else self._link(instance, folders)
            if new:
                machine.links, machine.reads = new, Reads(new.values())
            if not _holds(log, _MARK):
                return
            if new and machine.reads is not None:
                # On a busy machine mount and start lie between two looks: the trainer may have read before this one.
                machine.reads.close()
                machine.reads, self._is_late = None, True
            machine.started, machine.first = moment, dict(files_of(folders, folders.home))
        elif moment - machine.listed < LIST_SECONDS:
            return
        machine.listed, machine.before_last = moment, machine.last
        machine.last = dict(files_of(folders, folders.home)) or machine.last  # an unmounted volume shows nothing
        if machine.saved is None and any(_is_save(machine.first, *item) for item in machine.last.items()):
            machine.saved = moment
        machine.written.update(name for name, state in machine.last.items() if _is_work(machine.first, name, state))
        if machine.reads is not None:
            is_resumed = machine.reads.any()
            if not is_resumed:
                machine.begun_anew = next(_saves_of_a_new_start(machine), "")
            if is_resumed or machine.begun_anew:
                machine.reads.close()
                machine.reads = None

    def _link(self, instance: str, folders: Folders) -> dict[str, Path]:
        """A link to each file that earlier machines wrote, as soon as the volume is mounted."""
        earlier = [machine for machine in self._machines.values() if machine.started is not None]
        if self._links is None or not earlier:
            return {}
        wrote = {name for machine in earlier for name in machine.written}
        # The newest save may have come after the last look: a script that keeps one alone would have no link at all.
        before = earlier[-1].first
        files = [item for item in files_of(folders, folders.home) if item[0] in wrote or _is_work(before, *item)]
        links: dict[str, Path] = {}
        for name, _ in sorted(files, key=lambda item: item[1].changed)[-_LINKS_MAX:]:
            link = self._links / f"{instance}-{len(links)}"
            with suppress(OSError):
                os.link(path_of(folders, folders.home, name), link, follow_symlinks=False)
                links[name] = link
        return links

    @property
    def sees_reads(self) -> bool:
        """Whether what each trainer reads is known."""
        return self._links is not None and not self._is_late

    def has_saved(self, instance: str) -> bool:
        """Whether its trainer has something to lose, and a moment has passed since."""
        machine = self._machines.get(instance, _Machine())
        return machine.saved is not None and time.monotonic() - machine.saved >= SETTLE_SECONDS

    def not_resumed(self) -> list[str]:
        """A line for each machine whose trainer used nothing of what the one before it had done."""
        started = [(name, machine) for name, machine in self._machines.items() if machine.started is not None]
        lines = []
        for (name, machine), (successor, following) in pairwise(started):
            has_work = any(_is_work(machine.first, *item) for item in following.first.items())
            if not machine.written and not has_work:
                lines.append(f"{successor} began from nothing: the trainer on {name} had saved nothing when it went;"
                             " save now and then, and load the newest save at the start")  # fmt: skip
            elif following.begun_anew:
                lines.append(f"{successor} began from nothing: its trainer wrote {following.begun_anew} and had"
                             " read no file of the machines before; load the newest checkpoint at the start, or name a"
                             " `resume_command` that does")  # fmt: skip
        return lines

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


def _saves_of_a_new_start(machine: _Machine) -> Iterator[str]:
    """What its trainer wrote over the saves of earlier machines, and into new folders like those that hold them."""
    earlier = [name for name in machine.links if _is_named_save(name)]
    yield from (f"{name} again" for name in earlier if name in machine.written)
    folders = {os.path.dirname(name) for name in earlier}
    alike = {_ATTEMPT.sub("#", folder) for folder in folders}
    for name in sorted(filter(_is_named_save, machine.written)):
        folder = os.path.dirname(name)
        if folder not in folders and _ATTEMPT.sub("#", folder) in alike:
            yield f"{name} into a new folder"


def _is_named_save(name: str) -> bool:
    place, _, path = name.partition("/")
    return place == "checkpoints" or is_save(path)


def _is_work(first: Files, name: str, state: Seen) -> bool:
    return is_written(first, name, state) and _NO_SAVE.fullmatch(name) is None


def _is_save(first: Files, name: str, state: Seen) -> bool:
    return _is_work(first, name, state) and (state.size >= _SAVE_BYTES_MIN or name.startswith("checkpoints/"))


def _holds(log: Path, mark: bytes) -> bool:
    try:
        with open(log, "rb") as file:
            return any(mark in line for line in file)
    except OSError:
        return False
