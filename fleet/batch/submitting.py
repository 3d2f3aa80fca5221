"""`fleetctl batch submit`: a run's documents in the store, then one job or one array at Batch.

Batch takes no token, so a submission whose reply was lost is looked for by its name before it is made again; and a
container that finds another job's id in the run's document ends itself (`agent.batch.child`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, Retryable, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import LAYOUT, STATUS_SCHEMA_VERSION, EfsUrl, Phase, StoreUrl, new_run_id
from spotheal.fleet.batch import creating, documents, image
from spotheal.fleet.batch.names import Names
from spotheal.fleet.request import repository
from spotheal.fleet.request.submit import ensure_bucket
from spotheal.fleet.run import batch_jobs, runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible

ENTRIES_MAX = 10_000  # children of an array, by AWS's limit
DEPENDENCIES_MAX = 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Overrides:
    """Of one submission; 0, () and {} leave job.toml's."""

    vcpus: float = 0
    memory_gib: float = 0
    gpus: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()

    def applied(self, job: JobConfig) -> JobConfig:
        """job.toml, with the overrides applied."""
        environment = dict(job.environment) | dict(self.environment)
        table = replace(job.job, command=self.command, resume_command=()) if self.command else job.job
        return replace(job, job=table, environment=environment)

    def requirements(self, job: JobConfig) -> list[dict[str, str]]:
        """The resources of the containers, if one of them is overridden."""
        if not (self.vcpus or self.memory_gib or self.gpus):
            return []
        gpus = self.gpus or documents.gpus_of(job)
        return documents.resources(self.vcpus or job.batch.vcpus, self.memory_gib or job.batch.memory_gib, gpus)


@dataclass(frozen=True)
class Order:
    """Ready to be sent. `entries` None: a single job without a list. `generation` counts submissions of the run."""

    names: Names
    instance: InstanceConfig
    source: repository.Source
    entries: tuple[dict[str, Any], ...] | None
    listed_in: str
    depends_on: tuple[dict[str, str], ...]
    requirements: tuple[dict[str, str], ...]
    generation: int = 1

    @property
    def job_name(self) -> str:
        suffix = f"-{self.generation}" if self.generation > 1 else ""
        return f"{self.names.job}-{self.instance.run}{suffix}"

    def request(self) -> dict[str, Any]:
        """SubmitJob. A list of one is a single job: an array has two children at least."""
        variables = [{"name": "SPOTHEAL_STORE", "value": str(self.instance.store)}]
        size = len(self.entries or ())
        if size == 1:
            variables.append({"name": "SPOTHEAL_INDEX", "value": "0"})
        overrides: dict[str, Any] = {"environment": variables}
        if self.requirements:
            overrides["resourceRequirements"] = list(self.requirements)
        return {
            "jobName": self.job_name,
            "jobQueue": self.names.queue,
            "jobDefinition": self.names.definition,
            "containerOverrides": overrides,
            "propagateTags": True,
            "tags": {**self.names.tags, "spotheal:run": self.instance.run},
            **({"arrayProperties": {"size": size}} if size > 1 else {}),
            **({"dependsOn": list(self.depends_on)} if self.depends_on else {}),
        }

    def says(self) -> str:
        size = len(self.entries or ())
        work = f"an array of {size}" if size > 1 else "one job"
        after = f", after {len(self.depends_on)} other(s)" if self.depends_on else ""
        return (f"submit {work} to queue {self.names.queue}{after}\n"
                f"  run {self.instance.run}, {self.source.ref or 'commit'} {self.source.commit[:12]}, "
                f"store {self.instance.store}")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ preparing
