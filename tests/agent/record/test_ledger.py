"""The ledger: events survive a store that is down, and steps done again are counted from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.record.ledger import Ledger, read_events, steps_redone


class Flaky(Store):
    def __init__(self) -> None:
        super().__init__(None, StoreUrl("bucket", "job/run"))
        self.lines: list[str] = []
        self.down = False

    def append_lines(self, key: str, lines: Iterable[str]) -> None:
        if self.down:
            raise Retryable("S3 does not answer")
        self.lines += lines


def test_events_wait_for_a_store_that_is_down() -> None:
    store = Flaky()
    ledger = Ledger(store, SystemClock(), "i-0a", "us-west-2a")
    store.down = True
    ledger.add("boot")
    ledger.term = 2
    ledger.add("volume", volume="vol-1")
    assert [] == store.lines
    store.down = False
    assert ledger.flush()
    events = [json.loads(line) for line in store.lines]
    assert [("boot", None), ("volume", 2)] == [(event["event"], event["term"]) for event in events]
    assert 2 == len({event["id"] for event in events})


def test_a_ledger_is_read_without_doubles_and_without_rubbish() -> None:
    line = json.dumps({"event": "boot", "id": "a"})
    assert [{"event": "boot", "id": "a"}] == read_events(f"{line}\n{line}\nhalf a li\n[]\n")


def test_steps_redone_are_those_between_the_resume_and_how_far_the_run_had_been() -> None:
    def started(step: int | None) -> dict[str, Any]:
        return {"event": "trainer-started", "resumed_step": step}

    def ended(step: int | None) -> dict[str, Any]:
        return {"event": "trainer-ended", "last_step": step}

    events = [started(0), ended(100), started(100), ended(180), started(150), ended(None), started(150), ended(300)]
    assert 60 == steps_redone(events)
    assert 20 == steps_redone([started(0), ended(100), started(None), {"event": "trainer-resumed", "resumed_step": 80}])
