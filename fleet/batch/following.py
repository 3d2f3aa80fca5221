"""A job at Batch followed to its end, with the lines of its containers: `batch submit --wait`, `batch logs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.clock import Clock, Timeout
from spotheal.agent.protocol.errors import CredentialsEnded, JobFailed, NotFound, Retryable, WaitTimedOut
from spotheal.fleet.batch.names import Names
from spotheal.fleet.batch.tail import Line, Tail
from spotheal.fleet.run import batch_jobs
from spotheal.fleet.run.session import Session

POLL_SECONDS = 3.0
LAST_WORDS = 15
_SHOWN = 5  # failed children whose last lines are shown
_THROTTLED_MAX = 30  # rounds in a row, a second each
_UNKNOWN_SECONDS = 60.0  # a job that was just submitted may not be described yet
_UNLISTED_LOOKS = 10  # at an array that has ended, for children that are counted and not listed yet
_WAITS_SECONDS = 120.0  # RUNNABLE for so long: the reason is shown


@dataclass
class Followed:
    """`say` shows a message, `line` shows one line of a container."""

    session: Session
    names: Names
    job_id: str
    clock: Clock
    say: Callable[[str], None]
    line: Callable[[Line], None]

    def __post_init__(self) -> None:
        self._tail = Tail(self.session, self.names.log_group)
        self._children: dict[str, str] = {}  # id -> the state that was read last
        self._mark: tuple[Any, ...] = ()
        self._unlisted = 0  # looks in a row at which not every child that has ended was listed
        self._last_line = ""
        self._runnable_since: float | None = None
        self._told_waiting = False

    def to_the_end(self, seconds_max: float | None = None) -> dict[str, Any]:
        """The ended job, after its last lines. JobFailed with the failed children; WaitTimedOut after `seconds_max`."""
        start, timeout = self.clock.monotonic(), Timeout(self.clock, seconds_max)
        job: dict[str, Any] | None = None
        while True:
            try:
                job = self.look()
            except CredentialsEnded:
                raise
            except Retryable:  # throttled, a network that is down: the next look sees it all
                pass
            except NotFound:
                if job is not None or self.clock.monotonic() - start > _UNKNOWN_SECONDS:
                    raise
            self._give()
            is_told = self._tail.is_over and not 0 < self._unlisted < _UNLISTED_LOOKS
            if job is not None and job["status"] in batch_jobs.ENDS and is_told:
                break
            if timeout.is_over:
                raise WaitTimedOut(f"the job has not ended after {seconds_max:.0f} s; it goes on",
                                   next_step=self.come_back())  # fmt: skip
            timeout.sleep(POLL_SECONDS)
        if job["status"] == "FAILED":
            cure = (f"`fleetctl batch logs {self.names.job}` has all of it; `fleetctl batch submit` begins a new run,"
                    " --resume goes on with the unfinished entries")  # fmt: skip
            raise JobFailed(self._failure(job), next_step=cure)
        return job

    def once(self) -> None:
        """All lines so far. Retryable if CloudWatch cannot be read."""
        self.look()
        fruitless = 0
        while (has_lines := self._give()) or self._tail.is_behind:
            fruitless = fruitless + 1 if self._tail.is_throttled and not has_lines else 0
            if fruitless > _THROTTLED_MAX:
                raise Retryable("not all lines could be read: CloudWatch Logs is throttled",
                                next_step="the same command again in a minute")  # fmt: skip
            if fruitless:
                self.clock.sleep(1.0)

    def come_back(self) -> str:
        job = self.names.job
        return f"`fleetctl batch logs {job} -f` follows it again, `fleetctl batch status {job}` shows it"

    # --------------------------------------------------------------------------------------------------------- one look
    def look(self) -> dict[str, Any]:
        """The job now; its streams are noted. NotFound if Batch has forgotten it."""
        job = batch_jobs.describe(self.session, [self.job_id]).get(self.job_id)
        if job is None:
            raise NotFound(
                f"AWS Batch does not know job {self.job_id} any more: it keeps jobs for a week after they end",
                next_step=f"the store has its logs: `fleetctl logs {self.names.job}`",
            )
        self._tell(job)
        if not batch_jobs.size_of(job):
            self._tail.see_attempts(batch_jobs.streams_of(job), job["status"] in batch_jobs.ENDS)
        elif batch_jobs.mark(job) != self._mark or job["status"] not in batch_jobs.ENDS:
            counts = batch_jobs.counts(job)
            self._see_children(counts)
            listed = [sum(child_state == state for child_state in self._children.values()) for state in batch_jobs.ENDS]
            is_whole = all(count >= counts[state] for count, state in zip(listed, batch_jobs.ENDS, strict=True))
            self._unlisted = 0 if is_whole else self._unlisted + 1
            self._mark = batch_jobs.mark(job) if is_whole else ()
        return job

    def _see_children(self, counts: dict[str, int]) -> None:
        """Note children that run, or ran at the last look, each time (an attempt has its own stream); children that
        have ended, once. An array of thousands is not listed at each look: ListJobs is throttled."""
        states = ("STARTING", "RUNNING")
        running = (child for state in states for child in batch_jobs.children(self.session, self.job_id, state))
        self._note(
            {
                *running,
                *(child_id for child_id, child_state in self._children.items() if child_state not in batch_jobs.ENDS),
            }
        )
        for state in batch_jobs.ENDS:
            if sum(child_state == state for child_state in self._children.values()) < counts[state]:
                listed = batch_jobs.children(self.session, self.job_id, state)
                self._note({child_id for child_id in listed if self._children.get(child_id) not in batch_jobs.ENDS})

    def _note(self, ids: set[str]) -> None:
        for child_id, child in batch_jobs.describe(self.session, sorted(ids)).items():
            self._tail.see_attempts(batch_jobs.streams_of(child), child["status"] in batch_jobs.ENDS)
            self._children[child_id] = child["status"]

    def _give(self) -> int:
        count = 0
        for line in self._tail.read():
            self.line(line)
            count += 1
        return count

    def _tell(self, job: dict[str, Any]) -> None:
        text = in_words(job)
        if text != self._last_line:
            self.say(text)
            self._last_line = text
        counts = batch_jobs.counts(job)
        waits = counts["RUNNABLE"] and not counts["STARTING"] and not counts["RUNNING"]
        now = self.clock.monotonic()
        self._runnable_since = (self._runnable_since or now) if waits else None
        if self._runnable_since is not None and now - self._runnable_since > _WAITS_SECONDS and not self._told_waiting:
            self._told_waiting = True
            self.say(self._waiting(job))

    def _waiting(self, job: dict[str, Any]) -> str:
        children = [job] if not batch_jobs.size_of(job) else list(
            batch_jobs.describe(self.session, batch_jobs.children(self.session, self.job_id, "RUNNABLE")[:1]).values()
        )  # fmt: skip
        reason = next((str(child["statusReason"]) for child in children if child.get("statusReason")), "")
        return ("waiting for a host: " + (reason or "AWS gives no reason; without spot capacity more instance_types and"
                " zones help, and [batch] max_vcpus must have room for one container"))  # fmt: skip

    def _failure(self, job: dict[str, Any]) -> str:
        """The failed children, with their last lines."""
        if not batch_jobs.size_of(job):
            return self._last_words(job, "the job failed")
        ids = batch_jobs.children(self.session, self.job_id, "FAILED")
        children = batch_jobs.describe(self.session, ids[:100]).values()
        failed = sorted(children, key=lambda child: batch_jobs.index_of(child) or 0)
        text = f"the array failed: {batch_jobs.why(job)}"
        if ids:
            text = f"{len(ids)} of {batch_jobs.size_of(job)} children failed"
        details = [
            self._last_words(failed_child, f"child {batch_jobs.index_of(failed_child)}")
            for failed_child in failed[:_SHOWN]
        ]
        rest = [f"… and {len(ids) - _SHOWN} more"] if len(ids) > _SHOWN else []
        return "\n".join([text, *details, *rest])

    def _last_words(self, job: dict[str, Any], label: str) -> str:
        streams = batch_jobs.streams_of(job)
        lines = self._tail.last_lines(streams[-1], LAST_WORDS) if streams else []
        return "\n  | ".join([f"{label}: {batch_jobs.why(job)}", *lines])


def in_words(job: dict[str, Any]) -> str:
    """`RUNNING`, or of an array `2 of 8 done, 5 running, 1 waiting`."""
    size = batch_jobs.size_of(job)
    if not size:
        return f"job {job['jobName']}: {job['status']}"
    counts = batch_jobs.counts(job)
    running = counts["RUNNING"] + counts["STARTING"]
    waiting = counts["SUBMITTED"] + counts["PENDING"] + counts["RUNNABLE"]
    failed = f", {counts['FAILED']} failed" if counts["FAILED"] else ""
    return f"{counts['SUCCEEDED']} of {size} done, {running} running, {waiting} waiting{failed}"
