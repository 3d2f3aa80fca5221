"""`fleetctl batch delete`: all that `create` has made, in the only order that AWS takes: queue, environments, the rest.

Each step is skipped if it is done already, so that a deletion that was cut short goes on. Nothing is touched that
does not carry the job's tag. The store with checkpoints and results stays, and so do images.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import NotFound, SpothealError, WaitTimedOut
from spotheal.fleet.batch import creating, roles
from spotheal.fleet.batch.names import Names
from spotheal.fleet.run import batch_jobs
from spotheal.fleet.run.session import Session

SECONDS_MAX = 900.0  # an environment goes when its last host is gone
_LOOK_SECONDS = 3.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Inventory:
    """Everything to delete. `open_jobs`: jobs that have not ended."""

    queue: bool
    environments: tuple[str, ...]
    definitions: tuple[str, ...]
    log_group: bool
    roles: tuple[str, ...]
    open_jobs: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        return not (self.queue or self.environments or self.definitions or self.log_group or self.roles)

    def says(self, names: Names) -> str:
        lines = [f"  job queue {names.queue}"] if self.queue else []
        lines += [f"  compute environment {name}" for name in self.environments]
        lines += [f"  job definition {name.rpartition('/')[2]}" for name in self.definitions]
        lines += [f"  log group {names.log_group} with its logs (the store keeps its own)"] if self.log_group else []
        lines += [f"  role {name}" for name in self.roles]
        lines += [f"  {len(self.open_jobs)} job(s) that are not over are terminated"] if self.open_jobs else []
        return "\n".join(["deletes:", *lines])


def look(session: Session, names: Names) -> Inventory:
    queue = _queue(session, names)
    ours = [
        name
        for name, environment in creating.environments(session, names).items()
        if creating.is_ours(environment, names)
    ]
    definitions = [str(definition["jobDefinitionArn"]) for definition in creating.active_definitions(session, names)
                   if creating.is_ours(definition, names)]  # fmt: skip
    with translated(f"look for log group {names.log_group}"):
        groups = session.client("logs").describe_log_groups(logGroupNamePrefix=names.log_group)["logGroups"]
    from spotheal.fleet.account.roles import is_made_by_us

    roles_made = tuple(role for role in names.roles if is_made_by_us(session, role))
    waiting = tuple(str(job["jobId"]) for job in batch_jobs.open_jobs(session, names.queue)) if queue else ()
    has_group = any(group["logGroupName"] == names.log_group for group in groups)
    return Inventory(queue is not None, tuple(ours), tuple(definitions), has_group, roles_made, waiting)


def carry_out(session: Session, names: Names, inventory: Inventory, clock: Clock, say: Say) -> None:
    batch = session.client("batch")
    until = clock.monotonic() + SECONDS_MAX
    for job in inventory.open_jobs:
        with translated(f"terminate job {job}"):
            batch.terminate_job(jobId=job, reason="fleetctl batch delete")
    if inventory.queue:
        say(f"deleting job queue {names.queue}")
        _delete_queue(session, batch, names, clock, until)
    for name in inventory.environments:
        say(f"deleting compute environment {name}")
        _delete_environment(session, batch, names, name, clock, until)
    for arn in inventory.definitions:
        with translated(f"retire job definition {arn.rpartition('/')[2]}"):
            batch.deregister_job_definition(jobDefinition=arn)
    if inventory.log_group:
        _delete_log_group(session, names)
    for line in roles.delete(session, names):
        say(f"deleted {line}")


def _queue(session: Session, names: Names) -> dict[str, Any] | None:
    with translated("look for the job queue"):
        queues = session.client("batch").describe_job_queues(jobQueues=[names.queue])["jobQueues"]
    return queues[0] if queues and queues[0]["status"] != "DELETED" and creating.is_ours(queues[0], names) else None


def _delete_queue(session: Session, batch: Any, names: Names, clock: Clock, until: float) -> None:
    """DISABLED, then deleted, then gone; AWS refuses each step while the previous one is under way."""
    while (queue := _queue(session, names)) is not None:
        if queue["status"] not in ("UPDATING", "CREATING", "DELETING"):
            with translated(f"delete job queue {names.queue}"):
                if queue["state"] == "ENABLED":
                    batch.update_job_queue(jobQueue=names.queue, state="DISABLED")
                else:
                    batch.delete_job_queue(jobQueue=names.queue)
        _pause(clock, until, f"job queue {names.queue}")


def _delete_environment(session: Session, batch: Any, names: Names, name: str, clock: Clock, until: float) -> None:
    while (environment := creating.environments(session, names).get(name)) is not None and environment[
        "status"
    ] != "DELETED":
        if environment["status"] not in ("UPDATING", "CREATING", "DELETING"):
            try:
                with translated(f"delete compute environment {name}"):
                    if environment["state"] == "ENABLED":
                        batch.update_compute_environment(computeEnvironment=name, state="DISABLED")
                    else:
                        batch.delete_compute_environment(computeEnvironment=name)
            except SpothealError as error:
                if "relationship" not in error.message and "being modified" not in error.message:
                    raise  # the queue that it belonged to goes a moment later
        _pause(clock, until, f"compute environment {name}")


def _pause(clock: Clock, until: float, resource: str) -> None:
    if clock.monotonic() > until:
        raise WaitTimedOut(f"{resource} is not gone after {SECONDS_MAX:.0f} s",
                           next_step="the same command again goes on where this one ended")  # fmt: skip
    clock.sleep(_LOOK_SECONDS)


def _delete_log_group(session: Session, names: Names) -> None:
    with suppress(NotFound), translated(f"delete log group {names.log_group}"):
        session.client("logs").delete_log_group(logGroupName=names.log_group)
