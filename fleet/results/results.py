"""A run's results: listed, and fetched so that what lies here is what lies there, or is not here at all.

A file is written beside its place under a name that holds its object's version, checked against size and checksum, and
renamed: what was cut off goes on where it was, and what is partial never looks complete. Checks: the object's CRC32
or MD5, its parts' where it was uploaded in parts; one that carries neither is checked by its size alone, which is said.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, Retryable, SpothealError
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.fleet.run import runs

PARALLEL = 4
_CHUNK = 1 << 20
_PART = 8 << 20  # boto3's size of a part
_NAME_BYTES_MAX = 255
Step = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Result:
    """`name`: relative to the results, with /. `modified` and `sha256`: None and "" where they are not known."""

    name: str
    size: int
    modified: datetime | None
    sha256: str = ""


@dataclass(frozen=True)
class Fetched:
    """`checked`: sha256, crc32, md5, or size where nothing says what checksum it must have."""

    name: str
    path: Path
    size: int
    checked: str
    was_there: bool


class Refused(SpothealError):
    """A key that is no path below the folder."""


class Source(Protocol):
    """Where results lie. `str()` of it is for people."""

    def list(self) -> tuple[Result, ...]:
        """What is there, by name."""
        ...

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        """Put it at `target`, whole and checked. SpothealError and OSError where it cannot be."""
        ...


def chosen(found: Iterable[Result], patterns: Iterable[str]) -> tuple[Result, ...]:
    """Those that a pattern matches (`*.pt`, `plots/*`), all without patterns; NotFound where one matches nothing."""
    found, patterns = tuple(found), tuple(patterns)
    if not patterns:
        return found
    kept = {one.name: one for pattern in patterns for one in _matching(found, pattern)}
    return tuple(one for one in found if one.name in kept)


def _matching(found: tuple[Result, ...], pattern: str) -> list[Result]:
    kept = [one for one in found if PurePosixPath(one.name).match(pattern) or one.name == pattern]
    if not kept:
        raise NotFound(f"no result matches {pattern!r}", next_step="`fleetctl results ls` lists them")
    return kept


def place(folder: Path, name: str) -> Path:
    """Where `name` lies below `folder`. Refused where it would be elsewhere (`..`, an absolute path, a link that leads
    out), or is no name for a file."""
    parts = name.split("/")
    if name.startswith("/") or not name or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"{name!r} is no path below the results", next_step="it was not fetched")
    if "\\" in name or not name.isprintable() or any(len(os.fsencode(part)) > _NAME_BYTES_MAX - 24 for part in parts):
        raise Refused(f"{name!r} is no name for a file here", next_step="fetch it with the aws CLI under another name")
    target, top = folder.joinpath(*parts), folder.resolve()
    if target.is_symlink() or not target.parent.resolve().is_relative_to(top):
        raise Refused(f"{name!r} leads out of {folder} through a link", next_step="fetch into an empty folder")
    return target


def fetch(
    source: Source, found: Iterable[Result], folder: Path, step: Step, parallel: int = PARALLEL
) -> Iterator[tuple[Result, Fetched | SpothealError]]:
    """Each with what came of it, as they end; one that fails keeps no other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}", next_step="--to DIR") from None
    found = tuple(found)
    total, done, lock = sum(one.size for one in found), [0], threading.Lock()

    def progress(more: int) -> None:
        with lock:
            done[0] += more
            step(done[0], total)

    def one(result: Result) -> tuple[Result, Fetched | SpothealError]:
        try:
            return result, source.fetch(result, place(folder, result.name), progress)
        except SpothealError as error:
            return result, error
        except OSError as error:
            return result, Conflict(f"{result.name} could not be written: {error.strerror or error}")

    with ThreadPoolExecutor(parallel) as pool:
        yield from pool.map(one, found)


