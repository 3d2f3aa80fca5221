"""AWS's own roles for the services that launch instances: the console creates them at its first use, the API does not.

"If you use the AWS CLI or an API, you must ensure that these roles exist" (EC2 User Guide, "Spot Fleet permissions").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound, PermissionDenied, SpothealError

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

ROLES = {
    "spot.amazonaws.com": "AWSServiceRoleForEC2Spot",
    "spotfleet.amazonaws.com": "AWSServiceRoleForEC2SpotFleet",
    "ec2fleet.amazonaws.com": "AWSServiceRoleForEC2Fleet",
}
SPOT_FLEET = ("spot.amazonaws.com", "spotfleet.amazonaws.com")
EC2_FLEET = ("spot.amazonaws.com", "ec2fleet.amazonaws.com")
_THERE = ("InvalidInput", "EntityAlreadyExists")  # "has been taken in this account"


@dataclass(frozen=True)
class CreateServiceRole:
    """`service`: the service of the role, by IAM's name."""

    service: str

    def says(self) -> str:
        return f"create AWS's own role {ROLES[self.service]} (once per account)"


def missing(session: Session, services: Iterable[str]) -> list[CreateServiceRole]:
    """The steps for missing roles; none if these credentials may not look: EC2 then says what it lacks."""
    iam, steps = session.client("iam"), []
    for service in services:
        try:
            with translated(f"look for role {ROLES[service]}"):
                iam.get_role(RoleName=ROLES[service])
        except PermissionDenied as error:
            if not error.code:
                raise
        except NotFound:
            steps.append(CreateServiceRole(service))
    return steps


def create(session: Session, step: CreateServiceRole) -> None:
    """Create the role; a role that exists meanwhile is no error."""
    try:
        with translated(f"create role {ROLES[step.service]}"):
            session.client("iam").create_service_linked_role(AWSServiceName=step.service)
    except PermissionDenied as error:
        command = f"aws iam create-service-linked-role --aws-service-name {step.service}"
        next_step = f"an administrator runs once: {command}"
        raise PermissionDenied(error.message, code=error.code, next_step=next_step) from error
    except SpothealError as error:
        if error.code not in _THERE:
            raise
