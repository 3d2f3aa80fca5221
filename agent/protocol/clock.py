"""Time as a thing that is passed in, so that a test can own it.

Durations come from `monotonic`, which no jump of the wall clock moves; `now` is only for what people and AWS read.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone
from typing import Protocol


class Stop(Protocol):
    """What a sleep can be cut short by: a `threading.Event`, or the simulation's own."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Clock(Protocol):
    def now(self) -> datetime:
        """The wall clock, UTC, aware."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never jumps."""
        ...

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        """Wait `seconds`, or less where `until` is set; returns whether `until` is set."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        if until is None:
            time.sleep(max(0.0, seconds))
            return False
        return until.wait(max(0.0, seconds))


class Timeout:
    """The end of a wait, `seconds_max` after it began; None never ends."""

    def __init__(self, clock: Clock, seconds_max: float | None) -> None:
        self._clock = clock
        self._end = float("inf") if seconds_max is None else clock.monotonic() + seconds_max

    @property
    def is_over(self) -> bool:
        return self._clock.monotonic() >= self._end

    def sleep(self, seconds: float) -> None:
        """Wait `seconds`, or what remains if that is less: a wait with --timeout 20s once took 25 s."""
        self._clock.sleep(max(0.0, min(seconds, self._end - self._clock.monotonic())))


def never() -> Stop:
    """A stop that is never set."""
    return threading.Event()


class AnyOf:
    """A stop that is set when one of `stops` is."""

    _LOOK_SECONDS = 0.2

    def __init__(self, *stops: Stop) -> None:
        self._stops = stops

    def is_set(self) -> bool:
        return any(stop.is_set() for stop in self._stops)

    def wait(self, timeout: float | None = None) -> bool:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (seconds := until - time.monotonic()) > 0:
            self._stops[0].wait(min(seconds, self._LOOK_SECONDS))
        return self.is_set()


def rfc3339(moment: datetime) -> str:
    """`2026-11-21T08:00:00Z`: UTC, whole seconds, as AWS writes it."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_rfc3339(text: str) -> datetime:
    """The moment an RFC 3339 string names; ValueError where it is none or has no zone."""
    moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    try:
        return moment.astimezone(timezone.utc)
    except OverflowError as fault:  # the year 1 with a zone east of ours: a trainer writes any time it likes
        raise ValueError(f"{text!r} lies outside of the calendar") from fault
