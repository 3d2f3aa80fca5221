"""`logs -f`: whichever way a line comes, over ssh or from the store, it is given once, and none is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

import pytest

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Stop, rfc3339
from spotheal.agent.protocol.errors import NotFound, Retryable
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.fleet.logs import follow
from spotheal.fleet.logs.logs import Follower, Line, Reader
from spotheal.fleet.logs.story import rounds
from spotheal.fleet.rehearsal.services.client import InMemoryS3
from spotheal.fleet.run import ssh
from spotheal.fleet.run.runs import Run

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)


class Clock:
    """Time that passes where somebody sleeps; `then` happens at its moments."""

    def __init__(self, then: dict[float, Any] | None = None) -> None:
        self.seconds, self._then = 0.0, sorted((then or {}).items())

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.seconds += seconds
        assert self.seconds < 600, "it never ended"
        while self._then and self._then[0][0] <= self.seconds:
            self._then.pop(0)[1]()
        return False


@pytest.fixture
def run() -> Run:
    return Run("cifar", "R", Store(InMemoryS3("bucket"), StoreUrl("bucket", "cifar/R")))


def ship(run: Run, instance: str, trainer: str = "", agent: list[str] | None = None) -> None:
    if trainer:
        run.store.put_bytes(LAYOUT.trainer_log(instance), trainer.encode())
    events = [{"timestamp": "2026-11-21T12:00:00Z", "level": "info", "event": event} for event in agent or []]
    if events:
        run.store.put_bytes(LAYOUT.agent_log(instance), "".join(json.dumps(e) + "\n" for e in events).encode())


class Stream:
    """What ssh gives: lines by instance, as a test lays them out."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._of, self._lines = reader, "", list[str]()
        self.closed = 0

    def open(self, instance: str, *lines: str) -> None:
        self._of, self._lines = instance, list(lines)
        self._reader.stream(instance)

    def give(self, *lines: str) -> None:
        self._lines += lines

    def look(self) -> None:
        return None

    def instance(self) -> str:
        return self._of

    def take(self) -> Iterator[Line]:
        lines, self._lines = self._lines, []
        for text in lines:
            line = self._reader.of_stream(self._of, text)
            if line is not None:
                yield line

    def close(self) -> None:
        self._of, self._lines = "", []
        self.closed += 1


def followed(run: Run, stream: Stream, reader: Reader, then: dict[float, Any]) -> list[str]:
    lines = Follower(run, reader, Clock(then), stream).lines()
    return [f"{line.instance[-1]} {line.source[0]} {line.text}" for line in lines]


def end(run: Run, at: float = -1000.0) -> None:
    run.store.write_status({"phase": "done", "heartbeat": rfc3339(NOW + timedelta(seconds=at))})


def test_what_came_over_ssh_is_not_given_again_from_the_store_and_what_did_not_is(run: Run) -> None:
    reader = Reader(run)
    stream = Stream(reader)
    stream.open("i-0a", "2026-11-21 12:00:00 info    started", "trainer | one", "trainer | two")
    then = {
        10.0: lambda: (ship(run, "i-0a", "one\ntwo\nthree\n", ["started", "notice"]), stream.close()),
        20.0: lambda: (ship(run, "i-0b", "four\n"), end(run)),
    }
    assert [
        "a a 2026-11-21 12:00:00 info    started", "a t one", "a t two",
        "a a 2026-11-21 12:00:00 info    notice", "a t three", "b t four",
    ] == followed(run, stream, reader, then)  # fmt: skip


def test_a_stream_begins_with_the_logs_first_line_and_repeats_nothing_that_the_store_gave(run: Run) -> None:
    ship(run, "i-0a", "one\ntwo\n", ["started"])
    reader = Reader(run)
    stream = Stream(reader)
    everything = ("2026-11-21 12:00:00 info    started", "trainer | one", "trainer | two", "trainer | three")
    then = {6.0: lambda: stream.open("i-0a", *everything), 12.0: lambda: end(run)}
    found = followed(run, stream, reader, then)
    assert ["a a 2026-11-21 12:00:00 info    started", "a t one", "a t two", "a t three"] == found


