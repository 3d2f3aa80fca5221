"""What AWS asks IAM for one API call: one question for each resource, action and set of tags; all must be allowed.

Source: the Service Authorization Reference (actions, resource types, condition keys, dependent actions), and each
service's page on permissions. moto asks nothing of this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote

from spotheal.agent.protocol.names import partition_of
from spotheal.fleet.rehearsal.ec2.world import World
from spotheal.iam.calls import CALLS
from spotheal.iam.evaluation import Question

Params = Mapping[str, Any]
Questions = Iterator[Question]
_KINDS = {"vol-": "volume", "snap-": "snapshot", "i-": "instance", "sfr-": "spot-fleet-request", "fleet-": "fleet",
          "lt-": "launch-template", "sg-": "security-group", "vpc-": "vpc", "subnet-": "subnet", "ami-": "image",
          "eni-": "network-interface", "key-": "key-pair"}  # fmt: skip
_NO_ACCOUNT = ("snapshot", "image")  # their ARNs name no account
# Call that makes something -> what it makes, and the parameters that name its sources.
_MAKES: dict[str, tuple[str, tuple[str, ...]]] = {
    "CreateVolume": ("volume", ("SnapshotId",)),
    "CreateSnapshot": ("snapshot", ("VolumeId",)),
    "CreateLaunchTemplate": ("launch-template", ()),
    "CreateSecurityGroup": ("security-group", ("VpcId",)),
    "ImportKeyPair": ("key-pair", ()),
    "CreateFleet": ("fleet", ()),
    "RequestSpotFleet": ("spot-fleet-request", ()),
    "RunInstances": ("instance", ("ImageId", "SubnetId")),
}
_LAUNCHES = ("CreateFleet", "RequestSpotFleet", "RunInstances")
_READS_ON_A_RESOURCE = frozenset(
    call.action for call in CALLS if call.resources and re.match(r"ec2:(Describe|Get)", call.action)
)
_BATCH = {call.action.partition(":")[2].lower(): call.action for call in CALLS if call.action.startswith("batch:")}
_SUBRESOURCES = {  # of a bucket -> what IAM calls them
    "publicAccessBlock": "BucketPublicAccessBlock", "encryption": "EncryptionConfiguration",
    "location": "BucketLocation", "policy": "BucketPolicy", "versioning": "BucketVersioning",
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- EC2
def of_ec2(world: World, operation: str, params: Params) -> Questions:
    action = f"ec2:{operation}"
    if operation in _MAKES:
        yield from _of_making(world, operation, params)
    elif operation == "CreateTags":
        keys = tuple(tag["Key"] for tag in params.get("Tags") or [])
        for name in params.get("Resources") or []:
            yield Question(action, ec2_arn(world, name), {**_tags(world, name), "aws:TagKeys": keys})
    elif operation.startswith(("Describe", "Get")) and action not in _READS_ON_A_RESOURCE:
        yield Question(action, "*")
    else:
        named = list(_named(world, params))
        for name in named:
            yield Question(action, ec2_arn(world, name), _tags(world, name))
        if not named:
            yield Question(action, "*")


def _of_making(world: World, operation: str, params: Params) -> Questions:
    action, (kind, sources) = f"ec2:{operation}", _MAKES[operation]
    config = params.get("SpotFleetRequestConfig") or params
    specifications = {
        specification["ResourceType"]: specification for specification in config.get("TagSpecifications") or []
    }
    yield Question(action, _arn_of(world, kind, "*"), _requested(specifications.get(kind)))
    for name in (str(params[source]) for source in sources if params.get(source)):
        yield Question(action, ec2_arn(world, name), _tags(world, name))
    for specification in specifications.values():
        context = {**_requested(specification), "ec2:CreateAction": (operation,)}
        yield Question("ec2:CreateTags", _arn_of(world, specification["ResourceType"], "*"), context)
    if operation in _LAUNCHES:
        yield from _of_launching(world, operation, config)


def _of_launching(world: World, operation: str, config: Params) -> Questions:
    """Of instances, now or by the fleet: templates, roles, and the tags that templates name."""
    specifications = [config] if operation == "RunInstances" else list(config.get("LaunchSpecifications") or [])
    data = list(specifications)
    for choice in config.get("LaunchTemplateConfigs") or []:
        template = _template(world, choice.get("LaunchTemplateSpecification") or {})
        if template is not None:
            yield Question(f"ec2:{operation}", ec2_arn(world, template.id), _tags(world, template.id))
            data.append(template.versions[-1][0])
    if operation != "RunInstances":
        yield Question("ec2:RunInstances", _arn_of(world, "instance", "*"))
    if config.get("IamFleetRole"):
        yield _passing(str(config["IamFleetRole"]), "spotfleet.amazonaws.com")
    profiles = (launch.get("IamInstanceProfile") or {} for launch in data)
    names = (str(profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2]) for profile in profiles)
    for name in dict.fromkeys(filter(None, names)):
        yield _passing(_role_arn(world, name), "ec2.amazonaws.com")
    for launch in data if operation != "RunInstances" else ():
        for tagged in launch.get("TagSpecifications") or []:
            context = {**_requested(tagged), "ec2:CreateAction": ("RunInstances",)}
            yield Question("ec2:CreateTags", _arn_of(world, tagged.get("ResourceType", "instance"), "*"), context)


def _requested(specification: Params | None) -> dict[str, tuple[str, ...]]:
    tags = {tag["Key"]: tag["Value"] for tag in (specification or {}).get("Tags") or []}
    keys = {"aws:TagKeys": tuple(tags)} if tags else {}
    return {**{f"aws:RequestTag/{key}": (value,) for key, value in tags.items()}, **keys}


def _passing(role: str, service: str) -> Question:
    return Question("iam:PassRole", role, {"iam:PassedToService": (service,)})


def _named(world: World, params: Params) -> Iterator[str]:
    """Every id in the parameters whose kind is known."""
    for key, value in params.items():
        if key.endswith(("Id", "Ids")):
            names = value if isinstance(value, list) else [str(value)]
            yield from (name for name in names if _kind(name))
    if params.get("LaunchTemplateName") and (template := _template(world, params)):
        yield template.id


def _template(world: World, named: Params) -> Any:
    references = named.get("LaunchTemplateId"), named.get("LaunchTemplateName")
    return next(
        (
            template
            for template in world.templates.all()
            if template.id == references[0] or template.name == references[1]
        ),
        None,
    )


def _tags(world: World, name: str) -> dict[str, tuple[str, ...]]:
    tables = (world.volumes, world.snapshots, world.instances, world.fleets, world.templates)
    resource: Any = next((table.get(name) for table in tables if table.get(name) is not None), None)
    tags = resource.tags if resource is not None else {}
    prefixes = ("ec2:ResourceTag", "aws:ResourceTag")
    return {f"{prefix}/{key}": (value,) for prefix in prefixes for key, value in tags.items()}


def _kind(name: str) -> str:
    return next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), "")


def ec2_arn(world: World, name: str) -> str:
    return _arn_of(world, _kind(name) or "unknown", name)


def _arn_of(world: World, kind: str, name: str) -> str:
    account = "" if kind in _NO_ACCOUNT else world.account
    return f"arn:{partition_of(world.region)}:ec2:{world.region}:{account}:{kind}/{name}"


def of_key(world: World, key: str, actions: Iterable[str]) -> Questions:
    """What KMS is asked of its customer `key` by EC2, in the name of EC2's caller."""
    context = {"kms:ViaService": (f"ec2.{world.region}.amazonaws.com",), "kms:GrantIsForAWSResource": ("true",)}
    for action in actions:
        yield Question(f"kms:{action}", key, context)


