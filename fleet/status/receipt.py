"""The cost of a run and its work: the ledger as a receipt. Pure. An estimate, whose lines add up to the cent.

`cost_so_far` is the short form that `status` and `request --wait` show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from spotheal.agent.money.bill_inputs import Disk, Event, History, Known, Listed, moment_of
from spotheal.agent.money.billing import PRICES_AS_OF, PRICES_REGIONS, Bill, about, bill, cents
from spotheal.agent.money.instance_time import Stay
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.names import Phase
from spotheal.agent.record.ledger import steps_redone
from spotheal.agent.record.lost_work import FilesWritten, files_written, lost_work
from spotheal.fleet.run.store_documents import sensible

if TYPE_CHECKING:
    from spotheal.fleet.status.status import RunFacts

_YOUNG_SECONDS = 180.0  # DescribeInstances may not show a younger instance yet


@dataclass(frozen=True)
class CostSoFar:
    """`on_demand`: the on-demand price of the same hours, to compare with `instances`; None if none is listed."""

    dollars: Decimal
    instances: Decimal
    per_hour: Decimal
    on_demand: Decimal | None
    saved_percent: float | None
    unpriced: int  # instances without a known price, not included

    def says(self) -> str:
        """`about $3.21 so far, $0.42 an hour; 61 % below on-demand`."""
        text = f"{about(self.dollars)} so far"
        if self.per_hour:
            text += f", ${cents(self.per_hour)} an hour now"
        if self.saved_percent is not None and self.saved_percent > 0:
            text += f"; {self.saved_percent:.0f} % below on-demand"
        return text + (f"; {self.unpriced} without a known price" if self.unpriced else "")

    def to_document(self) -> dict[str, Any]:
        return {
            "currency": "USD",
            "estimate": True,
            "dollars": float(self.dollars),
            "dollars_per_hour": float(cents(self.per_hour)),
            "on_demand_dollars": None if self.on_demand is None else float(self.on_demand),
            "saved_percent": self.saved_percent,
            "instances_without_price": self.unpriced,
        }


@sensible
def cost_so_far(history: History) -> CostSoFar:
    run_bill = bill(history)
    instances = run_bill.lines["spot"] + run_bill.lines["on_demand"]
    total = run_bill.total or sum(run_bill.exact.values(), Decimal(0))  # less than a cent is not nothing
    return CostSoFar(
        total, instances, run_bill.rate, _on_demand(run_bill), _saved_percent(run_bill), len(run_bill.unpriced)
    )


@dataclass(frozen=True)
class Steps:
    """`done`: how far the run has come; `redone`: again, after a resume; `lost`: neither saved nor done again yet."""

    done: int | None
    redone: int
    lost: int
    total: int | None = None


@dataclass(frozen=True)
class Line:
    """One line of the receipt; the lines' dollars add up to the total."""

    name: str
    quantity: str
    dollars: Decimal
    note: str = ""


@dataclass(frozen=True)
class Receipt:
    """`on_demand` and `saved` compare instances alone: the same hours at list prices. None if none is known."""

    bill: Bill
    lines: tuple[Line, ...]
    total: Decimal
    on_demand: Decimal | None
    saved: Decimal | None
    saved_percent: float | None
    kept_month: Decimal  # dollars a month of the disks that still exist
    steps: Steps
    interruptions: int
    moves: int
    free_seconds: int
    notes: tuple[str, ...]
    lost: tuple[str, ...] = ()  # work that was lost without a word, a line each
    written: tuple[FilesWritten, ...] = ()  # files that interrupted attempts had written

    @property
    def instances(self) -> Decimal:
        """The cost of all instances, to the cent."""
        lines = self.bill.lines
        return lines["spot"] + lines["on_demand"]

    @property
    def is_under_a_cent(self) -> bool:
        return not self.total and any(self.bill.exact.values())

    def to_document(self) -> dict[str, Any]:
        return {
            "currency": "USD",
            "estimate": True,
            "total": float(self.total),
            "lines": [{**vars(line), "dollars": float(line.dollars)} for line in self.lines],
            "on_demand_dollars": None if self.on_demand is None else float(self.on_demand),
            "saved_dollars": None if self.saved is None else float(self.saved),
            "saved_percent": self.saved_percent,
            "kept_dollars_per_month": float(self.kept_month),
            "instances": [_instance(stay) for stay in self.bill.stays],
            "interruptions": self.interruptions,
            "moves": self.moves,
            "free_seconds": self.free_seconds,
            "steps": vars(self.steps),
            "notes": list(self.notes),
            "lost": list(self.lost),
            "files_of_interrupted_attempts": [
                vars(attempt) | {"files": list(attempt.files)} for attempt in self.written
            ],
        }


