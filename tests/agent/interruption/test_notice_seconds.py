"""AWS's two minutes are shared out once, and the agent and a trainer hold the same notice for stale."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from handover_world import BEGIN, FakeClock, FakeImds

from spotheal.agent.aws.imds import SpotAction
from spotheal.agent.interruption import watcher as agents
from spotheal.agent.protocol import notice_seconds as seconds
from spotheal.training import notice as trainers


def test_the_seconds_of_a_notice_add_up_to_two_minutes() -> None:
    trainer = agents.trainer_seconds("terminate", seconds.LEAD_SECONDS_MAX - seconds.POLL_SECONDS)
    let_go = seconds.BUSY_SECONDS + seconds.KILLED_SECONDS + 2 * seconds.FREEZE_SECONDS
    agent = seconds.KILL_SECONDS + seconds.RECORD_SECONDS + let_go + seconds.SNAPSHOT_SECONDS + seconds.SPARE_SECONDS
    assert agent == seconds.MARGIN_SECONDS
    assert seconds.POLL_SECONDS + trainer + agent == 120


def test_the_least_that_a_late_notice_leaves_is_a_kill_a_freeze_and_a_snapshot() -> None:
    least = seconds.KILLED_SECONDS + 2 * seconds.FREEZE_SECONDS + seconds.SNAPSHOT_SECONDS
    assert least <= seconds.HANDOVER_SECONDS < seconds.MARGIN_SECONDS
    assert agents.trainer_seconds("terminate", seconds.HANDOVER_SECONDS) == 0
    assert agents.trainer_seconds("terminate", seconds.HANDOVER_SECONDS + 3) == 3


@pytest.mark.parametrize(("late", "counts"), [(239, True), (241, True), (299, True), (301, False)])
def test_agent_and_trainer_hold_the_same_notice_for_stale(late: float, counts: bool) -> None:
    imds: Any = FakeImds([SpotAction("terminate", BEGIN - timedelta(seconds=late))])
    agent, trainer = agents.Watcher(imds, FakeClock()), trainers.Watcher(metadata=imds, clock=FakeClock())
    agent.poll()
    trainer.poll()
    assert (agent.notice is not None, trainer.notice is not None) == (counts, counts)
