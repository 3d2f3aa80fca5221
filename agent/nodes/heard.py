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
        moment = self._clock.monotonic()
        self._watches = moment - self._looked <= CONFIRM_SECONDS
        self._looked = moment

    def age(self, name: str, time: str) -> float:
        """Seconds since `name` was heard of, whose newest word is of the moment `said` by its own clock."""
        moment = self._clock.monotonic()
        before, since, changed = self._seen.get(name, (time, moment, False))
        if before != time:
            since, changed = moment, self._watches
        self._seen[name] = (time, since, changed)
        if changed:
            return moment - since
        age = age_of(self._clock.now(), time)
        return max(moment - since, age if moment - since >= CONFIRM_SECONDS else min(age, ABSENT_SECONDS))

    def watched(self, name: str) -> float:
        """Seconds since `name` was first seen."""
        moment = self._clock.monotonic()
        _, since, _ = self._seen.setdefault(name, ("", moment, False))
        return moment - since


def age_of(current: datetime, time: str) -> float:
    try:
        return max(0.0, float((current - parse_rfc3339(time)).total_seconds()))
    except ValueError:
        return float("inf")
