"""The file system for results: planned, created and deleted. Each step may run twice; AWS's answers show the progress.

Our file system has a creation token and tags; other file systems are never changed. Prices are us-east-1's list
prices (EFS pricing page), within about 20 % of those of other regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, Retryable, SpothealError
from spotheal.agent.protocol.names import TAG_NAME, TAG_PURPOSE
from spotheal.fleet.account import network
from spotheal.fleet.files.config import FleetConfig

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

NFS = 2049
GROUP = "spotheal-efs"
PURPOSE = "results"
PERFORMANCES = ("generalPurpose", "maxIO")
THROUGHPUTS = ("bursting", "elastic", "provisioned")
PROVISIONED_MAX = 3414
WAIT_SECONDS_MAX = 600.0  # a mount target takes about a minute and a half
_POLL_SECONDS = 3.0
_STORED, _READ, _WRITTEN, _PROVISIONED = 0.30, 0.03, 0.06, 6.00  # dollars: GB-month, GB, GB, MiB/s-month


@dataclass(frozen=True)
class Modes:
    performance: str
    throughput: str
    mibps: float | None = None

    def says(self) -> str:
        rate = f" with {self.mibps:g} MiB/s" if self.mibps else ""
        return f"{self.performance}, {self.throughput}{rate}"

    def price(self) -> str:
        throughput_price = {
            "bursting": "nothing else; slow while little is stored (50 KiB/s for each GiB, after a burst)",
            "elastic": f"${_WRITTEN:.2f} per GB written, ${_READ:.2f} per GB read",
            "provisioned": f"${_PROVISIONED * (self.mibps or 0):,.2f} a month for the throughput, used or not",
        }[self.throughput]
        return f"${_STORED:.2f} a month for each GB stored, {throughput_price} (us-east-1's prices)"


def modes(performance: str, throughput: str, mibps: float | None) -> Modes:
    """ConfigError if AWS has no such combination."""
    for option, value, legal in (
        ("--performance", performance, PERFORMANCES),
        ("--throughput", throughput or THROUGHPUTS[0], THROUGHPUTS),
    ):
        if value not in legal:
            raise ConfigError(f"{option} {value!r} is none of {', '.join(legal)}", next_step=f"{option} {legal[0]}")
    throughput = throughput or ("provisioned" if mibps else "bursting" if performance == "maxIO" else "elastic")
    if performance == "maxIO" and throughput == "elastic":
        raise ConfigError("elastic throughput needs --performance generalPurpose", next_step="--throughput bursting")
    if throughput == "provisioned" and mibps is None:
        raise ConfigError("provisioned throughput needs a rate", next_step="--mibps 100")
    if throughput != "provisioned" and mibps is not None:
        raise ConfigError("--mibps is for provisioned throughput only", next_step="--throughput provisioned")
    if mibps is not None and not 1 <= mibps <= PROVISIONED_MAX:
        raise ConfigError(f"--mibps must be from 1 to {PROVISIONED_MAX}", next_step="--mibps 100")
    return Modes(performance, throughput, mibps)


@dataclass(frozen=True)
class Network:
    """`subnets`: zone to subnet; `members`: the existing security groups of the instances."""

    vpc: str
    subnets: Mapping[str, str]
    members: tuple[str, ...]
    new_group: str = ""  # the instances' group that `request` would create


@dataclass(frozen=True)
class Plan:
    """What exists ("" for none) and what is missing."""

    token: str
    modes: Modes
    network: Network
    file_system: str = ""
    group: str = ""
    rules: tuple[str, ...] = ()  # the instances' groups that need a rule
    targets: tuple[str, ...] = ()  # zones that get a mount target

    def says(self) -> list[str]:
        net = self.network
        lines = [] if self.file_system else [f"create file system {self.token}: encrypted, {self.modes.says()}"]
        if net.new_group:
            lines.append(f"create security group {net.new_group} in {net.vpc}, for the instances: nothing open")
        if not self.group:
            lines.append(f"create security group {GROUP} in {net.vpc}, for the mount targets")
        lines += [f"let the instances ({group}) in by TCP {NFS} in {self.group or GROUP}" for group in self.rules]
        if self.targets:
            lines.append(f"create a mount target in {', '.join(self.targets)}")
        return lines


# ------------------------------------------------------------------------------------------------------------- looking
def find(session: Session, name: str) -> dict[str, Any] | None:
    """A file system by its id (`fs-…`) or our name for it; None if it does not exist."""
    selector = {"FileSystemId": name} if name.startswith("fs-") else {"CreationToken": token_of(name)}
    try:
        with translated(f"look for file system {name}"):
            systems = session.client("efs").describe_file_systems(**selector)["FileSystems"]
    except NotFound:
        return None
    return dict(systems[0]) if systems else None


def token_of(name: str) -> str:
    return f"spotheal-{name}"


def is_ours(system: Mapping[str, Any]) -> bool:
    return any(tag["Key"] == TAG_PURPOSE and tag["Value"] == PURPOSE for tag in system.get("Tags") or [])


def targets_of(session: Session, system: str) -> list[dict[str, Any]]:
    with translated(f"describe the mount targets of {system}"):
        return list(session.client("efs").describe_mount_targets(FileSystemId=system)["MountTargets"])


def look_at_network(session: Session, fleet: FleetConfig | None, vpc: str = "") -> Network:
    """The network of the fleet's instances: its subnets, one per zone, and their groups; else the VPC's."""
    if fleet is not None and fleet.subnets:
        with translated(f"describe {', '.join(fleet.subnets)}"):
            descriptions = session.client("ec2").describe_subnets(SubnetIds=list(fleet.subnets))["Subnets"]
        vpcs = {str(description["VpcId"]) for description in descriptions}
        if len(vpcs) > 1:
            raise ConfigError(f"{fleet.source} names subnets of several VPCs: {', '.join(sorted(vpcs))}",
                              next_step="a file system has its mount targets in one VPC")  # fmt: skip
        subnets: dict[str, str] = {}
        for description in descriptions:
            subnets.setdefault(str(description["AvailabilityZone"]), str(description["SubnetId"]))
        vpc = vpcs.pop()
    else:
        vpc_network = network.network(session, vpc)
        zones = set(fleet.zones) if fleet is not None else set()
        subnets = {zone: subnet for zone, subnet in vpc_network.subnets.items() if not zones or zone in zones}
        vpc = vpc_network.vpc
        if not subnets:
            raise NotFound(f"{vpc} has no subnet in {', '.join(sorted(zones))}", next_step="--vpc names another")
    members, new = _members(session, fleet, vpc)
    return Network(vpc, dict(sorted(subnets.items())), members, new)


def _members(session: Session, fleet: FleetConfig | None, vpc: str) -> tuple[tuple[str, ...], str]:
    """The groups of the fleet's instances, and the name of a group that does not exist yet."""
    ids, names = _groups_named(session, fleet)
    if not ids and not names:  # AWS Batch needs no fleet's file; its hosts have our group
        names = ["default"] if fleet is not None else ["default", network.SSH_GROUP]
    if names:
        filters = [{"Name": "group-name", "Values": names}, {"Name": "vpc-id", "Values": [vpc]}]
        with translated(f"look for security groups {', '.join(names)}"):
            groups = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
        ids += [str(group["GroupId"]) for group in groups]
        missing = sorted(set(names) - {group["GroupName"] for group in groups})
        if missing and missing != [network.SSH_GROUP]:
            raise NotFound(f"there is no security group {missing[0]!r} in {vpc}", next_step="correct the fleet's file")
        return tuple(dict.fromkeys(ids)), missing[0] if missing else ""
    return tuple(dict.fromkeys(ids)), ""


