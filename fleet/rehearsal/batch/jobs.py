"""The jobs of the rehearsal's AWS Batch: submitted, held back, placed on hosts, run, tried again, ended.

Source: AWS Batch User Guide, "Job states", "Array jobs", "Job dependencies", "Automated job retries".
"""

from __future__ import annotations

import functools
import re
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spotheal.fleet.rehearsal.batch.rules import check_container, check_retry, definition, queue, refused
from spotheal.fleet.rehearsal.batch.things import STATES, Attempt, Environment, Job, Params, is_retried
from spotheal.fleet.rehearsal.ec2 import instances
from spotheal.fleet.rehearsal.ec2.spotmarket import on_demand_price

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.batch.batch import Batch, Container

SERVICE_TAG = "AWSBatchServiceTag"  # as AWS tags the hosts it launches
SUBMIT_SECONDS, PLACE_SECONDS, START_SECONDS, IDLE_SECONDS = 0.2, 0.3, 0.3, 6.0
TERMINATE_SECONDS = 30.0  # from SIGTERM to SIGKILL
_EXITED = "Essential container in task exited"
_SIZES = {"large": 2, "xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32, "12xlarge": 48, "16xlarge": 64,
          "24xlarge": 96, "48xlarge": 192}  # fmt: skip
_GPU_FAMILIES = re.compile(r"(g4dn|g5|g6|g6e|gr6|g7e|p4d|p4de|p5|p5e|p5en)(\.|$)")
_CHOICE = {"optimal": "m6i", "default_x86_64": "m6i"}


