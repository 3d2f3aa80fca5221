"""Sweeps: each run finishes exactly once, none starves, none is lost, and the fleet ends with the last."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from simulated_life import JOB
from simulated_sweep import RUN, STEPS, SweepRegion, some_machine

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import CapacityError, Retryable
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.sweep import worker
from spotheal.fleet.run.runs import Run
from spotheal.fleet.sweep import retry

HOUR = 3600.0
RUNS = int(os.environ.get("SPOTHEAL_SWEEP_RUNS", "60"))
PARALLEL = max(2, RUNS // 10)


def finish(region: SweepRegion, seconds_max: float) -> None:
    assert region.time.run(seconds_max, region.is_over), "the sweep does not end"


def test_every_run_finishes_exactly_once_while_instances_are_taken() -> None:
    dice = random.Random(7)
    with SweepRegion(entries=RUNS, seed=7, snapshot_seconds=20.0) as region:
        region.request_sweep(PARALLEL)
        for _ in range(RUNS // 4):
            at = dice.uniform(150.0, 1500.0)
            blow = dice.choice([region.interrupt, region.interrupt, region.kill])

            def strike(blow: object = blow) -> None:
                machine = some_machine(region, dice)
                if machine is not None:
                    blow(machine)  # type: ignore[operator]

            region.time.at(at, strike)
        finish(region, 24 * HOUR)
        assert region.ended() == dict.fromkeys(range(RUNS), "done")
        assert set(region.steps_of.values()) == {STEPS}
        assert region.status_of_sweep()["phase"] == "done"
        assert region.volumes_left() == []
        assert region.is_over()


def test_a_run_that_fails_ends_alone_and_the_sweep_names_it() -> None:
    with SweepRegion(entries=6, failing=frozenset({2}), seed=1) as region:
        region.request_sweep(2)
        finish(region, 12 * HOUR)
        assert region.ended() == {**dict.fromkeys(range(6), "done"), 2: "failed"}
        status = region.status_of_sweep()
        assert status["phase"] == "failed"
        assert status["reason"] == "5 of 6 runs are done; failed: 2"
        assert [region.run_of(volume) for volume in region.volumes_left()] == [f"{RUN}00002"], "its checkpoints stay"


def test_a_run_whose_volume_cannot_be_made_ends_alone_within_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held its machine for ever: the agent was started again, took its own run first, and failed again."""
    make = worker.volume.make

    def refused(cloud: Any, store: Any, config: Any, zone: str) -> None:
        if config.index == 1:
            raise CapacityError("could not create a volume: you have 5 volumes", code="VolumeLimitExceeded")
        make(cloud, store, config, zone)

    monkeypatch.setattr(worker.volume, "make", refused)
    with SweepRegion(entries=6, seed=4) as region:
        region.request_sweep(2)
        finish(region, 2 * HOUR)
        assert region.ended() == {**dict.fromkeys(range(6), "done"), 1: "failed"}
        reason = region.status_of(1)["reason"]
        assert reason.startswith("its volume could not be made in 15 min: could not create a volume: you have 5")
        assert region.volumes_left() == []


def test_a_volume_that_can_be_made_after_a_while_costs_its_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = worker.volume.make
    with SweepRegion(entries=3, seed=4) as region:

        def late(cloud: Any, store: Any, config: Any, zone: str) -> None:
            if config.index == 1 and region.time.seconds < 600:
                raise Retryable("could not create a volume: no room in this zone", code="InsufficientVolumeCapacity")
            make(cloud, store, config, zone)

        monkeypatch.setattr(worker.volume, "make", late)
        region.request_sweep(2)
        finish(region, 2 * HOUR)
        assert set(region.ended().values()) == {"done"}


