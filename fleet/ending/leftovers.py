"""Things that fleetctl makes once an account: deleted only by `clean --all`, and only while nothing uses them.

Roles are `fleetctl iam`'s, the bucket holds results and is left to its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound, SpothealError
from spotheal.fleet.account.network import SSH_GROUP
from spotheal.fleet.run.session import Session


@dataclass(frozen=True)
class SecurityGroup:
    id: str
    name: str

    def says(self) -> str:
        return f"security group {self.name} ({self.id})"


def find(session: Session) -> tuple[SecurityGroup, ...]:
    """The groups of fleetctl's own name; EC2 itself refuses to delete a group that is in use."""
    filters = [{"Name": "group-name", "Values": [SSH_GROUP]}]
    with translated("look for fleetctl's security group"):
        groups = session.client("ec2").describe_security_groups(Filters=filters).get("SecurityGroups", [])
    return tuple(SecurityGroup(str(group["GroupId"]), str(group["GroupName"])) for group in groups)


def delete(session: Session, groups: Iterable[SecurityGroup], say: Callable[[str], None]) -> None:
    for group in groups:
        try:
            with translated(f"delete {group.id}"):
                session.client("ec2").delete_security_group(GroupId=group.id)
            say(f"deleted {group.says()}")
        except NotFound:
            pass
        except SpothealError as error:
            say(f"{group.says()} is still there: {error.message}")
