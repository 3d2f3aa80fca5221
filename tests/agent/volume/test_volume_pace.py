"""When a pending snapshot is looked at again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from rulebook_world import BEGIN, VirtualClock

from spotheal.agent.aws.ec2 import Snapshot, Volume
from spotheal.agent.volume.act import act
from spotheal.agent.volume.actions import POLL_SECONDS, Wait
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.observe import _snapshots
from spotheal.agent.volume.seen import Desired, Source


class Polled:
    """An EC2 with one snapshot that completes at `done_at`; describes of the run's snapshots are stale."""

    def __init__(self, clock: VirtualClock, done_at: float) -> None:
        self.clock, self.done_at, self.asked = clock, done_at, []

    def _snapshot(self, seconds: float) -> Snapshot:
        done = seconds >= self.done_at
        return Snapshot("snap-1", "vol-1", "completed" if done else "pending", 100 if done else 0, BEGIN, 1, {})

    def snapshot(self, snapshot: str) -> Snapshot:
        self.asked.append(self.clock.seconds)
        self.clock.seconds += 0.3
        return self._snapshot(self.clock.seconds)

    def snapshots_of_run(self, run: str) -> tuple[Snapshot, ...]:
        return (self._snapshot(self.clock.seconds - 30),)


def waiting(done_at: float) -> tuple[Context, Polled, VirtualClock]:
    clock = VirtualClock()
    cloud = Polled(clock, done_at)
    desired = Desired("01RUN", "i-1", "us-west-2b", "/d", "xfs", 1, "gp3", {})
    unused = SimpleNamespace()
    stop = SimpleNamespace(is_set=lambda: False)
    return Context(desired, cloud, unused, unused, clock, stop, unused, lambda at: ()), cloud, clock


@pytest.mark.parametrize("done_at", [3.0, 33.0, 91.7, 300.0])
def test_a_pending_snapshot_is_asked_for_every_five_seconds_at_most_and_soon_after_its_end(done_at):
    ctx, cloud, clock = waiting(done_at)
    while "snap-1" not in ctx.memory.completed:
        act(Wait("why", "snapshot", None, 60.0, snapshot="snap-1"), ctx)
        clock.seconds += 0.4  # a whole look
    assert clock.seconds - done_at < POLL_SECONDS + 1.0
    assert all(later - earlier >= POLL_SECONDS - 0.01 for earlier, later in itertools.pairwise(cloud.asked))


def test_a_staler_describe_does_not_take_back_that_a_snapshot_is_completed():
    ctx, _, clock = waiting(9.0)
    act(Wait("why", "snapshot", None, 60.0, snapshot="snap-1"), ctx)
    assert clock.seconds < 39
    volume = Volume("vol-1", "us-west-2a", "available", 1)
    assert ["completed"] == [snapshot.state for snapshot in _snapshots(ctx, Source("vol-1", volume, 1), "")]
