"""The file system for results: planned, made and removed. Each step again is harmless; AWS's answers are the journal.

Ours is known by its creation token and its tags; a file system of others is never changed. Prices are us-east-1's list
prices (EFS pricing page), within some 20 % of those of other regions.
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
        more = {
            "bursting": "nothing besides; slow while little is stored (50 KiB/s for each GiB, after some burst)",
            "elastic": f"${_WRITTEN:.2f} per GB written, ${_READ:.2f} per GB read",
            "provisioned": f"${_PROVISIONED * (self.mibps or 0):,.2f} a month for the throughput, used or not",
        }[self.throughput]
        return f"${_STORED:.2f} a month for each GB stored, {more} (us-east-1's prices)"


def modes(performance: str, throughput: str, mibps: float | None) -> Modes:
    """ConfigError where AWS has no such combination."""
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
        raise ConfigError("--mibps is for provisioned throughput alone", next_step="--throughput provisioned")
    if mibps is not None and not 1 <= mibps <= PROVISIONED_MAX:
        raise ConfigError(f"--mibps must be from 1 to {PROVISIONED_MAX}", next_step="--mibps 100")
    return Modes(performance, throughput, mibps)


@dataclass(frozen=True)
class Network:
    """`subnets`: zone to subnet; `members`: groups of the instances; "" for one that does not exist yet."""

    vpc: str
    subnets: Mapping[str, str]
    members: tuple[str, ...]
    new_group: str = ""  # of the instances, which `request` would make


@dataclass(frozen=True)
class Plan:
    """What is there ("" and () where nothing is) and what is missing."""

    token: str
    modes: Modes
    network: Network
    file_system: str = ""
    group: str = ""
    rules: tuple[str, ...] = ()  # groups of instances that are to be let in
    targets: tuple[str, ...] = ()  # zones that get a mount target

    def says(self) -> list[str]:
        net = self.network
        lines = [] if self.file_system else [f"create file system {self.token}: encrypted, {self.modes.says()}"]
        if net.new_group:
            lines.append(f"create security group {net.new_group} in {net.vpc}, for the instances: nothing open")
        if not self.group:
            lines.append(f"create security group {GROUP} in {net.vpc}, for the mount targets")
        lines += [f"let the instances ({one}) in by TCP {NFS} in {self.group or GROUP}" for one in self.rules]
        if self.targets:
            lines.append(f"create a mount target in {', '.join(self.targets)}")
        return lines


# ------------------------------------------------------------------------------------------------------------- looking
def find(session: Session, name: str) -> dict[str, Any] | None:
    """By its id (`fs-…`) or our name for it; None where there is none."""
    asked = {"FileSystemId": name} if name.startswith("fs-") else {"CreationToken": token_of(name)}
    try:
        with translated(f"look for file system {name}"):
            found = session.client("efs").describe_file_systems(**asked)["FileSystems"]
    except NotFound:
        return None
    return dict(found[0]) if found else None


def token_of(name: str) -> str:
    return f"spotheal-{name}"


def is_ours(system: Mapping[str, Any]) -> bool:
    return any(tag["Key"] == TAG_PURPOSE and tag["Value"] == PURPOSE for tag in system.get("Tags") or [])


def targets_of(session: Session, system: str) -> list[dict[str, Any]]:
    with translated(f"describe the mount targets of {system}"):
        return list(session.client("efs").describe_mount_targets(FileSystemId=system)["MountTargets"])


def look_at_network(session: Session, fleet: FleetConfig | None, vpc: str = "") -> Network:
    """Where the fleet's instances will be: its subnets, one a zone, and their groups; else the VPC's."""
    if fleet is not None and fleet.subnets:
        with translated(f"describe {', '.join(fleet.subnets)}"):
            found = session.client("ec2").describe_subnets(SubnetIds=list(fleet.subnets))["Subnets"]
        vpcs = {str(one["VpcId"]) for one in found}
        if len(vpcs) > 1:
            raise ConfigError(f"{fleet.source} names subnets of several VPCs: {', '.join(sorted(vpcs))}",
                              next_step="a file system has its mount targets in one VPC")  # fmt: skip
        subnets: dict[str, str] = {}
        for one in found:
            subnets.setdefault(str(one["AvailabilityZone"]), str(one["SubnetId"]))
        vpc = vpcs.pop()
    else:
        there = network.network(session, vpc)
        wanted = set(fleet.zones) if fleet is not None else set()
        subnets = {zone: subnet for zone, subnet in there.subnets.items() if not wanted or zone in wanted}
        vpc = there.vpc
        if not subnets:
            raise NotFound(f"{vpc} has no subnet in {', '.join(sorted(wanted))}", next_step="--vpc names another")
    members, new = _members(session, fleet, vpc)
    return Network(vpc, dict(sorted(subnets.items())), members, new)


def _members(session: Session, fleet: FleetConfig | None, vpc: str) -> tuple[tuple[str, ...], str]:
    """The groups of the fleet's instances, and the name of one that is to be made."""
    ids, names = _groups_named(session, fleet)
    if not ids and not names:  # hosts of AWS Batch, for which no fleet's file is needed, have our group
        names = ["default"] if fleet is not None else ["default", network.SSH_GROUP]
    if names:
        filters = [{"Name": "group-name", "Values": names}, {"Name": "vpc-id", "Values": [vpc]}]
        with translated(f"look for security groups {', '.join(names)}"):
            found = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
        ids += [str(one["GroupId"]) for one in found]
        missing = sorted(set(names) - {one["GroupName"] for one in found})
        if missing and missing != [network.SSH_GROUP]:
            raise NotFound(f"there is no security group {missing[0]!r} in {vpc}", next_step="correct the fleet's file")
        return tuple(dict.fromkeys(ids)), missing[0] if missing else ""
    return tuple(dict.fromkeys(ids)), ""


