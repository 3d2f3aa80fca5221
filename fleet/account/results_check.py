"""Whether the place that `[store] results` names can take results: checked before anything is requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import Conflict, NotFound, PermissionDenied, Retryable
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import EfsUrl, StoreUrl
from spotheal.fleet.account import efs
from spotheal.fleet.files.config import FleetConfig

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

_MAKES = "`fleetctl results create-efs`"


def check(session: Session, job: JobConfig, fleet: FleetConfig) -> tuple[str, ...]:
    """Notes; NotFound, PermissionDenied or Conflict, each with its cure, if results could not be stored."""
    return check_where(session, job, lambda: efs.look_at_network(session, fleet))


def check_where(session: Session, job: JobConfig, network: Callable[[], efs.Network]) -> tuple[str, ...]:
    """Like `check`, for machines in the given network."""
    match job.store.results_place:
        case StoreUrl() as place:
            _check_bucket(session, place)
        case EfsUrl() as place:
            return _check_efs(session, place, network)
    return ()


def probe(session: Session, job: JobConfig, run: str) -> None:
    """Create the folder of a run's results, as S3's console does; PermissionDenied if that is refused."""
    place = job.store.results_place
    if not isinstance(place, StoreUrl):
        return
    folder = place.below(job.job.name, run)
    try:
        with translated(f"write to {folder}/"):
            session.client("s3").put_object(Bucket=folder.bucket, Key=f"{folder.prefix}/", Body=b"")
    except PermissionDenied as error:
        error.next_step = "let the bucket's policy allow s3:PutObject there to you and to the instances' role"
        raise


def _check_bucket(session: Session, place: StoreUrl) -> None:
    try:
        with translated(f"look at bucket {place.bucket} of [store] results"):
            session.client("s3").list_objects_v2(Bucket=place.bucket, MaxKeys=1)  # a HEAD's refusal names no code
    except NotFound as error:
        raise NotFound(
            f"there is no bucket {place.bucket}, which [store] results names",
            next_step=f"`aws s3 mb s3://{place.bucket}`, or correct job.toml",
        ) from error
    except PermissionDenied as error:
        error.next_step = "it is another account's, or closed to you: name your own bucket in [store] results"
        raise


def _check_efs(session: Session, place: EfsUrl, network: Callable[[], efs.Network]) -> tuple[str, ...]:
    """The file system, a mount target in each zone of the fleet, and a rule that lets its instances in."""
    name = place.file_system
    try:
        system = efs.find(session, name)
        targets = efs.targets_of(session, name) if system is not None else []
    except PermissionDenied:
        return (f"whether {name} can be mounted was not checked: these credentials may not look at it",)
    if system is None:
        raise NotFound(
            f"there is no file system {name} in {session.region}, which [store] results names",
            next_step=f"{_MAKES} makes one and prints the line for job.toml",
        )
    if system["LifeCycleState"] != "available":
        raise Retryable(f"{name} is {system['LifeCycleState']}", next_step="the same command in a minute")
    if not targets:
        raise Conflict(f"{name} has no mount target: no instance can mount it", next_step=f"{_MAKES} makes them")
    net = network()
    if net.vpc not in {str(target.get("VpcId")) for target in targets}:
        raise Conflict(
            f"{name} has its mount targets in another VPC than the fleet's, {net.vpc}",
            next_step="a fleet in that VPC, or a file system of its own: `fleetctl results create-efs --name OTHER`",
        )
    _check_rules(session, name, targets, net)
    missing = sorted(set(net.subnets) - {str(target.get("AvailabilityZoneName")) for target in targets})
    if missing:
        return (f"{name} has no mount target in {', '.join(missing)}: from there it is used across zones, which costs"
                f" and is slower; {_MAKES} makes it",)  # fmt: skip
    return ()


def _check_rules(session: Session, name: str, targets: list[dict[str, Any]], net: efs.Network) -> None:
    groups: set[str] = set()
    for target in targets:
        with translated(f"look at the security groups of {target['MountTargetId']}"):
            answer = session.client("efs").describe_mount_target_security_groups(MountTargetId=target["MountTargetId"])
        groups |= set(answer["SecurityGroups"])
    with translated(f"look at security groups {', '.join(sorted(groups))}"):
        descriptions = session.client("ec2").describe_security_groups(GroupIds=sorted(groups))["SecurityGroups"]
    let_in = set().union(*(efs.let_in(group) for group in descriptions))
    if net.new_group or not (let_in & set(net.members) or any(_has_addresses(group) for group in descriptions)):
        members = net.new_group or ", ".join(net.members)
        raise Conflict(
            f"no rule lets the fleet's instances ({members}) reach {name} by TCP {efs.NFS}",
            next_step=f"{_MAKES} adds it to what it made; else `aws ec2 authorize-security-group-ingress --group-id "
            f"{min(groups)} --protocol tcp --port {efs.NFS} --source-group {next(iter(net.members), 'GROUP')}`",
        )


def _has_addresses(group: Mapping[str, Any]) -> bool:
    """Whether a rule admits addresses: those of the instances may be among them, which cannot be known here."""
    return any(
        rule.get("IpRanges") or rule.get("Ipv6Ranges") or rule.get("PrefixListIds")
        for rule in group.get("IpPermissions", [])
        if efs.is_for_nfs(rule)
    )
