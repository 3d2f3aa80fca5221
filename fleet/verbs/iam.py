"""`fleetctl iam …`: the policies, and the roles made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.names import TRAINER_ROLE
from spotheal.fleet.terminal.console import ask, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import Output, Profile, Region, Yes, group

EXAMPLE = "fleetctl iam show operator"
DOCUMENTS = ("operator", "operator-store", "operator-efs", "operator-batch", "administrator", "instance-role",
             "instance-trust", "fleet-role", "fleet-trust", "trainer-trust")  # fmt: skip
app = group("iam", "The policies and roles: show, create, delete.", EXAMPLE)
StoreOption = Annotated[str, typer.Option("--store", metavar="URL", help="Else bucket spotheal-<account>-<region>.")]
Name = Annotated[str, typer.Option("--instance-role", metavar="NAME", help="Role and instance profile.")]
JobName = Annotated[
    str, typer.Option("--job", metavar="JOB", help="The role of this job's instances alone, spotheal-job-JOB.")
]
FleetName = Annotated[str, typer.Option("--fleet-role", metavar="NAME", help="Role of Spot Fleet.")]
TrainerPolicy = Annotated[
    str,
    typer.Option("--trainer-policy", metavar="FILE",
                 help="With --job: what its caged trainer may do; else `request` adds it."),
]  # fmt: skip
KmsKey = Annotated[
    str, typer.Option("--kms-key", metavar="ARN", help="Customer key of volumes: [volume] kms_key of job.toml.")
]
INSTANCE_ROLE, FLEET_ROLE = "spotheal-instance", "aws-ec2-spot-fleet-tagging-role"


@app.command("show", epilog=f"Example: {EXAMPLE}")
@verb
def show(
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help=f"One of {', '.join(DOCUMENTS)}.")] = "",
    store: StoreOption = "",
    instance_role: Name = INSTANCE_ROLE,
    job: JobName = "",
    fleet_role: FleetName = FLEET_ROLE,
    kms_key: KmsKey = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Print the policies as JSON, for the person who makes roles in this account.

    Without a name all of them. Without credentials the account's number is written as zeros.
    """
    from spotheal.agent.protocol.names import StoreUrl, default_bucket
    from spotheal.fleet.run.session import PLACEHOLDER_ACCOUNT
    from spotheal.fleet.verbs import show as shown
    from spotheal.iam import policies

    as_json = is_json(output)
    if document and document not in DOCUMENTS:
        raise ConfigError(f"there is no document {document!r}", next_step=f"one of {', '.join(DOCUMENTS)}")
    session = open_session(region, profile)
    home_region = session.settle_region()
    account = session.account if session.has_credentials() else PLACEHOLDER_ACCOUNT
    url = StoreUrl.parse(_checked(store)) if store else StoreUrl(default_bucket(account, home_region), "")
    named = _role(instance_role, job)
    scope = policies.Scope(account, home_region, url, instance_role=named, fleet_role=fleet_role, kms_key=kms_key)
    documents: dict[str, Any] = {
        "operator": policies.operator(scope),
        "operator-store": policies.operator_of_store(scope),
        "operator-efs": policies.operator_of_file_systems(scope),
        "operator-batch": policies.operator_of_batch(scope),
        "administrator": policies.administrator(scope),
        "instance-role": policies.instance_role(replace(scope, store=url.below(job), job=job) if job else scope),
        "instance-trust": policies.trust("ec2.amazonaws.com"),
        "fleet-role": policies.fleet_role(scope),
        "fleet-trust": policies.trust("spotfleet.amazonaws.com"),
        "trainer-trust": policies.trainer_trust(replace(scope, job=job)),
    }
    if account == PLACEHOLDER_ACCOUNT:
        say(f"note: without credentials the account's number is written as {PLACEHOLDER_ACCOUNT}")
    if document:
        wrapped = {"schema_version": 1, "document": document, "policy": documents[document]}
        print(shown.as_json(wrapped if as_json else documents[document]))
    else:
        print(shown.as_json({"schema_version": 1, **documents}))


def _key(arn: str) -> str:
    from spotheal.agent.protocol.job_keys import KEYS

    (key,) = [key for key in KEYS if (key.table, key.name) == ("volume", "kms_key")]
    if fault := key.check(arn):
        raise ConfigError(f"--kms-key {fault}", next_step="`aws kms describe-key` prints the Arn of a key or an alias")
    return arn


def _checked(store: str) -> str:
    from spotheal.agent.protocol.names import StoreUrl

    try:
        return str(StoreUrl.parse(store)) if store else ""
    except ValueError as fault:
        raise ConfigError(f"--store: {fault}", next_step="write s3://bucket/prefix") from None


