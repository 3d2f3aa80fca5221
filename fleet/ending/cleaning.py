"""`fleetctl clean`: the leftovers of finished jobs, read from AWS and the store, and deleted one by one.

Whatever time has passed since it was shown, each run is looked at again before anything of it is deleted, and each
volume too; what AWS has deleted meanwhile is success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.s3 import Store
from spotheal.agent.money.bill_inputs import Disk
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import NotFound, SpothealError
from spotheal.agent.protocol.names import JOB_NAME, LAYOUT, TAG_JOB, TAG_RUN, StoreUrl
from spotheal.fleet.ending.clean import CleanPlan, RunSeen, Thing, Verdict, decide
from spotheal.fleet.run import engine, runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.status import overview

_NAMED = 12  # jobs, in a message
_ALIVE = ("pending", "running", "shutting-down", "stopping", "stopped")
Say = Callable[[str], None]


@dataclass(frozen=True)
class CleanRequest:
    """`job` "" for all; `unfinished` and `store` as in `clean.decide`."""

    root: StoreUrl
    job: str = ""
    unfinished: bool = False
    store: bool = False


@sensible
def make_plan(session: Session, request: CleanRequest) -> CleanPlan:
    """A fixed number of calls, and some for each run that has left something."""
    things = _things(session, request.job)
    owners = {thing.owner for thing in things if all(thing.owner)}
    if request.store and request.job:
        ids = runs.run_ids(session.client("s3"), request.root, request.job)
        owners |= {(request.job, run) for run in ids}
        for run in ids:
            tags = {TAG_JOB: request.job, TAG_RUN: run}
            things.append(Thing("store", str(request.root.below(request.job, run)), tags))
    alive = _alive(session, request.job)
    session.client("s3"), session.client("ec2")  # made before the threads
    with ThreadPoolExecutor(8) as pool:
        run_facts = list(pool.map(lambda owner: look(session, request.root, *owner, alive=alive), sorted(owners)))
    newest = {job: _newest(session, request.root, job) for job in {facts.job for facts in run_facts if facts.is_known}}
    by_owner = {(facts.job, facts.run): _with_newer(facts, newest.get(facts.job, "")) for facts in run_facts}
    return decide(things, by_owner, unfinished=request.unfinished, store=request.store)


def _newest(session: Session, root: StoreUrl, job: str) -> str:
    run = runs.newest(session.client("s3"), root, job)
    return run.id if run else ""


def _with_newer(facts: RunSeen, newest: str) -> RunSeen:
    return replace(facts, newer=newest) if newest > runs.entry_in(facts.run)[0] else facts


def check_known(session: Session, root: StoreUrl, job: str) -> None:
    """NotFound if neither AWS nor the store has anything of the job: most likely its name is mistyped."""
    if runs.run_ids(session.client("s3"), root, job) or _alive(session, job) or _things(session, job):
        return
    try:
        jobs = overview.job_names(session.client("s3"), root)
    except NotFound:  # no store, no job
        jobs = []
    names = f"the jobs there: {', '.join(jobs[:_NAMED])}" if jobs else "there is no job at all"
    rest = f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
    raise NotFound(f"there is nothing of a job {job!r} in {root}, nor in EC2", next_step=names + rest)


@sensible
def look(session: Session, root: StoreUrl, job: str, run: str, *, alive: Iterable[str] | None = None) -> RunSeen:
    """The state of a run; `alive` names runs with instances, None asks AWS. A run of a sweep has the sweep's fleet."""
    if not JOB_NAME.fullmatch(job) or not run.isalnum():
        return RunSeen(job, run, is_known=False)
    store = runs.run_of(session.client("s3"), root, job, run).store
    whole, entry = runs.entry_in(run)
    of_sweep = bool(entry)
    fleets = Store(session.client("s3"), root.below(job, whole)) if of_sweep else store
    try:
        status, document = store.read_status(), fleets.get_json(LAYOUT.fleet_document)
    except NotFound:
        return RunSeen(job, run, is_known=False)
    if status is None and document is None:
        return RunSeen(job, run, is_known=False)
    sizes = store.sizes()
    stored = fleets.sizes(f"{LAYOUT.results}{int(entry)}/") if of_sweep else sizes
    results = [size for key, size in stored if key.startswith(LAYOUT.results) and _is_result(key)]
    for key in (key for key, _ in sizes if key.rpartition("/")[2] == LAYOUT.results_listing and not
                key.startswith(LAYOUT.results)):  # fmt: skip
        listed = (store.get_json(key) or {}).get("files") or []  # they lie elsewhere, EFS for instance
        results += [int(result.get("size") or 0) for result in listed if _is_result(str(result.get("name") or ""))]
    texts = {key: str((status or {}).get(key) or "") for key in ("phase", "reason")}
    return RunSeen(
        job, run, is_known=True, phase=texts["phase"], reason=texts["reason"],
        at_work=_at_work(session, job, whole if of_sweep else run, document or {},
                         _alive(session, job) if alive is None else alive),
        of_sweep=of_sweep,
        results=len(results), results_bytes=sum(results), store_files=len(sizes), store_bytes=sum(s for _, s in sizes),
    )  # fmt: skip


