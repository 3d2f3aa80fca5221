"""Random histories of the whole agent: a time of faults, kills and notices, then a time without.

A failure names its seeds; `python tests/simulation/histories.py SEED` tells the story of one again.
`SPOTHEAL_HISTORIES=first:last` runs other seeds than the first thousand; half of them are in the file beside this one,
so that two processes share them.
"""

from __future__ import annotations

import pytest
from histories import batches, faults_in, try_to_tell

BROKE_ONCE = (1074, 3544, 7505, 30052)  # what they found is in the tests of test_simulated_life.py, too


@pytest.mark.parametrize("seeds", batches(0), ids=str)
def test_random_histories_lose_nothing_and_come_to_their_end(seeds):
    assert [] == faults_in(seeds)


def test_histories_that_broke_once_hold():
    assert [] == faults_in(BROKE_ONCE)


def test_a_history_is_repeated_by_its_seed():
    assert try_to_tell(4) == try_to_tell(4)
