"""Signs of life of a trainer: a report of progress, a line of output, a checkpoint that changed.

A trainer that hangs (a deadlock, a collective that waits for a rank that is gone, a loader's worker that died) costs
what one that trains costs, and nothing else would end it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from spotheal.agent.protocol.clock import Clock


class Silence:
    """`seconds_max` 0: never too long. `files` gives what changes when a checkpoint is written; walking large folders
    costs, so it is asked only where nothing else was heard."""

    def __init__(self, clock: Clock, seconds_max: float, files: Callable[[], Hashable]) -> None:
        self._clock, self._seconds_max, self._files = clock, seconds_max, files
        self._heard = clock.monotonic()
        self._mark = files() if seconds_max else None

    def heard(self) -> None:
        """From any thread."""
        self._heard = self._clock.monotonic()

    def too_long(self) -> bool:
        """Whether nothing at all was heard for `seconds_max`."""
        if not self._seconds_max or self._clock.monotonic() - self._heard < self._seconds_max:
            return False
        mark, before = self._files(), self._mark
        if mark != before:
            self._mark = mark
            self.heard()
            return False
        return True
