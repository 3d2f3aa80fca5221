"""Where a run is: gathered from its store and from AWS (IO), summarised (pure). `screen` shows it.

The store alone is enough: what AWS does not answer, or has forgotten, is left out and noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from spotheal.agent.aws.ec2 import Instance, Volume
from spotheal.agent.protocol.clock import parse_rfc3339, rfc3339
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import HEARTBEAT_SECONDS, LAYOUT, TAG_RUN, TAG_STATE, TAG_TERM, Phase
from spotheal.agent.record.ledger import read_events
from spotheal.agent.record.lost_work import lost_work
from spotheal.fleet.run import engine, machines, runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.status import receipt
from spotheal.fleet.status.shortage import Shortage, shortage, types_in, zones_in
from spotheal.fleet.status.unheard import Consoles, Unheard

SCHEMA_VERSION = 1
STALE_SECONDS = 3 * HEARTBEAT_SECONDS
_CLOCKS_APART = timedelta(minutes=10)  # AWS's and the operator's
_YOUNG_SECONDS = 180.0  # a describe may not show what was launched or heard so lately
_RATE_SECONDS_MIN = 5.0


@dataclass(frozen=True)
class Seen:
    """What was read; None where nobody answered."""

    job: str
    run: str
    store: str
    status: dict[str, Any]
    fleet: dict[str, Any]
    launches: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    fleet_state: str | None
    volumes: tuple[Volume, ...] | None
    instances: tuple[Instance, ...] | None
    notes: tuple[str, ...] = ()
    fleet_events: tuple[engine.FleetEvent, ...] = ()  # read only where no instance is alive
    nodes: tuple[dict[str, Any], ...] = ()  # of a run on several machines at once
    unheard: Unheard | None = None  # a machine whose agent never said who it is


@sensible
def gather(session: Session, run: runs.Run, consoles: Consoles | None = None) -> Seen:
    """All of a run in a fixed number of calls beside one a launch; asked side by side, so that it stays quick.

    With `consoles` the cause is looked for if an agent does not start.
    """
    notes: list[str] = []

    def forgiving(what: Any) -> Any:
        try:
            return what()
        except SpothealError as error:
            notes.append(error.message)
            return None

    session.client("s3"), session.client("ec2")  # made before the threads: a boto3 session is not to be shared by them
    with ThreadPoolExecutor(8) as pool:
        status = pool.submit(run.store.read_status)
        document = pool.submit(run.fleet_document)
        ledger = pool.submit(lambda: run.store.get_bytes(LAYOUT.ledger) or b"")
        volumes = pool.submit(forgiving, lambda: session.ec2.volumes_of_run(run.id, run.job))
        instances = pool.submit(forgiving, lambda: session.ec2.instances_tagged(TAG_RUN, run.id))
        nodes = pool.submit(forgiving, lambda: machines.read(run.store))
        keys = run.store.keys(LAYOUT.launches)
        launches = list(pool.map(run.store.get_json, keys))
        fleet = document.result()
        fleet_id = str(fleet.get("fleet_id") or "")
        state = forgiving(lambda: runs.fleet_state(session.client("ec2"), fleet_id)) if fleet_id else ""
        found = instances.result()
        alive = any(one.state in ("pending", "running") for one in found or ())
        unheard = None
        if consoles is not None:
            unheard = consoles.find(session, [one for one in launches if one], found or ())
        history: tuple[engine.FleetEvent, ...] = ()
        if state in runs.LIVE_FLEET_STATES and not alive:
            since = (_moment(fleet.get("requested_at")) or datetime.now(timezone.utc)) - _CLOCKS_APART
            history = forgiving(lambda: engine.history(session.client("ec2"), fleet_id, since)) or ()
    return Seen(
        job=run.job,
        run=run.id,
        store=str(run.store.url),
        status=status.result() or {},
        fleet=fleet,
        launches=tuple(sorted((one for one in launches if one), key=lambda one: str(one.get("time", "")))),
        events=tuple(read_events(ledger.result().decode(errors="replace"))),
        fleet_state=state,
        volumes=volumes.result(),
        instances=found,
        notes=tuple(notes),
        fleet_events=history,
        nodes=nodes.result() or (),
        unheard=unheard,
    )


@sensible
def summarise(seen: Seen, now: datetime) -> dict[str, Any]:
    """The document of `--output json`; figures nobody knows are null."""
    status = seen.status
    phase = str(status.get("phase") or Phase.REQUESTED.value)
    heartbeat = _moment(status.get("heartbeat"))
    age = None if heartbeat is None else max(0.0, (now - heartbeat).total_seconds())
    live = None if seen.fleet_state is None else seen.fleet_state in runs.LIVE_FLEET_STATES
    ended = phase in {item.value for item in Phase if item.is_end}
    events = seen.events
    missing = None if ended else _shortage(seen)
    launches = [_launch(one, seen, now) for one in _launches(seen)]
    alive = next((one["alive"] for one in launches if one["instance"] == status.get("instance")), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "job": seen.job,
        "run": seen.run,
        "phase": phase,
        "reason": str(status.get("reason") or ""),
        "ended": ended,
        "ended_at": status.get("ended") if ended else None,
        "store": seen.store,
        "revision": status.get("revision"),
        "fleet": {"id": seen.fleet.get("fleet_id"), "state": seen.fleet_state or None, "live": live},
        "batch_job": (seen.fleet.get("batch") or {}).get("job_id"),
        "instance": {**{name: status.get(key) for name, key in _INSTANCE_KEYS.items()}, "alive": alive},
        "heartbeat": status.get("heartbeat"),
        "heartbeat_age_seconds": age,
        "silent": bool(live) and not ended and age is not None and age > STALE_SECONDS,
        "requested_at": seen.fleet.get("requested_at"),
        "progress": _progress(seen, now, ended),
        "checkpoint": _checkpoint(status, now),
        "no_capacity": missing.to_document(now) if missing else None,
        "unheard": seen.unheard.to_document(seen.job) if seen.unheard and not ended else None,
        "cost": receipt.cost_so_far(receipt.history_of(seen, now)).to_document() if events else None,
        "notice": status.get("notice"),
        "space": status.get("space"),
        "lost": list(lost_work(events, receipt.step_now(status))),
        "term": status.get("term"),
        "interruptions": receipt.interruptions(events),
        "zone_moves": sum(1 for event in events if event["event"] == "volume" and event.get("moved_from")),
        "machines": [] if ended else machines.summarise(seen.nodes, _alive(seen), now),
        "launches": launches,
        "volumes": None if seen.volumes is None else [_volume(one) for one in seen.volumes],
        "lineage": _lineage(seen),
        "notes": list(seen.notes),
    }


_INSTANCE_KEYS = {"id": "instance", "type": "instance_type", "zone": "zone", "attempt": "attempt"}


def _alive(seen: Seen) -> set[str] | None:
    if seen.instances is None:
        return None
    return {one.id for one in seen.instances if one.state in ("pending", "running")}


def _moment(text: Any) -> datetime | None:
    try:
        return parse_rfc3339(str(text))
    except ValueError:
        return None


def _launches(seen: Seen) -> list[dict[str, Any]]:
    """Launches by the store, then instances that AWS shows and that have not come as far as the store."""
    counted = [one for one in seen.launches if str(one.get("instance", "")).startswith("i-")]
    known = {one["instance"] for one in counted}
    young = [
        {"instance": one.id, "time": rfc3339(one.launched), "instance_type": one.type, "zone": one.zone}
        for one in seen.instances or ()
        if one.id not in known
    ]
    return [*counted, *sorted(young, key=lambda one: one["time"])]


def _launch(launch: dict[str, Any], seen: Seen, now: datetime) -> dict[str, Any]:
    instance = str(launch["instance"])
    states = {one.id: one.state for one in seen.instances or ()}
    events = [e for e in seen.events if e.get("instance") == instance]
    boot: dict[str, Any] = next((e for e in events if e["event"] == "boot"), {})
    ends = [e for e in events if e["event"] in ("trainer-ended", "end")]
    notice = next((e for e in events if e["event"] == "notice"), None)
    began = _moment(launch.get("time"))
    outcome = launch.get("outcome") or (ends[-1].get("kind") or ends[-1].get("phase") if ends else None)
    alive = _is_alive(instance, seen, began, now)
    if alive is False and outcome not in ("interrupted", "ended", "failed", "done", "barred", "boot failed"):
        outcome = "lost"
    last = max((moment for e in events if (moment := _moment(e.get("time")))), default=None)
    stopped = now if alive else last
    reason = launch.get("reason") or (ends[-1].get("reason") if ends else None)
    if notice is not None and outcome == "interrupted" and notice.get("action") == "shutdown":
        outcome, reason = "ended", "shut down: by a cancel, or by hand"
    elif notice is not None and outcome == "interrupted":
        reason = f"notice: {notice.get('action')}"
    elif outcome == "lost":
        taken = next((one.state_reason for one in seen.instances or () if one.id == instance), "")
        reason = f"ended without a word{f' ({taken})' if taken else ''}"
    return {
        "instance": instance,
        "time": launch.get("time"),
        "type": launch.get("instance_type") or boot.get("instance_type"),
        "zone": launch.get("zone") or boot.get("zone"),
        "state": states.get(instance),
        "alive": alive,
        "outcome": outcome,
        "reason": reason,
        "seconds": None if began is None or stopped is None else max(0.0, (stopped - began).total_seconds()),
        "saved_step": next((e["saved_step"] for e in reversed(ends) if e.get("saved_step") is not None), None),
    }


def _is_alive(instance: str, seen: Seen, began: datetime | None, now: datetime) -> bool | None:
    """None where AWS did not answer. What it shows not (any more) is gone, unless it is too young to be shown."""
    if seen.instances is None:
        return None
    state = next((one.state for one in seen.instances if one.id == instance), "")
    if state:
        return state in ("pending", "running")
    heard = _moment(seen.status.get("heartbeat")) if seen.status.get("instance") == instance else None
    moments = [moment for moment in (began, heard) if moment is not None]
    return bool(moments) and (now - max(moments)).total_seconds() < _YOUNG_SECONDS


def _progress(seen: Seen, now: datetime, ended: bool) -> dict[str, Any] | None:
    """What the trainer told, with steps a second since this start of it, and the time that is left at that rate.

    Until a new machine's trainer has told anything: the step that the last one saved."""
    told = seen.status.get("progress")
    if not isinstance(told, Mapping):
        saved = _last_saved(seen)
        if saved is None or ended:
            return None
        told = {"step": saved, "steps_total": None}
    step, total = told.get("step"), told.get("steps_total")
    rate = _steps_per_second(seen, step)
    left = (total - step) / rate if rate and isinstance(total, int) and isinstance(step, int) else None
    training = seen.status.get("phase") == Phase.TRAINING.value
    return {
        **told,
        "percent": round(100 * step / total, 1) if isinstance(step, int) and isinstance(total, int) and total else None,
        "steps_per_second": rate,
        "seconds_left": max(0.0, left) if left is not None and training and not ended else None,
    }


