"""Whether this machine is about to be taken away: a thread that asks the metadata service every two seconds.

AWS's time is turned into our monotonic clock once, when it is first read, so that no later jump of the wall clock moves
a deadline. What to do then is `agent.handover`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from spotheal.agent.aws.imds import UNKNOWN, Answer, Rebalance, SpotAction
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.contract import Notice
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.notice_seconds import (
    HANDOVER_SECONDS,
    LATE_GRACE_SECONDS,
    LEAD_SECONDS_MAX,
    MARGIN_SECONDS,
    POLL_SECONDS,
    STALE_SECONDS,
)

WITHDRAWN_POLLS = 2  # one 404 may be a slip


class Source(Protocol):
    """`agent.metadata.Metadata`, or a fake."""

    def spot_action(self) -> SpotAction | Answer: ...

    def rebalance(self) -> Rebalance | Answer: ...


@dataclass(frozen=True)
class Interruption:
    """This machine ends at `ends_at`, the trainer must have ended at `trainer_until` (both on the monotonic clock).

    `id` is made of the notice's content, so that reading it twice is one event.
    """

    id: str
    notice: Notice
    ends_at: float
    trainer_until: float


class Watcher:
    """Polls in a thread of its own; `notice_event`, `withdrawn`, `rebalance`, `shutting_down` are events to wait for.

    `on_notice` and `on_rebalance` are called in threads of the watcher's own, once an event. An answer that makes no
    sense changes nothing; `log(text)` hears of the first one in a row and of the end of the row.
    """

    def __init__(
        self,
        metadata: Source,
        clock: Clock,
        *,
        poll_seconds: float = POLL_SECONDS,
        on_notice: Callable[[Interruption], None] | None = None,
        on_rebalance: Callable[[], None] | None = None,
        log: Callable[[str], None] | None = None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.notice_event = threading.Event()
        self.withdrawn = threading.Event()
        self.rebalance = threading.Event()
        self.shutting_down = threading.Event()
        self._metadata, self._clock, self._poll_seconds = metadata, clock, poll_seconds
        self._on_notice, self._on_rebalance, self._log = on_notice, on_rebalance, log or (lambda text: None)
        self._on_poll = on_poll
        self._lock = threading.RLock()
        self._current: Interruption | None = None
        self._over: set[str] = set()  # notices that are handled or were stale; they may stay for ever
        self._recommended: set[str] = set()
        self._absent = 0  # definite "no notice" answers in a row
        self._unknown = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------- the thread
    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="interruption", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it is gone when this returns, unless the metadata service holds it for seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; a notice can only be found while it does."""
        return self._thread is not None and self._thread.is_alive()

    def _watch(self) -> None:
        while True:
            self._on_poll()
            self.poll()
            if self._clock.sleep(self._poll_seconds, until=self._stop):
                return

    def poll(self) -> None:
        """Ask once; what the thread does in each round. The less urgent question waits until the service is well."""
        action = self._metadata.spot_action()
        self._see_action(action)
        if action is not UNKNOWN:
            self._see_recommendation(self._metadata.rebalance())

    # -------------------------------------------------------------------------------------------------------- questions
    @property
    def interruption(self) -> Interruption | None:
        """The interruption under way."""
        with self._lock:
            return self._current

    @property
    def notice(self) -> Notice | None:
        """What the trainer is told of it."""
        current = self.interruption
        return None if current is None else current.notice

    def begin_again(self) -> None:
        """Forget the interruption under way, which did not come true; the same notice is no event any more."""
        with self._lock:
            current, self._current = self._current, None
            if current is not None and self._clock.monotonic() >= current.ends_at:
                self._over.add(current.id)  # before its time it may come again, in this very moment
            self.notice_event.clear()
            self.withdrawn.clear()

    def shutdown(self, deadline: datetime) -> None:
        """The operating system goes down and ends us at `deadline`. Not for a signal handler: it takes a lock."""
        self.shutting_down.set()
        with self._lock:
            seconds = (deadline - self._clock.now()).total_seconds()
            if self._current is None:
                self._begin(f"shutdown@{deadline.isoformat()}", "shutdown", seconds)

    # ---------------------------------------------------------------------------------------------------------- answers
    def _see_action(self, answer: SpotAction | Answer) -> None:
        with self._lock:
            if answer is UNKNOWN:
                self._unknown += 1
                if self._unknown == 1:
                    self._log(f"the metadata service cannot be understood: {getattr(self._metadata, 'fault', '')}")
                return
            if self._unknown:
                self._log(f"the metadata service answers again after {self._unknown} senseless answers")
                self._unknown = 0
            if isinstance(answer, SpotAction):
                self._see_notice(answer)
                self._absent = 0
            else:
                self._absent += 1
                self._see_absence()

    def _see_notice(self, action: SpotAction) -> None:
        content = f"{action.action}@{action.time.isoformat()}"
        if self._current is not None and self._current.id == content:
            self.withdrawn.clear()  # it is there again
            return
        if content in self._over:
            return
        seconds = (action.time - self._clock.now()).total_seconds()
        appeared = self._absent > 0  # the answer before this one was that there is none
        if seconds < -STALE_SECONDS and not appeared:
            self._over.add(content)
            self._log(f"a notice of {action.time.isoformat()} is long past and is ignored")
            return
        if seconds < 0 and appeared:  # new, and past? Then the wall clock is wrong, not AWS
            seconds = LEAD_SECONDS_MAX - self._poll_seconds
        self._begin(content, action.action, min(seconds, LEAD_SECONDS_MAX))

    def _see_absence(self) -> None:
        current = self._current
        if current is None or current.notice.action == "shutdown" or self._absent < WITHDRAWN_POLLS:
            return
        if not self.withdrawn.is_set():
            self._log("the interruption notice was withdrawn")
            self.withdrawn.set()

    def _begin(self, content: str, action: str, seconds_left: float) -> None:
        moment = self._clock.monotonic()
        for_trainer = trainer_seconds(action, seconds_left)
        notice = Notice(action, self._clock.now() + timedelta(seconds=for_trainer))
        if self._current is not None:
            self._over.add(self._current.id)  # AWS changed its mind about the time; the old one does not come back
        self._current = Interruption(content, notice, moment + seconds_left, moment + for_trainer)
        self.withdrawn.clear()
        self.notice_event.set()
        self._log(f"interruption: {action} in {seconds_left:.0f} s")
        self._call("on-notice", self._on_notice, self._current)

    def _see_recommendation(self, answer: Rebalance | Answer) -> None:
        if not isinstance(answer, Rebalance):
            return
        with self._lock:
            content = answer.time.isoformat()
            if content not in self._recommended:
                self._recommended.add(content)
                self._log(f"rebalance recommendation of {content}")
                self.rebalance.set()
                self._call("on-rebalance", self._on_rebalance)

    def _call(self, name: str, callback: Callable[..., None] | None, *arguments: object) -> None:
        """In a thread, so that what takes long (a snapshot) never delays the next poll."""
        if callback is None:
            return

        def call() -> None:
            try:
                callback(*arguments)
            except (SpothealError, OSError) as fault:
                self._log(f"{name}: {fault}")

        threading.Thread(target=call, name=name, daemon=True).start()


def trainer_seconds(action: str, seconds_left: float) -> float:
    """How long the trainer may go on after a notice that leaves `seconds_left`: all but 40 s.

    A notice found late leaves it a few seconds to save, as long as the handover keeps its own. Hibernation has no lead.
    """
    if action == "hibernate":
        return 0.0
    return max(seconds_left - MARGIN_SECONDS, min(LATE_GRACE_SECONDS, seconds_left - HANDOVER_SECONDS), 0.0)