def _groups_named(session: Session, fleet: FleetConfig | None) -> tuple[list[str], list[str]]:
    """Ids and names in the fleet's file and in its launch templates."""
    specs = list(fleet.specifications) if fleet is not None else []
    for config in fleet.template_configs if fleet is not None else []:
        asked = {key: value for key, value in config.get("LaunchTemplateSpecification", {}).items() if key != "Version"}
        version = str(config.get("LaunchTemplateSpecification", {}).get("Version") or "$Default")
        with translated("read the fleet's launch template"):
            answer = session.client("ec2").describe_launch_template_versions(**asked, Versions=[version])
        specs += [one["LaunchTemplateData"] for one in answer["LaunchTemplateVersions"]]
    ids, names = [], []
    for spec in specs:
        groups = spec.get("SecurityGroups") or []
        ids += [str(one["GroupId"]) for one in groups if isinstance(one, Mapping) and one.get("GroupId")]
        names += [str(one["GroupName"]) for one in groups if isinstance(one, Mapping) and not one.get("GroupId")]
        ids += [str(one) for one in spec.get("SecurityGroupIds") or []]
        ids += [str(one) for card in spec.get("NetworkInterfaces") or [] for one in card.get("Groups") or []]
    return list(dict.fromkeys(ids)), list(dict.fromkeys(names))


def plan(session: Session, name: str, wanted: Modes, net: Network, *, chosen: bool) -> Plan:
    """What is missing. `chosen`: the modes were asked for, so that others are a Conflict."""
    system = find(session, name)
    there: list[dict[str, Any]] = []
    if system is not None:
        _check_modes(system, wanted, chosen)
        there = targets_of(session, str(system["FileSystemId"]))
        if elsewhere := sorted({str(one.get("VpcId")) for one in there} - {net.vpc}):
            raise Conflict(
                f"{system['FileSystemId']} has its mount targets in {elsewhere[0]}, the fleet is in {net.vpc}",
                next_step="--name OTHER makes another file system",
            )
    group = _group(session, net.vpc)
    open_for = let_in(group) if group else set()
    return Plan(
        token_of(name), wanted, net,
        file_system=str(system["FileSystemId"]) if system else "",
        group=str(group["GroupId"]) if group else "",
        rules=tuple(one for one in (*net.members, *filter(None, [net.new_group])) if one not in open_for),
        targets=tuple(zone for zone in net.subnets if zone not in {one.get("AvailabilityZoneName") for one in there}),
    )  # fmt: skip


def _check_modes(system: Mapping[str, Any], wanted: Modes, chosen: bool) -> None:
    rate = system.get("ProvisionedThroughputInMibps")
    has = Modes(str(system["PerformanceMode"]), str(system["ThroughputMode"]), rate)
    if chosen and has != wanted:
        raise Conflict(
            f"{system['FileSystemId']} is there already, with {has.says()}",
            next_step="leave the modes out to use it as it is, or --name OTHER for another one",
        )
    if system["LifeCycleState"] == "deleting":
        raise Conflict(f"{system['FileSystemId']} is being deleted", next_step="the same command in a minute")


def _group(session: Session, vpc: str) -> dict[str, Any] | None:
    filters = [{"Name": "group-name", "Values": [GROUP]}, {"Name": "vpc-id", "Values": [vpc]}]
    with translated(f"look for security group {GROUP}"):
        found = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    return dict(found[0]) if found else None


def let_in(group: Mapping[str, Any]) -> set[str]:
    """The groups whose members this one lets in by NFS."""
    rules = [rule for rule in group.get("IpPermissions", []) if is_for_nfs(rule)]
    return {str(pair["GroupId"]) for rule in rules for pair in rule.get("UserIdGroupPairs", [])}


def is_for_nfs(rule: Mapping[str, Any]) -> bool:
    ports = int(rule.get("FromPort", 0)) <= NFS <= int(rule.get("ToPort", 65535))
    return rule.get("IpProtocol") == "-1" or (rule.get("IpProtocol") == "tcp" and ports)


