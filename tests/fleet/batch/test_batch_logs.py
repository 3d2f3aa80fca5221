"""Log streams of containers, told line by line: none lost and none twice, however CloudWatch deals its pages out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spotheal.fleet.batch.tail import QUIET_ROUNDS, Tail
from spotheal.fleet.rehearsal.batch.batch import InMemoryBatch
from spotheal.fleet.rehearsal.batch.logs import CloudWatchLogs
from spotheal.fleet.run.batch_jobs import Stream

GROUP = "/spotheal/batch/j"


class Watched:
    """Streams of one group, and a tail of them. `throttled` names the calls to refuse, by their number."""

    def __init__(self) -> None:
        self.calls, self.throttled = 0, range(0)
        self.logs = CloudWatchLogs("arn", self._refuses)
        self.logs.call("CreateLogGroup", {"logGroupName": GROUP})
        batch: Any = SimpleNamespace(logs=self.logs)
        session: Any = SimpleNamespace(client=lambda service: InMemoryBatch(batch, service))
        self.tail = Tail(session, GROUP)

    def _refuses(self, operation: str) -> bool:
        self.calls += 1
        return self.calls in self.throttled

    def write(self, index: int, *lines: str) -> None:
        self.logs.write(GROUP, f"stream-{index}", 0, list(lines))

    def see(self, count: int, *, ended: bool = False) -> None:
        self.tail.see([Stream(f"stream-{index}", index, 1) for index in range(count)], ended=ended)

    def all_now(self) -> list[str]:
        return list(self._all_now())

    def _all_now(self) -> Iterator[str]:
        while (found := [line.text for line in self.tail.read()]) or self.tail.is_behind:
            yield from found


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize("empty", [0, 1, 5])
def test_empty_pages_are_no_end_of_a_stream(watched: Watched, empty: int) -> None:
    """GetLogEvents: empty pages "don't necessarily mean that pagination is finished"."""
    watched.logs.empty_pages = empty
    lines = [f"line {number}" for number in range(250)]
    watched.write(0, *lines)
    watched.see(1, ended=True)
    assert watched.all_now() == lines
    for _ in range(QUIET_ROUNDS):
        assert list(watched.tail.read()) == []
    assert watched.tail.is_over


def test_lines_behind_empty_pages_come_before_a_stream_that_has_ended_is_over(watched: Watched) -> None:
    watched.logs.empty_pages = 25  # more than are asked for in a visit
    watched.write(0, "last words")
    watched.see(1, ended=True)
    told: list[str] = []
    for _ in range(20):
        told += [line.text for line in watched.tail.read()]
        if watched.tail.is_over:
            break
    assert told == ["last words"]


def test_the_last_of_many_silent_streams_is_read_too(watched: Watched) -> None:
    """A round has calls for some of them; those that say nothing must not hide the others."""
    watched.see(150)
    watched.write(149, "here")
    assert watched.all_now() == ["here"]
    assert watched.all_now() == []
    watched.write(70, "later")
    assert watched.all_now() == ["later"]


def test_a_throttled_call_loses_nothing_and_is_known(watched: Watched) -> None:
    for index in range(3):
        watched.write(index, f"of {index}")
    watched.see(3)
    watched.throttled = range(watched.calls + 2, watched.calls + 4)
    first = [line.text for line in watched.tail.read()]
    assert watched.tail.is_throttled and watched.tail.is_behind
    assert sorted([*first, *watched.all_now()]) == ["of 0", "of 1", "of 2"]


@pytest.mark.parametrize("moments", [(0, 0), (1000, 1000), (1000, 2000)])
def test_a_stream_that_was_silent_for_longer_than_a_token_lives_loses_no_line(
    watched: Watched, moments: tuple[int, int]
) -> None:
    """CloudWatch forgets a token after 24 hours and refuses it with InvalidParameterException."""
    before, after = moments
    watched.logs.write(GROUP, "stream-0", before, [f"before {number}" for number in range(150)])
    watched.see(1)
    assert len(watched.all_now()) == 150
    for _ in range(2):
        watched.logs.tokens += 1
        assert watched.all_now() == []
    watched.logs.tokens += 1
    watched.logs.write(GROUP, "stream-0", after, ["after 1", "after 2"])
    assert watched.all_now() == ["after 1", "after 2"]
    watched.see(1, ended=True)
    assert watched.all_now() == []
