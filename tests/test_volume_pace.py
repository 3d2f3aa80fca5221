"""When a pending snapshot is looked at again."""

from __future__ import annotations

import pytest

from spotheal.agent.volume.pace import POLL_SECONDS, Pace


@pytest.mark.parametrize("whole", [20.0, 91.0, 333.3, 600.0, 10800.0])
@pytest.mark.parametrize("first", [0.4, 2.0, 7.0])
def test_even_progress_is_met_within_two_seconds_of_its_end_and_never_looked_at_too_often(whole, first):
    pace, elapsed, gaps = Pace(), first, []
    while elapsed < whole:
        pace.seen(elapsed, int(100 * elapsed / whole))
        gaps.append(pace.seconds_to_next(elapsed))
        elapsed += gaps[-1]
    assert min(gaps) >= POLL_SECONDS
    assert max(gaps) < 2 * POLL_SECONDS
    assert elapsed - whole <= (2.5 if 60 < whole < 3600 else POLL_SECONDS)


@pytest.mark.parametrize("percents", [(0, 0, 0, 99, 99), (50, 50, 50, 50, 50), (10, 90, 20, 0, 100), (-3, 400, 7, 7)])
def test_uneven_progress_is_polled_every_five_seconds(percents):
    pace = Pace()
    for number, percent in enumerate(percents, start=1):
        pace.seen(40.0 * number, percent)
    assert POLL_SECONDS <= pace.seconds_to_next(200.0) < 2 * POLL_SECONDS


def test_a_clock_that_goes_backwards_foretells_nothing():
    pace = Pace()
    pace.seen(-5.0, 40)
    assert POLL_SECONDS == pace.seconds_to_next(-5.0)
