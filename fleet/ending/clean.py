"""The leftovers of finished jobs that cost or clutter: decided on gathered facts (pure).

Three rules, in this order. What is at work, or whose run this store does not know, is never touched. What holds the
only copy of anything stays: a run's volume goes when its results are in the store, or when the operator gives the run
up. What a verified successor has replaced goes with every run that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from spotheal.agent.money.bill_inputs import Disk
from spotheal.agent.money.billing import SNAPSHOT_GIB_MONTH, disk_month
from spotheal.agent.protocol.names import SNAPSHOTS_KEPT, TAG_JOB, TAG_RUN, TAG_STATE, TAG_TERM, Phase, VolumeState

S3_GIB_MONTH = Decimal("0.023")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_BEFORE_RUN = timedelta(seconds=60)


@dataclass(frozen=True)
class Thing:
    """`kind`: volume, snapshot, launch template, store. `created` if AWS tells it; `disk` of a volume."""

    kind: str
    id: str
    tags: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    zone: str = ""
    size_gib: int = 0
    created: datetime | None = None
    disk: Disk | None = None

    @property
    def owner(self) -> tuple[str, str]:
        return self.tags.get(TAG_JOB, ""), self.tags.get(TAG_RUN, "")

    @property
    def month(self) -> Decimal:
        """Dollars; for a snapshot the most it can be, because it holds only changed blocks."""
        if self.kind == "volume" and self.disk is not None:
            return disk_month(self.disk)
        if self.kind == "snapshot":
            return SNAPSHOT_GIB_MONTH * self.size_gib
        return Decimal(0)


@dataclass(frozen=True)
class RunSeen:
    """`phase` "" and `is_known` False if the store has no such run. `at_work`: the reason if it is at work, else ""."""

    job: str
    run: str
    is_known: bool
    phase: str = ""
    reason: str = ""
    at_work: str = ""
    results: int = 0
    results_bytes: int = 0
    store_files: int = 0
    store_bytes: int = 0
    of_sweep: bool = False
    newer: str = ""  # the job's newest run, if it is another one

    @property
    def results_stored(self) -> bool:
        """If not all results are stored, the agent says so in the reason."""
        return self.phase == Phase.DONE.value and self.results > 0 and "results not stored" not in self.reason


@dataclass(frozen=True)
class Verdict:
    thing: Thing
    deletes: bool
    reason: str


@dataclass(frozen=True)
class CleanPlan:
    verdicts: tuple[Verdict, ...]

    @property
    def deletes(self) -> tuple[Thing, ...]:
        return tuple(verdict.thing for verdict in self.verdicts if verdict.deletes)

    @property
    def keeps(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if not verdict.deletes)

    @property
    def month(self) -> Decimal:
        return sum((thing.month for thing in self.deletes), Decimal(0))

    @property
    def kept_month(self) -> Decimal:
        return sum((verdict.thing.month for verdict in self.keeps), Decimal(0))


def decide(
    things: Iterable[Thing], runs: Mapping[tuple[str, str], RunSeen], *, unfinished: bool, store: bool
) -> CleanPlan:
    """`unfinished`: runs that ended without being done are given up. `store`: the store's prefixes go, too."""
    things = tuple(things)
    by_run: dict[tuple[str, str], list[Thing]] = {}
    for thing in things:
        by_run.setdefault(thing.owner, []).append(thing)
    verdicts = []
    for thing in things:
        run = runs.get(thing.owner)
        verdicts.append(Verdict(thing, *_verdict(thing, run, by_run[thing.owner], unfinished=unfinished, store=store)))
    return CleanPlan(tuple(verdicts))


def _verdict(
    thing: Thing, run: RunSeen | None, siblings: list[Thing], *, unfinished: bool, store: bool
) -> tuple[bool, str]:
    if TAG_RUN not in thing.tags:
        return False, "no run of its job has used it yet; `fleetctl volume rm` deletes it"
    if run is None or not run.is_known:
        return False, "its run is not in this store: another store's, or another tool's"
    if run.at_work:
        return False, run.at_work
    if thing.kind == "volume" and thing.state != "available":
        return False, f"it is {thing.state}"
    if thing.kind == "volume" and _was_before(thing):
        return False, "it is older than its run: adopted, with files of yours; `fleetctl volume rm` deletes it"
    if thing.kind == "store":
        return (True, "asked for") if store else (False, "the results and the logs; --store deletes them")
    if thing.kind == "launch template":
        return True, "its fleet is over"
    given_up = unfinished and run.phase != Phase.DONE.value
    if run.results_stored or given_up:
        stored = "its result is in the store" if run.results == 1 else f"{run.results} results are in the store"
        return True, stored if run.results_stored else "given up"
    if _is_replaced(thing, siblings):
        return True, "a newer copy is there"
    return False, _why_kept(run)


def _why_kept(run: RunSeen) -> str:
    if run.phase != Phase.DONE.value:
        verb = "sweep run LIST --retry-failed" if run.of_sweep else "request --resume"
        if run.newer:
            return f"run {run.newer} is newer: `fleetctl {verb}` goes on with that one; --unfinished gives this one up"
        return f"the run can go on ({run.phase or 'requested'}): `fleetctl {verb}`; --unfinished gives it up"
    if not run.results:
        return "no result is in the store: this is the only copy; `fleetctl volume rm` deletes it"
    return "not all results are in the store: this is the only copy; `fleetctl volume rm` deletes it"


def _is_replaced(thing: Thing, siblings: list[Thing]) -> bool:
    """Whether the run has a later current volume; of its snapshots the newest are kept as well."""
    volumes = [copy for copy in siblings if copy.kind == "volume" and copy.state in ("available", "in-use")]
    current = [volume for volume in volumes if volume.tags.get(TAG_STATE) == VolumeState.CURRENT.value]
    if not current:
        return False
    if thing.kind == "volume":
        stale = (VolumeState.SUPERSEDED.value, VolumeState.MOVING.value)
        return thing.tags.get(TAG_STATE) in stale and _term(thing) < max(_term(copy) for copy in current)
    snapshots = [copy for copy in siblings if copy.kind == "snapshot"]
    newest = sorted(
        snapshots, key=lambda snapshot: (_term(snapshot), snapshot.created or datetime.min.replace(tzinfo=timezone.utc))
    )
    return thing not in newest[-SNAPSHOTS_KEPT:]


def _term(thing: Thing) -> int:
    term = thing.tags.get(TAG_TERM, "")
    return int(term) if term.isdigit() else 0


def _was_before(volume: Thing) -> bool:
    """Whether a volume was there before its run: an adopted one. A run's id holds the moment of its request."""
    start = began_at(volume.owner[1])
    return volume.created is not None and start is not None and volume.created < start - _BEFORE_RUN


def began_at(run: str) -> datetime | None:
    """The moment in a run's id, a ULID."""
    if len(run) != 26 or any(character not in _CROCKFORD for character in run):
        return None
    value = 0
    for character in run[:10]:
        value = value * 32 + _CROCKFORD.index(character)
    try:
        return datetime.fromtimestamp(value / 1000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
