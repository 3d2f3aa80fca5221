"""The rehearsal while it runs, on standard error: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_LINE_SECONDS = 5.0


@dataclass(frozen=True)
class MachineView:
    """One machine now. `state`: booting, healing, training, under notice, ended."""

    instance: str
    zone: str
    instance_type: str
    state: str
    seconds: float
    step: int | None = None


@dataclass(frozen=True)
class View:
    """The whole rehearsal now."""

    seconds: float
    machines: tuple[MachineView, ...] = ()
    step: int | None = None
    steps_total: int | None = None
    saved_step: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None


class Display(Protocol):
    def event(self, seconds: float, text: str) -> None: ...

    def show(self, view: View) -> None: ...


class Silent:
    """For tests and callers that show nothing."""

    def event(self, seconds: float, text: str) -> None:
        pass

    def show(self, view: View) -> None:
        pass


class Lines:
    """Events at once, and a line of progress every few seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._last = write, float("-inf")

    def event(self, seconds: float, text: str) -> None:
        self._write(f"{seconds:6.1f} s  {text}")

    def show(self, view: View) -> None:
        if time.monotonic() - self._last < _LINE_SECONDS:
            return
        self._last = time.monotonic()
        machines = ", ".join(f"{m.instance} {m.zone} {m.state}" for m in view.machines if m.state != "ended")
        self._write(f"{view.seconds:6.1f} s  {_steps(view)}; {machines or 'no machine'}")


class Screen:
    """A rich Live display; events scroll away above it and stay."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def event(self, seconds: float, text: str) -> None:
        self._live.console.print(Text.assemble((f"{seconds:6.1f} s", "dim"), f"  {text}"))

    def show(self, view: View) -> None:
        self._live.update(self._render(view))

    def _render(self, view: View) -> RenderableType:
        machines = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("instance", "zone", "type", "state", "step", "seconds"):
            machines.add_column(title, no_wrap=True)
        colours = {"training": "cyan", "under notice": "red", "ended": "dim"}
        for m in view.machines:
            step = "" if m.step is None else str(m.step)
            state = Text(m.state, colours.get(m.state, "yellow"))
            machines.add_row(m.instance, m.zone, m.instance_type, state, step, f"{m.seconds:.0f}")
        line = Table.grid(padding=(0, 2))
        line.add_row(ProgressBar(total=view.steps_total or 100, completed=view.step or 0, width=24), _steps(view))
        return Group(machines, line, Text(f"{view.seconds:.0f} s"))


def _steps(view: View) -> str:
    if view.step is None:
        training = any(machine.state == "training" for machine in view.machines)
        return "no step told yet" if training else "no step yet"
    parts = [f"step {view.step}" + (f" of {view.steps_total}" if view.steps_total else "")]
    if view.saved_step is not None:
        parts.append(f"saved {view.saved_step}")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.samples_per_second is not None:
        parts.append(f"{view.samples_per_second:.0f} samples/s")
    return ", ".join(parts)


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """The display that suits `console` (of standard error)."""
    if not console.is_terminal:
        yield Lines(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield Screen(live)
