"""What a run has lost: attempts that began from nothing, and files that a later machine does not have. Pure.

A rehearsal and a real run are judged by the same rules: a rehearsal by what it sees from outside, a real run by its
ledger (`trainer-started`, `trainer-resumed`, `trainer-ended`, `predecessor`, `predecessor-files`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

_SHOWN = 3


@dataclass(frozen=True)
class Attempt:
    """One start of the trainer. Steps are None if nobody knows them."""

    name: str  # for a person: the instance, and which attempt on it
    instance: str = ""
    resumed_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None


@dataclass(frozen=True)
class FilesLost:
    """Files that `instance` had when it went and `successor` had not when its trainer started; `more` beyond them."""

    instance: str
    successor: str
    files: tuple[str, ...]
    more: int = 0

    def __str__(self) -> str:
        hidden = max(0, len(self.files) - _SHOWN) + self.more
        return (
            f"{', '.join(self.files[:_SHOWN])}{f' and {hidden} more' if hidden else ''}: written on {self.instance},"
            f" missing when the trainer started on {self.successor}; write below $SPOTHEAL_CHECKPOINT_DIR"
        )


@dataclass(frozen=True)
class FilesWritten:
    """What an interrupted attempt had written, as the next machine found it recorded; `more` beyond `files`."""

    attempt: int | None
    instance: str
    files: tuple[str, ...]
    more: int = 0


def from_nothing(attempts: Iterable[Attempt]) -> Iterator[str]:
    """A line for each attempt that began at step 0 although the one before it had gained steps."""
    stepped = [attempt for attempt in attempts if attempt.last_step]
    for before, after in pairwise(stepped):
        if after.resumed_step == 0:
            cure = (
                "it had saved nothing by then: save more often, and at SIGTERM"
                if before.saved_step is None
                else "load the newest checkpoint at the start, or name a `resume_command`"
            )
            yield f"{after.name} began at step 0, although {before.name} had come to {before.last_step}; {cure}"


def attempts_of(events: Iterable[Mapping[str, Any]], step_now: int | None = None) -> list[Attempt]:
    """The attempts that a ledger tells of; `step_now`: of the one that runs now, by its status."""
    attempts: list[Attempt] = []
    ended = True
    for event in events:
        kind, instance = event.get("event"), str(event.get("instance", ""))
        if kind == "trainer-started":
            name = f"attempt {event.get('attempt')} on {instance}"
            attempts.append(Attempt(name, instance, _step(event, "resumed_step")))
            ended = False
        elif kind == "trainer-resumed" and attempts:
            attempts[-1] = replace(attempts[-1], resumed_step=_step(event, "resumed_step"))
        elif kind == "trainer-ended" and attempts:
            saved, last = _step(event, "saved_step"), _step(event, "last_step")
            attempts[-1] = replace(attempts[-1], last_step=last, saved_step=saved)
            ended = True
        elif kind == "predecessor" and attempts and not ended:  # killed: it said nothing itself
            attempts[-1] = replace(attempts[-1], last_step=_step(event, "last_step"))
            ended = True
    if attempts and not ended:
        attempts[-1] = replace(attempts[-1], last_step=step_now)
    return attempts


def lost_work(events: Iterable[Mapping[str, Any]], step_now: int | None = None) -> tuple[str, ...]:
    """All that the ledger of a real run tells of it, a line each."""
    events = list(events)
    lost = [
        FilesLost(str(event.get("predecessor", "")), str(event.get("instance", "")), *_files(event, "missing"))
        for event in events
        if event.get("event") == "predecessor-files" and event.get("missing")
    ]
    return (*from_nothing(attempts_of(events, step_now)), *map(str, lost))


def files_written(events: Iterable[Mapping[str, Any]]) -> tuple[FilesWritten, ...]:
    """What each interrupted attempt wrote, as far as the machine after it told."""
    return tuple(
        FilesWritten(_step(event, "attempt"), str(event.get("predecessor", "")), *_files(event, "written"))
        for event in events
        if event.get("event") == "predecessor-files" and event.get("written")
    )


def _files(event: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], int]:
    names = event.get(key)
    files = tuple(str(name) for name in names) if isinstance(names, list) else ()
    return files, max(0, (_step(event, f"{key}_count") or 0) - len(files))


def _step(event: Mapping[str, Any], key: str) -> int | None:
    value = event.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
