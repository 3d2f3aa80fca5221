"""Torn saves out of the trainer's way: moved to `set-aside/`, and put back unless a start without them gains a step.

What is set aside is also on record next to the saves, so that an agent that starts after a kill puts it back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.trainer.torn_saves import TornSave

_RECORD = "set-aside.json"


@dataclass(frozen=True)
class SetAside:
    """A torn save that was renamed: where it lay, where it lies now."""

    save: TornSave
    original: Path
    moved: Path

    def put_back(self) -> bool:
        """False if the trainer has written something of that name since, or the volume refuses."""
        try:
            with untrusted_folders.folder(self.save.folder, os.path.dirname(self.save.name)) as folder:
                untrusted_folders.rename(self.moved.parent, self.moved.name, folder, self.original.name)
        except OSError:
            return False
        return True


class SaveShelf:
    """What is set aside of one run, in memory and on record."""

    def __init__(self, folders: Folders) -> None:
        self._record = folders.private / _RECORD
        self._folders = (folders.checkpoints, folders.keep, folders.clone)
        self.saves: tuple[SetAside, ...] = ()

    def recall(self, gained_since: Callable[[float], bool]) -> None:
        """Take up what an agent before this one set aside, if it was killed before it knew how the next start went.

        `gained_since`: whether that start gained a step, given the moment of the set-aside (seconds since 1970).
        """
        try:
            record = bounded_json.parse_object(self._record.read_bytes())
            moment, saves = float(record["time"]), tuple(self._saves_of(record))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, LookupError):  # not one of ours: there is nothing to put back
            return self.forget()
        if gained_since(moment):
            return self.forget()
        self.saves = saves

    def add(self, save: TornSave, now: datetime) -> SetAside:
        """Move it to `set-aside/` next to its folder; nothing is deleted. OSError if it cannot be moved."""
        aside = _planned(save, now)
        aside.moved.parent.mkdir(exist_ok=True)
        before, self.saves = self.saves, (*self.saves, aside)
        try:
            self._write(now)  # before the move: what is on record and was never moved is only not put back
            with untrusted_folders.folder(aside.moved.parent) as folder:
                untrusted_folders.rename(save.folder, save.name, folder, aside.moved.name)
        except OSError:
            self.saves = before
            raise
        return aside

    def put_back(self, on_put_back: Callable[[SetAside], None]) -> None:
        """Everything, to where it lay."""
        for aside in self.saves:
            if aside.put_back():
                on_put_back(aside)
        if self.saves:
            self.forget()

    def forget(self) -> None:
        """It stays aside for good. A record that cannot be removed costs one more start with what is torn."""
        self.saves = ()
        self.forget_record()

    def forget_record(self) -> None:
        """The start without them gains: no later agent is to put them back."""
        try:
            self._record.unlink(missing_ok=True)
        except OSError:
            return

    def _write(self, now: datetime) -> None:
        saves = [
            {
                "folder": self._folders.index(aside.save.folder),
                "name": aside.save.name,
                "reason": aside.save.reason,
                "moved": aside.moved.name,
            }
            for aside in self.saves
        ]
        publish(self._record, json.dumps({"time": now.timestamp(), "saves": saves}), durable=True)

    def _saves_of(self, record: dict[str, list[dict[str, str]]]) -> Iterator[SetAside]:
        for entry in record["saves"]:
            folder = self._folders[int(entry["folder"])]
            save = TornSave(folder, entry["name"], entry["reason"])
            yield SetAside(save, folder / save.name, _aside_folder(folder) / entry["moved"])


def _aside_folder(folder: Path) -> Path:
    return folder.parent / "set-aside"


def _planned(save: TornSave, now: datetime) -> SetAside:
    name = f"{rfc3339(now).replace(':', '')}-{save.folder.name}-{save.name.replace(os.sep, '-')}"
    free = (_aside_folder(save.folder) / f"{name}{'-' * bool(number)}{number or ''}" for number in count())
    moved = next(path for path in free if not os.path.lexists(path))  # a rename onto a file would replace it
    return SetAside(save, save.folder / save.name, moved)
