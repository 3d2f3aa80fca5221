"""What AWS Batch keeps: environments, queues, job definitions, jobs. Plain data; the rules are in `batch_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENDS = ("SUCCEEDED", "FAILED")
STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", *ENDS)
Params = Mapping[str, Any]


@dataclass
class Environment:
    name: str
    arn: str
    asked: dict[str, Any]
    state: str = "ENABLED"
    status: str = "CREATING"
    reason: str = "ComputeEnvironment Healthy"

    @property
    def resources(self) -> dict[str, Any]:
        return dict(self.asked.get("computeResources") or {})

    @property
    def is_spot(self) -> bool:
        return bool(self.resources.get("type") == "SPOT")


@dataclass
class Queue:
    name: str
    arn: str
    asked: dict[str, Any]
    state: str = "ENABLED"
    status: str = "CREATING"

    @property
    def environments(self) -> list[str]:
        """ARNs or names, in order."""
        order = sorted(self.asked.get("computeEnvironmentOrder") or [], key=lambda one: int(one["order"]))
        return [str(entry["computeEnvironment"]) for entry in order]


@dataclass
class Definition:
    name: str
    revision: int
    arn: str
    asked: dict[str, Any]
    status: str = "ACTIVE"


@dataclass
class Attempt:
    """One try. `reason` is the container's, `status_reason` the attempt's, as DescribeJobs has them."""

    stream: str
    host: str
    started: int
    stopped: int = 0
    exit_code: int | None = None
    reason: str = ""
    status_reason: str = ""


@dataclass
class Job:
    """A single job, an array (`size`), or a child of one (`index`). Times in milliseconds since 1970, as Batch's."""

    id: str
    name: str
    queue: str
    definition: Definition
    asked: dict[str, Any]
    created: int
    status: str = "SUBMITTED"
    reason: str = ""
    size: int = 0
    index: int | None = None
    parent: str = ""
    started: int = 0
    stopped: int = 0
    cancelled: bool = False
    terminated: str = ""  # why
    attempts: list[Attempt] = field(default_factory=list)
    running: Attempt | None = None
    waits_since: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.status in ENDS

    def container(self) -> dict[str, Any]:
        """The definition's container with what the submission overrides."""
        container = dict(self.definition.asked["containerProperties"])
        overrides = dict(self.asked.get("containerOverrides") or {})
        container["environment"] = _merged(container.get("environment"), overrides.pop("environment", None), "name")
        requirements = _merged(
            container.get("resourceRequirements"), overrides.pop("resourceRequirements", None), "type"
        )
        container["resourceRequirements"] = requirements
        return container | {key: value for key, value in overrides.items() if value}

    def resource(self, kind: str) -> float:
        requirements = {
            requirement["type"]: requirement["value"] for requirement in self.container()["resourceRequirements"]
        }
        return float(requirements.get(kind, 0))

    def retry(self) -> dict[str, Any]:
        return dict(self.asked.get("retryStrategy") or self.definition.asked.get("retryStrategy") or {"attempts": 1})

    def timeout(self) -> int:
        timeout = self.asked.get("timeout") or self.definition.asked.get("timeout") or {}
        return int(timeout.get("attemptDurationSeconds") or 0)

    def environment(self) -> dict[str, str]:
        """What is in a container's environment, Batch's own variables among it."""
        job_variables = {"AWS_BATCH_JOB_ID": self.id, "AWS_BATCH_JOB_ATTEMPT": str(len(self.attempts) + 1),
               "AWS_BATCH_JQ_NAME": self.queue}  # fmt: skip
        if self.index is not None:
            job_variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(self.index)
        return {
            str(variable["name"]): str(variable["value"]) for variable in self.container()["environment"]
        } | job_variables


def _merged(base: Any, over: Any, key: str) -> list[dict[str, str]]:
    entries = {entry[key]: dict(entry) for entry in base or []}
    return list((entries | {entry[key]: dict(entry) for entry in over or []}).values())


def matches(pattern: str | None, text: str | None) -> bool:
    """A condition of `evaluateOnExit`: exact, or its start where it ends in an asterisk. None: no condition."""
    if pattern is None:
        return True
    text = text or ""
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def is_retried(strategy: Params, tried: int, attempt: Attempt) -> bool:
    """By AWS's rules: the first condition all of whose parts match decides, and none that does means again."""
    if tried >= int(strategy.get("attempts") or 1):
        return False
    code = None if attempt.exit_code is None else str(attempt.exit_code)
    for condition in strategy.get("evaluateOnExit") or []:
        values = {"onStatusReason": attempt.status_reason, "onReason": attempt.reason, "onExitCode": code}
        if condition.get("onExitCode") is not None and code is None:
            continue
        if all(matches(condition.get(name), text) for name, text in values.items()):
            return str(condition["action"]).upper() == "RETRY"
    return True
