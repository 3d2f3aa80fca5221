"""Volumes as an operator sees them: those of jobs, and free ones that a request would take by their name."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotheal.agent.billing import GIB_MONTH
from spotheal.agent.ec2 import Volume, VolumeSpec
from spotheal.agent.errors import ConfigError, Conflict, NotFound, SpothealError
from spotheal.agent.names import TAG_JOB, TAG_NAME, TAG_RUN, TAG_STATE, VolumeState, volume_token
from spotheal.fleet import runs

if TYPE_CHECKING:
    from spotheal.agent.clock import Clock
    from spotheal.agent.config import JobConfig
    from spotheal.agent.names import StoreUrl
    from spotheal.fleet.session import Session

GONE = ("deleting", "deleted", "error")


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
    """Every volume of a job, and the free ones of that name; two calls, however many there are."""
    found = {one.id: one for one in (*session.ec2.volumes_tagged(TAG_JOB, "*"), *session.ec2.volumes_named(name))}
    kept = [one for one in found.values() if one.state not in GONE]
    return [Row(one, month(one.type, one.size_gib)) for one in sorted(kept, key=lambda one: (_owner(one), one.id))]


def month(kind: str, size_gib: int) -> float | None:
    """Dollars a month, list price."""
    price = GIB_MONTH.get(kind)
    return float(price) * size_gib if price is not None else None


def _owner(volume: Volume) -> str:
    return volume.tags.get(TAG_JOB, "")


def known(session: Session, volume: str) -> Volume:
    if not volume.startswith("vol-") or not volume[4:].isalnum():
        raise ConfigError(f"{volume!r} is no volume's id", next_step="`fleetctl volume ls` lists them")
    found = session.ec2.volume(volume)
    if found is None or found.state in GONE:
        raise NotFound(f"there is no volume {volume} in {session.region}", next_step="`fleetctl volume ls` lists them")
    return found


def free_named(session: Session, name: str) -> list[Volume]:
    """Volumes of that name that belong to no run."""
    found = session.ec2.volumes_named(name)
    return [one for one in found if TAG_RUN not in one.tags and TAG_JOB not in one.tags and one.state not in GONE]


def refuse_in_use(session: Session, volume: Volume, root: StoreUrl) -> None:
    """Conflict where an instance has the volume, or a fleet works on its run."""
    if volume.attachments or volume.state == "in-use":
        holder = volume.attachments[0].instance if volume.attachments else "something"
        raise Conflict(f"{volume.id} is attached to {holder}", next_step="wait for its end, or cancel its job first")
    job, run = volume.tags.get(TAG_JOB, ""), volume.tags.get(TAG_RUN, "")
    if job and run:
        fleet = str(runs.open_run(session.client("s3"), root, job, run).fleet_document().get("fleet_id") or "")
        if fleet and runs.fleet_state(session.client("ec2"), fleet) in runs.LIVE_FLEET_STATES:
            raise Conflict(f"{fleet} works on {volume.id} for job {job!r}", next_step=f"`fleetctl cancel {job}` first")


def delete(session: Session, volume: Volume, root: StoreUrl, clock: Clock) -> None:
    """With a note in the ledger of its run, where this store has that run: the run's cost stands still by it."""
    session.ec2.delete_volume(volume.id)
    job, run = volume.tags.get(TAG_JOB, ""), volume.tags.get(TAG_RUN, "")
    with suppress(SpothealError):  # it is deleted, whatever the store says
        found = runs.run_of(session.client("s3"), root, job, run)
        if job and run and found.store.read_status() is not None:
            found.note(clock, "deleted", volumes=[volume.id])


def blank(job: JobConfig, zone: str, size_gib: int, kind: str, token: str) -> VolumeSpec:
    """A new one that the next request of the job will take by its name; `new`, so that it is formatted then."""
    tags = {TAG_NAME: job.volume.name, TAG_STATE: VolumeState.NEW.value}
    return VolumeSpec(zone=zone, size_gib=size_gib, type=kind, tags=tags, encrypted=True,
                      token=volume_token(f"{job.volume.name} {token}", 0, zone, "", 1))  # fmt: skip


def as_key(name: str) -> str:
    """A Name tag as part of a key in the store."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "volume"