def _last_saved(seen: Seen) -> int | None:
    """By the ledger: saved at the end of an attempt, or gone on from at a start, whichever was noted last."""
    keys = {"trainer-ended": "saved_step", "trainer-started": "resumed_step", "trainer-resumed": "resumed_step"}
    steps = [event.get(keys[event["event"]]) for event in seen.events if event["event"] in keys]
    return next((step for step in reversed(steps) if isinstance(step, int)), None)


def _steps_per_second(seen: Seen, step: Any) -> float | None:
    """Since the trainer's last start, of which the step must be known: taken as 0 it promised an end in seconds."""
    starts = [e for e in seen.events if e["event"] in ("trainer-started", "trainer-resumed")]
    if not starts or not isinstance(step, int):
        return None
    began, first = _moment(starts[-1].get("time")), starts[-1].get("resumed_step")
    heard = _moment(seen.status.get("heartbeat"))
    if began is None or heard is None or not isinstance(first, int) or step <= first:
        return None
    seconds = (heard - began).total_seconds()
    return (step - first) / seconds if seconds >= _RATE_SECONDS_MIN else None


def _checkpoint(status: Mapping[str, Any], now: datetime) -> dict[str, Any] | None:
    """The last one that the trainer acknowledged; `age_seconds` as of now."""
    progress = status.get("progress")
    saved = progress.get("saved") if isinstance(progress, Mapping) else None
    if not isinstance(saved, Mapping):
        return None
    moment = _moment(saved.get("time"))
    age = None if moment is None else max(0.0, (now - moment).total_seconds())
    return {"step": saved.get("step"), "time": saved.get("time"), "age_seconds": age}


