"""`fleetctl batch create`: finds the missing parts of a job at Batch (pure steps), and makes them. Idempotent.

Everything has a name made of the job's, so an attempt that was cut short goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import Conflict, Fatal, SpothealError, WaitTimedOut
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.account import efs, network, prerequisites, results_check, service_roles
from spotheal.fleet.account.prerequisites import CreateSecurityGroup, filled, group_placeholder
from spotheal.fleet.account.prices import Price
from spotheal.fleet.account.service_roles import CreateServiceRole
from spotheal.fleet.batch import documents, image, roles
from spotheal.fleet.batch.documents import Document, Site
from spotheal.fleet.batch.names import Names
from spotheal.fleet.batch.roles import MakeRole
from spotheal.fleet.request import submit
from spotheal.fleet.request.bucket import bucket_exists
from spotheal.fleet.request.plan import CreateBucket
from spotheal.fleet.run.session import Session

VALID_SECONDS_MAX = 600.0
_LOOK_SECONDS = 3.0
_LOG_DAYS = 30
Say = Callable[[str], None]


@dataclass(frozen=True)
class MakeLogGroup:
    name: str
    tags: dict[str, str]

    def says(self) -> str:
        return f"create log group {self.name}, kept {_LOG_DAYS} days"


@dataclass(frozen=True)
class MakeEnvironment:
    """`update`: it is there, and differs."""

    document: Document
    update: bool = False

    @property
    def name(self) -> str:
        return str(self.document["computeEnvironmentName"])

    def says(self) -> str:
        resources = self.document["computeResources"]
        types = ", ".join(resources["instanceTypes"])
        kind = "spot" if resources["type"] == "SPOT" else "on demand"
        verb = "update" if self.update else "create"
        return f"{verb} compute environment {self.name}: {kind}, {types}, 0 to {resources['maxvCpus']} vCPUs"


@dataclass(frozen=True)
class MakeQueue:
    document: Document
    update: bool = False

    def says(self) -> str:
        order = ", then ".join(
            environment["computeEnvironment"] for environment in self.document["computeEnvironmentOrder"]
        )
        return f"{'update' if self.update else 'create'} job queue {self.document['jobQueueName']}: {order}"


@dataclass(frozen=True)
class RegisterDefinition:
    document: Document
    old: tuple[str, ...] = ()

    def says(self) -> str:
        container = self.document["containerProperties"]
        amounts = {requirement["type"]: requirement["value"] for requirement in container["resourceRequirements"]}
        gpus = f", {amounts['GPU']} GPU" if "GPU" in amounts else ""
        return (f"register job definition {self.document['jobDefinitionName']}: {container['image']}, "
                f"{amounts['VCPU']} vCPUs, {int(amounts['MEMORY']) / 1024:g} GiB{gpus}")  # fmt: skip


Step = (
    CreateBucket
    | CreateServiceRole
    | MakeRole
    | MakeLogGroup
    | CreateSecurityGroup
    | MakeEnvironment
    | MakeQueue
    | RegisterDefinition
)


@dataclass(frozen=True)
class Plan:
    """`notes` are worth a line and refuse nothing."""

    names: Names
    region: str
    account: str
    steps: tuple[Step, ...]
    prices: tuple[Price, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def request(self) -> dict[str, Any]:
        """The exact calls, as `--dry-run` prints them."""
        calls: dict[str, Any] = {"create_compute_environment": [], "update_compute_environment": []}
        for step in self.steps:
            if isinstance(step, MakeEnvironment):
                calls["update_compute_environment" if step.update else "create_compute_environment"].append(
                    update_of(step.document) if step.update else step.document)  # fmt: skip
            elif isinstance(step, MakeQueue):
                calls["update_job_queue" if step.update else "create_job_queue"] = step.document
            elif isinstance(step, RegisterDefinition):
                calls["register_job_definition"] = step.document
        return calls


# ------------------------------------------------------------------------------------------------------------- looking
def make_plan(session: Session, job: JobConfig, root: StoreUrl, clock: Clock, vpc: str = "") -> Plan:
    """The missing parts. Faults of job.toml first; then faults that only the account shows."""
    documents.check(job)
    names = Names(job.job.name)
    vpc_network = network.network(session, vpc)
    group, steps = _group(session, vpc_network.vpc)
    site = Site(session.account, session.region, tuple(vpc_network.subnets.values()), group, image.named(session, job))
    notes = [] if vpc_network.public else ["the subnets give no public address: hosts need a NAT gateway to reach ECS"]
    notes += image.notes(session, site.image)
    results_network = efs.Network(
        vpc_network.vpc, vpc_network.subnets, () if steps else (group,), network.SSH_GROUP if steps else ""
    )
    notes += results_check.check_where(session, job, lambda: results_network)
    if not bucket_exists(session, root.bucket):
        steps.append(CreateBucket(root.bucket))
    secrets = tuple(filter(None, [*job.secrets.values(), job.job.repository_secret]))
    place = job.store.results_place
    results = place if isinstance(place, StoreUrl) else None
    required_roles = roles.required(session, names, root, secrets, job.notify.sns, results)
    steps += [step for role in required_roles if (step := roles.missing(session, role))]
    steps += service_roles.missing(session, service_roles.SPOT_FLEET)  # Batch makes its own itself, these not
    if not _has_log_group(session, names.log_group):
        steps.append(MakeLogGroup(names.log_group, names.tags))
    environment_documents = [documents.environment(job, names, site, spot=True)]
    environment_documents += [documents.environment(job, names, site, spot=False)] if job.batch.on_demand else []
    steps += _environment_steps(session, names, environment_documents)
    steps += _queue_steps(
        session,
        names,
        documents.queue(names, [document["computeEnvironmentName"] for document in environment_documents]),
    )
    steps += _definition_steps(session, names, documents.definition(job, names, site))
    prices = image.prices(session, job, tuple(vpc_network.subnets), clock)
    return Plan(names, session.region, session.account, tuple(steps), prices, tuple(notes))


def _group(session: Session, vpc: str) -> tuple[str, list[Step]]:
    """The group that instances of fleets have too: an EFS that admits them admits containers as well."""
    with translated(f"look for security group {network.SSH_GROUP}"):
        filters = [{"Name": "group-name", "Values": [network.SSH_GROUP]}, {"Name": "vpc-id", "Values": [vpc]}]
        groups = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    if groups:
        return str(groups[0]["GroupId"]), []
    return group_placeholder(network.SSH_GROUP), [CreateSecurityGroup(network.SSH_GROUP, vpc, "")]


def _has_log_group(session: Session, name: str) -> bool:
    with translated(f"look for log group {name}"):
        groups = session.client("logs").describe_log_groups(logGroupNamePrefix=name)["logGroups"]
    return any(group["logGroupName"] == name for group in groups)


def _environment_steps(session: Session, names: Names, required: list[Document]) -> list[Step]:
    existing = environments(session, names)
    steps: list[Step] = []
    for document in required:
        environment = existing.get(document["computeEnvironmentName"])
        if environment is None:
            steps.append(MakeEnvironment(document))
            continue
        _check_ours(environment, "compute environment", document["computeEnvironmentName"], names)
        if environment["status"] == "INVALID":
            raise Conflict(
                _invalid(environment), next_step=f"correct it, `fleetctl batch delete {names.job}`, then create"
            )
        _check_stays(environment, "compute environment", document["computeEnvironmentName"], names)
        if environment["state"] != "ENABLED" or documents.differs(update_of(document)["computeResources"],
                                                            environment["computeResources"]):  # fmt: skip
            steps.append(MakeEnvironment(document, update=True))
    return steps


def _queue_steps(session: Session, names: Names, document: Document) -> list[Step]:
    with translated("look for the job queue"):
        queues = session.client("batch").describe_job_queues(jobQueues=[document["jobQueueName"]])["jobQueues"]
    if not queues:
        return [MakeQueue(document)]
    _check_ours(queues[0], "job queue", document["jobQueueName"], names)
    _check_stays(queues[0], "job queue", document["jobQueueName"], names)
    current = {**queues[0], "computeEnvironmentOrder": [
        {**member, "computeEnvironment": member["computeEnvironment"].rpartition("/")[2]}
        for member in queues[0]["computeEnvironmentOrder"]]}  # fmt: skip
    is_same = not documents.differs({key: document[key] for key in ("state", "computeEnvironmentOrder")}, current)
    return [] if is_same else [MakeQueue(document, update=True)]


def _definition_steps(session: Session, names: Names, document: Document) -> list[Step]:
    active = active_definitions(session, names)
    newest = max(active, key=lambda definition: int(definition["revision"]), default=None)
    compared = {key: document[key] for key in ("containerProperties", "retryStrategy")}
    compared |= {"timeout": document["timeout"]} if "timeout" in document else {}
    is_same = newest is not None and not documents.differs(compared, newest)
    if is_same and newest is not None and bool(newest.get("timeout")) == ("timeout" in document):
        return []
    return [RegisterDefinition(document, tuple(str(definition["jobDefinitionArn"]) for definition in active))]


def environments(session: Session, names: Names) -> dict[str, dict[str, Any]]:
    environment_names = [names.spot, names.on_demand]
    with translated("look for the compute environments"):
        answer = session.client("batch").describe_compute_environments(computeEnvironments=environment_names)
    return {str(environment["computeEnvironmentName"]): environment for environment in answer["computeEnvironments"]}


def active_definitions(session: Session, names: Names) -> list[dict[str, Any]]:
    definitions: list[dict[str, Any]] = []
    page: dict[str, str] = {}
    while True:
        with translated("look for the job definition"):
            answer = session.client("batch").describe_job_definitions(
                jobDefinitionName=names.definition, status="ACTIVE", **page
            )
        definitions += answer["jobDefinitions"]
        if not answer.get("nextToken"):
            return definitions
        page = {"nextToken": answer["nextToken"]}


def _check_ours(resource: dict[str, Any], kind: str, name: str, names: Names) -> None:
    if not is_ours(resource, names):
        raise Conflict(f"there is a {kind} {name} that fleetctl has not made",
                       next_step="delete or rename it, or give the job another name")  # fmt: skip


def _check_stays(resource: dict[str, Any], kind: str, name: str, names: Names) -> None:
    if resource["status"] in ("DELETING", "DELETED"):
        raise Conflict(f"{kind} {name} is being deleted", next_step=f"`fleetctl batch delete {names.job}` waits for"
                       " its end, then create")  # fmt: skip


def is_ours(resource: dict[str, Any], names: Names) -> bool:
    return names.tags.items() <= dict(resource.get("tags") or {}).items()


def update_of(document: Document) -> Document:
    """UpdateComputeEnvironment: all keys of job.toml that can be changed."""
    resources = document["computeResources"]
    changed = ("maxvCpus", "instanceTypes", "subnets", "securityGroupIds", "ec2Configuration", "instanceRole")
    return {"computeEnvironment": document["computeEnvironmentName"], "state": "ENABLED",
            "computeResources": {key: resources[key] for key in changed}}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- making
def carry_out(session: Session, plan: Plan, clock: Clock, say: Say) -> None:
    """Every step in order; environments before the queue that names them, which refuses any that is not valid."""
    batch = session.client("batch")
    arns: dict[str, str] = {}
    usable_at = 0.0
    for step in plan.steps:
        say(step.says())
        match step:
            case CreateBucket(bucket):
                submit.ensure_bucket(session, bucket)
            case CreateSecurityGroup():
                arns |= prerequisites.make(session, step)
            case CreateServiceRole():
                service_roles.create(session, step)
            case MakeRole():
                roles.make(session, step)
                usable_at = clock.monotonic() + prerequisites.IAM_SECONDS
            case MakeLogGroup(name, tags):
                _make_log_group(session, name, tags)
            case MakeEnvironment(document, update):
                if usable_at > clock.monotonic():
                    say("waiting until the new roles are known everywhere")
                    clock.sleep(usable_at - clock.monotonic())
                _make_environment(batch, filled(document, arns), update)
            case MakeQueue(document, update):
                await_environments(session, plan.names, clock, say)
                _make_queue(batch, document, update)
                await_queue(session, plan.names, clock)
            case RegisterDefinition(document, old):
                with translated(f"register job definition {document['jobDefinitionName']}"):
                    batch.register_job_definition(**document)
                for arn in old:
                    with translated(f"retire job definition {arn.rpartition('/')[2]}"):
                        batch.deregister_job_definition(jobDefinition=arn)
    await_environments(session, plan.names, clock, say)


def _make_log_group(session: Session, name: str, tags: dict[str, str]) -> None:
    logs = session.client("logs")
    try:
        with translated(f"create log group {name}"):
            logs.create_log_group(logGroupName=name, tags=tags)
    except SpothealError as error:
        if error.code != "ResourceAlreadyExistsException":
            raise
    with translated(f"set how long log group {name} is kept"):
        logs.put_retention_policy(logGroupName=name, retentionInDays=_LOG_DAYS)


def _make_environment(batch: Any, document: Document, update: bool) -> None:
    name = document["computeEnvironmentName"]
    try:
        with translated(f"{'update' if update else 'create'} compute environment {name}"):
            if update:
                batch.update_compute_environment(**update_of(document))
            else:
                batch.create_compute_environment(**document)
    except SpothealError as error:
        if "already exists" not in error.message:  # an attempt whose reply was lost
            raise


def _make_queue(batch: Any, document: Document, update: bool) -> None:
    name = document["jobQueueName"]
    try:
        with translated(f"{'update' if update else 'create'} job queue {name}"):
            if update:
                batch.update_job_queue(
                    jobQueue=name, state="ENABLED", computeEnvironmentOrder=document["computeEnvironmentOrder"]
                )
            else:
                batch.create_job_queue(**document)
    except SpothealError as error:
        if "already exists" not in error.message:
            raise


def await_environments(session: Session, names: Names, clock: Clock, say: Say) -> None:
    """Until all of the job's are VALID. Fatal with AWS's reason if one is INVALID."""
    start, is_told = clock.monotonic(), False
    while True:
        existing = environments(session, names)
        for environment in existing.values():
            if environment["status"] == "INVALID":
                raise Fatal(
                    _invalid(environment), next_step="correct it, then `fleetctl batch delete` and create it again"
                )
        if all(environment["status"] == "VALID" for environment in existing.values()):
            return
        if not is_told:
            say("waiting until Batch calls the compute environments valid")
            is_told = True
        _pause(clock, start, "the compute environments are not valid yet")


def await_queue(session: Session, names: Names, clock: Clock) -> None:
    start = clock.monotonic()
    while True:
        with translated("look for the job queue"):
            queues = session.client("batch").describe_job_queues(jobQueues=[names.queue])["jobQueues"]
        if queues and queues[0]["status"] == "VALID":
            return
        if queues and queues[0]["status"] == "INVALID":
            raise Fatal(f"job queue {names.queue} is INVALID: {queues[0].get('statusReason', '')}")
        _pause(clock, start, f"job queue {names.queue} is not valid yet")


def _pause(clock: Clock, start: float, state: str) -> None:
    if clock.monotonic() - start > VALID_SECONDS_MAX:
        raise WaitTimedOut(f"{state} after {VALID_SECONDS_MAX:.0f} s", next_step="the same command again goes on")
    clock.sleep(_LOOK_SECONDS)


def _invalid(environment: dict[str, Any]) -> str:
    reason = environment.get("statusReason") or "AWS gives no reason"
    return f"compute environment {environment['computeEnvironmentName']} is INVALID: {reason}"