@sensible
def receipt(history: History, status: Mapping[str, Any] | None = None) -> Receipt:
    """The receipt of a run; `status` is its status.json, which knows how far a living trainer is."""
    run_bill = bill(history)
    on_demand = _on_demand(run_bill)
    paid = cents(run_bill.spot) + cents(run_bill.on_demand)
    events = history.events
    return Receipt(
        bill=run_bill,
        lines=tuple(_lines(run_bill)),
        total=run_bill.total,
        on_demand=on_demand,
        saved=None if on_demand is None else on_demand - paid,
        saved_percent=_saved_percent(run_bill),
        kept_month=cents(
            sum((disk.month for disk in (*run_bill.volumes, *run_bill.snapshots) if disk.exists), Decimal(0))
        ),
        steps=_steps(events, status or {}),
        interruptions=interruptions(events),
        moves=sum(1 for event in events if event["event"] == "volume" and event.get("moved_from")),
        free_seconds=sum(stay.seconds for stay in run_bill.stays if stay.free),
        notes=tuple(_notes(run_bill)),
        lost=lost_work(events, step_now(status or {})),
        written=files_written(events),
    )


# -------------------------------------------------------------------------------------------------------- what is shown
def _lines(run_bill: Bill) -> list[Line]:
    spot = [stay for stay in run_bill.stays if stay.lifecycle == "spot"]
    rescue = [stay for stay in run_bill.stays if stay.lifecycle != "spot"]
    free = sum(1 for stay in spot if stay.free)
    hours = sum(stay.seconds for stay in run_bill.stays)
    dollars = run_bill.lines
    lines = [
        Line("Spot instances", _hours(spot), dollars["spot"],
             f"{free} interrupted by AWS within the first hour: free" if free else ""),
        Line("On-demand instances", _hours(rescue), dollars["on_demand"]) if rescue else None,
        Line("Volumes", _gib_hours(run_bill.volumes), dollars["volumes"]),
        Line("Snapshots", _count(run_bill.snapshots, "snapshot"), dollars["snapshots"],
             "at most: each counted as a full copy of what was used") if run_bill.snapshots else None,
        Line("Filling of copies", "", dollars["filling"], "each GiB of a snapshot, at initialization_rate")
        if run_bill.filling else None,
        Line("Root disks", _hours(run_bill.stays), dollars["root_disks"]) if run_bill.roots else None,
        Line("Public IPv4 addresses", f"{hours / 3600:.2f} h", dollars["public_ipv4"],
             "one for each instance, free hours too"),
    ]  # fmt: skip
    return [line for line in lines if line is not None]


def _hours(stays: Sequence[Stay]) -> str:
    return f"{_count(stays, 'instance')}, {sum(stay.seconds for stay in stays) / 3600:.2f} h"


def _gib_hours(disks: Sequence[Any]) -> str:
    gib_hours = sum(disk.gib * (disk.end - disk.start).total_seconds() / 3600 for disk in disks)
    return f"{_count(disks, 'volume')}, {gib_hours:.0f} GiB-hours"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")


def _notes(run_bill: Bill) -> list[str]:
    notes = [
        "An estimate from AWS's spot price history and list prices, before taxes, credits and discounts; AWS's bill"
        f" counts. Disk and address prices are those of {', '.join(PRICES_REGIONS)} as of {PRICES_AS_OF}."
    ]
    sources = {stay.price_source for stay in run_bill.stays}
    if "bound" in sources:
        notes.append("Where no price was to be had, an upper bound is counted: the fleet's maximum, or on-demand.")
    if "at-request" in sources:
        notes.append("Where no price was noted on the instance, the spot price at the time of the request is counted.")
    if run_bill.unpriced:
        notes.append(f"Not included, for no price is known: {', '.join(run_bill.unpriced)}.")
    if any(stay.ended_by == "unknown" for stay in run_bill.stays):
        notes.append("Instances that ended without a word are counted until a minute after they were last heard of.")
    notes.append("Not included: S3 (cents a month), data transfer, and datasets of your own.")
    return notes


def _instance(stay: Stay) -> dict[str, Any]:
    return {
        "instance": stay.instance,
        "type": stay.instance_type,
        "zone": stay.zone,
        "lifecycle": stay.lifecycle,
        "start": rfc3339(stay.start),
        "end": None if stay.runs else rfc3339(stay.end),
        "ended_by": stay.ended_by or None,
        "seconds": stay.seconds,
        "free": stay.free,
        "dollars": None if stay.dollars is None else round(float(stay.dollars), 6),
        "dollars_per_hour": None if stay.price_now is None else float(stay.price_now),
        "price_source": stay.price_source,
        "on_demand_dollars": None if stay.on_demand is None else round(float(stay.on_demand), 6),
    }


def _on_demand(run_bill: Bill) -> Decimal | None:
    """Of the same hours; None if one list price is not known: half a sum compares with nothing."""
    if not run_bill.stays or any(stay.on_demand is None for stay in run_bill.stays):
        return None
    return cents(sum((stay.on_demand for stay in run_bill.stays if stay.on_demand is not None), Decimal(0)))


