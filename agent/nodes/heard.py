"""How long ago the machines of a run were heard of, by a clock of our own."""

from __future__ import annotations

from datetime import datetime

from spotheal.agent.nodes.plan import ABSENT_SECONDS, BEAT_SECONDS
from spotheal.agent.protocol.clock import Clock, parse_rfc3339

CONFIRM_SECONDS = 4 * BEAT_SECONDS  # whoever is no longer heard of by its own clock is watched for so long first


class Heard:
    """How long ago machines were heard of, whatever their clocks say: what changes while we look was written just now.

    Of two machines whose clocks differ by ten minutes one would else be ended by the other, or never be counted.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float, bool]] = {}  # what it said, since when, whether that was seen to change
        self._looked, self._watches = float("-inf"), False

    def look(self) -> None:
        """A look at all of them begins. What has changed since one that was long ago may have changed long ago."""
        now = self._clock.monotonic()
        self._watches = now - self._looked <= CONFIRM_SECONDS
        self._looked = now

    def age(self, name: str, said: str) -> float:
        """Seconds since `name` was heard of, whose newest word is of the moment `said` by its own clock."""
        now = self._clock.monotonic()
        before, since, changed = self._seen.get(name, (said, now, False))
        if before != said:
            since, changed = now, self._watches
        self._seen[name] = (said, since, changed)
        if changed:
            return now - since
        told = age_of(self._clock.now(), said)
        return max(now - since, told if now - since >= CONFIRM_SECONDS else min(told, ABSENT_SECONDS))

    def watched(self, name: str) -> float:
        """Seconds since `name` was first seen."""
        now = self._clock.monotonic()
        _, since, _ = self._seen.setdefault(name, ("", now, False))
        return now - since


def age_of(now: datetime, said: str) -> float:
    try:
        return max(0.0, float((now - parse_rfc3339(said)).total_seconds()))
    except ValueError:
        return float("inf")
