"""When to look again at a pending snapshot: every five seconds, or a little later where its progress says when it ends.

EC2 rounds progress down to a percent, so each look bounds the time that the whole takes; looks at different moments
narrow the bounds. Progress that is not even (a real snapshot's often is not) makes them contradict each other: then it
is five seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotheal.agent.volume.actions import POLL_SECONDS

CLOSE_SECONDS = 2.0  # bounds that are further apart foretell nothing
AFTER_SECONDS = 0.2  # past the upper bound


@dataclass
class Pace:
    """Bounds of the seconds from the snapshot's start to its end, from what was seen of it."""

    at_least: float = 0.0
    at_most: float = float("inf")

    def seen(self, elapsed: float, percent: int) -> None:
        """`elapsed` seconds after its start it was at `percent`."""
        if elapsed <= 0 or not 0 <= percent < 100:
            return
        self.at_least = max(self.at_least, 100.0 * elapsed / (percent + 1))
        if percent:
            self.at_most = min(self.at_most, 100.0 * elapsed / percent)

    def seconds_to_next(self, elapsed: float) -> float:
        """At least `POLL_SECONDS`, less than two of them."""
        foretold = self.at_least <= self.at_most <= self.at_least + CLOSE_SECONDS
        left = self.at_most + AFTER_SECONDS - elapsed
        return left if foretold and POLL_SECONDS < left < 2 * POLL_SECONDS else POLL_SECONDS
