"""S3 in memory answers as moto's does over HTTP, conditional puts and pages included."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ConnectionClosedError
from moto import mock_aws
from rulebook_world import VirtualClock, refused

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.services.client import InMemoryS3


@pytest.fixture(params=["memory", "moto"])
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemoryS3("bucket")
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        client: Any = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client


def test_an_object_is_put_and_read(s3: Any) -> None:
    put = s3.put_object(Bucket="bucket", Key="a/b", Body="text", ContentType="text/plain", Metadata={"x": "y"})
    got = s3.get_object(Bucket="bucket", Key="a/b")
    head = s3.head_object(Bucket="bucket", Key="a/b")
    assert b"text" == got["Body"].read()
    for answer in (got, head):
        assert (put["ETag"], 4, "text/plain", {"x": "y"}) == tuple(
            answer[key] for key in ("ETag", "ContentLength", "ContentType", "Metadata")
        )
    assert b"ex" == s3.get_object(Bucket="bucket", Key="a/b", Range="bytes=1-2")["Body"].read()


def test_a_conditional_put_has_one_winner(s3: Any) -> None:
    first = s3.put_object(Bucket="bucket", Key="k", Body=b"1", IfNoneMatch="*")
    assert "PreconditionFailed" == refused(s3.put_object, Bucket="bucket", Key="k", Body=b"2", IfNoneMatch="*")
    assert "PreconditionFailed" == refused(s3.put_object, Bucket="bucket", Key="k", Body=b"2", IfMatch='"0"')
    s3.put_object(Bucket="bucket", Key="k", Body=b"3", IfMatch=first["ETag"])
    assert "PreconditionFailed" == refused(s3.put_object, Bucket="bucket", Key="k", Body=b"4", IfMatch=first["ETag"])
    assert "NoSuchKey" == refused(s3.put_object, Bucket="bucket", Key="none", Body=b"4", IfMatch=first["ETag"])
    assert b"3" == s3.get_object(Bucket="bucket", Key="k")["Body"].read()


def test_what_is_not_there_is_named_so(s3: Any) -> None:
    assert "NoSuchKey" == refused(s3.get_object, Bucket="bucket", Key="k")
    assert "404" == refused(s3.head_object, Bucket="bucket", Key="k")
    assert "404" == refused(s3.head_bucket, Bucket="other-bucket")
    assert "NoSuchBucket" == refused(s3.get_object, Bucket="other-bucket", Key="k")
    assert "NoSuchBucket" == refused(s3.list_objects_v2, Bucket="other-bucket")
    s3.delete_object(Bucket="bucket", Key="k")


def test_keys_are_listed_in_order_by_pages_and_prefixes(s3: Any) -> None:
    for key in ("b/2", "a", "b/1", "c/x/1", "b/10"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"12")
    pages = list(s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", PaginationConfig={"PageSize": 2}))
    assert [["a", "b/1"], ["b/10", "b/2"], ["c/x/1"]] == [[one["Key"] for one in page["Contents"]] for page in pages]
    below = s3.list_objects_v2(Bucket="bucket", Prefix="b/")
    assert [("b/1", 2), ("b/10", 2), ("b/2", 2)] == [(one["Key"], one["Size"]) for one in below["Contents"]]
    grouped = s3.list_objects_v2(Bucket="bucket", Delimiter="/")
    assert (["a"], ["b/", "c/"]) == (
        [one["Key"] for one in grouped["Contents"]],
        [one["Prefix"] for one in grouped["CommonPrefixes"]],
    )
    assert "Contents" not in s3.list_objects_v2(Bucket="bucket", Prefix="z")


def test_objects_are_deleted_together(s3: Any) -> None:
    for key in ("a", "b", "c"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"")
    s3.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "a"}, {"Key": "b"}]})
    assert ["c"] == [one["Key"] for one in s3.list_objects_v2(Bucket="bucket")["Contents"]]


def test_files_go_up_and_down(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "up").write_bytes(b"content")
    s3.upload_file(str(tmp_path / "up"), "bucket", "one")
    s3.upload_fileobj(io.BytesIO(b"more"), "bucket", "two")
    s3.download_file("bucket", "one", str(tmp_path / "down"))
    assert b"content" == (tmp_path / "down").read_bytes()
    assert b"more" == s3.get_object(Bucket="bucket", Key="two")["Body"].read()
    assert "404" == refused(lambda: s3.download_file("bucket", "none", str(tmp_path / "none")))


def test_the_store_works_on_it() -> None:
    store = Store(InMemoryS3("bucket", clock=VirtualClock()), StoreUrl("bucket", "job/run"))
    assert store.claim_term(Claim(1, "i-0a", "us-west-2a", "2026-11-21T08:00:00Z"))
    assert not store.claim_term(Claim(1, "i-0b", "us-west-2b", "2026-11-21T08:00:00Z"))
    store.append_lines("ledger.jsonl", ["one"])
    store.append_lines("ledger.jsonl", ["two"])
    assert b"one\ntwo\n" == store.get_bytes("ledger.jsonl")
    assert ["ledger.jsonl", "terms/1"] == store.keys()


def test_a_lost_reply_of_a_put_had_its_effect() -> None:
    s3 = InMemoryS3("bucket")
    s3.faults.plan("PutObject")
    with pytest.raises(ConnectionClosedError):
        s3.put_object(Bucket="bucket", Key="k", Body=b"1", IfNoneMatch="*")
    assert "PreconditionFailed" == refused(s3.put_object, Bucket="bucket", Key="k", Body=b"1", IfNoneMatch="*")
    s3.faults.throttle = 1.0
    assert "SlowDown" == refused(s3.get_object, Bucket="bucket", Key="k")