def _saved_percent(run_bill: Bill) -> float | None:
    """Of the exact sums: cents would make 100 % of the first minutes. None if nothing is compared."""
    if not _on_demand(run_bill):
        return None
    listed = sum((stay.on_demand for stay in run_bill.stays if stay.on_demand is not None), Decimal(0))
    return round(float(100 * (1 - (run_bill.spot + run_bill.on_demand) / listed)), 1)


def _steps(events: Sequence[Event], status: Mapping[str, Any]) -> Steps:
    progress = status.get("progress") if isinstance(status.get("progress"), Mapping) else None
    reported_steps = [_whole(event.get("last_step")) for event in events] + [step_now(status)]
    steps_done = max((step for step in reported_steps if step is not None), default=None)
    ends = [event for event in events if event["event"] == "trainer-ended"]
    saved = _whole(ends[-1].get("saved_step")) if ends else None
    starts = [index for index, event in enumerate(events) if event["event"] == "trainer-started"]
    goes_on = bool(starts) and (not ends or starts[-1] > events.index(ends[-1]))
    last = _whole(ends[-1].get("last_step")) if ends else None
    lost = 0 if goes_on or last is None else max(0, last - (saved or 0))
    if ends and ends[-1].get("kind") == "done":
        lost = 0
    return Steps(steps_done, steps_redone(events), lost, _whole((progress or {}).get("steps_total")))


def step_now(status: Mapping[str, Any]) -> int | None:
    """How far the trainer is that runs now, by its status."""
    progress = status.get("progress")
    return _whole(progress.get("step")) if isinstance(progress, Mapping) else None


def interruptions(events: Sequence[Event]) -> int:
    """Notices from AWS, without the withdrawn ones; a shutdown by others does not count."""
    noticed: list[str] = []
    for event in events:
        name = str(event.get("instance"))
        if event["event"] == "notice" and event.get("action") != "shutdown":
            noticed.append(name)
        elif event["event"] == "interruption-withdrawn":
            noticed = [instance for instance in noticed if instance != name]
    return len(noticed)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --------------------------------------------------------------------------------------------------------- what is seen
@sensible
def history_of(facts: RunFacts, now: datetime) -> History:
    """The history of a run as its store and AWS show it; the ledger knows the parts that AWS has forgotten."""
    listed = Listed.of(facts.fleet)
    heard = {}
    instance, heartbeat = str(facts.status.get("instance") or ""), moment_of(facts.status.get("heartbeat"))
    if instance and heartbeat is not None:
        heard[instance] = heartbeat
    for node in facts.nodes:  # of a run on several machines each says it for itself
        name, moment = str(node.get("instance") or ""), moment_of(node.get("time"))
        if name and moment is not None:
            heard[name] = max(moment, heard.get(name, moment))
    return History(
        events=facts.events,
        now=now,
        requested_at=min(
            filter(None, (moment_of(facts.fleet.get("requested_at")), *_times(facts.events))), default=None
        ),
        launches=facts.launches,
        listed=listed.on_demand,
        spot_then=listed.spot,
        maximum=listed.maximum,
        known=_known_instances(facts, heard, now),
        volumes=None if facts.volumes is None else {volume.id: _disk(volume) for volume in facts.volumes},
        heard=heard,
        recorded_end=_recorded_end(facts.status),
    )


def _recorded_end(status: Mapping[str, Any]) -> datetime | None:
    """None while the run goes on; the documents of older versions have the last heartbeat alone."""
    ended = str(status.get("phase") or "") in {phase.value for phase in Phase if phase.is_end}
    return (moment_of(status.get("ended")) or moment_of(status.get("heartbeat"))) if ended else None


def _times(events: Sequence[Event]) -> list[datetime | None]:
    return [moment_of(event.get("time")) for event in events[:1]]


def _disk(volume: Any) -> Disk:
    return Disk(volume.size_gib, volume.type, volume.zone, volume.iops, volume.throughput)


def _known_instances(facts: RunFacts, heard: Mapping[str, datetime], now: datetime) -> dict[str, Known]:
    if facts.instances is None:
        return {}
    known_instances = {
        instance.id: Known(
            instance.launched,
            instance.state in ("pending", "running"),
            instance.was_interrupted,
            instance.type,
            instance.zone,
        )
        for instance in facts.instances
    }
    for launch in facts.launches:
        name = str(launch.get("instance", ""))
        moment = max(filter(None, (heard.get(name), moment_of(launch.get("time")))), default=None)
        if name in known_instances or not name.startswith("i-") or moment is None:
            continue
        if (now - moment).total_seconds() > _YOUNG_SECONDS:
            known_instances[name] = Known(alive=False)
    return known_instances
