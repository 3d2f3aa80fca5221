"""The one way to call something again: tenacity's, by our clock and our stop event.

How long trouble is borne is a parameter: a number of tries, seconds, or a `RetryBudget` that tells refusals from what
passes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception

from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import Interrupted, SpothealError

T = TypeVar("T")


def until_it_works(
    act: Callable[[], T],
    clock: Clock,
    *,
    passes: Callable[[SpothealError], bool],
    pause: Callable[[int], float],
    tries_max: int = 0,
    until: float = math.inf,
    stop: Stop | None = None,
    on_retry: Callable[[SpothealError, float], None] | None = None,
) -> T:
    """What `act` returns; called again after each error of which `passes` says that it may pass.

    `pause`: seconds after try 1, 2, …. No further try is made after `tries_max` (0: any number), or where its pause
    would go beyond `until` (by the monotonic clock): then the last error is raised. Interrupted if `stop` is set in a
    pause. `on_retry` gets the error and the pause, for the log.
    """

    def is_over(state: RetryCallState) -> bool:
        late = clock.monotonic() + pause(state.attempt_number) > until
        return late or state.attempt_number == tries_max

    def sleep(seconds: float) -> None:
        if clock.sleep(seconds, until=stop):
            raise Interrupted("this machine goes away")

    def note(state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if on_retry is not None and isinstance(error, SpothealError):
            on_retry(error, pause(state.attempt_number))

    retrying = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, SpothealError) and passes(error)),
        wait=lambda state: pause(state.attempt_number),
        stop=is_over,
        sleep=sleep,
        before_sleep=note,
        reraise=True,
    )
    return retrying(act)
