"""What `clean` deletes and what it leaves: decided on what was seen, and carried out against the rule book."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels

from spotheal.agent.aws.s3 import Store
from spotheal.agent.money.bill_inputs import Disk
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.names import LAYOUT, StoreUrl, new_run_id
from spotheal.fleet.ending.clean import CleanPlan, RunSeen, Thing, began_at, decide
from spotheal.fleet.verbs import clean as verb

__all__ = ["desk", "moto_clients", "wheels"]
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)
RUN = new_run_id(NOW)
DONE = RunSeen("cifar", RUN, is_known=True, phase="done", results=2, results_bytes=3000)


def thing(kind: str, name: str, role: str = "current", term: int = 1, **more: Any) -> Thing:
    tags = {"spotheal:job": "cifar", "spotheal:run": RUN, "spotheal:state": role, "spotheal:term": str(term)}
    state = {"volume": "available"}.get(kind, "completed")
    return Thing(kind, name, tags, more.pop("state", state), "us-west-2a", 100, more.pop("created", NOW),
                 Disk(100, "gp3") if kind == "volume" else None, **more)  # fmt: skip


ALL = (thing("volume", "vol-1"), thing("snapshot", "snap-1"), thing("launch template", "t"))


def planned(things: tuple[Thing, ...], seen: RunSeen | None, **asked: bool) -> CleanPlan:
    runs = {("cifar", RUN): seen} if seen else {}
    return decide(things, runs, **{"unfinished": False, "store": False, **asked})


def ids(plan: CleanPlan) -> list[str]:
    return [one.id for one in plan.deletes]


# ------------------------------------------------------------------------------------------------------------- decided
def test_a_run_that_is_done_with_its_results_stored_leaves_nothing_that_costs() -> None:
    plan = planned(ALL, DONE)
    assert ["vol-1", "snap-1", "t"] == ids(plan)
    assert "13.00" == f"{plan.month:.2f}"  # 100 GiB at $0.08 and at most 100 GiB at $0.05


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (None, "not in this store"),
        (replace(DONE, is_known=False), "not in this store"),
        (replace(DONE, at_work="sfr-1 works on it"), "sfr-1 works on it"),
        (replace(DONE, results=0), "the only copy"),
        (replace(DONE, reason="done; results not stored (S3), they are kept on vol-1"), "the only copy"),
        (replace(DONE, phase="failed"), "--resume"),
        (replace(DONE, phase="training"), "--resume"),
        (replace(DONE, phase="cancelled"), "--resume"),
        (replace(DONE, phase="failed", newer="01ZZ"), "run 01ZZ is newer: `fleetctl request --resume`"),
    ],
)
def test_a_volume_stays_where_its_run_is_at_work_unknown_or_not_safely_done(seen: RunSeen | None, why: str) -> None:
    plan = planned((thing("volume", "vol-1"),), seen)
    assert [] == ids(plan)
    assert why in plan.keeps[0].reason


def test_a_run_at_work_keeps_everything_whatever_is_asked() -> None:
    busy = replace(DONE, phase="training", at_work="an instance of its run is there")
    things = (*ALL, thing("volume", "vol-0", "superseded", 0), thing("store", "s3://b/cifar"))
    assert [] == ids(planned(things, busy, unfinished=True, store=True))


def test_a_volume_that_is_attached_stays() -> None:
    assert [] == ids(planned((thing("volume", "vol-1", state="in-use"),), DONE))


def test_a_volume_that_was_there_before_the_run_is_the_operators_own_and_stays() -> None:
    old = thing("volume", "vol-1", created=NOW - timedelta(days=30))
    assert [] == ids(planned((old,), DONE))
    assert [] == ids(planned((old,), replace(DONE, phase="failed"), unfinished=True))


def test_what_a_newer_copy_replaced_goes_with_a_run_that_can_still_go_on() -> None:
    """What `delete_superseded = false` leaves to the operator."""
    snapshots = tuple(thing("snapshot", f"snap-{n}", term=n, created=NOW + timedelta(hours=n)) for n in range(1, 5))
    volumes = (thing("volume", "vol-1", "superseded", 1), thing("volume", "vol-2", "current", 2))
    plan = planned((*volumes, *snapshots), replace(DONE, phase="parked"))
    assert ["vol-1", "snap-1", "snap-2"] == ids(plan)


def test_a_replaced_volume_stays_while_the_newer_copy_is_not_to_be_seen() -> None:
    lone = (thing("volume", "vol-1", "superseded", 1), thing("snapshot", "snap-1"))
    assert [] == ids(planned(lone, replace(DONE, phase="parked")))
    half_made = (*lone, thing("volume", "vol-2", "current", 2, state="error"))
    assert [] == ids(planned(half_made, replace(DONE, phase="parked")))


def test_giving_up_unfinished_runs_is_asked_for() -> None:
    failed = replace(DONE, phase="failed", results=0)
    assert ["t"] == ids(planned(ALL, failed))
    assert ["vol-1", "snap-1", "t"] == ids(planned(ALL, failed, unfinished=True))


def test_giving_up_does_not_take_the_only_copy_of_a_run_that_is_done() -> None:
    assert ["t"] == ids(planned(ALL, replace(DONE, results=0), unfinished=True))


def test_the_store_goes_only_when_it_is_asked_for() -> None:
    stored = (thing("store", "s3://b/cifar"),)
    assert [] == ids(planned(stored, DONE))
    assert ["s3://b/cifar"] == ids(planned(stored, DONE, store=True))


def test_a_runs_id_tells_when_it_began_and_other_words_do_not() -> None:
    began = began_at(RUN)
    assert began is not None and abs((began - NOW).total_seconds()) < 1
    assert [None] * 3 == [began_at(word) for word in ("", "run", "U" * 26)]


# --------------------------------------------------------------------------------------------------------- carried out
class Left:
    """What a run has left in the account and the store."""

    def __init__(self, desk: Desk, job: str, phase: str, *, results: int = 1, known: bool = True) -> None:
        self.job, self.run = job, new_run_id(desk.account.clock.now())
        tags = [{"Key": f"spotheal:{key}", "Value": value} for key, value in
                {"job": job, "run": self.run, "state": "current", "term": "1"}.items()]  # fmt: skip
        specification = [{"ResourceType": "volume", "Tags": tags}]
        self.volume = desk.account.create_volume(
            AvailabilityZone="us-west-2a", Size=1, TagSpecifications=specification)["VolumeId"]  # fmt: skip
        desk.pass_time(60)
        self.store = Store(desk.s3, StoreUrl(BUCKET, f"{job}/{self.run}"))
        if known:
            self.store.write_status({"phase": phase})
            self.store.put_json(LAYOUT.fleet_document, {"fleet_id": None, "request": None})
        for number in range(results):
            self.store.put_bytes(f"results/model-{number}", b"x" * 100)


@pytest.fixture
def account(desk: Desk) -> Desk:
    desk.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    return desk


def test_clean_deletes_what_is_done_and_neither_a_live_job_nor_a_strangers_volume(account: Desk) -> None:
    done, failed = Left(account, "cifar", "done"), Left(account, "other", "failed")
    stranger = Left(account, "theirs", "done", known=False)
    untagged = account.account.create_volume(AvailabilityZone="us-west-2a", Size=1)["VolumeId"]
    busy = Left(account, "busy", "training")
    busy.store.put_json(LAYOUT.fleet_document, {"fleet_id": None, "request": {"SpotFleetRequestConfig": {}}})
    document = account.good("clean", "--yes", "--region", "us-west-2")
    assert [done.volume] == document["deleted"]
    assert {failed.volume, stranger.volume, busy.volume} == {one["id"] for one in document["kept"]}
    account.pass_time(60)
    left = {volume.id for volume in account.account.rules.volumes()}
    assert {failed.volume, stranger.volume, busy.volume, untagged} <= left
    assert done.volume not in left
    again = account.good("clean", "--yes", "--region", "us-west-2")
    assert [] == again["deleted"]


def test_resume_is_not_advised_for_a_run_older_than_the_newest(account: Desk) -> None:
    old = Left(account, "cifar", "failed")
    newer = new_run_id(NOW + timedelta(days=365))
    Store(account.s3, StoreUrl(BUCKET, f"cifar/{newer}")).write_status({"phase": "done"})
    (kept,) = account.good("clean", "--yes", "--region", "us-west-2")["kept"]
    assert kept["id"] == old.volume and f"run {newer} is newer" in kept["why"]


def test_a_volume_that_no_run_has_used_yet_is_named_with_its_cost(account: Desk) -> None:
    """A filled volume cost $8 a month and clean said that there was nothing of its job."""
    tags = [{"Key": "spotheal:job", "Value": "joba"}, {"Key": "spotheal:state", "Value": "current"}]
    volume = account.account.create_volume(
        AvailabilityZone="us-west-2a", Size=100, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )["VolumeId"]
    account.pass_time(60)
    for whose in ((), ("joba",)):
        (kept,) = account.good("clean", *whose, "--yes", "--region", "us-west-2")["kept"]
        assert kept["id"] == volume and "fleetctl volume rm" in kept["why"]


def test_clean_shows_dollars_and_deletes_nothing_without_a_yes(account: Desk) -> None:
    done = Left(account, "cifar", "done")
    result = account.run("clean", "--region", "us-west-2")
    assert ExitCode.USAGE == result.exit_code  # no terminal to ask on
    assert "saves $0.10 a month" in result.stderr and done.volume in result.stderr
    dry = account.good("clean", "--dry-run", "--region", "us-west-2")
    assert ([done.volume], []) == ([one["id"] for one in dry["planned"]], dry["deleted"])
    assert account.account.rules.volume(done.volume) is not None


def test_clean_of_one_job_leaves_the_others_and_its_store_unless_asked(account: Desk) -> None:
    one, two = Left(account, "cifar", "done"), Left(account, "other", "done")
    assert [one.volume] == account.good("clean", "cifar", "--yes", "--region", "us-west-2")["deleted"]
    assert one.store.keys()
    account.good("clean", "cifar", "--store", "--yes", "--region", "us-west-2")
    assert [] == one.store.keys()
    assert two.store.keys() and account.account.rules.volume(two.volume) is not None


def test_launch_templates_are_counted_where_the_rest_is_named() -> None:
    said = verb._text(planned((*ALL, thing("launch template", "t2")), DONE), [])
    assert "vol-1" in said and "2 of them" in said and "t2" not in said


def test_a_job_whose_store_was_cleaned_is_none(account: Desk) -> None:
    Left(account, "cifar", "done")
    account.s3.put_object(Bucket=BUCKET, Key="gone/requests/after-nothing.json", Body=b"{}")
    assert ["cifar"] == [one["job"] for one in account.good("status", "--all", "--region", "us-west-2")["jobs"]]


def test_store_without_a_job_is_refused(account: Desk) -> None:
    assert ExitCode.USAGE == account.run("clean", "--store", "--yes", "--region", "us-west-2").exit_code


def test_a_job_that_came_back_to_work_between_the_question_and_the_yes_is_left_alone(
    account: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotheal.fleet.verbs import clean

    done = Left(account, "cifar", "done")
    again = {"fleet_id": None, "request": {"SpotFleetRequestConfig": {}}}
    monkeypatch.setattr(clean, "ask", lambda *_: done.store.put_json(LAYOUT.fleet_document, again))
    assert [] == account.good("clean", "--yes", "--region", "us-west-2")["deleted"]
    assert account.account.rules.volume(done.volume) is not None
