"""A rehearsal in which no agent ever says who it is ends in minutes, with the last line of the machine's console.

An agent that dies at its start (a library is missing, the network is) is started again without end: the run has no
reason to end, and only the console says why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spotheal.agent.errors import JobFailed, SpothealError

if TYPE_CHECKING:
    from spotheal.agent.store import Store
    from spotheal.fleet.rehearsal.cloud import Cloud

SILENT_SECONDS_MAX = 180.0  # since the first launch; a boot takes 6 s, and 30 s on a busy machine
_STORE_SECONDS = 1.0


class FirstWord:
    """`stores`: where the run's agents count their launches."""

    def __init__(self, cloud: Cloud, stores: Sequence[Store]) -> None:
        self._cloud, self._stores = cloud, stores
        self._is_heard, self._looked = False, float("-inf")

    def check(self) -> None:
        """Raises JobFailed if no agent has counted its launch `SILENT_SECONDS_MAX` after the first machine's launch."""
        if self._is_heard or time.monotonic() - self._looked < _STORE_SECONDS:
            return
        self._looked = time.monotonic()
        self._is_heard = any(_has_agent(store) for store in self._stores)
        first = min(self._cloud.launched_at.values(), default=self._looked)
        if self._is_heard or self._looked - first < SILENT_SECONDS_MAX:
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