# -------------------------------------------------------------------------------------------------------------- making
def create(session: Session, asked: Plan, clock: Clock, told: Callable[[str], object]) -> str:
    """Carry the plan out; returns the file system's id. `told` hears how far it is."""
    system = asked.file_system or _create_file_system(session, asked)
    group = asked.group or _create_group(session, GROUP, asked.network.vpc, "NFS from spot instances (fleetctl)")
    for member in asked.rules:
        source = member
        if member == asked.network.new_group:
            source = _create_group(session, member, asked.network.vpc, "ssh to spot instances (fleetctl)")
        _open(session, group, source)
    _wait(clock, told, "the file system", lambda: _is_available([find(session, system) or {}]))
    for zone in asked.targets:
        _create_target(session, system, asked.network.subnets[zone], group)
    _wait(clock, told, "the mount targets", lambda: _is_available(targets_of(session, system)))
    return system


def _create_file_system(session: Session, asked: Plan) -> str:
    tags = {TAG_NAME: asked.token, TAG_PURPOSE: PURPOSE}
    rate = {"ProvisionedThroughputInMibps": asked.modes.mibps} if asked.modes.mibps is not None else {}
    try:
        with translated("create the file system"):
            made = session.client("efs").create_file_system(
                CreationToken=asked.token,
                PerformanceMode=asked.modes.performance,
                ThroughputMode=asked.modes.throughput,
                Encrypted=True,
                Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
                **rate,
            )
            return str(made["FileSystemId"])
    except Conflict:  # another command, a moment ago
        found = find(session, asked.token.removeprefix("spotheal-"))
        if found is None:
            raise
        return str(found["FileSystemId"])


def _create_target(session: Session, system: str, subnet: str, group: str) -> None:
    try:
        with translated(f"create a mount target in {subnet}"):
            session.client("efs").create_mount_target(FileSystemId=system, SubnetId=subnet, SecurityGroups=[group])
    except Conflict:  # one a zone, and one is there
        return


def _create_group(session: Session, name: str, vpc: str, says: str) -> str:
    ec2 = session.client("ec2")
    tags = [{"ResourceType": "security-group", "Tags": [{"Key": TAG_NAME, "Value": name}]}]
    try:
        with translated(f"create security group {name}"):
            made = ec2.create_security_group(GroupName=name, VpcId=vpc, Description=says, TagSpecifications=tags)
            return str(made["GroupId"])
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


def _is_available(things: Iterable[Mapping[str, Any]]) -> str:
    """"" when all are available, else how many are."""
    states = [str(one.get("LifeCycleState") or "absent") for one in things]
    if "error" in states:
        raise Conflict("AWS says that it came to an error", next_step="`fleetctl results delete-efs`, and again")
    ready = states.count("available")
    return "" if ready == len(states) else f"{ready} of {len(states)} available"


def _wait(clock: Clock, told: Callable[[str], object], what: str, left: Callable[[], str]) -> None:
    """Until `left` is ""; Retryable after `WAIT_SECONDS_MAX`. Told when it changes, and every 15 s."""
    began, last = clock.monotonic(), float("-inf")
    before = ""
    while said := left():
        now = clock.monotonic()
        if now - began > WAIT_SECONDS_MAX:
            raise Retryable(f"{what}: {said} after {now - began:.0f} s", next_step="the same command goes on")
        if said != before or now - last >= 15:
            told(f"{what}: {said}, {now - began:.0f} s")
            before, last = said, now
        clock.sleep(_POLL_SECONDS)


# ------------------------------------------------------------------------------------------------------------ removing
def delete(session: Session, system: str, vpc: str, clock: Clock, told: Callable[[str], object]) -> str:
    """Mount targets, then the file system, then our group; returns what stayed and why, "" where nothing did."""
    client = session.client("efs")
    for target in targets_of(session, system):
        if target["LifeCycleState"] != "deleting":
            try:
                with translated(f"delete mount target {target['MountTargetId']}"):
                    client.delete_mount_target(MountTargetId=target["MountTargetId"])
            except NotFound:
                continue
    _wait(clock, told, "the mount targets", lambda: f"{left} left" if (left := _count(session, system)) else "")
    with suppress(NotFound), translated(f"delete file system {system}"):
        client.delete_file_system(FileSystemId=system)
    _wait(clock, told, "the file system", lambda: "being deleted" if find(session, system) is not None else "")
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
    """Conflict where it is not one that `create-efs` made."""
    if not is_ours(system):
        name = next((tag["Value"] for tag in system.get("Tags") or [] if tag["Key"] == TAG_NAME), "")
        raise Conflict(
            f"{system['FileSystemId']}{f' ({name})' if name else ''} was not made by fleetctl and is left alone",
            next_step=f"if it is yours: `aws efs delete-file-system --file-system-id {system['FileSystemId']}`",
        )

