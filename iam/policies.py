"""The documents for IAM, made from `calls.CALLS`: roles of the instance and of the fleet, the operator's policy.

AWS's rules behind them: describes take no condition; attach, detach, terminate, cancel and delete take the tags of the
resource; CreateVolume and CreateSnapshot need one statement for the new resource (tags of the request) and one for its
source (tags of the resource); CreateTags is for `ec2:CreateAction` or a closed list of keys. A role that may tag and
delete could delete whatever it tags, so deleting stands alone and can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.names import (
    FILLING,
    TAG_JOB,
    TAG_PURPOSE,
    TAG_REASON,
    TAG_RUN,
    TAG_SAVED_STEP,
    TAG_STATE,
    TAG_TERM,
    TRAINER_ROLE,
    StoreUrl,
    VolumeState,
    partition_of,
    rescue_schedule,
)
from spotheal.agent.protocol.secret_reference import SecretReference
from spotheal.iam.calls import CALLS, NOT_CALLS, On, Who

Document = dict[str, Any]
RESCUE_ROLE = "spotheal-rescue-"  # and the job's name
JOB_ROLE = "spotheal-job-"  # and the job's name: role and instance profile of one job alone
# The keys an instance may change on what is the run's already; never run and job, which say whose a thing is.
BATCH_ROLES = "spotheal-batch-*"  # `fleet.batch.names`
_TAGGED_BY_OPERATORS = ("fleet", "instance", "launch-template", "security-group", "spot-fleet-request")
TAG_KEYS = (TAG_REASON, TAG_SAVED_STEP, TAG_STATE, TAG_TERM)


@dataclass(frozen=True)
class Scope:
    """Where the policies hold: for that one `run` alone; for that one `job`, whose prefix is `store`; or, both empty,
    for any run of this account and region."""

    account: str
    region: str
    store: StoreUrl
    run: str = ""
    instance_role: str = "spotheal-instance"
    fleet_role: str = "aws-ec2-spot-fleet-tagging-role"  # as the EC2 console names AWS's own
    topic: str = ""  # ARN of the SNS topic of [notify]; default: those of the account whose name begins with spotheal
    job: str = ""  # whose runs and secrets; empty: any job's
    secrets: tuple[str, ...] = ()  # references of job.toml that lie elsewhere
    results: StoreUrl | None = None  # where results go besides the store; default: buckets that begin with spotheal
    kms_key: str = ""  # ARN of a customer key that volumes are encrypted with

    @property
    def partition(self) -> str:
        return partition_of(self.region)

    def ec2(self, kind: str) -> str:
        """ARN of every resource of that kind; snapshots belong to no account in their ARN."""
        account = "" if kind == "snapshot" else self.account
        return f"arn:{self.partition}:ec2:{self.region}:{account}:{kind}/*"

    @property
    def bucket(self) -> str:
        return f"arn:{self.partition}:s3:::{self.store.bucket}"

    @property
    def objects(self) -> str:
        return f"{self.bucket}/{self.store.below('*').prefix}"

    @property
    def results_objects(self) -> str:
        where = "spotheal*/*" if self.results is None else f"{self.results.bucket}/{self.results.below('*').prefix}"
        return f"arn:{self.partition}:s3:::{where}"

    @property
    def file_systems(self) -> str:
        return f"arn:{self.partition}:elasticfilesystem:{self.region}:{self.account}:file-system/*"

    @property
    def topics(self) -> str:
        return self.topic or f"arn:{self.partition}:sns:{self.region}:{self.account}:spotheal*"

    @property
    def rescue_role(self) -> str:
        """What Scheduler calls EC2 with. One a job: who may write the schedule passes the role, and may have it ask
        whatever the role may."""
        return f"{RESCUE_ROLE}{self.job or '*'}"

    @property
    def schedule(self) -> str:
        """The schedule of the run's on-demand rescue."""
        name = rescue_schedule(self.job, self.run or "*")
        return f"arn:{self.partition}:scheduler:{self.region}:{self.account}:schedule/default/{name}"

    @property
    def secret_arns(self) -> list[str]:
        """Secrets Manager puts a dash and six characters behind a name."""
        below = f"spotheal/{self.job or '*'}/*"
        ssm = f"arn:{self.partition}:ssm:{self.region}:{self.account}:parameter"
        manager = f"arn:{self.partition}:secretsmanager:{self.region}:{self.account}:secret"
        found = [f"{ssm}/{below}", f"{manager}:{below}"]
        for text in self.secrets:
            one = SecretReference.parse(text)
            if one.id.startswith("arn:"):
                found.append(one.id)
            elif one.service == "ssm":
                found.append(f"{ssm}/{one.id.lstrip('/').partition(':')[0]}")
            else:
                found.append(f"{manager}:{one.id}-??????")
        return found

    @property
    def secrets_path(self) -> str:
        """What GetParametersByPath is asked on: the path without a slash at its end."""
        return self.of("ssm", f"parameter/spotheal/{self.job or '*'}")

    @property
    def public_parameters(self) -> str:
        return f"arn:{self.partition}:ssm:{self.region}:*:parameter/aws/service/*"

    def of(self, service: str, what: str) -> str:
        """ARN of something of this account and region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{what}"

    def role(self, name: str) -> str:
        return f"arn:{self.partition}:iam::{self.account}:role/{name}"

    def tagged(self, where: str) -> Document:
        """Condition: the run's or the job's tag, on the `aws:RequestTag` or the `ec2:ResourceTag`."""
        if self.job and not self.run:
            return {"StringEquals": {f"{where}/{TAG_JOB}": self.job}}
        key = f"{where}/{TAG_RUN}"
        return {"StringEquals": {key: self.run}} if self.run else {"Null": {key: "false"}}


# -------------------------------------------------------------------------------------------------------- the documents
def instance_role(scope: Scope, *, may_delete: bool = True) -> Document:
    """Policy of the instance profile's role. Without `may_delete` superseded volumes and snapshots are the operator's
    to delete (job.toml: `[volume] delete_superseded = false`)."""
    return _document([
        statement
        for document in (instance_of_region(scope, may_delete=may_delete), instance_of_store(scope))
        for statement in document["Statement"]
    ] + _key(scope))  # fmt: skip


def instance_of_store(scope: Scope) -> Document:
    """The part of `instance_role` that every store of a role needs its own of."""
    return _document(_store(scope, Who.INSTANCE))


def instance_of_region(scope: Scope, *, may_delete: bool = True) -> Document:
    """The part of `instance_role` that all stores of a region share."""
    here = {"StringEquals": {"aws:RequestedRegion": scope.region}}
    statements = [
        _statement("Look", _actions(Who.INSTANCE, On.ANYTHING), "*", here),
        *_on_the_run(scope, Who.INSTANCE),
        *_creating(scope, Who.INSTANCE),
        *_tagging(scope, Who.INSTANCE),
        _statement("LookAtEfs", _actions(Who.INSTANCE, On.FILE_SYSTEMS), scope.file_systems),
        _statement("Tell", _actions(Who.INSTANCE, On.TOPIC), scope.topics),
        _statement("Secrets", _actions(Who.INSTANCE, On.SECRETS), scope.secret_arns),
        _statement("TrainersRole", _actions(Who.INSTANCE, On.TRAINER), scope.role(f"{TRAINER_ROLE}{scope.job or '*'}")),
    ]
    return _document([*statements, *_deleting(scope)] if may_delete else statements)


def instance_with_rescue(scope: Scope) -> Document:
    """What an instance of a job with `on_demand_after` needs besides. Apart, because who may write a schedule and pass
    its role may ask the fleet for machines."""
    return _document(_rescue(scope, Who.INSTANCE))


def instance_of_sweep(scope: Scope) -> Document:
    """What an instance of a sweep needs besides: to make its fleet smaller. IAM cannot say that it may not make it
    larger, so this too is no part of what every instance may do."""
    fleets = [scope.ec2("fleet"), scope.ec2("spot-fleet-request")]
    return _document([
        _statement("Resize", _actions(Who.INSTANCE, On.FLEET_SIZE), fleets, scope.tagged("ec2:ResourceTag"))
    ])  # fmt: skip


def instance_that_tells(scope: Scope) -> Document:
    """What an instance needs besides to publish to `scope.topic`, where its name does not begin with spotheal."""
    return _document([_statement("TellTopic", _actions(Who.INSTANCE, On.TOPIC), scope.topics)])


def instance_with_results(scope: Scope) -> Document:
    """What an instance needs besides to put its results into `scope.results`, another bucket than the store's."""
    return _document([_statement("Results", _actions(Who.INSTANCE, On.RESULTS), scope.results_objects)])