def prepare(
    session: Session,
    job: JobConfig,
    job_file: Path,
    root: StoreUrl,
    clock: Clock,
    *,
    entries: list[dict[str, Any]] | None,
    listed_in: str = "",
    overrides: Overrides | None = None,
    depends_on: tuple[dict[str, str], ...] = (),
    resume: bool = False,
    allow_paths: bool = False,
) -> Order:
    """Everything is looked at before anything is written. NotFound if `batch create` was not run, or the image is not
    there."""
    documents.check(job)
    if entries is not None and not 1 <= len(entries) <= ENTRIES_MAX:
        raise ConfigError(f"{len(entries)} entries; an array has 1 to {ENTRIES_MAX}", next_step="cut the list")
    overrides = overrides or Overrides()
    if overrides.gpus and not (documents.gpus_of(job) or job.batch.instance_types):
        raise ConfigError(f"--gpus {overrides.gpus}: the hosts of job {job.job.name} have none: it would wait for ever",
                          next_step="set [batch] gpus in job.toml, then `fleetctl batch create` again")  # fmt: skip
    names = Names(job.job.name)
    definition = _check_made(session, names)
    image.check(session, str(definition["containerProperties"]["image"]))
    _check_mounted(definition, job)
    _refuse_fleet(session, root, job.job.name)
    job = overrides.applied(job)
    run, generation = new_run_id(clock.now()), 1
    if resume:
        previous = runs.find(session.client("s3"), root, job.job.name)
        generation, entries = _resumed(session, previous, entries)
        run, listed_in = (
            previous.id,
            listed_in or str((previous.store.get_json(LAYOUT.sweep) or {}).get("source") or ""),
        )
    own_files = (job_file, *([Path(listed_in)] if listed_in and not listed_in.startswith("s3://") else []))
    _check_arrays(session, depends_on, len(entries or ()))
    source = repository.resolve(job, job_file.resolve().parent, ours=own_files, allow_paths=allow_paths)
    store = root.below(job.job.name, run)
    count = len(entries) if entries is not None else 0
    instance = InstanceConfig(job, run, session.region, store, source.commit, rfc3339(clock.now()), count)
    return Order(names, instance, source, None if entries is None else tuple(entries), listed_in, depends_on,
                 tuple(overrides.requirements(job)), generation)  # fmt: skip


def _refuse_fleet(session: Session, root: StoreUrl, job: str) -> None:
    """Conflict if a spot fleet works on the job: all verbs would show only the newer run, and both would cost."""
    newest = runs.newest(session.client("s3"), root, job)
    fleet = "" if newest is None else str(newest.fleet_document().get("fleet_id") or "")
    if fleet and runs.fleet_state(session.client("ec2"), fleet) in runs.LIVE_FLEET_STATES:
        raise Conflict(f"{fleet} works on job {job!r}",
                       next_step=f"`fleetctl cancel {job}` first, or another name in job.toml")  # fmt: skip


def _check_made(session: Session, names: Names) -> dict[str, Any]:
    with translated(f"look for job queue {names.queue}"):
        queues = session.client("batch").describe_job_queues(jobQueues=[names.queue])["jobQueues"]
    definitions = creating.active_definitions(session, names)
    if not queues or not definitions:
        missing = f"job queue {names.queue}" if not queues else f"job definition {names.definition}"
        raise NotFound(f"there is no {missing} in {session.region}", next_step="`fleetctl batch create` makes it")
    if queues[0]["state"] != "ENABLED" or queues[0]["status"] != "VALID":
        raise Conflict(f"job queue {names.queue} is {queues[0]['state']} and {queues[0]['status']}",
                       next_step="`fleetctl batch create` puts it in order")  # fmt: skip
    return max(definitions, key=lambda definition: int(definition["revision"]))


def _check_mounted(definition: dict[str, Any], job: JobConfig) -> None:
    """Conflict if containers would look for a file system that the definition does not mount."""
    volumes = definition["containerProperties"].get("volumes") or []
    mounted = {(volume.get("efsVolumeConfiguration") or {}).get("fileSystemId") for volume in volumes}
    place = job.store.results_place
    if isinstance(place, EfsUrl) and place.file_system not in mounted:
        raise Conflict(f"the job definition does not mount {place.file_system}, which [store] results names",
                       next_step="`fleetctl batch create` again writes one that does")  # fmt: skip


