"""When to save: every N steps, every N seconds, or as often as is cheap enough."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spotheal.agent.protocol.contract import BETWEEN_INTERRUPTIONS

OVERHEAD_MAX = 0.01
SECONDS_BETWEEN = 7200.0  # interruptions, where nobody has counted them
SECONDS_MIN, SECONDS_MAX = 2.0, 900.0
SECONDS_FIRST = 30.0  # until a cost has been measured
# What a save of next to nothing takes: its threads wake up on processors that training fills. Their own time, which is
# what can be told, is a tenth of it; measured on two cores by the training's loss.
COST_SECONDS_MIN = 0.01
FINAL_SAVE_FACTOR, FINAL_SAVE_SECONDS = 1.5, 5.0  # what is kept free before the deadline
NOTICE_SECONDS = 60.0  # what a final save must fit in: two minutes, less the agent's 40 s and the detection


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
    """What to say where a final save of so many bytes does not fit in the notice; "" where it does."""
    if FINAL_SAVE_FACTOR * save_seconds + FINAL_SAVE_SECONDS <= NOTICE_SECONDS:
        return ""
    return (
        f"a save of {data_bytes / 1e6:.0f} MB takes {save_seconds:.0f} s here; with its margin that does not fit in the"
        f" {NOTICE_SECONDS:.0f} s a notice leaves: give the volume more throughput, or save more often"
    )


def interruption_seconds(environment: Mapping[str, str], hours: float | None = None) -> float:
    """Seconds between interruptions: `hours` where given, else what the agent has counted, else two hours."""
    if hours is not None:
        return hours * 3600
    try:
        counted = float(environment.get(BETWEEN_INTERRUPTIONS, ""))
    except ValueError:
        return SECONDS_BETWEEN
    return counted if 0 < counted < math.inf else SECONDS_BETWEEN


class Pace:
    """Says when the next save is due, and learns what a save costs."""

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
        """Whether the state of global step `step` is to be saved; True again until a save has `begun`."""
        if self.every.steps:
            return step % self.every.steps == 0
        return self._monotonic() - self._last >= self.interval_seconds

    def begun(self) -> None:
        """A save has begun."""
        self._last = self._monotonic()

    def cost(self, seconds: float) -> None:
        """What the last save took from the training; the mean follows by a third."""
        seconds = max(seconds, COST_SECONDS_MIN)
        self._cost = seconds if self._cost is None else self._cost + (seconds - self._cost) / 3
        self.interval_seconds = self.every.seconds or best_interval(self._cost, self._between)
