"""The content of a report: read from the store and AWS (IO), put together (pure). `page` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from spotheal.agent.money.bill_inputs import Event, moment_of
from spotheal.agent.money.instance_time import Stay
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import NotFound
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.report.charts import Bar
from spotheal.fleet.report.series import Sample, Series, is_whole, json_lines, samples_of, series_of
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import duration
from spotheal.fleet.status.receipt import Receipt, history_of, receipt

if TYPE_CHECKING:
    from spotheal.fleet.run import runs
    from spotheal.fleet.run.session import Session
    from spotheal.fleet.status.status import RunFacts

SCHEMA_VERSION = 1
REHEARSED = "A rehearsal on one machine: nothing was paid, the prices are made up, and minutes stand for hours."
_PROGRESS_FILES_MAX = 200  # of the newest instances


@dataclass(frozen=True)
class Resume:
    """A start of the trainer after the first. `again`: steps beyond it that had been done already, None if unknown."""

    time: datetime
    instance: str
    attempt: int | None
    step: int | None
    again: int | None


@dataclass(frozen=True)
class Taken:
    """A notice. `step`: the last that the trainer completed before it, if known."""

    time: datetime
    instance: str
    zone: str
    action: str
    step: int | None


@dataclass(frozen=True)
class Report:
    job: str
    run: str
    phase: str
    reason: str
    ended: bool
    store: str
    revision: str
    created: datetime
    start: datetime
    end: datetime
    receipt: Receipt
    bars: tuple[Bar, ...]
    series: Mapping[str, Series]
    samples: tuple[Sample, ...]
    resumes: tuple[Resume, ...]
    taken: tuple[Taken, ...]
    kept_volumes: tuple[str, ...]
    banner: str = ""

    @property
    def lost(self) -> tuple[Stay, ...]:
        """Machines that AWS took, or that went without a word."""
        return tuple(stay for stay in self.receipt.bill.stays if stay.ended_by in ("aws", "unknown"))

    @property
    def knows_every_resume(self) -> bool:
        """Whether nothing is unknown of how much was done again."""
        return all(resume.step is not None for resume in self.resumes)

    @property
    def is_done(self) -> bool:
        return self.phase == Phase.DONE.value

    def to_document(self) -> dict[str, Any]:
        """`--output json`: the same figures."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "run": self.run,
            "phase": self.phase,
            "reason": self.reason,
            "ended": self.ended,
            "store": self.store,
            "revision": self.revision,
            "made": rfc3339(self.created),
            "start": rfc3339(self.start),
            "end": rfc3339(self.end),
            "seconds": round((self.end - self.start).total_seconds()),
            "receipt": self.receipt.to_document(),
            "interruptions": [_plain(interruption) for interruption in self.taken],
            "machines_lost": len(self.lost),
            "resumes": [_plain(resume) for resume in self.resumes],
            "curves": {
                name: {"points": len(curve.points), "first": curve.points[0][1], "last": curve.points[-1][1]}
                for name, curve in sorted(self.series.items())
            },
            "volumes_kept": list(self.kept_volumes),
        }


def _plain(thing: Resume | Taken) -> dict[str, Any]:
    return {key: rfc3339(value) if isinstance(value, datetime) else value for key, value in vars(thing).items()}


# ------------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class Material:
    """`progress`: instance -> its samples as JSON lines."""

    facts: RunFacts
    metrics: str
    progress: Mapping[str, str]


def gather(session: Session, run: runs.Run) -> Material:
    """Everything that status reads, the metrics file and the samples of each instance."""
    from spotheal.fleet.status import status

    facts = status.gather(session, run)
    keys = [key for key in run.store.keys(LAYOUT.progress("").removesuffix(".jsonl")) if key.endswith(".jsonl")]
    with ThreadPoolExecutor(8) as pool:
        metrics = pool.submit(run.store.get_bytes, LAYOUT.metrics)
        bodies = list(pool.map(run.store.get_bytes, keys[-_PROGRESS_FILES_MAX:]))
        text = (metrics.result() or b"").decode(errors="replace")
    progress = {
        key.rpartition("/")[2].removesuffix(".jsonl"): (body or b"").decode(errors="replace")
        for key, body in zip(keys[-_PROGRESS_FILES_MAX:], bodies, strict=True)
    }
    return Material(facts, text, progress)