def test_lines_that_say_the_same_are_counted_not_merged(run: Run) -> None:
    reader = Reader(run)
    stream = Stream(reader)
    stream.open("i-0a", "trainer | .", "trainer | .")
    then = {10.0: lambda: (ship(run, "i-0a", ".\n.\n.\n"), stream.close()), 15.0: lambda: end(run)}
    assert ["a t ."] * 3 == followed(run, stream, reader, then)


def test_a_stream_that_breaks_and_begins_again_repeats_nothing(run: Run) -> None:
    reader = Reader(run)
    stream = Stream(reader)
    stream.open("i-0a", "trainer | one", "trainer | two")
    again = ("trainer | one", "trainer | two", "trainer | three")
    then = {6.0: stream.close, 12.0: lambda: stream.open("i-0a", *again), 18.0: lambda: end(run)}
    assert ["a t one", "a t two", "a t three"] == followed(run, stream, reader, then)


def test_an_agents_line_of_several_lines_is_the_same_by_both_ways(run: Run) -> None:
    event = {"timestamp": "2026-11-21T12:00:00Z", "level": "error", "event": "broken", "exception": "Trace\n  x\nE: y"}
    run.store.put_bytes(LAYOUT.agent_log("i-0a"), (json.dumps(event) + "\n").encode())
    reader = Reader(run)
    from_store = [line.text for line in reader.new_lines()]
    reader.stream("i-0a")
    assert [None] * 3 == [reader.of_stream("i-0a", text) for text in from_store]


def test_an_agents_line_whose_fields_are_written_otherwise_is_the_same(run: Run) -> None:
    ship(run, "i-0a", agent=["starting the trainer"])
    reader = Reader(run)
    assert 1 == len(list(reader.new_lines()))
    reader.stream("i-0a")
    written = "2026-11-21 12:00:00 info    starting the trainer  command=('python', 'train.py')"
    assert reader.of_stream("i-0a", written) is None


def test_a_line_that_is_half_in_the_store_is_given_when_it_is_whole(run: Run) -> None:
    ship(run, "i-0a", "one\ntw")
    reader = Reader(run)
    assert ["one"] == [line.text for line in reader.new_lines()]
    ship(run, "i-0a", "one\ntwo\n")
    assert ["two"] == [line.text for line in reader.new_lines()]


def test_only_the_source_that_is_asked_for_comes_by_either_way(run: Run) -> None:
    ship(run, "i-0a", "one\n", ["started"])
    reader = Reader(run, source="trainer")
    stream = Stream(reader)
    stream.open("i-0a", "2026-11-21 12:00:00 info    started", "trainer | one", "trainer | two")
    assert ["a t one", "a t two"] == followed(run, stream, reader, {6.0: lambda: end(run)})


def test_the_last_words_that_are_stored_after_the_end_is_recorded_are_waited_for(run: Run) -> None:
    end(run, at=0.0)  # a moment ago
    ship(run, "i-0a", "one\n")
    reader = Reader(run)
    found = followed(run, Stream(reader), reader, {4.0: lambda: ship(run, "i-0a", "one\nlast words\n")})
    assert ["a t one", "a t last words"] == found


def test_a_run_that_ended_long_ago_is_not_waited_for(run: Run) -> None:
    end(run)
    ship(run, "i-0a", "one\n")
    reader = Reader(run)
    clock = Clock()
    assert ["one"] == [line.text for line in Follower(run, reader, clock, None).lines()]
    assert 0.0 == clock.seconds


def test_a_store_that_is_away_for_a_moment_ends_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(run, "i-0a", "one\n")
    end(run)
    real, failures = Store.read_status, [Retryable("down")] * 2

    def read(store: Store) -> Any:
        if failures:
            raise failures.pop()
        return real(store)

    monkeypatch.setattr(Store, "read_status", read)
    reader = Reader(run)
    assert ["one"] == [line.text for line in Follower(run, reader, Clock(), None).lines()]


