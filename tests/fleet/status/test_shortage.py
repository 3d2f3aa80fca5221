"""Why a fleet launches nothing: cause and next command, as `fleetctl status` shows them, within a minute."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from rulebook_world import BEGIN, A, B, Region

from spotheal.fleet.run import engine
from spotheal.fleet.run.engine import FleetEvent
from spotheal.fleet.status.shortage import Shortage, shortage

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
    assert [] == region.running(fleet)  # AWS sets every specification aside for 13 minutes
    region.after(700)
    assert 1 == len(region.running(fleet))
    assert shortage(engine.history(region.ec2, fleet, BEGIN)) is None


# ------------------------------------------------------------------------------- events as AWS writes them (aws_facts)
POOL = "c5.18xlarge, ami-0d09143c6fc181fe3, Linux/UNIX, us-east-1d"
SET_ASIDE = f"{POOL}: Several attempts to launch instances have failed. It will not be retried for at least 13 minutes."
ALL = "Several attempts to launch instances have failed. Either the request could not be satisfied or the configuration"
NO_TYPE_HERE = f"{POOL[:-1]}e, Spot bid price is less than Spot market price"

NO_QUOTA = (
    ("error", "spotInstanceCountLimitExceeded", ""),
    ("information", "launchSpecUnusable", f"{NO_TYPE_HERE} $-1.0000"),
    ("information", "launchSpecTemporarilyBlacklisted",
     f"{SET_ASIDE} Error message: Spot Max Instance Count Exceeded"),
    ("error", "allLaunchSpecsTemporarilyBlacklisted", ALL),
)  # fmt: skip
NO_CAPACITY = (
    ("information", "launchSpecUnusable", f"{NO_TYPE_HERE} $-1.0000"),
    ("information", "launchSpecTemporarilyBlacklisted",
     f"{SET_ASIDE} Error message: There is no Spot capacity available that matches your request."),
    ("error", "allLaunchSpecsTemporarilyBlacklisted", ALL),
)  # fmt: skip
NO_IMAGE = (
    ("information", "launchSpecTemporarilyBlacklisted",
     f"{SET_ASIDE} Error message: The image id '[ami-0d09143c6fc181fe3]' does not exist"),
    ("error", "allLaunchSpecsTemporarilyBlacklisted", ALL),
)  # fmt: skip


def history(*rounds: tuple[tuple[str, str, str], ...], minutes: float = 13) -> list[FleetEvent]:
    """One round of events every `minutes`."""
    return [
        FleetEvent(BEGIN + timedelta(minutes=minutes * number, seconds=second), kind, what, words, "")
        for number, events in enumerate(rounds)
        for second, (kind, what, words) in enumerate(events)
    ]


def cause_of(events: list[FleetEvent]) -> Shortage:
    found = shortage(events, types=["c5.18xlarge"], zones=["us-east-1d", "us-east-1e"])
    assert found is not None
    return found


Round = tuple[tuple[str, str, str], ...]


@pytest.mark.parametrize(
    ("events", "cause"), [(NO_QUOTA, "quota"), (NO_CAPACITY, "capacity"), (NO_IMAGE, "configuration")]
)
def test_the_cause_is_right_after_each_event_that_names_it(events: Round, cause: str) -> None:
    """Neither "all specifications are set aside" nor the price of a zone without the type names one."""
    first = next(number for number, (_, what, _) in enumerate(events, 1) if "Temporarily" in what or "Limit" in what)
    for count in range(first, len(events) + 1):
        assert cause == cause_of(history(events, events, events[:count])).cause
        assert cause == cause_of(history(events[:count])).cause


def test_aws_own_words_are_shown_without_what_every_refusal_has() -> None:
    assert "The image id '[ami-0d09143c6fc181fe3]' does not exist" == cause_of(history(NO_IMAGE)).aws_message


def test_a_quota_outweighs_the_other_refusals_of_its_time_and_not_those_of_an_hour_later() -> None:
    assert "quota" == cause_of(history(NO_QUOTA, NO_CAPACITY)).cause
    assert "capacity" == cause_of(history(NO_QUOTA, NO_CAPACITY, minutes=60)).cause


def test_a_zone_without_the_type_is_no_price_that_is_too_low() -> None:
    """AWS says so at every healthy start, before the first launch."""
    start = ("information", "launchSpecUnusable", f"{NO_TYPE_HERE} $-1.0000")
    assert shortage(history((start,))) is None
    too_low = ("information", "launchSpecUnusable", f"{POOL}, Spot bid price is less than Spot market price $0.5291")
    assert "price" == cause_of(history((start, too_low))).cause


def test_set_aside_specifications_with_no_reason_given_are_a_question_of_the_configuration() -> None:
    found = cause_of(history((("error", "allLaunchSpecsTemporarilyBlacklisted", ALL),)))
    assert ("configuration", ALL) == (found.cause, found.aws_message)
