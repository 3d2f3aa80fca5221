"""The roles of instances and of the fleet: checked, created (twice does no harm) and deleted.

The instances' policies are inline: one per region, and a short one per store, so that jobs with other buckets do not
overwrite each other's and all fit IAM's limit (`check_room`). Roles with other policies are not ours, and stay as they
are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import CapacityError, Conflict, NotFound, SpothealError
from spotheal.agent.protocol.names import TRAINER_ROLE, StoreUrl
from spotheal.iam import policies
from spotheal.iam.job_roles import job_of

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

INSTANCE_ROLE = "spotheal-instance"
FLEET_ROLE = "aws-ec2-spot-fleet-tagging-role"  # as the EC2 console names it
FLEET_POLICY = "service-role/AmazonEC2SpotFleetTaggingRole"
ADDITIONS = {
    "rescue": policies.instance_with_rescue,
    "sweeps": policies.instance_of_sweep,
    "topic": policies.instance_that_tells,
    "results": policies.instance_with_results,
    "key": policies.instance_with_key,
}
_NAME = re.compile(r"[\w+=,.@-]{1,64}")
_DESCRIPTION = "Made by fleetctl (spotheal)"
INLINE_CHARACTERS_MAX = 10_240  # of all inline policies of a role, white space not counted (IAM's quotas)
_EXISTS = "EntityAlreadyExists"


@dataclass(frozen=True)
class CreateInstanceRole:
    """A role and an instance profile with the same name, and the inline policies to write: (name, document)."""

    name: str
    documents: tuple[tuple[str, str], ...]
    verb: str = "create"  # complete: the role exists, its policy or profile does not; update: the policy is older

    def says(self) -> str:
        job = job_of(self.name)
        purpose = f"job {job} and its part of the store" if job else "this account's runs and their store"
        return f"{self.verb} role and instance profile {self.name}: {purpose}, nothing else"


@dataclass(frozen=True)
class CreateFleetRole:
    name: str

    def says(self) -> str:
        return f"create role {self.name} for Spot Fleet (AWS's {FLEET_POLICY.partition('/')[2]})"


@dataclass(frozen=True)
class CreateTrainerRole:
    """The role of one job's caged trainer. `takers` are ARNs of the roles that may assume it."""

    role: str
    document: str
    takers: tuple[str, ...]
    verb: str = "create"  # extend: the role exists, but lacks its policy or a taker; or update

    @property
    def policy(self) -> str:
        return "spotheal-trainer-policy"

    def says(self) -> str:
        return f"{self.verb} role {self.role} for the caged trainer: what this job's trainer_policy allows"


def policy_name(region: str, store: StoreUrl | None = None) -> str:
    """The name of the region's policy, or of the policy for `store`."""
    place = (store.bucket, store.prefix.replace("/", ".")) if store else ()
    return "-".join(filter(None, ("spotheal", region, *place)))[:128]


def scope(session: Session, store: StoreUrl) -> policies.Scope:
    return policies.Scope(session.account, session.region, store)


def _scope_of(session: Session, role: str, root: StoreUrl) -> policies.Scope:
    job = job_of(role)
    return policies.Scope(session.account, session.region, root.below(job) if job else root, job=job)


def profile_arn(session: Session, name: str = INSTANCE_ROLE) -> str:
    return scope(session, StoreUrl("any", "")).role(name).replace(":role/", ":instance-profile/")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Conflict(f"{name!r} is no name of an IAM role", next_step="1 to 64 of letters, digits and _+=,.@-")
    return name


# ------------------------------------------------------------------------------------------------------------- missing
def missing_instance_role(session: Session, name: str, store: StoreUrl) -> CreateInstanceRole | None:
    """The step that makes the profile usable for the jobs of this store, or for the job in its name; None if it is
    usable, or not ours."""
    iam = session.client("iam")
    role_scope = _scope_of(session, name, store)
    documents = {policy_name(session.region): _compact(policies.instance_of_region(role_scope)),
                 policy_name(session.region, role_scope.store):
                     _compact(policies.instance_of_store(role_scope))}  # fmt: skip
    profile = _lookup(f"look for instance profile {name}", lambda: iam.get_instance_profile(InstanceProfileName=name))
    roles = profile["InstanceProfile"]["Roles"] if profile else []
    role = str(roles[0]["RoleName"]) if roles else name
    described = _lookup(f"look for role {role}", lambda: iam.get_role(RoleName=role))
    if described is None:
        return CreateInstanceRole(name, tuple(documents.items()))
    with translated(f"list the policies of role {role}"):
        inline = iam.list_role_policies(RoleName=role)["PolicyNames"]
        attached = iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    ours = not attached and all(policy.startswith("spotheal-") for policy in inline)
    if roles and not ours:
        return None
    if not roles or not documents.keys() <= set(inline):
        return CreateInstanceRole(name, tuple(documents.items()), "complete")
    changed = [item for item in documents.items() if _inline(session, role, item[0]) != json.loads(item[1])]
    return CreateInstanceRole(name, tuple(changed), "update") if changed else None


def _compact(document: Any) -> str:
    """The document without white space, which IAM does not count."""
    return json.dumps(document, separators=(",", ":"))


