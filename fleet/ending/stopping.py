"""The end of a run with a last checkpoint: the agent is asked through the store, and itself saves, stores the results
and cancels its fleet, last. So nothing is lost if this process dies half-way: the agent still ends the run.

A trainer that is not at work has nothing to save: then the fleet is cancelled at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.clock import Clock, Timeout, rfc3339
from spotheal.agent.protocol.ends import saved_step
from spotheal.agent.protocol.errors import CredentialsEnded, Retryable, WaitTimedOut
from spotheal.agent.protocol.names import HEARTBEAT_SECONDS, LAYOUT, TAG_RUN, Phase
from spotheal.fleet.ending import cancel
from spotheal.fleet.run import engine, runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import duration

POLL_SECONDS = 3.0
SAVE_SECONDS = 600.0
SAY_SECONDS = 30.0
CANCEL_SECONDS = 60.0  # how long the agent has for its last act, cancelling the fleet, before it is done here
_GONE_SECONDS = 900.0  # a GPU instance's operating system can take minutes to go down
Say = Callable[[str], None]
ENDS = frozenset(phase.value for phase in Phase if phase.is_end)


@dataclass(frozen=True)
class Ended:
    """`saved_step`: None if no trainer was at work, or if it reports no steps."""

    phase: str
    reason: str
    saved_step: int | None
    has_saved: bool  # a trainer was at work and saved for this stop


def save_and_end(
    session: Session, run: runs.Run, reason: str, clock: Clock, say: Say, seconds_max: float = SAVE_SECONDS
) -> Ended:
    """Let the run save and end, and see its fleet cancelled. WaitTimedOut if that takes longer; it then still ends.

    `why` becomes the run's reason. A run that ends by itself meanwhile (done, failed) is left its own end.
    """
    start, timeout, asked_of = clock.monotonic(), Timeout(clock, seconds_max), set[int]()
    said_at = start
    while True:
        status = _status(run)
        if status is not None:
            if status.phase in ENDS:
                break
            writer = _writer(session, status)
            if not writer:
                say("no trainer is at work: there is nothing to save")
                break
            if status.term and status.term not in asked_of:
                _ask(run, status.term, reason, clock, seconds_max)
                asked_of.add(status.term)
                say(f"asked {writer} to save and end; it hears of it within {HEARTBEAT_SECONDS:.0f} s")
            if clock.monotonic() - said_at >= SAY_SECONDS:
                said_at = clock.monotonic()
                far = "" if status.step is None else f", step {status.step} so far"
                say(f"waiting for the last checkpoint since {duration(said_at - start)}{far}")
        if timeout.is_over:
            raise WaitTimedOut(
                f"the trainer has not saved and ended after {duration(seconds_max)}; it is still asked to",
                next_step=f"`fleetctl status {run.job}` shows how far it is; "
                f"`fleetctl cancel {run.job}` without --save does not wait",
            )
        timeout.sleep(POLL_SECONDS)
    _see_cancelled(session, run, clock, bool(asked_of))
    last = _status(run) or _Status()
    return Ended(last.phase, last.reason, last.saved_step, bool(asked_of))


def await_gone(session: Session, run: runs.Run, clock: Clock, say: Say, seconds_max: float = _GONE_SECONDS) -> None:
    """Return when no instance of the run is left that could still write to its store and volume."""
    timeout, last_line = Timeout(clock, seconds_max), ""
    while True:
        remaining = [
            instance for instance in session.ec2.instances_tagged(TAG_RUN, run.id) if instance.state != "terminated"
        ]
        if not remaining:
            return
        line = f"waiting for {', '.join(f'{instance.id} ({instance.state})' for instance in remaining)} to be gone"
        if line != last_line:
            say(line)
            last_line = line
        if timeout.is_over:
            raise WaitTimedOut(
                f"{remaining[0].id} is still {remaining[0].state} after {duration(seconds_max)}",
                next_step="`fleetctl request --resume` goes on with the run once it is gone",
            )
        timeout.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class _Status:
    """What is read of a run's status."""

    phase: str = ""
    reason: str = ""
    instance: str = ""
    term: int = 0
    step: int | None = None
    saved_step: int | None = None


def _status(run: runs.Run) -> _Status | None:
    """None if the store did not answer. Fatal if it holds what no agent writes."""
    try:
        return _typed(run.store.read_status() or {})
    except CredentialsEnded:
        raise
    except Retryable:
        return None


@sensible
def _typed(status: dict[str, Any]) -> _Status:
    phase, reason, instance = (str(status.get(name) or "") for name in ("phase", "reason", "instance"))
    step = (status.get("progress") or {}).get("step")
    step = None if step is None else int(step)
    return _Status(phase, reason, instance, int(status.get("term") or 0), step, saved_step(status))


def _writer(session: Session, status: _Status) -> str:
    """The instance whose trainer is at work, "" for none. An instance with a notice counts: it saves by itself."""
    if status.phase != Phase.TRAINING.value or not status.instance:
        return ""
    instances = session.ec2.instances([status.instance])
    return status.instance if instances and instances[0].state in ("pending", "running") else ""


def _ask(run: runs.Run, term: int, reason: str, clock: Clock, seconds_max: float) -> None:
    now = rfc3339(clock.now())
    run.store.put_json(LAYOUT.stop(term), {"reason": f"{reason} at {now}", "seconds": seconds_max, "time": now})


def _see_cancelled(session: Session, run: runs.Run, clock: Clock, by_agent: bool) -> None:
    """The agent cancels its fleet as its last act; if it does not, or there is none, that is done here."""
    fleet = str(run.fleet_document().get("fleet_id") or "")
    until = clock.monotonic() + (CANCEL_SECONDS if by_agent else 0.0)
    while fleet and clock.monotonic() < until:
        fleet_state = engine.describe(session.client("ec2"), fleet)
        if fleet_state is None or not fleet_state.is_live:
            return
        clock.sleep(POLL_SECONDS)
    cancel.carry_out(session, run, cancel.make_plan(session, run), clock)
