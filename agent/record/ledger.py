"""What happened to the run, one JSON line an event, in the store: what `status`, the receipt and the rehearsal read.

Events (fields beside time, event, id, instance, zone, term): `boot` (instance_type, launched, root_gib), `price`
(dollars_per_hour, since, lifecycle), `predecessor` (predecessor, heard, last_step), `predecessor-files` (predecessor,
attempt, written, written_count, missing, missing_count: names of files), `volume` (volume, moved_from, device,
size_gib, type; of a copy initialization_rate), `trainer-started` (attempt, resumed_step), `trainer-resumed` (the same,
if the step was not known at the start), `trainer-ended` (attempt, kind, exit_code, signal, last_step, saved_step,
reason), `notice` (action, deadline, ends), `rebalance`, `snapshot` (snapshot, used_gib), `handover` (snapshot,
saved_step, seconds, used_gib), `deleted` (volumes, snapshots), `read-back` (of copied checkpoints: copy, saved_step),
`end` (phase, reason), `leaving`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.protocol.redaction import SECRETS


class Ledger:
    """Keeps events until the store has them: a store that is down delays them and never stops the run."""

    def __init__(self, store: Store, clock: Clock, instance: str, zone: str) -> None:
        self._store, self._clock = store, clock
        self._fixed = {"instance": instance, "zone": zone}
        self._pending: list[str] = []
        self._count = 0
        self._lock = threading.Lock()
        self.term: int | None = None

    def add(self, event: str, **fields: Any) -> None:
        """Write an event to the store, with all that waits."""
        self.note(event, **fields)
        self.flush()

    def note(self, event: str, **fields: Any) -> None:
        """An event that is written with the next one, or with the next heartbeat: it saves two calls of a boot."""
        with self._lock:
            self._count += 1
            moment = self._clock.now()
            # The id makes each line unique, so that an append made twice is seen once.
            identity = f"{self._fixed['instance']}-{int(moment.timestamp() * 1000):x}-{self._count}"
            line = {"time": rfc3339(moment), "event": event, "id": identity, **self._fixed, "term": self.term, **fields}
            self._pending.append(json.dumps(SECRETS.tree(line)))

    def events(self) -> list[dict[str, Any]]:
        """What the store has, and what waits for it. Raises SpothealError where the store cannot be read."""
        with self._lock:
            pending = list(self._pending)
        # Without the lock: whoever notes an interruption must not wait for what is read here.
        text = (self._store.get_bytes(LAYOUT.ledger) or b"").decode(errors="replace")
        return read_events("\n".join([text, *pending]))

    def flush(self) -> bool:
        """Whether the store has everything now."""
        with self._lock:
            if self._pending:
                try:
                    self._store.append_lines(LAYOUT.ledger, self._pending)
                except SpothealError:
                    return False
                self._pending.clear()
            return True


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a ledger, in order, each once; lines that are no event are left out."""
    events: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        event = _event(line)
        if event is not None:
            events.setdefault(str(event.get("id", line)), event)
    return list(events.values())


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = bounded_json.parse_object(line)
    except ValueError:
        return None
    return event if isinstance(event.get("event"), str) else None


def steps_redone(events: Iterable[Mapping[str, Any]]) -> int:
    """Steps that were done again after a resume: for each start, how far the run had been beyond where it began."""
    furthest, redone = 0, 0
    for event in events:
        if event["event"] in ("trainer-started", "trainer-resumed") and isinstance(event.get("resumed_step"), int):
            redone += max(0, furthest - event["resumed_step"])
        if event["event"] in ("trainer-ended", "predecessor") and isinstance(event.get("last_step"), int):
            furthest = max(furthest, event["last_step"])
    return redone
