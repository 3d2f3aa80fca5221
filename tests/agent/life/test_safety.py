"""What no module's own tests held: safety lines that mutants found, and faults that cross modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from botocore.exceptions import ClientError
from rulebook_world import Region

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.life.finish import Finishing, cancel
from spotheal.agent.protocol.names import StoreUrl
from spotheal.iam.calls import CALLS, On, Who
from spotheal.iam.policies import Scope, instance_role

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "simulation"))

import simulated_world

A, B = "us-west-2a", "us-west-2b"
THROTTLED = int(os.environ.get("SPOTHEAL_THROTTLED", "20"))  # histories; `make soak`: 1,000


@pytest.mark.parametrize("mine", [0, 1, 2])
def test_of_three_fleets_only_the_one_that_keeps_this_instance_is_cancelled(mine: int) -> None:
    """Whatever the store says: its document may be of an earlier request."""
    region = Region()
    fleets = [region.a_fleet_that_runs(AllocationStrategy="lowestPrice") for _ in range(3)]
    store: Any = SimpleNamespace(get_json=lambda key: {"fleet_id": fleets[(mine + 1) % 3][0]})
    unused: Any = None
    log = structlog.get_logger()
    cloud = Ec2(region.ec2)
    work = Finishing(store, cloud, region.clock, unused, unused, log, fleets[mine][1], None, None)
    assert cancel(work, SimpleNamespace(is_set=lambda: False, wait=lambda timeout: False))
    states = {found.id: found.state for found in region.rules.fleets()}
    assert [fleet for fleet, _ in fleets if states[fleet].startswith("cancelled")] == [fleets[mine][0]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zone", ["us-west-2a", "us-west-2b"], ids=["same zone", "other zone"])
def test_an_instance_that_lost_its_claim_asks_ec2_for_nothing(zone: str, seed: int) -> None:
    """Both saw the last holder dead and claimed the next term; who lost it knows by looking again, and only waits."""
    with simulated_world.Region(seed=seed) as region:
        region.make_volume("us-west-2a")
        first = region.launch("us-west-2a")
        assert region.time.run(1000, lambda: bool(first.trained_from))
        region.kill(first)
        both = [region.launch(zone), region.launch(zone)]
        assert region.time.run(3000, lambda: any(machine.trained_from for machine in both))
        lost = next(machine for machine in both if not machine.trained_from)
        theirs = {name for machine, name in region.calls if machine == lost.id}
        assert "put_object" in theirs, "it did not even claim"
        assert set() == theirs & {"create_snapshot", "create_volume", "attach_volume", "create_tags", "mount"}


# ---------------------------------------------------------------------------------------------------------- fault 3
class Retrying(simulated_world.Region):
    """Its clients retry a throttled call as botocore does in the mode of agent/aws/clients.py; each try counts."""

    def gate(self, machine: simulated_world.Machine, name: str, call: Any) -> object:
        for attempt in range(5):
            try:
                return super().gate(machine, name, call)
            except ClientError as error:
                if error.response["Error"]["Code"] != "RequestLimitExceeded" or attempt == 4:
                    raise
            self.time.sleep(self.random.random() * 2.0**attempt)
        raise AssertionError("not reached")


def calls_of_a_move(seed: int, throttle: float) -> int:
    """Calls of an instance that moves the volume here, throttled for its first five minutes."""
    with Retrying(seed=seed, snapshot_seconds=90.0) as region:
        region.make_volume(A)
        first = region.launch(A)
        assert region.time.run(1000, lambda: bool(first.trained_from))
        region.kill(first)
        second = region.launch(B)
        region.faults.throttle = throttle
        region.time.at(simulated_world.BOOT_SECONDS + 300, region.faults.clear)
        assert region.time.run(region.time.seconds + 3600, lambda: bool(second.trained_from))
        return second.calls


def test_five_minutes_of_throttling_cost_at_most_three_times_the_calls() -> None:
    quiet = calls_of_a_move(0, 0.0)
    throttled = [calls_of_a_move(seed, 0.5) for seed in range(THROTTLED)]
    assert sum(calls <= 3 * quiet for calls in throttled) >= 0.95 * THROTTLED, (quiet, sorted(throttled))


# --------------------------------------------------------------------------------------------------------- fault 11
@pytest.mark.parametrize("second", range(0, 45, 3))
def test_a_notice_at_any_second_of_a_move_loses_nothing(second: int) -> None:
    """During the claim, the snapshot, the copy, the attachment, the mount and the first steps; the region checks the
    invariants after each step."""
    with simulated_world.Region(snapshot_seconds=20.0) as region:
        region.make_volume(A)
        first = region.launch(A)
        assert region.time.run(1000, lambda: bool(first.trained_from))
        region.time.run(region.time.seconds + 35)
        region.kill(first)
        noticed = region.launch(B)
        region.time.run(region.time.seconds + simulated_world.BOOT_SECONDS + second)
        region.interrupt(noticed)
        region.time.run(region.time.seconds + 60)
        third = region.launch(A)
        assert region.time.run(region.time.seconds + 3600, lambda: bool(third.trained_from))
        region.time.run(region.time.seconds + 300)
        assert 1 == len(region.rules.volumes())
        assert len(region.rules.snapshots()) <= 2
        assert not region.ends


# --------------------------------------------------------------------------------------------------------- fault 20
SCOPE = Scope("123456789012", "us-west-2", StoreUrl("bucket", ""))


def test_no_instance_may_ask_for_machines() -> None:
    """A fleet that somebody cancelled, that expired or was set to zero is never fought: nothing on an instance can.

    But for the instances of a sweep, which make their fleet smaller, and get the permission for it apart.
    """
    asks_for_machines = ("RunInstances", "RequestSpotFleet", "RequestSpotInstances", "CreateFleet", "StartInstances",
                         "ModifySpotFleetRequest", "ModifyFleet")  # fmt: skip
    of_all = [call for call in CALLS if Who.INSTANCE in call.who and call.on is not On.FLEET_SIZE]
    assert set() == {call.action.partition(":")[2] for call in of_all} & set(asks_for_machines)
    allowed = {action for one in instance_role(SCOPE)["Statement"] for action in one["Action"]}
    assert set() == {action.partition(":")[2] for action in allowed} & set(asks_for_machines)
