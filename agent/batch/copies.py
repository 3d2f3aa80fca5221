"""Copies of a trainer's checkpoints in the store, for a run whose disk dies with its host.

    checkpoints/blobs/<sha256>               contents; what did not change is sent once
    checkpoints/<term>-<number>.json         a copy: which files it holds. Put last, so a copy is there whole or not

A copy is only put where no checkpoint changed while it was made; results that do (a trainer may write to them all the
time) are copied as they are, or by the next copy where they are large. The newest whole one is read back; one whose
contents are missing or wrong is named, and the one before is taken. The two newest are kept. Of an attempt that was
thought dead and lives on, copies have a lower term, and are never preferred to those of its successor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from spotheal.agent.aws.s3 import Halt, Store, go_on
from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import NotFound, Retryable, SpothealError
from spotheal.agent.protocol.names import LAYOUT

KEPT = 2
PASSES_MAX = 5
_PAUSE_SECONDS = 1.0
_BLOBS = f"{LAYOUT.checkpoints}blobs/"
_MANIFEST = re.compile(rf"{LAYOUT.checkpoints}(\d{{6}})-(\d{{6}})\.json")
_HALF = re.compile(r".*\.(tmp|part|partial)|\..*\.tmp")  # being written; a trainer's next start removes or ignores it
_SLOT = re.compile(r"step-(\d+)")  # spotheal.training's slots: the two newest do
_SLOTS_COPIED = 2
_GROWING_BYTES_MAX = 64 << 20  # of a result that is read into memory, because it grows while it is copied


@dataclass(frozen=True)
class Entry:
    """One file of a copy, by its path below the run's folder; `link` is the target of a link instead of contents."""

    path: str
    size: int = 0
    sha256: str = ""
    mode: int = 0o644
    mtime_ns: int = 0
    link: str = ""


@dataclass(frozen=True)
class Found:
    """What was read back: the copy's key, its step (None: not known), its files."""

    key: str
    saved_step: int | None
    files: int
    size: int


class Changed(Exception):
    """A file changed while it was copied."""


