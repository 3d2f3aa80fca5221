"""Volumes for the operator: those of jobs, and free volumes with a job's volume name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.ec2 import TokenUsed, Volume, VolumeSpec
from spotheal.agent.money.billing import GIB_MONTH
from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, PermissionDenied, SpothealError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import (
    TAG_JOB,
    TAG_NAME,
    TAG_RUN,
    TAG_STATE,
    StoreUrl,
    VolumeState,
    volume_token,
)
from spotheal.fleet.run import runs

if TYPE_CHECKING:
    from spotheal.agent.protocol.clock import Clock
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.run.session import Session

GONE = ("deleting", "deleted", "error")
ARTICLE_NAME = "DL-datasets-checkpoints"  # the script in AWS's article looks for it
SHOWN_SECONDS_MAX = 15.0
_MADE_A_DAY_MAX = 20


@dataclass(frozen=True)
class Row:
    """One line of `volume ls`."""

    volume: Volume
    month: float | None  # dollars

    def to_document(self) -> dict[str, Any]:
        tags = self.volume.tags
        holder = self.volume.attachments[0].instance if self.volume.attachments else None
        return {
            "id": self.volume.id, "name": tags.get(TAG_NAME), "zone": self.volume.zone, "type": self.volume.type,
            "size_gib": self.volume.size_gib, "state": self.volume.state, "instance": holder,
            "job": tags.get(TAG_JOB), "run": tags.get(TAG_RUN), "role": tags.get(TAG_STATE),
            "dollars_per_month": self.month,
        }  # fmt: skip


def listed(session: Session, name: str) -> list[Row]:
    """Every volume of any job, and those with this Name tag or the article's; three calls for any number of volumes."""
    ec2 = session.ec2
    volumes = (*ec2.volumes_tagged(TAG_JOB, "*"), *ec2.volumes_named(name), *ec2.volumes_named(ARTICLE_NAME))
    existing = {volume.id: volume for volume in volumes if volume.state not in GONE}
    ordered = sorted(existing.values(), key=lambda volume: (_owner(volume), volume.id))
    return [Row(volume, month(volume.type, volume.size_gib)) for volume in ordered]


def month(kind: str, size_gib: int) -> float | None:
    """Dollars a month, list price."""
    price = GIB_MONTH.get(kind)
    return float(price) * size_gib if price is not None else None


def _owner(volume: Volume) -> str:
    return volume.tags.get(TAG_JOB, "")


def known(session: Session, volume_id: str) -> Volume:
    if not volume_id.startswith("vol-") or not volume_id[4:].isalnum():
        raise ConfigError(f"{volume_id!r} is no volume's id", next_step="`fleetctl volume ls` lists them")
    volume = session.ec2.volume(volume_id)
    if volume is None or volume.state in GONE:
        raise NotFound(
            f"there is no volume {volume_id} in {session.region}", next_step="`fleetctl volume ls` lists them"
        )
    return volume


def free_of(session: Session, job: JobConfig) -> list[Volume]:
    """The free volumes that were made for this job; Conflict if there is none, but one with its name and no job."""
    own_volumes, unclaimed = free_volumes(job.job.name, session.ec2.volumes_named(job.volume.name))
    if unclaimed and not own_volumes:
        raise not_claimed(unclaimed[0])
    return own_volumes


def not_claimed(volume: Volume) -> Conflict:
    """A Name tag is no proof: the volume may hold other data. So a job gets it only by its own command."""
    return Conflict(
        f'{volume.id} is named "{volume.tags.get(TAG_NAME, "")}", but no tag says that it is this job\'s',
        next_step=f"`fleetctl volume adopt {volume.id}` gives it to this job, with its files; or set another [volume]"
        " name in job.toml for a new one",
    )


def refuse_other_job(volume: Volume, job: JobConfig) -> None:
    """Conflict if the volume was made for another job, or holds its runs."""
    owner = volume.tags.get(TAG_JOB, "")
    if owner and owner != job.job.name:
        raise Conflict(
            f"{volume.id} belongs to job {owner!r}, and this is {job.job.name!r}",
            next_step="name that job's file with --job, or another volume; `fleetctl volume ls` lists them",
        )


def article_notes(session: Session, job: JobConfig) -> list[str]:
    """Notes, in a plan with a new volume, on volumes with the article's name, the default of jobs until 2026."""
    if job.volume.name == ARTICLE_NAME:
        return []
    _, unclaimed = free_volumes(job.job.name, session.ec2.volumes_named(ARTICLE_NAME))
    return [
        f'{volume.id} in {volume.zone} is named "{ARTICLE_NAME}" and belongs to no job: if its files are this job\'s, '
        f"`fleetctl volume adopt {volume.id}` before this request"
        for volume in unclaimed
    ]


