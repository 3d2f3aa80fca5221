"""What a trainer has saved, wherever it saves: the checkpoint folder, kept paths, and next to its code.

Next to the code lie data, environments, logs and the commit's own files too. There a file counts only if its name says
that it is a save: by a suffix that nothing else has, or by a folder such as `checkpoints/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import Stop, never
from spotheal.agent.repository.working_copy import files_of_commit
from spotheal.agent.trainer.progress_files import NOT_GROWTH, Mark, Seen, mark_of, mark_of_files
from spotheal.agent.trainer.torn_saves import TornSave, anything_saved, torn_saves

_SAVES_FOLDER = re.compile(r"check-?_?point|ckpt", re.IGNORECASE)
_SAVE = re.compile(r".*\.(pt|pth|ckpt|safetensors|h5|keras)(\.tar)?", re.IGNORECASE)  # .npy, .bin and .zip are data too
_OTHERS = re.compile(r"data.*|\.?v?env|site-packages|wandb|assets", re.IGNORECASE)


class SavedFiles:
    """`folders` of a run whose working copy, if it has one, is in its place already.

    `over`: a look that has begun ends early, for a folder that is being read keeps the volume busy.
    """

    def __init__(self, folders: Folders, over: Stop | None = None) -> None:
        self._folders, self._over = folders, over or never()
        self._commit = files_of_commit(folders)

    @property
    def kept(self) -> tuple[Path, Path]:
        return self._folders.checkpoints, self._folders.keep

    def mark(self) -> Mark:
        """As `trainer_files.mark_of`: it changes when something is saved."""
        files = [(str(self._folders.clone), file) for file in self._next_to_code()]
        return mark_of(self.kept) | mark_of_files([] if self._over.is_set() else files)

    def newer_than(self, moment: float) -> bool:
        """Whether something was saved after `moment` (seconds since 1970)."""
        return any(changed > moment for _, _, _, changed in self.mark())

    def anything(self) -> bool:
        """Whether there is something that `resume_command` can resume from."""
        return anything_saved(*self.kept) or any(file.size for file in self._next_to_code())

    def torn(self) -> list[TornSave]:
        """The saves that are surely incomplete."""
        next_to_code = torn_saves([self._folders.clone], self._over) if self._folders.has_working_copy else []
        return torn_saves(self.kept, self._over) + [save for save in next_to_code if self._is_trainers(save.name)]

    def _is_trainers(self, name: str) -> bool:
        """Whether a file or folder next to the code is a save of the trainer's, with nothing of the commit in it."""
        if any(path == name or path.startswith(name + os.sep) for path in self._commit):
            return False
        return _SAVES_FOLDER.search(name) is not None or _is_save_next_to_code(name)

    def _next_to_code(self) -> Iterator[Seen]:
        """By their path below the working copy; links are not followed."""
        if not self._folders.has_working_copy:
            return
        for path, status in untrusted_folders.files(self._folders.clone, NOT_GROWTH, selects=self._is_save_of_trainers):
            if self._over.is_set():
                return
            yield Seen(path, status.st_size, status.st_mtime)

    def _is_save_of_trainers(self, path: str) -> bool:
        return is_save(path) and path not in self._commit


def is_save(path: str) -> bool:
    """Whether the name of a file next to the code, or its folder's, says that it is a save."""
    return _SAVES_FOLDER.search(os.path.dirname(path)) is not None or _is_save_next_to_code(path)


def _is_save_next_to_code(path: str) -> bool:
    *folders, name = path.split(os.sep)
    return _SAVE.fullmatch(name) is not None and not any(map(_OTHERS.fullmatch, folders))
