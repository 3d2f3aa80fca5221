"""The state of a run: gathered from its store and from AWS (IO), summarised (pure). `screen` shows it.

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
from spotheal.agent.protocol.ends import RECORDED_OUTCOMES
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
_YOUNG_SECONDS = 180.0  # DescribeInstances may not show a younger instance yet
_RATE_SECONDS_MIN = 5.0


@dataclass(frozen=True)
class RunFacts:
    """Everything that was read; None if there was no answer."""

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
    fleet_events: tuple[engine.FleetEvent, ...] = ()  # read only if no instance is alive
    nodes: tuple[dict[str, Any], ...] = ()  # of a run on several machines at once
    unheard: Unheard | None = None  # a machine whose agent has not started


@sensible
def gather(session: Session, run: runs.Run, consoles: Consoles | None = None) -> RunFacts:
    """All of a run: one call a launch and a fixed number of others, in parallel, so that it stays quick.

    With `consoles` the cause is looked for if an agent does not start.
    """
    notes: list[str] = []

    def forgiving(read: Any) -> Any:
        try:
            return read()
        except SpothealError as error:
            notes.append(error.message)
            return None

    session.client("s3"), session.client("ec2")  # made before the threads: a boto3 session is not to be shared by them
    with ThreadPoolExecutor(8) as pool:
        status = pool.submit(run.store.read_status)
        document = pool.submit(run.fleet_document)
        ledger = pool.submit(lambda: run.store.get_bytes(LAYOUT.ledger) or b"")
        volumes = pool.submit(forgiving, lambda: session.ec2.volumes_of_run(run.id, run.job))
        instances_future = pool.submit(forgiving, lambda: session.ec2.instances_tagged(TAG_RUN, run.id))
        nodes = pool.submit(forgiving, lambda: machines.read(run.store))
        keys = run.store.keys(LAYOUT.launches)
        launches = list(pool.map(run.store.get_json, keys))
        fleet = document.result()
        fleet_id = str(fleet.get("fleet_id") or "")
        state = forgiving(lambda: runs.fleet_state(session.client("ec2"), fleet_id)) if fleet_id else ""
        instances = instances_future.result()
        alive = any(instance.state in ("pending", "running") for instance in instances or ())
        unheard = None
        if consoles is not None:
            unheard = consoles.find(session, [launch for launch in launches if launch], instances or ())
        history: tuple[engine.FleetEvent, ...] = ()
        if state in runs.LIVE_FLEET_STATES and not alive:
            since = (_moment(fleet.get("requested_at")) or datetime.now(timezone.utc)) - _CLOCKS_APART
            history = forgiving(lambda: engine.history(session.client("ec2"), fleet_id, since)) or ()
    return RunFacts(
        job=run.job,
        run=run.id,
        store=str(run.store.url),
        status=status.result() or {},
        fleet=fleet,
        launches=tuple(
            sorted((launch for launch in launches if launch), key=lambda document: str(document.get("time", "")))
        ),
        events=tuple(read_events(ledger.result().decode(errors="replace"))),
        fleet_state=state,
        volumes=volumes.result(),
        instances=instances,
        notes=tuple(notes),
        fleet_events=history,
        nodes=nodes.result() or (),
        unheard=unheard,
    )


@sensible
def summarise(facts: RunFacts, now: datetime) -> dict[str, Any]:
    """The document of `--output json`; unknown figures are null."""
    status = facts.status
    phase = str(status.get("phase") or Phase.REQUESTED.value)
    heartbeat = _moment(status.get("heartbeat"))
    age = None if heartbeat is None else max(0.0, (now - heartbeat).total_seconds())
    live = None if facts.fleet_state is None else facts.fleet_state in runs.LIVE_FLEET_STATES
    ended = _has_ended(facts)
    events = facts.events
    missing = None if ended else _shortage(facts)
    launches = [_launch(launch, facts, now) for launch in _launches(facts)]
    alive = next((launch["alive"] for launch in launches if launch["instance"] == status.get("instance")), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "job": facts.job,
        "run": facts.run,
        "phase": phase,
        "reason": str(status.get("reason") or ""),
        "ended": ended,
        "ended_at": status.get("ended") if ended else None,
        "store": facts.store,
        "revision": status.get("revision"),
        "fleet": {"id": facts.fleet.get("fleet_id"), "state": facts.fleet_state or None, "live": live},
        "batch_job": (facts.fleet.get("batch") or {}).get("job_id"),
        "instance": {**{name: status.get(key) for name, key in _INSTANCE_KEYS.items()}, "alive": alive},
        "heartbeat": status.get("heartbeat"),
        "heartbeat_age_seconds": age,
        "silent": bool(live) and not ended and age is not None and age > STALE_SECONDS,
        "requested_at": facts.fleet.get("requested_at"),
        "progress": _progress(facts, now, ended),
        "checkpoint": _checkpoint(status, now),
        "no_capacity": missing.to_document(now) if missing else None,
        "unheard": facts.unheard.to_document(facts.job) if facts.unheard and not ended else None,
        "cost": receipt.cost_so_far(receipt.history_of(facts, now)).to_document() if events else None,
        "notice": status.get("notice"),
        "space": status.get("space"),
        "lost": list(lost_work(events, receipt.step_now(status))),
        "term": status.get("term"),
        "interruptions": receipt.interruptions(events),
        "zone_moves": sum(1 for event in events if event["event"] == "volume" and event.get("moved_from")),
        "machines": [] if ended else machines.summarise(facts.nodes, _alive(facts), now),
        "launches": launches,
        "volumes": None if facts.volumes is None else [_volume(volume) for volume in facts.volumes],
        "lineage": _lineage(facts),
        "notes": list(facts.notes),
    }


_INSTANCE_KEYS = {"id": "instance", "type": "instance_type", "zone": "zone", "attempt": "attempt"}


def _alive(facts: RunFacts) -> set[str] | None:
    if facts.instances is None:
        return None
    return {instance.id for instance in facts.instances if instance.state in ("pending", "running")}


def _moment(text: Any) -> datetime | None:
    try:
        return parse_rfc3339(str(text))
    except ValueError:
        return None


def _launches(facts: RunFacts) -> list[dict[str, Any]]:
    """Launches by the store, then instances that AWS shows and that have not come as far as the store."""
    counted = [launch for launch in facts.launches if str(launch.get("instance", "")).startswith("i-")]
    counted_ids = {launch["instance"] for launch in counted}
    young = [
        {
            "instance": instance.id,
            "time": rfc3339(instance.launched),
            "instance_type": instance.type,
            "zone": instance.zone,
        }
        for instance in facts.instances or ()
        if instance.id not in counted_ids
    ]
    return [*counted, *sorted(young, key=lambda launch: launch["time"])]


def _launch(launch: dict[str, Any], facts: RunFacts, now: datetime) -> dict[str, Any]:
    instance = str(launch["instance"])
    states = {machine.id: machine.state for machine in facts.instances or ()}
    events = [e for e in facts.events if e.get("instance") == instance]
    boot: dict[str, Any] = next((e for e in events if e["event"] == "boot"), {})
    ends = [e for e in events if e["event"] in ("trainer-ended", "end")]
    notice = next((e for e in events if e["event"] == "notice"), None)
    start = _moment(launch.get("time"))
    outcome = launch.get("outcome") or (ends[-1].get("kind") or ends[-1].get("phase") if ends else None)
    alive = _is_alive(instance, facts, start, now)
    cause = next((machine.state_reason for machine in facts.instances or () if machine.id == instance), "")
    if alive is False and outcome not in (*RECORDED_OUTCOMES, "failed", "done"):
        outcome = "lost"
    last = max((moment for e in events if (moment := _moment(e.get("time")))), default=None)
    stopped = now if alive else last
    reason = launch.get("reason") or (ends[-1].get("reason") if ends else None)
    is_shut_down = outcome == "interrupted" and notice is not None and notice.get("action") == "shutdown"
    # With `nodes` the cancel ends machines that have not yet recorded their end.
    if is_shut_down or (outcome == "lost" and _has_ended(facts) and cause == "Client.UserInitiatedShutdown"):
        outcome, reason = "ended", "shut down: by a cancel, or by hand"
    elif notice is not None and outcome == "interrupted":
        reason = f"notice: {notice.get('action')}"
    elif outcome == "lost":
        reason = f"ended without a word{f' ({cause})' if cause else ''}"
    return {
        "instance": instance,
        "time": launch.get("time"),
        "type": launch.get("instance_type") or boot.get("instance_type"),
        "zone": launch.get("zone") or boot.get("zone"),
        "state": states.get(instance),
        "alive": alive,
        "outcome": outcome,
        "reason": reason,
        "seconds": None if start is None or stopped is None else max(0.0, (stopped - start).total_seconds()),
        "saved_step": next((e["saved_step"] for e in reversed(ends) if e.get("saved_step") is not None), None),
    }


def _has_ended(facts: RunFacts) -> bool:
    return str(facts.status.get("phase")) in {phase.value for phase in Phase if phase.is_end}


def _is_alive(instance: str, facts: RunFacts, start: datetime | None, now: datetime) -> bool | None:
    """None if AWS did not answer. An instance that AWS does not list is gone, unless it is too young to be listed."""
    if facts.instances is None:
        return None
    state = next((machine.state for machine in facts.instances if machine.id == instance), "")
    if state:
        return state in ("pending", "running")
    heard = _moment(facts.status.get("heartbeat")) if facts.status.get("instance") == instance else None
    moments = [moment for moment in (start, heard) if moment is not None]
    return bool(moments) and (now - max(moments)).total_seconds() < _YOUNG_SECONDS


def _progress(facts: RunFacts, now: datetime, ended: bool) -> dict[str, Any] | None:
    """The trainer's report, with steps a second since its last start and the time left at that rate.

    Until the trainer of a new machine has reported: the step that the last trainer saved."""
    report = facts.status.get("progress")
    if not isinstance(report, Mapping):
        saved = _last_saved(facts)
        if saved is None or ended:
            return None
        report = {"step": saved, "steps_total": None}
    step, total = report.get("step"), report.get("steps_total")
    rate = _steps_per_second(facts, step)
    seconds_left = (total - step) / rate if rate and isinstance(total, int) and isinstance(step, int) else None
    training = facts.status.get("phase") == Phase.TRAINING.value
    return {
        **report,
        "percent": round(100 * step / total, 1) if isinstance(step, int) and isinstance(total, int) and total else None,
        "steps_per_second": rate,
        "seconds_left": max(0.0, seconds_left) if seconds_left is not None and training and not ended else None,
    }


def _last_saved(facts: RunFacts) -> int | None:
    """By the ledger: saved at the end of an attempt, or gone on from at a start, whichever was noted last."""
    keys = {"trainer-ended": "saved_step", "trainer-started": "resumed_step", "trainer-resumed": "resumed_step"}
    steps = [event.get(keys[event["event"]]) for event in facts.events if event["event"] in keys]
    return next((step for step in reversed(steps) if isinstance(step, int)), None)


def _steps_per_second(facts: RunFacts, step: Any) -> float | None:
    """Since the trainer's last start, of which the step must be known: taken as 0 it promised an end in seconds."""
    starts = [e for e in facts.events if e["event"] in ("trainer-started", "trainer-resumed")]
    if not starts or not isinstance(step, int):
        return None
    start, first = _moment(starts[-1].get("time")), starts[-1].get("resumed_step")
    heard = _moment(facts.status.get("heartbeat"))
    if start is None or heard is None or not isinstance(first, int) or step <= first:
        return None
    seconds = (heard - start).total_seconds()
    return (step - first) / seconds if seconds >= _RATE_SECONDS_MIN else None