class Jobs:
    """All jobs by id. Everything here runs under the rule book's lock."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.all: dict[str, Job] = {}
        self.containers: dict[str, Container] = {}  # job id -> what runs
        self.hosts: dict[str, tuple[str, float]] = {}  # instance -> environment, monotonic time since it is idle
        self.reserved: dict[str, str] = {}  # job id -> the host it is about to start on
        self.interrupted = 0
        self._looks_at: float | None = None  # when everything is looked at next

    # ------------------------------------------------------------------------------------------------------ the calls
    def submit(self, batch: Batch, params: Params) -> dict[str, Any]:
        job_definition = definition(batch, params["jobDefinition"])
        job_queue = queue(batch, params["jobQueue"])
        if job_queue.state != "ENABLED" or job_queue.status not in ("VALID", "UPDATING"):
            raise refused(f"JobQueue {job_queue.name} is not in a VALID state or is DISABLED")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", params["jobName"]):
            raise refused("Job name should match valid pattern")
        size = int((params.get("arrayProperties") or {}).get("size") or 0)
        if params.get("arrayProperties") and not 2 <= size <= 10_000:
            raise refused("Array size must be between 2 and 10000")
        check_container(params.get("containerOverrides") or {}, whole=False)
        check_retry(params.get("retryStrategy") or {})
        self._check_dependencies(params, size)
        job_id = str(uuid.UUID(int=batch.random.getrandbits(128), version=4))
        name, now = params["jobName"], batch.now()
        job = Job(job_id, name, job_queue.name, job_definition, dict(params), now, size=size)
        self.all[job.id] = job
        for index in range(size):
            child_id, asked = f"{job.id}:{index}", dict(params)
            child = Job(child_id, name, job_queue.name, job_definition, asked, now, index=index, parent=job.id)
            self.all[child.id] = child
        self._soon(SUBMIT_SECONDS)
        return {"jobArn": f"{batch.arn('job')}/{job.id}", "jobName": job.name, "jobId": job.id}

    def _check_dependencies(self, params: Params, size: int) -> None:
        for dependency in params.get("dependsOn") or []:
            kind, job_id = dependency.get("type"), dependency.get("jobId")
            if kind == "SEQUENTIAL":
                if job_id or not size:
                    raise refused("SEQUENTIAL dependencies are for array jobs, and name no job")
                continue
            if not job_id or job_id not in self.all:
                raise refused(f"Job {job_id} does not exist")
            if kind == "N_TO_N" and self.all[job_id].size != size:
                raise refused("N_TO_N dependencies need two arrays of one size")

    def describe(self, batch: Batch, params: Params) -> dict[str, Any]:
        if len(params["jobs"]) > 100:
            raise refused("at most 100 jobs can be described")
        return {"jobs": [self._shown(self.all[job_id]) for job_id in params["jobs"] if job_id in self.all]}

    def listed(self, batch: Batch, params: Params) -> dict[str, Any]:
        """Of one status (RUNNING where none is named), newest first, at most 100 a page."""
        status = params.get("jobStatus") or "RUNNING"
        array, job_queue = params.get("arrayJobId"), params.get("jobQueue")
        if bool(array) == bool(job_queue):
            raise refused("exactly one of jobQueue, arrayJobId and multiNodeJobId must be given")
        if status not in STATES:
            raise refused(f"{status} is no job status")
        name = queue(batch, str(job_queue)).name if job_queue else ""
        jobs = [job for job in self.all.values() if job.status == status
                 and (job.parent == array if array else not job.parent and job.queue == name)]  # fmt: skip
        start, size = int(params.get("nextToken") or 0), min(int(params.get("maxResults") or 100), 100)
        next_page = {"nextToken": str(start + size)} if start + size < len(jobs) else {}
        return {"jobSummaryList": [_summary(job) for job in jobs[start : start + size]], **next_page}

    def terminate(self, batch: Batch, params: Params) -> dict[str, Any]:
        """Running containers get SIGTERM, then SIGKILL; what does not run is cancelled."""
        for job in self._tree(params["jobId"]):
            if not job.is_over and not job.terminated:
                job.terminated = params["reason"]
                self._end_or_stop(job, params["reason"])
        self._soon(0.0)
        return {}

    def cancel(self, batch: Batch, params: Params) -> dict[str, Any]:
        """Only what has not started."""
        for job in self._tree(params["jobId"]):
            if job.status in ("SUBMITTED", "PENDING", "RUNNABLE"):
                job.cancelled = True
                if not job.size:
                    self._end(job, "FAILED", params["reason"])
        self._soon(0.0)
        return {}

    def _tree(self, job_id: str) -> list[Job]:
        if job_id not in self.all:
            raise refused(f"Job {job_id} does not exist")
        return [job for job in self.all.values() if job.id == job_id or job.parent == job_id]

    def _end_or_stop(self, job: Job, reason: str) -> None:
        container = self.containers.get(job.id)
        if container is not None:
            container.stop()
            self._batch.later(TERMINATE_SECONDS, container.kill)
        elif not job.size:
            self._end(job, "FAILED", reason)

    def end_all_of(self, job_queue: str, reason: str) -> None:
        for job in [
            candidate
            for candidate in self.all.values()
            if candidate.queue == job_queue and not candidate.is_over and not candidate.parent
        ]:
            self.terminate(self._batch, {"jobId": job.id, "reason": reason})

    # --------------------------------------------------------------------------------------------------- as time passes
    def _soon(self, seconds: float) -> None:
        """Look at everything in so long, or before: one look is planned at a time."""
        at = self._batch.moment() + seconds
        if self._looks_at is None or at < self._looks_at - 0.01:
            self._looks_at = at
            self._batch.later(seconds, functools.partial(self._advance, at))

    def _advance(self, planned: float) -> None:
        """Everything that can go a state further goes there."""
        if self._looks_at is None or planned > self._looks_at + 0.01:
            return  # an earlier look has been planned since
        self._looks_at = None
        for job in list(self.all.values()):
            if job.is_over or job.size:
                continue
            if job.status == "SUBMITTED":
                job.status = "PENDING"
            if job.status == "PENDING":
                self._unblock(job)
            if job.status == "RUNNABLE":
                self._place(job)
        for job in self.all.values():
            if job.size and not job.is_over:
                self._sum_up(job)

    def _unblock(self, job: Job) -> None:
        top = self.all[job.parent] if job.parent else job
        waits = False
        for dependency in top.asked.get("dependsOn") or []:
            parent = self._depended(dependency, job)
            if parent is None or parent.status == "SUCCEEDED":
                continue
            if parent.status == "FAILED":
                self._end(job, "FAILED", "Dependent Job failed")
                return
            waits = True
        if not waits:
            job.status, job.waits_since = "RUNNABLE", self._batch.moment()

    def _depended(self, dependency: Mapping[str, str], job: Job) -> Job | None:
        if dependency.get("type") == "SEQUENTIAL":
            return self.all.get(f"{job.parent}:{(job.index or 0) - 1}") if job.index else None
        if dependency.get("type") == "N_TO_N":
            return self.all.get(f"{dependency['jobId']}:{job.index}")
        return self.all.get(dependency["jobId"])

    def _place(self, job: Job) -> None:
        job_queue = self._batch.queues.get(job.queue)
        if job_queue is None or job_queue.state != "ENABLED":
            return
        for name in job_queue.environments:
            environment = self._batch.environments.get(name.rpartition("/")[2])
            if environment is None or environment.state != "ENABLED" or environment.status not in ("VALID", "UPDATING"):
                continue
            host = self._host(environment, job)
            if host == "":
                break  # one is on its way here: the next environment is for what does not fit into this one
            if host is not None:
                job.status = "STARTING"
                self.reserved[job.id] = host
                self._batch.later(START_SECONDS, functools.partial(self._start, job, host))
                return
        self._soon(PLACE_SECONDS * 3)

    def _host(self, place: Environment, job: Job) -> str | None:
        """A host that is idle; "": one comes up; None: there is no room here. One container a host."""
        for instance, (environment, _) in self.hosts.items():
            record = self._batch.instance(instance)
            if environment != place.name or record is None or record.state != "running" or record.leaving:
                continue
            if instance not in self._busy():
                return instance
        kind = instance_type(place.resources, job)
        if not kind:
            job.reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - no instance type of the environment fits the job"
            return None
        ours = [host for host, (environment, _) in self.hosts.items() if environment == place.name]
        coming = [host for host in ours if (record := self._batch.instance(host)) and record.state == "pending"]
        waiting = sum(waiter.status == "RUNNABLE" for waiter in self.all.values())
        used = sum(self._vcpus(host) for host in ours)
        vcpus = _SIZES[kind.partition(".")[2]]
        if len(coming) >= waiting:
            return ""
        if used + vcpus <= int(place.resources["maxvCpus"]):
            return "" if self._launch(place, kind) else None
        return "" if coming else None

    def _vcpus(self, instance: str) -> int:
        record = self._batch.instance(instance)
        return _SIZES.get(record.type.partition(".")[2], 4) if record and record.state in ("pending", "running") else 0

    def _busy(self) -> set[str]:
        starting = {job.running.host for job in self.all.values() if job.running is not None}
        return starting | set(self.reserved.values())

    def _launch(self, environment: Environment, kind: str) -> bool:
        """Where spot has no capacity the next environment of the queue is asked."""
        world = self._batch.world
        zones = [zone for zone in world.zones if world.no_capacity_until.get(zone, 0.0) <= world.moment()]
        if environment.is_spot and not zones:
            return False
        zone = world.random.choice(zones or list(world.zones))
        role, tags = (
            str(environment.resources["instanceRole"]).rpartition("/")[2],
            environment.resources.get("tags") or {},
        )
        spec = {"InstanceType": kind, "ImageId": "ami-0ec5000000000000a", "IamInstanceProfile": {"Name": role},
                "TagSpecifications": [{"ResourceType": "instance", "Tags": [
                    {"Key": SERVICE_TAG, "Value": "batch"},
                    *({"Key": key, "Value": value} for key, value in tags.items())]}],
                }  # fmt: skip
        instance = instances.launch(world, spec, zone, spot=environment.is_spot)
        self.hosts[instance.id] = (environment.name, world.moment())
        return True

    def _start(self, job: Job, host: str) -> None:
        record = self._batch.instance(host)
        self.reserved.pop(job.id, None)
        if job.is_over or job.status != "STARTING":
            return
        if record is None or record.state != "running" or host in self._busy():
            job.status = "RUNNABLE"
            self._soon(PLACE_SECONDS)
            return
        task = f"{self._batch.random.getrandbits(128):032x}"
        job.running = Attempt(f"{job.definition.name}/default/{task}", host, self._batch.now())
        fault = self._batch.image_fault(str(job.container()["image"]))
        if fault:
            self._ended(job, None, "Task failed to start", fault)
            return
        job.status, job.started = "RUNNING", self._batch.now()
        job.reason = ""
        self.containers[job.id] = self._batch.start(job, record)
        if job.timeout():
            attempt = job.running
            self._batch.later(job.timeout(), lambda: self._time_out(job, attempt))

    def _time_out(self, job: Job, attempt: Attempt) -> None:
        if job.running is attempt and (container := self.containers.get(job.id)):
            job.terminated = "Job attempt duration exceeded timeout"
            container.stop()
            self._batch.later(TERMINATE_SECONDS, container.kill)

    def look(self) -> None:
        """Containers that have ended, hosts that nobody needs."""
        for job_id, container in list(self.containers.items()):
            code = container.poll()
            if code is not None:
                self._ended(self.all[job_id], code, _EXITED, "")
        busy, moment = self._busy(), self._batch.moment()
        has_work = any(job.status in ("RUNNABLE", "STARTING") for job in self.all.values())
        for host, (environment, since) in list(self.hosts.items()):
            record = self._batch.instance(host)
            if record is None or record.state == "terminated":
                self.hosts.pop(host)
            elif host in busy or has_work:
                self.hosts[host] = (environment, moment)
            elif moment - since > IDLE_SECONDS and record.state == "running":
                instances.shut_down(self._batch.world, host, instances.BY_ITSELF)

    def host_shuts_down(self, instance: str) -> None:
        """Docker passes the operating system's end on as SIGTERM."""
        for job in self._on(instance):
            self.containers[job.id].stop()

    def host_ended(self, instance: str) -> None:
        for job in self._on(instance):
            self.containers[job.id].kill()
            self.interrupted += 1
            self._ended(job, None, f"Host EC2 (instance {instance}) terminated.", "")

    def _on(self, instance: str) -> list[Job]:
        return [job for job in self.all.values() if job.running and job.running.host == instance
                and job.id in self.containers]  # fmt: skip

    def _ended(self, job: Job, code: int | None, status_reason: str, reason: str) -> None:
        attempt = job.running
        assert attempt is not None
        self.containers.pop(job.id, None)
        attempt.exit_code, attempt.status_reason, attempt.reason = code, status_reason, reason
        attempt.stopped, job.running = self._batch.now(), None
        job.attempts.append(attempt)
        if code == 0 and not job.terminated:
            self._end(job, "SUCCEEDED", status_reason)
        elif not job.terminated and is_retried(job.retry(), len(job.attempts), attempt):
            job.status, job.reason = "RUNNABLE", status_reason
        else:
            self._end(job, "FAILED", job.terminated or status_reason)
        self._soon(PLACE_SECONDS)

    def _end(self, job: Job, status: str, reason: str) -> None:
        job.status, job.reason, job.stopped = status, reason, self._batch.now()
        self._soon(PLACE_SECONDS)

    def _sum_up(self, parent: Job) -> None:
        children = [child for child in self.all.values() if child.parent == parent.id]
        if all(child.is_over for child in children):
            failed = any(child.status == "FAILED" for child in children)
            self._end(parent, "FAILED" if failed else "SUCCEEDED", "Array Child Job failed" if failed else "")
        elif any(child.status != "SUBMITTED" for child in children):
            parent.status = "PENDING"

    # ------------------------------------------------------------------------------------------------------------ shown
    def _shown(self, job: Job) -> dict[str, Any]:
        last = job.running or (job.attempts[-1] if job.attempts else None)
        container = {**job.container(), "environment": [
            {"name": name, "value": value} for name, value in job.environment().items()]}  # fmt: skip
        if last is not None:
            container |= _of_attempt(last)
        array: dict[str, Any] = {}
        if job.size:
            children = Counter(attempt.status for attempt in self.all.values() if attempt.parent == job.id)
            array = {"size": job.size, "statusSummary": {state: children[state] for state in STATES}}
        elif job.index is not None:
            array = {"index": job.index}
        times = {"startedAt": job.started, "stoppedAt": job.stopped}
        return {
            **_summary(job), "jobQueue": f"{self._batch.arn('job-queue')}/{job.queue}",
            "jobDefinition": job.definition.arn, "dependsOn": job.asked.get("dependsOn") or [],
            "retryStrategy": job.retry(), "tags": job.asked.get("tags") or {}, "isCancelled": job.cancelled,
            "isTerminated": bool(job.terminated), "container": container, "arrayProperties": array,
            **{name: value for name, value in times.items() if value},
            "attempts": [
                {"container": _of_attempt(attempt), "startedAt": attempt.started, "stoppedAt": attempt.stopped,
                 "statusReason": attempt.status_reason}
                for attempt in job.attempts
            ],
        }  # fmt: skip

    OPERATIONS: Mapping[str, Callable[[Jobs, Batch, Params], dict[str, Any]]]


