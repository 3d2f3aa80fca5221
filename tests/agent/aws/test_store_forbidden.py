"""A role that may list its own part of the bucket alone: S3 answers it 403 for what is not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import NotFound, PermissionDenied
from spotheal.agent.protocol.names import StoreUrl


def refused(operation: str, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "Forbidden"}}, operation)


class Narrow:
    """S3 with `there`, of which no object may be read; listing is for `job/` alone."""

    def __init__(self, there: Mapping[str, bytes]) -> None:
        self._there = there

    def get_object(self, **_: Any) -> Any:
        raise refused("GetObject", "AccessDenied")

    def download_file(self, *_: Any) -> Any:
        raise refused("HeadObject", "403")

    def get_paginator(self, _: str) -> Narrow:
        return self

    def paginate(self, Bucket: str, Prefix: str) -> list[dict[str, Any]]:
        if not Prefix.startswith("job/"):
            raise refused("ListObjectsV2", "AccessDenied")
        found = [{"Key": key, "Size": len(body)} for key, body in self._there.items() if key.startswith(Prefix)]
        return [{"Contents": found}] if found else [{}]


def test_what_is_not_there_is_told_from_what_may_not_be_read(tmp_path: Path) -> None:
    store = Store(Narrow({"job/run/status.json.old": b"", "job/run/kept": b""}), StoreUrl("bucket", "job/run"))
    assert store.get_bytes("status.json") is None
    with pytest.raises(NotFound, match="there is no s3://"):
        store.download("repository.bundle", tmp_path / "file")
    for call in (lambda: store.get_bytes("kept"), lambda: store.download("kept", tmp_path / "file")):
        with pytest.raises(PermissionDenied):
            call()


def test_of_another_jobs_part_nothing_is_told() -> None:
    with pytest.raises(PermissionDenied):
        Store(Narrow({}), StoreUrl("bucket", "other/run")).get_bytes("status.json")
