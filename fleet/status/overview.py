"""All jobs of a store: those with instances first, with where they are. For `status --all`.

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
    shown = [*first, *(name for name in names if name not in living)][:max(JOBS_SHOWN, len(first))]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: _look(s3, root, name, living.get(name, ())), shown))
    # a job whose store was cleaned leaves the marks of its requests, and is none
    seen = tuple(one for one in found if one.run or one.instances or one.phase == "unknown")
    return Overview(root, seen, len(names) - len(shown))


def job_names(s3: Any, root: StoreUrl) -> list[str]:
    prefix = f"{root.prefix}/" if root.prefix else ""
    found: list[str] = []
    with translated(f"list the jobs in {root}"):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=root.bucket, Prefix=prefix, Delimiter="/"):
            found += [item["Prefix"][len(prefix) :].rstrip("/") for item in page.get("CommonPrefixes", [])]
    return sorted(name for name in found if JOB_NAME.fullmatch(name))


def _living(session: Session) -> dict[str, tuple[str, ...]]:
    filters = [{"Name": "tag-key", "Values": [TAG_RUN]},
               {"Name": "instance-state-name", "Values": ["pending", "running"]}]  # fmt: skip
    found: dict[str, tuple[str, ...]] = {}
    with translated("list the instances of all jobs"):
        for page in session.client("ec2").get_paginator("describe_instances").paginate(Filters=filters):
            for item in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
                tags = {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}
                job = tags.get(TAG_JOB, "")
                found[job] = (*found.get(job, ()), str(item["InstanceId"]))
    return found


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
def document(found: Overview) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "store": str(found.root),
        "jobs": [{**vars(one), "instances": list(one.instances)} for one in found.jobs],
        "jobs_left_out": found.left_out,
    }


@sensible
def text(found: Overview) -> str:
    if not found.jobs:
        return f"no job in {found.root} yet"
    rows = [
        (one.job, one.phase, _steps(one), ", ".join(one.instances) or None, one.run)
        for one in found.jobs
    ]
    return table(("JOB", "PHASE", "STEP", "INSTANCE", "RUN"), rows)


def _steps(one: JobSeen) -> str | None:
    if one.step is None:
        return None
    return f"{one.step}/{one.steps_total}" if one.steps_total else str(one.step)
