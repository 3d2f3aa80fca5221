"""status.json: where the run is, for whoever asks when no instance can be asked. Also the writer's heartbeat.

Only the holder of the newest term writes it. A holder that finds a higher term has been fenced: it must stop at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, Stop, rfc3339
from spotheal.agent.protocol.contract import Notice, Progress
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import HEARTBEAT_SECONDS, LAYOUT, STATUS_SCHEMA_VERSION, Phase

PUBLISH_SECONDS_MIN = 10.0  # progress is published at most so often; the heartbeat comes besides


class Status:
    """The document and its publication; safe to call from any thread."""

    def __init__(self, store: Store, clock: Clock, log: Any, **fixed: Any) -> None:
        self._store, self._clock, self._log = store, clock, log
        self._fields: dict[str, Any] = {
            "phase": Phase.BOOTING.value,
            "reason": "",
            "term": None,
            "attempt": None,
            "launches": None,
            "volume": None,
            "progress": None,
            "notice": None,
            "space": None,
            **fixed,
        }
        self._published = float("-inf")
        self._lock = threading.RLock()
        self.fenced = threading.Event()
        self.stands: tuple[Phase, str] | None = None  # the end of the run that somebody else has recorded meanwhile
        self.stop_asked: dict[str, Any] | None = None  # what an operator has put: save, and end the run

    def note(self, **fields: Any) -> None:
        """Change fields; they are published with what follows."""
        with self._lock:
            self._fields |= {key: value.value if isinstance(value, Phase) else value for key, value in fields.items()}

    def update(self, **fields: Any) -> None:
        """Change fields and publish them at once (as far as we are the writer)."""
        self.note(**fields)
        self.publish()

    def leave(self) -> None:
        """This instance writes no more: its term is released, and the successor's document must stand."""
        with self._lock:
            self._fields["term"] = None

    def end(self, phase: Phase, reason: str) -> tuple[Phase, str]:
        """The run is over: written also by an instance that never held a term (its set-up failed, or it parks the run).

        Returns the end that is recorded: the first one, should another instance have found one meanwhile.
        Raises SpothealError where the store cannot be reached: an end that nobody can read is no end.
        """
        with self._lock:
            self._fields |= {"phase": phase.value, "reason": reason, "ended": rfc3339(self._clock.now())}
            stands = self._store.publish_status(self.document())
            if stands is not None:
                self._fields |= {"phase": stands["phase"], "reason": stands.get("reason", "")}
            return Phase(self._fields["phase"]), str(self._fields["reason"])

    def progress(self, progress: Progress) -> None:
        """Note how far the trainer is; published at most every `PUBLISH_SECONDS_MIN`, but the first of a life, which
        says where the run goes on, at once."""
        with self._lock:
            is_first = self._fields["progress"] is None
            self._fields["progress"] = {
                "step": progress.step,
                "steps_total": progress.steps_total,
                "epoch": progress.epoch,
                "loss": progress.loss,
                "samples_per_second": progress.samples_per_second,
                "metrics": progress.extra,
                "saved": None if progress.saved is None else asdict(progress.saved),
            }
            due = is_first or self._clock.monotonic() - self._published >= PUBLISH_SECONDS_MIN
        if due:
            self.publish()

    def notice(self, notice: Notice) -> None:
        deadline = rfc3339(notice.deadline)
        self.update(notice={"kind": notice.kind, "action": notice.action, "deadline": deadline})

    def publish(self) -> bool:
        """Write the document; False where we are not (or no longer) the writer, or the store cannot be reached."""
        with self._lock:
            term = self._fields["term"]
            if term is None or self.fenced.is_set():
                return False
            try:
                highest = self._store.highest_term()
                if highest is not None and highest.number > term:
                    self.fenced.set()
                    self._log.error("another instance holds a later term; stopping", ours=term, theirs=highest.number)
                    return False
                stands = self._store.publish_status(self.document())
                if stands is not None:
                    self.stands = Phase(stands["phase"]), str(stands.get("reason", ""))
                    return False
            except SpothealError as error:
                self._log.warning("status could not be stored; trying again", error=error.message)
                return False
            self._published = self._clock.monotonic()
            self._hear_stop(term)
            return True

    def _hear_stop(self, term: int) -> None:
        if self.stop_asked is None and term in self._store.stops:
            try:
                self.stop_asked = self._store.get_json(LAYOUT.stop(term))
            except SpothealError as error:
                self._log.warning("what an operator asks for cannot be read", error=error.message)

    def in_words(self) -> str:
        """One line, for the service manager."""
        with self._lock:
            phase, progress = str(self._fields["phase"]), self._fields["progress"] or {}
        step = progress.get("step")
        return phase if step is None else f"{phase}, step {step}"

    def document(self) -> dict[str, Any]:
        with self._lock:
            head = {"schema_version": STATUS_SCHEMA_VERSION, "heartbeat": rfc3339(self._clock.now())}
            return {**head, **self._fields}

    def beat(self, stop: Stop, also: Callable[[], object]) -> None:
        """The heartbeat thread: publish, and do `also`, every `HEARTBEAT_SECONDS` until `stop`."""
        while not self._clock.sleep(HEARTBEAT_SECONDS, until=stop):
            self.publish()
            also()
