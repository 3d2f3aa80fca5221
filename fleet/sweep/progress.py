"""The state of a sweep: gathered from the store (IO), summarised and shown (pure)."""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from spotheal.agent.protocol.clock import parse_rfc3339
from spotheal.agent.protocol.errors import ConfigError, NotFound, SpothealError
from spotheal.agent.protocol.foreign_text import printable
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.report.series import finite
from spotheal.fleet.run import engine, runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import cut, lines_of, table
from spotheal.fleet.status.shortage import shortage, types_in, zones_in

SCHEMA_VERSION = 1
_READERS = 16
ROWS_SHOWN = 40
_FAILED_SHOWN, _REASON_LINES = 3, 8
_CLOCKS_APART = timedelta(minutes=10)  # AWS's and the operator's
# A sweep's fleet is not `request`'s.
_REPLACE = "`fleetctl cancel --save`, `fleetctl sweep run LIST --resume`"


@dataclass(frozen=True)
class SweepFacts:
    """`marks`: entry -> (claims, "" or done or failed). `statuses` of entries that were taken; `launches` unread."""

    job: str
    run: str
    store: str
    entries: list[dict[str, Any]]
    marks: dict[int, tuple[int, str]]
    statuses: dict[int, dict[str, Any]]
    status: dict[str, Any]
    fleet: dict[str, Any]
    fleet_state: str
    missing: dict[str, Any] | None = None  # why no more instances come


@sensible
def gather(session: Session, run: runs.Run) -> SweepFacts:
    """One list call and one read for each entry that was taken, in parallel."""
    store = run.store
    document = store.get_json(LAYOUT.sweep)
    if document is None:
        raise NotFound(f"run {run.id} of job {run.job} is no sweep", next_step=f"`fleetctl status {run.job}`")
    entries = list(document["entries"])
    marks = marks_of(store.keys(LAYOUT.queue))
    with ThreadPoolExecutor(_READERS) as pool:
        documents = pool.map(
            lambda index: store.get_json(f"{LAYOUT.entry(index)}/{LAYOUT.status}") or {}, sorted(marks)
        )
        statuses = dict(zip(sorted(marks), documents, strict=True))
    fleet = run.fleet_document()
    fleet_id = str(fleet.get("fleet_id") or "")
    state = runs.fleet_state(session.client("ec2"), fleet_id) if fleet_id else ""
    status = store.read_status() or {}
    is_over = bool(status.get("reason")) or sum(bool(ended) for _, ended in marks.values()) == len(entries)
    missing = None if is_over or state not in engine.LIVE_STATES else _missing(session, fleet)
    return SweepFacts(run.job, run.id, str(store.url), entries, marks, statuses, status, fleet, state, missing)


def _missing(session: Session, fleet: dict[str, Any]) -> dict[str, Any] | None:
    """Why the fleet launches no more instances, by its own history; None if it does, or if it cannot be read."""
    now, text = datetime.now(timezone.utc), str(fleet.get("request") or "")
    with suppress(SpothealError, ValueError):
        since = parse_rfc3339(str(fleet.get("requested_at"))) - _CLOCKS_APART
        events = engine.history(session.client("ec2"), str(fleet["fleet_id"]), since)
        if (lack := shortage(events, types=types_in(text), zones=zones_in(text))) is not None:
            cure = lack.next_step.replace("`fleetctl request --replace`", _REPLACE)
            return {**lack.to_document(now), "next_step": cure}
    return None


def marks_of(keys: list[str]) -> dict[int, tuple[int, str]]:
    """Entry -> (claims, "" or done or failed), of the keys of a sweep's queue."""
    marks: dict[int, tuple[int, str]] = {}
    for key in keys:
        index, _, mark = key.removeprefix(LAYOUT.queue).partition(".")
        if not index.isdigit() or mark.endswith(".back"):
            continue
        claims, ended = marks.get(int(index), (0, ""))
        marks[int(index)] = (max(claims, int(mark)), ended) if mark.isdigit() else (claims, mark)
    return marks


@sensible
def summarise(facts: SweepFacts) -> dict[str, Any]:
    """The document of `--output json`; unknown figures are null."""
    rows = [_row(facts, index) for index in range(len(facts.entries))]
    count = {state: sum(row["state"] == state for row in rows) for state in ("done", "failed", "running", "waiting")}
    return {
        "schema_version": SCHEMA_VERSION,
        "job": facts.job,
        "run": facts.run,
        "store": facts.store,
        "phase": facts.status.get("phase")
        if facts.status.get("reason")
        else ("training" if facts.marks else "requested"),
        "reason": facts.status.get("reason") or "",
        "fleet": {"id": facts.fleet.get("fleet_id"), "state": facts.fleet_state or None},
        "no_capacity": facts.missing,
        "batch_job": (facts.fleet.get("batch") or {}).get("job_id"),
        "runs": {"all": len(rows), **count},
        "entries": rows,
    }