@sensible
def make(material: Material, now: datetime, banner: str = "") -> Report:
    """`banner` stands at the top. NotFound if nothing has run yet."""
    facts = material.facts
    history = history_of(facts, now)
    run_receipt = receipt(history, facts.status)
    phase = str(facts.status.get("phase") or Phase.REQUESTED.value)
    starts = [stay.start for stay in run_receipt.bill.stays] + ([history.requested_at] if history.requested_at else [])
    if not run_receipt.bill.stays:
        raise NotFound(
            f"run {facts.run} of {facts.job} has launched no instance yet: there is nothing to report",
            next_step=f"`fleetctl status {facts.job}`",
        )
    ended = phase in {member.value for member in Phase if member.is_end}
    start = min(starts)
    end = (
        run_receipt.bill.until
        if not ended
        else max([stay.end for stay in run_receipt.bill.stays] or [run_receipt.bill.until])
    )
    samples = [sample for name, text in material.progress.items() for sample in samples_of(name, text)]
    samples.sort(key=lambda sample: (sample.time, sample.step))
    resumes = tuple(_resumes(history.events, samples))
    redone = max(run_receipt.steps.redone, sum(resume.again or 0 for resume in resumes))
    run_receipt = replace(run_receipt, steps=replace(run_receipt.steps, redone=redone))
    return Report(
        job=facts.job,
        run=facts.run,
        phase=phase,
        reason=str(facts.status.get("reason") or ""),
        ended=ended,
        store=facts.store,
        revision=str(facts.status.get("revision") or ""),
        created=now,
        start=start,
        end=max(end, start + timedelta(seconds=1)),
        receipt=run_receipt,
        bars=tuple(_bar(stay, history.events) for stay in run_receipt.bill.stays),
        series=_series(material.metrics, material.progress),
        samples=tuple(samples),
        resumes=resumes,
        taken=tuple(_taken(history.events)),
        kept_volumes=tuple(volume.id for volume in run_receipt.bill.volumes if volume.exists),
        banner=banner,
    )


def _series(metrics: str, progress: Mapping[str, str]) -> dict[str, Series]:
    """Of the metrics file; a trainer that writes none has its progress drawn."""
    curves = series_of(json_lines(metrics))
    if curves:
        return curves
    lines = [line for text in progress.values() for line in json_lines(text)]
    lines.sort(key=lambda line: str(line.get("time", "")))
    return series_of({k: v for k, v in line.items() if k not in ("save_seconds", "stall_seconds")} for line in lines)


def _bar(stay: Stay, events: Sequence[Event]) -> Bar:
    own_events = [e for e in events if e.get("instance") == stay.instance and _within(e, stay)]
    trained = next((moment_of(e.get("time")) for e in own_events if e["event"] == "trainer-started"), None)
    moved = any(e["event"] == "volume" and e.get("moved_from") for e in own_events)
    kind = "free" if stay.free else stay.lifecycle if stay.lifecycle == "on-demand" else "spot"
    cost = "free: AWS took it within its first hour" if stay.free else (
        "price not known" if stay.dollars is None else f"about ${stay.dollars:.4f}"
    )
    ends = {"aws": "taken by AWS", "run": "the run ended", "shutdown": "shut down", "unknown": "gone without a word"}
    says = (
        f"{stay.instance}, {stay.instance_type} in {stay.zone}, {stay.lifecycle}: {duration(stay.seconds)}"
        f" from {stay.start:%Y-%m-%d %H:%M:%S} UTC; {ends.get(stay.ended_by, 'running')}; {cost}"
    )
    return Bar(
        stay.zone or "zone not known", stay.instance_type, says, stay.start, stay.end, trained, kind,
        stay.ended_by == "aws", moved,
    )  # fmt: skip


def _within(event: Event, stay: Stay) -> bool:
    moment = moment_of(event.get("time"))
    return moment is not None and stay.start <= moment <= stay.end + timedelta(minutes=5)


def _resumes(events: Sequence[Event], samples: Sequence[Sample]) -> list[Resume]:
    """If the ledger does not have the step at which the trainer went on (it reported late), its first sample has it."""
    resumes: list[Resume] = []
    furthest, position, started = 0, 0, False
    for event in events:
        moment = moment_of(event.get("time"))
        if event["event"] == "trainer-started" and moment is not None:
            name, attempt, step = str(event.get("instance", "")), event.get("attempt"), event.get("resumed_step")
            until = moment
            if not is_whole(step):
                first = _first(samples, name, moment)
                step = None if first is None else first.step if first.saved is None else min(first.saved, first.step)
                until = moment if first is None else first.time
            while position < len(samples) and samples[position].time < until:
                furthest = max(furthest, samples[position].step)
                position += 1
            if started or step:
                redone = None if step is None else max(0, furthest - step)
                resumes.append(Resume(moment, name, attempt if is_whole(attempt) else None, step, redone))
            started = True
        elif event["event"] in ("trainer-ended", "predecessor") and is_whole(event.get("last_step")):
            furthest = max(furthest, event["last_step"])
    return resumes


def _first(samples: Sequence[Sample], instance: str, since: datetime) -> Sample | None:
    """Of an attempt whose start was reported late: its samples may be a little older than the start."""
    early = since - timedelta(seconds=60)
    return next((sample for sample in samples if sample.instance == instance and sample.time >= early), None)


def _taken(events: Sequence[Event]) -> list[Taken]:
    """Notices, without the withdrawn ones."""
    interruptions: list[Taken] = []
    for event in events:
        name, moment = str(event.get("instance", "")), moment_of(event.get("time"))
        if event["event"] == "notice" and event.get("action") != "shutdown" and moment is not None:
            interruptions.append(Taken(moment, name, str(event.get("zone", "")), str(event.get("action", "")), None))
        elif event["event"] == "interruption-withdrawn":
            interruptions = [interruption for interruption in interruptions if interruption.instance != name]
        elif event["event"] == "trainer-ended" and interruptions and interruptions[-1].instance == name:
            step = event.get("last_step")
            interruptions[-1] = replace(interruptions[-1], step=step if is_whole(step) else interruptions[-1].step)
    return interruptions
