"""The end of a run by an operator's hand: its own fleet, never another's; the volume and the store stay."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spotheal.agent.aws.ec2 import Instance, Volume
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.ends import saved_step
from spotheal.agent.protocol.names import FILLING, LAYOUT, TAG_JOB, TAG_PURPOSE, TAG_RUN, TAG_STORE, Phase
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.fleet.request.request import TAG_LENGTH_MAX
from spotheal.fleet.run import engine, runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.sweep.progress import marks_of

CANCEL_TRIES = 5
_WRITERS = 16
_GONE = ("terminated", "shutting-down")


@dataclass(frozen=True)
class CancelPlan:
    """`fleet` is "" if none is live. `instances` end with it, or alone; `volumes` stay and cost."""

    job: str
    run: str
    fleet: str
    instances: tuple[Instance, ...]
    volumes: tuple[Volume, ...]
    pending: bool = False


def make_plan(session: Session, run: runs.Run) -> CancelPlan:
    """The plan of a cancel. Conflict if the fleet recorded for the run does not carry its tags."""
    document = run.fleet_document()
    fleet = str(document.get("fleet_id") or "")
    live = ""
    if fleet:
        described = engine.describe_own(session.client("ec2"), fleet, run.id, run.job)
        if described is not None and described.is_live:
            live = fleet
    instances = [instance for instance in session.ec2.instances_tagged(TAG_RUN, run.id) if instance.state not in _GONE]
    volumes = session.ec2.volumes_of_run(run.id, run.job)
    pending = not fleet and bool(document.get("request"))
    return CancelPlan(run.job, run.id, live, tuple(instances), volumes, pending)


def carry_out(session: Session, run: runs.Run, plan: CancelPlan, clock: Clock) -> None:
    """Cancel the fleet and its instances; the store then says who ended the run. Cancelled already is success."""
    if plan.fleet:
        until_it_works(
            lambda: session.ec2.cancel_fleet(plan.fleet), clock, tries_max=CANCEL_TRIES, pause=lambda tries: 2.0 * tries
        )
    else:  # a fleet that was cancelled by other means may have left its instances running
        for instance in plan.instances:
            session.ec2.terminate(instance.id)
    if run.store.read_status():
        # An end, which the agent does not write over while its instance goes down (it saves and hands over all the
        # same), and which does not go over one that is recorded. `request --resume` takes it back.
        now = rfc3339(clock.now())
        end = {"phase": Phase.CANCELLED.value, "reason": f"cancelled by fleetctl at {now}"}
        status = run.store.end_status({**end, "ended": now})
        if status is not None:
            run.note(clock, "end", **end, saved_step=saved_step(status))
            _end_entries(run, end, clock)


def _end_entries(sweep: runs.Run, end: Mapping[str, str], clock: Clock) -> None:
    """Note the end in the ledger of each run of a sweep that was at work. Its status stays, and with it the run in the
    queue: `sweep run --resume` goes on with it."""
    marks = marks_of(sweep.store.keys(LAYOUT.queue))

    def note(index: int) -> None:
        entry = runs.Run(sweep.job, sweep.id, Store(sweep.store.client, sweep.store.url.below(LAYOUT.entry(index))))
        entry.note(clock, "end", **end, saved_step=saved_step(entry.store.read_status() or {}))

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(note, [index for index, (claims, ended) in marks.items() if claims and not ended]))


@dataclass(frozen=True)
class Strays:
    """Fleets and instances of a job without a run in the store (its bucket was deleted): they still cost."""

    fleets: tuple[str, ...]
    instances: tuple[str, ...]
    stores: tuple[str, ...] = ()  # other stores of the same job name; "" for things without a store's tag


def find_strays(session: Session, job: str, root: str, *, all_stores: bool = False) -> Strays:
    """Fleets and instances of the job in this store: a job of the same name in another store is another's. With
    `all_stores` those of all stores."""
    fleets = engine.live_of_job(session.client("ec2"), job)
    tagged = session.ec2.instances_tagged(TAG_JOB, job)
    # An instance that fills a volume ends by itself, and belongs to no run.
    instances = [
        instance for instance in tagged if instance.state not in _GONE and instance.tags.get(TAG_PURPOSE) != FILLING
    ]

    def is_ours(tags: Mapping[str, str]) -> bool:
        return all_stores or tags.get(TAG_STORE) == root[:TAG_LENGTH_MAX]

    all_tags = [*(stray.tags for stray in fleets), *(stray.tags for stray in instances)]
    other_stores = {tags.get(TAG_STORE, "") for tags in all_tags if not is_ours(tags)}
    return Strays(
        tuple(stray.id for stray in fleets if is_ours(stray.tags)),
        tuple(stray.id for stray in instances if is_ours(stray.tags)),
        tuple(sorted(other_stores)),
    )


def end_strays(session: Session, strays: Strays) -> None:
    """The fleets first, so that they replace nothing; instances that no fleet ends, too."""
    for fleet in strays.fleets:
        session.ec2.cancel_fleet(fleet)
    for instance in strays.instances:
        session.ec2.terminate(instance)