@app.command("create", epilog="Example: fleetctl iam create")
@verb
def create(
    store: StoreOption = "",
    instance_role: Name = INSTANCE_ROLE,
    job: JobName = "",
    fleet_role: FleetName = FLEET_ROLE,
    trainer_policy: TrainerPolicy = "",
    kms_key: KmsKey = "",
    yes: Yes = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Create what is missing of the roles and the instance profile, once an account.

    `fleetctl request` does the same in its plan; this is for an account whose operators may not make roles. With --job
    and --trainer-policy the role of that job's caged trainer is made too.
    """
    from spotheal.fleet.account import prerequisites, roles
    from spotheal.fleet.verbs import show as shown

    as_json = is_json(output)
    instance_role = _role(instance_role, job)
    for name in (instance_role, fleet_role):
        roles.check_name(name)
    if trainer_policy and not job:
        raise ConfigError("--trainer-policy is of one job", next_step="name the job with --job JOB")
    policy = _policy(trainer_policy) if trainer_policy else ""
    session = open_session(region, profile)
    root = session.store_root(_checked(store))
    candidates = (
        roles.missing_fleet_role(session, fleet_role),
        roles.missing_instance_role(session, instance_role, root),
        roles.missing_addition(session, instance_role, root, "key", key=_key(kms_key)) if kms_key else None,
        roles.missing_trainer_role(session, [instance_role], job, policy) if policy else None,
    )
    steps = [step for step in candidates if step is not None]
    roles.check_room(session, steps)
    for step in steps:
        say(step.says())
    if steps:
        ask("Go ahead?", yes)
    for step in steps:
        prerequisites.make(session, step)
    arns = {"instance_profile": roles.profile_arn(session, instance_role),
            "fleet_role": roles.scope(session, root).role(fleet_role)}  # fmt: skip
    if policy:
        arns["trainer_role"] = roles.scope(session, root).role(f"{TRAINER_ROLE}{job}")
    lines = [step.says() for step in steps]
    if as_json:
        print(shown.as_json({"schema_version": 1, "made": lines, **arns}))
    else:
        print("\n".join(arns.values()))
        say("made" if steps else "all are there already")


def _role(named: str, job: str) -> str:
    """The role of instances that is meant."""
    from spotheal.fleet.run.runs import check_job_name
    from spotheal.iam.job_roles import job_role

    if job and named != INSTANCE_ROLE:
        raise ConfigError("--job and --instance-role exclude each other", next_step="name one of them")
    return job_role(check_job_name(job)) if job else named


def _policy(file: str) -> str:
    """The IAM policy in that file, on one line."""
    from spotheal.agent.protocol.job_values import policy_fault
    from spotheal.fleet.files.config import text_of

    try:
        text = json.dumps(json.loads(text_of(Path(file))), separators=(",", ":"))
    except OSError as fault:
        raise ConfigError(f"--trainer-policy: {file} cannot be read: {fault.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--trainer-policy: {file} is no JSON", next_step="write an IAM policy there") from None
    if flaw := policy_fault(text):
        raise ConfigError(f"--trainer-policy: {file} {flaw}", next_step="write an IAM policy there")
    return text


@app.command("delete", epilog="Example: fleetctl iam delete")
@verb
def delete(
    instance_role: Name = INSTANCE_ROLE,
    job: JobName = "",
    fleet_role: FleetName = FLEET_ROLE,
    yes: Yes = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Delete the roles and the instance profile; runs that are at work lose their permissions.

    A role of fleets or of trainers that fleetctl did not make is left: somebody else may use it. With --job that job's
    alone, those of its on-demand rescue and of its caged trainer too.
    """
    from spotheal.fleet.account import roles
    from spotheal.fleet.verbs import show as shown
    from spotheal.iam.policies import RESCUE_ROLE

    as_json = is_json(output)
    session = open_session(region, profile)
    session.settle_region()
    of_instances = _role(instance_role, job)
    names = [of_instances, *([f"{RESCUE_ROLE}{job}"] if job else [])]
    for role in (f"{TRAINER_ROLE}{job}",) if job else (fleet_role,):
        if roles.is_made_by_us(session, role):
            names.append(role)
        elif not job:
            say(f"role {role} is not there, or not made by fleetctl, and is left alone")
    say(f"delete {', '.join(names)}, with their policies")
    ask("Go ahead?", yes)
    lines = [line for name in names for line in roles.delete_role(session, name, has_profile=name == of_instances)]
    if as_json:
        print(shown.as_json({"schema_version": 1, "deleted": lines}))
    else:
        print("\n".join(lines) or "nothing was there")