@sensible
def _resumed(
    session: Session, run: runs.Run, entries: list[dict[str, Any]] | None
) -> tuple[int, list[dict[str, Any]] | None]:
    """The next generation, and the run's list. Conflict if it is at work, or if all entries are done."""
    document = batch_jobs.document_of(run)
    job_id = batch_jobs.unrecorded_job(session, run) or str(document["job_id"])
    job = batch_jobs.describe(session, [job_id]).get(job_id)
    if job is not None and job["status"] not in batch_jobs.ENDS:
        if job_id != document["job_id"]:  # `batch logs` and `batch cancel` know it from now on
            stored = run.fleet_document()
            run.store.put_json(LAYOUT.fleet_document, {**stored, "batch": {**stored["batch"], "job_id": job_id}})
        raise Conflict(f"run {run.id} is at work: {job['status']}",
                       next_step=f"`fleetctl batch logs {run.job} -f` follows it")  # fmt: skip
    if (run.store.read_status() or {}).get("phase") == Phase.DONE.value:
        raise Conflict(f"run {run.id} is done", next_step="without --resume another run begins")
    stored_entries = (run.store.get_json(LAYOUT.sweep) or {}).get("entries")
    if stored_entries is not None and entries is not None and stored_entries != entries:
        raise Conflict(f"this is not the list that run {run.id} began with ({len(stored_entries)} entries)",
                       next_step="without --resume another run begins with it")  # fmt: skip
    generation = int(run.fleet_document().get("generation") or 1) + 1
    return generation, None if stored_entries is None else list(stored_entries)


def dependencies(session: Session, root: StoreUrl, text: str) -> list[dict[str, str]]:
    """Of `JOB`, `JOB:N_TO_N`, `SEQUENTIAL` or `JOB:SEQUENTIAL`; JOB is an id of Batch's, or the name of a job whose
    newest run is meant. NotFound if there is no such job, Conflict if it has failed."""
    name, _, kind = text.partition(":")
    kind = kind.upper()
    if not kind and name.upper() == "SEQUENTIAL":
        return [{"type": "SEQUENTIAL"}]
    if kind == "SEQUENTIAL":  # AWS takes this type without a job alone
        return [*dependencies(session, root, name), {"type": "SEQUENTIAL"}]
    if kind not in ("", "N_TO_N"):
        raise ConfigError(f"--depends-on {text!r}: {kind} is neither N_TO_N nor SEQUENTIAL",
                          next_step="write JOB, JOB:N_TO_N or SEQUENTIAL")  # fmt: skip
    job_id = name
    if len(name) != 36:
        job_id = str(batch_jobs.document_of(runs.find(session.client("s3"), root, name))["job_id"])
    description = batch_jobs.describe(session, [job_id]).get(job_id)
    if description is None:
        raise NotFound(f"--depends-on {text!r}: AWS Batch knows no job {job_id} in {session.region}",
                       next_step="Batch keeps a job for a week after its end; leave out a job that is done")
    if description["status"] == "FAILED":
        raise Conflict(f"--depends-on {text!r}: job {job_id} has failed, and jobs that depend on it would fail too",
                       next_step="`fleetctl batch submit --resume`; then depend on the new job")  # fmt: skip
    return [{"jobId": job_id, **({"type": kind} if kind else {})}]


def _check_arrays(session: Session, depends_on: Iterable[Mapping[str, str]], size: int) -> None:
    """ConfigError if a dependency is between children, and the two are not arrays of one size."""
    own_array = f"an array of {size}" if size > 1 else "no array"
    for dependency in depends_on:
        if dependency.get("type") == "SEQUENTIAL" and size < 2:
            raise ConfigError("--depends-on SEQUENTIAL: child after child, and this job is no array",
                              next_step="leave it out, or give a list of two entries at least")  # fmt: skip
        if dependency.get("type") == "N_TO_N":
            other_size = batch_jobs.size_of(
                batch_jobs.describe(session, [dependency["jobId"]]).get(dependency["jobId"]) or {}
            )
            if other_size != size or size < 2:
                their_array = f"an array of {other_size}" if other_size else "no array"
                raise ConfigError(
                    f"--depends-on {dependency['jobId']}:N_TO_N: child i after child i, and that job is {their_array},"
                    f" this one {own_array}",
                    next_step="leave :N_TO_N out, or give lists of one size",
                )


