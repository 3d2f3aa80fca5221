"""The receipt: what a scripted history costs, to the cent, as a hand calculates it; and what an end makes free."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotheal.agent.money.bill_inputs import Disk, History, Known, Listed
from spotheal.agent.money.billing import bill
from spotheal.agent.money.instance_time import charge, stays
from spotheal.agent.protocol.clock import rfc3339
from spotheal.fleet.status.receipt import cost_so_far, receipt

DAY = datetime(2026, 11, 21, tzinfo=timezone.utc)
Event = dict[str, Any]


def at(clock: str) -> datetime:
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return DAY + timedelta(hours=hours, minutes=minutes, seconds=seconds)


def event(time: str, name: str, instance: str, zone: str = "us-west-2a", **fields: Any) -> Event:
    more = {key: rfc3339(value) if isinstance(value, datetime) else value for key, value in fields.items()}
    return {"time": rfc3339(at(time)), "event": name, "instance": instance, "zone": zone, **more}


def scripted() -> Iterator[Event]:
    """Spot for 45 minutes, taken by AWS; spot for two and a half hours in another zone, taken; an on-demand rescue."""
    a, b, c = "i-0a", "i-0b", "i-0c"
    yield event("8:01:30", "boot", a, instance_type="g5.xlarge", launched=at("8:00:00"), lifecycle="spot", root_gib=75)
    yield event("8:01:31", "price", a, dollars_per_hour="0.400000", since=at("7:12:00"))
    yield event("8:02:00", "volume", a, volume="vol-1", moved_from=None, size_gib=100, type="gp3")
    yield event("8:03:00", "trainer-started", a, attempt=1, resumed_step=0)
    yield event("8:43:00", "notice", a, action="terminate", ends=at("8:45:00"))
    yield event("8:43:50", "trainer-ended", a, kind="interrupted", last_step=400, saved_step=400)
    yield event("8:44:00", "handover", a, snapshot="snap-1", used_gib=40)
    zone = "us-west-2b"
    yield event("8:48:00", "boot", b, zone, instance_type="g5.xlarge", launched=at("8:47:00"), lifecycle="spot",
                root_gib=75)  # fmt: skip
    yield event("8:48:01", "price", b, zone, dollars_per_hour="0.420000", since=at("8:00:00"))
    yield event("8:51:00", "volume", b, zone, volume="vol-2", moved_from="vol-1", size_gib=100, type="gp3")
    yield event("8:52:00", "trainer-started", b, zone, attempt=2, resumed_step=400)
    yield event("9:10:00", "deleted", b, zone, volumes=["vol-1"], snapshots=["snap-1"])
    yield event("10:00:30", "price", b, zone, dollars_per_hour="0.450000", since=at("10:00:00"))
    yield event("11:15:00", "notice", b, zone, action="terminate", ends=at("11:17:00"))
    yield event("11:15:40", "trainer-ended", b, zone, kind="interrupted", last_step=1500, saved_step=1480)
    yield event("11:16:00", "handover", b, zone, snapshot="snap-2", used_gib=41)
    yield event("12:01:00", "boot", c, zone, instance_type="g5.xlarge", launched=at("12:00:00"), lifecycle="on-demand",
                root_gib=75)  # fmt: skip
    yield event("12:02:00", "volume", c, zone, volume="vol-2", moved_from=None)
    yield event("12:03:00", "trainer-started", c, zone, attempt=3, resumed_step=1480)
    yield event("13:29:00", "trainer-ended", c, zone, kind="done", last_step=2400, saved_step=2400)
    yield event("13:30:00", "end", c, zone, phase="done", reason="the trainer exited with 0")


def history(events: Any, now: str = "14:00:00", **more: Any) -> History:
    fields: dict[str, Any] = {"requested_at": at("8:00:00"), "listed": {"g5.xlarge": Decimal("1.006")}, **more}
    return History(events=tuple(events), now=at(now), **fields)


def test_the_receipt_is_what_a_hand_calculates_to_the_cent() -> None:
    """
    spot       A  8:00:00- 8:45:00  AWS took it within its first hour                            0.0000
               B  8:47:00-10:00:00  4380 s x 0.42 / 3600                                         0.5110
                 10:00:00-11:17:00  4620 s x 0.45 / 3600                                         0.5775
                                                                                     1.0885  -> $1.09
    on demand  C 12:00:00-13:30:00  5400 s x 1.006 / 3600                            1.5090  -> $1.51
    volumes    vol-1  8:00- 9:10    4200 s x 100 GiB x 0.08 / 2592000 s                          0.012963
               vol-2  8:47-13:30   16980 s x 100 GiB x 0.08 / 2592000 s                          0.052407
                                                                                     0.06537 -> $0.07
    snapshots  snap-1  8:44- 9:10   1560 s x 40 GiB x 0.05 / 2592000 s                           0.001204
               snap-2 11:16-13:30   8040 s x 41 GiB x 0.05 / 2592000 s                           0.006359
                                                                                     0.00756 -> $0.01
    addresses  2700 + 9000 + 5400 = 17100 s x 0.005 / 3600                           0.02375 -> $0.02
    root disks 17100 s x 75 GiB x 0.08 / 2592000 s                                   0.03958 -> $0.04
                                                                                       total    $2.74
    the same hours on demand        17100 s x 1.006 / 3600                           4.7785  -> $4.78
    """
    found = receipt(history(scripted()))
    by_hand = {"Spot instances": "1.09", "On-demand instances": "1.51", "Volumes": "0.07", "Snapshots": "0.01",
               "Root disks": "0.04", "Public IPv4 addresses": "0.02"}  # fmt: skip
    assert by_hand == {line.name: str(line.dollars) for line in found.lines}
    assert Decimal("2.74") == found.total == cost_so_far(history(scripted())).dollars
    assert Decimal("4.78") == found.on_demand
    assert Decimal("4.78") - Decimal("2.60") == found.saved
    assert (2700, 2, 1) == (found.free_seconds, found.interruptions, found.moves)
    assert (2400, 20, 0) == (found.steps.done, found.steps.redone, found.steps.lost)
    # vol-2 and snap-2 are still there: 8.00 + 2.05 a month.
    assert Decimal("10.05") == found.kept_month
    assert 2.74 == found.to_document()["total"]


def test_the_cost_grows_with_the_hours_of_an_instance_that_runs() -> None:
    events = [
        event("8:01:00", "boot", "i-0a", instance_type="g5.xlarge", launched=at("8:00:00")),
        event("8:01:01", "price", "i-0a", dollars_per_hour="0.40", since=at("8:00:00")),
    ]
    known = {"i-0a": Known(alive=True)}
    first, second = (cost_so_far(history(events, now, known=known)) for now in ("9:00:00", "10:00:00"))
    assert (Decimal("0.41"), Decimal("0.81")) == (first.dollars, second.dollars)  # 0.40 + 0.005 an hour
    assert Decimal("0.405") == second.per_hour
    assert "about $0.81 so far, $0.41 an hour now; 60 % below on-demand" == second.says()
    early = cost_so_far(history(events, "8:02:00", known=known))  # $0.01 of $0.03, to the cent
    assert second.saved_percent == early.saved_percent == receipt(history(events, "8:02:00", known=known)).saved_percent


def one_stay(ends: list[Event], now: str = "14:00:00", **more: Any) -> Any:
    begins = [
        event("8:00:00", "boot", "i-0a", instance_type="g5.xlarge", launched=at("8:00:00")),
        event("8:00:01", "price", "i-0a", dollars_per_hour="0.36", since=at("8:00:00")),
    ]
    return stays(history([*begins, *ends], now, **more))[0]


def test_an_end_of_our_own_in_the_first_hour_is_charged() -> None:
    stay = one_stay([event("8:30:00", "end", "i-0a", phase="done")])
    assert ("run", False, Decimal("0.18")) == (stay.ended_by, stay.free, stay.dollars)


def test_a_machine_that_was_shut_down_by_hand_in_the_first_hour_is_charged() -> None:
    stay = one_stay([event("8:30:00", "notice", "i-0a", action="shutdown", ends=at("8:31:40"))])
    assert ("shutdown", False, 1900) == (stay.ended_by, stay.free, stay.seconds)


def test_only_an_interruption_before_the_full_hour_is_free() -> None:
    before = one_stay([event("8:57:59", "notice", "i-0a", action="terminate", ends=at("8:59:59"))])
    after = one_stay([event("8:58:00", "notice", "i-0a", action="terminate", ends=at("9:00:00"))])
    assert (True, Decimal(0)) == (before.free, before.dollars)
    assert (False, Decimal("0.36")) == (after.free, after.dollars)


def test_a_notice_that_was_withdrawn_makes_nothing_free() -> None:
    withdrawn = [
        event("8:20:00", "notice", "i-0a", action="terminate", ends=at("8:22:00")),
        event("8:27:00", "interruption-withdrawn", "i-0a"),
        event("8:40:00", "end", "i-0a", phase="done"),
    ]
    assert Decimal("0.24") == one_stay(withdrawn).dollars
    assert 0 == receipt(history(withdrawn)).interruptions


def test_a_run_that_ends_by_itself_during_a_notice_is_charged() -> None:
    ends = [
        event("8:20:00", "notice", "i-0a", action="terminate", ends=at("8:22:00")),
        event("8:20:30", "end", "i-0a", phase="done"),
    ]
    assert ("run", False) == (one_stay(ends).ended_by, one_stay(ends).free)


def test_what_aws_says_of_an_interruption_counts_where_no_notice_was_seen() -> None:
    gone = {"i-0a": Known(alive=False, interrupted=True)}
    stay = one_stay([event("8:30:00", "trainer-started", "i-0a")], known=gone)
    assert ("aws", True) == (stay.ended_by, stay.free)


def test_an_on_demand_instance_is_never_free() -> None:
    events = [
        event("8:00:00", "boot", "i-0a", instance_type="g5.xlarge", launched=at("8:00:00"), lifecycle="on-demand"),
        event("8:20:00", "notice", "i-0a", action="terminate", ends=at("8:30:00")),
    ]
    (stay,) = stays(history(events))
    assert (False, Decimal("0.503"), "on-demand") == (stay.free, stay.dollars, stay.price_source)


def test_a_machine_that_died_without_a_word_is_counted_to_its_last_heartbeat_as_the_next_one_tells_it() -> None:
    ends = [event("10:00:00", "boot", "i-0b", instance_type="g5.xlarge", launched=at("9:59:00")),
            event("10:00:01", "predecessor", "i-0b", predecessor="i-0a", heard=at("9:30:00"))]  # fmt: skip
    stay = one_stay(ends)
    assert (at("9:31:00"), "unknown", False) == (stay.end, stay.ended_by, stay.free)


def test_seconds_are_charged_and_at_least_sixty() -> None:
    stay = one_stay([event("8:00:10", "end", "i-0a", phase="done")])
    assert (10, Decimal("0.36") * 60 / 3600) == (stay.seconds, stay.dollars)


def test_an_instance_that_was_stopped_and_started_again_is_two_stays() -> None:
    ends = [
        event("8:28:00", "notice", "i-0a", action="stop", ends=at("8:30:00")),
        event("9:00:30", "boot", "i-0a", instance_type="g5.xlarge", launched=at("9:00:00")),
        event("9:30:00", "end", "i-0a", phase="done"),
    ]
    begins = [event("8:00:00", "boot", "i-0a", instance_type="g5.xlarge", launched=at("8:00:00")),
              event("8:00:01", "price", "i-0a", dollars_per_hour="0.36", since=at("8:00:00"))]  # fmt: skip
    first, second = stays(history([*begins, *ends]))
    assert (True, 1800) == (first.free, first.seconds)
    assert (False, 1800, Decimal("0.18")) == (second.free, second.seconds, second.dollars)


@pytest.mark.parametrize(
    ("more", "price", "source"),
    [
        ({"spot_then": {("g5.xlarge", "us-west-2a"): Decimal("0.3")}}, "0.3", "at-request"),
        ({"maximum": Decimal("0.8")}, "0.8", "bound"),
        ({}, "1.006", "bound"),
    ],
)
def test_a_price_that_nobody_noted_is_the_requests_else_an_upper_bound(more: Any, price: str, source: str) -> None:
    events = [event("8:00:00", "boot", "i-0a", instance_type="g5.xlarge", launched=at("8:00:00")),
              event("9:00:00", "end", "i-0a", phase="done")]  # fmt: skip
    (stay,) = stays(history(events, **more))
    assert (Decimal(price), source) == (stay.dollars, stay.price_source)


def test_an_instance_without_any_price_is_named_and_not_counted() -> None:
    events = [event("8:00:00", "boot", "i-0a", instance_type="x9.huge", launched=at("8:00:00")),
              event("9:00:00", "end", "i-0a", phase="done")]  # fmt: skip
    found = receipt(history(events))
    assert Decimal("0.01") == found.total  # its address
    assert found.on_demand is None and found.saved is None
    assert any("i-0a" in note for note in found.notes)


def test_a_request_that_resumes_a_run_counts_its_own_dollars() -> None:
    again = [
        event("20:01:00", "boot", "i-0d", "us-west-2b", instance_type="g5.xlarge", launched=at("20:00:00")),
        event("20:01:01", "price", "i-0d", "us-west-2b", dollars_per_hour="0.40", since=at("20:00:00")),
        event("20:02:00", "volume", "i-0d", "us-west-2b", volume="vol-2", moved_from=None),
    ]
    whole = history([*scripted(), *again], "21:00:00", known={"i-0d": Known(alive=True)})
    since = bill(whole, since=at("19:59:00"))
    assert ["i-0d"] == [stay.instance for stay in since.stays]
    assert Decimal("0.40") == since.lines["spot"]
    assert Decimal("0.01") == since.lines["volumes"]  # 100 GiB x 0.08 x 3660 s / 2592000 s
    assert bill(whole).total > Decimal("3")


def test_iops_and_throughput_beyond_what_gp3_includes_are_charged() -> None:
    disk = Disk(100, "gp3", iops=10_000, throughput=500)
    # 100 x 0.08 + 7000 x 0.005 + 375 x 0.04 = 58 dollars a month; six hours are a 120th of it
    events = [event("8:00:00", "volume", "i-0a", volume="vol-1")]
    assert Decimal("0.48") == bill(history(events, volumes={"vol-1": disk})).lines["volumes"]


def test_the_filling_of_a_copy_is_charged_once_by_what_was_used() -> None:
    """40 GiB at 100 MiB/s, 0.0012 a GiB: 0.048; then 100 GiB, as no snapshot said what was used, at 300: 0.36."""
    more = {"moved_from": "vol-1", "size_gib": 100, "initialization_rate": 100}
    copied = event("9:00:00", "volume", "i-0b", volume="vol-2", **more)
    events = [event("8:44:00", "handover", "i-0a", snapshot="snap-1", used_gib=40), copied, copied]
    assert Decimal("0.05") == bill(history(events)).lines["filling"]
    assert Decimal("0.12") == bill(history([copied])).lines["filling"]
    faster = {**copied, "initialization_rate": 300}
    assert Decimal("0.36") == bill(history([faster])).lines["filling"]
    assert Decimal("0") == bill(history([faster]), since=at("9:00:01")).lines["filling"]
    assert ["0.12"] == [str(line.dollars) for line in receipt(history([copied])).lines if "copies" in line.name]


def test_prices_and_the_maximum_are_read_from_what_the_request_left() -> None:
    rows = [{"instance_type": "g5.xlarge", "zone": "us-west-2a", "spot": 0.4, "on_demand": 1.006}, "rubbish",
            {"instance_type": "p3.2xlarge", "zone": "us-west-2a", "spot": "NaN", "on_demand": None}]  # fmt: skip
    request = {"SpotFleetRequestConfig": {"LaunchSpecifications": [{"SpotPrice": "0.7"}, {"SpotPrice": "0.9"}]}}
    listed = Listed.of({"prices": rows, "request": request})
    assert ({"g5.xlarge": Decimal("1.006")}, Decimal("0.9")) == (dict(listed.on_demand), listed.maximum)
    assert {("g5.xlarge", "us-west-2a"): Decimal("0.4")} == dict(listed.spot)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.text(max_size=5))
rubbish = st.fixed_dictionaries(
    {"event": st.sampled_from(["boot", "price", "volume", "notice", "handover", "deleted", "end", "predecessor"])},
    optional={
        name: values | st.sampled_from(["2026-11-21T08:00:00Z", "i-0a", "vol-1", "terminate"])
        for name in ("time", "instance", "zone", "launched", "dollars_per_hour", "since", "volume", "ends", "action",
                     "snapshot", "used_gib", "size_gib", "volumes", "snapshots", "root_gib", "last_step", "heard",
                     "initialization_rate")
    },
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rubbish, max_size=12))
def test_a_ledger_with_rubbish_in_it_still_gives_a_receipt(events: list[Event]) -> None:
    found = receipt(history(events, known={"i-0a": Known(alive=True)}))
    assert found.total >= 0 and found.total == sum(line.dollars for line in found.lines)


@given(st.lists(st.integers(-5000, 5000), min_size=1, max_size=5, unique=True), st.integers(60, 7200))
def test_however_the_samples_lie_every_second_is_charged_once(moments: list[int], seconds: int) -> None:
    prices = [(DAY + timedelta(seconds=moment), Decimal(1)) for moment in sorted(moments)]
    assert Decimal(seconds) / 3600 == pytest.approx(charge(prices, DAY, seconds))