def _row(facts: SweepFacts, index: int) -> dict[str, Any]:
    claims, ended = facts.marks.get(index, (0, ""))
    status = facts.statuses.get(index, {})
    progress = status.get("progress") or {}
    return {
        "index": index,
        "parameters": facts.entries[index],
        "state": ended or ("running" if claims and status.get("phase") != Phase.REQUESTED.value else "waiting"),
        "instances": claims,
        "instance": status.get("instance") if claims and not ended else None,
        "phase": status.get("phase"),
        "reason": status.get("reason") or "",
        "step": progress.get("step"),
        "steps_total": progress.get("steps_total"),
        "loss": progress.get("loss"),
        "metrics": progress.get("metrics") or {},
    }


def by_metric(rows: list[dict[str, Any]], metric: str, *, smallest: bool) -> list[dict[str, Any]]:
    """Rows by `metric`, the best first, rows without it last; ConfigError if no row has it."""
    metrics = {name for row in rows for name in row["metrics"]}
    metrics |= {"loss"} if any(_has(row, "loss") for row in rows) else set()
    if metric not in metrics:
        cure = f"--metric one of {', '.join(sorted(metrics))}" if metrics else "wait for the first progress of a run"
        raise ConfigError(f"no run has written {metric!r}", next_step=cure)
    sign = 1.0 if smallest else -1.0
    return sorted(rows, key=lambda row: (not _has(row, metric), sign * float(value_of(row, metric) or 0), row["index"]))


def value_of(row: dict[str, Any], metric: str) -> float | None:
    value = row["loss"] if metric == "loss" else row["metrics"].get(metric)
    return finite(value)


def _has(row: dict[str, Any], metric: str) -> bool:
    return value_of(row, metric) is not None


# ---------------------------------------------------------------------------------------------------------------- shown
@sensible
def render(document: dict[str, Any], metric: str = "", width: int = 200) -> str:
    """One screen: the counts, and the most interesting runs (failed and running first, then the rest). `width` in
    columns: a row is cut there, at its parameters."""
    count = document["runs"]
    rows = [
        ("job", document["job"]),
        ("run", document["run"]),
        ("phase", str(document["phase"])),
        ("runs", f"{count['done']} of {count['all']} done, {count['running']} running, {count['waiting']} waiting, "
                 f"{count['failed']} failed"),
        ("at Batch", str(document["batch_job"])) if document.get("batch_job") else
        ("fleet", f"{document['fleet']['id'] or 'none yet'}  {document['fleet']['state'] or ''}".rstrip()),
        ("store", document["store"]),
    ]  # fmt: skip
    if document["reason"]:
        rows.insert(3, ("reason", document["reason"]))
    if missing := document.get("no_capacity"):
        rows[4:4] = [("capacity", missing["says"]), ("", f"try: {missing['next_step']}")]
    order = ["failed", "running", "done", "waiting"]
    entries = document["entries"] if metric else sorted(
        document["entries"], key=lambda row: (order.index(row["state"]), row["index"])
    )  # fmt: skip
    constant = _constant_names(entries)
    heads = ("RUN", "STATE", "STEP", metric.upper() or "LOSS", "INSTANCES", "PARAMETERS")
    cells = [_cells(row, metric, constant) for row in entries[:ROWS_SHOWN]]
    wide = [max(len(str(row[column])) for row in (heads, *cells)) for column in range(len(heads) - 1)]
    room = max(20, width - sum(wide) - 2 * len(wide))
    cells_shown = [(*row[:-1], cut(row[-1], room)) for row in cells]
    rest = len(entries) - len(cells_shown)
    text = lines_of(rows) + "\n\n" + table(heads, cells_shown) + (f"\n… and {rest} more" if rest > 0 else "")
    return text + _failures(document["entries"])


def _failures(rows: list[dict[str, Any]]) -> str:
    """Why the first runs that failed did, in as many lines as it takes to see it."""
    failed = sorted((row for row in rows if row["state"] == "failed" and row["reason"]), key=lambda row: row["index"])
    text = ""
    for row in failed[:_FAILED_SHOWN]:
        lines = [printable(line) for line in str(row["reason"]).splitlines()]
        lines = lines if len(lines) <= _REASON_LINES else [lines[0], "…", *lines[2 - _REASON_LINES :]]
        text += f"\n\nrun {row['index']} failed: " + "\n  ".join(lines)
    rest = len(failed) - _FAILED_SHOWN
    return text + (f"\n\n… and {rest} more that failed" if rest > 0 else "")


def in_words(value: Any) -> str:
    """A parameter's value as a person writes it."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _constant_names(rows: list[dict[str, Any]]) -> set[str]:
    """Parameters that all rows have alike."""
    first = rows[0]["parameters"] if rows else {}
    return {name for name, value in first.items() if all(row["parameters"].get(name) == value for row in rows)}


def step_of(row: dict[str, Any]) -> str | None:
    """`40/100`, or `40` if the total is not known."""
    if row["step"] is None:
        return None
    return f"{row['step']}/{row['steps_total']}" if row["steps_total"] else str(row["step"])


def _cells(row: dict[str, Any], metric: str, constant: Collection[str]) -> tuple[Any, ...]:
    value = value_of(row, metric or "loss")
    # Parameters that differ come first: a row is cut at its end.
    pairs = sorted(row["parameters"].items(), key=lambda pair: pair[0] in constant)
    parameters = ", ".join(f"{name}={in_words(value)}" for name, value in pairs)
    metric_text = None if value is None else f"{value:.4g}"
    return row["index"], row["state"], step_of(row), metric_text, row["instances"], parameters