def _is_result(key: str) -> bool:
    """The metrics exist from the beginning, and are no copy of the trained model."""
    return not key.endswith("/") and key.rpartition("/")[2] != LAYOUT.live_metrics


def _at_work(session: Session, job: str, run: str, document: dict[str, Any], alive: Iterable[str]) -> str:
    fleet = str(document.get("fleet_id") or "")
    if run in alive:
        return f"an instance of its run is there: `fleetctl cancel {job}` ends it"
    if fleet:
        fleet_state = engine.describe(session.client("ec2"), fleet)
        return (
            f"{fleet} works on it: `fleetctl cancel {job}` ends it"
            if fleet_state is not None and fleet_state.is_live
            else ""
        )
    return "its request was interrupted: `fleetctl request` finishes it" if document.get("request") else ""


# ---------------------------------------------------------------------------------------------------------------- reads
def _filters(job: str) -> list[dict[str, Any]]:
    """Everything with the tag of a run or a job: a volume filled for a job costs before its first request, too."""
    named = [{"Name": f"tag:{TAG_JOB}", "Values": [job]}] if job else []
    return [{"Name": "tag-key", "Values": [TAG_RUN, TAG_JOB]}, *named]


def _pages(
    session: Session, operation: str, key: str, job: str, purpose: str, **arguments: Any
) -> list[dict[str, Any]]:
    with translated(purpose):
        pages = session.client("ec2").get_paginator(operation).paginate(Filters=_filters(job), **arguments)
        return [item for page in pages for item in page.get(key, [])]


def _things(session: Session, job: str) -> list[Thing]:
    things = []
    for item in _pages(session, "describe_volumes", "Volumes", job, "list the volumes of all jobs"):
        disk = Disk(int(item["Size"]), str(item.get("VolumeType") or "gp3"), str(item["AvailabilityZone"]),
                    item.get("Iops"), item.get("Throughput"))  # fmt: skip
        if item["State"] not in ("deleting", "deleted"):
            things.append(Thing("volume", item["VolumeId"], _tags(item), item["State"], disk.zone, disk.size_gib,
                               item.get("CreateTime"), disk))  # fmt: skip
    snapshots = _pages(
        session, "describe_snapshots", "Snapshots", job, "list the snapshots of all jobs", OwnerIds=["self"]
    )
    for item in snapshots:
        things.append(Thing("snapshot", item["SnapshotId"], _tags(item), str(item.get("State") or ""), "",
                           int(item.get("VolumeSize") or 0), item.get("StartTime")))  # fmt: skip
    for item in _pages(session, "describe_launch_templates", "LaunchTemplates", job, "list the launch templates"):
        things.append(Thing("launch template", str(item["LaunchTemplateName"]), _tags(item)))
    return things