def partial_of(target: Path, version: str) -> Path:
    """Where a file is written until it is whole; its folder is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{hashlib.sha256(version.encode()).hexdigest()[:8]}.partial")


def damaged(partial: Path, name: str) -> Retryable:
    partial.unlink(missing_ok=True)
    return Retryable(f"{name} came damaged: its checksum is another", next_step="the same command again")


class Objects:
    """Objects below a prefix of S3, directories' own markers left out."""

    def __init__(self, client: Any, url: StoreUrl) -> None:
        self._client, self._url = client, url

    def __str__(self) -> str:
        return f"{self._url}/"

    def list(self) -> tuple[Result, ...]:
        prefix = self._key("")
        found: list[Result] = []
        with translated(f"list the results in {self}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._url.bucket, Prefix=prefix)
            for page in pages:
                found += [
                    Result(item["Key"][len(prefix) :], int(item["Size"]), item["LastModified"])
                    for item in page.get("Contents", [])
                    if not item["Key"].endswith("/")
                ]
        return tuple(found)

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        try:
            return self._fetch(result, target, progress)
        except Conflict:  # replaced meanwhile, as the metrics of a run that is at work are
            return self._fetch(result, target, progress)

    def _fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        head = self._head(result)
        size, etag = int(head["ContentLength"]), str(head["ETag"]).strip('"')
        if target.is_file() and target.stat().st_size == size:
            checked = _check(target, head)
            if checked and checked != "size":  # a file of the same size that nobody checked may be another
                progress(size)
                return Fetched(result.name, target, size, checked, was_there=True)
        partial = partial_of(target, etag)
        self._download(result, partial, size, etag, progress)
        checked = _check(partial, head)
        if not checked:
            raise damaged(partial, result.name)
        os.replace(partial, target)
        return Fetched(result.name, target, size, checked, was_there=False)

    def _head(self, result: Result) -> dict[str, Any]:
        with translated(f"look at {result.name}"):
            answer: dict[str, Any] = self._client.head_object(
                Bucket=self._url.bucket, Key=self._key(result.name), ChecksumMode="ENABLED"
            )
            return answer

    def _download(
        self, result: Result, partial: Path, size: int, etag: str, progress: Callable[[int], None]
    ) -> None:
        """From where an earlier one was cut off, of the same object; Conflict where it was replaced meanwhile."""
        with partial.open("ab") as file:
            there = file.tell()
            if there > size:
                file.truncate(0)
                there = 0
            progress(there)
            if there == size:
                return
            with translated(f"read {result.name}"):
                answer = self._client.get_object(
                    Bucket=self._url.bucket, Key=self._key(result.name), Range=f"bytes={there}-", IfMatch=etag
                )
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    file.write(chunk)
                    progress(len(chunk))
            file.flush()
            os.fsync(file.fileno())

    def _key(self, name: str) -> str:
        return f"{self._url.prefix}/{name}" if self._url.prefix else name


def objects(run: runs.Run) -> Objects:
    """Those in the run's own store."""
    return Objects(run.store.client, run.store.url.below(LAYOUT.results.rstrip("/")))


# ---------------------------------------------------------------------------------------------------------- checksums
def _check(path: Path, head: dict[str, Any]) -> str:
    """How the file was found to be the object; "" where it is not."""
    size, etag = int(head["ContentLength"]), str(head["ETag"]).strip('"')
    if path.stat().st_size != size:
        return ""
    crc = str(head.get("ChecksumCRC32") or "")
    whole = head.get("ChecksumType") or ("COMPOSITE" if "-" in etag else "FULL_OBJECT")
    if crc and whole == "FULL_OBJECT":
        return "crc32" if _crc32(path) == crc else ""
    if head.get("ServerSideEncryption") in (None, "AES256"):  # a key of KMS makes the ETag no MD5
        digest, _, parts = etag.partition("-")
        if len(digest) == 32 and not parts:
            return "md5" if _md5(path) == digest else ""
        if parts.isdigit() and int(parts) and len(digest) == 32:
            sizes = dict.fromkeys((_PART, *_part_sizes(size, int(parts))))
            known = [part for part in sizes if -(-size // part) == int(parts)]
            if any(_md5_of_parts(path, part) == digest for part in known):
                return "md5"
            if _PART in known:
                return ""  # our own uploads have parts of this size
    return "size"


def _part_sizes(size: int, count: int) -> Iterator[int]:
    """What `count` parts of one size can be: in MiB, as uploaders choose them."""
    least = -(-size // count)
    for mib in (1, 5, 16, 64):
        step = mib << 20
        yield -(-least // step) * step


def _crc32(path: Path) -> str:
    value = 0
    for chunk in _chunks(path):
        value = zlib.crc32(chunk, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _md5_of_parts(path: Path, part: int) -> str:
    whole = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while body := file.read(part):
            whole.update(hashlib.md5(body, usedforsecurity=False).digest())
    return whole.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
