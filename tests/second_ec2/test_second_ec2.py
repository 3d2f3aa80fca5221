"""Two EC2s by two authors: healing, handover, release and retention keep their promises on one that the authors of the
rehearsal's rule book have not written.

`SPOTHEAL_LIVES=first:last` lives others than the first few; a failure tells its seed and the end of its story, and
`python tests/second_ec2/second_world.py SEED` all of it.
"""

from __future__ import annotations

import os

import pytest
from second_world import Broken, World

from spotheal.agent.volume import plan
from spotheal.agent.volume.seen import Observed, Source

FIRST, LAST = (int(each) for each in os.environ.get("SPOTHEAL_LIVES", "0:12").split(":"))


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_random_lives_on_a_second_ec2_keep_every_promise(seed: int) -> None:
    World(seed).run()


def test_a_life_is_repeated_by_its_seed() -> None:
    first, again = World(1), World(1)
    first.run()
    again.run()
    assert first.story == again.story


def test_the_second_ec2_sees_a_living_holder_being_robbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: without the wait for its release two machines write."""

    def always(seen: Observed, source: Source | None) -> bool:
        return True

    monkeypatch.setattr(plan, "_has_released", always)
    with pytest.raises(Broken, match="I2"):
        for seed in range(20):
            World(seed).run()