def _alive(session: Session, job: str) -> frozenset[str]:
    """Runs with an instance that is not gone."""
    reservations = _pages(session, "describe_instances", "Reservations", job, "list the instances of all jobs")
    items = [item for reservation in reservations for item in reservation["Instances"]]
    return frozenset(_tags(item).get(TAG_RUN, "") for item in items if item["State"]["Name"] in _ALIVE)


def _tags(item: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}


# -------------------------------------------------------------------------------------------------------------- deletes
def carry_out(
    session: Session, request: CleanRequest, plan: CleanPlan, clock: Clock, say: Say
) -> tuple[list[Thing], list[tuple[Thing, SpothealError]]]:
    """The deleted things, and the failures. Volumes before their snapshots, the store last.

    The ledgers say what was deleted, for the cost of a run stands still by them.
    """
    order = ("launch template", "volume", "snapshot", "store")
    deleted: list[Thing] = []
    failed: list[tuple[Thing, SpothealError]] = []
    emptied = {thing.owner for thing in plan.deletes if thing.kind == "store"}
    states = {owner: look(session, request.root, *owner) for owner in sorted({thing.owner for thing in plan.deletes})}
    for thing in sorted(plan.deletes, key=lambda thing: (order.index(thing.kind), thing.id)):
        state = states[thing.owner]
        if not state.is_known or state.at_work:
            say(f"{thing.id} stays: {state.at_work or 'its run is not in the store any more'}")
            continue
        try:
            _delete(session, request, thing)
            deleted.append(thing)
            say(f"deleted {thing.kind} {thing.id}")
            if thing.kind in ("volume", "snapshot") and thing.owner not in emptied:
                run = runs.run_of(session.client("s3"), request.root, *thing.owner)
                run.note(clock, "deleted", **{f"{thing.kind}s": [thing.id]})
        except SpothealError as error:
            failed.append((thing, error))
            say(f"{thing.kind} {thing.id} is still there: {error.message}")
    return deleted, failed


def _delete(session: Session, request: CleanRequest, thing: Thing) -> None:
    match thing.kind:
        case "volume":
            session.ec2.delete_volume(thing.id)
        case "snapshot":
            session.ec2.delete_snapshot(thing.id)
        case "launch template":
            with suppress(NotFound), translated(f"delete launch template {thing.id}"):
                session.client("ec2").delete_launch_template(LaunchTemplateName=thing.id)
        case "store":
            _delete_prefix(session, request.root.below(*thing.owner))


def _delete_prefix(session: Session, url: StoreUrl) -> None:
    """Status and fleet last: a deletion that is cut short leaves a run that is still known."""
    store = Store(session.client("s3"), url)
    last = (LAYOUT.status, LAYOUT.fleet_document)
    for key, _ in store.sizes():
        if key not in last:
            store.delete(key)
    for key in last:
        store.delete(key)


def document(
    plan: CleanPlan, deleted: Iterable[Thing], failed: Iterable[tuple[Thing, SpothealError]]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "currency": "USD",
        "planned": [_row(Verdict(thing, True, "")) for thing in plan.deletes],
        "deleted": [thing.id for thing in deleted],
        "failed": [{"id": thing.id, "error": str(error)} for thing, error in failed],
        "kept": [_row(verdict) for verdict in plan.keeps],
        "dollars_per_month": float(plan.month),
        "kept_dollars_per_month": float(plan.kept_month),
    }


def _row(verdict: Verdict) -> dict[str, Any]:
    thing = verdict.thing
    job, run = thing.owner
    return {"kind": thing.kind, "id": thing.id, "job": job, "run": run, "zone": thing.zone or None,
            "size_gib": thing.size_gib or None, "state": thing.state or None,
            "dollars_per_month": float(thing.month), "why": verdict.reason or None}  # fmt: skip