def refuse_in_use(session: Session, volume: Volume, root: StoreUrl) -> None:
    """Conflict if an instance has the volume, or a fleet works on its run."""
    if volume.attachments or volume.state == "in-use":
        holder = volume.attachments[0].instance if volume.attachments else "something"
        raise Conflict(f"{volume.id} is attached to {holder}", next_step="wait for its end, or cancel its job first")
    job, run = volume.tags.get(TAG_JOB, ""), volume.tags.get(TAG_RUN, "")
    if job and run:
        fleet = str(runs.open_run(session.client("s3"), root, job, run).fleet_document().get("fleet_id") or "")
        if fleet and runs.fleet_state(session.client("ec2"), fleet) in runs.LIVE_FLEET_STATES:
            raise Conflict(f"{fleet} works on {volume.id} for job {job!r}", next_step=f"`fleetctl cancel {job}` first")


def delete(session: Session, volume: Volume, root: StoreUrl, clock: Clock) -> None:
    """Delete the volume. If this store has its run, the ledger gets an event, which ends the run's cost."""
    session.ec2.delete_volume(volume.id)
    job, run = volume.tags.get(TAG_JOB, ""), volume.tags.get(TAG_RUN, "")
    with suppress(SpothealError):  # the volume is deleted, even if the store fails
        owner = runs.run_of(session.client("s3"), root, job, run)
        if job and run and owner.store.read_status() is not None:
            owner.note(clock, "deleted", volumes=[volume.id])


def blank(job: JobConfig, zone: str, size_gib: int, kind: str) -> VolumeSpec:
    """A new volume of the job, which its next request uses; `new`, so that it is formatted then."""
    tags = {TAG_NAME: job.volume.name, TAG_JOB: job.job.name, TAG_STATE: VolumeState.NEW.value}
    key = job.volume.kms_key or None
    return VolumeSpec(zone=zone, size_gib=size_gib, type=kind, tags=tags, encrypted=True, kms_key=key, token="")


def make(session: Session, spec: VolumeSpec, day: str, clock: Clock) -> Volume:
    """The volume that `spec` describes. The same command on the same day makes only one, even if answers are lost.

    CreateVolume answers a known token with the volume that it made before. If a run has that volume by now, if it is
    in use, or deleted, it must not be filled, and the next token is tried.
    """
    job = spec.tags[TAG_JOB]
    identity = f"{job}/{spec.tags[TAG_NAME]}/{spec.size_gib}/{spec.type}/{day}"
    for attempt in range(1, _MADE_A_DAY_MAX + 1):
        try:
            answer = session.ec2.create_volume(replace(spec, token=volume_token(identity, 0, spec.zone, "", attempt)))
        except TokenUsed:
            continue
        await_encrypted(session, answer.id, spec.kms_key, clock)
        volume = _shown(session, answer.id, clock)  # the answer's state and tags are those of the first call
        if volume is not None and free_volumes(job, [volume])[0] and not volume.attachments:
            return volume
    raise Conflict(
        f"{_MADE_A_DAY_MAX} volumes like this were made for job {job!r} today, and all are in use",
        next_step="`fleetctl volume ls` lists them",
    )


def await_encrypted(session: Session, volume: str, key: str | None, clock: Clock) -> None:
    """PermissionDenied if EC2 deletes the volume after its answer: only then it asks KMS for the customer's key."""
    until, description = clock.monotonic() + SHOWN_SECONDS_MAX, None
    while key and clock.monotonic() < until:
        description = session.ec2.volume(volume)
        if description is not None and description.state not in ("creating", *GONE):
            return
        clock.sleep(1.0)
    if key and (description is None or description.state in GONE):
        raise PermissionDenied(
            f"{volume} was made and taken back by EC2: KMS key {key} is not enabled, or you may not use it",
            next_step=f"`aws kms describe-key --key-id {key}`; `fleetctl iam show"
            f" operator-store --kms-key {key}` prints the permissions; then the same with --new-run",
        )


def _shown(session: Session, volume: str, clock: Clock) -> Volume | None:
    """None for a deleted volume. A new volume may be missing from EC2's answers for seconds."""
    until = clock.monotonic() + SHOWN_SECONDS_MAX
    while (description := session.ec2.volume(volume)) is None and clock.monotonic() < until:
        clock.sleep(1.0)
    return description


def as_key(name: str) -> str:
    """A Name tag as part of a key in the store."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "volume"


def free_volumes(job: str, named: Iterable[Volume]) -> tuple[list[Volume], list[Volume]]:
    """The volumes that no run has: those made for this job, and those without any job's tag."""
    free = [volume for volume in named if TAG_RUN not in volume.tags and _exists(volume)]
    own_volumes = [volume for volume in free if volume.tags.get(TAG_JOB) == job]
    return own_volumes, [volume for volume in free if TAG_JOB not in volume.tags]


def _exists(volume: Volume) -> bool:
    return volume.state not in ("deleting", "deleted", "error")
