"""Batch's jobs: read from AWS, in pages, and summed up (pure)."""

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
    """A log stream of one attempt (from 1) of a job; `index` is None if the job is no child of an array."""

    name: str
    index: int | None
    attempt: int

    @property
    def label(self) -> str:
        """`3`, or `3/2` for the second attempt; for a single job "", or `attempt 2`."""
        if self.index is None:
            return f"attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.index}/{self.attempt}" if self.attempt > 1 else str(self.index)


def document_of(run: Run) -> dict[str, Any]:
    """What `submit` has written about the run's job at Batch. If the last submission was cut short, the job of the
    submission before it.

    NotFound if the run was not submitted to Batch.
    """
    document = run.fleet_document()
    batch = document.get("batch")
    batch = batch if document.get("engine") == "batch" and isinstance(batch, dict) else {}
    job_ids = [job_id for job_id in (*batch.get("earlier", []), batch.get("job_id")) if job_id]
    if not job_ids:
        raise NotFound(f"run {run.id} of job {run.job} was not submitted to AWS Batch",
                       next_step=f"`fleetctl status {run.job}`, or `fleetctl batch submit`")  # fmt: skip
    return {**batch, "job_id": job_ids[-1]}


def unrecorded_job(session: Session, run: Run) -> str:
    """The id of an open job whose submission was cut short before its id was recorded; "" if there is none."""
    batch = run.fleet_document().get("batch") or {}
    if batch.get("job_id") or not batch.get("job_name"):
        return ""
    jobs = (job for job in open_jobs(session, str(batch["queue"])) if job["jobName"] == batch["job_name"])
    return next((str(job["jobId"]) for job in jobs), "")


def describe(session: Session, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Jobs by id, without those that Batch has forgotten (it keeps a job for a week)."""
    job_ids = list(ids)
    jobs: dict[str, dict[str, Any]] = {}
    for start in range(0, len(job_ids), _DESCRIBED):
        with translated("describe the jobs"):
            answer = session.client("batch").describe_jobs(jobs=job_ids[start : start + _DESCRIBED])
        jobs |= {str(job["jobId"]): job for job in answer["jobs"]}
    return jobs


def children(session: Session, array: str, status: str) -> list[str]:
    """Ids of an array's children in one state, all pages."""
    ids: list[str] = []
    next_page: dict[str, str] = {}
    while True:
        with translated("list the children of the array"):
            answer = session.client("batch").list_jobs(arrayJobId=array, jobStatus=status, **next_page)
        ids += [str(job["jobId"]) for job in answer["jobSummaryList"]]
        if not answer.get("nextToken"):
            return ids
        next_page = {"nextToken": answer["nextToken"]}


def open_jobs(session: Session, queue: str) -> list[dict[str, Any]]:
    """Summaries of the queue's jobs that are not over."""
    summaries: list[dict[str, Any]] = []
    for status in (state for state in STATES if state not in ENDS):
        next_page: dict[str, str] = {}
        while True:
            with translated(f"list the jobs of queue {queue}"):
                answer = session.client("batch").list_jobs(jobQueue=queue, jobStatus=status, **next_page)
            summaries += answer["jobSummaryList"]
            if not answer.get("nextToken"):
                break
            next_page = {"nextToken": answer["nextToken"]}
    return summaries


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
    index = (job.get("arrayProperties") or {}).get("index")
    return None if index is None else int(index)


def streams_of(job: Mapping[str, Any]) -> list[Stream]:
    """The log streams of a job that is no array, by attempt; an attempt that did not start has none."""
    streams: list[Stream] = []
    attempts = list(job.get("attempts") or [])
    for number, attempt in enumerate(attempts, 1):
        if name := (attempt.get("container") or {}).get("logStreamName"):
            streams.append(Stream(str(name), index_of(job), number))
    current_name = (job.get("container") or {}).get("logStreamName")
    if current_name and current_name not in {stream.name for stream in streams}:
        streams.append(Stream(str(current_name), index_of(job), len(attempts) + 1))
    return streams


def why(job: Mapping[str, Any]) -> str:
    """Why a job failed, by AWS: the container's reason says more than the job's."""
    container = job.get("container") or {}
    last = (list(job.get("attempts") or []) or [{}])[-1]
    reason = container.get("reason") or (last.get("container") or {}).get("reason") or ""
    status_reason = str(job.get("statusReason") or last.get("statusReason") or "")
    code = container.get("exitCode", (last.get("container") or {}).get("exitCode"))
    parts = [status_reason, str(reason), f"exit code {code}" if code is not None else ""]
    return "; ".join(part for part in parts if part) or "no reason is given"


def mark(job: Mapping[str, Any]) -> tuple[Any, ...]:
    """A value that changes with each event of a job."""
    return job["status"], tuple(counts(job).values()), len(job.get("attempts") or [])