def _shortage(seen: Seen) -> Shortage | None:
    text = str(seen.fleet.get("request") or "")
    return shortage(seen.fleet_events, types=types_in(text), zones=zones_in(text))


def _lineage(seen: Seen) -> list[dict[str, Any]]:
    """The run's volumes, newest term first: which was copied from which. Those that are gone are the ledger's."""
    there = {one.id: one for one in seen.volumes or ()}
    found: dict[str, dict[str, Any]] = {}
    for event in seen.events:
        if event["event"] == "volume" and event.get("volume"):
            one = found.setdefault(str(event["volume"]), {"terms": [], "zone": event.get("zone"), "copied_from": None})
            one["copied_from"] = one["copied_from"] or event.get("moved_from")
            one["terms"] = sorted({*one["terms"], *([event["term"]] if event.get("term") is not None else [])})
    for volume in there.values():
        found.setdefault(volume.id, {"terms": [], "zone": volume.zone, "copied_from": None})
    rows = [
        {
            "id": name,
            "zone": there[name].zone if name in there else one["zone"],
            "exists": None if seen.volumes is None else name in there,
            "role": there[name].tags.get(TAG_STATE) if name in there else None,
            "terms": one["terms"],
            "copied_from": one["copied_from"],
            "snapshot": there[name].snapshot if name in there else None,
        }
        for name, one in found.items()
    ]
    newest = {name: max(one["terms"], default=0) for name, one in found.items()}
    return sorted(rows, key=lambda row: (row["exists"] is not True, -newest[row["id"]], row["id"]))


def _volume(volume: Volume) -> dict[str, Any]:
    return {
        "id": volume.id,
        "zone": volume.zone,
        "state": volume.state,
        "size_gib": volume.size_gib,
        "role": volume.tags.get(TAG_STATE),
        "term": volume.tags.get(TAG_TERM),
    }