# ---------------------------------------------------------------------------------------------------- whom ssh follows
class FakeTail:
    made: ClassVar[list[FakeTail]] = []

    def __init__(self, connection: Any) -> None:
        self.instance, self.is_open, self.has_spoken, self.last_words = connection.host.instance, True, True, ""
        self.waiting: list[str] = []
        FakeTail.made.append(self)

    def lines(self) -> list[str]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def close(self) -> None:
        self.is_open = False


class FakeConnection:
    def __init__(self, session: Any, host: ssh.Host, say: Any, **_: Any) -> None:
        self.host = host

    def __enter__(self) -> FakeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def refusal(self, said: str = "") -> Retryable:
        return Retryable(f"{self.host.instance} takes no SSH yet")


@pytest.fixture
def over_ssh(run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    FakeTail.made = []
    up: list[ssh.Host] = []
    monkeypatch.setattr(ssh, "hosts", lambda *_: tuple(reversed(up)))
    monkeypatch.setattr(ssh, "Connection", FakeConnection)
    monkeypatch.setattr(follow, "Tail", FakeTail)
    said: list[str] = []
    clock = Clock()
    live = follow.OverSsh(None, run, Reader(run), clock, said.append)  # type: ignore[arg-type]
    return live, up, said, clock


def instance(name: str, state: str = "running") -> ssh.Host:
    return ssh.Host(name, state, "us-west-2a", "192.0.2.7", True, "ami-1", "", (), NOW)


def test_the_log_of_a_replacement_is_followed_when_the_one_before_is_gone(over_ssh: Any) -> None:
    live, up, _, _ = over_ssh
    live.look()
    assert "" == live.instance()
    up.append(instance("i-0a"))
    live.look()
    assert "i-0a" == live.instance()
    up[:] = [instance("i-0b", "pending")]
    live.look()
    assert ("", False) == (live.instance(), FakeTail.made[0].is_open)
    up[:] = [instance("i-0b")]
    over_ssh[3].seconds += 60
    live.look()
    assert "i-0b" == live.instance()


def test_an_instance_that_takes_no_ssh_is_said_once_and_tried_again_more_seldom(over_ssh: Any) -> None:
    live, up, said, clock = over_ssh
    up.append(instance("i-0a"))
    for _ in range(60):
        live.look()
        if FakeTail.made[-1].is_open:
            FakeTail.made[-1].is_open = FakeTail.made[-1].has_spoken = False  # ssh ended, and said nothing
        clock.seconds += 5
    assert ["note: i-0a takes no SSH yet; its lines come from the store, up to a minute late"] == said
    assert follow.TRIES_MAX < len(FakeTail.made) < 12
    assert "" == live.instance()


# ------------------------------------------------------------------------------------------------------------ --story
def test_the_story_of_a_machine_shows_each_action_and_what_had_changed(run: Run) -> None:
    first = "Observed(claim=None, volumes=(Volume(id='vol-1', tags={'a': 'b, c'}),), absent={'i-0': 3.0})"
    second = "Observed(claim=Claim(1), volumes=(Volume(id='vol-1', tags={'a': 'b, c'}),), absent={'i-0': 5.0})"
    looks = [{"observed": first, "action": "ClaimTerm(number=1)"}, {"observed": second, "action": "Wait(why='x')"}]
    run.store.put_json(LAYOUT.story("i-1"), {"desired": "Desired()", "story": looks})
    told = list(rounds(run))
    assert [(entry.number, entry.action) for entry in told] == [(1, "ClaimTerm(number=1)"), (2, "Wait(why='x')")]
    assert told[1].changes == {"claim": "Claim(1)"}, "and no duration, which grows in each round"


def test_a_run_without_a_story_says_when_there_is_one(run: Run) -> None:
    with pytest.raises(NotFound, match="no story of i-2") as fault:
        rounds(run, "i-2")
    assert "when its volume is mounted" in fault.value.next_step
