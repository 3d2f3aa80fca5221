"""Random histories of the whole agent: a time of faults, kills and notices, then a time without.

A failure names its seeds; `python tests/simulation/histories.py SEED` tells the story of one again.
`SPOTHEAL_HISTORIES=first:last` runs other seeds than the first thousand.
"""

from __future__ import annotations

import os

import pytest
from histories import try_to_tell

FIRST, LAST = (int(part) for part in os.environ.get("SPOTHEAL_HISTORIES", "0:1000").split(":"))
AT_ONCE = 50


@pytest.mark.parametrize("first", range(FIRST, LAST, AT_ONCE))
def test_random_histories_lose_nothing_and_come_to_their_end(first):
    told = [try_to_tell(seed) for seed in range(first, min(first + AT_ONCE, LAST))]
    assert not [f"python tests/simulation/histories.py {one.seed}: {one.fault}" for one in told if one.fault]


def test_a_history_is_repeated_by_its_seed():
    assert try_to_tell(4) == try_to_tell(4)
