"""The steps of a request, decided before the first one is carried out. Pure: observations in, steps out.

The same list is shown with the question, printed by `--dry-run` and carried out by `submit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.ec2 import Volume, VolumeSpec
from spotheal.agent.protocol.errors import Conflict
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import (
    TAG_JOB,
    TAG_NAME,
    TAG_RUN,
    TAG_STATE,
    TAG_TERM,
    Phase,
    StoreUrl,
    VolumeState,
)
from spotheal.agent.volume.first import first_volume
from spotheal.fleet.account.prerequisites import Step as AccountStep
from spotheal.fleet.account.prices import Price
from spotheal.fleet.account.volumes import _exists, free_volumes
from spotheal.fleet.request.request import call_of


# -------------------------------------------------------------------------------------------------------- which run
@dataclass(frozen=True)
class Existing:
    """The newest run of the job. `fleet` is "" if none was recorded; `live`: by AWS; `pending`: a request was about to
    be sent, and its answer is not known."""

    run: str
    phase: str
    fleet: str
    live: bool
    pending: bool
    generation: int
    requested_at: str
    volume: str = ""
    request: dict[str, Any] | None = None  # the pending one
    on_batch: bool = False  # then `live` says that AWS Batch still has an open job


@dataclass(frozen=True)
class Show:
    """A fleet works on the run already."""

    existing: Existing


@dataclass(frozen=True)
class Begin:
    """A new run. `after`: the job's newest run so far, "" if there is none."""

    after: str = ""


@dataclass(frozen=True)
class Continue:
    """An interrupted request continues: the same run and tokens, so that nothing is created twice."""

    existing: Existing


@dataclass(frozen=True)
class Resume:
    """The same run and volume under another fleet."""

    existing: Existing


Way = Show | Begin | Continue | Resume


def decide_run(job: str, existing: Existing | None, *, resume: bool, new_run: bool) -> Way:
    """The run that the request is for; Conflict if only the operator can decide."""
    if existing is None:
        if resume:
            raise Conflict(
                f"job {job!r} has no run to resume", next_step="`fleetctl request` without --resume begins one"
            )
        return Begin()
    if existing.on_batch and (existing.live or not new_run):
        raise _on_batch(job, existing)
    if existing.live:
        if new_run:
            raise Conflict(
                f"{existing.fleet} works on job {job!r}",
                next_step=f"`fleetctl cancel {job}` first, or another name in job.toml",
            )
        return Show(existing)
    if existing.pending or not existing.fleet:
        if new_run and existing.pending:
            raise Conflict(
                f"the request of run {existing.run} was interrupted, and may have reached AWS",
                next_step=f"`fleetctl request` once more finishes it; then `fleetctl cancel {job}`",
            )
        return Begin(existing.run) if new_run else Continue(existing)
    if new_run:
        return Begin(existing.run)
    if resume:
        if existing.phase == Phase.DONE.value:
            raise Conflict(
                f"run {existing.run} of job {job!r} is done; nothing is left to resume",
                next_step="`fleetctl request --new-run` begins another",
            )
        return Resume(existing)
    if existing.phase == Phase.DONE.value:
        raise Conflict(
            f"job {job!r} has a run, {existing.run}, which is done",
            next_step=f"--new-run begins another; `fleetctl results get {job}` fetches what this one left",
        )
    over = existing.phase in {phase.value for phase in Phase if phase.is_end}
    state = f"ended ({existing.phase})" if over else f"has no live fleet (last phase: {existing.phase or 'requested'})"
    raise Conflict(
        f"job {job!r} has a run, {existing.run}, which {state}",
        next_step="--resume goes on with it and its volume, --new-run begins another",
    )


def _on_batch(job: str, existing: Existing) -> Conflict:
    """The message if the newest run is on AWS Batch, with the next command."""
    if existing.live:
        return Conflict(
            f"job {job!r} is at work on AWS Batch: run {existing.run}",
            next_step=f"`fleetctl batch cancel {job}` first, or another name in job.toml",
        )
    return Conflict(
        f"job {job!r} has a run on AWS Batch, {existing.run}, which is over",
        next_step="--new-run begins another here; `fleetctl batch submit --resume` goes on with what it has not done",
    )


