"""`limits.hours` and `limits.dollars`: told at 80 %, ended at 100 %, whatever instance the run is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spotheal.agent.money.budget import LOOK_SECONDS_MAX, WARN_SHARE, Budget
from spotheal.agent.money.messages import limit_message
from spotheal.agent.money.notify import Message
from spotheal.agent.protocol.clock import Clock, Stop, parse_rfc3339
from spotheal.agent.protocol.errors import SpothealError

_RETRY_SECONDS = 60.0


@dataclass
class Limits:
    """`hours` and `dollars` 0: none. Both count from `requested_at`; `tell` may take its time, and not be called back.

    A dollar limit that cannot be counted, for the store is not to be reached, is tried again every minute.
    """

    hours: float
    dollars: float
    requested_at: str
    budget: Budget
    clock: Clock
    log: Any
    tell: Callable[[Message], None]
    _told: set[str] = field(default_factory=set)
    _first: tuple[float, float] | None = None  # seconds since the request at the first look, and its moment

    @property
    def any(self) -> bool:
        return bool(self.dollars or (self.hours and self.requested_at))

    def watch(self, over: Stop, stop_for_limit: Callable[[str], None]) -> None:
        """The thread: until the limit is reached or `over` is set."""
        while True:
            reason, pause = self.look()
            if reason:
                stop_for_limit(reason)
                return
            if self.clock.sleep(pause, until=over):
                return

    def hours_reached(self) -> str:
        """Why the run must end now for its hours, or ""."""
        return self._look_at_hours()[0]

    def look(self) -> tuple[str, float]:
        """Why the run must end now, or ""; and when to look again."""
        reason, pause = self._look_at_hours()
        if reason or not self.dollars:
            return reason, pause
        try:
            spent, rate = self.budget.spent()
        except SpothealError as error:
            self.log.warning("limits.dollars cannot be counted now; trying again", error=error.message)
            return "", min(pause, _RETRY_SECONDS)
        if spent >= self.budget.limit:
            return self.budget.reason(spent), 0.0
        if spent >= self.budget.limit * WARN_SHARE:
            text = f"about ${spent:.2f} of limits.dollars = {self.budget.limit:f} are spent, at ${rate:.2f} an hour"
            self._tell_once("dollars", text)
        return "", min(pause, self.budget.pause(spent, rate))

    def _look_at_hours(self) -> tuple[str, float]:
        if not self.hours or not self.requested_at:
            return "", LOOK_SECONDS_MAX
        elapsed = self._seconds_gone()
        end, warn = self.hours * 3600, self.hours * 3600 * float(WARN_SHARE)
        if elapsed >= end:
            return f"limits.hours = {self.hours:g} is reached", 0.0
        if elapsed >= warn:
            self._tell_once("hours", f"{elapsed / 3600:.1f} of limits.hours = {self.hours:g} are over")
            return "", min(LOOK_SECONDS_MAX, end - elapsed)
        return "", min(LOOK_SECONDS_MAX, warn - elapsed)

    def _seconds_gone(self) -> float:
        """Since the request. A wall clock that jumps, or was wrong before the time server was asked, ends no run: what
        it says now counts as far as the monotonic clock has gone since the first look."""
        by_wall = (self.clock.now() - parse_rfc3339(self.requested_at)).total_seconds()
        if self._first is None:
            self._first = by_wall, self.clock.monotonic()
        seconds, at = self._first
        return max(0.0, min(by_wall, seconds + self.clock.monotonic() - at))

    def _tell_once(self, limit: str, text: str) -> None:
        """Once an instance here, once a run by its mark in the store."""
        if limit not in self._told:
            self._told.add(limit)
            self.log.warning("80 % of a limit is used up", limit=f"limits.{limit}", why=text)
            self.tell(limit_message(limit, self.requested_at, text))

