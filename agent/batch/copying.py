"""When copies of the checkpoints are made: at an interval while the trainer runs, and once more when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from spotheal.agent.batch.copies import Copies
from spotheal.agent.clock import Clock
from spotheal.agent.errors import SpothealError
from spotheal.agent.folders import Folders
from spotheal.agent.trainer_files import mark_of

_LOOK_SECONDS = 2.0
_RETRY_SECONDS = 5.0


class Copying:
    """A thread of its own, for what is sent may take minutes. `saved_step()` asks the trainer stage."""

    def __init__(
        self, copies: Copies, folders: Folders, every_seconds: float, saved_step: Callable[[], int | None],
        clock: Clock, log: Any,
    ) -> None:  # fmt: skip
        self._copies, self._folders, self._every = copies, folders, every_seconds
        self._saved_step, self._clock, self._log = saved_step, clock, log
        self._over = threading.Event()
        self._copied = self._state()
        self._thread = threading.Thread(target=self._watch, name="copies", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, until: float | None) -> bool:
        """The trainer has ended: copy what it left. Tried until it stands or `until` (monotonic); None: one hour.

        Whether the store has the newest state.
        """
        self._over.set()
        self._copies.abandon.set()
        until = self._clock.monotonic() + 3600.0 if until is None else until
        while self._state() != self._copied:
            state = self._state()
            try:
                if not self._copies.copy(self._saved_step(), last=True):
                    return False
                self._copied = state
            except (SpothealError, OSError) as error:
                self._log.warning("the checkpoints are not copied yet", error=str(error))
                if self._clock.monotonic() + _RETRY_SECONDS > until:
                    return False
                self._clock.sleep(_RETRY_SECONDS)
        return True

    def _watch(self) -> None:
        last = self._clock.monotonic()
        while not self._clock.sleep(min(_LOOK_SECONDS, self._every), until=self._over):
            if self._clock.monotonic() - last < self._every:
                continue
            state, step = self._state(), self._saved_step()
            if state == self._copied:
                continue
            last = self._clock.monotonic()
            try:
                if self._copies.copy(step):
                    self._copied = state
            except (SpothealError, OSError) as error:
                self._log.warning("the checkpoints are not copied; trying again", error=str(error))

    def _state(self) -> object:
        return mark_of((self._folders.checkpoints, self._folders.keep))
