"""Makes a `plan.Plan` of a request from files, git and AWS; nothing is changed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import LAYOUT, StoreUrl, default_bucket, new_run_id
from spotheal.fleet.account import existing, keys
from spotheal.fleet.account.prerequisites import Found, look, look_between
from spotheal.fleet.files.config import FleetConfig
from spotheal.fleet.files.places import region_of
from spotheal.fleet.request import known_hosts, plan, repository, request, steps, template, userdata
from spotheal.fleet.request.wheelhouse import Wheelhouse
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import PLACEHOLDER_ACCOUNT, Session
from spotheal.fleet.run.store_documents import sensible


@dataclass(frozen=True)
class Wanted:
    """The operator's files and options."""

    fleet: FleetConfig
    job: JobConfig
    job_file: Path
    fleet_file: Path
    resume: bool = False
    new_run: bool = False
    extra_files: tuple[Path, ...] = ()  # more files of the operator, which need no commit


@dataclass(frozen=True)
class Ready:
    """A plan and its inputs, which `submit` needs. `fresh`: no fleet of its generation can have been sent.

    `turn` names the state that this request follows, so that of two requests at the same moment only one goes on; "" if
    both would send the same fleet.
    """

    plan: plan.Plan
    instance: InstanceConfig
    wheelhouse: Wheelhouse
    source: repository.Source
    previous: tuple[str, ...]
    fresh: bool
    turn: str = ""


def settle_region(session: Session, inputs: Wanted) -> str:
    """The region of the request; ConfigError if the fleet has a zone in another region."""
    region = session.settle_region(inputs.job.job.region, inputs.fleet.region)
    strange = [zone for zone in inputs.fleet.zones if region_of(zone) != region]
    if strange:
        raise ConfigError(
            f"{inputs.fleet.source} names {', '.join(strange)}, but the region is {region}",
            next_step=f"--region {region_of(strange[0])}, or correct the zones",
        )
    return region


@sensible
def existing_run(session: Session, root: StoreUrl, job: str) -> plan.Existing | None:
    """The newest run of the job, from the store and AWS."""
    run = runs.newest(session.client("s3"), root, job)
    if run is None:
        return None
    document = run.fleet_document()
    fleet = str(document.get("fleet_id") or "")
    status = run.store.read_status() or {}
    instance = run.store.get_json(LAYOUT.job_document) or {}
    requested_at = str(document.get("requested_at") or instance.get("run", {}).get("requested_at") or "")
    live = bool(fleet) and runs.fleet_state(session.client("ec2"), fleet) in runs.LIVE_FLEET_STATES
    if on_batch := document.get("engine") == "batch":
        live = _is_open(session, run)
    return plan.Existing(
        run=run.id,
        phase=str(status.get("phase") or ""),
        fleet=fleet,
        live=live,
        pending=not fleet and not on_batch and bool(document.get("request")),
        generation=int(document.get("generation") or 1),
        requested_at=requested_at,
        volume=str(document.get("volume_id") or ""),
        request=document.get("request"),
        on_batch=on_batch,
    )


def _is_open(session: Session, run: runs.Run) -> bool:
    """Whether a job of AWS Batch may still run; True if that is not known."""
    from spotheal.fleet.run import batch_jobs

    try:
        if batch_jobs.unrecorded_job(session, run):
            return True
        jobs = batch_jobs.describe(session, [str(batch_jobs.document_of(run)["job_id"])])
    except NotFound:  # never submitted
        return False
    except SpothealError:
        return True
    return any(job["status"] not in batch_jobs.ENDS for job in jobs.values())


def make_plan(
    session: Session,
    inputs: Wanted,
    way: plan.Begin | plan.Continue | plan.Resume,
    root: StoreUrl,
    wheels: Wheelhouse,
    clock: Clock,
    *,
    allow_paths: bool = False,
    offline: bool = False,
    sweep: plan.WriteSweep | None = None,
) -> Ready:
    """The plan of a request. `offline`: no call is made; values that only AWS knows are missing, and a note says so."""
    job = inputs.job
    run, generation, requested_at, previous = _identity(session, way, root, job.job.name, clock)
    ours = (inputs.job_file, inputs.fleet_file, *inputs.extra_files)
    source = repository.resolve(job, inputs.job_file.resolve().parent, ours=ours, allow_paths=allow_paths)
    store = root.below(job.job.name, run)
    entries = len(sweep.entries) if sweep else 0
    shared = _shared(job, inputs, sweep)
    instance = InstanceConfig(_for_instances(job), run, session.region, store, source.commit, requested_at, entries)
    data = userdata.render(instance, wheels.sha256)
    notes = [*inputs.fleet.warnings, *source.warnings]
    if known_hosts.host_of(job.job.repository) and not instance.job.job.known_hosts:
        notes.append("no key of the repository's host is in known_hosts here: instances take the first they see")
    templates = () if offline else _described_templates(session, inputs.fleet)
    account = Found((), inputs.fleet)
    if not offline:
        account = _look(session, inputs, root, templates, sweep=sweep is not None, between=shared is not None)
    order = request.Order(
        account.fleet, job, run, requested_at, userdata.encoded(data), generation,
        sweep.parallel if sweep else job.machines[1], tuple(templates), store=str(root),
    )  # fmt: skip
    parts = steps.Parts(job, inputs.fleet, run, store, wheels, source, request.build(order), sweep or shared)
    if isinstance(way, plan.Continue) and way.existing.pending:
        draft = steps.pending(session, parts, way.existing)
    elif offline:
        draft = steps.offline(session, parts)
    else:
        draft = steps.online(session, parts, account.steps, clock, resumed=isinstance(way, plan.Resume))
    whole = plan.Plan(
        job=job.job.name, run=run, generation=generation, requested_at=requested_at,
        account=PLACEHOLDER_ACCOUNT if offline else session.account, region=session.region, store=store,
        repository=source.repository, commit=source.commit, types=inputs.fleet.instance_types, zones=draft.zones,
        prices=draft.prices, steps=draft.steps, user_data_bytes=len(data.encode()),
        notes=(*notes, *account.notes, *draft.notes),
        limit_hours=job.limits.hours, limit_dollars=job.limits.dollars,
        machines=(1, sweep.parallel) if sweep else job.machines,
        initialization_rate=job.volume.initialization_rate,
    )  # fmt: skip
    return Ready(whole, instance, wheels, source, previous, not isinstance(way, plan.Continue), _turn(way))


