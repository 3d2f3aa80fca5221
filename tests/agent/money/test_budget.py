"""limits.dollars and limits.hours: counted over all instances of a run, told at 80 %, ended at 100 %; never blind."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import structlog
from agent_world import AgentWorld
from money_world import START, Hours, Kept

from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.money.budget import ASSUMED_DOLLARS_PER_HOUR, Budget, Prices
from spotheal.agent.money.limits import Limits
from spotheal.agent.money.notify import Message
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.ends import TrainerEnd, decide_end
from spotheal.agent.protocol.errors import ExitCode, PermissionDenied
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.record.ledger import Ledger, read_events


class Market:
    """EC2's price history, and IMDS's word for what this instance is."""

    def __init__(self, *prices: tuple[float, str], kind: str = "spot", refusal: Exception | None = None) -> None:
        self.prices, self.kind, self.refusal = prices, kind, refusal
        self.asked: list[datetime] = []

    def spot_prices(self, instance_type: str, zone: str, since: datetime) -> list[tuple[datetime, str]]:
        self.asked.append(since)
        if self.refusal is not None:
            raise self.refusal
        return [(START + timedelta(hours=hour), price) for hour, price in self.prices]

    def lifecycle(self) -> str:
        return self.kind


class Instance:
    """One instance of a run whose store the others share."""

    def __init__(
        self, clock: Hours, store: Store, name: str, market: Market, limit: float = 0, hours: float = 0,
        launched: str = "",
    ) -> None:  # fmt: skip
        log = structlog.get_logger()
        launched = launched or rfc3339(clock.now())
        here = Identity(name, "us-west-2a", "us-west-2", "g5.xlarge", "123456789012", "ami-1", launched)
        self.clock, self.ledger = clock, Ledger(store, clock, name, here.zone)
        self.ledger.note("boot", instance_type=here.instance_type, launched=here.launched)
        self.prices = Prices(market, market, store, self.ledger, here, clock, log)
        requested = rfc3339(START)
        self.budget = Budget(Decimal(str(limit)), store, self.ledger, here, clock, log, requested)
        self.told: list[Message] = []
        self.limits = Limits(hours, limit, requested, self.budget, clock, log, self.told.append)

    def watch_until_limit(self) -> str:
        reasons: list[str] = []
        self.limits.watch(_Never(), reasons.append)
        return reasons[0]


class _Never:
    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        return False


def listed(store: Store, on_demand: float | None = 1.006, **request: Any) -> None:
    rows = [{"instance_type": "g5.xlarge", "zone": "us-west-2a", "spot": 0.3, "on_demand": on_demand}]
    store.put_json(LAYOUT.fleet_document, {"prices": rows, "request": request})


# -------------------------------------------------------------------------------------------------------------- prices
def test_the_price_is_noted_when_it_changes_and_asked_for_once_an_hour() -> None:
    clock, store, market = Hours(), Kept(), Market((-9, "0.36"))
    one = Instance(clock, store, "i-0a", market)
    assert one.prices.look()
    clock.seconds += 3600
    one.prices.look()
    market.prices = ((-9, "0.36"), (1.5, "0.45"))
    clock.seconds += 3600
    one.prices.look()
    noted = [event for event in one.ledger.events() if event["event"] == "price"]
    assert [("0.36", "spot"), ("0.45", "spot")] == [(one["dollars_per_hour"], one["lifecycle"]) for one in noted]
    assert [START, START, START + timedelta(hours=1)] == market.asked


def test_an_on_demand_instance_counts_at_its_list_price() -> None:
    clock, store = Hours(), Kept()
    listed(store)
    rescue = Instance(clock, store, "i-0a", Market(kind="on-demand"), limit=10)
    assert rescue.prices.look()
    clock.seconds += 7200
    spent, rate = rescue.budget.spent()
    assert (Decimal("2.022"), Decimal("1.011")) == (spent, rate)  # with 0.005 an hour for the address


@pytest.mark.parametrize(
    ("known", "dollars"),
    [
        ({"on_demand": 1.006}, "1.011"),
        ({"on_demand": 1.006, "SpotFleetRequestConfig": {"SpotPrice": "0.80"}}, "0.805"),
        ({"on_demand": None}, str(ASSUMED_DOLLARS_PER_HOUR + Decimal("0.005"))),
    ],
)
def test_a_price_that_is_not_known_is_taken_for_an_upper_bound_never_for_nothing(known: Any, dollars: str) -> None:
    clock, store = Hours(), Kept()
    listed(store, **known)
    one = Instance(clock, store, "i-0a", Market(refusal=PermissionDenied("not allowed")), limit=10)
    assert not one.prices.look()
    with structlog.testing.capture_logs() as said:
        clock.seconds += 3600
        spent, _ = one.budget.spent()
    assert Decimal(dollars) == spent
    assert any(line["log_level"] == "warning" and "limits.dollars counts" in line["event"] for line in said)


# ------------------------------------------------------------------------------------------------------------- dollars
def test_at_80_percent_it_is_told_once_and_at_100_the_run_ends() -> None:
    clock, store = Hours(), Kept()
    one = Instance(clock, store, "i-0a", Market((-9, "0.995")), limit=10)
    one.prices.look()
    assert "limits.dollars = 10 is reached: about $10.00 since the request" == one.watch_until_limit()
    assert ["limit-80"] == [message.event for message in one.told]
    assert "$8.00 of limits.dollars = 10" in one.told[0].text
    assert clock.seconds == pytest.approx(10 * 3600, abs=60)


def test_earlier_instances_count_and_so_does_a_restart_of_the_agent() -> None:
    clock, store = Hours(), Kept()
    listed(store)
    first = Instance(clock, store, "i-0a", Market((-9, "0.40")), limit=2)
    first.prices.look()
    clock.seconds += 2 * 3600  # 0.80 dollars, and 0.01 for the address
    first.ledger.add("notice", action="terminate", ends=rfc3339(clock.now()))
    clock.seconds += 600
    second = Instance(clock, store, "i-0b", Market((-9, "0.40")), limit=2)
    second.prices.look()
    second.ledger.flush()
    clock.seconds += 3600
    assert Decimal("1.215") == second.budget.spent()[0]
    again = Instance(clock, store, "i-0b", Market((-9, "0.40")), limit=2, launched=second.budget.here.launched)
    assert Decimal("1.215") == again.budget.spent()[0]
    assert "limits.dollars = 2 is reached" in again.watch_until_limit()
    assert clock.seconds == pytest.approx(3 * 3600 + 600 + 3600 * 0.785 / 0.405, abs=60)


def test_what_was_spent_before_the_request_that_resumed_the_run_is_not_counted() -> None:
    clock, store = Hours(), Kept()
    first = Instance(clock, store, "i-0a", Market((-9, "0.40")))
    first.prices.look()
    clock.seconds += 5 * 3600
    first.ledger.add("end", phase="limit")
    clock.seconds += 3600
    second = Instance(clock, store, "i-0b", Market((-9, "0.40")), limit=2)
    second.budget.requested_at = rfc3339(clock.now())
    second.prices.look()
    clock.seconds += 3600
    assert Decimal("0.405") == second.budget.spent()[0]


def test_a_store_that_is_down_delays_the_counting_and_ends_nothing() -> None:
    clock, store = Hours(), Kept()
    one = Instance(clock, store, "i-0a", Market((-9, "3600")), limit=1)
    one.prices.look()
    clock.seconds += 3600
    store.down = True
    assert ("", 60.0) == one.limits.look()
    store.down = False
    assert "is reached" in one.limits.look()[0]


# --------------------------------------------------------------------------------------------------------------- hours
def test_hours_are_told_at_80_percent_and_end_the_run() -> None:
    clock = Hours()
    one = Instance(clock, Kept(), "i-0a", Market((-9, "0.40")), hours=10)
    assert "limits.hours = 10 is reached" == one.watch_until_limit()
    assert clock.seconds == pytest.approx(36_000, abs=1)
    assert ["8.0 of limits.hours = 10 are over. At 100 % it saves, ends and cancels its fleet"] == [
        message.text for message in one.told
    ]


@pytest.mark.parametrize(("before", "after"), [(0.0, 7200.0), (7200.0, 0.0)], ids=["jumps ahead", "is put right"])
def test_a_wall_clock_that_is_wrong_for_a_while_ends_no_run_before_its_hours(before: float, after: float) -> None:
    clock = Hours()
    one = Instance(clock, Kept(), "i-0a", Market((-9, "0.40")), hours=10)
    clock.seconds, clock.skew = 7 * 3600.0, before
    assert one.limits.look()[0] == ""
    clock.seconds, clock.skew = 9 * 3600.0, after
    assert one.limits.look()[0] == ""
    clock.seconds = 10 * 3600.0
    assert "limits.hours = 10 is reached" == one.limits.look()[0]


def test_without_limits_nothing_is_watched() -> None:
    assert not Instance(Hours(), Kept(), "i-0a", Market()).limits.any


def test_a_limit_is_an_end_of_the_run() -> None:
    end = decide_end(TrainerEnd("limit", "limits.dollars = 10 is reached"))
    assert end is not None and Phase.LIMIT is end.phase and end.phase.is_end


# ------------------------------------------------------------------------------------------------------ the whole agent
def test_a_run_that_is_over_its_limit_ends_without_starting_its_trainer(tmp_path: Path) -> None:
    """Booting alone has cost more than the limit: the reason is stored, the fleet cancelled, the volume kept."""
    world = AgentWorld(tmp_path, "raise SystemExit('never started')", job={"limits": {"dollars": 0.00001}})
    assert ExitCode.OK == world.live()
    assert "limit" == world.status()["phase"]
    assert world.status()["reason"].startswith("limits.dollars = 0.00001 is reached")
    assert world.fleet_state().startswith("cancelled")
    assert "done" != world.volume_tags()["spotheal:state"]
    names = [event["event"] for event in read_events((world.store.get_bytes(LAYOUT.ledger) or b"").decode())]
    assert "price" in names and "trainer-started" not in names
