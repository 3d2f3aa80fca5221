"""What a writer leaves behind, in an order that a crash anywhere cannot make unsafe."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from money_world import Hours
from test_volume_ec2 import AT_ONCE, A, launch, spec

from spotheal.agent.aws.ec2 import Ec2, VolumeSpec
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import Conflict, Retryable
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.agent.volume.act import act
from spotheal.agent.volume.actions import Reject, TakeSnapshot
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.release import create_base, create_handover, detach
from spotheal.agent.volume.seen import Desired
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2, InMemoryS3

TAGS = {"spotheal:run": "r1", "Name": "data"}


@pytest.fixture
def world():
    rules = Rulebook(SystemClock(), zones=(A,), latencies=AT_ONCE)
    ec2, instance = Ec2(InMemoryEc2(rules)), launch(rules)
    volume = ec2.create_volume(spec()).id
    ec2.attach(volume, instance, "/dev/sdf")
    host = SimpleNamespace(mounted=None, writes_out=False, mounted_at=lambda mountpoint: host.mounted)
    host.unmount = lambda mountpoint, seconds_max: not host.writes_out
    ctx = Context(
        desired=Desired("r1", instance, A, "/dltraining", "xfs", 10, "gp3", TAGS),
        ec2=ec2,
        store=Store(InMemoryS3("bucket"), StoreUrl("bucket", "digits/r1")),
        host=host,
        clock=SystemClock(),
        stop=never(),
        log=SimpleNamespace(warning=logging.warning),
        checkpoint_names=lambda mountpoint: (),
    )
    return SimpleNamespace(rules=rules, ec2=ec2, ctx=ctx, host=host, held=SimpleNamespace(volume=volume, term=3))


def test_a_handover_carries_its_term_purpose_and_saved_step(world):
    made = create_handover(world.ctx, world.held, 70)
    tags = dict(world.ec2.snapshot(made).tags)
    assert TAGS | {"spotheal:term": "3", "spotheal:purpose": "handover", "spotheal:saved-step": "70"} == tags


def test_the_store_knows_that_the_term_has_ended_before_the_snapshot_is_asked_for(world):
    """Else an agent that dies in between goes on writing under the term whose snapshot a successor adopts."""
    world.rules.faults.plan("CreateSnapshot", "RequestLimitExceeded", status=503)
    with pytest.raises(Retryable):
        create_handover(world.ctx, world.held, 70)
    assert () == world.ec2.snapshots_of_run("r1")
    assert world.ctx.store.get_bytes(LAYOUT.released(3)) is not None


def test_a_store_that_is_down_is_told_once_and_asked_until_it_has_the_mark(world):
    lines, faults = [], ["down", "down", "down", "refused", "refused"]

    def put(key, body):
        if faults:
            raise Retryable(faults.pop(0))

    world.ctx.store.put_json = put
    world.ctx.clock = Hours()
    world.ctx.log = SimpleNamespace(warning=lambda text, **fields: lines.append(fields["error"]))
    create_handover(world.ctx, world.held, 70)
    assert (["down", "refused"], []) == (lines, faults)


def test_a_handover_whose_reply_was_lost_is_found_and_not_taken_twice(world):
    world.rules.faults.plan("CreateSnapshot")
    with pytest.raises(Retryable):
        create_handover(world.ctx, world.held, 70)
    made = create_handover(world.ctx, world.held, 70)
    assert [made] == [snapshot.id for snapshot in world.ec2.snapshots_of_run("r1")]


def test_a_mounted_volume_is_not_detached(world):
    world.host.mounted = "/dev/nvme1n1"
    with pytest.raises(Conflict):
        detach(world.ctx, world.held)
    world.host.mounted = None
    detach(world.ctx, world.held)
    assert () == world.ec2.volume(world.held.volume).attachments


def test_a_volume_that_the_kernel_still_writes_to_is_not_detached(world):
    """It is off the table of mounts before all of memory is on the device."""
    world.host.writes_out = True
    with pytest.raises(Retryable):
        detach(world.ctx, world.held)
    assert 1 == len(world.ec2.volume(world.held.volume).attachments)


def test_a_handover_that_no_describe_lists_is_none_yet_and_is_not_taken_twice(world, monkeypatch):
    """A volume detached without it would be free for a successor that cannot see what to adopt."""
    passed = []
    clock = SimpleNamespace(
        monotonic=lambda: float(len(passed)), sleep=lambda seconds, until=None: passed.append(seconds)
    )
    world.ctx.clock = clock
    visible = world.ec2.snapshots_of_run
    monkeypatch.setattr(world.ec2, "snapshots_of_run", lambda run: ())
    for _ in range(2):
        with pytest.raises(Retryable, match="stays attached"):
            create_handover(world.ctx, world.held, 70)
    monkeypatch.setattr(world.ec2, "snapshots_of_run", visible)
    made = create_handover(world.ctx, world.held, 70)
    assert [made] == [snapshot.id for snapshot in visible("r1")]


def test_no_base_is_taken_while_another_is_pending(world):
    """Five of them, of a disk that takes hours, and EC2 refuses the handover."""
    world.rules.faults.snapshot_seconds = 3600.0
    first = create_base(world.ctx, world.held, 70)
    with pytest.raises(Conflict, match=first):
        create_base(world.ctx, world.held, 80)
    assert create_handover(world.ctx, world.held, 80)


@pytest.mark.parametrize("kind", ["st1", "sc1"])
def test_no_base_is_taken_of_a_volume_that_has_one_snapshot_at_a_time(world, kind):
    """A pending one made EC2 refuse the handover until it was done, and then the machine was gone."""
    world.rules.faults.snapshot_seconds = 3600.0
    held = SimpleNamespace(volume=world.ec2.create_volume(VolumeSpec(A, 500, kind, TAGS, kind)).id, term=3)
    with pytest.raises(Conflict, match="one snapshot at a time"):
        create_base(world.ctx, held, 70)
    assert create_handover(world.ctx, held, 70)


@pytest.mark.parametrize(("code", "waited_for"), [("RequestLimitExceeded", None), ("InternalError", ""), ("", "")])
def test_only_a_snapshot_that_may_have_been_made_is_waited_for(world, code, waited_for):
    """A refusal once cost two minutes of waiting for what was never made."""
    world.rules.faults.plan("CreateSnapshot", code, status=503) if code else world.rules.faults.plan("CreateSnapshot")
    with pytest.raises(Retryable):
        act(TakeSnapshot(world.held.volume, 4, 70), world.ctx)
    assert waited_for == world.ctx.memory.snapshot


def test_a_snapshot_that_failed_is_deleted_where_it_stands_in_the_way_of_the_next(world):
    """It counts against what EC2 works on at a time, of an HDD volume one: the run stood still."""
    volume = world.ec2.create_volume(VolumeSpec(A, 500, "st1", TAGS, "hdd")).id
    world.rules.faults.snapshots_fail = 1
    act(TakeSnapshot(volume, 4, 70), world.ctx)
    with pytest.raises(Retryable, match="in-progress"):
        act(TakeSnapshot(volume, 4, 70), world.ctx)
    act(TakeSnapshot(volume, 4, 70), world.ctx)
    assert ["completed"] == [snapshot.state for snapshot in world.ec2.snapshots_of_run("r1")]


def rejection(world):
    copy = world.ec2.create_volume(spec("copy")).id
    snapshot = world.ec2.create_snapshot(world.held.volume, TAGS).id
    return Reject(copy, snapshot, "ends at step 60, not at 70")


def test_a_copy_that_cannot_be_unmounted_yet_is_rejected_later(world):
    """Rejected and still mounted it would stand where its successor belongs, which was an end of the run."""
    action, world.host.mounted, world.host.writes_out = rejection(world), "/dev/nvme2n1", True
    with pytest.raises(Retryable):
        act(action, world.ctx)
    assert "spotheal:state" not in world.ec2.volume(action.volume).tags and not world.ctx.memory.rejected


def test_a_copy_is_superseded_before_its_snapshot_is_rejected(world):
    """Whose saved step alone says what the copy lacks: the other way round a lost reply promoted it."""
    action = rejection(world)
    world.rules.faults.plan("CreateTags", "RequestLimitExceeded", status=503)
    with pytest.raises(Retryable):
        act(action, world.ctx)
    assert not world.ctx.memory.rejected and "spotheal:reason" not in world.ec2.snapshot(action.snapshot).tags
    act(action, world.ctx)
    assert "superseded" == world.ec2.volume(action.volume).tags["spotheal:state"]
    assert world.ec2.snapshot(action.snapshot).tags["spotheal:reason"].startswith("rejected: ")
    assert {action.snapshot} == world.ctx.memory.rejected