def _inline(session: Session, role: str, policy: str) -> Any:
    with translated(f"read the policy of role {role}"):
        return session.client("iam").get_role_policy(RoleName=role, PolicyName=policy)["PolicyDocument"]


def missing_addition(
    session: Session,
    name: str,
    store: StoreUrl,
    addition: str,
    topic: str = "",
    results: StoreUrl | None = None,
    key: str = "",
) -> CreateInstanceRole | None:
    """The step that adds a permission which only some jobs need (`ADDITIONS`). It is only added, never removed: another
    job's sweep may be using it. None if the role has it, or is not ours."""
    iam = session.client("iam")
    target = topic or key or (str(results) if results else "")
    suffix = f"-{hashlib.sha256(target.encode()).hexdigest()[:8]}" if target else ""
    role_scope = replace(_scope_of(session, name, store), topic=topic, results=results, kms_key=key)
    addition_name = f"{policy_name(session.region)}+{addition}{suffix}"  # no bucket's name has a plus sign
    if _lookup(f"look for role {name}", lambda: iam.get_role(RoleName=name)) is not None:
        with translated(f"list the policies of role {name}"):
            inline = iam.list_role_policies(RoleName=name)["PolicyNames"]
        if addition_name in inline or not all(policy.startswith("spotheal-") for policy in inline):
            return None
    document = _compact(ADDITIONS[addition](role_scope))
    return CreateInstanceRole(name, ((addition_name, document),), f"for {addition}: extend")


def check_room(session: Session, steps: Iterable[object]) -> None:
    """CapacityError if the steps would make a role's inline policies longer than IAM accepts."""
    new: dict[str, dict[str, str]] = {}
    for step in steps:
        if isinstance(step, CreateInstanceRole):
            new.setdefault(step.name, {}).update(step.documents)
        elif isinstance(step, CreateTrainerRole):
            new.setdefault(step.role, {})[step.policy] = step.document
    iam = session.client("iam")
    for role, documents in new.items():
        listed = _lookup(f"list the policies of role {role}", lambda: iam.list_role_policies(RoleName=role))  # noqa: B023
        names = listed["PolicyNames"] if listed else []
        stored = {name: _compact(_inline(session, role, name)) for name in names if name not in documents}
        if (size := sum(map(len, (stored | documents).values()))) > INLINE_CHARACTERS_MAX:
            raise CapacityError(
                f"role {role} has no room: its inline policies would have {size:,} characters, and IAM accepts"
                f" {INLINE_CHARACTERS_MAX:,} for all together",
                next_step=_more_room(role),
            )


def _more_room(role: str) -> str:
    delete = f"`aws iam delete-role-policy --role-name {role} --policy-name NAME`"
    return (
        f"`fleetctl iam create --instance-role OTHER`, and name that profile in the fleet's file; or delete what no run"
        f" needs any more: {delete}"
    )


def missing_fleet_role(session: Session, name: str) -> CreateFleetRole | None:
    iam = session.client("iam")
    if _lookup(f"look for role {name}", lambda: iam.get_role(RoleName=name)) is None:
        return CreateFleetRole(name)
    with translated(f"list the policies of role {name}"):
        attached = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
        inline = iam.list_role_policies(RoleName=name)["PolicyNames"]
    return None if attached or inline else CreateFleetRole(name)


def missing_trainer_role(
    session: Session, profiles: Iterable[str], job: str, document: str
) -> CreateTrainerRole | None:
    """The step that gives the job's caged trainers the permissions in `document`, its trainer_policy. None if nothing
    is missing, or the role is not ours.

    Each job has its own role: in a role for all jobs a policy of `"Action": "*"` would get what every job's allows.
    """
    iam, role = session.client("iam"), f"{TRAINER_ROLE}{job}"
    ours = policies.default_takers(replace(scope(session, StoreUrl("any", "")), job=job))
    takers = {*ours, *(_role_of(session, profile) for profile in profiles)}
    described = _lookup(f"look for role {role}", lambda: iam.get_role(RoleName=role))
    if described is None:
        return CreateTrainerRole(role, document, tuple(sorted(takers)))
    with translated(f"list the policies of role {role}"):
        inline = iam.list_role_policies(RoleName=role)["PolicyNames"]
        attached = iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    if attached or not all(policy.startswith("spotheal-") for policy in inline):
        return None
    trusted = _takers(described["Role"]["AssumeRolePolicyDocument"])
    step = CreateTrainerRole(role, document, tuple(sorted(takers | trusted)), "extend")
    if not takers <= trusted or step.policy not in inline:
        return step
    current = _inline(session, role, step.policy)
    return None if current == json.loads(document) else replace(step, verb="update")


def _role_of(session: Session, profile: str) -> str:
    """The ARN of the role in that instance profile; a new role gets the profile's name."""
    iam = session.client("iam")
    purpose = f"look for instance profile {profile}"
    answer = _lookup(purpose, lambda: iam.get_instance_profile(InstanceProfileName=profile))
    roles = answer["InstanceProfile"]["Roles"] if answer else []
    return str(roles[0]["Arn"]) if roles else scope(session, StoreUrl("any", "")).role(profile)


