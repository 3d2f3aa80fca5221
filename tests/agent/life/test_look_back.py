"""What an instance finds out about the run before it does anything for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.aws.s3 import Store
from spotheal.agent.life.preflight import LookBack, between_interruptions, last_saved_at
from spotheal.agent.protocol.clock import Clock, SystemClock, never
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.errors import Interrupted, Retryable
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.fleet.rehearsal.services.client import InMemoryS3

NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
LOG = SimpleNamespace(warning=lambda text, **fields: logging.warning("%s %s", text, fields))


def looking(
    living: tuple[str, ...] = (),
    clock: Clock | None = None,
    starts: int = 1,
    reasons: Mapping[str, str] | None = None,  # code of StateReason of those that ended
) -> tuple[Store, LookBack]:
    """A store, and the look of i-9 at it; of the other instances only `living` run."""
    store = Store(InMemoryS3("bucket"), StoreUrl("bucket", "digits/r1"))

    def instances(ids: set[str]) -> tuple[Instance, ...]:
        return tuple(
            Instance(one, "running", "us-west-2a", "g5.xlarge", NOON)
            if one in living
            else Instance(
                one, "terminated", "us-west-2a", "g5.xlarge", NOON, state_reason=(reasons or {}).get(one, "")
            )
            for one in ids
        )

    launch: Any = SimpleNamespace(starts=starts, others=store.launches, others_since_progress=store.launches)
    return store, LookBack(
        store, SimpleNamespace(instances=instances), launch, "i-9", clock or SystemClock(), never(), LOG
    )


def barren(store: Store, count: int) -> None:
    for number in range(count):
        store.count_launch(f"i-{number}", {"time": f"2026-11-21T08:0{number}:00Z", "acknowledged": False})


def test_the_end_that_an_earlier_instance_recorded_stands() -> None:
    store, look = looking()
    store.put_json(LAYOUT.status, {"phase": "done", "reason": "because"})
    found = look.find_end()
    assert found is not None
    assert (Phase.DONE, "because", True) == (found[0].phase, found[0].reason, found[1])


def test_five_dead_launches_without_a_checkpoint_park_the_run() -> None:
    store, look = looking()
    barren(store, 5)
    found = look.find_end()
    assert found is not None
    assert (Phase.PARKED, False) == (found[0].phase, found[1])


def test_launches_that_spot_has_taken_are_no_failures_and_that_is_stored() -> None:
    """A machine that hung when its stop notice came, beside four that failed, parked a run."""
    store, look = looking(reasons={"i-3": "Server.SpotInstanceShutdown"})
    barren(store, 5)
    assert look.find_end() is None
    found = {one["instance"]: one.get("outcome") for one in store.launches()}
    assert {"i-0": None, "i-1": None, "i-2": None, "i-3": "interrupted", "i-4": None} == found
    _, again = looking()  # an hour later AWS has forgotten it
    assert replace(again, store=store, launch=look.launch).find_end() is None


def test_launches_that_were_ended_by_hand_or_by_themselves_count() -> None:
    store, look = looking(reasons={"i-3": "Client.UserInitiatedShutdown", "i-4": "Client.InstanceInitiatedShutdown"})
    barren(store, 5)
    assert look.find_end() is not None


def test_a_healthy_run_asks_ec2_for_no_instance() -> None:
    asked: list[set[str]] = []
    store, look = looking()
    store.count_launch("i-1", {"time": "2026-11-21T08:01:00Z", "acknowledged": False, "outcome": "interrupted"})
    cloud: Any = SimpleNamespace(instances=lambda ids: asked.append(ids) or ())
    assert replace(look, cloud=cloud).find_end() is None
    assert [set()] == asked  # of nobody: ec2.Ec2 makes no call


def test_launches_that_live_are_no_failures() -> None:
    store, look = looking(living=("i-2",))
    barren(store, 5)
    assert look.find_end() is None


@pytest.mark.parametrize("starts", [1, 99])
def test_a_run_is_not_parked_over_the_head_of_a_living_writer(starts: int) -> None:
    store, look = looking(living=("i-writer",), starts=starts)
    barren(store, 5)
    store.claim_term(Claim(1, "i-writer", "us-west-2a", "2026-11-21T08:00:00Z"))
    assert look.find_end() is None


def test_a_checkpoint_of_a_writer_that_died_since_forgives_the_launches_beside_it() -> None:
    store, look = looking()
    barren(store, 5)
    store.put_json(LAYOUT.status, {"progress": {"saved": {"step": 7, "time": "2026-11-21T09:30:00+01:00"}}})
    assert look.find_end() is None


class ShortClock(SystemClock):
    def sleep(self, seconds: float, until: Any = None) -> bool:
        return until is not None and bool(until.is_set())


def test_a_throttled_store_is_asked_again_and_is_no_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended by it, an agent was started ten times within a minute, and the tenth start parked the run."""
    store, look = looking(clock=ShortClock())
    faults = [Retryable("SlowDown")] * 20

    def read_status() -> dict[str, Any] | None:
        if faults:
            raise faults.pop()
        return None

    monkeypatch.setattr(store, "read_status", read_status)
    assert look.find_end() is None
    assert not faults


def test_a_machine_that_goes_away_looks_back_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store, look = looking(clock=ShortClock())

    def read_status() -> None:
        look.stop.set()  # type: ignore[attr-defined]
        raise Retryable("SlowDown")

    monkeypatch.setattr(store, "read_status", read_status)
    with pytest.raises(Interrupted):
        look.find_end()


def test_times_are_compared_in_one_form() -> None:
    assert "2026-11-21T08:30:00Z" == last_saved_at({"progress": {"saved": {"time": "2026-11-21T09:30:00.25+01:00"}}})
    assert "" == last_saved_at({"progress": None})
    assert "" == last_saved_at({"progress": {"saved": {"time": "yesterday"}}})


@pytest.mark.parametrize(
    ("run_hours", "lost", "hours"),
    [(0, 0, 2.0), (0.1, 1, 1.05), (10, 1, 6.0), (10, 11, 1.0), (98, 0, 100.0), (-1, 0, 2.0)],
)
def test_the_rate_of_interruptions_is_what_the_run_has_seen_and_a_guess(
    run_hours: float, lost: int, hours: float
) -> None:
    assert between_interruptions(run_hours * 3600, lost) == pytest.approx(hours * 3600)


@pytest.mark.parametrize(
    ("lost", "saved", "hours"),
    [(9, 0, 1.0), (9, 8, 5.0), (9, 9, 10.0), (9, 30, 10.0), (99, 99, 2.0), (0, 5, 10.0)],
)
def test_a_machine_whose_trainer_saved_at_the_notice_cost_no_step_and_does_not_count(
    lost: int, saved: int, hours: float
) -> None:
    """Of a run of eight hours, and the guess of two."""
    assert between_interruptions(8 * 3600, lost, saved) == pytest.approx(hours * 3600)
