"""Safety lines that no module's own tests held: the mutants of tests/mutants found them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from rulebook_world import Region

from spotheal.agent.ec2 import Ec2
from spotheal.agent.finish import Finishing, cancel
from spotheal.agent.volume.actions import ClaimTerm
from spotheal.agent.volume.observe import advance
from spotheal.agent.volume.seen import Observed


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


def test_after_a_claim_the_world_is_looked_at_again() -> None:
    """A claim may have been lost to another instance: nothing may be concluded from having made it."""
    unused: Any = None
    assert advance(unused, Observed(), ClaimTerm(2, "why")) is None
