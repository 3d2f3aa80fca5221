"""All jobs of a store: those with instances first, and their state. For `status --all`.

The number of calls does not grow with the account: the jobs' names come a thousand a call, the living instances by one
describe, and only so many jobs are looked into as fit a screen.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import JOB_NAME, TAG_JOB, TAG_RUN, StoreUrl
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import table

SCHEMA_VERSION = 1
JOBS_SHOWN = 25


@dataclass(frozen=True)
class JobSeen:
    """`instances` as AWS says now; `phase` and `step` of the newest run as its store says."""

    job: str
    run: str
    phase: str
    step: int | None
    steps_total: int | None
    instances: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Overview:
    root: StoreUrl
    jobs: tuple[JobSeen, ...]
    left_out: int


@sensible
def gather(session: Session, root: StoreUrl) -> Overview:
    s3, living = session.client("s3"), _living(session)
    names = job_names(s3, root)
    first = [name for name in names if name in living]
    names_shown = [*first, *(name for name in names if name not in living)][:max(JOBS_SHOWN, len(first))]
    with ThreadPoolExecutor(8) as pool:
        all_jobs = list(pool.map(lambda name: _look(s3, root, name, living.get(name, ())), names_shown))
    # a job whose store was cleaned leaves the marks of its requests, and is none
    jobs = tuple(job for job in all_jobs if job.run or job.instances or job.phase == "unknown")
    return Overview(root, jobs, len(names) - len(names_shown))


def job_names(s3: Any, root: StoreUrl) -> list[str]:
    prefix = f"{root.prefix}/" if root.prefix else ""
    names: list[str] = []
    with translated(f"list the jobs in {root}"):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=root.bucket, Prefix=prefix, Delimiter="/"):
            names += [item["Prefix"][len(prefix) :].rstrip("/") for item in page.get("CommonPrefixes", [])]
    return sorted(name for name in names if JOB_NAME.fullmatch(name))


def _living(session: Session) -> dict[str, tuple[str, ...]]:
    filters = [{"Name": "tag-key", "Values": [TAG_RUN]},
               {"Name": "instance-state-name", "Values": ["pending", "running"]}]  # fmt: skip
    by_job: dict[str, tuple[str, ...]] = {}
    with translated("list the instances of all jobs"):
        for page in session.client("ec2").get_paginator("describe_instances").paginate(Filters=filters):
            for item in (instance for reservation in page["Reservations"] for instance in reservation["Instances"]):
                tags = {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}
                job = tags.get(TAG_JOB, "")
                by_job[job] = (*by_job.get(job, ()), str(item["InstanceId"]))
    return by_job


def _look(s3: Any, root: StoreUrl, job: str, instances: tuple[str, ...]) -> JobSeen:
    try:
        run = runs.newest(s3, root, job)
        status = (run.store.read_status() or {}) if run else {}
    except SpothealError as error:
        return JobSeen(job, "", "unknown", None, None, instances, error.message)
    progress = status.get("progress") or {}
    step, total = progress.get("step"), progress.get("steps_total")
    return JobSeen(job, run.id if run else "", str(status.get("phase") or "requested"), step, total, instances,
                   str(status.get("reason") or ""))  # fmt: skip


@sensible
def document(overview: Overview) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "store": str(overview.root),
        "jobs": [{**vars(job), "instances": list(job.instances)} for job in overview.jobs],
        "jobs_left_out": overview.left_out,
    }


@sensible
def text(overview: Overview) -> str:
    if not overview.jobs:
        return f"no job in {overview.root} yet"
    rows = [
        (job.job, job.phase, _steps(job), ", ".join(job.instances) or None, job.run)
        for job in overview.jobs
    ]
    return table(("JOB", "PHASE", "STEP", "INSTANCE", "RUN"), rows)


def _steps(job: JobSeen) -> str | None:
    if job.step is None:
        return None
    return f"{job.step}/{job.steps_total}" if job.steps_total else str(job.step)
