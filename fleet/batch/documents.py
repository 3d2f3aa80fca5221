"""The documents for Batch, made from job.toml: environments, queue, job definition. Pure.

Facts: AWS Batch User Guide, "Allocation strategies", "Automated job retries", "Compute resource memory management";
API reference, Ec2Configuration (Amazon Linux 2 images are refused for new environments since July 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.contract import EXIT_SAVED_AND_STOPPED
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import EfsUrl, partition_of
from spotheal.fleet.batch.names import EFS_PLACE, ROOT, Names

Document = dict[str, Any]
GPU_FAMILIES = ("g4dn", "g5", "g6")
_TOO_OLD = re.compile(r"(p2|p3|p3dn|g2|g3|g3s)(\..+)?")  # their drivers are not in the AL2023 image
_TIMEOUT_MARGIN_SECONDS = 900  # more than limits.hours: the container saves and ends by itself before
COMMAND = ["spotheal-agent", "batch"]


@dataclass(frozen=True)
class Site:
    """Of the account: subnets, the security group's id, and the image."""

    account: str
    region: str
    subnets: tuple[str, ...]
    group: str
    image: str

    def role(self, name: str) -> str:
        return f"arn:{partition_of(self.region)}:iam::{self.account}:role/{name}"

    def profile(self, name: str) -> str:
        return self.role(name).replace(":role/", ":instance-profile/")


def gpus_of(job: JobConfig) -> int:
    return job.batch.gpus or job.job.gpus


def check(job: JobConfig) -> None:
    """ConfigError for keys of job.toml that a container on Batch cannot have."""
    faults = []
    if job.limits.dollars:
        faults.append("[limits] dollars: AWS Batch tells no container what its host costs;"
                      " take that line out, `hours` is the limit here")  # fmt: skip
    if job.cage.trainer_policy:
        faults.append("[cage] trainer_policy: is for instances of a fleet")
    if job.job.nodes != "1":
        faults.append("[job] nodes: several machines are for a fleet")
    faults += [f"[batch] instance_types: {name}: the ECS image with NVIDIA's driver does not support it"
               for name in job.batch.instance_types if _TOO_OLD.fullmatch(name)]  # fmt: skip
    if seconds(job.batch.copy_every) < 10:
        faults.append("[batch] copy_every: must be 10s at least")
    if faults:
        raise ConfigError("\n".join(faults), next_step="correct job.toml; docs/batch.md says what is different there")


def environment(job: JobConfig, names: Names, site: Site, *, spot: bool) -> Document:
    """CreateComputeEnvironment. Nothing runs, and nothing costs, while no job waits (`minvCpus` 0)."""
    gpus = gpus_of(job)
    types = list(job.batch.instance_types) or (list(GPU_FAMILIES) if gpus else ["default_x86_64"])
    name = names.spot if spot else names.on_demand
    strategy = "SPOT_PRICE_CAPACITY_OPTIMIZED" if spot else "BEST_FIT_PROGRESSIVE"
    return {
        "computeEnvironmentName": name,
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": {
            "type": "SPOT" if spot else "EC2",
            "allocationStrategy": strategy,
            "minvCpus": 0,
            "maxvCpus": job.batch.max_vcpus,
            "instanceTypes": types,
            "subnets": list(site.subnets),
            "securityGroupIds": [site.group],
            "instanceRole": site.profile(names.host_role),
            "ec2Configuration": [{"imageType": "ECS_AL2023_NVIDIA" if gpus else "ECS_AL2023"}],
            "tags": {"Name": name, **names.tags},
        },
        "tags": names.tags,
    }


def queue(names: Names, environments: list[str]) -> Document:
    order = [{"order": number, "computeEnvironment": name} for number, name in enumerate(environments, 1)]
    return {"jobQueueName": names.queue, "state": "ENABLED", "priority": 1, "computeEnvironmentOrder": order,
            "tags": names.tags}  # fmt: skip