def instance_with_key(scope: Scope) -> Document:
    """What an instance needs besides to use volumes that are encrypted with `scope.kms_key`, a customer key."""
    return _document(_key(scope))


def operator(scope: Scope) -> Document:
    """What `fleetctl` needs of EC2 and IAM: request, look, cancel. The rest of what every operator needs is
    `operator_of_store`: one document of both is longer than IAM's 6,144 characters."""
    of_job = {f"ec2:ResourceTag/{TAG_JOB}": scope.job} if scope.job else {}
    filling = {"StringEquals": {f"ec2:ResourceTag/{TAG_PURPOSE}": FILLING, **of_job}}
    return _document([
        _statement("Look", _actions(Who.OPERATOR, On.ANYTHING), "*"),
        _statement("LookForImages", _actions(Who.OPERATOR, On.PUBLIC), scope.public_parameters),
        _statement("Launch", _actions(Who.OPERATOR, On.LAUNCH), "*",
                   {"StringEquals": {"aws:RequestedRegion": scope.region}}),
        _statement("InTheAccount", _actions(Who.OPERATOR, On.ACCOUNT),
                   [scope.ec2(kind) for kind in _kinds(Who.OPERATOR, On.ACCOUNT)]),
        _statement("Ssh", _actions(Who.OPERATOR, On.SSH), scope.ec2("instance"), scope.tagged("aws:ResourceTag")),
        *_on_the_run(scope, Who.OPERATOR),
        _statement("EndFilling", ["ec2:TerminateInstances"], scope.ec2("instance"), filling),
        *_creating(scope, Who.OPERATOR),
        *_tagging(scope, Who.OPERATOR),
        _statement("TagOthers", ["ec2:CreateTags"], [scope.ec2(kind) for kind in _TAGGED_BY_OPERATORS],
                   {"StringEquals": {"ec2:CreateAction": ["CreateFleet", "CreateLaunchTemplate", "CreateSecurityGroup",
                                                          "RequestSpotFleet", "RunInstances"]}}),
        _statement("LookAtRoles", _actions(Who.OPERATOR, On.ROLES), _roles(scope)),
        _statement("PassRoles", ["iam:PassRole"],
                   [scope.role(name) for name in (scope.instance_role, f"{JOB_ROLE}*", scope.fleet_role)],
                   {"StringEquals": {"iam:PassedToService": ["ec2.amazonaws.com", "spotfleet.amazonaws.com"]}}),
        _statement("AwsOwnRoles", ["iam:GetRole", *_actions(Who.OPERATOR, On.AWS_ROLES)],
                   # Of a role that does not exist IAM knows no path.
                   [scope.role("aws-service-role/*/AWSServiceRoleForEC2*"), scope.role("AWSServiceRoleForEC2*")]),
    ])  # fmt: skip


