"""A clock by hand and a store in memory, for whatever counts hours and dollars."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import StoreUrl

START = datetime(2026, 11, 21, 8, tzinfo=timezone.utc)


class Hours:
    """A clock that passes where somebody sleeps, and by hand."""

    def __init__(self) -> None:
        self.seconds = self.skew = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds + self.skew)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.seconds += seconds
        return until is not None and until.is_set()


class Kept(Store):
    """A store in a dictionary; `down` answers nothing."""

    def __init__(self) -> None:
        super().__init__(None, StoreUrl("bucket", "job/run"))
        self.objects: dict[str, bytes] = {}
        self.down = False

    def get_bytes(self, key: str) -> bytes | None:
        if self.down:
            raise Retryable("S3 does not answer")
        return self.objects.get(key)

    def put_json(self, key: str, body: Mapping[str, Any]) -> None:
        self.objects[key] = json.dumps(body).encode()

    def append_lines(self, key: str, lines: Iterable[str]) -> None:
        self.objects[key] = self.objects.get(key, b"") + "".join(f"{line}\n" for line in lines).encode()
