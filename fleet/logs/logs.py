"""The logs of all instances of a run, from the store: those of terminated instances read like those of live ones.

An instance's lines reach the store every minute and at a notice; `follow` has the newest lines.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spotheal.agent.protocol.bounded_json import parse
from spotheal.agent.protocol.clock import Clock, parse_rfc3339
from spotheal.agent.protocol.errors import CredentialsEnded, NotFound, Retryable
from spotheal.agent.protocol.foreign_text import printable_lines
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.record.ledger import read_events
from spotheal.fleet.run import runs
from spotheal.fleet.run.store_documents import sensible

POLL_SECONDS = 5.0
LIVE_SECONDS = 0.2  # how often lines are taken from a stream that is open
QUIET_LOOKS = 2  # after the end, this many looks without a new line end the follower
FRESH_SECONDS = 90.0
_ENDS = frozenset(phase.value for phase in Phase if phase.is_end)
_TRAINER = "trainer | "
_AGENT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [a-z]+ +.*?(?=  |$)")
_KEY = re.compile(
    r"logs/(?P<instance>(i|batch)-[0-9A-Za-z-]+)/(?P<source>agent|trainer)\.(?P<number>\d+)\.(?:jsonl|log)"
)
_HIDDEN = {"timestamp", "level", "event", "job", "run", "instance", "zone", "term", "attempt"}


@dataclass(frozen=True)
class Segment:
    instance: str
    source: str
    number: int
    key: str
    size: int


@dataclass(frozen=True)
class Line:
    instance: str
    source: str  # agent, trainer
    text: str


@sensible
def select(run: runs.Run, *, attempt: int | None = None, instance: str = "") -> str:
    """The chosen instance, "" for all; NotFound if the run has no such attempt or instance."""
    instances = list(dict.fromkeys(segment.instance for segment in segments(run)))
    if attempt is not None:
        events = read_events((run.store.get_bytes(LAYOUT.ledger) or b"").decode(errors="replace"))
        starts = {int(e["attempt"]): str(e["instance"]) for e in events
                  if e["event"] == "trainer-started" and isinstance(e.get("attempt"), int)}  # fmt: skip
        if attempt not in starts:
            hint = (
                f"attempts so far: {', '.join(map(str, sorted(starts)))}"
                if starts
                else "the trainer has not started yet"
            )
            raise NotFound(f"run {run.id} has no attempt {attempt}", next_step=hint)
        return starts[attempt]
    if instance and instance not in instances:
        raise NotFound(
            f"run {run.id} has no logs of {instance}",
            next_step=f"there are logs of: {', '.join(instances) or 'none yet'}",
        )
    return instance


@sensible
def segments(run: runs.Run, instance: str = "") -> list[Segment]:
    """The log files in the store, oldest instance first, the agent's before the trainer's."""
    listing = []
    for key, size in run.store.sizes(LAYOUT.logs):
        match = _KEY.fullmatch(key)
        if match and instance in ("", match["instance"]):
            listing.append(Segment(match["instance"], match["source"], int(match["number"]), key, size))
    if len({segment.instance for segment in listing}) > 1:
        order = {str(launch.get("instance")): index for index, launch in enumerate(run.store.launches())}
    else:
        order = {}
    return sorted(
        listing,
        key=lambda item: (order.get(item.instance, len(order)), item.instance, item.source, item.number),
    )


class Reader:
    """New lines of the store. Each line is returned once, when it is complete.

    Lines that came over a stream are compared with those of the store by text and count: a line that the stream gave
    twice and the store holds three times is returned once more. So the order of the two sources does not matter.
    """

    def __init__(self, run: runs.Run, *, instance: str = "", source: str = "") -> None:
        self._run, self._instance, self._source = run, instance, source
        self._bodies: dict[str, tuple[int, list[str]]] = {}  # by key: the size when it was read, and its lines
        self._given: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._streams: dict[str, Counter[tuple[str, str]]] = {}

    def new_lines(self, but_of: str = "") -> Iterator[Line]:
        """The store's new lines, without those of the instance `but_of`, which a stream gives."""
        changed, lines = set[tuple[str, str]](), dict[tuple[str, str], list[str]]()
        for segment in segments(self._run, self._instance):
            place = (segment.instance, segment.source)
            if segment.instance == but_of or self._source not in ("", segment.source):
                continue
            size, stored = self._bodies.get(segment.key, (-1, []))
            if segment.size != size:
                stored = self._read(segment)
                self._bodies[segment.key] = (segment.size, stored)
                changed.add(place)
            lines.setdefault(place, []).extend(stored)
        for place, texts in lines.items():
            if place in changed:
                yield from self._missing(*place, texts)

    def stream(self, instance: str) -> None:
        """A stream of this instance's log begins, from its first line."""
        self._streams[instance] = Counter()

    def of_stream(self, instance: str, text: str) -> Line | None:
        """A line of the instance's own log; None if it was given before, or comes from another source."""
        source, message = ("trainer", text[len(_TRAINER) :]) if text.startswith(_TRAINER) else ("agent", text)
        if self._source not in ("", source):
            return None
        key = _identity(source, message)
        stream_counts = self._streams[instance]
        stream_counts[source, key] += 1
        given_counts = self._given[instance, source]
        if stream_counts[source, key] <= given_counts[key]:
            return None
        given_counts[key] = stream_counts[source, key]
        return Line(instance, source, message)

    def _missing(self, instance: str, source: str, lines: list[str]) -> Iterator[Line]:
        store_counts, given_counts = Counter[str](), self._given[instance, source]
        for text in lines:
            key = _identity(source, text)
            store_counts[key] += 1
            if store_counts[key] > given_counts[key]:
                given_counts[key] = store_counts[key]
                yield Line(instance, source, text)

    def _read(self, segment: Segment) -> list[str]:
        body = self._run.store.get_bytes(segment.key) or b""
        whole = body[: body.rfind(b"\n") + 1].decode(errors="replace").split("\n")[:-1]
        if segment.source == "trainer":
            return whole
        return [line for text in whole for line in _plain(text).split("\n")]

    def follow(self, clock: Clock) -> Iterator[Line]:
        """New lines of the store, across replacements, until the run has ended and its last line was returned."""
        yield from Follower(self._run, self, clock).lines()


