"""AWS Batch's resources: environments, queues, job definitions, and what AWS refuses of them.

Source: AWS Batch API reference. Words of refusals are AWS's in sense, not to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spotheal.fleet.rehearsal.batch.things import Definition, Environment, Params, Queue
from spotheal.fleet.rehearsal.ec2.world import ApiError

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.batch.batch import Batch

VALID_SECONDS = 1.5  # half a minute at AWS
GONE_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_PATTERN = {"onStatusReason": r"[A-Za-z0-9.:\s]*\*?", "onReason": r"[A-Za-z0-9.:\s]*\*?", "onExitCode": r"[0-9]*\*?"}
_STRATEGIES = {"SPOT": ("BEST_FIT", "BEST_FIT_PROGRESSIVE", "SPOT_CAPACITY_OPTIMIZED", "SPOT_PRICE_CAPACITY_OPTIMIZED"),
               "EC2": ("BEST_FIT", "BEST_FIT_PROGRESSIVE")}  # fmt: skip
IMAGE_TYPES = ("ECS_AL2023", "ECS_AL2023_NVIDIA")  # the AL2 ones are refused for new environments since July 2026
_MEMORY_MIN = 4


def refused(message: str) -> ApiError:
    return ApiError("ClientException", message, 400)


# --------------------------------------------------------------------------------------------------------- environments
def create_environment(batch: Batch, params: Params) -> dict[str, Any]:
    name = _name(params["computeEnvironmentName"])
    if name in batch.environments:
        raise refused("Object already exists")
    resources = params.get("computeResources") or {}
    kind = resources.get("type")
    if params["type"] != "MANAGED" or kind not in _STRATEGIES:
        raise refused("Error executing request, Exception : computeResources.type must be specified")
    for key in ("maxvCpus", "subnets", "instanceRole", "instanceTypes"):
        if not resources.get(key):
            raise refused(f"Error executing request, Exception : {key} is required.")
    strategy = resources.get("allocationStrategy", "BEST_FIT")
    if strategy not in _STRATEGIES[kind]:
        raise refused(f"Error executing request, Exception : allocation strategy {strategy} is not for {kind}.")
    if kind == "SPOT" and strategy == "BEST_FIT" and not resources.get("spotIamFleetRole"):
        raise refused("Error executing request, Exception : spotIamFleetRole is required.")
    for one in resources.get("ec2Configuration") or []:
        if one["imageType"] not in IMAGE_TYPES:
            raise refused(f"Error executing request, Exception : imageType {one['imageType']} is not supported.")
    arn = f"{batch.arn('compute-environment')}/{name}"
    made = batch.environments[name] = Environment(name, arn, dict(params), state=str(params.get("state", "ENABLED")))
    batch.later(VALID_SECONDS, lambda: _settle_environment(batch, made))
    return {"computeEnvironmentName": name, "computeEnvironmentArn": arn}


def _settle_environment(batch: Batch, made: Environment) -> None:
    if fault := batch.role_fault(made.resources):
        made.status, made.reason = "INVALID", f"CLIENT_ERROR - {fault}"
    else:
        made.status, made.reason = "VALID", "ComputeEnvironment Healthy"


def update_environment(batch: Batch, params: Params) -> dict[str, Any]:
    found = environment(batch, params["computeEnvironment"])
    if found.status in ("CREATING", "UPDATING", "DELETING"):
        raise refused("Cannot update, resource is being modified")
    found.state = str(params.get("state") or found.state)
    given = params.get("computeResources") or {}
    found.asked["computeResources"] = found.resources | dict(given)
    found.status = "UPDATING"
    batch.later(GONE_SECONDS, lambda: _settle_environment(batch, found))
    return {"computeEnvironmentName": found.name, "computeEnvironmentArn": found.arn}


def delete_environment(batch: Batch, params: Params) -> dict[str, Any]:
    found = batch.environments.get(_short(params["computeEnvironment"]))
    if found is None:
        return {}
    if found.state != "DISABLED":
        raise refused("Cannot delete, Compute environment state must be DISABLED")
    if found.status == "UPDATING":
        raise refused("Cannot delete, resource is being modified")
    if any(found.name in map(_short, queue.environments) for queue in batch.queues.values()):
        raise refused("Cannot delete, found existing JobQueue relationship")
    found.status = "DELETING"
    batch.later(GONE_SECONDS, lambda: batch.environments.pop(found.name, None))
    return {}


def environment(batch: Batch, name: str) -> Environment:
    found = batch.environments.get(_short(name))
    if found is None:
        raise refused(f"Compute environment {name} does not exist")
    return found


def describe_environments(batch: Batch, params: Params) -> dict[str, Any]:
    found = [one for one in batch.environments.values() if _is_asked(params.get("computeEnvironments"), one)]
    return {"computeEnvironments": [
        {"computeEnvironmentName": one.name, "computeEnvironmentArn": one.arn, "ecsClusterArn": f"{one.arn}-ecs",
         "tags": one.asked.get("tags") or {}, "type": "MANAGED", "state": one.state, "status": one.status,
         "statusReason": one.reason, "computeResources": one.resources}
        for one in found
    ]}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- queues
def create_queue(batch: Batch, params: Params) -> dict[str, Any]:
    name = _name(params["jobQueueName"])
    if name in batch.queues:
        raise refused("Object already exists")
    order = params.get("computeEnvironmentOrder") or []
    if not 1 <= len(order) <= 3:
        raise refused("computeEnvironmentOrder must have 1 to 3 entries")
    kinds = set()
    for one in order:
        found = environment(batch, one["computeEnvironment"])
        if found.status != "VALID":
            raise refused(f"{found.name} is not in a VALID state")
        kinds.add(found.resources["type"] in ("EC2", "SPOT"))
    if len(kinds) > 1:
        raise refused("EC2 and Fargate compute environments cannot be mixed in one queue")
    arn = f"{batch.arn('job-queue')}/{name}"
    made = batch.queues[name] = Queue(name, arn, dict(params), state=str(params.get("state", "ENABLED")))
    batch.later(VALID_SECONDS / 2, lambda: setattr(made, "status", "VALID"))
    return {"jobQueueName": name, "jobQueueArn": arn}


def update_queue(batch: Batch, params: Params) -> dict[str, Any]:
    found = queue(batch, params["jobQueue"])
    if found.status in ("CREATING", "UPDATING", "DELETING"):
        raise refused("Cannot update, resource is being modified")
    found.state = str(params.get("state") or found.state)
    if params.get("computeEnvironmentOrder"):
        found.asked["computeEnvironmentOrder"] = params["computeEnvironmentOrder"]
    found.status = "UPDATING"
    batch.later(GONE_SECONDS, lambda: setattr(found, "status", "VALID"))
    return {"jobQueueName": found.name, "jobQueueArn": found.arn}


def delete_queue(batch: Batch, params: Params) -> dict[str, Any]:
    """Jobs in it are terminated."""
    found = batch.queues.get(_short(params["jobQueue"]))
    if found is None:
        return {}
    if found.state != "DISABLED":
        raise refused("Cannot delete, Job queue state must be DISABLED")
    if found.status == "UPDATING":
        raise refused("Cannot delete, resource is being modified")
    found.status = "DELETING"
    batch.jobs.end_all_of(found.name, "the job queue was deleted")
    batch.later(GONE_SECONDS, lambda: batch.queues.pop(found.name, None))
    return {}


def queue(batch: Batch, name: str) -> Queue:
    found = batch.queues.get(_short(name))
    if found is None:
        raise refused(f"JobQueue {name} does not exist")
    return found


def describe_queues(batch: Batch, params: Params) -> dict[str, Any]:
    found = [one for one in batch.queues.values() if _is_asked(params.get("jobQueues"), one)]
    return {"jobQueues": [
        {"jobQueueName": one.name, "jobQueueArn": one.arn, "state": one.state, "status": one.status,
         "statusReason": "JobQueue Healthy", "priority": int(one.asked["priority"]),
         "tags": one.asked.get("tags") or {},
         "computeEnvironmentOrder": one.asked["computeEnvironmentOrder"]}
        for one in found
    ]}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- definitions
def register_definition(batch: Batch, params: Params) -> dict[str, Any]:
    """A new revision."""
    name = _name(params["jobDefinitionName"])
    if params["type"] != "container" or not params.get("containerProperties"):
        raise refused("containerProperties is required for a job definition of type container")
    check_container(params["containerProperties"], whole=True)
    check_retry(params.get("retryStrategy") or {})
    seconds = (params.get("timeout") or {}).get("attemptDurationSeconds")
    if seconds is not None and seconds < 60:
        raise refused("attemptDurationSeconds must be at least 60")
    revision = 1 + max((one.revision for one in batch.definitions if one.name == name), default=0)
    arn = f"{batch.arn('job-definition')}/{name}:{revision}"
    batch.definitions.append(Definition(name, revision, arn, _echoed(params)))
    return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}


def _echoed(params: Params) -> dict[str, Any]:
    """As AWS describes it: actions of `evaluateOnExit` come back in lower case (terraform-provider-aws issue 19624)."""
    strategy = params.get("retryStrategy") or {}
    if not strategy.get("evaluateOnExit"):
        return dict(params)
    rules = [{**rule, "action": str(rule["action"]).lower()} for rule in strategy["evaluateOnExit"]]
    return {**params, "retryStrategy": {**strategy, "evaluateOnExit": rules}}


def check_container(properties: Params, *, whole: bool) -> None:
    wanted = {one["type"]: one["value"] for one in properties.get("resourceRequirements") or []}
    if whole and not properties.get("image"):
        raise refused("Container properties must have an image")
    for kind in ("VCPU", "MEMORY"):
        if whole and kind not in wanted:
            raise refused(f"resourceRequirements must contain {kind}")
    if not all(re.fullmatch(r"\d+", value) for kind, value in wanted.items() if kind != "VCPU"):
        raise refused("MEMORY and GPU must be whole numbers")
    if "MEMORY" in wanted and int(wanted["MEMORY"]) < _MEMORY_MIN:
        raise refused(f"MEMORY must be at least {_MEMORY_MIN} MiB")
    if "GPU" in wanted and int(wanted["GPU"]) < 1:
        raise refused("GPU must be at least 1; leave it out for none")
    for one in properties.get("environment") or []:
        if str(one.get("name", "")).startswith("AWS_BATCH"):
            raise refused("Environment variables must not start with AWS_BATCH")
    mounted = {one["sourceVolume"] for one in properties.get("mountPoints") or []}
    if mounted - {one["name"] for one in properties.get("volumes") or []}:
        raise refused("mountPoints name a volume that is none of the volumes")


def check_retry(strategy: Params) -> None:
    rules = strategy.get("evaluateOnExit") or []
    if rules and not strategy.get("attempts"):
        raise refused("attempts must be specified where evaluateOnExit is")
    if strategy and not 1 <= int(strategy.get("attempts") or 1) <= 10:
        raise refused("attempts must be between 1 and 10")
    if len(rules) > 5:
        raise refused("evaluateOnExit can have at most 5 entries")
    for rule in rules:
        if str(rule.get("action", "")).lower() not in ("retry", "exit"):
            raise refused("The action of an evaluateOnExit entry must be RETRY or EXIT")
        for key, pattern in _PATTERN.items():
            if key in rule and (len(rule[key]) > 512 or not re.fullmatch(pattern, rule[key])):
                raise refused(f"{key} {rule[key]!r} does not match the allowed pattern")


def definition(batch: Batch, named: str) -> Definition:
    """By name (the newest active), name:revision or ARN."""
    name, _, revision = named.rpartition("/")[2].partition(":")
    found = [one for one in batch.definitions if one.name == name and one.status == "ACTIVE"]
    found = [one for one in found if not revision or str(one.revision) == revision]
    if not found:
        raise refused(f"JobDefinition {named} not found or not ACTIVE")
    return found[-1]


def deregister_definition(batch: Batch, params: Params) -> dict[str, Any]:
    definition(batch, params["jobDefinition"]).status = "INACTIVE"
    return {}


def describe_definitions(batch: Batch, params: Params) -> dict[str, Any]:
    name, status = params.get("jobDefinitionName"), params.get("status")
    asked = [one.rpartition("/")[2] for one in params.get("jobDefinitions") or []]
    found = [
        one for one in batch.definitions
        if (not name or one.name == name) and (not status or one.status == status)
        and (not asked or f"{one.name}:{one.revision}" in asked or one.name in asked)
    ]  # fmt: skip
    return {"jobDefinitions": [
        {**one.asked, "jobDefinitionArn": one.arn, "revision": one.revision, "status": one.status} for one in found
    ]}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- inside
def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise refused(f"{name!r} must be 1 to 128 letters, numbers, hyphens and underscores, a letter or number first")
    return name


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _is_asked(names: Any, one: Environment | Queue) -> bool:
    return not names or one.name in names or one.arn in names


OPERATIONS: Mapping[str, Callable[[Batch, Params], dict[str, Any]]] = {
    "CreateComputeEnvironment": create_environment, "UpdateComputeEnvironment": update_environment,
    "DeleteComputeEnvironment": delete_environment, "DescribeComputeEnvironments": describe_environments,
    "CreateJobQueue": create_queue, "UpdateJobQueue": update_queue, "DeleteJobQueue": delete_queue,
    "DescribeJobQueues": describe_queues, "RegisterJobDefinition": register_definition,
    "DeregisterJobDefinition": deregister_definition, "DescribeJobDefinitions": describe_definitions,
}  # fmt: skip
