"""What a request needs in the account: checks what is missing, and creates it. Idempotent, each resource by its name.

A new security group has no id before it is created: until then `group_placeholder` stands for it in the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied, SpothealError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import TAG_NAME, StoreUrl
from spotheal.fleet.account import between, network, results_check, roles, service_roles
from spotheal.fleet.account.between import OpenBetween
from spotheal.fleet.account.roles import CreateFleetRole, CreateInstanceRole, CreateTrainerRole
from spotheal.fleet.account.service_roles import CreateServiceRole
from spotheal.fleet.files.config import FleetConfig
from spotheal.iam import job_roles

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

IAM_SECONDS = 10.0  # until a new role is known everywhere (IAM is eventually consistent)


@dataclass(frozen=True)
class CreateSecurityGroup:
    """If `ssh_from` is "", the group opens nothing."""

    name: str
    vpc: str
    ssh_from: str

    def says(self) -> str:
        opened = f"ssh from {self.ssh_from} only" if self.ssh_from else "nothing open"
        return f"create security group {self.name} in {self.vpc}: {opened}"


@dataclass(frozen=True)
class OpenSsh:
    """The group exists, but does not know this address yet (the operator's network has changed)."""

    group: str
    name: str
    ssh_from: str

    def says(self) -> str:
        return f"open ssh from {self.ssh_from} in security group {self.name}"


@dataclass(frozen=True)
class ImportKey:
    name: str
    file: Path

    def says(self) -> str:
        return f"import key pair {self.name} from {self.file}"


Step = (
    CreateInstanceRole
    | CreateFleetRole
    | CreateServiceRole
    | CreateTrainerRole
    | CreateSecurityGroup
    | OpenSsh
    | OpenBetween
    | ImportKey
)
STEPS = get_args(Step)


@dataclass(frozen=True)
class Found:
    """`fleet` is the fleet's file with groups by id; `notes` say what could not be checked."""

    steps: tuple[Step, ...]
    fleet: FleetConfig
    notes: tuple[str, ...] = ()


def group_placeholder(name: str) -> str:
    return f"<the new {name}>"


def look(session: Session, fleet: FleetConfig, job: JobConfig, store: StoreUrl, *, sweep: bool = False) -> Found:
    """What is missing in the account for this fleet."""
    steps: list[Step] = []
    notes: list[str] = []
    try:
        has_topic = job.notify.sns and not job.notify.sns.rpartition(":")[2].startswith("spotheal")
        elsewhere = isinstance(job.store.results_place, StoreUrl)
        switches = {
            "rescue": seconds(job.fleet.on_demand_after), "sweeps": sweep, "topic": has_topic, "results": elsewhere,
            "key": job.volume.kms_key,
        }  # fmt: skip
        additions = [name for name, is_on in switches.items() if is_on]
        steps += _missing_roles(session, fleet, job, store, additions)
    except PermissionDenied as error:
        if not error.code:
            raise
        notes.append("whether the roles exist was not checked: these credentials may not read IAM")
    steps += _missing_keys(session, fleet, job)
    groups, group_steps = _groups(session, fleet, job)
    notes += results_check.check(session, job, fleet)
    return Found((*steps, *group_steps), _with_groups(fleet, groups), tuple(notes))


def look_between(session: Session, fleet: FleetConfig, templates: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """The step that opens the network between a run's machines. `fleet` has its groups by id; `templates`: the data of
    its launch templates."""
    specs = [spec for spec in fleet.specifications if isinstance(spec, dict)]
    named = {group for spec in specs for group in between.groups_of(spec)}
    ours = group_placeholder(network.SSH_GROUP)
    if ours not in named and named:
        filters = [{"Name": "group-name", "Values": [network.SSH_GROUP]}]
        with translated(f"look for security group {network.SSH_GROUP}"):
            groups = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
        ours = next((str(group["GroupId"]) for group in groups if group["GroupId"] in named), "")
    step = between.look(session, [*specs, *templates], _vpc(session, fleet), ours)
    return () if step is None else (step,)


def _missing_roles(
    session: Session, fleet: FleetConfig, job: JobConfig, store: StoreUrl, additions: list[str]
) -> list[Step]:
    steps: list[Step] = []
    place = job.store.results_place
    arguments: dict[str, dict[str, Any]] = {
        "topic": {"topic": job.notify.sns}, "results": {"results": place if isinstance(place, StoreUrl) else None},
        "key": {"key": job.volume.kms_key},
    }  # fmt: skip
    role = str(fleet.document.get("IamFleetRole") or "").rpartition("/")[2]
    if role and job.fleet.engine == "spot-fleet" and (fleet_role := roles.missing_fleet_role(session, role)):
        steps.append(fleet_role)
    is_spot_fleet = job.fleet.engine == "spot-fleet"
    steps += service_roles.missing(session, service_roles.SPOT_FLEET if is_spot_fleet else service_roles.EC2_FLEET)
    profiles = [spec.get("IamInstanceProfile") or {} for spec in fleet.specifications]
    names = [str(profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2]) for profile in profiles]
    for name in dict.fromkeys(filter(None, names)):
        if (profile_job := job_roles.job_of(name)) and profile_job != job.job.name:
            raise ConfigError(
                f"{fleet.source}: instance profile {name} is only for job {profile_job}, and this is {job.job.name}",
                next_step=f"write {job_roles.job_role(job.job.name)}, which is made for you, or {roles.INSTANCE_ROLE}"
                " for all jobs",
            )
        if instance_role := roles.missing_instance_role(session, name, store):
            steps.append(instance_role)
        steps += [step for addition in additions if (step := roles.missing_addition(
            session, name, store, addition, **arguments.get(addition, {})))]  # fmt: skip
    if job.cage.trainer_policy and (
        role_of_trainer := roles.missing_trainer_role(
            session, filter(None, dict.fromkeys(names)), job.job.name, job.cage.trainer_policy
        )
    ):
        steps.append(role_of_trainer)
    roles.check_room(session, steps)
    return steps


def _missing_keys(session: Session, fleet: FleetConfig, job: JobConfig) -> list[Step]:
    names = list(dict.fromkeys(spec["KeyName"] for spec in fleet.specifications if spec.get("KeyName")))
    if not names:
        return []
    with translated(f"look for key pairs {', '.join(names)}"):
        filters = [{"Name": "key-name", "Values": names}]
        existing = {pair["KeyName"] for pair in session.client("ec2").describe_key_pairs(Filters=filters)["KeyPairs"]}
    steps: list[Step] = []
    for name in names:
        if name in existing:
            continue
        file = Path(job.fleet.public_key).expanduser() if job.fleet.public_key else None
        if file is None or not file.is_file():
            raise NotFound(
                f"there is no key pair {name!r} in {session.region}" + (f", and no file {file}" if file else ""),
                next_step="name a public key in [fleet] public_key of job.toml, or take KeyName out of "
                f"{fleet.source}: `fleetctl ssh` works without one",
            )
        steps.append(ImportKey(name, file))
    return steps


def _groups(session: Session, fleet: FleetConfig, job: JobConfig) -> tuple[dict[str, str], list[Step]]:
    """Ids by name, and the steps that create the missing groups."""
    named = [group["GroupName"] for spec in fleet.specifications for group in spec.get("SecurityGroups") or []
             if group.get("GroupName") and not group.get("GroupId")]  # fmt: skip
    names = list(dict.fromkeys(named))
    if not names:
        return {}, []
    ec2 = session.client("ec2")
    vpc = _vpc(session, fleet)
    with translated(f"look for security groups {', '.join(names)}"):
        filters = [{"Name": "group-name", "Values": names}, {"Name": "vpc-id", "Values": [vpc]}]
        answer = ec2.describe_security_groups(Filters=filters)
    existing = {group["GroupName"]: group for group in answer["SecurityGroups"]}
    ids = {name: str(group["GroupId"]) for name, group in existing.items()}
    steps: list[Step] = []
    ssh_from = network.cidr(job.fleet.ssh_from) if job.fleet.ssh_from else ""
    for name in names:
        if name not in existing and name != network.SSH_GROUP:
            raise NotFound(
                f"there is no security group {name!r} in {vpc}",
                next_step=f"correct {fleet.source}, or write {network.SSH_GROUP}, which is made for you",
            )
        if name not in existing:
            ids[name] = group_placeholder(name)
            steps.append(CreateSecurityGroup(name, vpc, ssh_from))
        elif name == network.SSH_GROUP and ssh_from and not _is_open(existing[name], ssh_from):
            steps.append(OpenSsh(ids[name], name, ssh_from))
    return ids, steps


def _vpc(session: Session, fleet: FleetConfig) -> str:
    """The VPC of the fleet's first subnet, else the default VPC."""
    if fleet.subnets:
        with translated(f"describe {fleet.subnets[0]}"):
            answer = session.client("ec2").describe_subnets(SubnetIds=[fleet.subnets[0]])
        return str(answer["Subnets"][0]["VpcId"])
    return network.network(session).vpc


def _is_open(group: Mapping[str, Any], ssh_from: str) -> bool:
    return any(
        rule.get("FromPort") == 22
        and ssh_from in [address.get("CidrIp") or address.get("CidrIpv6") for address in _ranges(rule)]
        for rule in group.get("IpPermissions", [])
    )  # fmt: skip


def _ranges(rule: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*rule.get("IpRanges", []), *rule.get("Ipv6Ranges", [])]


def _with_groups(fleet: FleetConfig, groups: Mapping[str, str]) -> FleetConfig:
    """The fleet with ids in place of names: with a subnet EC2 accepts no name of a group."""
    document = json.loads(json.dumps(fleet.document))
    for spec in document.get("LaunchSpecifications") or []:
        for group in spec.get("SecurityGroups") or []:
            if group.get("GroupName") in groups and not group.get("GroupId"):
                group["GroupId"] = groups[group.pop("GroupName")]
    return replace(fleet, document=document)


# ---------------------------------------------------------------------------------------------------------------- make
def make(session: Session, step: Step) -> dict[str, str]:
    """Carry out a step; returns the values of its placeholders."""
    match step:
        case CreateInstanceRole():
            roles.create_instance_role(session, step)
        case CreateFleetRole():
            roles.create_fleet_role(session, step)
        case CreateServiceRole():
            service_roles.create(session, step)
        case CreateTrainerRole():
            roles.create_trainer_role(session, step)
        case CreateSecurityGroup():
            return {group_placeholder(step.name): _create_group(session, step)}
        case OpenSsh(group, _, ssh_from):
            _open(session, group, ssh_from)
        case OpenBetween(group):
            between.make(session, group)
        case ImportKey():
            _import_key(session, step)
    return {}


def filled(value: Any, values: Mapping[str, str]) -> Any:
    """`value` with the placeholders in `values` replaced, at any depth."""
    if isinstance(value, str):
        return values.get(value, value)
    if isinstance(value, dict):
        return {name: filled(item, values) for name, item in value.items()}
    return [filled(item, values) for item in value] if isinstance(value, list) else value


def _create_group(session: Session, step: CreateSecurityGroup) -> str:
    ec2 = session.client("ec2")
    tags = [{"ResourceType": "security-group", "Tags": [{"Key": TAG_NAME, "Value": step.name}]}]
    try:
        with translated(f"create security group {step.name}"):
            answer = ec2.create_security_group(
                GroupName=step.name, VpcId=step.vpc, Description="ssh to spot instances (fleetctl)",
                TagSpecifications=tags,
            )  # fmt: skip
            group = str(answer["GroupId"])
    except SpothealError as error:
        if error.code != "InvalidGroup.Duplicate":
            raise
        with translated(f"look for security group {step.name}"):
            filters = [{"Name": "group-name", "Values": [step.name]}, {"Name": "vpc-id", "Values": [step.vpc]}]
            group = str(ec2.describe_security_groups(Filters=filters)["SecurityGroups"][0]["GroupId"])
    if step.ssh_from:
        _open(session, group, step.ssh_from)
    return group


def _open(session: Session, group: str, ssh_from: str) -> None:
    kind, key = ("Ipv6Ranges", "CidrIpv6") if ":" in ssh_from else ("IpRanges", "CidrIp")
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, kind: [{key: ssh_from, "Description": "fleetctl"}]}
    try:
        with translated(f"open ssh from {ssh_from} in {group}"):
            session.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    except SpothealError as error:
        if error.code != "InvalidPermission.Duplicate":
            raise


def _import_key(session: Session, step: ImportKey) -> None:
    try:
        material = step.file.read_bytes()
    except OSError as fault:
        raise ConfigError(f"{step.file} cannot be read: {fault}", next_step="correct [fleet] public_key") from None
    try:
        with translated(f"import key pair {step.name}"):
            session.client("ec2").import_key_pair(KeyName=step.name, PublicKeyMaterial=material)
    except SpothealError as error:
        if error.code != "InvalidKeyPair.Duplicate":
            raise
