"""The run's prefix in S3: everything that must be readable when no instance is alive. The only module that knows S3.

Layout: `names.StoreLayout`. S3 is strongly consistent; the two things that need more than that are claims
(`If-None-Match: *`, so that one writer wins) and appends (`If-Match`, so that two writers lose nothing).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.errors import Conflict, NotFound, PermissionDenied, Retryable
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.agent.protocol.redaction import SECRETS

_APPEND_TRIES = 20
OBJECT_BYTES_MAX = 64 << 20  # of what is read into memory; our own are far smaller
_FORBIDDEN = ("AccessDenied", "403")  # the latter of a HEAD, whose answer has no body


Halt = Callable[[], str]  # why a copy ends before its end, or ""


def go_on() -> str:
    return ""


class _Halting(io.BufferedReader):
    """The open file `descriptor`, read no further once `halt` says why."""

    def __init__(self, descriptor: int, halt: Halt) -> None:
        super().__init__(io.FileIO(descriptor, closefd=False))
        self._halt = halt

    def read(self, size: int | None = -1) -> bytes:
        if reason := self._halt():
            raise Retryable(reason)
        return super().read(size)


_ENDS = {phase.value for phase in Phase if phase.is_end}


def _is_end(status: Mapping[str, Any]) -> bool:
    return str(status.get("phase")) in _ENDS


class Store:
    """One run's prefix. `client` is a boto3 S3 client, `url` the prefix of the run."""

    def __init__(self, client: Any, url: StoreUrl) -> None:
        self.client = self._s3 = client
        self.url = url
        self._status_etag: str | None = None  # of the status we read or wrote last, where that is no end
        self._claims: dict[int, Claim] = {}  # a claim is written once and never changed
        self.stops: frozenset[int] = frozenset()  # terms whose holders are asked to end, by the last `highest_term`

    # ------------------------------------------------------------------------------------------------------- objects
    def get_bytes(self, key: str) -> bytes | None:
        """The object's content, or None where there is none."""
        answer = self._get(key)
        return None if answer is None else answer[0]

    def put_bytes(self, key: str, body: bytes, content_type: str = "application/octet-stream") -> None:
        with translated(f"write {self._name(key)}"):
            self._s3.put_object(Bucket=self.url.bucket, Key=self._key(key), Body=body, ContentType=content_type)

    def get_json(self, key: str) -> dict[str, Any] | None:
        """The JSON object at `key`, or None where there is none; Retryable where it cannot be read as one."""
        body = self.get_bytes(key)
        return None if body is None else self._json(key, body)

    def _json(self, key: str, body: bytes) -> dict[str, Any]:
        try:
            document = bounded_json.parse(body, bytes_max=OBJECT_BYTES_MAX)
        except ValueError as fault:
            raise Retryable(f"{self._name(key)} is not JSON: {fault}") from fault
        if not isinstance(document, dict):
            raise Retryable(f"{self._name(key)} is not a JSON object")
        return document

    def put_json(self, key: str, body: Mapping[str, Any]) -> None:
        self.put_bytes(key, json.dumps(SECRETS.tree(body), indent=1).encode(), "application/json")

    def put_file(self, key: str, path: Path, halt: Halt = go_on) -> None:
        """Upload a trainer's file of any size (in parts where it is large); OSError where it cannot be read, or a part
        of its path is a link. Retryable with what `halt` says, asked at each part."""
        # upload_file would hide AWS's code in an exception of its own; upload_fileobj lets it through.
        with (
            untrusted_folders.file_without_links(path) as descriptor,
            _Halting(descriptor, halt) as body,
            translated(f"write {self._name(key)}"),
        ):
            self._s3.upload_fileobj(body, self.url.bucket, self._key(key))

    def download(self, key: str, path: Path) -> None:
        """NotFound where there is no such object."""
        try:
            with translated(f"read {self._name(key)}"):
                self._s3.download_file(self.url.bucket, self._key(key), str(path))
        except PermissionDenied as error:
            if not self._is_absent(key, error):
                raise
            raise NotFound(f"there is no {self._name(key)}", code=error.code) from error
        except Retryable as error:
            if error.code == "400":  # of a HEAD, whose answer has no body: a GET's names the fault
                self.keys(key)
            raise

    def keys(self, prefix: str = "") -> list[str]:
        """Keys below `prefix`, relative to the run, sorted by S3."""
        return [key for key, _ in self.sizes(prefix)]

    def sizes(self, prefix: str = "") -> list[tuple[str, int]]:
        """Keys below `prefix` with their sizes in bytes."""
        return [(self._relative(item), int(item["Size"])) for item in self._listed(prefix)]

    def _listed(self, prefix: str) -> list[dict[str, Any]]:
        with translated(f"list {self._name(prefix)}"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.url.bucket, Prefix=self._key(prefix))
            return [item for page in pages for item in page.get("Contents", [])]

    def _relative(self, item: Mapping[str, Any]) -> str:
        return str(item["Key"])[len(self._key("")) :]

    def delete(self, key: str) -> None:
        with translated(f"delete {self._name(key)}"):
            self._s3.delete_object(Bucket=self.url.bucket, Key=self._key(key))

    # --------------------------------------------------------------------------------------------------------- terms
    def claim_term(self, claim: Claim) -> bool:
        """Claim `claim.number`; False where another instance has it.

        A claim whose reply was lost is found again: the stored claim names this instance.
        """
        body = json.dumps(claim.to_json()).encode()
        if self._put_if(LAYOUT.term(claim.number), body, None):
            self._claims[claim.number] = claim
            return True
        stored = self.term(claim.number)
        return stored is not None and stored.instance == claim.instance

    def term(self, number: int) -> Claim | None:
        if number not in self._claims:
            document = self.get_json(LAYOUT.term(number))
            if document is None:
                return None
            try:
                self._claims[number] = Claim.from_json({**document, "number": number})
            except TypeError as fault:
                raise Retryable(f"{self._name(LAYOUT.term(number))} is no claim: {fault}") from fault
        return self._claims[number]

    def highest_term(self) -> Claim | None:
        """The claim that fences all others, or None before the first."""
        keys = self.keys(LAYOUT.terms)
        numbers = [int(match.group(1)) for key in keys if (match := re.fullmatch(r"terms/(\d+)", key))]
        self.stops = frozenset(number for number in numbers if LAYOUT.stop(number) in keys)
        return self.term(max(numbers)) if numbers else None

    # ------------------------------------------------------------------------------------------- status and launches
    def read_status(self) -> dict[str, Any] | None:
        answer = self._get(LAYOUT.status)
        document = None if answer is None else self._json(LAYOUT.status, answer[0])
        self._status_etag = None if answer is None or document is None or _is_end(document) else answer[1]
        return document

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Whatever is there now: for who requests a run, or resumes it."""
        self.put_json(LAYOUT.status, status)

    def publish_status(self, status: Mapping[str, Any]) -> dict[str, Any] | None:
        """Write `status`, unless the end of the run is recorded: ends are final. None, or the end that stands.

        Costs one call as long as nobody else writes: what was read or written last is put again only under `If-Match`.
        What cannot be read as a status is no end, and is written over: a run must not fall silent over it.
        """
        body = json.dumps(SECRETS.tree(status), indent=1).encode()
        for _ in range(_APPEND_TRIES):
            if self._status_etag is None:
                answer = self._get(LAYOUT.status)
                with suppress(Retryable):
                    document = {} if answer is None else self._json(LAYOUT.status, answer[0])
                    if _is_end(document):
                        return document
                self._status_etag = None if answer is None else answer[1]
            self._status_etag = self._put_etag(LAYOUT.status, body, self._status_etag)
            if self._status_etag is not None:
                return None
        raise self._outrun(LAYOUT.status)

    def end_status(self, end: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add `end` to the status that is there, whoever writes it meanwhile; returns that status, or None if an end is
        recorded already, which stands."""
        for _ in range(_APPEND_TRIES):
            status = self.read_status() or {}
            if _is_end(status):
                return None
            body = json.dumps(SECRETS.tree({**status, **end}), indent=1).encode()
            if self._put_if(LAYOUT.status, body, self._status_etag):
                self._status_etag = None
                return status
        raise self._outrun(LAYOUT.status)

    def _outrun(self, key: str) -> Retryable:
        return Retryable(f"could not write {self._name(key)}: others wrote it {_APPEND_TRIES} times in a row")

    def count_launch(self, instance: str, body: Mapping[str, Any]) -> None:
        """Put `launches/<instance>.json`; the same instance again replaces it."""
        self.put_json(LAYOUT.launch(instance), {"instance": instance, **body})

    def launches(self) -> list[dict[str, Any]]:
        """All launches of the run, by time. One call each: not for a boot, which must not grow with the run's age."""
        documents = [document for key in self.keys(LAYOUT.launches) if (document := self.get_json(key)) is not None]
        return sorted(documents, key=lambda launch: (str(launch.get("time", "")), str(launch.get("instance", ""))))

    def latest_launches(self) -> Iterator[dict[str, Any]]:
        """Launches, the one written to last first; each is read only when it is asked for."""
        for item in sorted(self._listed(LAYOUT.launches), key=lambda item: item["LastModified"], reverse=True):
            document = self.get_json(self._relative(item))
            if document is not None:
                yield document

    # -------------------------------------------------------------------------------------------------------- append
    def append_lines(self, key: str, lines: Iterable[str]) -> None:
        """Append to a text object; each line at most once, also where a reply was lost and the call is made again.

        Retryable where other writers win too often in a row. S3 has no append: the object is read and put again under
        `If-Match`, so it must stay small (a ledger, not a log).
        """
        new = list(lines)
        for _ in range(_APPEND_TRIES):
            answer = self._get(key)
            old, etag = (b"", None) if answer is None else answer
            present = set(old.decode(errors="replace").splitlines())
            missing = [line for line in new if line not in present]
            if not missing:
                return
            if self._put_if(key, old + "".join(f"{line}\n" for line in missing).encode(), etag):
                return
        raise self._outrun(key)

    # -------------------------------------------------------------------------------------------------------- claims
    def claim(self, key: str, body: Mapping[str, Any], is_stale: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        """Put `body` where there is nothing, or what is there is stale; returns what counts: `body`, or another's."""
        text = json.dumps(body).encode()
        while True:
            answer = self._get(key)
            if answer is not None:
                holder = self._json(key, answer[0])
                if holder == body or not is_stale(holder):
                    return dict(holder)
            if self._put_if(key, text, None if answer is None else answer[1]):
                return dict(body)

    # --------------------------------------------------------------------------------------------------------- inside
    def _put_if(self, key: str, body: bytes, etag: str | None) -> bool:
        """Put where the object is still `etag` (None: absent); False where it is not."""
        return self._put_etag(key, body, etag) is not None

    def _put_etag(self, key: str, body: bytes, etag: str | None) -> str | None:
        """As `_put_if`; the new object's etag, or None."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            with translated(f"write {self._name(key)}"):
                answer = self._s3.put_object(Bucket=self.url.bucket, Key=self._key(key), Body=body, **condition)
        except (Conflict, NotFound):  # NotFound: If-Match on an object that was deleted meanwhile
            return None
        except Retryable as error:
            if error.code == "ConditionalRequestConflict":  # 409: a race; the loser looks again
                return None
            raise
        return str(answer["ETag"])

    def _get(self, key: str) -> tuple[bytes, str] | None:
        try:
            with translated(f"read {self._name(key)}"):
                answer = self._s3.get_object(Bucket=self.url.bucket, Key=self._key(key))
                if (size := int(answer["ContentLength"])) > OBJECT_BYTES_MAX:
                    answer["Body"].close()
                    raise Retryable(f"{self._name(key)} has {size} bytes; nothing of ours is that large",
                                    next_step=f"look at it: `aws s3 cp {self._name(key)} - | head`")  # fmt: skip
                return answer["Body"].read(), str(answer["ETag"])
        except NotFound as error:
            if error.code == "NoSuchBucket":
                raise NotFound(
                    f"the store's bucket {self.url.bucket} does not exist", next_step="`fleetctl request` makes it"
                ) from error
            return None
        except PermissionDenied as error:
            if not self._is_absent(key, error):
                raise
            return None

    def _is_absent(self, key: str, refusal: PermissionDenied) -> bool:
        """S3 says "forbidden" of what is not there to whoever may list a part of the bucket only, as instances do."""
        if refusal.code not in _FORBIDDEN:
            return False
        try:
            return key not in self.keys(key)
        except PermissionDenied:
            return False

    def _key(self, key: str) -> str:
        return f"{self.url.prefix}/{key}" if self.url.prefix else key

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"
