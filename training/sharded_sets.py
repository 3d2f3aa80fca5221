"""Sets of shards as folders: written beside the others under a name no scan finds, committed by one rename.

The order, after which no crash can lose an acknowledged set or show half of one: rename the oldest set to `.step.tmp`,
fsync the folder; unlink its commit mark, fsync; every rank writes its file, fsync, and fsyncs the set's folder; all
have told so; the commit mark, fsync, fsync the set's folder; rename to `step-N`, fsync the folder. Files of an old set
are overwritten in place, so that snapshots of the volume stay small.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from spotheal.training.files import Files, open_regular, read_into
from spotheal.training.format import BrokenCheckpoint
from spotheal.training.sharded_manifest import BYTES_MAX, Manifest
from spotheal.training.slots import BROKEN

MARK = "commit.json"
# A step that is saved again (a finished run that is started once more) gets a number behind it: a folder that is not
# empty cannot be replaced in one step, and the old set is acknowledged.
_SET = re.compile(r"step-(\d{1,18})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Sets:
    """The sets in `folder`, at most `kept`; all ranks see the same folder, rank 0 alone renames."""

    folder: Path
    kept: int
    files: Files

    @property
    def temporary(self) -> Path:
        return self.folder / ".step.tmp"

    @staticmethod
    def file(rank: int) -> str:
        return f"rank-{rank:05d}.safetensors"

    def found(self) -> list[tuple[int, Path]]:
        """Step and folder of every committed set, newest first, by name alone."""
        matches = [(match, path) for path in self.folder.iterdir() if (match := _SET.fullmatch(path.name))]
        ordered = sorted(((int(match[1]), int(match[2] or 0), path) for match, path in matches), reverse=True)
        return [(step, path) for step, _, path in ordered if is_folder(path)]

    def free(self, world: int) -> None:
        """Make `.step.tmp` ready for files of `world` ranks. OSError where it cannot be; the sets are as they were."""
        if self.temporary.is_symlink() or (self.temporary.exists() and not is_folder(self.temporary)):
            self.files.unlink(self.temporary)
        if not self.temporary.exists():
            found = [path for _, path in self.found()]
            if len(found) >= max(self.kept, 2):
                self.files.rename(found[-1], self.temporary)
            else:
                self.temporary.mkdir()
            self.files.sync_folder(self.folder)
        expected = {self.file(rank) for rank in range(world)}
        for path in self.temporary.iterdir():
            if path.name not in expected or path.is_symlink():
                _remove(path, self.files)
        self.files.sync_folder(self.temporary)

    def commit(self, manifest: Manifest) -> Path:
        """Acknowledge what the ranks have written. OSError where it cannot be: nothing is acknowledged then."""
        for rank, told in enumerate(manifest.files):
            path = self.temporary / self.file(rank)
            if (size := os.lstat(path).st_size) != told.file_bytes:
                raise OSError(0, f"{path} has {size} bytes here, rank {rank} wrote {told.file_bytes}")
        mark = self.temporary / MARK
        fd = self.files.create(mark)
        try:
            self.files.write(fd, manifest.to_bytes(), 0)
            self.files.fsync(fd)
        finally:
            self.files.close(fd)
        self.files.sync_folder(self.temporary)
        final = self._free_name(manifest.step)
        self.files.rename(self.temporary, final)
        self.files.sync_folder(self.folder)
        return final

    def set_aside(self, path: Path) -> Path:
        """Rename a broken set so that no scan finds it again; its content stays for whoever wants to look."""
        names = (f"{BROKEN}{path.name}{extra}" for extra in ("", *(f".{number}" for number in range(1, 1000))))
        aside = next(found for name in names if not (found := self.folder / name).exists())
        self.files.rename(path, aside)
        self.files.sync_folder(self.folder)
        return aside

    def _free_name(self, step: int) -> Path:
        same = [path.name for other, path in self.found() if other == step]
        last = max((int(match[2] or 0) for name in same if (match := _SET.fullmatch(name))), default=-1)
        return self.folder / (f"step-{step:09d}" + (f"-{last + 1}" if same else ""))

    def manifest(self, path: Path) -> Manifest:
        """The commit mark of the set at `path`. BrokenCheckpoint or OSError."""
        fd = open_regular(path / MARK)
        try:
            size = os.fstat(fd).st_size
            if size > BYTES_MAX:
                raise BrokenCheckpoint(f"its commit mark has {size} bytes")
            whole = bytearray(size)
            read_into(fd, memoryview(whole), 0)
        finally:
            self.files.close(fd)
        manifest = Manifest.parse(bytes(whole))
        if (match := _SET.fullmatch(path.name)) and int(match[1]) != manifest.step:
            raise BrokenCheckpoint(f"its name says step {int(match[1])}, its content step {manifest.step}")
        return manifest


def is_folder(path: Path) -> bool:
    """Not a link to one."""
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def _remove(path: Path, files: Files) -> None:
    if is_folder(path):
        shutil.rmtree(path)
    else:
        files.unlink(path)
