"""What a supervisor tells the rest of the agent, and how: in a thread of its own, so that nobody can hold it up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.errors import SpothealError


def _nothing(*_: Any, **__: Any) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """Told as it happens: `on_attempt` in the supervisor's thread before the start, `on_line` in the output's own, the
    others in order by a `Teller`. Of progress that comes faster than it is taken only the newest is told."""

    on_line: Callable[[str], None] = _nothing
    on_progress: Callable[[Progress], None] = _nothing
    on_attempt: Callable[[int], None] = _nothing
    on_event: Callable[..., None] = _nothing  # (name, **fields): trainer-started, trainer-ended, rebalance-told, …


class Teller:
    """Calls hooks in order in another thread: they write to a store that may be slow when every second counts."""

    def __init__(self, hooks: Hooks, log: Any) -> None:
        self._hooks, self._log = hooks, log
        self._waiting: deque[Progress | tuple[str, dict[str, Any]]] = deque()
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def progress(self, progress: Progress) -> None:
        with self._changed:
            if self._waiting and isinstance(self._waiting[-1], Progress):
                self._waiting.pop()
        self._put(progress)

    def event(self, name: str, **fields: Any) -> None:
        self._put((name, fields))

    def wait(self, seconds: float) -> bool:
        """Wait until everything is told; False where that takes longer (it goes on being told)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def _put(self, news: Progress | tuple[str, dict[str, Any]]) -> None:
        with self._changed:
            self._waiting.append(news)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="trainer-hooks", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """A fault of ours in a hook ends this thread, with its trace in the journal; another one tells what follows."""
        is_fault = True
        try:
            self._tell()
            is_fault = False
        finally:
            if is_fault:
                self._log.error("what the trainer did could not be recorded")
                with self._changed:
                    self._busy = False
                    self._start()
                    self._changed.notify_all()

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: bool(self._waiting), 60):
                    self._thread = None
                    return
                news, self._busy = self._waiting.popleft(), True
            try:
                if isinstance(news, Progress):
                    self._hooks.on_progress(news)
                else:
                    self._hooks.on_event(news[0], **news[1])
            except (OSError, SpothealError) as error:
                self._log.warning("what the trainer did could not be recorded", error=str(error))
