"""The whole life of a run, cut short by a crash before or after each call, and by a second one in the life after it.

A failure names the crash; `python tests/simulation/crashes.py STORY KIND CRASH` tells the story of it again.
`SPOTHEAL_CRASHES=0` tries every crash of one, else a share.
"""

from __future__ import annotations

import os
import zlib

import pytest
from crashes import KINDS, STORIES, fault_of, singles, some_pairs, tell, tell_in
from simulated_life import LifeRegion

SHARE = int(os.environ.get("SPOTHEAL_CRASHES", "16"))
PAIRS = int(os.environ.get("SPOTHEAL_PAIRS", "4"))  # of each story and kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("story", STORIES)
def test_a_run_survives_a_crash_before_and_after_each_call(story, kind):
    every = max(1, SHARE)
    cases = list(singles(story, kind))[zlib.crc32(f"{story} {kind}".encode()) % every :: every]
    assert cases
    assert not [f"{case}: {fault}" for case in cases if (fault := fault_of(case))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("story", STORIES)
def test_a_run_survives_a_second_crash_in_the_life_that_the_first_one_made(story, kind):
    assert not [f"{case}: {fault}" for case in some_pairs(story, kind, PAIRS, 0) if (fault := fault_of(case))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("story", ["first run, same zone", "first run, other zone"])
def test_a_volume_whose_first_mkfs_was_cut_short_is_formatted_again(story, kind):
    calls = tell(story)
    again = tell(story, kind, {calls.index("mkfs"): "after"})
    assert (calls.count("mkfs"), again.count("mkfs"), again.count("mkfs ends")) == (1, 2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_volume_whose_first_mkfs_ended_is_mounted_by_the_next_agent(kind):
    story = "first run, same zone"
    calls = tell(story, kind, {tell(story).index("mkfs ends"): "after"})
    assert calls.count("mkfs") == 1


@pytest.mark.parametrize(
    ("call", "fate"),
    [
        ("umount", "before"),
        ("umount", "after"),
        ("create_snapshot", "before"),
        ("create_snapshot", "after"),
        ("detach_volume", "before"),
    ],
)
def test_an_agent_that_is_killed_within_its_handover_finishes_it(call, fate):
    """The volume is free before AWS ends the machine, and there is one handover of the term."""
    story = "notice, same zone"
    calls = tell(story)
    number = calls.index(call, calls.index("umount"))
    region = tell_in(LifeRegion, story, "agent", {number: fate})
    first = next(iter(region.machines))
    mine = [name for machine, name in region.calls[number:] if machine == first]
    asked = {("create_snapshot", "before"): 2, ("detach_volume", "before"): 0}  # one of the two never reached EC2
    assert mine.count("create_snapshot") == asked.get((call, fate), 1), mine
    assert "detach_volume" in mine
    assert sum(f"{first} handed over" in line and "'detached': True" in line for line in region.story) == 1
    handovers = [one for one in region.ledger() if one["event"] == "handover" and one["instance"] == first]
    assert handovers[-1]["saved_step"] == 4


def test_a_story_is_the_same_each_time():
    assert tell("notice, other zone") == tell("notice, other zone")
