"""The one way to call something again: by our clock, within its bounds, and cut short by the machine's end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from money_world import Hours

from spotheal.agent.protocol.errors import Fatal, Interrupted, Retryable, SpothealError
from spotheal.agent.protocol.retrying import back_off, until_it_works


class Told:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, line: str, **fields: Any) -> None:
        self.lines.append(("warning", line, fields))

    def error(self, line: str, **fields: Any) -> None:
        self.lines.append(("error", line, fields))


def failing(times: int, error: SpothealError) -> Callable[[], int]:
    """Fails so often, then returns the number of its calls."""
    calls = 0

    def act() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error
        return calls

    return act


def again(act: Callable[[], int], clock: Hours, **options: Any) -> int:
    settings = {"passes": lambda error: isinstance(error, Retryable), "pause": lambda tries: 2.0**tries, **options}
    return until_it_works(act, clock, **settings)


def test_it_is_called_until_it_works_with_the_pauses_that_were_asked_for() -> None:
    clock = Hours()
    assert again(failing(3, Retryable("slow")), clock) == 4
    assert clock.monotonic() == 2 + 4 + 8


def test_the_pause_can_be_the_same_each_time() -> None:
    clock = Hours()
    assert until_it_works(failing(3, Retryable("slow")), clock, pause=5.0) == 4
    assert clock.monotonic() == 15


def test_an_error_is_told_once_and_again_if_it_changes_and_a_refusal_as_an_error() -> None:
    log, answers = Told(), [Retryable("slow"), Retryable("slow"), Fatal("no", next_step="allow it"), Retryable("slow")]

    def act() -> None:
        if answers:
            raise answers.pop(0)

    until_it_works(act, Hours(), pause=2.0, passes=SpothealError, log=log, line="trying again")
    assert log.lines == [
        ("warning", "trying again", {"error": "slow", "after": 2.0}),
        ("error", "trying again", {"error": "no", "after": 2.0, "cure": "allow it"}),
        ("warning", "trying again", {"error": "slow", "after": 2.0}),
    ]


def test_pauses_that_double_end_at_a_minute() -> None:
    assert [back_off(tries) for tries in (1, 2, 3, 6, 7, 2000)] == [1, 2, 4, 32, 60, 60]


def test_what_does_not_pass_is_raised_at_once() -> None:
    clock = Hours()
    with pytest.raises(Fatal, match="no"):
        again(failing(1, Fatal("no")), clock)
    assert clock.monotonic() == 0


def test_the_last_error_is_raised_after_the_last_try_and_no_pause_follows_it() -> None:
    clock = Hours()
    with pytest.raises(Retryable, match="slow"):
        again(failing(9, Retryable("slow")), clock, tries_max=3)
    assert clock.monotonic() == 2 + 4


def test_no_try_is_made_whose_pause_goes_beyond_the_time() -> None:
    clock = Hours()
    with pytest.raises(Retryable):
        again(failing(9, Retryable("slow")), clock, seconds_max=7.0)
    assert clock.monotonic() == 2 + 4


def test_a_machine_that_goes_away_is_an_interruption() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        again(failing(1, Retryable("slow")), Hours(), stop=stop)


def test_an_error_of_python_is_none_of_ours_and_is_raised_at_once() -> None:
    def act() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        again(act, Hours())
