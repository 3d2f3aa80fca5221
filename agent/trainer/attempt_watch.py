"""One attempt under watch: its progress, requests to stop it, its deadline."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.processes.group import ForeignProgram
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.contract import Notice, Progress
from spotheal.agent.protocol.ends import Kind
from spotheal.agent.protocol.notice_seconds import KILL_SECONDS
from spotheal.agent.trainer.hang_detector import Silence
from spotheal.agent.trainer.progress_files import progress_of

_ABORT_SECONDS = 10.0  # in which a hung trainer may say where: Python prints every thread's stack at SIGABRT


@dataclass(frozen=True)
class Timing:
    poll_seconds: float = 1.0
    first_poll_seconds: float = 0.05  # until the first progress of an attempt, which tells the step resumed from
    unasked_wait_seconds: float = 10.0
    silent_seconds: float = 30.0  # without progress for so long: the start is told without a step
    empty_checkpoints_seconds: float = 600.0


@dataclass(frozen=True)
class Request:
    """Why and by when the trainer must end; `until` on the monotonic clock."""

    kind: Kind  # any but done
    notice: Notice
    until: float
    reason: str


class Watched(Protocol):
    """What a watch needs of its supervisor."""

    wake: threading.Event
    log: Any
    attempt: int

    def pending(self) -> Request | None: ...

    def take_rebalance(self) -> bool: ...

    def note(self, progress: Progress) -> bool: ...

    def event(self, name: str, **fields: Any) -> None: ...

    def warn_of_empty_checkpoints(self) -> None: ...


class Watch:
    """One attempt under watch: progress, requests to stop, the deadline."""

    def __init__(
        self,
        of: Watched,
        program: ForeignProgram,
        folders: Folders,
        clock: Clock,
        timing: Timing,
        silence: Silence,
        *,
        written: int,
    ) -> None:
        """`written` is the mark of the progress document that was there before the start."""
        self._of, self._program, self._folders, self._silence = of, program, folders, silence
        self._clock, self._timing = clock, timing
        self._start = clock.monotonic()
        self._seen: Request | None = None
        self._answered: Request | None = None  # the same, with the deadline that is kept
        self._told_group = False
        self._started_told = False
        self._written = written
        self._look_elsewhere_at = timing.empty_checkpoints_seconds  # walking large folders costs: not every second
        self.gained = False
        self.reported = False
        self.hung = False

    @property
    def asked(self) -> bool:
        return self._answered is not None

    def until_end(self) -> None:
        """Return when the trainer has ended, or its deadline has passed."""
        while True:
            self._of.wake.clear()
            if self._over():
                return
            self.look()
            if self._of.take_rebalance() and not self.asked:
                self._rebalance()
            self._answer()
            if not self.asked and self._silence.too_long():
                self._abort()
                return
            self._clock.sleep(self._pause(), until=self._of.wake)

    def _over(self) -> bool:
        late = self._answered is not None and self._clock.monotonic() >= self._answered.until
        if late:
            if not self._program.ended.is_set():
                self._of.log.warning("the trainer has not ended in time and is killed")
            return True
        return self._program.ended.is_set() and not self._orphans_saving()

    def _orphans_saving(self) -> bool:
        """Whether a wrapper has died of our SIGTERM and left the real trainer untold: that one gets the time."""
        if not self.asked or self._program.signal != signal.SIGTERM:
            return False
        if not self._told_group:
            self._told_group = True
            return bool(self._program.tell_group(signal.SIGTERM))
        return bool(self._program.own_group())

    def _answer(self) -> None:
        request = self._of.pending()
        if request is None or self._program.ended.is_set():
            return  # one that has ended by itself was not asked
        if request != self._seen:
            first, self._seen = self._seen is None, request
            self._answered = replace(request, until=max(request.until, self._clock.monotonic() + KILL_SECONDS))
            self._publish(self._folders.notice_file, request.notice.to_json())
            if first:
                processes = self._program.tell(signal.SIGTERM)
                self._of.log.info("told the trainer to save and exit", why=request.reason, processes=processes)
        else:
            self._program.tell_restarted(signal.SIGTERM)

    def _publish(self, path: Path, text: str) -> None:
        """A trainer that made a folder of that name is told by its signal alone."""
        try:
            publish(path, text)
        except OSError as error:
            self._of.log.warning("the trainer's file cannot be written", path=str(path), error=str(error))

    def _abort(self) -> None:
        """It gets no time to save: what hangs cannot."""
        self.hung = True
        processes = self._program.tell(signal.SIGABRT)
        self._of.log.error("the trainer gives no sign of life and is ended", processes=processes)
        self._of.event("hung", processes=len(processes))
        self._clock.sleep(_ABORT_SECONDS, until=self._program.ended)

    def _rebalance(self) -> None:
        self._publish(self._folders.rebalance_file, "{}\n")
        processes = self._program.tell_handlers(signal.SIGUSR1)
        self._of.log.info("told the trainer of the rebalance recommendation", signalled=processes)
        self._of.event("rebalance-told", signalled=len(processes))

    def look(self) -> None:
        """Read the progress file, and after a while look where the trainer writes."""
        progress = progress_of(self._folders.progress_file)
        if progress is not None and progress[1] != self._written:
            self._written = progress[1]
            self._silence.heard()
            self.gained = self._of.note(progress[0]) or self.gained
            if not self.reported:
                self.reported = True
                self.tell_started(_resumed_step(progress[0]))
        lasted = self._clock.monotonic() - self._start
        if lasted > self._timing.silent_seconds:
            self.tell_started()
        if lasted > self._look_elsewhere_at:
            self._look_elsewhere_at += self._timing.empty_checkpoints_seconds
            self._of.warn_of_empty_checkpoints()

    def tell_started(self, resumed_step: int | None = None) -> None:
        """Once without a step if the trainer is silent for long, and once more when its first report names the step."""
        if not self._started_told:
            self._of.event("trainer-started", attempt=self._of.attempt, resumed_step=resumed_step)
        elif resumed_step is not None:
            self._of.event("trainer-resumed", attempt=self._of.attempt, resumed_step=resumed_step)
        self._started_told = True

    def _pause(self) -> float:
        usual = self._timing.poll_seconds if self.reported else self._timing.first_poll_seconds
        if self._answered is None:
            return usual
        return max(0.01, min(0.5, usual, self._answered.until - self._clock.monotonic()))


def _resumed_step(first: Progress) -> int:
    """The step an attempt began at, from its first progress document.

    A trainer may name it (`resumed_step`); else it is the checkpoint that was the newest then; without one (`saved` is
    null until the first save of each start in many scripts) it is the step of that document, which the contract asks
    for before the first step. 0 would be false: the receipt would count the whole run as done again.
    """
    named = first.extra.get("resumed_step")
    return int(named) if named is not None else first.saved.step if first.saved else first.step
