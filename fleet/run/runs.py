"""Runs of a job, found by its name in the store: `<root>/<job>/<run>/`. Run ids sort by time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import ConfigError, NotFound
from spotheal.agent.protocol.names import JOB_NAME, LAYOUT, StoreUrl
from spotheal.agent.record.ledger import Ledger
from spotheal.fleet.run import engine

LIVE_FLEET_STATES = engine.LIVE_STATES
REPLACED = "replaced by fleetctl request --replace"  # an end with this reason is no end: a new fleet follows
REPLACE_SECONDS = 1200.0  # the old instance may take 15 minutes to terminate, then the request follows
_RUN_LETTERS, _ENTRY_FIGURES = 26, 5
_RUN_ID = re.compile(r"[0-9A-Z]{26}")


@dataclass(frozen=True)
class Run:
    job: str
    id: str
    store: Store

    def fleet_document(self) -> dict[str, Any]:
        return self.store.get_json(LAYOUT.fleet_document) or {}

    def note(self, clock: Clock, event: str, **fields: Any) -> None:
        """Write into the ledger what an operator did; without such an event the run's cost would never stop."""
        Ledger(self.store, clock, "fleetctl", "").add(event, **fields)


def check_job_name(name: str) -> str:
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a job: 1 to 40 of a-z, 0-9 and -")
    return name


def goes_on(reason: str, heartbeat_age_seconds: float | None) -> bool:
    """Whether `request --replace` ended the run so recently that its new fleet may still come."""
    fresh = heartbeat_age_seconds is not None and heartbeat_age_seconds < REPLACE_SECONDS
    return fresh and reason.startswith(REPLACED)


def run_ids(s3: Any, root: StoreUrl, job: str) -> list[str]:
    """All runs of a job, oldest first; none if the bucket does not exist.

    One call for a thousand runs of this job; other jobs cost no call.
    """
    prefix = f"{root.below(job).prefix}/"
    names: list[str] = []
    try:
        with translated(f"list the runs of {job}"):
            for page in s3.get_paginator("list_objects_v2").paginate(Bucket=root.bucket, Prefix=prefix, Delimiter="/"):
                names += [item["Prefix"][len(prefix) :].rstrip("/") for item in page.get("CommonPrefixes", [])]
    except NotFound:
        return []
    return sorted(name for name in names if _RUN_ID.fullmatch(name))


def open_run(s3: Any, root: StoreUrl, job: str, run: str) -> Run:
    return Run(job, run, Store(s3, root.below(job, run)))


def run_of(s3: Any, root: StoreUrl, job: str, run: str) -> Run:
    """The run that a tag names. A sweep's run is named after the sweep and its entry, and is stored below the sweep."""
    sweep, entry = entry_in(run)
    return Run(job, run, Store(s3, root.below(job, sweep, LAYOUT.entry(int(entry)) if entry else "")))


def entry_in(run: str) -> tuple[str, str]:
    """The sweep and the entry in a run's name; the name and "" if the run belongs to no sweep."""
    sweep, entry = run[:_RUN_LETTERS], run[_RUN_LETTERS:]
    return (sweep, entry) if len(entry) == _ENTRY_FIGURES and entry.isdigit() else (run, "")


def newest(s3: Any, root: StoreUrl, job: str) -> Run | None:
    ids = run_ids(s3, root, job)
    return open_run(s3, root, job, ids[-1]) if ids else None


def find(s3: Any, root: StoreUrl, job: str, run: str = "") -> Run:
    """The named run, or the newest; NotFound with the next command."""
    ids = run_ids(s3, root, check_job_name(job))
    if not ids:
        raise NotFound(
            f"there is no run of a job {job!r} in {root}",
            next_step="check --region, --profile and [store] url in job.toml; `fleetctl request`, `sweep run` or"
            " `batch submit` starts one",
        )
    if run and run not in ids:
        raise NotFound(f"job {job!r} has no run {run!r}", next_step=f"its runs: {', '.join(ids[-5:])}")
    return open_run(s3, root, job, run or ids[-1])


def fleet_state(ec2: Any, fleet: str) -> str:
    """AWS's state of a fleet, by one call; "" if AWS no longer knows the fleet (48 hours after its end)."""
    answer = engine.describe(ec2, fleet)
    return answer.state if answer else ""