def retry(attempts: int) -> Document:
    """Ends of hosts are tried again, ends of the job are not. Batch retries if no rule fits, so the last rule fits all.

    A container that has saved because its host goes away exits with 75. Actions are in lower case, as AWS describes
    them: written otherwise, every `batch create` would find a difference and register the definition again.
    """
    rules = [
        {"onStatusReason": "Host EC2*", "action": "retry"},
        {"onExitCode": str(EXIT_SAVED_AND_STOPPED), "action": "retry"},
        {"onReason": "DockerTimeoutError*", "action": "retry"},
        {"onReason": "*", "action": "exit"},
    ]
    return {"attempts": attempts, "evaluateOnExit": rules}


def resources(vcpus: float, memory_gib: float, gpus: int) -> list[Document]:
    """Memory in MiB. GPU is left out if there is none: Batch refuses a 0."""
    requirements = [{"type": "VCPU", "value": f"{vcpus:g}"}, {"type": "MEMORY", "value": str(int(memory_gib * 1024))}]
    return [*requirements, {"type": "GPU", "value": str(gpus)}] if gpus else requirements


def definition(job: JobConfig, names: Names, site: Site) -> Document:
    """RegisterJobDefinition. All that differs from run to run is in the submission."""
    batch = job.batch
    variables = {"AWS_REGION": site.region, "SPOTHEAL_ROOT": ROOT, "PYTHONUNBUFFERED": "1"}
    container: Document = {
        "image": site.image,
        "command": list(COMMAND),
        "jobRoleArn": site.role(names.job_role),
        "executionRoleArn": site.role(names.execution_role),
        "resourceRequirements": resources(batch.vcpus, batch.memory_gib, gpus_of(job)),
        # Workers of a data loader hand batches over in shared memory, of which Docker gives 64 MB.
        "linuxParameters": {"sharedMemorySize": max(64, int(batch.memory_gib * 1024 / 2)), "initProcessEnabled": True},
        "logConfiguration": {"logDriver": "awslogs", "options": {"awslogs-group": names.log_group,
                                                                 "awslogs-region": site.region}},
    }  # fmt: skip
    place = job.store.results_place
    if isinstance(place, EfsUrl):
        mounted = {"fileSystemId": place.file_system, "rootDirectory": "/", "transitEncryption": "ENABLED"}
        container["volumes"] = [{"name": "efs", "efsVolumeConfiguration": mounted}]
        container["mountPoints"] = [{"sourceVolume": "efs", "containerPath": EFS_PLACE, "readOnly": False}]
        variables["SPOTHEAL_EFS"] = EFS_PLACE
    container["environment"] = [{"name": name, "value": value} for name, value in variables.items()]
    document: Document = {
        "jobDefinitionName": names.definition,
        "type": "container",
        "platformCapabilities": ["EC2"],
        "containerProperties": container,
        "retryStrategy": retry(batch.attempts),
        "propagateTags": True,
        "tags": names.tags,
    }
    if job.limits.hours:
        document["timeout"] = {"attemptDurationSeconds": int(job.limits.hours * 3600) + _TIMEOUT_MARGIN_SECONDS}
    return document


def differs(desired: Any, actual: Any) -> bool:
    """Whether `actual`, as AWS describes it, lacks anything of `desired`; additions by AWS are no difference.

    Lists of named things are compared whatever their order.
    """
    if isinstance(desired, Mapping):
        return not isinstance(actual, Mapping) or any(differs(value, actual.get(key)) for key, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(actual, list) or len(desired) != len(actual):
            return True
        if desired and isinstance(desired[0], Mapping) and (key := _key(desired[0])):
            desired, actual = (sorted(side, key=lambda item: str(item.get(key))) for side in (desired, actual))
        elif desired and isinstance(desired[0], str) and not str(desired[0]).startswith("spotheal-agent"):
            desired, actual = sorted(desired), sorted(actual)
        return any(
            differs(desired_item, actual_item) for desired_item, actual_item in zip(desired, actual, strict=True)
        )
    return bool(desired != actual)


def _key(item: Mapping[str, Any]) -> str:
    return next((key for key in ("name", "type", "order", "sourceVolume") if key in item), "")
