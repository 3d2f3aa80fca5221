"""When copies of the checkpoints are made: at an interval while the trainer runs, and once more when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotheal.agent.batch.copies import Copies
from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import SpothealError

State = tuple[frozenset[tuple[str, int, int]], frozenset[tuple[str, int, int]]]  # what is kept; results
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

    def end(self, until: float | None, *, new_results: bool = True) -> bool:
        """The trainer has ended: copy what it left. Until it stands or `until` (monotonic), in the midst of a file too;
        None: one hour.

        Whether the store has the newest state. `new_results` as of `Copies.copy`.
        """
        self._over.set()
        self._copies.abandon.set()
        until = self._clock.monotonic() + 3600.0 if until is None else until

        def halt() -> str:
            return "the time for the last copy is over" if self._clock.monotonic() > until else ""

        while not self._is_copied(state := self._state(), new_results):
            try:
                if not self._copies.copy(self._saved_step(), last=True, new_results=new_results, halt=halt):
                    return False
                self._copied = state if new_results else (state[0], self._copied[1])
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

    def _is_copied(self, state: State, results: bool) -> bool:
        return state[0] == self._copied[0] and (not results or state[1] == self._copied[1])

    def _state(self) -> State:
        """Small files too: the one that names the newest checkpoint is one."""
        folders = self._folders
        return _seen(folders.checkpoints) | _seen(folders.keep), _seen(folders.results)


def _seen(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Path, size and time of what is there, links among it."""
    files = set()
    for below, _, names, descriptor in untrusted_folders.walk(folder):
        for name in names:
            if (status := untrusted_folders.status_of(descriptor, name)) is not None:
                files.add((str(folder / below / name), status.st_size, status.st_mtime_ns))
    return frozenset(files)