def operator_of_store(scope: Scope) -> Document:
    """What every operator needs besides `operator`: the store, secrets, the schedule of a rescue, a customer key."""
    listing = "ssm:GetParametersByPath"  # asked on the path above the names, where nothing else is needed
    return _document([
        *_store(scope, Who.OPERATOR),
        _statement("Bucket", _actions(Who.OPERATOR, On.BUCKET), scope.bucket),
        *_rescue(scope, Who.OPERATOR),
        _statement("Secrets", [action for action in _actions(Who.OPERATOR, On.SECRETS) if action != listing],
                   scope.secret_arns),
        _statement("ListSecrets", [listing], scope.secrets_path),
        *_key(scope),
    ])  # fmt: skip


def operator_of_file_systems(scope: Scope) -> Document:
    """What `fleetctl results create-efs` and `delete-efs` need besides; looking at one is needed to use it. EFS makes
    its network interfaces with the permissions of whoever makes a mount target."""
    mark = {TAG_PURPOSE: "results"}
    new = {"aws:RequestedRegion": scope.region} | {f"aws:RequestTag/{key}": value for key, value in mark.items()}
    own = {"StringEquals": {f"aws:ResourceTag/{key}": value for key, value in mark.items()}}
    made = {"StringEquals": {"elasticfilesystem:CreateAction": "CreateFileSystem"}}
    places = [scope.ec2(kind) for kind in ("network-interface", "security-group", "subnet")]
    return _document([
        _statement("LookAtEfs", _actions(Who.OPERATOR, On.FILE_SYSTEMS), scope.file_systems),
        _statement("LookAtNetwork", ["ec2:DescribeNetworkInterfaces"], "*"),
        _statement("MakeEfs", _actions(Who.OPERATOR, On.NEW_FILE_SYSTEM), "*", {"StringEquals": new}),
        _statement("TagEfs", ["elasticfilesystem:TagResource"], scope.file_systems, made),
        _statement("OwnEfs", _actions(Who.OPERATOR, On.FILE_SYSTEM), scope.file_systems, own),
        _statement("NetworkOfEfs", ["ec2:CreateNetworkInterface"], places),
        _statement("EndNetworkOfEfs", ["ec2:DeleteNetworkInterface"], scope.ec2("network-interface")),
        _statement("FirstEfsOfAnAccount", ["iam:CreateServiceLinkedRole"],
                   scope.role("aws-service-role/elasticfilesystem.amazonaws.com/*"),
                   {"StringEquals": {"iam:AWSServiceName": "elasticfilesystem.amazonaws.com"}}),
    ])  # fmt: skip