# ------------------------------------------------------------------------------------------------------------ the steps
@dataclass(frozen=True)
class CreateBucket:
    bucket: str

    def says(self) -> str:
        return f"create bucket {self.bucket} (private, encrypted)"


@dataclass(frozen=True)
class RecordRun:
    """Write the run's documents to the store, so that all later steps can be found and continued."""

    store: str

    def says(self) -> str:
        return "write the run's documents to the store"


@dataclass(frozen=True)
class UploadWheels:
    versions: tuple[str, ...]
    size: int

    def says(self) -> str:
        names = ", ".join(self.versions)
        return f"upload the agent: {len(self.versions)} wheels, {self.size / 1e6:.1f} MB ({names})"


@dataclass(frozen=True)
class UploadBundle:
    commit: str

    def says(self) -> str:
        return f"upload this checkout's commit {self.commit[:10]} as a git bundle"


@dataclass(frozen=True)
class CreateVolume:
    spec: VolumeSpec

    def says(self) -> str:
        origin = f" from {self.spec.snapshot}" if self.spec.snapshot else ""
        return f"create a volume: {self.spec.size_gib} GiB {self.spec.type} in {self.spec.zone}{origin}"


@dataclass(frozen=True)
class AdoptVolume:
    volume: Volume
    tags: dict[str, str]
    is_own: bool = False  # made for this job by `fleetctl volume`; any other is only found by its name

    def says(self) -> str:
        if self.is_own:
            return (
                f"use {self.volume.id}: {self.volume.size_gib} GiB {self.volume.type} in {self.volume.zone}, "
                "made for this job, with its files"
            )
        return (
            f"adopt {self.volume.id}: {self.volume.size_gib} GiB {self.volume.type} in {self.volume.zone}, "
            f"named {self.volume.tags.get(TAG_NAME, '')}; its files stay, and from now on the run writes to it"
        )


@dataclass(frozen=True)
class KeepVolume:
    volume: Volume

    def says(self) -> str:
        return f"use {self.volume.id}: {self.volume.size_gib} GiB in {self.volume.zone}, the run's own"


@dataclass(frozen=True)
class CreateTemplate:
    arguments: dict[str, Any]

    def says(self) -> str:
        return f"create launch template {self.arguments['LaunchTemplateName']}"


@dataclass(frozen=True)
class WriteSweep:
    """Write the list of a sweep to the store. The instances create the volumes of the runs that they take."""

    entries: tuple[dict[str, Any], ...]
    source: str
    parallel: int
    size_gib: int
    type: str

    def says(self) -> str:
        volumes = f"{self.size_gib} GiB {self.type}"
        return (
            f"write the list of {len(self.entries)} runs; each has a volume ({volumes}) while it runs, up to "
            f"{self.parallel} at once, deleted when its results are stored"
        )


@dataclass(frozen=True)
class ShareFolder:
    """In place of a volume, for a run on several machines."""

    place: str
    machines_min: int
    machines_max: int

    def says(self) -> str:
        count = str(self.machines_max)
        if self.machines_min != self.machines_max:
            count = f"{self.machines_min} to {count}"
        return f"no volume: {count} machines train together, their checkpoints and results are in {self.place}"


@dataclass(frozen=True)
class ArmRescue:
    """`[fleet] on_demand_after`; the schedule names the fleet, so it is created after the fleet."""

    after: str
    dollars: float

    def says(self) -> str:
        return f"after {self.after} without spot capacity: one on-demand instance, within the job's ${self.dollars:g}"


@dataclass(frozen=True)
class SendFleet:
    arguments: dict[str, Any]

    def says(self) -> str:
        if "SpotFleetRequestConfig" in self.arguments:
            config = self.arguments["SpotFleetRequestConfig"]
            how_many = _instances(config["TargetCapacity"])
            return f"request a spot fleet of {how_many}, {config['AllocationStrategy']}, until {config['ValidUntil']}"
        strategy = self.arguments["SpotOptions"]["AllocationStrategy"]
        how_many = _instances(self.arguments["TargetCapacitySpecification"]["TotalTargetCapacity"])
        return f"create an EC2 fleet of {how_many} (spot), {strategy}, until {self.arguments['ValidUntil']}"


def _instances(count: int) -> str:
    return "1 instance" if count == 1 else f"{count} instances"