# ------------------------------------------------------------------------------------------------------------------ S3
def of_s3(method: str, path: str, query: str) -> Questions:
    """Of a request in path style."""
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    arguments = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    reads, writes = ("GET", "HEAD"), ("PUT", "POST")
    if not bucket:
        yield Question("s3:ListAllMyBuckets", "*")
    elif key:
        action = "GetObject" if method in reads else "PutObject" if method in writes else "DeleteObject"
        if method == "DELETE" and "uploadId" in arguments:
            action = "AbortMultipartUpload"
        yield Question(f"s3:{action}", f"arn:aws:s3:::{bucket}/{key}")
    elif part := next((part for part in _SUBRESOURCES if part in arguments), ""):
        verb = "Get" if method in reads else "Put"
        yield Question(f"s3:{verb}{_SUBRESOURCES[part]}", f"arn:aws:s3:::{bucket}")
    elif method in writes or method == "DELETE":
        action = "DeleteObject" if "delete" in arguments else "DeleteBucket" if method == "DELETE" else "CreateBucket"
        yield Question(f"s3:{action}", f"arn:aws:s3:::{bucket}" + ("/*" if "delete" in arguments else ""))
    else:
        listed = {"s3:prefix": (arguments["prefix"],)} if "prefix" in arguments else {}
        yield Question("s3:ListBucket", f"arn:aws:s3:::{bucket}", listed)


