"""The status document as a screen for people: as wide as the terminal, in colour if there is one. Pure.

Everything that comes from a run (reasons, names, zones) is shown as plain text: nothing in it is markup or steers the
terminal.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotheal.agent.money.billing import about
from spotheal.agent.protocol.clock import parse_rfc3339
from spotheal.agent.protocol.foreign_text import printable
from spotheal.agent.protocol.names import Phase, VolumeState
from spotheal.fleet.run.machines import in_words
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import duration
from spotheal.fleet.status import unheard

_LAUNCHES_SHOWN = 10
_BAR_WIDTH = 30
_WIDE = 105  # from so many columns on the launches say their type and why they ended
_PHASE_STYLES = {Phase.TRAINING.value: "bold green", Phase.DONE.value: "bold green", Phase.FAILED.value: "bold red",
                 Phase.SETUP_FAILED.value: "bold red", Phase.PARKED.value: "bold red",
                 Phase.INTERRUPTED.value: "bold yellow", Phase.LIMIT.value: "bold yellow"}  # fmt: skip
_OUTCOME_STYLES = {"training": "green", "interrupted": "yellow", "failed": "red", "lost": "red"}


@sensible
def render(
    document: dict[str, Any], now: datetime, *, width: int = 200, colour: bool = False, ascii: bool = False
) -> str:
    """One screen. `width` in columns; without `colour` plain text; `ascii`: a bar that every terminal can show."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, color_system="standard" if colour else None, highlight=False,
        emoji=False, markup=False, legacy_windows=False,
    )  # fmt: skip
    console.print(_screen(document, now, width, ascii))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def _screen(document: dict[str, Any], now: datetime, width: int, ascii: bool) -> RenderableType:
    parts: list[RenderableType] = [_facts(document, now, ascii)]
    if document["launches"]:
        parts += ["", _launches(document["launches"], width >= _WIDE)]
        hidden = len(document["launches"]) - _LAUNCHES_SHOWN
        if hidden > 0:
            parts.append(Text(f"… and {hidden} before", style="dim"))
    if document["volumes"]:
        parts += ["", _volumes(document)]
    return Group(*parts)


