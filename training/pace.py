"""When to save: every N steps, every N seconds, or as often as is cheap enough."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spotheal.agent.protocol.contract import BETWEEN_INTERRUPTIONS

OVERHEAD_MAX = 0.01
SECONDS_BETWEEN = 7200.0  # between interruptions, if they were not counted
SECONDS_MIN, SECONDS_MAX = 2.0, 900.0
SECONDS_FIRST = 30.0  # until a cost has been measured
# The cost of a tiny save: its threads wake up on processors that training fills. Their own time, which can be
# measured, is a tenth of it; measured on two cores by the training's loss.
COST_SECONDS_MIN = 0.01
FINAL_SAVE_FACTOR, FINAL_SAVE_SECONDS = 1.5, 5.0  # kept free before the deadline
NOTICE_SECONDS = 60.0  # for a final save: two minutes, less the agent's 40 s and the detection


@dataclass(frozen=True)
class Every:
    """`steps` or `seconds`; both 0: automatic."""

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Every:
        """`100` (steps), `30s`, `5m`, `1h` or `auto`. ValueError otherwise."""
        if text == "auto":
            return cls()
        match = re.fullmatch(r"([1-9]\d*)(s|m|h)?", str(text))
        if not match:
            raise ValueError(f"{text!r} is neither a number of steps (100), nor a time (30s, 5m, 1h), nor auto")
        number, unit = int(match[1]), match[2]
        return cls(seconds=number * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit]) if unit else cls(steps=number)


def best_interval(cost_seconds: float, between_interruptions_seconds: float) -> float:
    """Seconds between saves that lose the least time, at most 1 % of it for saving.

    Young's first-order optimum sqrt(2 C M), with Daly's condition C < M/2.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006.
    """
    cost, between = max(cost_seconds, 1e-6), between_interruptions_seconds
    optimum = math.sqrt(2 * cost * between) if cost < between / 2 else math.inf
    return min(max(optimum, cost / OVERHEAD_MAX, SECONDS_MIN), max(SECONDS_MAX, cost / OVERHEAD_MAX))


def too_slow(save_seconds: float, data_bytes: int) -> str:
    """The warning if a final save of so many bytes does not fit in the notice; "" if it fits."""
    if FINAL_SAVE_FACTOR * save_seconds + FINAL_SAVE_SECONDS <= NOTICE_SECONDS:
        return ""
    return (
        f"a save of {data_bytes / 1e6:.0f} MB takes {save_seconds:.0f} s here; with its margin that does not fit in the"
        f" {NOTICE_SECONDS:.0f} s a notice leaves: give the volume more throughput, or save more often"
    )


def interruption_seconds(environment: Mapping[str, str], hours: float | None = None) -> float:
    """Seconds between interruptions: `hours` if given, else the agent's count, else two hours."""
    if hours is not None:
        return hours * 3600
    try:
        counted = float(environment.get(BETWEEN_INTERRUPTIONS, ""))
    except ValueError:
        return SECONDS_BETWEEN
    return counted if 0 < counted < math.inf else SECONDS_BETWEEN


class Pace:
    """Tells when the next save is due, and learns the cost of a save."""

    def __init__(
        self,
        every: Every,
        between_interruptions_seconds: float = SECONDS_BETWEEN,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = every
        self._between, self._monotonic = between_interruptions_seconds, monotonic
        self._last = monotonic()
        self._cost: float | None = None
        # Seconds from one save to the next, of a pace in seconds or an automatic one; one in steps does not ask.
        self.interval_seconds = every.seconds or SECONDS_FIRST

    def due(self, step: int) -> bool:
        """Whether the state of global step `step` must be saved; True again until a save has `begun`."""
        if self.every.steps:
            return step % self.every.steps == 0
        return self._monotonic() - self._last >= self.interval_seconds

    def begun(self) -> None:
        """A save has begun."""
        self._last = self._monotonic()

    def cost(self, seconds: float) -> None:
        """Learn how long the last save delayed the training; the mean follows by a third."""
        seconds = max(seconds, COST_SECONDS_MIN)
        self._cost = seconds if self._cost is None else self._cost + (seconds - self._cost) / 3
        self.interval_seconds = self.every.seconds or best_interval(self._cost, self._between)
