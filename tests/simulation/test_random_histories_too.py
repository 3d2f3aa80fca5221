"""The other half of the random histories; see the file beside this one."""

from __future__ import annotations

import pytest
from histories import batches, faults_in


@pytest.mark.parametrize("seeds", batches(1), ids=str)
def test_more_random_histories_lose_nothing_and_come_to_their_end(seeds):
    assert [] == faults_in(seeds)