# ---------------------------------------------------------------------------------------------------------------- facts
def _facts(document: dict[str, Any], now: datetime, ascii: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _rows(document, now, ascii):
        grid.add_row(Text(name), value if isinstance(value, Text) else Text(printable(value)))
    return grid


def _rows(document: dict[str, Any], now: datetime, ascii: bool) -> Iterable[tuple[str, str | Text]]:
    yield "job", Text(printable(document["job"]), style="bold")
    yield "run", document["run"]
    yield "phase", _phase(document)
    if document["reason"]:
        yield "reason", document["reason"]
    shortage = document["no_capacity"]
    if shortage:
        yield "capacity", Text(printable(shortage["says"]), style="yellow")
        yield "", Text(printable(f"try: {shortage['next_step']}"))
    if document.get("unheard"):
        yield "boot", Text(printable(unheard.in_words(document["unheard"])), style="yellow")
        yield "", document["unheard"]["next_step"]
    instance = document["instance"]
    for number, machine in enumerate(document.get("machines") or []):
        count = len(document["machines"])
        heard = f", heard {duration(machine['heard_seconds'])} ago" if machine["heard_seconds"] is not None else ""
        name = "" if number else _count(count, "machine")
        yield name, f"{machine['instance']}  {in_words(machine)}{heard}"
    if instance["id"] and not document["ended"] and not document.get("machines"):
        place = " ".join(str(instance[key]) for key in ("type", "zone") if instance[key])
        heard = f"heard {duration(document['heartbeat_age_seconds'])} ago"
        if instance.get("alive") is False:
            heard = "gone: the fleet replaces it" if document["fleet"]["live"] else "gone"
        yield "instance", f"{instance['id']}  {place}, {heard}"
    if document["notice"] and not document["ended"]:
        notice = document["notice"]
        yield "notice", Text(printable(f"{notice.get('action')} by {notice.get('deadline')}"), style="yellow")
    if document["space"] and not document["ended"]:
        yield "volume", Text(printable(_space(document["space"])), style="yellow")
    for number, line in enumerate(document["lost"]):
        yield "" if number else "lost", Text(printable(line), style="yellow")
    if document["progress"]:
        yield "progress", _bar(document["progress"], ascii)
        details = pace(document["progress"])
        if details:
            yield "", details
    saved = document["checkpoint"]
    if saved:
        age = "" if saved["age_seconds"] is None else f", {duration(saved['age_seconds'])} ago"
        yield "saved", f"step {saved['step']}{age}"
    if document["cost"]:
        yield "cost", cost(document["cost"])
    if document.get("batch_job"):
        yield "at Batch", f"{document['batch_job']}  `fleetctl batch status {document['job']}` asks AWS Batch"
    else:
        yield from _fleet(document)
    yield "store", document["store"]


def _fleet(document: dict[str, Any]) -> Iterable[tuple[str, str]]:
    fleet, launches = document["fleet"], document["launches"]
    yield "fleet", f"{fleet['id'] or 'none yet'}  {fleet['state'] or ''}".rstrip()
    yield "history", (f"{_count(len(launches), 'instance')}, {_count(document['interruptions'], 'interruption')}, "
                      f"{_count(document['zone_moves'], 'move')}")  # fmt: skip


def _space(space: dict[str, Any]) -> str:
    """Advice before the volume is full."""
    folders = [(row.get("folder") or "its top", row["bytes"] / (1 << 30)) for row in space["grown"]]
    grown = ", ".join(f"{folder} {gib:.1f} GiB" for folder, gib in folders)
    return f"{space['percent']} % full" + (f"; this machine wrote: {grown}" if grown else "")


def _phase(document: dict[str, Any]) -> Text:
    phase = str(document["phase"])
    text = Text(printable(phase), style=_PHASE_STYLES.get(phase, "bold"))
    if document["ended"]:
        return text
    if document["fleet"]["live"] is False and document["fleet"]["id"]:
        return text.append(", but its fleet is gone: `fleetctl request --resume` goes on", style="yellow")
    if document["silent"]:
        return text.append(", but silent: the fleet replaces a lost instance", style="yellow")
    return text


def _bar(progress: dict[str, Any], ascii: bool) -> Text:
    step, total = progress.get("step"), progress.get("steps_total")
    if not total or not isinstance(step, int):
        return Text(printable(f"step {step}"))
    filled = max(0, min(_BAR_WIDTH, round(_BAR_WIDTH * step / total)))
    full, empty = ("#", "-") if ascii else ("━", "─")
    text = Text(full * filled, style="green").append(empty * (_BAR_WIDTH - filled), style="dim")
    return text.append(f"  step {step} of {total} ({100 * step / total:.0f} %)", style="default")


def pace(progress: dict[str, Any]) -> str:
    """`epoch 1, loss 0.31, 812 samples/s, 2.1 steps/s, 3 h 12 min left`, as far as it is known."""
    rate, steps, seconds_left = (
        progress.get(key) for key in ("samples_per_second", "steps_per_second", "seconds_left")
    )
    parts = [
        f"epoch {progress['epoch']}" if progress.get("epoch") is not None else "",
        f"loss {progress['loss']:.4g}" if isinstance(progress.get("loss"), int | float) else "",
        f"{rate:.0f} samples/s" if rate else "",
        _speed(steps) if steps else "",
        f"{duration(seconds_left)} left" if seconds_left is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def _speed(steps_per_second: float) -> str:
    if steps_per_second >= 1:
        return f"{steps_per_second:.1f} steps/s"
    return f"{1 / steps_per_second:.1f} s a step"


def cost(document: dict[str, Any]) -> str:
    """`about $3.21 so far, $0.42 an hour now; 61 % below on-demand`."""
    text = f"{about(document['dollars'])} so far"
    if document["dollars_per_hour"]:
        text += f", ${document['dollars_per_hour']:.2f} an hour now"
    saved = document["saved_percent"]  # of the instances alone
    if saved is not None and saved > 0:
        text += f"; {saved:.0f} % below on-demand"
    missing = document["instances_without_price"]
    return text + (f"; without {_count(missing, 'instance')} of unknown price" if missing else "")


# --------------------------------------------------------------------------------------------------------------- tables
def _launches(launches: list[dict[str, Any]], wide: bool) -> Table:
    heads = ["INSTANCE", *(["TYPE"] if wide else []), "ZONE", "SINCE (UTC)", "LASTED", "NOW", "SAVED",
             *(["WHY"] if wide else [])]  # fmt: skip
    table = _table(heads, gap=2 if wide else 1)
    for launch in launches[-_LAUNCHES_SHOWN:]:
        outcome = launch["outcome"] or launch["state"]
        cells = [_cell(launch["instance"]), *([_cell(launch["type"])] if wide else []), _cell(launch["zone"]),
                 _cell(_short(launch["time"])), _cell(duration(launch["seconds"])),
                 _cell(outcome, _OUTCOME_STYLES.get(str(outcome), "")), _cell(launch["saved_step"]),
                 *([_cell(launch["reason"])] if wide else [])]  # fmt: skip
        table.add_row(*cells)
    return table


def _volumes(document: dict[str, Any]) -> Table:
    """Volumes that exist, with their source in the last column; then their deleted predecessors."""
    origin = {volume["id"]: volume for volume in document["lineage"]}
    table = _table(["VOLUME", "ZONE", "GIB", "STATE", "ROLE", "TERM", "FROM"])
    for volume in _by_term(document["volumes"]):
        lineage = origin.get(volume["id"], {})
        source = lineage.get("copied_from") or lineage.get("snapshot")
        table.add_row(_cell(volume["id"]), _cell(volume["zone"]), _cell(volume["size_gib"]), _cell(volume["state"]),
                      _cell(volume["role"], "green" if volume["role"] == VolumeState.CURRENT.value else ""),
                      _cell(volume["term"]), _cell(source))  # fmt: skip
    for volume in document["lineage"]:
        if volume["exists"] is False:
            terms = ",".join(map(str, volume["terms"]))
            cells = (volume["id"], volume["zone"], None, "deleted", None, terms, volume["copied_from"])
            table.add_row(*(_cell(text, "dim") for text in cells))
    return table


def _table(heads: list[str], gap: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=head not in ("WHY", "FROM"), overflow="fold")
    return table


def _cell(value: Any, style: str = "") -> Text:
    return Text("-" if value is None or value == "" else printable(str(value)), style=style)


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def _short(time: str | None) -> str | None:
    """`11-21 14:17` of an RFC 3339 time, so that a row fits 80 columns."""
    try:
        return parse_rfc3339(str(time)).strftime("%m-%d %H:%M")
    except ValueError:
        return time


def _by_term(volumes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    current = VolumeState.CURRENT.value

    def term(volume: dict[str, Any]) -> int:
        return int(volume["term"]) if str(volume["term"] or "").isdigit() else 0

    return sorted(volumes, key=lambda volume: (volume["role"] != current, -term(volume)))
