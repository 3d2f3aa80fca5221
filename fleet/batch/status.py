"""The state of a job at Batch: its states from AWS, and why children failed. Read (IO), then shown (pure)."""

from __future__ import annotations

from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.run import batch_jobs
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.table import cut, lines_of, table

SCHEMA_VERSION = 1
ROWS_SHOWN = 40
_ENDS = frozenset(one.value for one in Phase if one.is_end)
_DESCRIBED_MAX = 1000  # failed children that are described one by one


def gather(session: Session, run: Run) -> dict[str, Any]:
    """The document of `--output json`. For a job that Batch has forgotten, from the store alone."""
    submission = batch_jobs.document_of(run)
    job = batch_jobs.describe(session, [str(submission["job_id"])]).get(str(submission["job_id"]))
    stored = run.store.read_status() or {}
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "job": run.job, "run": run.id, "store": str(run.store.url),
        "job_id": submission["job_id"], "queue": submission["queue"], "phase": stored.get("phase"),
        "reason": stored.get("reason") or "", "status": None if job is None else job["status"],
        "status_reason": None if job is None else job.get("statusReason"), "size": int(submission.get("size") or 0),
        "counts": None if job is None else batch_jobs.counts(job), "attempts": None, "failed": [], "waiting_for": None,
    }  # fmt: skip
    if job is None:
        return document
    if not batch_jobs.size_of(job):
        document["attempts"] = len(job.get("attempts") or []) + (job["status"] in ("STARTING", "RUNNING"))
        document["failed"] = [_failed(job)] if job["status"] == "FAILED" else []
        document["waiting_for"] = job.get("statusReason") if job["status"] == "RUNNABLE" else None
        if document["size"]:  # a list of one, whose job is no array
            document["failed"] = [{**row, "index": 0} for row in document["failed"]]
            _ask(run, document["failed"])
        return document
    ids = batch_jobs.children(session, str(submission["job_id"]), "FAILED") if document["counts"]["FAILED"] else []
    described = batch_jobs.describe(session, ids[:_DESCRIBED_MAX]).values()
    document["failed"] = sorted((_failed(child) for child in described), key=lambda row: row["index"])
    _ask(run, document["failed"][:ROWS_SHOWN])
    return document


def _ask(run: Run, failed: list[dict[str, Any]]) -> None:
    """Use the reason from the child's own status if it has one: it tells more than AWS."""
    for row in failed:
        status = run.store.get_json(f"{LAYOUT.entry(row['index'])}/{LAYOUT.status}") or {}
        if str(status.get("phase")) in _ENDS and status.get("reason"):
            row["reason"] = str(status["reason"])


def _failed(job: dict[str, Any]) -> dict[str, Any]:
    attempts = len(job.get("attempts") or [])
    return {"index": batch_jobs.index_of(job), "attempts": attempts, "reason": batch_jobs.why(job)}


def settle(run: Run, document: dict[str, Any], clock: Clock) -> bool:
    """Record in the store what no container could: children that never started, or whose hosts were all taken.

    Whether anything was recorded. `fleetctl sweep status` and `status` read the store alone.
    """
    if document["status"] != "FAILED":
        return False
    changed = False
    if not document["size"]:
        changed = _end(run.store, "failed at AWS Batch: " + _reason(document), clock)
    for row in document["failed"] if document["size"] else []:
        marks = run.store.keys(f"queue/{row['index']:05d}.")
        if any(mark.endswith((".done", ".failed")) for mark in marks):
            continue
        child_store = Store(run.store.client, run.store.url.below(LAYOUT.entry(row["index"])))
        reason = f"failed at AWS Batch: {row['reason']}"
        _end(child_store, reason, clock)
        body = {"instance": "", "phase": Phase.FAILED.value, "reason": reason, "time": rfc3339(clock.now())}
        run.store.put_json(LAYOUT.queue_ended(row["index"], False), body)
        changed = True
    if document["size"]:
        count = sum(key.endswith(".done") for key in run.store.keys(LAYOUT.queue))
        indices = ", ".join(str(row["index"]) for row in document["failed"][:10])
        reason = f"{count} of {document['size']} runs are done" + (f"; failed: {indices}" if indices else "")
        changed = _end(run.store, reason, clock) or changed
    return changed


def _reason(document: dict[str, Any]) -> str:
    return str(document["failed"][0]["reason"] if document["failed"] else document["status_reason"] or "")


def _end(store: Store, reason: str, clock: Clock) -> bool:
    """An end that is recorded stands."""
    end = {"phase": Phase.FAILED.value, "reason": reason, "heartbeat": rfc3339(clock.now())}
    return store.end_status(end) is not None


# ---------------------------------------------------------------------------------------------------------------- shown
def _one_line(reason: str) -> str:
    """The first line, and the trainer's last one."""
    first, *tail = reason.split("\n  | ")
    return f"{first}: {tail[-1]}" if tail else first


def render(document: dict[str, Any]) -> str:
    counts = document["counts"]
    if document["size"] > 1 and counts:
        waiting = counts["SUBMITTED"] + counts["PENDING"] + counts["RUNNABLE"]
        state = (f"{counts['SUCCEEDED']} of {document['size']} done, {counts['RUNNING'] + counts['STARTING']} running, "
                 f"{waiting} waiting, {counts['FAILED']} failed")  # fmt: skip
    else:
        state = document["status"] or "no longer known to AWS Batch"
    rows = [("job", document["job"]), ("run", document["run"]), ("at Batch", f"{document['job_id']}  {state}")]
    if document["phase"] in _ENDS:  # until then AWS knows better
        rows.append(("phase", document["phase"] + (f": {document['reason']}" if document["reason"] else "")))
    if document["attempts"]:
        rows.append(("attempts", str(document["attempts"])))
    if document["waiting_for"]:
        rows.append(("waits for", document["waiting_for"]))
    rows += [("queue", document["queue"]), ("store", document["store"])]
    if document["failed"] and document["size"] == 1:
        rows.append(("why", _one_line(document["failed"][0]["reason"])))
    if not document["failed"] or document["size"] < 2:
        return lines_of(rows)
    first = document["failed"][:ROWS_SHOWN]
    cells = [(row["index"], row["attempts"], cut(_one_line(row["reason"]), 90)) for row in first]
    rest = len(document["failed"]) - len(cells)
    return lines_of(rows) + "\n\n" + table(("FAILED", "ATTEMPTS", "WHY"), cells) + (
        f"\n… and {rest} more" if rest > 0 else "")  # fmt: skip