def operator_of_batch(scope: Scope) -> Document:
    """What `fleetctl batch` needs besides. Who may submit a job runs with its roles, which reach one job's store."""
    ours = [scope.of("batch", f"{kind}/spotheal-*") for kind in ("compute-environment", "job-queue", "job-definition")]
    jobs, groups = scope.of("batch", "job/*"), scope.of("logs", "log-group:/spotheal/batch/*")
    passed = {"StringEquals": {"iam:PassedToService": ["batch.amazonaws.com", "ec2.amazonaws.com",
                                                       "ecs-tasks.amazonaws.com"]}}  # fmt: skip
    services = ("batch.amazonaws.com", "ecs.amazonaws.com")
    # Who deletes a role lists its inline policies first, and is an administrator.
    looking = [action for action in _actions(Who.OPERATOR, On.ROLES) if action != "iam:ListRolePolicies"]
    pushing = [action for action in NOT_CALLS if action.startswith("ecr:")]
    return _document([
        _statement("LookAtBatch", _actions(Who.OPERATOR, On.BATCH_LOOK), "*"),
        _statement("Batch", [*_actions(Who.OPERATOR, On.BATCH), "batch:TagResource"], [*ours, jobs]),
        _statement("LogsOfBatch", [*_actions(Who.OPERATOR, On.BATCH_LOGS), "logs:TagResource"], groups),
        _statement("ImageOfBatch", [*_actions(Who.OPERATOR, On.IMAGES), *pushing],
                   scope.of("ecr", "repository/spotheal")),
        _statement("LookAtRolesOfBatch", looking, _roles_of_batch(scope)),
        _statement("PassRolesOfBatch", ["iam:PassRole"], scope.role(BATCH_ROLES), passed),
        _statement("FirstBatchOfAnAccount", ["iam:CreateServiceLinkedRole"],
                   [scope.role(f"aws-service-role/{service}/*") for service in services],
                   {"StringEquals": {"iam:AWSServiceName": list(services)}}),
    ])  # fmt: skip


def batch_job(scope: Scope) -> Document:
    """Policy of the role of a job's containers: `scope.store` is the job's own prefix, `scope.job` its name. What is
    in a container can take the role, so it reaches nothing that is another job's."""
    return _document([
        *_store(scope, Who.INSTANCE),
        _statement("Secrets", _actions(Who.INSTANCE, On.SECRETS), scope.secret_arns),
        *([_statement("Tell", _actions(Who.INSTANCE, On.TOPIC), scope.topic)] if scope.topic else []),
        *([_statement("Results", _actions(Who.INSTANCE, On.RESULTS), scope.results_objects)] if scope.results else []),
    ])  # fmt: skip


def _roles_of_batch(scope: Scope) -> list[str]:
    return [scope.role(BATCH_ROLES), scope.role(BATCH_ROLES).replace(":role/", ":instance-profile/")]


