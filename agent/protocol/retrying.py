"""The one way to call something again: tenacity's, by our clock and our stop event.

How long trouble is borne is a parameter: a number of tries, seconds, or a `RetryBudget` that tells refusals from what
passes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception

from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import Interrupted, Retryable, SpothealError

T = TypeVar("T")
Passing = type[SpothealError] | tuple[type[SpothealError], ...] | Callable[[SpothealError], bool]
BACK_OFF_SECONDS_MAX = 60.0


def back_off(tries: int) -> float:
    """Seconds after try `tries`: 1, 2, 4 … 60."""
    return min(BACK_OFF_SECONDS_MAX, 2.0 ** min(tries - 1, 6))


def until_it_works(
    act: Callable[[], T],
    clock: Clock,
    *,
    pause: float | Callable[[int], float],
    passes: Passing = Retryable,
    tries_max: int = 0,
    seconds_max: float = math.inf,
    stop: Stop | None = None,
    log: Any = None,
    line: str = "",
) -> T:
    """What `act` returns; called again after each error that may pass: of the kinds `passes`, or if it says so.

    `pause`: seconds after each try, or after try 1, 2, …. No further try is made after `tries_max` (0: any number), or
    if its pause would end later than `seconds_max` from now: then the last error is raised. Interrupted if `stop` is
    set in a pause. `log` gets `line` with each new error: one that stays the same for hours is told once.
    """
    told, until = "", clock.monotonic() + seconds_max

    def may_pass(error: BaseException) -> bool:
        if not isinstance(error, SpothealError):
            return False
        return isinstance(error, passes) if isinstance(passes, (type, tuple)) else passes(error)

    def seconds(state: RetryCallState) -> float:
        return pause(state.attempt_number) if callable(pause) else pause

    def is_over(state: RetryCallState) -> bool:
        return state.attempt_number == tries_max or clock.monotonic() + seconds(state) > until

    def sleep(seconds: float) -> None:
        if clock.sleep(seconds, until=stop):
            raise Interrupted("this machine goes away")

    def tell(state: RetryCallState) -> None:
        nonlocal told
        error = state.outcome and state.outcome.exception()
        if log is not None and isinstance(error, SpothealError) and error.message != told:
            told = error.message
            cure = {"cure": error.next_step} if error.next_step else {}
            write = log.warning if isinstance(error, Retryable) else log.error
            write(line, error=error.message, after=seconds(state), **cure)

    retrying = Retrying(
        retry=retry_if_exception(may_pass),
        wait=seconds,
        stop=is_over,
        sleep=sleep,
        before_sleep=tell,
        reraise=True,
    )
    return retrying(act)
