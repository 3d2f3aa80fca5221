"""A run's results: listed, and fetched so that each file here is equal to the original, or does not exist.

A file is written next to its target under a name that holds its object's version, checked by size and checksum, and
renamed: an interrupted download continues, and a partial file never looks complete. Checks: the object's CRC32 or
MD5, or its parts' if it was uploaded in parts; an object with neither is checked by its size alone, and the verb says
so.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import os
import shutil
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
from spotheal.fleet.run.table import size_of

PARALLEL = 4
_CHUNK = 1 << 20
_PART = 8 << 20  # boto3's size of a part
_NAME_BYTES_MAX = 255
Step = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Result:
    """`name`: relative to the results, with /. `modified` and `sha256`: None and "" if they are not known."""

    name: str
    size: int
    modified: datetime | None
    sha256: str = ""


@dataclass(frozen=True)
class Fetched:
    """`checked`: sha256, crc32, md5, or size if no checksum is known."""

    name: str
    path: Path
    size: int
    checked: str
    was_there: bool


class Refused(SpothealError):
    """The key is no path below the folder."""


class Source(Protocol):
    """A place with results. Its `str()` is for messages."""

    def list(self) -> tuple[Result, ...]:
        """All results, by name."""
        ...

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        """Write the result to `target`, complete and checked; SpothealError or OSError if that fails."""
        ...


def chosen(results: Iterable[Result], patterns: Iterable[str]) -> tuple[Result, ...]:
    """The results that match a pattern (`*.pt`, `plots/*`), or all; NotFound if a pattern matches none."""
    results, patterns = tuple(results), tuple(patterns)
    if not patterns:
        return results
    matches = {result.name: result for pattern in patterns for result in _matching(results, pattern)}
    return tuple(result for result in results if result.name in matches)


def _matching(results: tuple[Result, ...], pattern: str) -> list[Result]:
    matches = [result for result in results if PurePosixPath(result.name).match(pattern) or result.name == pattern]
    if not matches:
        raise NotFound(f"no result matches {pattern!r}", next_step="`fleetctl results ls` lists them")
    return matches


def place(folder: Path, name: str) -> Path:
    """The path of `name` below `folder`. Refused if it leads outside (`..`, an absolute path, a link), or is no name
    for a file."""
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
    source: Source, results: Iterable[Result], folder: Path, step: Step, parallel: int = PARALLEL
) -> Iterator[tuple[Result, Fetched | SpothealError]]:
    """Each result with its outcome, in order; one failure does not stop the others."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}", next_step="--to DIR") from None
    results = tuple(results)
    _check_room(results, folder)
    total, bytes_done, lock = sum(item.size for item in results), [0], threading.Lock()

    def progress(count: int) -> None:
        with lock:
            bytes_done[0] += count
            step(bytes_done[0], total)

    def fetch_result(result: Result) -> tuple[Result, Fetched | SpothealError]:
        try:
            return result, source.fetch(result, place(folder, result.name), progress)
        except SpothealError as error:
            return result, error
        except OSError as error:
            return result, Conflict(f"{result.name} could not be written: {error.strerror or error}")

    with ThreadPoolExecutor(parallel) as pool:
        yield from pool.map(fetch_result, results)


def _check_room(results: Iterable[Result], folder: Path) -> None:
    """ConfigError if the disk of `folder` cannot take what is not here yet."""
    missing = sum(max(0, result.size - _bytes_here(folder, result)) for result in results)
    if missing > (free := free_bytes(folder)):
        raise ConfigError(
            f"{size_of(missing)} are to be fetched, and the disk of {folder} has {size_of(free)} free",
            next_step="--to DIR on a larger disk, or --only PATTERN",
        )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _bytes_here(folder: Path, result: Result) -> int:
    """Of the file, or of the part of it that an earlier download has left."""
    try:
        target = place(folder, result.name)
        parts = target.parent.glob(f".{glob.escape(target.name)}.*.partial")
        return max((path.stat().st_size for path in (target, *parts) if path.is_file()), default=0)
    except (Refused, OSError):
        return 0


def partial_of(target: Path, version: str) -> Path:
    """The path of a file until it is complete; its folder is created."""
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
        results: list[Result] = []
        with translated(f"list the results in {self}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._url.bucket, Prefix=prefix)
            for page in pages:
                results += [
                    Result(item["Key"][len(prefix) :], int(item["Size"]), item["LastModified"])
                    for item in page.get("Contents", [])
                    if not item["Key"].endswith("/")
                ]
        return tuple(results)

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        try:
            return self._fetch(result, target, progress)
        except Conflict:  # replaced meanwhile, like the metrics of a live run
            return self._fetch(result, target, progress)

    def _fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        head = self._head(result)
        size, etag = int(head["ContentLength"]), str(head["ETag"]).strip('"')
        if target.is_file() and target.stat().st_size == size:
            checked = _check(target, head)
            if checked and checked != "size":  # the same size without a checksum does not prove the same file
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
        """Download, or continue an earlier download of the same object; Conflict if it was replaced meanwhile."""
        with partial.open("ab") as file:
            offset = file.tell()
            if offset > size:
                file.truncate(0)
                offset = 0
            progress(offset)
            if offset == size:
                return
            with translated(f"read {result.name}"):
                answer = self._client.get_object(
                    Bucket=self._url.bucket, Key=self._key(result.name), Range=f"bytes={offset}-", IfMatch=etag
                )
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    file.write(chunk)
                    progress(len(chunk))
            file.flush()
            os.fsync(file.fileno())

    def _key(self, name: str) -> str:
        return f"{self._url.prefix}/{name}" if self._url.prefix else name


def objects(run: runs.Run) -> Objects:
    """The results in the run's own store."""
    return Objects(run.store.client, run.store.url.below(LAYOUT.results.rstrip("/")))


# ---------------------------------------------------------------------------------------------------------- checksums
def _check(path: Path, head: dict[str, Any]) -> str:
    """The check that the file passed (crc32, md5 or size); "" if it is not equal to the object."""
    size, etag = int(head["ContentLength"]), str(head["ETag"]).strip('"')
    if path.stat().st_size != size:
        return ""
    crc = str(head.get("ChecksumCRC32") or "")
    whole = head.get("ChecksumType") or ("COMPOSITE" if "-" in etag else "FULL_OBJECT")
    if crc and whole == "FULL_OBJECT":
        return "crc32" if _crc32(path) == crc else ""
    if head.get("ServerSideEncryption") in (None, "AES256"):  # with a KMS key the ETag is no MD5
        digest, _, parts = etag.partition("-")
        if len(digest) == 32 and not parts:
            return "md5" if _md5(path) == digest else ""
        if parts.isdigit() and int(parts) and len(digest) == 32:
            sizes = dict.fromkeys((_PART, *_part_sizes(size, int(parts))))
            candidates = [part for part in sizes if -(-size // part) == int(parts)]
            if any(_md5_of_parts(path, part) == digest for part in candidates):
                return "md5"
            if _PART in candidates:
                return ""  # our own uploads have parts of this size
    return "size"


def _part_sizes(size: int, count: int) -> Iterator[int]:
    """Possible sizes of `count` equal parts, rounded up to 1, 5, 16 or 64 MiB, as uploaders choose them."""
    size_min = -(-size // count)
    for mib in (1, 5, 16, 64):
        step = mib << 20
        yield -(-size_min // step) * step


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
