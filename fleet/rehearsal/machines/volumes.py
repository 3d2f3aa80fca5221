"""The bytes of the rehearsal's volumes and snapshots: folders that are copied when AWS would copy blocks.

    <folder>/volumes/vol-…/image   sparse file of the volume's size: the raw device (signature, blank check)
    <folder>/volumes/vol-…/files/  the filesystem's content
    <folder>/snapshots/snap-…/     the same, copied at the moment of CreateSnapshot

What state a volume is in, and who may have it, is the rule book's; this module only holds bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from spotheal.agent.protocol.errors import Fatal

GIB = 2**30


@dataclass(frozen=True)
class Disk:
    """Where the bytes of one volume are."""

    volume: str
    image: Path
    files: Path

    @property
    def size_bytes(self) -> int:
        return self.image.stat().st_size


class Volumes:
    """Volumes and snapshots below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._volumes, self._snapshots = folder / "volumes", folder / "snapshots"
        for place in (self._volumes, self._snapshots):
            place.mkdir(parents=True, exist_ok=True)

    def disk(self, volume: str) -> Disk:
        return Disk(volume, self._volumes / volume / "image", self._volumes / volume / "files")

    def create(self, volume: str, size_gib: int, snapshot: str = "") -> Disk:
        """A blank volume, or a copy of `snapshot` (which may be smaller, as at EC2)."""
        if snapshot:
            _copy(self._snapshots / snapshot, self._volumes / volume)
        else:
            (self._volumes / volume / "files").mkdir(parents=True)
            (self._volumes / volume / "image").touch()
        disk = self.disk(volume)
        os.truncate(disk.image, max(disk.size_bytes, size_gib * GIB))
        return disk

    def snapshot(
        self, volume: str, snapshot: str, still: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Copy `volume` as it is now; `still` holds its writer for the moment of the copy, so that it is one moment."""
        with still():
            _copy(self._volumes / volume, self._snapshots / snapshot)

    def delete(self, volume: str) -> None:
        shutil.rmtree(self._volumes / volume, ignore_errors=True)

    def delete_snapshot(self, snapshot: str) -> None:
        shutil.rmtree(self._snapshots / snapshot, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """`target` appears whole or not at all; blocks are shared where the filesystem can, holes stay holes."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    process = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--sparse=always", "--", str(source), str(part)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        raise Fatal(f"{source.name} could not be copied to {target.name}: {process.stderr.strip()}")
    part.rename(target)
