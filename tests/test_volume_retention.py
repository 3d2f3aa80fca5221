"""What is surplus, as a table; that it goes only after a checkpoint is shown in tests/simulation."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

from spotheal.agent.ec2 import Attachment, Snapshot, Volume
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


def test_a_snapshot_that_is_pending_is_left_to_complete():
    assert () == surplus(HELD, (), (snapshot(1, state="pending"), snapshot(3), snapshot(4))).snapshots


def test_nothing_is_even_looked_at_before_a_checkpoint_is_acknowledged():
    assert Surplus((), ()) == clean_up(SimpleNamespace(), HELD, acknowledged_step=None)