def _groups_named(session: Session, fleet: FleetConfig | None) -> tuple[list[str], list[str]]:
    """Ids and names in the fleet's file and in its launch templates."""
    specs = list(fleet.specifications) if fleet is not None else []
    for config in fleet.template_configs if fleet is not None else []:
        specification = config.get("LaunchTemplateSpecification", {})
        selector = {key: value for key, value in specification.items() if key != "Version"}
        version = str(specification.get("Version") or "$Default")
        with translated("read the fleet's launch template"):
            answer = session.client("ec2").describe_launch_template_versions(**selector, Versions=[version])
        specs += [template["LaunchTemplateData"] for template in answer["LaunchTemplateVersions"]]
    ids, names = [], []
    for spec in specs:
        groups = spec.get("SecurityGroups") or []
        ids += [str(group["GroupId"]) for group in groups if isinstance(group, Mapping) and group.get("GroupId")]
        unnumbered = [group for group in groups if isinstance(group, Mapping) and not group.get("GroupId")]
        names += [str(group["GroupName"]) for group in unnumbered]
        ids += [str(group) for group in spec.get("SecurityGroupIds") or []]
        ids += [str(group) for card in spec.get("NetworkInterfaces") or [] for group in card.get("Groups") or []]
    return list(dict.fromkeys(ids)), list(dict.fromkeys(names))


