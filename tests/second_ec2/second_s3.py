"""S3 as the second witness has it: strongly consistent, conditional puts; slow, and replies get lost."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError, ReadTimeoutError
from second_time import Time


class SecondS3:
    def __init__(self, time: Time, rng: random.Random) -> None:
        self.time, self.rng, self.faults = time, rng, 0.0
        self.objects: dict[str, tuple[bytes, str, float]] = {}
        self.on_call: Callable[[str, str], None] = lambda operation, moment: None

    def _call(self, operation: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self.on_call(operation, "before")
        self.time.sleep(self.rng.uniform(0.01, 0.1))
        fault = self.rng.random() < self.faults
        if fault and self.rng.random() < 0.5:
            raise _s3("SlowDown", 503, operation)
        answer = do()
        self.on_call(operation, "after")
        if fault:
            raise ReadTimeoutError(endpoint_url="https://s3")
        return answer

    def put_object(self, Bucket: str, Key: str, Body: bytes, **more: Any) -> dict[str, Any]:
        def do() -> dict[str, Any]:
            old = self.objects.get(Key)
            if more.get("IfNoneMatch") == "*" and old is not None:
                raise _s3("PreconditionFailed", 412, "PutObject")
            if "IfMatch" in more and (old is None or old[1] != more["IfMatch"]):
                raise _s3("PreconditionFailed", 412, "PutObject")
            etag = f'"{self.rng.getrandbits(64):x}"'
            self.objects[Key] = (Body, etag, self.time.now)
            return {"ETag": etag}

        return self._call("PutObject", do)

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        def do() -> dict[str, Any]:
            if Key not in self.objects:
                raise _s3("NoSuchKey", 404, "GetObject")
            body, etag, _ = self.objects[Key]
            return {"Body": io.BytesIO(body), "ContentLength": len(body), "ETag": etag}

        return self._call("GetObject", do)

    def get_paginator(self, operation: str) -> Any:
        return self

    def paginate(self, Bucket: str, Prefix: str) -> list[dict[str, Any]]:
        found = self._call("ListObjectsV2", lambda: {"Keys": sorted(k for k in self.objects if k.startswith(Prefix))})
        return [{"Contents": [{"Key": key, "Size": len(self.objects[key][0])} for key in found["Keys"]]}]


def _s3(code: str, status: int, operation: str) -> ClientError:
    meta = {"HTTPStatusCode": status}
    return ClientError({"Error": {"Code": code, "Message": code}, "ResponseMetadata": meta}, operation)