def _checkpoint(status: Mapping[str, Any], now: datetime) -> dict[str, Any] | None:
    """The last checkpoint that the trainer acknowledged; `age_seconds` as of now."""
    progress = status.get("progress")
    saved = progress.get("saved") if isinstance(progress, Mapping) else None
    if not isinstance(saved, Mapping):
        return None
    moment = _moment(saved.get("time"))
    age = None if moment is None else max(0.0, (now - moment).total_seconds())
    return {"step": saved.get("step"), "time": saved.get("time"), "age_seconds": age}


def _shortage(facts: RunFacts) -> Shortage | None:
    text = str(facts.fleet.get("request") or "")
    return shortage(facts.fleet_events, types=types_in(text), zones=zones_in(text))


def _lineage(facts: RunFacts) -> list[dict[str, Any]]:
    """The run's volumes, newest term first, each with its source. Deleted volumes are known from the ledger."""
    volumes = {volume.id: volume for volume in facts.volumes or ()}
    records: dict[str, dict[str, Any]] = {}
    for event in facts.events:
        if event["event"] == "volume" and event.get("volume"):
            record = records.setdefault(
                str(event["volume"]), {"terms": [], "zone": event.get("zone"), "copied_from": None}
            )
            record["copied_from"] = record["copied_from"] or event.get("moved_from")
            record["terms"] = sorted({*record["terms"], *([event["term"]] if event.get("term") is not None else [])})
    for volume in volumes.values():
        records.setdefault(volume.id, {"terms": [], "zone": volume.zone, "copied_from": None})
    rows = [
        {
            "id": name,
            "zone": volumes[name].zone if name in volumes else record["zone"],
            "exists": None if facts.volumes is None else name in volumes,
            "role": volumes[name].tags.get(TAG_STATE) if name in volumes else None,
            "terms": record["terms"],
            "copied_from": record["copied_from"],
            "snapshot": volumes[name].snapshot if name in volumes else None,
        }
        for name, record in records.items()
    ]
    newest = {name: max(record["terms"], default=0) for name, record in records.items()}
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
