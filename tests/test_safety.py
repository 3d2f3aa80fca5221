"""Safety lines that no module's own tests held: the mutants of tests/mutants found them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from rulebook_world import Region

from spotheal.agent.ec2 import Ec2
from spotheal.agent.finish import Finishing, cancel

sys.path.insert(0, str(Path(__file__).resolve().parent / "simulation"))

import simulated_world


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
