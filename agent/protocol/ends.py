"""How a run ends, and how a trainer's run ended: which of them cancel the fleet. Pure.

The list is exhaustive: done, failed, set-up failed, limit, parked, cancelled. Anything else keeps the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spotheal.agent.protocol.names import Phase

NOT_STORED = "results not stored"  # in the reason of an end: who cleans up leaves their volume alone
BARRED = "barred"  # outcome of a launch whose instance type cannot run the job
# Outcomes of a launch that an agent or a bootstrap has recorded: EC2 need not be asked. A boot that failed remains one,
# also if spot then takes the machine that was kept running for a look at it (keep_on_failure).
RECORDED_OUTCOMES = ("interrupted", "ended", BARRED, "boot failed")
LAUNCHES_WITHOUT_PROGRESS_MAX = 5
Kind = Literal["done", "failed", "interrupted", "limit", "cancelled"]  # how a trainer ends; each is a phase, too
STARTS_WITHOUT_PROGRESS_MAX = 10  # of the agent on one instance: a fault that each start meets again


@dataclass(frozen=True)
class End:
    """The run is over: store the reason, cancel the fleet."""

    phase: Phase
    reason: str

    def __post_init__(self) -> None:
        if not self.phase.is_end:
            raise ValueError(f"{self.phase} is no end of a run")


@dataclass(frozen=True)
class TrainerEnd:
    """How the trainer ended on this machine, all attempts together. Step figures are None for trainers that write no
    progress file."""

    kind: Kind
    reason: str = ""
    saved_step: int | None = None
    last_step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    attempts: int = 0  # number of the last attempt of the run, over all instances
    failures: int = 0  # in a row without a step gained: what the next instance counts on from
    tail: tuple[str, ...] = ()  # the last lines of output


def saved_step(status: Mapping[str, Any]) -> int | None:
    """The step of the last checkpoint that a run's status.json knows; None if it names none."""
    progress = status.get("progress")
    saved = progress.get("saved") if isinstance(progress, dict) else None
    step = saved.get("step") if isinstance(saved, dict) else None
    return step if isinstance(step, int) else None


def resume_advice(saved: int | None) -> str:
    """How to go on with a run that has ended. `saved`: the step of its last checkpoint, None if none is known."""
    step = f"from step {saved}, the last checkpoint" if saved is not None else "with the run and its volume"
    return f"`fleetctl request --resume` goes on {step}"


def decide_end(trainer: TrainerEnd) -> End | None:
    """The end that `trainer` is, or None: the fleet replaces this instance and the run goes on."""
    if trainer.kind not in get_args(Kind):
        raise ValueError(f"{trainer.kind!r} is no way for a trainer to end")
    phase = Phase(trainer.kind)
    return End(phase, trainer.reason) if phase.is_end else None


def launches_without_progress(launches: Iterable[Mapping[str, Any]], saved_at: str = "") -> int:
    """How many launches in a row, up to the last, acknowledged no new checkpoint.

    Left out are interrupted ones, and those of instance types that cannot run the job, which `gpus` counts.

    `launches` are the run's launch documents by time, without the one that is asking and those that live. `saved_at`
    (RFC 3339, UTC): when the run last acknowledged a checkpoint, which forgives what was launched before. A bootstrap
    whose boot has failed counts by the same rule (userdata/report.py).
    """
    count = 0
    for launch in launches:
        if launch.get("acknowledged"):
            count = 0
        elif str(launch.get("time", "")) >= saved_at and launch.get("outcome") not in ("interrupted", BARRED):
            count += 1
    return count


def decide_parked(launches: Iterable[Mapping[str, Any]], starts: int = 1, saved_at: str = "") -> End | None:
    """Parked after `LAUNCHES_WITHOUT_PROGRESS_MAX` launches in a row that gained nothing.

    `starts`: how often the agent was started in this launch since a checkpoint was acknowledged; too often parks too.
    """
    if starts > STARTS_WITHOUT_PROGRESS_MAX:
        return End(Phase.PARKED, f"the agent was started {starts} times on one instance and gained no checkpoint")
    launches = list(launches)
    count = launches_without_progress(launches, saved_at)
    if count < LAUNCHES_WITHOUT_PROGRESS_MAX:
        return None
    reasons = [str(launch["reason"]) for launch in launches if launch.get("reason")]
    last = f"; the last one said: {reasons[-1]}" if reasons else ""
    return End(Phase.PARKED, f"{count} launches in a row acknowledged no new checkpoint{last}")