Jobs.OPERATIONS = {"SubmitJob": Jobs.submit, "DescribeJobs": Jobs.describe, "ListJobs": Jobs.listed,
                   "TerminateJob": Jobs.terminate, "CancelJob": Jobs.cancel}  # fmt: skip


def _of_attempt(attempt: Attempt) -> dict[str, Any]:
    fields: dict[str, Any] = {"logStreamName": attempt.stream}
    if attempt.exit_code is not None:
        fields["exitCode"] = attempt.exit_code
    return fields | ({"reason": attempt.reason} if attempt.reason else {})


def _summary(job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = {"jobId": job.id, "jobName": job.name, "status": job.status, "createdAt": job.created}
    fields |= {"statusReason": job.reason} if job.reason else {}
    if job.index is not None:
        fields["arrayProperties"] = {"index": job.index}
    return fields


def instance_type(resources: Params, job: Job) -> str:
    """The cheapest type that the job fits into; "" where there is none."""
    vcpus, gpus = job.resource("VCPU"), job.resource("GPU")
    fitting = []
    for choice in resources["instanceTypes"]:
        choice = _CHOICE.get(choice, choice)
        names = [choice] if "." in choice else [f"{choice}.{size}" for size in _SIZES]
        for name in names:
            family, _, size = name.partition(".")
            if _SIZES.get(size, 0) >= vcpus and bool(_GPU_FAMILIES.match(family + ".")) >= bool(gpus):
                fitting.append((_SIZES[size], on_demand_price(name), name))
    return min(fitting)[2] if fitting else ""
