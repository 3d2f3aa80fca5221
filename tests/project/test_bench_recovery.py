"""bench/recovery.py keeps its promise: the narrowest cases, and that the article's way is really carried out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import recovery
from recovery import Case


@pytest.mark.parametrize(
    "case", [Case("same", "notice", 0.0), Case("other", "notice", 90.0), Case("other", "kill", 600.0)], ids=str
)
def test_a_recovery_takes_at_most_five_seconds_more_than_aws_needs(case: Case) -> None:
    for phase in (0.0, 2.3):
        run = recovery.ours(case, phase)
        assert 0 <= run.over <= recovery.OVER_SECONDS_MAX
        assert 0 == run.lost_steps


def test_what_aws_needs_is_what_stands_in_the_list_of_latencies() -> None:
    assert 3.0 == recovery.needed_seconds(Case("same", "kill", 600.0), 150.0, None)[0]
    assert 98.0 == recovery.needed_seconds(Case("other", "kill", 90.0), 150.0, None)[0]
    assert 8.0 + 20.0 == recovery.needed_seconds(Case("other", "notice", 90.0), 150.0, 80.0)[0]
    assert 8.0 == recovery.needed_seconds(Case("other", "notice", 0.0), 150.0, 80.0)[0]


def test_the_article_is_quick_enough_where_a_snapshot_is_and_loses_all_where_it_is_not() -> None:
    quick, slow = recovery.article(Case("other", "kill", 90.0)), recovery.article(Case("other", "kill", 600.0))
    assert [] == quick["failed"]
    assert not quick["from_nothing"]
    assert quick["seconds"] > 90 + 5 + 10
    assert "wait SnapshotCompleted" in slow["failed"]
    assert slow["from_nothing"]


@pytest.mark.parametrize("trainer", recovery.noticed_world.TRAINERS)
def test_the_handover_is_asked_for_in_time_whatever_the_trainer_does(trainer: str) -> None:
    run = recovery.ours(Case("same", "notice", 90.0), trainer=trainer)
    assert run.after_trainer_end is not None
    assert run.margin is not None
    assert run.after_trainer_end <= recovery.HANDOVER_SECONDS_MAX
    assert run.margin >= recovery.MARGIN_SECONDS_MIN
