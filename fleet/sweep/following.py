"""A sweep followed to its end, for `sweep run --wait` and `sweep status --watch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotheal.agent.protocol.clock import Clock, Timeout
from spotheal.agent.protocol.errors import CredentialsEnded, JobFailed, Retryable, WaitTimedOut
from spotheal.agent.protocol.names import Phase
from spotheal.fleet.run import engine
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.session import Session
from spotheal.fleet.sweep import progress

POLL_SECONDS = 15.0
SAY_SECONDS = 60.0
_STEPS_SHOWN = 4


def follow(
    session: Session, sweep: Run, clock: Clock, say: Callable[[str], None], seconds_max: float | None
) -> str:
    """The reason of a sweep that is done. A line whenever the counts change, and every minute.

    JobFailed if a run failed or the fleet is gone, WaitTimedOut after `seconds_max`.
    """
    timeout, last_line, said_at = Timeout(clock, seconds_max), "", float("-inf")
    while True:
        try:
            document = progress.summarise(progress.gather(session, sweep))
        except CredentialsEnded:
            raise
        except Retryable:
            document = None
        if document is not None:
            line = _line(document)
            if line != last_line or clock.monotonic() - said_at >= SAY_SECONDS:
                say(line + _steps(document))
                last_line, said_at = line, clock.monotonic()
            phase = str(document["phase"])
            if phase == Phase.DONE.value:
                return str(document["reason"])
            if phase in {member.value for member in Phase if member.is_end}:
                raise JobFailed(f"the sweep ended: {phase}: {document['reason']}",
                                next_step=f"`fleetctl sweep status {sweep.job}` says why; "
                                "`fleetctl sweep run LIST --resume --retry-failed` begins them again")  # fmt: skip
            state = document["fleet"]["state"]
            if document["fleet"]["id"] and state not in engine.LIVE_STATES:
                raise JobFailed(f"the fleet is {state or 'gone'}, and the sweep has not ended by itself",
                                next_step="`fleetctl sweep run LIST --resume` goes on")  # fmt: skip
        if timeout.is_over:
            raise WaitTimedOut(f"the sweep has not ended after {seconds_max:.0f} s; it goes on",
                               next_step=come_back(sweep))  # fmt: skip
        timeout.sleep(POLL_SECONDS)


def come_back(sweep: Run) -> str:
    return f"`fleetctl sweep status -w {sweep.job}` looks again, `fleetctl cancel {sweep.job}` ends it"


def _line(document: dict[str, Any]) -> str:
    count = document["runs"]
    return (f"{count['done']} of {count['all']} done, {count['running']} running, {count['waiting']} waiting"
            + (f", {count['failed']} failed" if count["failed"] else ""))  # fmt: skip


def _steps(document: dict[str, Any]) -> str:
    """The steps of the first runs that are running; else why no instance comes."""
    if missing := document["no_capacity"]:
        return f"; {missing['says']}; try: {missing['next_step']}"
    running = [row for row in document["entries"] if row["state"] == "running" and row["step"] is not None]
    steps = [f"run {row['index']} at step {progress.step_of(row)}" for row in running[:_STEPS_SHOWN]]
    rest = f", and {len(running) - _STEPS_SHOWN} more" if len(running) > _STEPS_SHOWN else ""
    return "; " + ", ".join(steps) + rest if steps else ""
