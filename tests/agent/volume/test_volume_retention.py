"""What is surplus, as a table; that it goes only after a checkpoint is shown in tests/simulation."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from spotheal.agent.aws.ec2 import Attachment, Instance, Snapshot, Volume
from spotheal.agent.protocol.errors import Fatal
from spotheal.agent.volume.retention import Surplus, clean_up, surplus

T0 = datetime(2026, 11, 21, 8, 0, tzinfo=timezone.utc)
HELD = SimpleNamespace(volume="vol-09", term=9)


def volume(id, state, term, attached=False):
    held = (Attachment("i-0x", "/dev/sdf", "attached"),) if attached else ()
    tags = {"spotheal:state": state, "spotheal:term": str(term)}
    return Volume(id, "us-west-2a", "available", 1, tags=tags, attachments=held)


def snapshot(number, purpose="handover", state="completed"):
    tags = {"spotheal:term": str(number)} | ({"spotheal:purpose": purpose} if purpose else {})
    return Snapshot(f"snap-0{number}", "vol-01", state, 100, T0 + timedelta(hours=number), 1, tags)


def test_superseded_volumes_and_half_made_ones_of_earlier_terms_are_surplus():
    volumes = (
        volume("vol-01", "superseded", 3),
        volume("vol-02", "moving", 8),
        volume("vol-03", "moving", 9),
        volume("vol-04", "current", 2),
        volume("vol-05", "new", 0),
        volume("vol-06", "superseded", 4, attached=True),
        volume("vol-07", "superseded", 10),
        volume("vol-09", "superseded", 9),
    )
    assert Surplus(("vol-01", "vol-02"), ()) == surplus(HELD, volumes, ())


def test_the_newest_two_snapshots_of_ours_are_kept_and_failed_ones_go():
    snapshots = (
        snapshot(1),
        snapshot(2, "base"),
        snapshot(3),
        snapshot(4, "base"),
        snapshot(5, state="error"),
        snapshot(6, purpose=""),
    )
    assert ("snap-01", "snap-02", "snap-05") == surplus(HELD, (), snapshots).snapshots


def test_a_run_that_is_done_keeps_no_base_and_the_newest_two_others():
    snapshots = (snapshot(1), snapshot(2), snapshot(3), snapshot(4, "base"), snapshot(5, "base", "pending"))
    found = surplus(HELD, (), snapshots, run_ends=True, keep_bases=False)
    assert ("snap-01", "snap-04", "snap-05") == found.snapshots


def test_a_snapshot_that_is_pending_is_left_to_complete():
    assert () == surplus(HELD, (), (snapshot(1, state="pending"), snapshot(3), snapshot(4))).snapshots


def test_at_the_end_of_a_run_nobody_waits_for_a_pending_snapshot_that_is_surplus():
    found = (snapshot(1, state="pending"), snapshot(3), snapshot(4, state="pending"))
    assert surplus(HELD, (), found, run_ends=True).snapshots == (found[0].id,)


def test_nothing_is_even_looked_at_before_a_checkpoint_is_acknowledged():
    assert Surplus((), ()) == clean_up(SimpleNamespace(), HELD, acknowledged_step=None)


@pytest.mark.parametrize(
    ("instance", "attachment", "detached"),
    [
        ("stopped", "attached", [("vol-01", "i-0x", False)]),
        ("stopped", "detaching", [("vol-01", "i-0x", True)]),
        ("terminated", "attached", [("vol-01", "i-0x", False)]),
        ("terminated", "detaching", [("vol-01", "i-0x", True)]),
        ("shutting-down", "attached", []),
        ("running", "attached", []),
    ],
)
def test_a_superseded_volume_is_taken_from_an_instance_that_is_dead(instance, attachment, detached):
    """The simulations found some that stayed for ever: a detach was stuck when the machine was stopped, or EC2 never
    took it from a machine that it had ended."""
    held = replace(
        volume("vol-01", "superseded", 3), attachments=(Attachment("i-0x", "/dev/sdf", attachment),), state="in-use"
    )
    calls = []
    ec2 = SimpleNamespace(
        volumes_of_run=lambda run: (held, volume("vol-09", "current", 9, attached=True)),
        snapshots_of_run=lambda run: (),
        instances=lambda ids: tuple(Instance(one, instance, "us-west-2a", "g5.xlarge", T0) for one in ids),
        detach=lambda volume, instance, force: calls.append((volume, instance, force)),
    )
    claim = SimpleNamespace(number=9, instance="i-me")
    store = SimpleNamespace(highest_term=lambda: claim)
    memory = SimpleNamespace(states={}, deleted=set(), snapshot=None)
    ctx = SimpleNamespace(ec2=ec2, store=store, desired=SimpleNamespace(run="r1", instance="i-me"), memory=memory)
    assert Surplus((), ()) == clean_up(ctx, HELD, acknowledged_step=1)
    assert detached == calls
    calls.clear()
    ctx.desired.instance = claim.instance = "i-0x"  # ourselves, who run, and have vol-09 mounted
    clean_up(ctx, HELD, acknowledged_step=1)
    assert [("vol-01", "i-0x", attachment == "detaching")] == calls


def test_what_this_life_has_superseded_goes_though_no_describe_shows_it_so():
    """The run may end before one does, and then nobody looks again."""
    deleted = []
    ec2 = SimpleNamespace(
        volumes_of_run=lambda run: (volume("vol-01", "current", 8), volume("vol-09", "moving", 9, attached=True)),
        snapshots_of_run=lambda run: (snapshot(6), snapshot(7)),  # not the one that this life has taken
        delete_volume=deleted.append,
        delete_snapshot=deleted.append,
    )
    claim = SimpleNamespace(number=9, instance="i-me")
    states = {"vol-01": "superseded", "vol-02": "superseded", "vol-09": "current"}
    ctx = SimpleNamespace(
        ec2=ec2,
        store=SimpleNamespace(highest_term=lambda: claim),
        desired=SimpleNamespace(run="r1", instance="i-me"),
        memory=SimpleNamespace(states=states, deleted=set(), snapshot="snap-08"),
    )
    assert Surplus(("vol-01", "vol-02"), ("snap-06",)) == clean_up(ctx, HELD, acknowledged_step=1)
    assert ["vol-01", "vol-02", "snap-06"] == deleted
    assert Surplus((), ("snap-06",)) == clean_up(ctx, HELD, acknowledged_step=1)


def test_one_snapshot_that_cannot_go_keeps_no_other_from_going():
    """An operator has made an AMI of it, or has locked it: EC2 says so each time."""
    deleted = []

    def delete(snapshot):
        if snapshot == "snap-01":
            raise Fatal("could not delete snap-01: it is in use by ami-1", code="InvalidSnapshot.InUse")
        deleted.append(snapshot)

    claim = SimpleNamespace(number=9, instance="i-me")
    ctx = SimpleNamespace(
        ec2=SimpleNamespace(
            volumes_of_run=lambda run: (volume("vol-09", "current", 9, attached=True),),
            snapshots_of_run=lambda run: tuple(map(snapshot, range(1, 5))),
            delete_snapshot=delete,
        ),
        store=SimpleNamespace(highest_term=lambda: claim),
        desired=SimpleNamespace(run="r1", instance="i-me"),
        memory=SimpleNamespace(states={}, deleted=set(), snapshot=None),
        log=SimpleNamespace(warning=lambda text, **fields: None),
    )
    assert Surplus((), ("snap-02",)) == clean_up(ctx, HELD, acknowledged_step=1)
    assert ["snap-02"] == deleted
