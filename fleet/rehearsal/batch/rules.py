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
    for setting in resources.get("ec2Configuration") or []:
        if setting["imageType"] not in IMAGE_TYPES:
            raise refused(f"Error executing request, Exception : imageType {setting['imageType']} is not supported.")
    arn = f"{batch.arn('compute-environment')}/{name}"
    new_environment = batch.environments[name] = Environment(
        name, arn, dict(params), state=str(params.get("state", "ENABLED"))
    )
    batch.later(VALID_SECONDS, lambda: _settle_environment(batch, new_environment))
    return {"computeEnvironmentName": name, "computeEnvironmentArn": arn}


def _settle_environment(batch: Batch, new_environment: Environment) -> None:
    if fault := batch.role_fault(new_environment.resources):
        new_environment.status, new_environment.reason = "INVALID", f"CLIENT_ERROR - {fault}"
    else:
        new_environment.status, new_environment.reason = "VALID", "ComputeEnvironment Healthy"


def update_environment(batch: Batch, params: Params) -> dict[str, Any]:
    record = environment(batch, params["computeEnvironment"])
    if record.status in ("CREATING", "UPDATING", "DELETING"):
        raise refused("Cannot update, resource is being modified")
    record.state = str(params.get("state") or record.state)
    resources = params.get("computeResources") or {}
    record.asked["computeResources"] = record.resources | dict(resources)
    record.status = "UPDATING"
    batch.later(GONE_SECONDS, lambda: _settle_environment(batch, record))
    return {"computeEnvironmentName": record.name, "computeEnvironmentArn": record.arn}


def delete_environment(batch: Batch, params: Params) -> dict[str, Any]:
    record = batch.environments.get(_short(params["computeEnvironment"]))
    if record is None:
        return {}
    if record.state != "DISABLED":
        raise refused("Cannot delete, Compute environment state must be DISABLED")
    if record.status == "UPDATING":
        raise refused("Cannot delete, resource is being modified")
    if any(record.name in map(_short, queue.environments) for queue in batch.queues.values()):
        raise refused("Cannot delete, found existing JobQueue relationship")
    record.status = "DELETING"
    batch.later(GONE_SECONDS, lambda: batch.environments.pop(record.name, None))
    return {}


def environment(batch: Batch, name: str) -> Environment:
    record = batch.environments.get(_short(name))
    if record is None:
        raise refused(f"Compute environment {name} does not exist")
    return record


