"""Batch's jobs as this project sees them: read from AWS, in pages, and summed up (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.session import Session

STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED")
ENDS = ("SUCCEEDED", "FAILED")
_DESCRIBED = 100  # jobs a call, by AWS's limit


@dataclass(frozen=True)
class Stream:
    """A log stream of one attempt (from 1) of a job; `index` None: it is no child of an array."""

    name: str
    index: int | None
    attempt: int

    @property
    def label(self) -> str:
        """`3`, or `3/2` for the second attempt; of a single job nothing, or `attempt 2`."""
        if self.index is None:
            return f"attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.index}/{self.attempt}" if self.attempt > 1 else str(self.index)


def document_of(run: Run) -> dict[str, Any]:
    """What `submit` has written of the run's job at Batch: of a submission that was cut short, of the one before it.

    NotFound where the run was not submitted there.
    """
    found = run.fleet_document()
    batch = found.get("batch")
    batch = batch if found.get("engine") == "batch" and isinstance(batch, dict) else {}
    known = [one for one in (*batch.get("earlier", []), batch.get("job_id")) if one]
    if not known:
        raise NotFound(f"run {run.id} of job {run.job} was not submitted to AWS Batch",
                       next_step=f"`fleetctl status {run.job}`, or `fleetctl batch submit`")  # fmt: skip
    return {**batch, "job_id": known[-1]}


def lost_one(session: Session, run: Run) -> str:
    """The id of a job whose submission was cut short before its id was noted; "" where there is none at work."""
    batch = run.fleet_document().get("batch") or {}
    if batch.get("job_id") or not batch.get("job_name"):
        return ""
    found = (one for one in open_jobs(session, str(batch["queue"])) if one["jobName"] == batch["job_name"])
    return next((str(one["jobId"]) for one in found), "")


def describe(session: Session, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Jobs by id; what Batch has forgotten (it keeps them a week) is left out."""
    wanted = list(ids)
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, len(wanted), _DESCRIBED):
        with translated("describe the jobs"):
            answer = session.client("batch").describe_jobs(jobs=wanted[start : start + _DESCRIBED])
        found |= {str(one["jobId"]): one for one in answer["jobs"]}
    return found


def children(session: Session, array: str, status: str) -> list[str]:
    """Ids of an array's children in one state, all pages."""
    ids: list[str] = []
    more: dict[str, str] = {}
    while True:
        with translated("list the children of the array"):
            answer = session.client("batch").list_jobs(arrayJobId=array, jobStatus=status, **more)
        ids += [str(one["jobId"]) for one in answer["jobSummaryList"]]
        if not answer.get("nextToken"):
            return ids
        more = {"nextToken": answer["nextToken"]}


def open_jobs(session: Session, queue: str) -> list[dict[str, Any]]:
    """Summaries of the queue's jobs that are not over."""
    found: list[dict[str, Any]] = []
    for status in (state for state in STATES if state not in ENDS):
        more: dict[str, str] = {}
        while True:
            with translated(f"list the jobs of queue {queue}"):
                answer = session.client("batch").list_jobs(jobQueue=queue, jobStatus=status, **more)
            found += answer["jobSummaryList"]
            if not answer.get("nextToken"):
                break
            more = {"nextToken": answer["nextToken"]}
    return found


# ----------------------------------------------------------------------------------------------------------------- pure
def counts(job: Mapping[str, Any]) -> dict[str, int]:
    """How many are in each state: the children of an array, else the job itself."""
    summary = (job.get("arrayProperties") or {}).get("statusSummary")
    if summary:
        return {state: int(summary.get(state, 0)) for state in STATES}
    return {state: int(job["status"] == state) for state in STATES}


def size_of(job: Mapping[str, Any]) -> int:
    return int((job.get("arrayProperties") or {}).get("size") or 0)


def index_of(job: Mapping[str, Any]) -> int | None:
    found = (job.get("arrayProperties") or {}).get("index")
    return None if found is None else int(found)


def streams_of(job: Mapping[str, Any]) -> list[Stream]:
    """Of all attempts of a job that is no array, in order; one that did not start has none."""
    found: list[Stream] = []
    attempts = list(job.get("attempts") or [])
    for number, attempt in enumerate(attempts, 1):
        if name := (attempt.get("container") or {}).get("logStreamName"):
            found.append(Stream(str(name), index_of(job), number))
    now = (job.get("container") or {}).get("logStreamName")
    if now and now not in {one.name for one in found}:
        found.append(Stream(str(now), index_of(job), len(attempts) + 1))
    return found


def why(job: Mapping[str, Any]) -> str:
    """What AWS says of a job that failed: the container's reason says more than the job's."""
    container = job.get("container") or {}
    last = (list(job.get("attempts") or []) or [{}])[-1]
    reason = container.get("reason") or (last.get("container") or {}).get("reason") or ""
    said = str(job.get("statusReason") or last.get("statusReason") or "")
    code = container.get("exitCode", (last.get("container") or {}).get("exitCode"))
    parts = [said, str(reason), f"exit code {code}" if code is not None else ""]
    return "; ".join(part for part in parts if part) or "no reason is given"


def mark(job: Mapping[str, Any]) -> tuple[Any, ...]:
    """What changes where something happened to a job."""
    return job["status"], tuple(counts(job).values()), len(job.get("attempts") or [])


