"""A rehearsal in which no agent ever says who it is ends in minutes, with the last line of the machine's console.

An agent that dies at its start (a library is missing, the network is) is started again without end: the run has no
reason to end, and only the console says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spotheal.agent.protocol.clock import Clock, SystemClock
from spotheal.agent.protocol.errors import JobFailed, SpothealError

if TYPE_CHECKING:
    from spotheal.agent.aws.s3 import Store
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

SILENT_SECONDS_MAX = 180.0  # since the first launch; a boot takes 6 s, and 30 s on a busy machine
_STORE_SECONDS = 1.0
_STEP_SECONDS_MAX = 10.0  # of the time between two looks: Ctrl-Z stops the rehearsal, and its cloud with it


class FirstWord:
    """`stores`: where the run's agents count their launches."""

    def __init__(self, cloud: Cloud, stores: Sequence[Store], clock: Clock | None = None) -> None:
        self._cloud, self._stores, self._clock = cloud, stores, clock or SystemClock()
        self._is_heard, self._looked, self._silent = False, self._clock.monotonic(), 0.0

    def check(self) -> None:
        """Raises JobFailed if no agent has counted its launch `SILENT_SECONDS_MAX` after the first machine's launch.

        Time in which the rehearsal itself was stopped does not count.
        """
        moment = self._clock.monotonic()
        since_look = moment - self._looked
        if self._is_heard or since_look < _STORE_SECONDS:
            return
        self._looked = moment
        self._is_heard = any(_has_agent(store) for store in self._stores)
        if self._cloud.launched_at:
            self._silent += min(since_look, _STEP_SECONDS_MAX)
        if self._is_heard or self._silent < SILENT_SECONDS_MAX:
            return
        machine, line = self._last_line()
        raise JobFailed(
            f"no agent has said who it is within {SILENT_SECONDS_MAX:.0f} s; "
            + (f"the console of {machine} ends with: {line}" if line else f"the console of {machine} is empty"),
            next_step="correct what it names; with --keep DIR the whole console is DIR/instances/*/console.log",
        )

    def _last_line(self) -> tuple[str, str]:
        """The machine (or container) that wrote to its console last, and its last line; "" if none wrote a line."""
        folder = self._cloud.folder
        consoles = [*folder.glob("instances/*/console.log"), *folder.glob("containers/*/console.log")]
        for console in sorted(consoles, key=lambda path: path.stat().st_mtime, reverse=True):
            lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
            if line := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return console.parent.name, line
        return f"each of {len(consoles)} machines", ""


def _has_agent(store: Store) -> bool:
    """Bootstrap writes the first version of a launch; only an agent counts its `starts`."""
    try:
        return any(launch.get("starts") for launch in store.launches())
    except SpothealError:  # the store is throttled, or young
        return False
