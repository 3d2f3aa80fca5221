"""The rehearsal's AWS Batch: one account's environments, queues and jobs over the rule book's hosts and time.

Over HTTP by `answer` (REST with JSON), without it by `InMemoryBatch`. moto's own needs Docker. What a container is is
the caller's: processes of a machine in `batch_containers`, scripted ones in tests.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from botocore import xform_name
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from spotheal.fleet.rehearsal.batch import rules
from spotheal.fleet.rehearsal.batch.jobs import Jobs
from spotheal.fleet.rehearsal.batch.logs import CloudWatchLogs
from spotheal.fleet.rehearsal.batch.things import Definition, Environment, Job, Params, Queue
from spotheal.fleet.rehearsal.ec2.rulebook import ApiError, Rulebook
from spotheal.fleet.rehearsal.ec2.world import Instance, World

LOG_SECONDS = 0.5  # until a line is to be read; some seconds at AWS


class Container(Protocol):
    """One attempt's. `stop` is SIGTERM to its first process; none may wait."""

    def poll(self) -> int | None: ...

    def lines(self) -> list[str]: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class Batch:
    """`start_container(job, host, environment)` runs one. `image_fault(image)` says why it cannot be pulled."""

    def __init__(self, rulebook: Rulebook, start_container: Callable[[Job, Instance], Container]) -> None:
        self._rulebook = rulebook
        self._start_container = start_container
        self.environments: dict[str, Environment] = {}
        self.queues: dict[str, Queue] = {}
        self.definitions: list[Definition] = []
        self.random = random.Random(rulebook.world.random.random())
        self.jobs = Jobs(self)
        self.logs = CloudWatchLogs(self.arn("log-group", "logs"), rulebook.faults.throttled)
        self.image_fault: Callable[[str], str] = lambda image: ""
        self.role_fault: Callable[[Mapping[str, Any]], str] = lambda resources: ""
        self.calls: list[tuple[str, str]] = []  # operation, error code or ok
        self._followed: dict[str, tuple[Container, str, str]] = {}  # job id -> container, log group, stream

    # ------------------------------------------------------------------------------------------------------- the world
    @property
    def world(self) -> World:
        return self._rulebook.world

    def arn(self, kind: str, service: str = "batch") -> str:
        return f"arn:aws:{service}:{self.world.region}:{self.world.account}:{kind}"

    def now(self) -> int:
        return int(self.world.now().timestamp() * 1000)

    def moment(self) -> float:
        return self.world.moment()

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        def happen() -> None:
            do()

        self.world.later(seconds, happen)

    def instance(self, instance: str) -> Instance | None:
        return self.world.instances.get(instance)

    def owns(self, instance: Instance) -> bool:
        return instance.id in self.jobs.hosts or "AWSBatchServiceTag" in instance.tags

    def start(self, job: Job, host: Instance) -> Container:
        container = self._start_container(job, host)
        options = (job.container().get("logConfiguration") or {}).get("options") or {}
        group = str(options.get("awslogs-group") or "/aws/batch/job")
        assert job.running is not None
        self._followed[f"{job.id} {job.running.stream}"] = container, group, job.running.stream
        return container

    def tick(self) -> None:
        """What containers have printed and how they ended; to be called again and again."""
        with self._rulebook.inside():
            self._read_logs()
            self.jobs.look()

    def _read_logs(self) -> None:
        for key, (container, group, stream) in list(self._followed.items()):
            over = container.poll() is not None
            lines = container.lines()
            if lines:
                self.later(LOG_SECONDS, functools.partial(self.logs.write, group, stream, self.now(), lines))
            if over:
                del self._followed[key]

    def host_shuts_down(self, instance: str) -> None:
        with self._rulebook.inside():
            self.jobs.host_shuts_down(instance)

    def host_ended(self, instance: str) -> None:
        with self._rulebook.inside():
            self._read_logs()
            self.jobs.host_ended(instance)

    def close(self) -> None:
        with self._rulebook.inside():
            for container in self.jobs.containers.values():
                container.kill()

    # --------------------------------------------------------------------------------------------------------- the API
    def call(self, operation: str, params: Params) -> dict[str, Any]:
        """AWS's answer; ApiError."""
        with self._rulebook.inside():
            code = "ok"
            try:
                return self._answer(operation, params)
            except ApiError as error:
                code = error.code
                raise
            finally:
                self.calls.append((operation, code))

    def _answer(self, operation: str, params: Params) -> dict[str, Any]:
        if self.world.faults.throttled(operation):
            raise ApiError("TooManyRequestsException", "Too Many Requests", 429)
        shape = service_model("batch").operation_model(operation).input_shape
        assert shape is not None
        report = ParamValidator().validate(dict(params), shape)
        if report.has_errors():
            raise ApiError("ClientException", report.generate_report())
        if operation in rules.OPERATIONS:
            return rules.OPERATIONS[operation](self, params)
        if operation in Jobs.OPERATIONS:
            return Jobs.OPERATIONS[operation](self.jobs, self, params)
        raise ApiError("UnknownOperationException", f"{operation} is not rehearsed")

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """What AWS answers to an HTTP request, or its error as botocore reads it."""
        operation = _by_path().get(path.rstrip("/"))
        try:
            if operation is None:
                raise ApiError("UnknownOperationException", f"{path} is not rehearsed")
            return 200, self.call(operation, json.loads(body or b"{}"))
        except ApiError as error:
            return error.status, {"__type": error.code, "message": error.message}

    def answer_logs(self, target: str, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            return 200, self.logs.call(target.rpartition(".")[2], json.loads(body or b"{}"))
        except ApiError as error:
            return error.status, {"__type": error.code, "message": error.message}


@functools.cache
def service_model(service: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


@functools.cache
def _by_path() -> dict[str, str]:
    model = service_model("batch")
    return {model.operation_model(name).http["requestUri"]: name for name in model.operation_names}


class InMemoryBatch:
    """boto3's clients of Batch and CloudWatch Logs without HTTP; errors are botocore's."""

    def __init__(self, batch: Batch, service: str = "batch") -> None:
        self._batch, self._service = batch, service
        self._methods = {xform_name(name): name for name in service_model(service).operation_names}

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(name)
        return functools.partial(self._call, self._methods[name])

    def _call(self, operation: str, **params: Any) -> dict[str, Any]:
        from spotheal.fleet.rehearsal.services.client import client_error

        answers = self._batch.call if self._service == "batch" else self._batch.logs.call
        try:
            answer: dict[str, Any] = json.loads(json.dumps(answers(operation, params)))
            return answer
        except ApiError as error:
            raise client_error(operation, error.code, error.message, error.status) from error


def image_fault_of(repositories: Callable[[str], set[str] | None]) -> Callable[[str], str]:
    """For images of the account's ECR: whether repository and tag are there. Others are taken to be public."""

    def fault(image: str) -> str:
        match = re.fullmatch(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/([^:@]+)(?::([^:@]+))?", image)
        if not match:
            return ""
        tags = repositories(match.group(1))
        if tags is None:
            return f"CannotPullContainerError: repository {match.group(1)} does not exist"
        if (match.group(2) or "latest") not in tags:
            return f"CannotPullContainerError: {image}: not found"
        return ""

    return fault
