"""The steps of a request with their notes: for a new fleet, without AWS, and after an interrupted request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import Conflict
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.account import existing, volumes
from spotheal.fleet.account.prices import Price, price_notes, spot_prices
from spotheal.fleet.files.config import FleetConfig
from spotheal.fleet.request import plan, repository
from spotheal.fleet.request.bucket import bucket_exists, bucket_notes
from spotheal.fleet.request.request import Request
from spotheal.fleet.request.wheelhouse import Wheelhouse
from spotheal.fleet.run.session import PLACEHOLDER_ACCOUNT, Session


@dataclass(frozen=True)
class Parts:
    """What the steps are made of. `shared`: in place of a volume, for a sweep or a run on several machines."""

    job: JobConfig
    fleet: FleetConfig
    run: str
    store: StoreUrl
    wheels: Wheelhouse
    source: repository.Source
    request: Request
    shared: plan.WriteSweep | plan.ShareFolder | None

    def steps(self, volume: plan.Step, *, bucket_missing: bool) -> tuple[plan.Step, ...]:
        steps: list[plan.Step] = [plan.CreateBucket(self.store.bucket)] if bucket_missing else []
        steps += [plan.RecordRun(str(self.store)), plan.UploadWheels(self.wheels.versions, self.wheels.size)]
        steps += [plan.UploadBundle(self.source.commit)] if self.source.bundle else []
        templates = [plan.CreateTemplate(arguments) for arguments in self.request.templates]
        return (*steps, volume, *templates, *_rescue(self.job), plan.SendFleet(self.request.fleet))


@dataclass(frozen=True)
class Draft:
    """The steps and their notes; the zones, and the prices that chose among them."""

    steps: tuple[plan.Step, ...]
    notes: tuple[str, ...]
    zones: tuple[str, ...]
    prices: tuple[Price, ...] = ()


def pending(session: Session, parts: Parts, run: plan.Existing) -> Draft:
    """After an interrupted request: its fleet may exist, so nothing that it uses may be changed."""
    notes = ["an earlier attempt was interrupted while it sent the request; exactly that request is sent again"]
    steps = _pending_steps(session, parts, run)
    if steps[-1] != plan.SendFleet(parts.request.fleet):
        notes.append(
            "job.toml, the fleet's file or the revision changed since, not applied: for that, cancel and --new-run"
        )
    return Draft(steps, tuple(notes), parts.fleet.zones)


def _pending_steps(session: Session, parts: Parts, run: plan.Existing) -> tuple[plan.Step, ...]:
    if parts.shared is not None and run.request is not None:
        return (plan.SendFleet(run.request),)
    volume = session.ec2.volume(run.volume)
    if volume is None or run.request is None:
        raise Conflict(
            f"EC2 does not show the volume of run {run.run}, {run.volume}", next_step="wait a minute and try again"
        )
    return (plan.KeepVolume(volume), *_rescue(parts.job), plan.SendFleet(run.request))


def offline(session: Session, parts: Parts) -> Draft:
    """Without any call: for a request that is only shown."""
    zones = parts.fleet.zones
    notes = [
        "without credentials nothing was read from AWS: prices, an existing run and the volume are not known, "
        f"and the account's number is written as {PLACEHOLDER_ACCOUNT}"
    ]
    if parts.fleet.template_configs:
        notes.append(
            "your launch templates could not be read: their contents are missing from the templates shown here"
        )
    zone = (*zones, f"{session.region}a")[0]
    volume = parts.shared or plan.decide_volume(parts.job, parts.run, zone, (), (), resumed=False)
    return Draft(parts.steps(volume, bucket_missing=True), tuple(notes), zones)


def online(session: Session, parts: Parts, account: Sequence[plan.Step], clock: Clock, *, resumed: bool) -> Draft:
    """For a new fleet. `account`: the steps that create what the account lacks."""
    job = parts.job
    zones = zones_of(session, parts.fleet)
    prices = spot_prices(session, parts.fleet.instance_types, zones, clock)
    notes = price_notes(parts.fleet.document, prices)
    volume = parts.shared or _volume_step(session, parts, plan.cheapest_zone(zones, prices), resumed=resumed)
    if isinstance(volume, plan.AdoptVolume) and volume.volume.size_gib != job.volume.size_gib:
        notes.append(f"{volume.volume.id} keeps its {volume.volume.size_gib} GiB; job.toml says {job.volume.size_gib}")
    if isinstance(volume, plan.CreateVolume):
        notes += volumes.article_notes(session, job)
    bucket_missing = not bucket_exists(session, parts.store.bucket)
    if not bucket_missing:
        notes += bucket_notes(session, parts.store.bucket)
    return Draft((*account, *parts.steps(volume, bucket_missing=bucket_missing)), tuple(notes), zones, prices)


def _volume_step(
    session: Session, parts: Parts, zone: str, *, resumed: bool
) -> plan.CreateVolume | plan.AdoptVolume | plan.KeepVolume:
    of_run = session.ec2.volumes_of_run(parts.run, parts.job.job.name)
    named = session.ec2.volumes_named(parts.job.volume.name)
    return plan.decide_volume(parts.job, parts.run, zone, of_run, named, resumed=resumed)


def _rescue(job: JobConfig) -> list[plan.Step]:
    return [plan.ArmRescue(job.fleet.on_demand_after, job.limits.dollars)] if seconds(job.fleet.on_demand_after) else []


def zones_of(session: Session, fleet: FleetConfig) -> tuple[str, ...]:
    zones = list(fleet.zones)
    zones += [subnet["AvailabilityZone"] for subnet in existing.subnets(session, fleet)]
    if not zones:
        ec2 = session.client("ec2")
        with translated("list the availability zones"):
            answer = ec2.describe_availability_zones(Filters=[{"Name": "state", "Values": ["available"]}])
        zones = sorted(zone["ZoneName"] for zone in answer["AvailabilityZones"])
    return tuple(dict.fromkeys(zones))
