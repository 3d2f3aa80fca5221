"""A run followed as it goes on, for `status --watch` and `request --wait`: a screen that is redrawn on a terminal, a
plain line elsewhere, whenever something changes and every half minute.

The status document is read every 5 s (one call); all the rest (AWS, the ledger) every half minute, and at once if
the phase or the instance changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from spotheal.agent.money.billing import about
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import CredentialsEnded, Retryable
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import duration
from spotheal.fleet.status import screen, status
from spotheal.fleet.status.unheard import Consoles, in_words
from spotheal.fleet.terminal.console import colours, says_ascii, width_of

SAY_SECONDS = 30.0
GATHER_SECONDS = 30.0


class View(Protocol):
    """Shows the course of a run."""

    def show(self, document: dict[str, Any], now: datetime) -> None: ...


class Look:
    """The run's document: gathered in full now and then, with the newest heartbeat in between."""

    def __init__(self, session: Session, run: runs.Run, clock: Clock) -> None:
        self._session, self._run, self._clock = session, run, clock
        self._consoles = Consoles(clock)
        self._facts: status.RunFacts | None = None
        self._at = float("-inf")

    def __call__(self) -> dict[str, Any] | None:
        """None while nothing answers: the run does not depend on us."""
        try:
            document = self._run.store.read_status() or {}
            if self._is_due(document):
                self._facts, self._at = status.gather(self._session, self._run, self._consoles), self._clock.monotonic()
        except CredentialsEnded:
            raise
        except Retryable:
            return None
        assert self._facts is not None
        self._facts = replace(self._facts, status=document)
        return status.summarise(self._facts, self._clock.now())

    def _is_due(self, document: dict[str, Any]) -> bool:
        if self._facts is None or self._clock.monotonic() - self._at >= GATHER_SECONDS:
            return True
        return any(document.get(key) != self._facts.status.get(key) for key in ("phase", "instance", "term"))


@dataclass
class Lines:
    """A line whenever the phase, the instance or the cause of a lack of capacity changes, and every half minute."""

    say: Callable[[str], None]
    clock: Clock
    shown_place: str = ""
    shown_at: float = field(default=float("-inf"))

    def show(self, document: dict[str, Any], now: datetime) -> None:
        place, now_at = _place(document), self.clock.monotonic()
        if place != self.shown_place or now_at - self.shown_at >= SAY_SECONDS:
            self.say(line(document))
            self.shown_place, self.shown_at = place, now_at


class Redrawn:
    """The whole screen, drawn over itself."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def show(self, document: dict[str, Any], now: datetime) -> None:
        from rich.text import Text

        err = sys.stderr
        text = screen.render(document, now, width=width_of(err), colour=colours(err), ascii=says_ascii(err))
        text += f"\n\n{now:%H:%M:%S} UTC; Ctrl-C leaves the run going on"
        self._live.update(Text.from_ansi(text), refresh=True)


@contextmanager
def display(clock: Clock, say: Callable[[str], None], *, terminal: bool) -> Iterator[View]:
    """A screen on a terminal (standard error), else lines."""
    if not terminal:
        yield Lines(say, clock)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=False) as live:
        yield Redrawn(live)


def _place(document: dict[str, Any]) -> str:
    shortage = document["no_capacity"] or {}
    notice = (document["notice"] or {}).get("deadline", "")
    instance, unheard = document["instance"], (document.get("unheard") or {}).get("says")
    return f"{document['phase']} {instance['id']} {instance.get('alive')} {shortage.get('cause')} {notice} {unheard}"


def _awaited(launches: list[dict[str, Any]]) -> str:
    """The state before an instance has reported anything: its boot takes minutes."""
    coming = [launch for launch in launches if launch["alive"]]
    if not coming:
        return "no instance yet"
    newest = coming[-1]
    return f"{newest['instance']} ({newest['zone']}) is starting"


@sensible
def line(document: dict[str, Any]) -> str:
    """`training on i-0a (us-west-2a), step 120 of 400, loss 0.31, 2.1 steps/s, 2 min left, about $0.12 so far`."""
    parts = [str(document["phase"])]
    instance = document["instance"]
    is_gone = bool(instance["id"]) and instance.get("alive") is False and not document["ended"]
    if instance["id"] and not document["no_capacity"] and not is_gone:
        parts[0] += f" on {instance['id']} ({instance['zone']})"
    elif not document["no_capacity"] and not document["ended"]:
        parts += [f"{instance['id']} is gone"] if is_gone else []
        parts.append(_awaited(document["launches"]))
    if document["notice"] and not document["ended"]:
        parts.append(f"notice: {document['notice'].get('action')} by {document['notice'].get('deadline')}")
    shortage = document["no_capacity"]
    if shortage:
        parts += [shortage["says"], f"try: {shortage['next_step']}"]
    if document.get("unheard"):
        parts += [in_words(document["unheard"]), document["unheard"]["next_step"]]
    progress = document["progress"] or {}
    if progress.get("step") is not None:
        total = f" of {progress['steps_total']}" if progress.get("steps_total") else ""
        parts.append(f"step {progress['step']}{total}")
        if isinstance(progress.get("loss"), int | float):
            parts.append(f"loss {progress['loss']:.4g}")
        if progress.get("steps_per_second"):
            parts.append(f"{progress['steps_per_second']:.2g} steps/s")
        if progress.get("seconds_left") is not None:
            parts.append(f"{duration(progress['seconds_left'])} left")
    if document["cost"]:
        parts.append(f"{about(document['cost']['dollars'])} so far")
    return printable(", ".join(parts))
