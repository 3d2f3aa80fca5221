"""The store against moto's S3: claims have one winner, appends lose nothing, absence is None."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.errors import NotFound, PermissionDenied, Retryable
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.fleet.rehearsal.services.objects import InMemoryS3

URL = StoreUrl("spotheal-test", "prefix/job/RUN")


@pytest.fixture()
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        client: Any = boto3.client("s3", region_name="us-west-2")
        client.create_bucket(Bucket=URL.bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        yield client


@pytest.fixture()
def store(s3: Any) -> Store:
    return Store(s3, URL)


def claim(number: int, instance: str) -> Claim:
    return Claim(number, instance, "us-west-2a", "2026-11-21T08:00:00Z")


def test_a_term_is_claimed_once(store: Store) -> None:
    assert store.highest_term() is None
    assert store.claim_term(claim(1, "i-0a"))
    assert not store.claim_term(claim(1, "i-0b"))
    assert claim(1, "i-0a") == store.highest_term()


def test_a_claim_whose_reply_was_lost_is_found_again(store: Store) -> None:
    store.claim_term(claim(1, "i-0a"))
    assert store.claim_term(claim(1, "i-0a"))


def test_the_highest_term_is_highest_by_number_and_not_by_text(store: Store) -> None:
    for number in (1, 2, 9, 10):
        store.claim_term(claim(number, f"i-{number}"))
    highest = store.highest_term()
    assert highest is not None
    assert 10 == highest.number


def test_what_is_absent_is_none(store: Store) -> None:
    assert store.get_bytes("nothing") is None
    assert store.read_status() is None
    with pytest.raises(NotFound):
        store.download("nothing", Path("/nonexistent"))


def test_a_status_that_is_no_json_is_retryable_and_not_absent(store: Store) -> None:
    store.put_bytes(LAYOUT.status, b"<html>")
    with pytest.raises(Retryable, match=r"status\.json is not JSON"):
        store.read_status()


def test_two_writers_append_without_losing_a_line() -> None:
    store = Store(InMemoryS3(URL.bucket), URL)  # moto compares and puts in two steps, so there one of two can be lost

    def write(name: str) -> None:
        for number in range(10):
            store.append_lines("ledger.jsonl", [f"{name}-{number}"])

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = (store.get_bytes("ledger.jsonl") or b"").decode().splitlines()
    assert sorted(f"{name}-{number}" for name in "ab" for number in range(10)) == sorted(lines)


def test_a_line_appended_twice_is_there_once(store: Store) -> None:
    store.append_lines("ledger.jsonl", ["one"])
    store.append_lines("ledger.jsonl", ["one", "two"])
    assert b"one\ntwo\n" == store.get_bytes("ledger.jsonl")


def test_launches_are_listed_by_time_and_counted_once_an_instance(store: Store) -> None:
    store.count_launch("i-0b", {"time": "2026-11-21T08:00:00Z"})
    store.count_launch("i-0a", {"time": "2026-11-21T09:00:00Z"})
    store.count_launch("i-0b", {"time": "2026-11-21T08:00:00Z", "outcome": "training"})
    assert ["i-0b", "i-0a"] == [launch["instance"] for launch in store.launches()]


def test_files_keep_their_bytes(store: Store, tmp_path: Path) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    source.write_bytes(bytes(range(256)) * 100)
    store.put_file("results/a", source)
    store.download("results/a", copy)
    assert source.read_bytes() == copy.read_bytes()
    assert [("results/a", 25600)] == store.sizes("results/")


def test_a_bucket_that_is_not_there_names_the_cure(s3: Any) -> None:
    with pytest.raises(NotFound, match="does not exist") as caught:
        Store(s3, StoreUrl("spotheal-absent", "p")).get_bytes("x")
    assert "fleetctl request" in caught.value.next_step


class Denying:
    """A client that is not allowed anything."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            body = {"Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"RequestId": "R1"}}
            raise ClientError(body, name)  # type: ignore[arg-type]

        return call