Step = (
    AccountStep
    | CreateBucket
    | RecordRun
    | UploadWheels
    | UploadBundle
    | CreateVolume
    | AdoptVolume
    | KeepVolume
    | CreateTemplate
    | WriteSweep
    | ShareFolder
    | ArmRescue
    | SendFleet
)


def decide_volume(
    job: JobConfig, run: str, zone: str, of_run: tuple[Volume, ...], named: tuple[Volume, ...], *, resumed: bool
) -> CreateVolume | AdoptVolume | KeepVolume:
    """The volume to which the run will write. `of_run` have the run's tag, `named` only the Name in job.toml.

    Conflict if there are two, or if the only one is in use: a wrong guess would destroy data.
    """
    run_volumes = [
        volume for volume in of_run if volume.tags.get(TAG_STATE) != VolumeState.SUPERSEDED.value and _exists(volume)
    ]
    if run_volumes:
        return KeepVolume(max(run_volumes, key=_rank))
    if resumed:
        raise Conflict(f"run {run} has no volume any more", next_step="--new-run begins another run with a new volume")
    own_volumes, unclaimed = free_volumes(job.job.name, named)
    free = own_volumes or unclaimed
    if len(free) > 1:
        ids = ", ".join(f"{volume.id} ({volume.zone})" for volume in free)
        raise Conflict(
            f'{len(free)} volumes are named "{job.volume.name}": {ids}; which one is the job\'s cannot be told',
            next_step="take the Name tag off the others (`aws ec2 delete-tags --resources vol-… --tags Key=Name`), "
            "or set another [volume] name in job.toml for a new one",
        )
    tags = {TAG_JOB: job.job.name, TAG_RUN: run, TAG_TERM: "0"}
    if free:
        volume = free[0]
        if volume.state != "available":
            holder = volume.attachments[0].instance if volume.attachments else "something"
            raise Conflict(
                f'{volume.id}, named "{job.volume.name}", is {volume.state} (attached to {holder})',
                next_step=f"`aws ec2 detach-volume --volume-id {volume.id}` after unmounting it there, "
                "or set another [volume] name in job.toml for a new one",
            )
        # A blank volume of `fleetctl volume create` stays new: nothing else is ever formatted.
        is_new = volume.tags.get(TAG_STATE) == VolumeState.NEW.value and not volume.snapshot
        state = VolumeState.NEW if is_new else VolumeState.CURRENT
        return AdoptVolume(volume, {**tags, TAG_STATE: state.value}, is_own=bool(own_volumes))
    return CreateVolume(first_volume(job, run, zone))


def _rank(volume: Volume) -> tuple[bool, int]:
    term = volume.tags.get(TAG_TERM, "")
    return volume.tags.get(TAG_STATE) != VolumeState.MOVING.value, int(term) if term.isdigit() else 0


# ----------------------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Plan:
    """A whole request. `steps` are in the order in which they are carried out, each idempotent."""

    job: str
    run: str
    generation: int
    requested_at: str
    account: str
    region: str
    store: StoreUrl
    repository: str
    commit: str
    types: tuple[str, ...]
    zones: tuple[str, ...]
    prices: tuple[Price, ...]
    steps: tuple[Step, ...]
    user_data_bytes: int
    notes: tuple[str, ...] = ()
    limit_hours: float = 0.0
    limit_dollars: float = 0.0
    machines: tuple[int, int] = (1, 1)  # the minimum and maximum that train together
    initialization_rate: int = 0  # MiB/s at which a copy of the volume is filled

    @property
    def request(self) -> dict[str, Any]:
        """The exact calls, as `--dry-run` prints them."""
        fleet = [step.arguments for step in self.steps if isinstance(step, SendFleet)]
        return {
            "create_volume": next((step.spec.request() for step in self.steps if isinstance(step, CreateVolume)), None),
            "create_launch_template": [step.arguments for step in self.steps if isinstance(step, CreateTemplate)],
            "request_spot_fleet": None,
            "create_fleet": None,
            **{call_of(arguments): arguments for arguments in fleet},
        }


def cheapest_zone(zones: tuple[str, ...], prices: tuple[Price, ...]) -> str:
    """The zone for a new volume: the fleet will most likely launch there first, and then nothing has to move."""
    best = min(
        (price for price in prices if price.zone in zones), key=lambda price: (price.spot, price.zone), default=None
    )
    return best.zone if best else zones[0]
