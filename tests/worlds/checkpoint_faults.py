"""Stand-ins for the disk: one that records what is asked of it, one that fails, and what a power loss leaves."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotheal.training.slotfile.files import Files


# ------------------------------------------------------------------------------------------------------- what is asked
@dataclass(frozen=True)
class Op:
    """One operation: `kind`, and of it what matters for a power loss. Files are known by inode."""

    kind: str  # create, write, truncate, fsync, rename, unlink, sync_folder, acknowledged
    file: int = 0
    name: str = ""
    to: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0
    step: int = 0


class RecordingFiles(Files):
    """Does everything for real, and writes it down."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def acknowledged(self, step: int) -> None:
        self.ops.append(Op("acknowledged", step=step))

    def create(self, path: Path) -> int:
        new = not path.exists()
        fd = super().create(path)
        if new:
            self.ops.append(Op("create", os.fstat(fd).st_ino, path.name))
        return fd

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        super().write(fd, data, offset)
        self.ops.append(Op("write", os.fstat(fd).st_ino, offset=offset, data=bytes(data)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.ops.append(Op("truncate", os.fstat(fd).st_ino, size=size))

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.ops.append(Op("fsync", os.fstat(fd).st_ino))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.ops.append(Op("rename", name=old.name, to=new.name))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.ops.append(Op("unlink", name=path.name))

    def sync_folder(self, folder: Path) -> None:
        self.ops.append(Op("sync_folder"))


class FailingFiles(Files):
    """Fails the `at`-th operation (from 0) with `number`; `asked` counts them all."""

    def __init__(self, at: int, number: int = errno.EIO) -> None:
        self.at, self.number, self.asked = at, number, 0

    def _tick(self) -> None:
        self.asked += 1
        if self.asked - 1 == self.at:
            raise OSError(self.number, os.strerror(self.number))

    def create(self, path: Path) -> int:
        self._tick()
        return super().create(path)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        half = memoryview(data)[: len(data) // 2 // 4096 * 4096]
        if self.asked == self.at and len(half):
            super().write(fd, half, offset)  # what a full disk does
        self._tick()
        super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._tick()
        super().truncate(fd, size)

    def fsync(self, fd: int) -> None:
        self._tick()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._tick()
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self._tick()


# ------------------------------------------------------------------------------------------ what a power loss may leave
@dataclass
class Disk:
    """What POSIX promises: content is durable at fsync of the file, names at fsync of the folder, nothing before.

    Whatever is not yet durable may be there in any combination: each pending write not, half or wholly, each pending
    change of a name or size or not. `durable` is content by inode; `names` inode by name.
    """

    durable: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    pending: dict[int, list[Op]] = field(default_factory=dict)
    pending_names: list[Op] = field(default_factory=list)
    acknowledged: int = 0

    def does(self, op: Op) -> None:
        if op.kind in ("write", "truncate"):
            self.pending.setdefault(op.file, []).append(op)
        elif op.kind == "fsync":
            for one in self.pending.pop(op.file, []):
                self.durable[op.file] = _applied(self.durable.get(op.file, b""), one, whole=True)
        elif op.kind in ("create", "rename", "unlink"):
            self.pending_names.append(op)
        elif op.kind == "sync_folder":
            for one in self.pending_names:
                _rename(self.names, one)
            self.pending_names = []
        elif op.kind == "acknowledged":
            self.acknowledged = op.step

    def after_power_loss(self) -> Iterator[dict[str, bytes]]:
        """Every folder that may be found: content by name."""
        files = list(self.pending)
        kept_data = [
            list(itertools.product(*[(0, 1, 2) if op.kind == "write" else (0, 2) for op in self.pending[file]]))
            for file in files
        ]
        for subset in itertools.product((False, True), repeat=len(self.pending_names)):
            names = dict(self.names)
            for op, kept in zip(self.pending_names, subset, strict=True):
                if kept:
                    _rename(names, op)
            for choice in itertools.product(*kept_data):
                content = dict(self.durable)
                for file, kept_ops in zip(files, choice, strict=True):
                    for op, how in zip(self.pending[file], kept_ops, strict=True):
                        if how:
                            content[file] = _applied(content.get(file, b""), op, whole=how == 2)
                yield {name: content.get(inode, b"") for name, inode in names.items()}


def _applied(content: bytes, op: Op, whole: bool) -> bytes:
    if op.kind == "truncate":
        return content[: op.size].ljust(op.size, b"\0")
    data = op.data if whole else op.data[: len(op.data) // 2]
    return content[: op.offset].ljust(op.offset, b"\0") + data + content[op.offset + len(data) :]


def _rename(names: dict[str, int], op: Op) -> None:
    if op.kind == "create":
        names[op.name] = op.file
    elif op.name in names:
        inode = names.pop(op.name)
        if op.kind == "rename":
            names[op.to] = inode


def tree_of(step: int, size: int = 1500) -> dict[str, Any]:
    """A state that tells its step in every number."""
    import torch

    return {
        "model": {"weight": torch.arange(size, dtype=torch.float32) + step, "bias": torch.full((3,), float(step))},
        "step": step,
    }


def step_in(tree: dict[str, Any]) -> int | None:
    """The step that `tree` tells, None where its numbers disagree."""
    import torch

    step = tree["step"]
    expected = tree_of(step, len(tree["model"]["weight"]))
    same = all(torch.equal(tree["model"][name], expected["model"][name]) for name in expected["model"])
    return int(step) if same else None