def describe_environments(batch: Batch, params: Params) -> dict[str, Any]:
    environments = [
        record for record in batch.environments.values() if _is_asked(params.get("computeEnvironments"), record)
    ]
    return {"computeEnvironments": [
        {"computeEnvironmentName": record.name, "computeEnvironmentArn": record.arn,
         "ecsClusterArn": f"{record.arn}-ecs",
         "tags": record.asked.get("tags") or {}, "type": "MANAGED", "state": record.state, "status": record.status,
         "statusReason": record.reason, "computeResources": record.resources}
        for record in environments
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
    for entry in order:
        environment_of_entry = environment(batch, entry["computeEnvironment"])
        if environment_of_entry.status != "VALID":
            raise refused(f"{environment_of_entry.name} is not in a VALID state")
        kinds.add(environment_of_entry.resources["type"] in ("EC2", "SPOT"))
    if len(kinds) > 1:
        raise refused("EC2 and Fargate compute environments cannot be mixed in one queue")
    arn = f"{batch.arn('job-queue')}/{name}"
    new_queue = batch.queues[name] = Queue(name, arn, dict(params), state=str(params.get("state", "ENABLED")))
    batch.later(VALID_SECONDS / 2, lambda: setattr(new_queue, "status", "VALID"))
    return {"jobQueueName": name, "jobQueueArn": arn}


def update_queue(batch: Batch, params: Params) -> dict[str, Any]:
    record = queue(batch, params["jobQueue"])
    if record.status in ("CREATING", "UPDATING", "DELETING"):
        raise refused("Cannot update, resource is being modified")
    record.state = str(params.get("state") or record.state)
    if params.get("computeEnvironmentOrder"):
        record.asked["computeEnvironmentOrder"] = params["computeEnvironmentOrder"]
    record.status = "UPDATING"
    batch.later(GONE_SECONDS, lambda: setattr(record, "status", "VALID"))
    return {"jobQueueName": record.name, "jobQueueArn": record.arn}


def delete_queue(batch: Batch, params: Params) -> dict[str, Any]:
    """Jobs in it are terminated."""
    record = batch.queues.get(_short(params["jobQueue"]))
    if record is None:
        return {}
    if record.state != "DISABLED":
        raise refused("Cannot delete, Job queue state must be DISABLED")
    if record.status == "UPDATING":
        raise refused("Cannot delete, resource is being modified")
    record.status = "DELETING"
    batch.jobs.end_all_of(record.name, "the job queue was deleted")
    batch.later(GONE_SECONDS, lambda: batch.queues.pop(record.name, None))
    return {}


def queue(batch: Batch, name: str) -> Queue:
    record = batch.queues.get(_short(name))
    if record is None:
        raise refused(f"JobQueue {name} does not exist")
    return record


def describe_queues(batch: Batch, params: Params) -> dict[str, Any]:
    queues = [record for record in batch.queues.values() if _is_asked(params.get("jobQueues"), record)]
    return {"jobQueues": [
        {"jobQueueName": record.name, "jobQueueArn": record.arn, "state": record.state, "status": record.status,
         "statusReason": "JobQueue Healthy", "priority": int(record.asked["priority"]),
         "tags": record.asked.get("tags") or {},
         "computeEnvironmentOrder": record.asked["computeEnvironmentOrder"]}
        for record in queues
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
    revision = 1 + max(
        (revision_of_name.revision for revision_of_name in batch.definitions if revision_of_name.name == name),
        default=0,
    )
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
    requirements = {entry["type"]: entry["value"] for entry in properties.get("resourceRequirements") or []}
    if whole and not properties.get("image"):
        raise refused("Container properties must have an image")
    for kind in ("VCPU", "MEMORY"):
        if whole and kind not in requirements:
            raise refused(f"resourceRequirements must contain {kind}")
    if not all(re.fullmatch(r"\d+", value) for kind, value in requirements.items() if kind != "VCPU"):
        raise refused("MEMORY and GPU must be whole numbers")
    if "MEMORY" in requirements and int(requirements["MEMORY"]) < _MEMORY_MIN:
        raise refused(f"MEMORY must be at least {_MEMORY_MIN} MiB")
    if "GPU" in requirements and int(requirements["GPU"]) < 1:
        raise refused("GPU must be at least 1; leave it out for none")
    for entry in properties.get("environment") or []:
        if str(entry.get("name", "")).startswith("AWS_BATCH"):
            raise refused("Environment variables must not start with AWS_BATCH")
    mounted = {entry["sourceVolume"] for entry in properties.get("mountPoints") or []}
    if mounted - {entry["name"] for entry in properties.get("volumes") or []}:
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
    candidates = [
        candidate for candidate in batch.definitions if candidate.name == name and candidate.status == "ACTIVE"
    ]
    candidates = [candidate for candidate in candidates if not revision or str(candidate.revision) == revision]
    if not candidates:
        raise refused(f"JobDefinition {named} not found or not ACTIVE")
    return candidates[-1]


def deregister_definition(batch: Batch, params: Params) -> dict[str, Any]:
    definition(batch, params["jobDefinition"]).status = "INACTIVE"
    return {}


def describe_definitions(batch: Batch, params: Params) -> dict[str, Any]:
    name, status = params.get("jobDefinitionName"), params.get("status")
    names = [arn.rpartition("/")[2] for arn in params.get("jobDefinitions") or []]
    definitions = [
        record for record in batch.definitions
        if (not name or record.name == name) and (not status or record.status == status)
        and (not names or f"{record.name}:{record.revision}" in names or record.name in names)
    ]  # fmt: skip
    return {"jobDefinitions": [
        {**record.asked, "jobDefinitionArn": record.arn, "revision": record.revision, "status": record.status}
        for record in definitions
    ]}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- inside
def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise refused(f"{name!r} must be 1 to 128 letters, numbers, hyphens and underscores, a letter or number first")
    return name


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _is_asked(names: Any, record: Environment | Queue) -> bool:
    return not names or record.name in names or record.arn in names


OPERATIONS: Mapping[str, Callable[[Batch, Params], dict[str, Any]]] = {
    "CreateComputeEnvironment": create_environment, "UpdateComputeEnvironment": update_environment,
    "DeleteComputeEnvironment": delete_environment, "DescribeComputeEnvironments": describe_environments,
    "CreateJobQueue": create_queue, "UpdateJobQueue": update_queue, "DeleteJobQueue": delete_queue,
    "DescribeJobQueues": describe_queues, "RegisterJobDefinition": register_definition,
    "DeregisterJobDefinition": deregister_definition, "DescribeJobDefinitions": describe_definitions,
}  # fmt: skip