class Copies:
    """Of one run. `copy` from any thread; two at once make two copies."""

    def __init__(self, store: Store, folders: Folders, term: int, clock: Clock, log: Any) -> None:
        self._store, self._folders, self._term = store, folders, term
        self._clock, self._log = clock, log
        self._top = folders.checkpoints.parent
        self._sent: set[str] | None = None  # blobs that the store has
        self._number = 0
        self._made: list[str] = []  # manifests of this attempt, oldest first
        self._hashes: dict[tuple[str, int, int, int], str] = {}
        self._too_sparse: set[Path] = set()
        self._lock = threading.Lock()
        self.abandon = threading.Event()  # a later copy is made in place of those under way

    # ---------------------------------------------------------------------------------------------------------- making
    def copy(
        self, saved_step: int | None, *, last: bool = False, new_results: bool = True, halt: Halt = go_on
    ) -> bool:
        """Make a copy now; whether it stands. Raises SpothealError where the store cannot be reached, or with what
        `halt` says, which is asked at each part of a file.

        `last`: nothing writes any more, and nobody waits for what is surplus to be deleted. `new_results` False: of the
        results what the store has; the others are on their way to their own place.
        """
        with self._lock:
            self._number += 1
            number = self._number
            if self._sent is None:
                self._sent = {key.removeprefix(_BLOBS) for key in self._store.keys(_BLOBS)}
        for attempt in range(PASSES_MAX):
            if self._is_given_up(last) or (attempt and self._clock.sleep(_PAUSE_SECONDS, until=self.abandon)):
                return False
            try:
                entries = self._send_all(last, new_results, halt)
            except Changed as changed:
                self._log.info("a checkpoint changed while it was copied; copying again", file=str(changed))
                continue
            if entries is None:
                return False
            self._put(number, entries, saved_step)
            if not last:
                self._delete_surplus()
            return True
        self._log.warning("the checkpoints change all the time; no copy was made", tries=PASSES_MAX)
        return False

    def _is_given_up(self, last: bool) -> bool:
        return self.abandon.is_set() and not last

    def _send_all(self, last: bool, new_results: bool, halt: Halt) -> list[Entry] | None:
        """Contents of every file; None where it was given up."""
        entries: list[Entry] = []
        files: list[tuple[Path, os.stat_result]] = []
        for path in files_to_copy(self._folders):
            if self._is_given_up(last):
                return None
            is_result = self._folders.results in path.parents
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                if is_result:
                    continue
                raise Changed(path.name) from None
            if stat.S_ISLNK(status.st_mode):
                entries.append(Entry(self._name(path), link=os.readlink(path)))
                continue
            if holes := untrusted_folders.holes(status):
                self._warn_of_holes(path, holes)
                continue
            if path in (self._folders.metrics_file, _memory(self._folders)):
                entries.append(self._send_as_it_is(path, status))
                continue
            if is_result:
                if (entry := self._send_result(path, status, new_results, halt)) is not None:
                    entries.append(entry)
                continue
            files.append((path, status))
            entries.append(self._send(path, status, halt))
        for path, status in files:
            if _mark(path) != _mark_of(status):
                raise Changed(path.name)
        return entries

    def _warn_of_holes(self, path: Path, holes: str) -> None:
        if path not in self._too_sparse:
            self._too_sparse.add(path)
            self._log.warning("a file is left out of the copies in the store", file=self._name(path), why=holes)

    def _send(self, path: Path, status: os.stat_result, halt: Halt) -> Entry:
        digest = self._digest(path, status, halt)
        assert self._sent is not None
        if digest not in self._sent:
            self._store.put_file(_BLOBS + digest, self._top.resolve() / self._name(path), halt)
            if _mark(path) != _mark_of(status):
                self._store.delete(_BLOBS + digest)  # what was sent may be a mixture, under a name that promises more
                raise Changed(path.name)
            self._sent.add(digest)
        mode = stat.S_IMODE(status.st_mode)
        return Entry(self._name(path), status.st_size, digest, mode, status.st_mtime_ns)

    def _send_result(self, path: Path, status: os.stat_result, new: bool, halt: Halt) -> Entry | None:
        """None where it is left to the next copy."""
        assert self._sent is not None
        try:
            if not new and self._digest(path, status, halt) not in self._sent:
                return None
            return self._send(path, status, halt)
        except Changed:
            if not new or status.st_size > _GROWING_BYTES_MAX:
                return None
        try:
            return self._send_as_it_is(path, status)
        except Changed:  # it is gone
            return None

    def _send_as_it_is(self, path: Path, status: os.stat_result) -> Entry:
        """A file that only grows: as long as it is now."""
        with _open(self._top, path) as file:
            body = file.read(_GROWING_BYTES_MAX)
        digest = hashlib.sha256(body).hexdigest()
        assert self._sent is not None
        if digest not in self._sent:
            self._store.put_bytes(_BLOBS + digest, body)
            self._sent.add(digest)
        return Entry(self._name(path), len(body), digest, stat.S_IMODE(status.st_mode), status.st_mtime_ns)

    def _digest(self, path: Path, status: os.stat_result, halt: Halt) -> str:
        mark = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        if mark not in self._hashes:
            digest = hashlib.sha256()
            with _open(self._top, path) as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                    if reason := halt():
                        raise Retryable(reason)
            if _mark(path) != _mark_of(status):
                raise Changed(path.name)
            self._hashes[mark] = digest.hexdigest()
        return self._hashes[mark]

    def _put(self, number: int, entries: list[Entry], saved_step: int | None) -> None:
        key = f"{LAYOUT.checkpoints}{self._term:06d}-{number:06d}.json"
        document = {
            "schema_version": 1, "time": rfc3339(self._clock.now()), "saved_step": saved_step,
            "files": [asdict(entry) for entry in entries],
        }  # fmt: skip
        self._store.put_json(key, document)
        with self._lock:
            self._made.append(key)
        self._log.info("copied the checkpoints to the store", saved_step=saved_step, files=len(entries), copy=key)

    def _delete_surplus(self) -> None:
        """Once this attempt has enough copies of its own: manifests first, then the contents nobody names."""
        with self._lock:
            if len(self._made) < KEPT or self.abandon.is_set():
                return
            keys_kept = set(self._made[-KEPT:])
        try:
            keys = [key for key in self._store.keys(LAYOUT.checkpoints) if _MANIFEST.fullmatch(key)]
            ours = [key for key in keys if key <= max(keys_kept)]  # never a successor's
            named = {entry.sha256 for key in {*keys_kept, *(set(keys) - set(ours))} for entry in self._entries(key)}
            for key in ours:
                if key not in keys_kept:
                    self._store.delete(key)
            if len(ours) < len(keys):
                return  # a successor is at work, and knows best what is surplus
            for blob in self._store.keys(_BLOBS):
                if blob.removeprefix(_BLOBS) not in named:
                    self._store.delete(blob)
                    if self._sent is not None:
                        self._sent.discard(blob.removeprefix(_BLOBS))
        except (SpothealError, ValueError) as error:
            self._log.warning("surplus copies stay in the store", error=str(error))

    def _entries(self, key: str) -> list[Entry]:
        return _entries_of(self._store.get_json(key) or {})

    def _name(self, path: Path) -> str:
        return path.relative_to(self._top).as_posix()

    # --------------------------------------------------------------------------------------------------- reading back
    def read_back(self) -> Found | None:
        """The newest whole copy, in place of what is there; None where there is none (the run begins anew).

        Retryable where this host's disk does not take it.
        """
        keys = [key for key in self._store.keys(LAYOUT.checkpoints) if _MANIFEST.fullmatch(key)]
        for key in sorted(keys, reverse=True):
            document = self._store.get_json(key)
            if document is None:
                continue
            try:
                entries = _entries_of(document)
                self._fetch(entries, dict(self._store.sizes(_BLOBS)))
            except (NotFound, ValueError) as fault:
                self._log.warning("a copy of the checkpoints is not whole; taking the one before", copy=key,
                                  why=str(fault))  # fmt: skip
                continue
            except OSError as fault:
                size = sum(entry.size for entry in entries) / (1 << 30)
                raise Retryable(f"the checkpoints ({size:.1f} GiB) cannot be read back here: {fault.strerror or fault}",
                                next_step="hosts whose disk has room for them: their AMI's root volume") from fault
            step = document.get("saved_step")
            size_bytes = sum(entry.size for entry in entries)
            copy = Found(key, step if isinstance(step, int) else None, len(entries), size_bytes)
            self._log.info("read back the checkpoints", copy=key, saved_step=copy.saved_step, files=copy.files)
            return copy
        return None

    def _fetch(self, entries: list[Entry], sizes: Mapping[str, int]) -> None:
        """All contents first, beside their places, then all renames. ValueError if contents are not what they were, or
        something on the way to a place is a link. `sizes`: of what the store has.

        No entry can guess the names beside the places: one that named the link beside another's place led out of the
        run's folder.
        """
        ready: list[tuple[Path, Path]] = []
        word = secrets.token_hex(8)
        try:
            for number, entry in enumerate(entries):
                place = self._top / entry.path
                self._refuse_links(entry)
                if not entry.link and sizes.get(_BLOBS + entry.sha256, entry.size) != entry.size:
                    raise ValueError(f"{entry.path}: its contents have another size than those that were copied")
                place.parent.mkdir(parents=True, exist_ok=True)
                part_file = place.parent / f".{word}-{number}.read-back.tmp"
                ready.append((part_file, place))
                self._fetch_one(entry, part_file)
        except (SpothealError, ValueError, OSError):
            for part_file, _ in ready:
                part_file.unlink(missing_ok=True)
            raise
        for part_file, place in ready:
            os.replace(part_file, place)

    def _refuse_links(self, entry: Entry) -> None:
        """No trainer runs yet, so that nothing changes between this look and its use."""
        *above, _ = PurePosixPath(entry.path).parts
        for count in range(1, len(above) + 1):
            if self._top.joinpath(*above[:count]).is_symlink():
                raise ValueError(f"{entry.path!r} leads through a link")

    def _fetch_one(self, entry: Entry, part_file: Path) -> None:
        if entry.link:
            part_file.symlink_to(entry.link)
            return
        self._store.download(_BLOBS + entry.sha256, part_file)
        digest = hashlib.sha256()
        with part_file.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        if digest.hexdigest() != entry.sha256:
            raise ValueError(f"{entry.path}: its contents are not those that were copied")
        part_file.chmod(entry.mode & 0o777)
        os.utime(part_file, ns=(entry.mtime_ns, entry.mtime_ns))