def test_when_its_hours_are_over_a_sweep_makes_no_more_volumes_and_every_run_says_why() -> None:
    """Each of the runs that were left made a volume, cloned and set up, to end at its first look at the clock."""
    with SweepRegion(entries=40, seed=6) as region:
        job = parse_job({**JOB, "limits": {"hours": 0.1}})
        region.config = replace(region.config, job=job, requested_at=rfc3339(region.time.now()))
        region.request_sweep(2)
        finish(region, HOUR)
        begun = {entry for _, entry in region.begun}
        assert 2 <= len(begun) < 20 and set(region.ended()) == set(range(40))
        assert {region.run_of(one.id) for one in region.rules.world.volumes.all()} <= {
            f"{RUN}{index:05d}" for index in begun
        }
        said = {region.status_of(index)["reason"] for index in range(40) if index not in begun}
        assert said == {"limits.hours = 0.1 is reached"}
        assert region.status_of_sweep()["phase"] == "failed"


def test_a_run_that_is_begun_again_goes_on_from_its_checkpoint_while_its_machine_trains_another() -> None:
    with SweepRegion(entries=12, failing=frozenset({0}), seed=2) as region:
        region.request_sweep(3)
        sweep = Run("digits", RUN, Store(region.s3, StoreUrl("bucket", f"digits/{RUN}")))

        def look() -> None:
            if region.ended().get(0) != "failed":
                region.time.at(region.time.seconds + 20.0, look)
                return
            region.failing = frozenset()
            retry.give_back(sweep, 0, region.time)

        region.time.at(60.0, look)
        finish(region, 12 * HOUR)
        assert region.ended() == dict.fromkeys(range(12), "done")
        assert len(region.machines) == 3, "no machine was ended for it"
        assert [entry for _, entry in region.begun].count(0) == 2
        assert region.volumes_left() == []


def test_an_interrupted_run_goes_on_before_a_new_one_starts() -> None:
    with SweepRegion(entries=12, seed=3, snapshot_seconds=0.0) as region:
        region.request_sweep(2)
        region.time.at(120.0, lambda: region.kill(next(iter(region.machines.values()))))
        finish(region, 12 * HOUR)
        order = [entry for _, entry in region.begun]
        lost = next(entry for entry in order if order.count(entry) > 1)
        resumed = max(position for position, entry in enumerate(order) if entry == lost)
        assert resumed < len(order) - 3, "it went on while new ones were still to start"
        assert set(region.ended().values()) == {"done"}


def test_what_an_instance_hands_over_goes_on_before_that_instance_is_gone() -> None:
    with SweepRegion(entries=12, seed=3, snapshot_seconds=0.0) as region:
        region.request_sweep(2)
        struck: list[float] = []

        def strike() -> None:
            struck.append(region.time.seconds)
            region.interrupt(next(iter(region.machines.values())))

        region.time.at(130.0, strike)
        finish(region, 12 * HOUR)
        order = [entry for _, entry in region.begun]
        lost = next(entry for entry in order if order.count(entry) > 1)
        again = [when for when, entry in region.begun if entry == lost][1]
        assert again - struck[0] < 110.0, "AWS takes the machine after 120 s"
        assert set(region.ended().values()) == {"done"}
        assert region.volumes_left() == []


def test_instances_that_find_every_run_taken_go_and_are_not_replaced() -> None:
    with SweepRegion(entries=2, seed=5) as region:
        region.request_sweep(6)
        finish(region, 12 * HOUR)
        assert set(region.ended().values()) == {"done"}
        assert len(region.machines) == 6


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_survives_a_cruel_cloud(seed: int) -> None:
    dice = random.Random(seed)
    with SweepRegion(entries=10, seed=seed, snapshot_seconds=90.0) as region:
        region.request_sweep(3)
        region.faults.throttle, region.faults.stale_seconds_max, region.faults.lose_reply = 0.2, 20.0, 0.1
        region.s3.faults.throttle, region.s3.faults.lose_reply = 0.15, 0.1
        for _ in range(6):
            region.time.at(dice.uniform(100.0, 1500.0), lambda: _strike(region, dice))
        finish(region, 48 * HOUR)
        assert region.ended() == dict.fromkeys(range(10), "done")
        assert region.is_over()
        assert region.volumes_left() == []


def _strike(region: SweepRegion, dice: random.Random) -> None:
    machine = some_machine(region, dice)
    if machine is not None:
        dice.choice([region.interrupt, region.kill, region.kill_agent, region.break_down])(machine)