# -------------------------------------------------------------------------------------------------------- the others
def of_request(world: World, service: str, operation: str, body: bytes, path: str) -> Questions:
    """Of a call to another service: `service` as signatures name it, `operation` the API's name or the HTTP method."""
    asks = _SERVICES.get(service)
    if asks is None:
        yield Question(f"{service}:{operation}", "*")
    elif operation != "GetCallerIdentity":  # which everybody may ask
        yield from asks(world, operation, body, path)


def _arn(world: World, service: str, resource: str, account: str | None = None) -> str:
    owner = world.account if account is None else account
    return f"arn:{partition_of(world.region)}:{service}:{world.region}:{owner}:{resource}"


def _role_arn(world: World, name: str) -> str:
    """Of a role of that name; with its path where it exists, for of others IAM knows none."""
    from moto.iam.models import iam_backends

    role = next(
        (candidate for candidate in iam_backends[world.account]["aws"].roles.values() if candidate.name == name), None
    )
    path = role.path if role is not None else "/"
    return f"arn:{partition_of(world.region)}:iam::{world.account}:role{path}{name}"


def _of_iam(world: World, operation: str, body: bytes, path: str) -> Questions:
    action, form = f"iam:{operation}", dict(parse_qsl(body.decode()))
    role, profile = form.get("RoleName", ""), form.get("InstanceProfileName", "")
    if profile:
        yield Question(action, _role_arn(world, profile).replace(":role/", ":instance-profile/"))
        if role and operation == "AddRoleToInstanceProfile":
            yield _passing(_role_arn(world, role), "ec2.amazonaws.com")
    elif role:
        yield Question(action, _role_arn(world, role))
    elif service := form.get("AWSServiceName", ""):
        yield _making_service_role(world, service)
    else:
        yield Question(action, "*")


def _making_service_role(world: World, service: str) -> Question:
    from spotheal.fleet.account import service_roles

    name = service_roles.ROLES.get(service, "AWSServiceRole")
    arn = f"arn:{partition_of(world.region)}:iam::{world.account}:role/aws-service-role/{service}/{name}"
    return Question("iam:CreateServiceLinkedRole", arn, {"iam:AWSServiceName": (service,)})


def _of_sts(world: World, operation: str, body: bytes, path: str) -> Questions:
    yield Question(f"sts:{operation}", dict(parse_qsl(body.decode())).get("RoleArn", "*"))


def _of_sns(world: World, operation: str, body: bytes, path: str) -> Questions:
    yield Question(f"sns:{operation}", dict(parse_qsl(body.decode())).get("TopicArn", "*"))


def _of_ssm(world: World, operation: str, body: bytes, path: str) -> Questions:
    """By a path: asked on the path without the slash at its end. Parameters that AWS publishes are no account's."""
    parameters = _parsed(body)
    names = parameters.get("Names") or [parameters.get("Name") or str(parameters.get("Path") or "").rstrip("/")]
    for name in map(str, names):
        account = "" if name.startswith("/aws/") else None
        yield Question(f"ssm:{operation}", _arn(world, "ssm", f"parameter/{name.lstrip('/')}", account))


def _of_secrets(world: World, operation: str, body: bytes, path: str) -> Questions:
    parameters = _parsed(body)
    name = str(parameters.get("Name") or parameters.get("SecretId") or "")
    arn = name if name.startswith("arn:") else _arn(world, "secretsmanager", f"secret:{name}-AbCdEf")
    yield Question(f"secretsmanager:{operation}", arn if name else "*")


def _of_scheduler(world: World, operation: str, body: bytes, path: str) -> Questions:
    verbs = {"PUT": "UpdateSchedule", "GET": "GetSchedule", "DELETE": "DeleteSchedule", "POST": "CreateSchedule"}
    yield Question(
        f"scheduler:{verbs[operation]}", _arn(world, "scheduler", f"schedule/default/{path.rpartition('/')[2]}")
    )
    if operation in ("POST", "PUT") and (role := (_parsed(body).get("Target") or {}).get("RoleArn")):
        yield _passing(str(role), "scheduler.amazonaws.com")


