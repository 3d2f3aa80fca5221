"""Sets of shards as folders: written beside the others under a name no scan finds, committed by one rename.

The order, after which no crash can lose an acknowledged set or show half of one: rename the oldest set to a temporary
name, fsync the folder; unlink its commit mark, fsync; every rank writes its file, fsync, and fsyncs the set's folder;
all have told so; the commit mark, fsync, fsync the set's folder; rename to `step-N`, fsync the folder. Files of an old
set are overwritten in place, so that snapshots of the volume stay small.

No name of a folder is ever used twice, not even the temporary one. On several machines the folder is on NFS, whose
clients go on for up to a minute with what a name meant before (nfs(5), `acdirmax`): a rank that looked for the one
temporary name would find the set of the save before, which is acknowledged, and overwrite its file in there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from spotheal.training.shards.sharded_manifest import BYTES_MAX, Manifest
from spotheal.training.slotfile.files import Files, open_regular, read_into
from spotheal.training.slotfile.format import BrokenCheckpoint
from spotheal.training.slotfile.slots import BROKEN

MARK = "commit.json"
# A step that is saved again (a finished run that is started once more) gets a number behind it: a folder that is not
# empty cannot be replaced in one step, and the old set is acknowledged.
_SET = re.compile(r"step-(\d{1,18})(?:-(\d{1,9}))?")
_TEMPORARY = re.compile(r"\.step(-[0-9a-f]+)?\.tmp")


@dataclass(frozen=True)
class Sets:
    """The sets in `folder`, at most `kept`; all ranks see the same folder, rank 0 alone renames."""

    folder: Path
    kept: int
    files: Files

    @staticmethod
    def file(rank: int) -> str:
        return f"rank-{rank:05d}.safetensors"

    def found(self) -> list[tuple[int, Path]]:
        """Step and folder of every committed set, newest first, by name alone."""
        matches = [(match, path) for path in self.folder.iterdir() if (match := _SET.fullmatch(path.name))]
        ordered = sorted(((int(match[1]), int(match[2] or 0), path) for match, path in matches), reverse=True)
        return [(step, path) for step, _, path in ordered if is_folder(path)]

    def free(self, world: int, step: int) -> str:
        """The name of a folder, ready for files of `world` ranks. OSError if there is none, or where a set is newer
        than `step`; sets are as they were.

        It is made of the oldest set, or new. What a save has left that failed or died is removed: a rank of a world
        that is no more may still be writing there.
        """
        if (newest := next(iter(self.found()), (step, None))[0]) > step:
            raise OSError(errno.EEXIST, f"step {newest} lies there, and a load takes the highest")
        for path in [path for path in self.folder.iterdir() if _TEMPORARY.fullmatch(path.name)]:
            _remove(path, self.files)
        temporary, sets = self.folder / f".step-{secrets.token_hex(8)}.tmp", self.found()
        if len(sets) >= max(self.kept, 2):
            self.files.rename(sets[-1][1], temporary)
        else:
            temporary.mkdir()
        self.files.sync_folder(self.folder)
        expected = {self.file(rank) for rank in range(world)}
        for path in temporary.iterdir():
            if path.name not in expected or path.is_symlink():
                _remove(path, self.files)
        self.files.sync_folder(temporary)
        return temporary.name

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Acknowledge what the ranks have written there. OSError if it cannot be: nothing is acknowledged then."""
        for rank, record in enumerate(manifest.files):
            path = temporary / self.file(rank)
            if (size := _size(path)) != record.file_bytes:
                raise OSError(0, f"{path} has {size} bytes here, rank {rank} wrote {record.file_bytes}")
        mark = temporary / MARK
        fd = self.files.create(mark)
        try:
            self.files.write(fd, manifest.to_bytes(), 0)
            self.files.fsync(fd)
        finally:
            self.files.close(fd)
        self.files.sync_folder(temporary)
        final = self._free_name(manifest.step)
        self.files.rename(temporary, final)
        self.files.sync_folder(self.folder)
        return final

    def set_aside(self, path: Path) -> Path:
        """Rename a broken set so that no scan finds it again; its content stays for whoever wants to look."""
        names = (f"{BROKEN}{path.name}{extra}" for extra in ("", *(f".{number}" for number in range(1, 1000))))
        aside = next(target for name in names if not (target := self.folder / name).exists())
        self.files.rename(path, aside)
        self.files.sync_folder(self.folder)
        return aside

    def _free_name(self, step: int) -> Path:
        """One that no set has or, broken, had."""
        names = (path.name.removeprefix(BROKEN).partition(".")[0] for path in self.folder.iterdir())
        suffixes = [int(match[2] or 0) for name in names if (match := _SET.fullmatch(name)) and int(match[1]) == step]
        return self.folder / (f"step-{step:09d}" + (f"-{max(suffixes) + 1}" if suffixes else ""))

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


def _size(path: Path) -> int:
    """As its writer left it: NFS asks the server at an open, and answers `stat` with what it knew before."""
    fd = open_regular(path)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _remove(path: Path, files: Files) -> None:
    if is_folder(path):
        shutil.rmtree(path)
    else:
        files.unlink(path)
