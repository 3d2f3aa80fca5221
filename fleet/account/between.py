"""Whether the machines of a run reach each other: their security group needs a rule that admits its own members.

torchrun's rendezvous, gloo and NCCL choose their ports themselves, so the rule opens all ports. Without the rule the
machines wait for each other, and cost, until `nodes_wait` is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, SpothealError
from spotheal.fleet.account import network

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

PORTS_MAX = 65535


@dataclass(frozen=True)
class OpenBetween:
    """The missing rule, in the security group that fleetctl made."""

    group: str
    name: str

    def says(self) -> str:
        return f"open security group {self.name} between its own members, so that the machines reach each other"


def groups_of(data: Mapping[str, Any]) -> set[str]:
    """The groups, by id, of a launch specification or of a launch template's data; empty: the VPC's default one."""
    cards = data.get("NetworkInterfaces") or []
    groups = {str(group) for card in cards for group in card.get("Groups") or []}
    groups |= {str(group) for group in data.get("SecurityGroupIds") or []}
    return groups | {str(group["GroupId"]) for group in data.get("SecurityGroups") or [] if isinstance(group, dict)}


def look(session: Session, launches: Iterable[Mapping[str, Any]], vpc: str, own_group: str = "") -> OpenBetween | None:
    """The missing rule; None if the machines reach each other. `own_group`: the id of fleetctl's group.

    ConfigError if an operator's group lacks the rule, or if the launches have no group in common.
    """
    sets = [groups_of(launch) or {_default(session, vpc)} for launch in launches]
    common = set.intersection(*sets) if sets else set()
    if not common:
        raise ConfigError(
            "the fleet's launch specifications have no security group in common, so their machines cannot meet",
            next_step="name one group in all of them",
        )
    real = sorted(group for group in common if group.startswith("sg-"))
    if real:
        with translated(f"describe {', '.join(real)}"):
            groups = session.client("ec2").describe_security_groups(GroupIds=real)["SecurityGroups"]
        if any(is_open_to_itself(group) for group in groups):
            return None
    if own_group in common:
        return OpenBetween(own_group, network.SSH_GROUP)
    raise ConfigError(
        f"security group {real[0]} does not let its own members in: the machines of the run could not meet",
        next_step=f"`aws ec2 authorize-security-group-ingress --group-id {real[0]} --protocol -1"
        f" --source-group {real[0]}` adds the rule",
    )


def is_open_to_itself(group: Mapping[str, Any]) -> bool:
    for rule in group.get("IpPermissions", []):
        has_pair = any(pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", []))
        tcp = rule.get("IpProtocol") in ("tcp", "6") and rule.get("FromPort", 0) <= 1024
        if has_pair and (rule.get("IpProtocol") == "-1" or (tcp and rule.get("ToPort", 0) >= PORTS_MAX)):
            return True
    return False


def make(session: Session, group: str) -> None:
    """Open `group` between its members; harmless if it is open already."""
    rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group, "Description": "machines of a run (fleetctl)"}]}
    try:
        with translated(f"open {group} between its members"):
            session.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    except SpothealError as error:
        if error.code != "InvalidPermission.Duplicate":
            raise


def _default(session: Session, vpc: str) -> str:
    with translated(f"look for the default security group of {vpc}"):
        filters = [{"Name": "group-name", "Values": ["default"]}, {"Name": "vpc-id", "Values": [vpc]}]
        groups = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    return str(groups[0]["GroupId"]) if groups else ""