def _takers(trust: Any) -> set[str]:
    """The roles that our trust policy names."""
    statements = trust.get("Statement", []) if isinstance(trust, dict) else []
    named = [statement.get("Condition", {}).get("ArnLike", {}).get("aws:PrincipalArn", []) for statement in statements]
    return {arn for arns in named for arn in ([arns] if isinstance(arns, str) else arns)}


def _lookup(purpose: str, call: Callable[[], Any]) -> Any:
    try:
        with translated(purpose):
            return call()
    except NotFound:
        return None


# ---------------------------------------------------------------------------------------------------------------- make
def create_instance_role(session: Session, step: CreateInstanceRole) -> None:
    """The profile gets its role last: a profile with a role is complete."""
    iam, name = session.client("iam"), check_name(step.name)
    trust = json.dumps(policies.trust("ec2.amazonaws.com"))
    _once(f"create role {name}", lambda: iam.create_role(
        RoleName=name, AssumeRolePolicyDocument=trust, Description=_DESCRIPTION))  # fmt: skip
    with translated(f"write the policies of role {name}"):
        for policy, document in step.documents:
            iam.put_role_policy(RoleName=name, PolicyName=policy, PolicyDocument=document)
    _once(f"create instance profile {name}", lambda: iam.create_instance_profile(InstanceProfileName=name))
    _once(f"add role {name} to its instance profile", lambda: iam.add_role_to_instance_profile(
        InstanceProfileName=name, RoleName=name), extra_code="LimitExceeded")  # fmt: skip


def create_fleet_role(session: Session, step: CreateFleetRole) -> None:
    iam, name = session.client("iam"), check_name(step.name)
    trust = json.dumps(policies.trust("spotfleet.amazonaws.com"))
    _once(f"create role {name}", lambda: iam.create_role(
        RoleName=name, AssumeRolePolicyDocument=trust, Description=_DESCRIPTION))  # fmt: skip
    partition = policies.Scope("", session.region, StoreUrl("any", "")).partition
    with translated(f"attach {FLEET_POLICY} to role {name}"):
        iam.attach_role_policy(RoleName=name, PolicyArn=f"arn:{partition}:iam::aws:policy/{FLEET_POLICY}")


def create_trainer_role(session: Session, step: CreateTrainerRole) -> None:
    iam = session.client("iam")
    trust = json.dumps(policies.trainer_trust(scope(session, StoreUrl("any", "")), step.takers))
    _once(f"create role {step.role}", lambda: iam.create_role(
        RoleName=step.role, AssumeRolePolicyDocument=trust, Description=_DESCRIPTION))  # fmt: skip
    with translated(f"write the trust policy of role {step.role}"):
        iam.update_assume_role_policy(RoleName=step.role, PolicyDocument=trust)
    with translated(f"write the policy of role {step.role}"):
        iam.put_role_policy(RoleName=step.role, PolicyName=step.policy, PolicyDocument=step.document)


def _once(purpose: str, call: Callable[[], Any], extra_code: str = "") -> None:
    """Call; a resource that exists already is no error."""
    try:
        with translated(purpose):
            call()
    except SpothealError as error:
        if error.code not in (_EXISTS, extra_code):
            raise


# ---------------------------------------------------------------------------------------------------------- take away
def delete_role(session: Session, name: str, *, has_profile: bool = True) -> list[str]:
    """Delete the role and the profile of that name; returns what existed, in words.

    Without `has_profile` no profile is looked for: an administrator's policy names only profiles of instances' roles.
    """
    iam, parts = session.client("iam"), []
    profile = has_profile and _lookup(
        f"look for instance profile {name}", lambda: iam.get_instance_profile(InstanceProfileName=name)
    )
    if profile:
        for role in profile["InstanceProfile"]["Roles"]:
            with _ignore_missing():
                iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role["RoleName"])
        with _ignore_missing():
            iam.delete_instance_profile(InstanceProfileName=name)
        parts.append(f"instance profile {name}")
    if _lookup(f"look for role {name}", lambda: iam.get_role(RoleName=name)):
        with translated(f"list the policies of role {name}"):
            inline = iam.list_role_policies(RoleName=name)["PolicyNames"]
            attached = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
        for policy in inline:
            with _ignore_missing():
                iam.delete_role_policy(RoleName=name, PolicyName=policy)
        for policy in attached:
            with _ignore_missing():
                iam.detach_role_policy(RoleName=name, PolicyArn=policy["PolicyArn"])
        with _ignore_missing():
            iam.delete_role(RoleName=name)
        parts.append(f"role {name}")
    return parts


def is_made_by_us(session: Session, name: str) -> bool:
    """Whether the role's description says so; False if there is no such role."""
    iam = session.client("iam")
    answer = _lookup(f"look for role {name}", lambda: iam.get_role(RoleName=name))
    return bool(answer) and answer["Role"].get("Description") == _DESCRIPTION


@contextmanager
def _ignore_missing() -> Iterator[None]:
    """A part that is gone already is no error."""
    with suppress(NotFound), translated("delete the role"):
        yield