def _of_efs(world: World, operation: str, body: bytes, path: str) -> Questions:
    """A mount target's network interface is made, and deleted, with the caller's permissions."""
    parameters = _parsed(body)
    kind = "MountTarget" if "/mount-targets" in path else "FileSystem"
    action = {"GET": f"Describe{kind}s", "POST": f"Create{kind}", "DELETE": f"Delete{kind}"}.get(operation, operation)
    if path.endswith("/security-groups"):
        action = "DescribeMountTargetSecurityGroups"
    context = _requested(parameters)
    named = str(parameters.get("FileSystemId") or "") or (re.findall(r"/(fs[a-z]*-\w+)", path) or ["*"])[0]
    tags = world.tags_of_file_system(named)
    systems = _arn(world, "elasticfilesystem", f"file-system/{named if named.startswith('fs-') else '*'}")
    existing = {f"aws:ResourceTag/{key}": (value,) for key, value in tags.items()}
    yield Question(f"elasticfilesystem:{action}", systems, {**context, **existing})
    if action == "CreateFileSystem":
        yield _making_service_role(world, "elasticfilesystem.amazonaws.com")
        create_context = {"elasticfilesystem:CreateAction": ("CreateFileSystem",), **context}
        yield Question("elasticfilesystem:TagResource", systems, create_context)
    elif action == "CreateMountTarget":
        yield Question("ec2:DescribeNetworkInterfaces", "*")
        yield Question("ec2:DescribeSubnets", "*")
        for place in ("network-interface", "subnet", "security-group"):
            yield Question("ec2:CreateNetworkInterface", _arn_of(world, place, "*"))
    elif action == "DeleteMountTarget":
        yield Question("ec2:DeleteNetworkInterface", _arn_of(world, "network-interface", "*"))


def _of_batch(world: World, operation: str, body: bytes, path: str) -> Questions:
    parameters = _parsed(body)
    action = _BATCH.get(path.rpartition("/")[2], f"batch:{path.rpartition('/')[2]}")
    named = list(_things_of_batch(world, parameters))
    if re.match(r"batch:(Describe|List)", action) or not named:
        yield Question(action, "*")
        return
    for arn in named:
        yield Question(action, arn)
    if parameters.get("tags"):
        yield Question("batch:TagResource", named[0])
    resources, container = parameters.get("computeResources") or {}, parameters.get("containerProperties") or {}
    if resources.get("instanceRole"):
        yield _passing(_role_arn(world, str(resources["instanceRole"]).rpartition("/")[2]), "ec2.amazonaws.com")
        for service in ("batch.amazonaws.com", "ecs.amazonaws.com"):
            yield _making_service_role(world, service)
    for role in (container.get("jobRoleArn"), container.get("executionRoleArn")):
        if role:
            yield _passing(str(role), "ecs-tasks.amazonaws.com")


def _things_of_batch(world: World, parameters: Params) -> Iterator[str]:
    kinds = {"computeEnvironmentName": "compute-environment", "computeEnvironment": "compute-environment",
             "jobQueueName": "job-queue", "jobQueue": "job-queue", "jobDefinitionName": "job-definition",
             "jobDefinition": "job-definition", "jobId": "job"}  # fmt: skip
    for field, kind in kinds.items():
        if name := str(parameters.get(field) or ""):
            yield name if name.startswith("arn:") else _arn(world, "batch", f"{kind}/{name}")


def _of_logs(world: World, operation: str, body: bytes, path: str) -> Questions:
    parameters = _parsed(body)
    group, stream = parameters.get("logGroupName"), parameters.get("logStreamName")
    resource = f"log-group:{group}" + (f":log-stream:{stream}" if stream else "")
    yield Question(f"logs:{operation}", _arn(world, "logs", resource) if group else "*")
    if parameters.get("tags"):
        yield Question("logs:TagResource", _arn(world, "logs", resource))


def _of_ecr(world: World, operation: str, body: bytes, path: str) -> Questions:
    name = _parsed(body).get("repositoryName")
    yield Question(f"ecr:{operation}", _arn(world, "ecr", f"repository/{name}") if name else "*")


def _of_instance_connect(world: World, operation: str, body: bytes, path: str) -> Questions:
    instance = str(_parsed(body).get("InstanceId") or "")
    yield Question(f"ec2-instance-connect:{operation}", ec2_arn(world, instance), _tags(world, instance))


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


_SERVICES: dict[str, Callable[[World, str, bytes, str], Iterable[Question]]] = {
    "iam": _of_iam, "sts": _of_sts, "sns": _of_sns, "ssm": _of_ssm, "secretsmanager": _of_secrets,
    "scheduler": _of_scheduler, "elasticfilesystem": _of_efs, "batch": _of_batch, "logs": _of_logs, "ecr": _of_ecr,
    "ec2-instance-connect": _of_instance_connect,
}  # fmt: skip
