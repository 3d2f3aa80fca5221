"""The logs of all instances of a run, from the store: those that are gone read like those that live.

What an instance wrote reaches the store every minute and at a notice; `tail -f` over ssh is for those who cannot wait.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spotheal.agent.clock import Clock
from spotheal.agent.errors import NotFound, Retryable
from spotheal.agent.ledger import read_events
from spotheal.agent.names import LAYOUT, Phase
from spotheal.fleet import runs

POLL_SECONDS = 5.0
_KEY = re.compile(r"logs/(?P<instance>i-[0-9a-f]+)/(?P<source>agent|trainer)\.(?P<number>\d+)\.(?:jsonl|log)")
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


def select(run: runs.Run, *, attempt: int | None = None, instance: str = "") -> str:
    """The instance that is meant, "" for all; NotFound where the run has no such one."""
    known = list(dict.fromkeys(segment.instance for segment in segments(run)))
    if attempt is not None:
        events = read_events((run.store.get_bytes(LAYOUT.ledger) or b"").decode(errors="replace"))
        starts = {int(e["attempt"]): str(e["instance"]) for e in events
                  if e["event"] == "trainer-started" and isinstance(e.get("attempt"), int)}  # fmt: skip
        if attempt not in starts:
            said = (
                f"attempts so far: {', '.join(map(str, sorted(starts)))}"
                if starts
                else "the trainer has not started yet"
            )
            raise NotFound(f"run {run.id} has no attempt {attempt}", next_step=said)
        return starts[attempt]
    if instance and instance not in known:
        raise NotFound(
            f"run {run.id} has no logs of {instance}", next_step=f"there are logs of: {', '.join(known) or 'none yet'}"
        )
    return instance


def segments(run: runs.Run, instance: str = "") -> list[Segment]:
    """What the store holds, oldest instance first, the agent's before the trainer's."""
    found = []
    for key, size in run.store.sizes(LAYOUT.logs):
        match = _KEY.fullmatch(key)
        if match and instance in ("", match["instance"]):
            found.append(Segment(match["instance"], match["source"], int(match["number"]), key, size))
    if len({one.instance for one in found}) > 1:
        order = {str(launch.get("instance")): index for index, launch in enumerate(run.store.launches())}
    else:
        order = {}
    return sorted(found, key=lambda one: (order.get(one.instance, len(order)), one.instance, one.source, one.number))


class Reader:
    """Reads on where it stopped. A line is given when it is whole."""

    def __init__(self, run: runs.Run, *, instance: str = "", source: str = "") -> None:
        self._run, self._instance, self._source = run, instance, source
        self._read: dict[str, int] = {}  # bytes given so far, by key

    def new_lines(self) -> Iterator[Line]:
        for segment in segments(self._run, self._instance):
            if self._source not in ("", segment.source) or segment.size <= self._read.get(segment.key, 0):
                continue
            body = self._run.store.get_bytes(segment.key) or b""
            start = self._read.get(segment.key, 0)
            end = body.rfind(b"\n") + 1
            self._read[segment.key] = max(start, end)
            for raw in body[start:end].splitlines():
                text = raw.decode(errors="replace")
                yield Line(segment.instance, segment.source, _plain(text) if segment.source == "agent" else text)

    def follow(self, clock: Clock) -> Iterator[Line]:
        """Lines as they reach the store, across replacements, until the run has ended and all was given."""
        while True:
            try:
                ended = has_ended(self._run)
                yield from self.new_lines()
                if ended:
                    return
            except Retryable:  # the network was gone for a moment: what was missed comes with the next look
                pass
            clock.sleep(POLL_SECONDS)


def has_ended(run: runs.Run) -> bool:
    phase = (run.store.read_status() or {}).get("phase")
    return any(phase == one.value for one in Phase if one.is_end)


def _plain(line: str) -> str:
    """An agent's JSON line as people read it; anything else as it is."""
    try:
        event: Any = json.loads(line)
    except ValueError:
        return line
    if not isinstance(event, dict):
        return line
    time = str(event.get("timestamp", ""))[:19].replace("T", " ")
    fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _HIDDEN and value is not None)
    return f"{time} {event.get('level', '')!s:<7} {event.get('event', '')}" + (f"  {fields}" if fields else "")
