"""The whole life of a run, cut short by a crash before or after each call, and by a second one in the life after it.

A failure names the crash; `python tests/simulation/crashes.py STORY KIND CRASH` tells the story of it again.
`SPOTHEAL_CRASHES=0` tries every crash of one, else a share.
"""

from __future__ import annotations

import os
import zlib

import pytest
from crashes import KINDS, STORIES, fault_of, singles, some_pairs, tell

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


def test_a_story_is_the_same_each_time():
    assert tell("notice, other zone") == tell("notice, other zone")
