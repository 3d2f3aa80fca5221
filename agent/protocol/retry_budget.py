"""How long trouble is borne: each kind from its own first time since the last success.

Counted from the first trouble of any kind, one refusal after two minutes of a bad network was the end of a run.
"""

from __future__ import annotations

from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import NotFound, PermissionDenied, Retryable, SpothealError

# A role that was made minutes ago is not known everywhere, and IMDS may give no credentials for a while.
REFUSED_SECONDS_MAX = 120.0


class Patience:
    """`passing_seconds` for what passes by itself, `refused_seconds` for what says no, but may say yes soon."""

    def __init__(
        self, clock: Clock, passing_seconds: float, refused_seconds: float = REFUSED_SECONDS_MAX
    ) -> None:
        self._clock, self._passing, self._refused = clock, passing_seconds, refused_seconds
        self._troubled: float | None = None
        self._denied: float | None = None

    def succeeded(self) -> None:
        self._troubled = self._denied = None

    def bears(self, error: SpothealError, pause: float = 0.0) -> bool:
        """Whether `error` may pass, and has not been met for too long."""
        return isinstance(error, (Retryable, PermissionDenied)) and not self.is_over(error, pause)

    def is_over(self, error: SpothealError, pause: float = 0.0) -> bool:
        """Whether `error` has been met for too long, or would have been after a `pause`."""
        moment = self._clock.monotonic()
        self._troubled = moment if self._troubled is None else self._troubled
        if not isinstance(error, (NotFound, PermissionDenied)):
            return moment - self._troubled + pause >= self._passing
        self._denied = moment if self._denied is None else self._denied
        return moment - self._denied + pause >= self._refused
