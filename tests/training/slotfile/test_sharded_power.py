"""Power loss while a set of shards is written: every state that POSIX allows has the newest acknowledged set whole."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spotheal.training.sharded import ShardedStore
from spotheal.training.slotfile.files import Files

pytestmark = pytest.mark.torch
Change = tuple[str, Any]  # of a file: write, truncate; of a folder: put, move, drop


@dataclass
class Disk:
    """Content is durable at fsync of a file, names at fsync of their folder; what is pending may be there or not."""

    content: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    pending: dict[int, list[Change]] = field(default_factory=dict)

    def change(self, number: int, *changes: Change) -> None:
        self.pending.setdefault(number, []).extend(changes)

    def fsync(self, number: int) -> None:
        changes = self.pending.pop(number, [])
        if number in self.names:
            self.names[number] = _named(self.names[number], changes)
        else:
            self.content[number] = _written(self.content.get(number, b""), changes)

    def files(self, number: int) -> Iterator[bytes]:
        """What may be in a file: each pending change not, half or wholly."""
        changes = self.pending.get(number, [])
        seen = set()
        for parts in itertools.product((0, 1, 2), repeat=len(changes)):
            some = [_part(change, part) for change, part in zip(changes, parts, strict=True) if part]
            found = _written(self.content.get(number, b""), some)
            if found not in seen:
                seen.add(found)
                yield found

    def folders(self, number: int) -> Iterator[dict[str, int]]:
        changes = self.pending.get(number, [])
        for kept in itertools.product((False, True), repeat=len(changes)):
            yield _named(self.names[number], [change for change, keep in zip(changes, kept, strict=True) if keep])

    def states(self, root: int) -> Iterator[dict[str, bytes]]:
        """Path -> content, for every state of the folder `root` with its folders."""
        for top in self.folders(root):
            inner = [name for name in top if top[name] in self.names]
            for contents in itertools.product(*(list(self.folders(top[name])) for name in inner)):
                places = [
                    (f"{folder}/{name}", number)
                    for folder, found in zip(inner, contents, strict=True)
                    for name, number in found.items()
                ]
                for chosen in itertools.product(*(list(self.files(number)) for _, number in places)):
                    yield {path: content for (path, _), content in zip(places, chosen, strict=True)}


def _part(change: Change, part: int) -> Change:
    kind, what = change
    return (kind, (what[0], what[1][: len(what[1]) // 2])) if kind == "write" and part == 1 else change


def _written(content: bytes, changes: list[Change]) -> bytes:
    for kind, what in changes:
        if kind == "truncate":
            content = content[:what].ljust(what, b"\0")
        else:
            offset, data = what
            content = content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]
    return content


def _named(names: dict[str, int], changes: list[Change]) -> dict[str, int]:
    names = dict(names)
    for kind, what in changes:
        if kind == "put":
            names[what[0]] = what[1]
        elif kind == "move":  # one change: the old name goes as the new one comes
            old, new = what
            if old in names:
                names[new] = names.pop(old)
        else:
            names.pop(what, None)
    return names


class Recording(Files):
    """Does everything for real, tells the disk, and hands every moment to `look`."""

    def __init__(self, root: Path, look: Any) -> None:
        self.root, self.look, self.disk = root, look, Disk()
        self.disk.names[root.stat().st_ino] = {}

    def _at(self, path: Path) -> int:
        return path.stat().st_ino

    def create(self, path: Path) -> int:
        new = not path.exists()
        fd = super().create(path)
        if new:
            self.disk.change(self._at(path.parent), ("put", (path.name, os.fstat(fd).st_ino)))
            self.look()
        return fd

    def direct(self, path: Path) -> int | None:
        return None

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        super().write(fd, data, offset)
        self.disk.change(os.fstat(fd).st_ino, ("write", (offset, bytes(data))))
        self.look()

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.disk.change(os.fstat(fd).st_ino, ("truncate", size))
        self.look()

    def fsync(self, fd: int) -> None:
        self.disk.fsync(os.fstat(fd).st_ino)
        self.look()

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.disk.change(self._at(new.parent), ("move", (old.name, new.name)))
        self.look()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.disk.change(self._at(path.parent), ("drop", path.name))
        self.look()

    def sync_folder(self, folder: Path) -> None:
        for path in folder.iterdir():  # made since, by mkdir
            if path.is_dir() and path.stat().st_ino not in self.disk.names:
                self.disk.names[path.stat().st_ino] = {}
                self.disk.change(self._at(folder), ("put", (path.name, path.stat().st_ino)))
        self.disk.fsync(self._at(folder))
        self.look()


class Without(Recording):
    """A writer that leaves out what makes names durable."""

    def sync_folder(self, folder: Path) -> None:
        pending = dict(self.disk.pending)
        super().sync_folder(folder)
        number = self._at(folder)
        if number in pending:
            self.disk.pending[number] = pending[number]


def tree(step: int) -> dict[str, Any]:
    return {"weight": torch.full((2500,), float(step)), "step": step}


def tried(tmp_path: Path, kind: type[Recording]) -> tuple[int, list[str]]:
    """How many states were tried, and what was wrong in one of them."""
    folder, after = tmp_path / "sets", tmp_path / "after"
    folder.mkdir()
    seen: set[bytes] = set()
    wrong: list[str] = []
    acknowledged = 0

    def look() -> None:
        if wrong:
            return
        for state in files.disk.states(folder.stat().st_ino):
            mark = hashlib.sha256(repr((sorted(state.items()), acknowledged)).encode()).digest()
            if mark in seen:
                continue
            seen.add(mark)
            shutil.rmtree(after, ignore_errors=True)
            for path, content in state.items():
                (after / path).parent.mkdir(parents=True, exist_ok=True)
                (after / path).write_bytes(content)
            store = ShardedStore(after)
            loaded = store.load(dict)
            store.close()
            step = 0 if loaded is None else loaded.tree["step"]
            if step < acknowledged or (loaded is not None and (step, step) != (loaded.step, loaded.tree["weight"][0])):
                wrong.append(f"{acknowledged} acknowledged, {step} found in {sorted(state)}")

    files = kind(folder, look)
    store = ShardedStore(folder, 2, files=files, chunk_bytes=4096)
    for step in range(1, 5):
        store.save_now(step, tree(step))
        acknowledged = step
        look()
    return len(seen), wrong


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_no_power_loss_loses_an_acknowledged_set_or_shows_half_of_one(tmp_path: Path) -> None:
    states, wrong = tried(tmp_path, Recording)
    assert wrong == []
    assert states > 100


def test_the_enumeration_finds_what_a_missing_fsync_of_a_folder_loses(tmp_path: Path) -> None:
    """Checks the check."""
    _, wrong = tried(tmp_path, Without)
    assert wrong != []