# -------------------------------------------------------------------------------------------------------------- sending
def send(session: Session, order: Order, clock: Clock, say: Say) -> str:
    """The job's id at Batch. If interrupted earlier, nothing of this run starts, and the next one is a new run."""
    ensure_bucket(session, order.instance.store.bucket)
    store = Store(session.client("s3"), order.instance.store)
    _record(store, order, clock)
    if order.source.bundle:
        say(f"uploading commit {order.source.commit[:12]}")
        with tempfile.TemporaryDirectory(prefix="spotheal-") as scratch:
            bundle = repository.write_bundle(order.source, Path(scratch) / "repository.bundle")
            store.put_file(LAYOUT.repository_bundle, bundle)
    request = order.request()
    try:
        job_id = _submit(session, order, request)
    except Retryable:
        raise
    except SpothealError as error:  # the run is there already: it must not look as if it were about to begin
        reason = f"AWS Batch has refused it: {error.message}"
        status = {**_status(order, clock, {}), "phase": Phase.SETUP_FAILED.value, "reason": reason}
        store.write_status(status)
        raise
    _write_fleet(store, order, request, job_id)
    return job_id


def _submit(session: Session, order: Order, request: dict[str, Any]) -> str:
    batch = session.client("batch")
    try:
        with translated("submit the job"):
            return str(batch.submit_job(**request)["jobId"])
    except Retryable:
        job = next((open_job for open_job in batch_jobs.open_jobs(session, order.names.queue)
                      if open_job["jobName"] == order.job_name), None)  # fmt: skip
        if job is None:
            raise
        return str(job["jobId"])


def _record(store: Store, order: Order, clock: Clock) -> None:
    """Write all that a container reads before it can start. Entries that failed earlier may run again."""
    store.put_json(LAYOUT.job_document, json.loads(order.instance.to_json()))
    if order.entries is not None:
        store.put_json(LAYOUT.sweep, {"schema_version": 1, "source": order.listed_in, "entries": list(order.entries)})
    _write_fleet(store, order, order.request(), "")
    stored = store.read_status() or {}
    store.write_status(_status(order, clock, stored))
    if order.generation > 1:
        _forgive(store, order, clock)


def _status(order: Order, clock: Clock, stored: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": STATUS_SCHEMA_VERSION, "job": order.names.job, "run": order.instance.run,
        "phase": Phase.REQUESTED.value, "reason": "", "heartbeat": rfc3339(clock.now()), "term": None, "fleet": None,
        "instance": None, "instance_type": None, "zone": None, "attempt": None, "launches": None, "volume": None,
        "revision": order.instance.revision, "progress": stored.get("progress"), "notice": None,
    }  # fmt: skip


def _forgive(store: Store, order: Order, clock: Clock) -> None:
    """Entries that failed begin again from their checkpoints; done entries stay done."""
    for key in store.keys(LAYOUT.queue):
        if key.endswith(".failed"):
            index = int(key.removeprefix(LAYOUT.queue).partition(".")[0])
            entry_store = Store(store.client, store.url.below(LAYOUT.entry(index)))
            entry_store.write_status(_status(order, clock, entry_store.read_status() or {}))
            store.delete(key)


@sensible
def _write_fleet(store: Store, order: Order, request: dict[str, Any], job_id: str) -> None:
    previous = (store.get_json(LAYOUT.fleet_document) or {}).get("batch") or {}
    earlier = [*previous.get("earlier", []), *([previous["job_id"]] if previous.get("job_id") else [])]
    batch = {"job_id": job_id or None, "job_name": order.job_name, "queue": order.names.queue,
             "size": len(order.entries or ()), "earlier": [ident for ident in earlier if ident != job_id]}  # fmt: skip
    store.put_json(LAYOUT.fleet_document, {
        "schema_version": 1, "engine": "batch", "fleet_id": None, "requested_at": order.instance.requested_at,
        "generation": order.generation, "previous": [], "volume_id": None, "prices": [], "request": request,
        "batch": batch,
    })  # fmt: skip