# --------------------------------------------------------------------------------------------------------------- files
def files_to_copy(folders: Folders) -> Iterator[Path]:
    """What a successor needs: checkpoints, kept paths, results, the metrics, the run's memory. Half-written files are
    left out, and of spotheal.training's slots all but the newest two."""
    slots = sorted(int(match.group(1)) for name in _names(folders.checkpoints) if (match := _SLOT.fullmatch(name)))
    old = {f"step-{number}" for number in slots[:-_SLOTS_COPIED]}
    for top in (folders.checkpoints, folders.keep, folders.results):
        for below, inner, names, folder in untrusted_folders.walk(top):
            inner.sort()
            for name in sorted(names):
                if _HALF.fullmatch(name) or (top == folders.checkpoints and not below and name in old):
                    continue
                status = untrusted_folders.status_of(folder, name)
                if status is not None and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                    yield top / below / name
    for path in (folders.metrics_file, _memory(folders)):
        if path.is_file() and not path.is_symlink():
            yield path


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _memory(folders: Folders) -> Path:
    return folders.environments / "run.json"


def _entries_of(document: Mapping[str, Any]) -> list[Entry]:
    """ValueError where the manifest is none, or leads out of the run's folder."""
    try:
        entries = [Entry(**fields) for fields in document["files"]]
    except (KeyError, TypeError) as fault:
        raise ValueError(f"its list of files cannot be read: {fault}") from None
    for entry in entries:
        if not all(isinstance(text, str) for text in (entry.path, entry.sha256, entry.link)):
            raise ValueError("its list of files has names that are no text")
        if not all(isinstance(number, int) for number in (entry.size, entry.mode, entry.mtime_ns)):
            raise ValueError(f"{entry.path!r} has no size, mode or time")
        parts = PurePosixPath(entry.path).parts
        if not parts or entry.path.startswith("/") or ".." in parts:
            raise ValueError(f"{entry.path!r} leads out of the run's folder")
        if not entry.link and not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
            raise ValueError(f"{entry.path!r} has no contents")
    names = {PurePosixPath(entry.path) for entry in entries}
    if folder := next((str(name) for name in names if not names.isdisjoint(name.parents)), ""):
        raise ValueError(f"{folder!r} lies below a file")
    return entries


def _mark_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        return _mark_of(os.lstat(path))
    except OSError:
        return None


@contextlib.contextmanager
def _open(top: Path, path: Path) -> Iterator[IO[bytes]]:
    """The trainer owns the folder: no link is followed, and a file of another kind is no file."""
    try:
        name = path.relative_to(top).as_posix()
        with untrusted_folders.file(top, name) as descriptor, open(descriptor, "rb", closefd=False) as file:
            yield file
    except FileNotFoundError:
        raise Changed(path.name) from None