def administrator(scope: Scope) -> Document:
    """What making the roles needs, once an account. Who may give a role any policy and pass it may do everything, so
    this is no part of the operator's."""
    passed = [scope.role(name) for name in (*_instance_roles(scope), BATCH_ROLES)]
    return _document([
        _statement("Roles", _actions(Who.ADMINISTRATOR, On.ROLES), [*_roles(scope), *_roles_of_batch(scope)]),
        _statement("RolesIntoProfiles", ["iam:PassRole"], passed,
                   {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
    ])  # fmt: skip


def _instance_roles(scope: Scope) -> tuple[str, str]:
    return scope.instance_role, f"{JOB_ROLE}*"


def _roles(scope: Scope) -> list[str]:
    instances = _instance_roles(scope)
    roles = map(scope.role, (*instances, scope.fleet_role, scope.rescue_role, f"{TRAINER_ROLE}*"))
    profiles = (scope.role(name).replace(":role/", ":instance-profile/") for name in instances)
    return [*roles, *profiles]


def fleet_role(scope: Scope) -> Document:
    """Policy of the role that Spot Fleet launches instances with (`IamFleetRole`); AWS's managed
    AmazonEC2SpotFleetTaggingRole does as well, and more."""
    launching = ["ec2:DescribeImages", "ec2:DescribeInstanceStatus", "ec2:DescribeSubnets", "ec2:RequestSpotInstances"]
    tagged = [scope.ec2(kind) for kind in ("instance", "volume", "spot-instances-request")]
    return _document([
        _statement("Launch", sorted([*launching, "ec2:RunInstances", "ec2:TerminateInstances"]), "*"),
        _statement("Tag", ["ec2:CreateTags"], tagged,
                   {"StringEquals": {"ec2:CreateAction": ["RunInstances", "RequestSpotInstances"]}}),
        _statement("PassInstanceRole", ["iam:PassRole"], [scope.role(scope.instance_role), scope.role(f"{JOB_ROLE}*")],
                   {"StringEquals": {"iam:PassedToService": ["ec2.amazonaws.com"]}}),
    ])  # fmt: skip


def rescue_role(scope: Scope) -> Document:
    """Policy of the role that EventBridge Scheduler asks a fleet for an on-demand instance with."""
    fleets = [scope.ec2("spot-fleet-request"), scope.ec2("fleet")]
    modify = ["ec2:ModifyFleet", "ec2:ModifySpotFleetRequest"]
    return _document([
        _statement("Rescue", modify, fleets, scope.tagged("aws:ResourceTag")),
        _statement("ItsTemplates", modify, [scope.ec2("launch-template")]),
    ])  # fmt: skip


def trainer_trust(scope: Scope, takers: Iterable[str] = ()) -> Document:
    """Who may take the role of a caged trainer: the instances' role (`takers`: ARNs; default: the scope's).

    By the condition and not as principal, which IAM would turn into the id of a role that must exist by now, and that
    another role of the same name, made later, does not have. What the role may do is the account's to say; a job's
    `cage.trainer_policy` only narrows it.
    """
    account = {"AWS": f"arn:{scope.partition}:iam::{scope.account}:root"}
    which = {"ArnLike": {"aws:PrincipalArn": sorted(takers) or default_takers(scope)}}
    statement = {"Effect": "Allow", "Principal": account, "Action": "sts:AssumeRole", "Condition": which}
    return _document([statement])


def default_takers(scope: Scope) -> list[str]:
    """Patterns of ARNs: the roles that fleetctl makes for instances of the job, or of any job."""
    return sorted([scope.role(scope.instance_role), scope.role(f"{JOB_ROLE}{scope.job or '*'}")])


def trust(service: str) -> Document:
    """Who may take the role: `ec2.amazonaws.com` for the instance's, `spotfleet.amazonaws.com` for the fleet's."""
    return _document([{"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}])


# Whose calls which documents allow, all additions for some jobs included.
DOCUMENTS: dict[Who, tuple[Callable[[Scope], Document], ...]] = {
    Who.INSTANCE: (instance_role, instance_with_rescue, instance_of_sweep, instance_that_tells, instance_with_results),
    Who.OPERATOR: (operator, operator_of_store, operator_of_file_systems, operator_of_batch),
    Who.ADMINISTRATOR: (administrator,),
}


# ----------------------------------------------------------------------------------------------------------- statements
def _on_the_run(scope: Scope, who: Who) -> list[Document]:
    resources = [scope.ec2(kind) for kind in _kinds(who, On.RUN)]
    return [_statement("OnTheRun", _actions(who, On.RUN), resources, scope.tagged("ec2:ResourceTag"))]


def _creating(scope: Scope, who: Who) -> list[Document]:
    """The first resource of the call is the new one, the second its source."""
    statements = []
    for call in CALLS:
        if who in call.who and call.on is On.NEW:
            name, (new, source) = call.action.partition(":")[2], call.resources
            # An operator makes volumes before they are a run's too, and may start from any snapshot (a dataset).
            tag = {"Null": {f"aws:RequestTag/{TAG_STATE}": "false"}}
            of_new = scope.tagged("aws:RequestTag") if who is Who.INSTANCE else tag
            statements.append(_statement(f"{name}New", [call.action], scope.ec2(new), of_new))
            condition = scope.tagged("ec2:ResourceTag") if who is Who.INSTANCE else None
            statements.append(_statement(f"{name}Source", [call.action], scope.ec2(source), condition))
    return statements


def _tagging(scope: Scope, who: Who) -> list[Document]:
    made = sorted(call.action.partition(":")[2] for call in CALLS if who in call.who and call.on is On.NEW)
    actions = _actions(who, On.TAGS)
    resources = [scope.ec2(kind) for call in CALLS if call.on is On.TAGS for kind in call.resources]
    creating = _statement("TagNew", actions, resources, {"StringEquals": {"ec2:CreateAction": made}})
    if who is Who.OPERATOR:  # adopts volumes that carry no tag of ours yet, and so may tag new ones too
        return [_statement("Adopt", actions, scope.ec2("volume"))]
    closed = {"ForAllValues:StringEquals": {"aws:TagKeys": list(TAG_KEYS)}}
    return [creating, _statement("TagOwn", actions, resources, {**closed, **scope.tagged("ec2:ResourceTag")})]


def _deleting(scope: Scope) -> list[Document]:
    """Alone, so that it can be left out. A snapshot has no state tag: the run's tag must do."""
    own = scope.tagged("ec2:ResourceTag")
    state = {f"ec2:ResourceTag/{TAG_STATE}": [VolumeState.MOVING.value, VolumeState.SUPERSEDED.value]}
    condition = {**own, "StringEquals": {**own.get("StringEquals", {}), **state}}
    return [
        _statement("DeleteSuperseded", ["ec2:DeleteVolume"], scope.ec2("volume"), condition),
        _statement("DeleteSurplus", ["ec2:DeleteSnapshot"], scope.ec2("snapshot"), own),
    ]


def _store(scope: Scope, who: Who) -> list[Document]:
    narrow = who is Who.INSTANCE and scope.store.prefix  # fleetctl asks whether the bucket is there, too
    # Not IfExists: a list that names no prefix is of the whole bucket. So S3 says 403 of what is not there (`Store`).
    condition = {"StringLike": {"s3:prefix": [scope.store.below("*").prefix]}} if narrow else None
    return [
        _statement("Store", _actions(who, On.OBJECTS), scope.objects),
        _statement("ListStore", _actions(who, On.LISTING), scope.bucket, condition),
    ]


def _rescue(scope: Scope, who: Who) -> list[Document]:
    """The run's schedule, and its role: whoever writes a schedule passes the role that it calls with."""
    passed = {"StringEquals": {"iam:PassedToService": ["scheduler.amazonaws.com"]}}
    return [
        _statement("PutRescueOff", _actions(who, On.SCHEDULE), scope.schedule),
        _statement("PassRescueRole", ["iam:PassRole"], scope.role(scope.rescue_role), passed),
    ]


def _key(scope: Scope) -> list[Document]:
    """A customer key, used by EBS and by the stores of secrets in the caller's name alone, and the grant on it that
    AttachVolume makes. AWS's own key for EBS needs no permission (EBS user guide, "Requirements for encryption")."""
    if not scope.kms_key:
        return []
    using = ["Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom", "ReEncryptTo"]

    def via(*services: str) -> Document:  # in China names end with .cn
        return {"StringLike": {"kms:ViaService": [f"{name}.{scope.region}.amazonaws.com*" for name in services]}}

    granting = {**via("ec2"), "Bool": {"kms:GrantIsForAWSResource": "true"}}
    return [
        _statement("UseKey", [f"kms:{name}" for name in using], scope.kms_key, via("ec2", "secretsmanager", "ssm")),
        _statement("GrantKey", ["kms:CreateGrant"], scope.kms_key, granting),
    ]


def _actions(who: Who, on: On) -> list[str]:
    return sorted(call.action for call in CALLS if who in call.who and call.on is on)


def _kinds(who: Who, on: On) -> list[str]:
    return sorted({kind for call in CALLS if who in call.who and call.on is on for kind in call.resources})


def _statement(sid: str, actions: list[str], resource: str | list[str], condition: Document | None = None) -> Document:
    statement: Document = {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resource}
    return {**statement, "Condition": condition} if condition else statement


def _document(statements: Iterable[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": list(statements)}