def plan(session: Session, name: str, modes: Modes, net: Network, *, chosen: bool) -> Plan:
    """What is missing. `chosen`: the operator named the modes, so that other modes are a Conflict."""
    system = find(session, name)
    targets: list[dict[str, Any]] = []
    if system is not None:
        _check_modes(system, modes, chosen)
        targets = targets_of(session, str(system["FileSystemId"]))
        if elsewhere := sorted({str(target.get("VpcId")) for target in targets} - {net.vpc}):
            raise Conflict(
                f"{system['FileSystemId']} has its mount targets in {elsewhere[0]}, the fleet is in {net.vpc}",
                next_step="--name OTHER makes another file system",
            )
    group = _group(session, net.vpc)
    open_for = let_in(group) if group else set()
    zones = {target.get("AvailabilityZoneName") for target in targets}
    return Plan(
        token_of(name), modes, net,
        file_system=str(system["FileSystemId"]) if system else "",
        group=str(group["GroupId"]) if group else "",
        rules=tuple(member for member in (*net.members, *filter(None, [net.new_group])) if member not in open_for),
        targets=tuple(zone for zone in net.subnets if zone not in zones),
    )  # fmt: skip


def _check_modes(system: Mapping[str, Any], modes: Modes, chosen: bool) -> None:
    rate = system.get("ProvisionedThroughputInMibps")
    has = Modes(str(system["PerformanceMode"]), str(system["ThroughputMode"]), rate)
    if chosen and has != modes:
        raise Conflict(
            f"{system['FileSystemId']} is there already, with {has.says()}",
            next_step="leave the modes out to use it as it is, or --name OTHER for another one",
        )
    if system["LifeCycleState"] == "deleting":
        raise Conflict(f"{system['FileSystemId']} is being deleted", next_step="the same command in a minute")


def _group(session: Session, vpc: str) -> dict[str, Any] | None:
    filters = [{"Name": "group-name", "Values": [GROUP]}, {"Name": "vpc-id", "Values": [vpc]}]
    with translated(f"look for security group {GROUP}"):
        groups = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    return dict(groups[0]) if groups else None


def let_in(group: Mapping[str, Any]) -> set[str]:
    """The groups whose members `group` lets in by NFS."""
    rules = [rule for rule in group.get("IpPermissions", []) if is_for_nfs(rule)]
    return {str(pair["GroupId"]) for rule in rules for pair in rule.get("UserIdGroupPairs", [])}


def is_for_nfs(rule: Mapping[str, Any]) -> bool:
    ports = int(rule.get("FromPort", 0)) <= NFS <= int(rule.get("ToPort", 65535))
    return rule.get("IpProtocol") == "-1" or (rule.get("IpProtocol") == "tcp" and ports)


# -------------------------------------------------------------------------------------------------------------- making
def create(session: Session, plan: Plan, clock: Clock, say: Callable[[str], object]) -> str:
    """Carry the plan out; returns the file system's id. `say` gets the progress."""
    system = plan.file_system or _create_file_system(session, plan)
    group = plan.group or _create_group(session, GROUP, plan.network.vpc, "NFS from spot instances (fleetctl)")
    for member in plan.rules:
        source = member
        if member == plan.network.new_group:
            source = _create_group(session, member, plan.network.vpc, "ssh to spot instances (fleetctl)")
        _open(session, group, source)
    _wait(clock, say, "the file system", lambda: _pending([find(session, system) or {}]))
    for zone in plan.targets:
        _create_target(session, system, plan.network.subnets[zone], group)
    _wait(clock, say, "the mount targets", lambda: _pending(targets_of(session, system)))
    return system


def _create_file_system(session: Session, plan: Plan) -> str:
    tags = {TAG_NAME: plan.token, TAG_PURPOSE: PURPOSE}
    rate = {"ProvisionedThroughputInMibps": plan.modes.mibps} if plan.modes.mibps is not None else {}
    try:
        with translated("create the file system"):
            answer = session.client("efs").create_file_system(
                CreationToken=plan.token,
                PerformanceMode=plan.modes.performance,
                ThroughputMode=plan.modes.throughput,
                Encrypted=True,
                Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
                **rate,
            )
            return str(answer["FileSystemId"])
    except Conflict:  # another command, a moment ago
        system = find(session, plan.token.removeprefix("spotheal-"))
        if system is None:
            raise
        return str(system["FileSystemId"])