def test_a_refusal_names_the_code_and_the_request(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    store = Store(Denying(), URL)
    for act in (
        lambda: store.get_bytes("x"),
        lambda: store.put_file("x", path),
        lambda: store.claim_term(claim(1, "i")),
    ):
        with pytest.raises(PermissionDenied, match=r"AccessDenied, request R1") as caught:
            act()
        assert caught.value.next_step


def test_claims_are_readable_by_anyone(store: Store, s3: Any) -> None:
    store.claim_term(claim(3, "i-0a"))
    body = s3.get_object(Bucket=URL.bucket, Key="prefix/job/RUN/terms/3")["Body"].read()
    assert {"number": 3, "instance": "i-0a", "zone": "us-west-2a", "time": "2026-11-21T08:00:00Z"} == json.loads(body)


def test_an_end_that_is_recorded_is_written_over_by_nobody_but_a_new_request(store: Store, s3: Any) -> None:
    other = Store(s3, URL)
    assert store.publish_status({"phase": "training", "step": 1}) is None
    assert store.publish_status({"phase": "training", "step": 2}) is None
    assert other.publish_status({"phase": "done", "reason": "first"}) is None
    assert {"phase": "done", "reason": "first"} == store.publish_status({"phase": "training", "step": 3})
    assert {"phase": "done", "reason": "first"} == store.publish_status({"phase": "parked", "reason": "second"})
    assert {"phase": "done", "reason": "first"} == store.read_status()
    store.write_status({"phase": "requested"})  # `fleetctl request --resume`
    assert other.publish_status({"phase": "training"}) is None


def test_a_status_that_was_read_by_another_thread_hides_no_end(store: Store, s3: Any) -> None:
    assert store.publish_status({"phase": "training"}) is None
    Store(s3, URL).publish_status({"phase": "failed"})
    store.read_status()
    assert {"phase": "failed"} == store.publish_status({"phase": "training"})


def test_a_status_is_published_in_one_call_while_nobody_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InMemoryS3(URL.bucket)
    store = Store(client, URL)
    store.publish_status({"phase": "training"})
    monkeypatch.setattr(client, "get_object", None)
    assert store.publish_status({"phase": "training"}) is None


def test_a_status_that_is_no_json_silences_no_run(store: Store) -> None:
    store.put_bytes(LAYOUT.status, b"<html>")
    assert store.publish_status({"phase": "training"}) is None
    assert {"phase": "training"} == store.read_status()


def test_of_two_ends_at_once_the_first_stands(store: Store, s3: Any) -> None:
    stores = [Store(s3, URL) for _ in range(4)]
    store.publish_status({"phase": "training"})
    for one in stores:
        one.read_status()
    said = [one.publish_status({"phase": "done", "reason": str(n)}) for n, one in enumerate(stores)]
    assert [None, *[{"phase": "done", "reason": "0"}] * 3] == said


class LastMoment:
    """An S3 client; just before the first PUT, `write` is done."""

    def __init__(self, client: Any, write: Callable[[], object]) -> None:
        self._client, self._write = client, write

    def put_object(self, **parameters: Any) -> Any:
        write, self._write = self._write, lambda: None
        write()
        return self._client.put_object(**parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_an_end_keeps_what_a_heartbeat_writes_in_the_same_moment(store: Store, s3: Any) -> None:
    store.publish_status({"phase": "training", "step": 1})
    late = Store(LastMoment(s3, lambda: store.publish_status({"phase": "training", "step": 2})), URL)
    assert {"phase": "training", "step": 2} == late.end_status({"phase": "cancelled"})
    assert {"phase": "cancelled", "step": 2} == store.read_status()


def test_an_end_that_is_written_in_the_same_moment_stands(store: Store, s3: Any) -> None:
    store.publish_status({"phase": "training", "step": 1})
    late = Store(LastMoment(s3, lambda: store.publish_status({"phase": "done", "step": 2})), URL)
    assert late.end_status({"phase": "cancelled"}) is None
    assert {"phase": "done", "step": 2} == store.read_status()