class Live(Protocol):
    """A source of an instance's lines other than the store: `follow.OverSsh` is the one over ssh."""

    def look(self) -> None:
        """Open, close or change the stream; called every few seconds."""

    def instance(self) -> str:
        """The instance whose lines come from here, "" for none."""

    def take(self) -> Iterator[Line]: ...

    def close(self) -> None: ...


class Follower:
    """All new lines of a run until its end, over ssh if it connects, else from the store."""

    def __init__(self, run: runs.Run, reader: Reader, clock: Clock, live: Live | None = None) -> None:
        self._run, self._reader, self._clock, self._live = run, reader, clock, live

    def lines(self) -> Iterator[Line]:
        quiet = 0
        try:
            while quiet < QUIET_LOOKS:
                count, over = 0, False
                try:
                    status = self._run.store.read_status() or {}
                    over = str(status.get("phase")) in _ENDS and not self._is_replaced(status)
                    if self._live is not None:
                        self._live.look()
                    for line in self._once():
                        count += 1
                        yield line
                    if over and not self._is_fresh(status):
                        break
                except CredentialsEnded:
                    raise
                except Retryable:  # the network was gone for a moment: the missed lines come with the next look
                    over = False
                quiet = quiet + 1 if over and not count else 0
                yield from self._until_next_look()
        finally:
            if self._live is not None:
                self._live.close()
        yield from self._reader.new_lines()

    def _once(self) -> Iterator[Line]:
        yield from self._taken()
        yield from self._reader.new_lines("" if self._live is None else self._live.instance())

    def _is_replaced(self, status: Mapping[str, Any]) -> bool:
        return runs.goes_on(str(status.get("reason") or ""), self._heard_seconds(status))

    def _is_fresh(self, status: Mapping[str, Any]) -> bool:
        """Whether the run ended a moment ago: its instance stores its last lines after it has recorded the end."""
        silent = self._heard_seconds(status)
        return silent is not None and silent < FRESH_SECONDS

    def _heard_seconds(self, status: Mapping[str, Any]) -> float | None:
        try:
            return (self._clock.now() - parse_rfc3339(str(status.get("heartbeat")))).total_seconds()
        except ValueError:
            return None

    def _taken(self) -> Iterator[Line]:
        if self._live is not None:
            yield from self._live.take()

    def _until_next_look(self) -> Iterator[Line]:
        if self._live is None or not self._live.instance():
            self._clock.sleep(POLL_SECONDS)
            return
        until = self._clock.monotonic() + POLL_SECONDS
        while self._clock.monotonic() < until and self._live.instance():
            self._clock.sleep(LIVE_SECONDS)
            yield from self._live.take()


def _identity(source: str, text: str) -> str:
    """The part of a line by which it is compared: for the agent's, time and words, since its fields may be formatted
    differently."""
    match = _AGENT_LINE.match(text) if source == "agent" else None
    return match.group() if match else text


def _plain(line: str) -> str:
    """An agent's JSON line as readable text; any other line unchanged."""
    try:
        event: Any = parse(line)
    except ValueError:
        return line
    if not isinstance(event, dict):
        return line
    time = str(event.get("timestamp", ""))[:19].replace("T", " ")
    fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _HIDDEN and value is not None)
    text = f"{time} {event.get('level', '')!s:<7} {event.get('event', '')}"
    return printable_lines(f"{text}  {fields}" if fields else text)
