"""The results of a script that has put none into its results folder: what it wrote next to its code.

Data sets, environments, caches and `wandb/` are no results; of the rest the smallest files come first, up to
`BYTES_MAX`. What is left out is listed, and stays on the volume.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.repository.carry_over import content_of
from spotheal.agent.repository.working_copy import commit_contents
from spotheal.agent.trainer.progress_files import NOT_GROWTH, shown

BYTES_MAX = 10 << 30
LISTED = "left-on-the-volume.txt"
_NOT_RESULTS = NOT_GROWTH | {
    "data", "dataset", "datasets", "wandb", ".cache", ".venv", "venv", "env", ".ipynb_checkpoints",
}  # fmt: skip
_ENVIRONMENT_MARKS = {"pyvenv.cfg", "conda-meta"}


@dataclass(frozen=True)
class Unplaced:
    """`files`: (name, file) to store. `left_out`: a line each of what is not. `too_much`: some for its size alone."""

    files: tuple[tuple[str, Path], ...] = ()
    left_out: tuple[str, ...] = ()
    too_much: bool = False

    def listed_in(self, folder: Path) -> list[tuple[str, Path]]:
        """`files`, and the list of what is left out, which is written to `folder`."""
        if not self.left_out:
            return list(self.files)
        publish(folder / LISTED, "\n".join(self.left_out) + "\n")
        return [*self.files, (LISTED, folder / LISTED)]


def unplaced_results(folders: Folders, bytes_max: int = BYTES_MAX) -> Unplaced:
    """Nothing if the results folder holds a file, or the trainer's folder is no working copy."""
    if not folders.has_working_copy or any(True for _ in _files(folders.results, [])):
        return Unplaced()
    left_out: list[str] = []
    commit = commit_contents(folders)
    files = []
    for path, size in _files(folders.clone, left_out):
        if path not in commit or commit[path] != _content_of(folders.clone, path):
            files.append((size, path))
    chosen, total = [], 0
    for size, path in sorted(files):
        if total + size > bytes_max:
            left_out.append(f"{shown(path)}: {size} bytes, more than {bytes_max >> 30} GiB with the smaller ones")
            continue
        total += size
        chosen.append((path, folders.clone.resolve() / path))
    return Unplaced(tuple(chosen), tuple(left_out), len(chosen) < len(files))


def _content_of(top: Path, path: str) -> str:
    try:
        with untrusted_folders.folder(top, os.path.dirname(path)) as folder:
            return content_of(os.path.basename(path), dir_fd=folder)
    except OSError:
        return ""


def _files(top: Path, left_out: list[str]) -> Iterator[tuple[str, int]]:
    """Path below `top` and size of each regular file; links are not followed."""
    for below, folders, names, folder in untrusted_folders.walk(top):
        folders_kept = []
        for name in sorted(folders):
            path = os.path.join(below, name)
            if name not in _NOT_RESULTS and not _is_environment(folder, name):
                folders_kept.append(name)
            elif name not in NOT_GROWTH:
                left_out.append(f"{shown(path)}/: a data set, an environment, a cache or wandb's files")
        folders[:] = folders_kept
        for name in sorted(names):
            status = untrusted_folders.status_of(folder, name)
            if status is not None and stat.S_ISREG(status.st_mode):
                yield os.path.join(below, name), status.st_size


def _is_environment(folder: int, name: str) -> bool:
    try:
        inner = untrusted_folders.opened(folder, name, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return any(untrusted_folders.status_of(inner, mark) is not None for mark in _ENVIRONMENT_MARKS)
    finally:
        os.close(inner)
