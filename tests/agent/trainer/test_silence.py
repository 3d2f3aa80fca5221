"""A trainer that hangs is ended, says where, and is started again; one that gives any sign of life is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_bench import Bench

from spotheal.agent.trainer.hang_detector import Silence


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_trainer_that_hangs_is_started_again_and_then_the_run_has_failed(bench: Bench) -> None:
    ended = bench.trainer("hangs", "nothing", limits={"silent": "5s", "failures": 2}).run()
    assert (ended.kind, ended.attempts, ended.failures) == ("failed", 2, 2)
    assert "5s without a step, a line of output or a checkpoint" in ended.reason
    assert any("wait_for_ever" in line for line in bench.lines), "Python says where it hangs"
    assert [one["attempt"] for one in bench.named("trainer-ended")] == [1, 2]
    assert bench.left() == []


@pytest.mark.parametrize("sign", ["print", "save", "report"])
def test_any_sign_of_life_is_enough(bench: Bench, sign: str) -> None:
    ended = bench.trainer("hangs", sign, limits={"silent": "2s", "failures": 1}).run()
    assert (ended.kind, ended.attempts) == ("done", 1)


def test_a_limit_of_zero_ends_nothing() -> None:
    clock = _Clock()
    silence = Silence(clock, 0, tuple)  # type: ignore[arg-type]
    clock.now = 1e9
    assert not silence.too_long()


def test_files_are_looked_at_only_where_nothing_else_was_heard() -> None:
    clock, looked = _Clock(), []
    silence = Silence(clock, 100, lambda: looked.append(clock.now) or len(looked) < 3)  # type: ignore[arg-type, func-returns-value]
    for clock.now in (50.0, 99.0):
        assert not silence.too_long()
    silence.heard()
    clock.now = 150.0
    assert not silence.too_long() and looked == [0.0]
    clock.now = 199.5
    assert silence.too_long() and looked == [0.0, 199.5]
