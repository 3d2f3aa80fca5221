"""`[fleet] on_demand_after`: the schedule at AWS that turns the fleet's instance into an on-demand one.

The agent postpones it while an instance lives (`spotheal.agent.life.on_demand`), so it fires only if spot had no
capacity for that long. EventBridge Scheduler calls EC2 by itself: no program of ours has to run for it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import Conflict, SpothealError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import TAG_JOB, TAG_RUN, rescue_schedule, schedule_expression
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.fleet.run.engine import is_ec2_fleet
from spotheal.iam import policies

_ROLE_TRIES = 8  # a new role cannot be assumed everywhere yet
_ROLE_SECONDS = 3.0


def faults(job: JobConfig, has_templates: bool) -> list[str]:
    """What prevents the rescue in job.toml. `has_templates`: the operator's file has its own launch templates."""
    if not seconds(job.fleet.on_demand_after):
        return []
    messages = []
    if not job.limits.dollars:
        messages.append(
            "[fleet] on_demand_after: needs [limits] dollars: an on-demand instance costs about three times as much, "
            "and only that limit ends it"
        )
    if job.fleet.engine == "spot-fleet" and not job.fleet.harden and not has_templates:
        messages.append(
            "[fleet] on_demand_after: a spot fleet of launch specifications has no on-demand part; set harden = true "
            'or engine = "ec2-fleet"'
        )
    if seconds(job.fleet.on_demand_after) < 600:
        messages.append("[fleet] on_demand_after: must be 10m or more: a replacement alone takes minutes to boot")
    return messages


def ensure_role(iam: Any, scope: policies.Scope) -> None:
    """Create or update the role with which Scheduler calls EC2 for `scope.job`. If the role is right already, no call
    writes: such an operator may have no permission to create roles."""
    document = policies.rescue_role(scope)
    if _policy_of(iam, scope) == document:
        return
    trust = policies.trust("scheduler.amazonaws.com")
    try:
        with translated(f"create role {scope.rescue_role}"):
            iam.create_role(RoleName=scope.rescue_role, AssumeRolePolicyDocument=json.dumps(trust),
                            Description="EventBridge Scheduler: on-demand instances for spotheal's fleets")  # fmt: skip
    except SpothealError as error:
        if error.code != "EntityAlreadyExists":
            raise
    with translated(f"write the policy of role {scope.rescue_role}"):
        iam.put_role_policy(
            RoleName=scope.rescue_role, PolicyName=_policy_name(scope), PolicyDocument=json.dumps(document)
        )


def _policy_name(scope: policies.Scope) -> str:
    """One policy per region: the role is for the whole account, and the policy of another region must stay."""
    return f"rescue-{scope.region}"


def _policy_of(iam: Any, scope: policies.Scope) -> Any:
    """None if it cannot be read, or does not exist."""
    role = scope.rescue_role
    try:
        with translated(f"read the policy of role {role}"):
            return iam.get_role_policy(RoleName=role, PolicyName=_policy_name(scope))["PolicyDocument"]
    except SpothealError:
        return None


def schedule(job: JobConfig, run: str, fleet: str, scope: policies.Scope, clock: Clock) -> dict[str, Any]:
    """CreateSchedule's arguments. Scheduler deletes the schedule after its time, so that none stays behind."""
    at = clock.now() + timedelta(seconds=seconds(job.fleet.on_demand_after))
    return {
        "Name": rescue_schedule(job.job.name, run),
        "Description": f"on-demand rescue of spotheal job {job.job.name}, run {run} ({TAG_JOB}, {TAG_RUN})",
        "ScheduleExpression": schedule_expression(at),
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": f"arn:{scope.partition}:scheduler:::aws-sdk:ec2:{_call(fleet)}",
            "RoleArn": scope.role(scope.rescue_role),
            "Input": json.dumps(_body(fleet)),
            "RetryPolicy": {"MaximumRetryAttempts": 10, "MaximumEventAgeInSeconds": 3600},
        },
    }


def arm(scheduler: Any, arguments: dict[str, Any], clock: Clock) -> None:
    """Create the schedule, or give the run's old schedule its new fleet and time."""

    def create() -> None:
        with translated("schedule the on-demand rescue"):
            scheduler.create_schedule(**arguments)

    try:
        return until_it_works(
            create, clock, tries_max=_ROLE_TRIES, pause=_ROLE_SECONDS,
            passes=lambda error: error.code == "ValidationException" and "role" in error.message.lower(),
        )  # fmt: skip
    except SpothealError as error:
        if not isinstance(error, Conflict) and error.code != "ConflictException":
            raise
    with translated("put the on-demand rescue on its new fleet"):
        scheduler.update_schedule(**arguments)


def _call(fleet: str) -> str:
    return "modifyFleet" if is_ec2_fleet(fleet) else "modifySpotFleetRequest"


def _body(fleet: str) -> dict[str, Any]:
    if is_ec2_fleet(fleet):
        target = {"TotalTargetCapacity": 1, "OnDemandTargetCapacity": 1, "SpotTargetCapacity": 0}
        return {"FleetId": fleet, "TargetCapacitySpecification": target}
    return {"SpotFleetRequestId": fleet, "TargetCapacity": 1, "OnDemandTargetCapacity": 1}
