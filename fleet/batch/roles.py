"""The three roles of a job on Batch: its hosts', its containers' and ECS's own; made so that it can be made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound, SpothealError
from spotheal.agent.protocol.names import StoreUrl, partition_of
from spotheal.fleet.account import roles
from spotheal.fleet.batch.names import Names
from spotheal.fleet.run.session import Session
from spotheal.iam import policies

HOST_POLICY = "service-role/AmazonEC2ContainerServiceforEC2Role"
EXECUTION_POLICY = "service-role/AmazonECSTaskExecutionRolePolicy"
INLINE = "spotheal-batch-"  # and the region: a role is the whole account's
DESCRIPTION = "Made by fleetctl (spotheal)"  # as `account.roles` writes it: `fleetctl batch delete` looks for it


@dataclass(frozen=True)
class MakeRole:
    """`managed`: AWS's own policy; `inline`: a document of ours; `profile`: an instance profile of its name too."""

    name: str
    service: str
    purpose: str
    managed: str = ""
    inline: str = ""
    profile: bool = False
    verb: str = "create"

    def says(self) -> str:
        return f"{self.verb} role {self.name}: {self.purpose}"


def required(
    session: Session, names: Names, root: StoreUrl, secrets: tuple[str, ...], topic: str, results: StoreUrl | None
) -> list[MakeRole]:
    """`results`: the URL of `[store] results`, if it is S3."""
    scope = policies.Scope(session.account, session.region, root.below(names.job), job=names.job, secrets=secrets,
                           topic=topic, results=results.below(names.job) if results else None)  # fmt: skip
    document = json.dumps(policies.batch_job(scope), separators=(",", ":"))
    return [
        MakeRole(names.host_role, "ec2.amazonaws.com", "hosts join the cluster", HOST_POLICY, profile=True),
        MakeRole(names.execution_role, "ecs-tasks.amazonaws.com", "ECS fetches the image and writes logs",
                 EXECUTION_POLICY),
        MakeRole(names.job_role, "ecs-tasks.amazonaws.com", f"containers read and write {root.below(names.job)}/ alone",
                 inline=document),
    ]  # fmt: skip


def missing(session: Session, step: MakeRole) -> MakeRole | None:
    """The step, if the role, its policy or its profile is missing or differs."""
    iam = session.client("iam")
    if _if_exists(f"look for role {step.name}", lambda: iam.get_role(RoleName=step.name)) is None:
        return step
    updated = MakeRole(**{**vars(step), "verb": "complete"})
    if step.inline:
        arguments = {"RoleName": step.name, "PolicyName": INLINE + session.region}
        current = _if_exists(f"read the policy of role {step.name}", lambda: iam.get_role_policy(**arguments))
        if current is None or current["PolicyDocument"] != json.loads(step.inline):
            return updated
    if step.managed:
        with translated(f"list the policies of role {step.name}"):
            attached = iam.list_attached_role_policies(RoleName=step.name)["AttachedPolicies"]
        if not any(policy["PolicyArn"].endswith(step.managed) for policy in attached):
            return updated
    if step.profile:
        profile = _if_exists(
            f"look for instance profile {step.name}", lambda: iam.get_instance_profile(InstanceProfileName=step.name)
        )
        if profile is None or not profile["InstanceProfile"]["Roles"]:
            return updated
    return None


def make(session: Session, step: MakeRole) -> None:
    iam, name = session.client("iam"), step.name
    trust = json.dumps(policies.trust(step.service))
    _once(f"create role {name}", lambda: iam.create_role(
        RoleName=name, AssumeRolePolicyDocument=trust, Description=DESCRIPTION))  # fmt: skip
    if step.managed:
        arn = f"arn:{partition_of(session.region)}:iam::aws:policy/{step.managed}"
        with translated(f"attach {step.managed} to role {name}"):
            iam.attach_role_policy(RoleName=name, PolicyArn=arn)
    if step.inline:
        with translated(f"write the policy of role {name}"):
            iam.put_role_policy(RoleName=name, PolicyName=INLINE + session.region, PolicyDocument=step.inline)
    if step.profile:
        _once(f"create instance profile {name}", lambda: iam.create_instance_profile(InstanceProfileName=name))
        # LimitExceeded of a profile: it has its one role, ours. Of a role: the account has too many.
        _once(f"add role {name} to its instance profile", lambda: iam.add_role_to_instance_profile(
            InstanceProfileName=name, RoleName=name), "LimitExceeded")  # fmt: skip


def delete(session: Session, names: Names) -> list[str]:
    """Delete the roles that are ours; returns a line for each. If the job is in another region too they stay, and
    only this region's policy goes."""
    deleted: list[str] = []
    iam, mine = session.client("iam"), INLINE + session.region
    policies = _if_exists("list the job's policies", lambda: iam.list_role_policies(RoleName=names.job_role))
    inline = policies["PolicyNames"] if policies else []
    if any(policy.startswith(INLINE) and policy != mine for policy in inline):
        if mine in inline:
            with translated(f"delete the policy of role {names.job_role}"):
                iam.delete_role_policy(RoleName=names.job_role, PolicyName=mine)
            deleted.append(f"policy {mine}")
        return deleted
    for name in names.roles:
        if roles.is_made_by_us(session, name):
            deleted += roles.delete_role(session, name)
    return deleted


def _if_exists(purpose: str, call: Callable[[], Any]) -> Any:
    try:
        with translated(purpose):
            return call()
    except NotFound:
        return None


def _once(purpose: str, call: Callable[[], Any], code: str = "EntityAlreadyExists") -> None:
    """A role or profile that exists already counts as made."""
    try:
        with translated(purpose):
            call()
    except SpothealError as error:
        if error.code not in ("EntityAlreadyExists", code):
            raise
