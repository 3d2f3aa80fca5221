"""The status document: written by the newest term only, published in measure."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import structlog

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.contract import Progress, Saved
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import Phase, StoreUrl
from spotheal.agent.record.status import Status
from spotheal.fleet.rehearsal.services.client import InMemoryS3


class HandClock:
    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> datetime:
        return datetime(2026, 11, 21, 8, tzinfo=timezone.utc)

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.passed += seconds
        return until is not None and until.is_set()


class Kept(Store):
    def __init__(self) -> None:
        super().__init__(None, StoreUrl("bucket", "job/run"))
        self.written: list[dict[str, Any]] = []
        self.highest = 1
        self.asked: dict[str, Any] | None = None
        self.down = False

    def publish_status(self, status: Any) -> None:
        if self.down:
            raise Retryable("S3 does not answer")
        self.written.append(dict(status))

    def get_json(self, key: str) -> dict[str, Any]:
        if self.asked is None:
            raise Retryable(f"{key} is not JSON")
        return self.asked

    def highest_term(self) -> Claim:
        return Claim(self.highest, "i-0a", "us-west-2a", "")


def status(store: Kept, clock: HandClock | None = None) -> Status:
    return Status(store, clock or HandClock(), structlog.get_logger(), job="j", run="R", instance="i-0a")


def test_nothing_is_written_before_a_term_is_ours() -> None:
    store = Kept()
    status(store).update(phase=Phase.HEALING)
    assert [] == store.written


def test_the_document_names_the_phase_the_term_and_the_heartbeat() -> None:
    store = Kept()
    status(store).update(term=1, phase=Phase.TRAINING)
    document = store.written[-1]
    assert ("training", 1, "2026-11-21T08:00:00Z", 1) == tuple(
        document[key] for key in ("phase", "term", "heartbeat", "schema_version")
    )


def test_a_stop_that_an_operator_put_for_this_term_is_seen_with_the_next_publication() -> None:
    store = Kept()
    ours = status(store)
    store.stops = frozenset({2})
    ours.update(term=1)
    assert ours.stop_asked is None
    store.highest, store.asked = 2, {"reason": "enough", "seconds": 300}
    ours.update(term=2)
    assert {"reason": "enough", "seconds": 300} == ours.stop_asked


def test_a_stop_that_cannot_be_read_keeps_no_heartbeat_back() -> None:
    store = Kept()
    store.stops = frozenset({1})
    ours = status(store)
    ours.note(term=1)
    assert ours.publish()
    assert ours.stop_asked is None


def test_a_holder_whose_term_has_passed_writes_nothing_and_knows_it() -> None:
    store = Kept()
    ours = status(store)
    ours.update(term=1)
    store.highest = 2
    ours.update(phase=Phase.TRAINING)
    assert 1 == len(store.written)
    assert ours.fenced.is_set()


def test_a_store_that_is_down_stops_nothing() -> None:
    store = Kept()
    store.down = True
    assert not status(store).publish()
    ours = status(store)
    ours.update(term=1)
    store.down = False
    assert ours.publish()


def test_progress_is_published_in_measure() -> None:
    store, clock = Kept(), HandClock()
    ours = status(store, clock)
    ours.update(term=1)
    for step in range(100):
        clock.passed += 1
        ours.progress(Progress(step=step, saved=Saved(step, "p", "t")))
    assert 11 == len(store.written)
    assert [0, 10, 90] == [store.written[at]["progress"]["saved"]["step"] for at in (1, 2, -1)], "the first at once"


def test_the_end_that_another_instance_recorded_first_stands() -> None:
    client = InMemoryS3("bucket")
    first, second = (
        Status(Store(client, StoreUrl("bucket", "j/r")), HandClock(), structlog.get_logger(), instance=f"i-{n}")
        for n in "ab"
    )
    first.note(term=1)
    assert first.publish()
    assert (Phase.DONE, "because") == second.end(Phase.DONE, "because")
    assert not first.publish()
    assert (Phase.DONE, "because") == first.end(Phase.PARKED, "5 launches")
    found = Store(client, StoreUrl("bucket", "j/r")).read_status() or {}
    assert ("done", "i-b") == (found["phase"], found["instance"])
