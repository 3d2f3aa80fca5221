"""What the verbs of an operator write into a run's ledger, so that the cost of a run that is over stands still."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels

from spotheal.agent.money.billing import bill
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.agent.record.ledger import Ledger, read_events
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.status import receipt
from spotheal.fleet.status.status import gather, summarise

__all__ = ["desk", "moto_clients", "wheels"]


def trained(desk: Desk) -> tuple[dict[str, Any], Any]:
    """A run whose machine has noted what it costs, an hour ago; and its ledger."""
    done = desk.request()
    desk.pass_time(60)
    (instance,) = desk.account.rules.instances()
    noted = Ledger(desk.store(done["run"]), desk.account.clock, instance.id, "us-west-2a")
    noted.add("boot", instance_type="g5.xlarge", lifecycle="spot", root_gib=75)
    noted.add("price", dollars_per_hour="0.5")
    noted.add("volume", volume=done["volume_id"], moved_from=None, size_gib=100, type="gp3")
    noted.add("trainer-started", attempt=1, resumed_step=None)
    desk.pass_time(3600)
    return done, noted


def events(desk: Desk, run: str) -> list[dict[str, Any]]:
    return read_events((desk.store(run).get_bytes(LAYOUT.ledger) or b"").decode())


def costs_later(desk: Desk, run: str) -> list[float]:
    """Dollars as `status` says them now, a month later and a year later, once and again by the report's receipt."""
    found = runs.open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", run)
    seen = gather(Session("us-west-2"), found)
    now = datetime.now(timezone.utc)
    moments = [now + timedelta(days=days) for days in (0, 30, 365)]
    history = [receipt.receipt(receipt.history_of(seen, moment)).total for moment in moments]
    told = [summarise(seen, moment)["cost"]["dollars"] for moment in moments]
    assert told == [float(dollars) for dollars in history]
    return told


def test_the_cost_of_a_cancelled_run_stands_still(desk: Desk) -> None:
    done, _ = trained(desk)
    desk.good("cancel", "--yes")
    desk.pass_time(600)
    (end,) = [one for one in events(desk, done["run"]) if one["event"] == "end"]
    status = desk.store(done["run"]).read_status()
    assert (end["phase"], end["reason"], end["time"]) == (status["phase"], status["reason"], status["ended"])
    assert len(set(costs_later(desk, done["run"]))) == 1
    document = desk.good("status")
    assert document["ended_at"] == status["ended"]


def test_the_cost_stands_still_though_the_end_is_in_the_status_alone(desk: Desk) -> None:
    """As after a cancel by an older version, which wrote no moment; or a machine that booted into the cancel."""
    done, noted = trained(desk)
    store = desk.store(done["run"])
    desk.good("cancel", "--yes")
    desk.pass_time(600)
    noted.add("volume", volume=done["volume_id"], moved_from=None, size_gib=100, type="gp3")
    assert len(set(costs_later(desk, done["run"]))) == 1
    store.write_status({key: value for key, value in store.read_status().items() if key != "ended"})
    assert len(set(costs_later(desk, done["run"]))) == 1


@pytest.mark.parametrize("verb", [("clean", "cifar", "--unfinished"), ("volume", "rm")])
def test_what_an_operator_deletes_stands_in_the_ledger(desk: Desk, verb: tuple[str, ...]) -> None:
    done, _ = trained(desk)
    desk.good("cancel", "--yes")
    desk.pass_time(600)
    store = desk.store(done["run"])
    desk.account.rules.world.volumes.put(
        replace(desk.account.rules.world.volumes[done["volume_id"]], created=datetime.now(timezone.utc))
    )
    desk.good(*verb, *([done["volume_id"]] if verb[0] == "volume" else []), "--yes")
    assert [done["volume_id"]] == [
        name for one in events(desk, done["run"]) if one["event"] == "deleted" for name in one.get("volumes", [])
    ]
    assert store.read_status()["phase"] == "cancelled"


def test_clean_writes_nothing_into_a_store_that_it_deletes(desk: Desk) -> None:
    done, _ = trained(desk)
    desk.good("cancel", "--yes")
    desk.pass_time(600)
    desk.good("clean", "cifar", "--unfinished", "--store", "--yes")
    assert desk.store(done["run"]).keys() == []


def test_a_volume_that_was_deleted_by_hand_costs_nothing_any_more(desk: Desk) -> None:
    """Nobody noted it, and the run is not over; its machine was last heard of at its last event."""
    done, _ = trained(desk)
    (instance,) = desk.account.rules.instances()
    desk.account.rules.kill(instance.id)
    desk.pass_time(600)
    desk.account.delete_volume(VolumeId=done["volume_id"])
    desk.pass_time(60)
    assert desk.account.rules.volumes() == []
    found = runs.open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", done["run"])
    history = receipt.history_of(gather(Session("us-west-2"), found), datetime.now(timezone.utc))
    assert sum(one.dollars for one in bill(history).volumes) < Decimal("0.02")
