"""Following a run to its end from the store, for `request --wait` and `status --watch`."""

from __future__ import annotations

from typing import Any

from spotheal.agent.protocol.clock import Clock, Timeout
from spotheal.agent.protocol.ends import resume_advice, saved_step
from spotheal.agent.protocol.errors import CredentialsEnded, JobFailed, Retryable, WaitTimedOut
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.status.live import Look, View

POLL_SECONDS = 5.0
FLEET_SECONDS = 60.0  # how often AWS is asked whether the fleet still lives
_ENDS = frozenset(phase.value for phase in Phase if phase.is_end)


def wait(
    session: Session, run: runs.Run, clock: Clock, view: View, seconds_max: float | None = None
) -> dict[str, Any]:
    """The last document of a run that is done; JobFailed for every other end, WaitTimedOut after `seconds_max`."""
    look = Look(session, run, clock)
    timeout, fleet_at = Timeout(clock, seconds_max), clock.monotonic()
    while True:
        document = look()
        now = clock.monotonic()
        if document is not None:
            view.show(document, clock.now())
            phase = document["phase"]
            if phase == Phase.DONE.value:
                return document
            if phase in _ENDS and not runs.goes_on(document["reason"] or "", document["heartbeat_age_seconds"]):
                reason = document["reason"] or "no reason given"
                advice = resume_advice((document["checkpoint"] or {}).get("step"))
                raise JobFailed(f"the run ended: {phase}: {reason}", next_step=f"`fleetctl logs {run.job}`; {advice}")
        if now - fleet_at >= FLEET_SECONDS:
            fleet_at = now
            _check_fleet(session, run)
        if timeout.is_over:
            raise WaitTimedOut(
                f"the run has not ended after {seconds_max:.0f} s; it goes on", next_step=f"`fleetctl status {run.job}`"
            )
        timeout.sleep(POLL_SECONDS)


def _check_fleet(session: Session, run: runs.Run) -> None:
    """JobFailed if the fleet is gone although the run has not ended by itself."""
    try:
        document = run.store.get_json(LAYOUT.fleet_document)
        if document is None:
            raise JobFailed(
                f"the store of run {run.id} is gone: its state is not known",
                next_step=f"`fleetctl cancel {run.job}` ends the rest of it",
            )
        fleet = str(document.get("fleet_id") or "")
        status = run.store.read_status() or {}
        state = runs.fleet_state(session.client("ec2"), fleet) if fleet else "submitted"
        if state in runs.LIVE_FLEET_STATES or str(status.get("phase")) in _ENDS:
            return
    except CredentialsEnded:
        raise
    except Retryable:
        return
    raise JobFailed(
        f"the fleet {fleet} is {state or 'gone'}, and the run has not ended by itself",
        next_step=resume_advice(saved_step(status)),
    )
