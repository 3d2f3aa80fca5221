"""boto3's S3 client over a dictionary: strongly consistent, conditional puts, pages, and the rule book's faults."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError
from botocore.response import StreamingBody

from spotheal.agent.protocol.clock import Clock, SystemClock
from spotheal.fleet.rehearsal.ec2.faults import Faults


@dataclass(frozen=True)
class _Object:
    body: bytes
    etag: str
    modified: datetime
    content_type: str
    metadata: dict[str, str]


class InMemoryS3:
    """All clients that share one object see one S3. Buckets are made by `create_bucket`, or by naming them here."""

    class exceptions:
        ClientError = ClientError

    def __init__(self, *buckets: str, clock: Clock | None = None, faults: Faults | None = None) -> None:
        self._buckets: dict[str, dict[str, _Object]] = {bucket: {} for bucket in buckets}
        self._clock = clock or SystemClock()
        self.faults = faults or Faults()
        self.calls: list[str] = []
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------------- buckets
    def create_bucket(self, Bucket: str, **_: Any) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            if Bucket in self._buckets:
                raise _error("CreateBucket", "BucketAlreadyOwnedByYou", "You already own this bucket.", 409)
            self._buckets[Bucket] = {}
            return {"Location": f"/{Bucket}"}

        return self._answer("CreateBucket", act)

    def head_bucket(self, Bucket: str, **_: Any) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            if Bucket not in self._buckets:
                raise _error("HeadBucket", "404", "Not Found", 404)
            return {}

        return self._answer("HeadBucket", act)

    def put_public_access_block(self, **_: Any) -> dict[str, Any]:
        return self._answer("PutPublicAccessBlock", dict)

    def list_buckets(self, **_: Any) -> dict[str, Any]:
        return self._answer("ListBuckets", lambda: {"Buckets": [{"Name": name} for name in sorted(self._buckets)]})

    # ------------------------------------------------------------------------------------------------------- objects
    def put_object(
        self,
        Bucket: str,
        Key: str,
        Body: Any = b"",
        IfNoneMatch: str | None = None,
        IfMatch: str | None = None,
        ContentType: str = "binary/octet-stream",
        Metadata: dict[str, str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            body = Body.encode() if isinstance(Body, str) else Body if isinstance(Body, bytes) else Body.read()
            objects = self._objects("PutObject", Bucket)
            old = objects.get(Key)
            if IfMatch is not None and old is None:
                raise _error("PutObject", "NoSuchKey", "The specified key does not exist.", 404)
            if (IfNoneMatch == "*" and old is not None) or (IfMatch is not None and old and not _same(IfMatch, old)):
                raise _error(
                    "PutObject",
                    "PreconditionFailed",
                    "At least one of the pre-conditions you specified did not hold",
                    412,
                )
            etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
            time = self._clock.now().replace(microsecond=0)
            objects[Key] = _Object(bytes(body), etag, time, ContentType, dict(Metadata or {}))
            return {"ETag": etag}

        return self._answer("PutObject", act)

    def get_object(self, Bucket: str, Key: str, Range: str | None = None, **_: Any) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            stored = self._object("GetObject", Bucket, Key, "NoSuchKey")
            body = stored.body
            if Range is not None:
                first, _, last = Range.removeprefix("bytes=").partition("-")
                body = body[int(first) : int(last) + 1 if last else None] if first else body[-int(last) :]
            return {**_head(stored), "ContentLength": len(body), "Body": StreamingBody(io.BytesIO(body), len(body))}

        return self._answer("GetObject", act)

    def head_object(self, Bucket: str, Key: str, **_: Any) -> dict[str, Any]:
        return self._answer("HeadObject", lambda: _head(self._object("HeadObject", Bucket, Key, "404")))

    def delete_object(self, Bucket: str, Key: str, **_: Any) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            self._objects("DeleteObject", Bucket).pop(Key, None)
            return {}

        return self._answer("DeleteObject", act)

    def delete_objects(self, Bucket: str, Delete: dict[str, Any], **_: Any) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            objects = self._objects("DeleteObjects", Bucket)
            keys = [item["Key"] for item in Delete["Objects"]]
            for key in keys:
                objects.pop(key, None)
            return {"Deleted": [{"Key": key} for key in keys]}

        return self._answer("DeleteObjects", act)

    def copy_object(self, Bucket: str, Key: str, CopySource: Any, **_: Any) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            bucket, _, key = (
                (CopySource["Bucket"], "", CopySource["Key"])
                if isinstance(CopySource, dict)
                else CopySource.lstrip("/").partition("/")
            )
            source = self._object("CopyObject", bucket, key, "NoSuchKey")
            self._objects("CopyObject", Bucket)[Key] = source
            return {"CopyObjectResult": {"ETag": source.etag, "LastModified": source.modified}}

        return self._answer("CopyObject", act)

    def list_objects_v2(
        self,
        Bucket: str,
        Prefix: str = "",
        Delimiter: str = "",
        MaxKeys: int = 1000,
        StartAfter: str = "",
        ContinuationToken: str = "",
        **_: Any,
    ) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            after = ContinuationToken or StartAfter
            contents: list[dict[str, Any]] = []
            prefixes: list[str] = []
            last, truncated = "", False
            objects = self._objects("ListObjectsV2", Bucket)
            for key in sorted(
                common_prefix for common_prefix in objects if common_prefix.startswith(Prefix) and common_prefix > after
            ):
                stored = objects[key]
                rest = key[len(Prefix) :]
                common = Prefix + rest.partition(Delimiter)[0] + Delimiter if Delimiter and Delimiter in rest else ""
                if common and (common in prefixes or (after and after.startswith(common))):
                    last = key
                    continue
                if len(contents) + len(prefixes) == min(MaxKeys, 1000):
                    truncated = True
                    break
                last = key
                if common:
                    prefixes.append(common)
                else:
                    size = len(stored.body)
                    contents.append({"Key": key, "Size": size, "ETag": stored.etag,
                                     "LastModified": stored.modified.replace(microsecond=0)})  # fmt: skip
            answer: dict[str, Any] = {
                "IsTruncated": truncated,
                "KeyCount": len(contents) + len(prefixes),
                "Prefix": Prefix,
            }
            entries = {
                "Contents": contents,
                "CommonPrefixes": [{"Prefix": common_prefix} for common_prefix in prefixes],
            }
            answer |= {key: value for key, value in entries.items() if value}
            return answer | ({"NextContinuationToken": last} if truncated else {})

        return self._answer("ListObjectsV2", act)

    def get_paginator(self, name: str) -> _Pages:
        if name != "list_objects_v2":
            raise ValueError(f"Operation {name} cannot be paginated")
        return _Pages(self.list_objects_v2)

    # --------------------------------------------------------------------------------------------------------- files
    def upload_file(self, Filename: str, Bucket: str, Key: str, **_: Any) -> None:
        self.put_object(Bucket=Bucket, Key=Key, Body=Path(Filename).read_bytes())

    def upload_fileobj(self, Fileobj: Any, Bucket: str, Key: str, **_: Any) -> None:
        self.put_object(Bucket=Bucket, Key=Key, Body=Fileobj.read())

    def download_file(self, Bucket: str, Key: str, Filename: str, **_: Any) -> None:
        self.head_object(Bucket=Bucket, Key=Key)
        Path(Filename).write_bytes(self.get_object(Bucket=Bucket, Key=Key)["Body"].read())

    def download_fileobj(self, Bucket: str, Key: str, Fileobj: Any, **_: Any) -> None:
        self.head_object(Bucket=Bucket, Key=Key)
        Fileobj.write(self.get_object(Bucket=Bucket, Key=Key)["Body"].read())

    # -------------------------------------------------------------------------------------------------------- inside
    def _answer(self, operation: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with self._lock:
            self.calls.append(operation)
            if self.faults.throttled(operation):
                raise _error(operation, "SlowDown", "Please reduce your request rate.", 503)
            if planned := self.faults.planned_for(operation, after_effect=False):
                raise _error(operation, planned.code, planned.message, planned.status)
            answer = act()
            planned = self.faults.planned_for(operation, after_effect=True)
            if planned and planned.code:
                raise _error(operation, planned.code, planned.message, planned.status)
            if planned or self.faults.reply_is_lost(operation):
                raise ConnectionClosedError(endpoint_url="in-memory")
            return {**answer, "ResponseMetadata": {"HTTPStatusCode": 200, "RequestId": "in-memory", "HTTPHeaders": {}}}

    def _objects(self, operation: str, bucket: str) -> dict[str, _Object]:
        if bucket not in self._buckets:
            raise _error(operation, "NoSuchBucket", "The specified bucket does not exist", 404)
        return self._buckets[bucket]

    def _object(self, operation: str, bucket: str, key: str, code: str) -> _Object:
        stored = self._objects(operation, bucket).get(key)
        if stored is None:
            message = "Not Found" if code == "404" else "The specified key does not exist."
            raise _error(operation, code, message, 404)
        return stored


class _Pages:
    def __init__(self, call: Callable[..., dict[str, Any]]) -> None:
        self._call = call

    def paginate(self, PaginationConfig: dict[str, Any] | None = None, **params: Any) -> Iterator[dict[str, Any]]:
        if size := (PaginationConfig or {}).get("PageSize"):
            params["MaxKeys"] = size
        while True:
            page = self._call(**params)
            yield page
            if not page["IsTruncated"]:
                return
            params["ContinuationToken"] = page["NextContinuationToken"]


def _same(etag: str, stored: _Object) -> bool:
    return etag.strip('"') == stored.etag.strip('"')


def _head(stored: _Object) -> dict[str, Any]:
    return {
        "ContentLength": len(stored.body),
        "ETag": stored.etag,
        "LastModified": stored.modified,
        "ContentType": stored.content_type,
        "Metadata": dict(stored.metadata),
    }


def _error(operation: str, code: str, message: str, status: int) -> ClientError:
    metadata: Any = {"HTTPStatusCode": status, "RequestId": "in-memory", "HTTPHeaders": {}, "RetryAttempts": 0}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}, operation)
