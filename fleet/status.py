"""Where a run is: gathered from its store and from AWS (IO), summarised (pure), shown (pure).

The store alone is enough: what AWS does not answer, or has forgotten, is left out and noted.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotheal.agent.clock import parse_rfc3339, rfc3339
from spotheal.agent.ec2 import Instance, Volume
from spotheal.agent.errors import SpothealError
from spotheal.agent.ledger import read_events
from spotheal.agent.names import HEARTBEAT_SECONDS, LAYOUT, TAG_RUN, TAG_STATE, TAG_TERM, Phase, VolumeState
from spotheal.fleet import runs
from spotheal.fleet.session import Session
from spotheal.fleet.table import duration, lines_of, table

SCHEMA_VERSION = 1
STALE_SECONDS = 3 * HEARTBEAT_SECONDS
_LAUNCHES_SHOWN = 10


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


def gather(session: Session, run: runs.Run) -> Seen:
    """All of a run in a fixed number of calls beside one a launch; asked side by side, so that it stays quick."""
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
        volumes = pool.submit(forgiving, lambda: session.ec2.volumes_of_run(run.id))
        instances = pool.submit(forgiving, lambda: session.ec2.instances_tagged(TAG_RUN, run.id))
        keys = run.store.keys(LAYOUT.launches)
        launches = list(pool.map(run.store.get_json, keys))
        fleet = document.result()
        fleet_id = str(fleet.get("fleet_id") or "")
        state = forgiving(lambda: runs.fleet_state(session.client("ec2"), fleet_id)) if fleet_id else ""
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
        instances=instances.result(),
        notes=tuple(notes),
    )


def summarise(seen: Seen, now: datetime) -> dict[str, Any]:
    """The document of `--output json`; figures nobody knows are null."""
    status = seen.status
    phase = str(status.get("phase") or Phase.REQUESTED.value)
    heartbeat = _moment(status.get("heartbeat"))
    age = None if heartbeat is None else max(0.0, (now - heartbeat).total_seconds())
    live = None if seen.fleet_state is None else seen.fleet_state in runs.LIVE_FLEET_STATES
    ended = phase in {item.value for item in Phase if item.is_end}
    events = seen.events
    return {
        "schema_version": SCHEMA_VERSION,
        "job": seen.job,
        "run": seen.run,
        "phase": phase,
        "reason": str(status.get("reason") or ""),
        "ended": ended,
        "store": seen.store,
        "revision": status.get("revision"),
        "fleet": {"id": seen.fleet.get("fleet_id"), "state": seen.fleet_state or None, "live": live},
        "instance": {name: status.get(key) for name, key in _INSTANCE_KEYS.items()},
        "heartbeat": status.get("heartbeat"),
        "heartbeat_age_seconds": age,
        "silent": bool(live) and not ended and age is not None and age > STALE_SECONDS,
        "requested_at": seen.fleet.get("requested_at"),
        "progress": status.get("progress"),
        "notice": status.get("notice"),
        "term": status.get("term"),
        "interruptions": sum(1 for event in events if event["event"] == "notice"),
        "zone_moves": sum(1 for event in events if event["event"] == "volume" and event.get("moved_from")),
        "launches": [_launch(one, seen) for one in _launches(seen)],
        "volumes": None if seen.volumes is None else [_volume(one) for one in seen.volumes],
        "notes": list(seen.notes),
    }


_INSTANCE_KEYS = {"id": "instance", "type": "instance_type", "zone": "zone", "attempt": "attempt"}


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


def _launch(launch: dict[str, Any], seen: Seen) -> dict[str, Any]:
    instance = str(launch["instance"])
    states = {one.id: one.state for one in seen.instances or ()}
    boot: dict[str, Any] = next((e for e in seen.events if e.get("instance") == instance and e["event"] == "boot"), {})
    ends = [e for e in seen.events if e.get("instance") == instance and e["event"] in ("trainer-ended", "end")]
    return {
        "instance": instance,
        "time": launch.get("time"),
        "type": launch.get("instance_type") or boot.get("instance_type"),
        "zone": launch.get("zone") or boot.get("zone"),
        "state": states.get(instance),
        "outcome": launch.get("outcome") or (ends[-1].get("kind") or ends[-1].get("phase") if ends else None),
        "reason": launch.get("reason") or (ends[-1].get("reason") if ends else None),
        "saved_step": next((e["saved_step"] for e in reversed(ends) if e.get("saved_step") is not None), None),
    }


def _volume(volume: Volume) -> dict[str, Any]:
    return {
        "id": volume.id,
        "zone": volume.zone,
        "state": volume.state,
        "size_gib": volume.size_gib,
        "role": volume.tags.get(TAG_STATE),
        "term": volume.tags.get(TAG_TERM),
    }


# ---------------------------------------------------------------------------------------------------------------- shown
def render(document: dict[str, Any], now: datetime) -> str:
    """One screen for people."""
    rows = [("job", document["job"]), ("run", document["run"]), ("phase", _phase(document))]
    if document["reason"]:
        rows.append(("reason", document["reason"]))
    fleet = document["fleet"]
    rows.append(("fleet", f"{fleet['id'] or 'none yet'}  {fleet['state'] or ''}".rstrip()))
    instance = document["instance"]
    if instance["id"] and not document["ended"]:
        place = " ".join(str(instance[key]) for key in ("type", "zone") if instance[key])
        rows.append(("instance", f"{instance['id']}  {place}, heard {duration(document['heartbeat_age_seconds'])} ago"))
    rows += _progress(document["progress"], now)
    if document["notice"]:
        notice = document["notice"]
        rows.append(("notice", f"{notice.get('action')} by {notice.get('deadline')}"))
    rows.append(("history", f"{len(document['launches'])} instances, {document['interruptions']} interruptions, "
                            f"{document['zone_moves']} moves"))  # fmt: skip
    rows.append(("store", document["store"]))
    parts = [lines_of(rows)]
    if document["launches"]:
        hidden = max(0, len(document["launches"]) - _LAUNCHES_SHOWN)
        parts.append(table(
            ("INSTANCE", "TYPE", "ZONE", "SINCE (UTC)", "NOW", "SAVED"),
            [(one["instance"], one["type"], one["zone"], _short(one["time"]), one["outcome"] or one["state"],
              one["saved_step"]) for one in document["launches"][-_LAUNCHES_SHOWN:]],
        ) + (f"\n… and {hidden} before" if hidden else ""))  # fmt: skip
    if document["volumes"]:
        parts.append(table(
            ("VOLUME", "ZONE", "GIB", "STATE", "ROLE", "TERM"),
            [(one["id"], one["zone"], one["size_gib"], one["state"], one["role"], one["term"])
             for one in _by_term(document["volumes"])],
        ))  # fmt: skip
    return "\n\n".join(parts)


def _short(time: str | None) -> str | None:
    """`11-21 14:17` of an RFC 3339 time, so that a row fits 80 columns."""
    moment = _moment(time)
    return moment.strftime("%m-%d %H:%M") if moment else time


def _by_term(volumes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    current = VolumeState.CURRENT.value
    return sorted(volumes, key=lambda one: (one["role"] != current, -int(one["term"] or 0)))


def _phase(document: dict[str, Any]) -> str:
    phase = str(document["phase"])
    if document["ended"]:
        return phase
    if document["fleet"]["live"] is False and document["fleet"]["id"]:
        return f"{phase}, but its fleet is gone: `fleetctl request --resume` goes on"
    if document["silent"]:
        return f"{phase}, but silent: the fleet replaces what is lost"
    return phase


def _progress(progress: dict[str, Any] | None, now: datetime) -> list[tuple[str, str]]:
    if not progress:
        return []
    step, total = progress.get("step"), progress.get("steps_total")
    text = f"step {step}" + (f" of {total} ({100 * step / total:.0f} %)" if total and isinstance(step, int) else "")
    rate = progress.get("samples_per_second")
    more = [
        f"epoch {progress['epoch']}" if progress.get("epoch") is not None else "",
        f"loss {progress['loss']:.4g}" if progress.get("loss") is not None else "",
        f"{rate:.0f} samples/s" if rate else "",
    ]
    rows = [("progress", ", ".join([text, *(part for part in more if part)]))]
    saved = progress.get("saved")
    if saved:
        moment = _moment(saved.get("time"))
        age = f", {duration((now - moment).total_seconds())} ago" if moment else ""
        rows.append(("saved", f"step {saved.get('step')}{age}"))
    return rows
