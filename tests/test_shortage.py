"""Why a fleet launches nothing: cause and next command, as `fleetctl status` shows them, within a minute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rulebook_world import BEGIN, A, B, Region

from spotheal.fleet import engine
from spotheal.fleet.shortage import shortage

Hinder = Callable[[Region], str]


def no_capacity(region: Region) -> str:
    region.rules.no_capacity([A, B], 3600)
    return region.a_fleet()


def price_too_low(region: Region) -> str:
    return region.a_fleet(SpotPrice="0.01")


def quota(region: Region) -> str:
    region.rules.limit_instances(0)
    return region.a_fleet()


def image_gone(region: Region) -> str:
    region.rules.refuse_launches("ami-0abc", "The image id '[ami-0abc]' does not exist")
    return region.a_fleet()


@pytest.mark.parametrize(
    ("hinder", "cause", "command"),
    [
        (no_capacity, "capacity", "fleetctl request --replace"),
        (price_too_low, "price", "raise or leave out SpotPrice"),
        (quota, "quota", "aws service-quotas request-service-quota-increase"),
        (image_gone, "configuration", "correct the fleet's file"),
    ],
)
def test_cause_and_next_command_are_known_within_a_minute(hinder: Hinder, cause: str, command: str) -> None:
    region = Region()
    fleet = hinder(region)
    region.after(60)
    found = shortage(engine.history(region.ec2, fleet, BEGIN), types=["g4dn.xlarge"], zones=[A, B])
    assert found is not None
    assert (cause, True) == (found.cause, command in found.next_step)


def test_a_fleet_that_has_launched_since_lacks_nothing() -> None:
    region = Region()
    region.rules.no_capacity([A, B], 100)
    fleet = region.a_fleet()
    region.after(200)
    assert 1 == len(region.running(fleet))
    assert shortage(engine.history(region.ec2, fleet, BEGIN)) is None
