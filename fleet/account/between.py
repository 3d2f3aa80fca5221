"""Whether the machines of a run reach each other: a rule of their security group that lets its own members in.

torchrun's rendezvous, gloo and NCCL choose their ports themselves, so the rule is for all of them. Without it the
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
    """In the group that is fleetctl's own."""

    group: str
    name: str

    def says(self) -> str:
        return f"open security group {self.name} between its own members, so that the machines reach each other"


def groups_of(data: Mapping[str, Any]) -> set[str]:
    """The groups, by id, of a launch specification or of a launch template's data; empty: the VPC's default one."""
    cards = data.get("NetworkInterfaces") or []
    found = {str(group) for card in cards for group in card.get("Groups") or []}
    found |= {str(group) for group in data.get("SecurityGroupIds") or []}
    return found | {str(group["GroupId"]) for group in data.get("SecurityGroups") or [] if isinstance(group, dict)}


def look(session: Session, launches: Iterable[Mapping[str, Any]], vpc: str, own: str = "") -> OpenBetween | None:
    """What must be opened: None where the machines reach each other. `own`: id of the group that is fleetctl's.

    ConfigError where a group of the operator's lacks the rule, or no group is common to all launches.
    """
    sets = [groups_of(one) or {_default(session, vpc)} for one in launches]
    common = set.intersection(*sets) if sets else set()
    if not common:
        raise ConfigError(
            "the fleet's launch specifications have no security group in common, and so their machines cannot meet",
            next_step="name one group in all of them",
        )
    real = sorted(group for group in common if group.startswith("sg-"))
    if real:
        with translated(f"describe {', '.join(real)}"):
            found = session.client("ec2").describe_security_groups(GroupIds=real)["SecurityGroups"]
        if any(is_open_to_itself(group) for group in found):
            return None
    if own in common:
        return OpenBetween(own, network.SSH_GROUP)
    raise ConfigError(
        f"security group {real[0]} does not let its own members in: the machines of the run could not meet",
        next_step=f"`aws ec2 authorize-security-group-ingress --group-id {real[0]} --protocol -1"
        f" --source-group {real[0]}` adds the rule",
    )


def is_open_to_itself(group: Mapping[str, Any]) -> bool:
    for rule in group.get("IpPermissions", []):
        own = any(pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", []))
        tcp = rule.get("IpProtocol") in ("tcp", "6") and rule.get("FromPort", 0) <= 1024
        if own and (rule.get("IpProtocol") == "-1" or (tcp and rule.get("ToPort", 0) >= PORTS_MAX)):
            return True
    return False


def make(session: Session, group: str) -> None:
    """Open `group` between its members; again is harmless."""
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
        found = session.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    return str(found[0]["GroupId"]) if found else ""