def _look(
    session: Session, inputs: Wanted, root: StoreUrl, templates: Sequence[dict[str, Any]], *, sweep: bool, between: bool
) -> Found:
    """What the account has and lacks. `between`: the machines of the run must reach each other."""
    notes = [*existing.check(session, inputs.fleet, templates), *keys.check(session, inputs.job)]
    account = look(session, inputs.fleet, inputs.job, root, sweep=sweep)
    missing = look_between(session, account.fleet, templates) if between else ()
    return replace(account, steps=(*account.steps, *missing), notes=(*notes, *account.notes))


def _shared(job: JobConfig, inputs: Wanted, sweep: plan.WriteSweep | None) -> plan.ShareFolder | None:
    if not job.on_machines:
        return None
    if sweep is not None:
        raise ConfigError(
            "[job] nodes: each run of a sweep trains on one machine",
            next_step=f"take `nodes` out of {inputs.job_file} for a sweep; --parallel says how many machines it has",
        )
    return plan.ShareFolder(str(job.store.results_place), *job.machines)


def _for_instances(job: JobConfig) -> JobConfig:
    """The job without the addresses and the key for ssh, which instances do not need, and with the keys of the
    repository's host, which they do not know."""
    keys = job.job.known_hosts or known_hosts.known(job.job.repository)
    return replace(job, job=replace(job.job, known_hosts=keys), fleet=replace(job.fleet, ssh_from="", public_key=""))


def _turn(way: plan.Begin | plan.Continue | plan.Resume) -> str:
    match way:
        case plan.Begin(after):
            return f"after-{after or 'nothing'}"
        case plan.Resume(existing):
            return f"resume-{existing.run}-{existing.generation + 1}"
        case plan.Continue():
            return ""


def offline_root(session: Session, configured: str) -> StoreUrl:
    return (
        StoreUrl.parse(configured) if configured else StoreUrl(default_bucket(PLACEHOLDER_ACCOUNT, session.region), "")
    )


@sensible
def _identity(
    session: Session, way: plan.Begin | plan.Continue | plan.Resume, root: StoreUrl, job: str, clock: Clock
) -> tuple[str, int, str, tuple[str, ...]]:
    moment = rfc3339(clock.now())
    if isinstance(way, plan.Begin):
        return new_run_id(clock.now()), 1, moment, ()
    document = runs.open_run(session.client("s3"), root, job, way.existing.run).fleet_document()
    previous = tuple(str(fleet) for fleet in document.get("previous", []))
    if isinstance(way, plan.Continue):
        return way.existing.run, way.existing.generation, way.existing.requested_at or moment, previous
    return way.existing.run, way.existing.generation + 1, moment, (*previous, way.existing.fleet)


def _described_templates(session: Session, fleet: FleetConfig) -> list[dict[str, Any]]:
    templates = []
    for entry in fleet.template_configs:
        named = dict(entry["LaunchTemplateSpecification"])
        version = named.pop("Version", "$Default")
        label = named.get("LaunchTemplateId") or named.get("LaunchTemplateName")
        try:
            with translated(f"read launch template {label}"):
                answer = session.client("ec2").describe_launch_template_versions(**named, Versions=[version])
        except NotFound as error:
            error.next_step = existing.WRITTEN_FOR_ANOTHER
            raise
        versions = answer.get("LaunchTemplateVersions", [])
        if not versions:
            raise NotFound(
                f"launch template {label} has no version {version}",
                next_step="`aws ec2 describe-launch-template-versions` lists them",
            )
        data = template.from_described(versions[0]["LaunchTemplateData"])
        if data.get("UserData"):
            raise Conflict(
                f"launch template {label} has user data of its own, which the agent's would replace",
                next_step="move its commands to `setup` in job.toml, and name a template without user data",
            )
        if not data.get("IamInstanceProfile"):
            raise ConfigError(
                f"launch template {label} names no IamInstanceProfile: the agent could not touch the volume",
                next_step="add one to the template",
            )
        templates.append(data)
    return templates