def _create_target(session: Session, system: str, subnet: str, group: str) -> None:
    try:
        with translated(f"create a mount target in {subnet}"):
            session.client("efs").create_mount_target(FileSystemId=system, SubnetId=subnet, SecurityGroups=[group])
    except Conflict:  # the zone has its mount target already
        return


def _create_group(session: Session, name: str, vpc: str, says: str) -> str:
    ec2 = session.client("ec2")
    tags = [{"ResourceType": "security-group", "Tags": [{"Key": TAG_NAME, "Value": name}]}]
    try:
        with translated(f"create security group {name}"):
            answer = ec2.create_security_group(GroupName=name, VpcId=vpc, Description=says, TagSpecifications=tags)
            return str(answer["GroupId"])
    except SpothealError as error:
        if error.code != "InvalidGroup.Duplicate":
            raise
        filters = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
        with translated(f"look for security group {name}"):
            return str(ec2.describe_security_groups(Filters=filters)["SecurityGroups"][0]["GroupId"])


def _open(session: Session, group: str, member: str) -> None:
    pair = {"GroupId": member, "Description": "fleetctl"}
    rule = {"IpProtocol": "tcp", "FromPort": NFS, "ToPort": NFS, "UserIdGroupPairs": [pair]}
    try:
        with translated(f"let {member} in by TCP {NFS} in {group}"):
            session.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    except SpothealError as error:
        if error.code != "InvalidPermission.Duplicate":
            raise


def _pending(resources: Iterable[Mapping[str, Any]]) -> str:
    """"" if all are available, else how many are."""
    states = [str(resource.get("LifeCycleState") or "absent") for resource in resources]
    if "error" in states:
        raise Conflict("AWS reports an error", next_step="`fleetctl results delete-efs`, then the same command")
    ready = states.count("available")
    return "" if ready == len(states) else f"{ready} of {len(states)} available"


def _wait(clock: Clock, say: Callable[[str], object], name: str, pending: Callable[[], str]) -> None:
    """Wait until `pending` returns ""; Retryable after `WAIT_SECONDS_MAX`. Says it at each change and every 15 s."""
    start, last_time = clock.monotonic(), float("-inf")
    last_state = ""
    while state := pending():
        moment = clock.monotonic()
        if moment - start > WAIT_SECONDS_MAX:
            raise Retryable(f"{name}: {state} after {moment - start:.0f} s", next_step="the same command goes on")
        if state != last_state or moment - last_time >= 15:
            say(f"{name}: {state}, {moment - start:.0f} s")
            last_state, last_time = state, moment
        clock.sleep(_POLL_SECONDS)


# ------------------------------------------------------------------------------------------------------------ removing
def delete(session: Session, system: str, vpc: str, clock: Clock, say: Callable[[str], object]) -> str:
    """Delete mount targets, the file system and our group; returns what stayed and why, "" if nothing stayed."""
    client = session.client("efs")
    for target in targets_of(session, system):
        if target["LifeCycleState"] != "deleting":
            try:
                with translated(f"delete mount target {target['MountTargetId']}"):
                    client.delete_mount_target(MountTargetId=target["MountTargetId"])
            except NotFound:
                continue
    _wait(clock, say, "the mount targets", lambda: f"{count} left" if (count := _count(session, system)) else "")
    with suppress(NotFound), translated(f"delete file system {system}"):
        client.delete_file_system(FileSystemId=system)
    _wait(clock, say, "the file system", lambda: "being deleted" if find(session, system) is not None else "")
    return _delete_group(session, vpc) if vpc else ""


def _count(session: Session, system: str) -> int:
    try:
        return len(targets_of(session, system))
    except NotFound:
        return 0


def _delete_group(session: Session, vpc: str) -> str:
    group = _group(session, vpc)
    if group is None:
        return ""
    try:
        with translated(f"delete security group {GROUP}"):
            session.client("ec2").delete_security_group(GroupId=group["GroupId"])
    except SpothealError as error:
        return f"security group {GROUP} stays: {error.message}"
    return ""


def tags_checked(system: Mapping[str, Any]) -> None:
    """Conflict if `create-efs` did not make this file system."""
    if not is_ours(system):
        name = next((tag["Value"] for tag in system.get("Tags") or [] if tag["Key"] == TAG_NAME), "")
        raise Conflict(
            f"{system['FileSystemId']}{f' ({name})' if name else ''} was not made by fleetctl and is left alone",
            next_step=f"if it is yours: `aws efs delete-file-system --file-system-id {system['FileSystemId']}`",
        )

