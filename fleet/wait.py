"""Following a run to its end from the store, for `request --wait`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotheal.agent.clock import Clock
from spotheal.agent.errors import JobFailed, Retryable, WaitTimedOut
from spotheal.agent.names import LAYOUT, Phase
from spotheal.fleet import runs
from spotheal.fleet.session import Session
from spotheal.fleet.table import printable

POLL_SECONDS = 5.0
FLEET_SECONDS = 60.0  # how often AWS is asked whether the fleet still lives
_SAY_SECONDS = 30.0


def wait(
    session: Session, run: runs.Run, clock: Clock, say: Callable[[str], None], seconds_max: float | None
) -> dict[str, Any]:
    """The last status document of a run that is done; JobFailed for every other end, WaitTimedOut after `seconds_max`.

    What happens is said as it changes, and the step every half minute.
    """
    began = clock.monotonic()
    said, said_at, fleet_at = "", float("-inf"), clock.monotonic()
    while True:
        status = _read(run)
        line = describe(status)
        place = line.split(", step")[0]
        now = clock.monotonic()
        if place != said or now - said_at >= _SAY_SECONDS:
            say(line)
            said, said_at = place, now
        phase = str(status.get("phase") or "")
        if phase == Phase.DONE.value:
            return status
        if any(phase == one.value for one in Phase if one.is_end):
            raise JobFailed(
                f"the run ended: {phase}: {status.get('reason') or 'no reason given'}",
                next_step=f"`fleetctl logs {run.job}`; `fleetctl request --resume` goes on from the last checkpoint",
            )
        if now - fleet_at >= FLEET_SECONDS:
            fleet_at = now
            _check_fleet(session, run)
        if seconds_max is not None and now - began >= seconds_max:
            raise WaitTimedOut(
                f"the run has not ended after {seconds_max:.0f} s; it goes on", next_step=f"`fleetctl status {run.job}`"
            )
        clock.sleep(POLL_SECONDS)


def describe(status: dict[str, Any]) -> str:
    """`training on i-0a (us-west-2a), step 120 of 400, loss 0.31`."""
    text = str(status.get("phase") or Phase.REQUESTED.value)
    if status.get("instance"):
        text += f" on {status['instance']} ({status.get('zone')})"
    progress = status.get("progress")
    if isinstance(progress, dict) and progress.get("step") is not None:
        total = f" of {progress['steps_total']}" if progress.get("steps_total") else ""
        text += f", step {progress['step']}{total}"
        if progress.get("loss") is not None:
            text += f", loss {progress['loss']:.4g}"
    return printable(text)


def _read(run: runs.Run) -> dict[str, Any]:
    try:
        return run.store.read_status() or {}
    except Retryable:  # the store was not to be reached for a moment; the run does not depend on us
        return {}


def _check_fleet(session: Session, run: runs.Run) -> None:
    try:
        fleet = str((run.store.get_json(LAYOUT.fleet_document) or {}).get("fleet_id") or "")
        state = runs.fleet_state(session.client("ec2"), fleet) if fleet else "submitted"
        if state in runs.LIVE_FLEET_STATES or _ended(run):
            return
    except Retryable:
        return
    raise JobFailed(
        f"the fleet {fleet} is {state or 'gone'}, and the run has not ended by itself",
        next_step="`fleetctl request --resume` goes on from the last checkpoint",
    )


def _ended(run: runs.Run) -> bool:
    phase = _read(run).get("phase")
    return any(phase == one.value for one in Phase if one.is_end)
