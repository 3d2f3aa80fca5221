"""The table tests/data/aws_facts.toml, and the local cloud that its questions are put to."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from spotheal.agent.protocol.clock import SystemClock
from spotheal.fleet.rehearsal.batch.batch import Batch
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies, Rulebook
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.scenarios.api import Endpoint
from spotheal.fleet.rehearsal.services.authorization import OWNER

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH = Path(__file__).resolve().parents[1] / "data" / "aws_facts.toml"
REGION = "us-west-2"
A, B = f"{REGION}a", f"{REGION}b"
_TRUST = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
_LATENCIES = Latencies(
    create_volume=0, attach=0, device_node=0, detach=0, delete_volume=0, snapshot=(3600,), snapshot_interval=0,
    running=0, launch=0,
)  # fmt: skip


@functools.cache
def table() -> Mapping[str, Any]:
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def facts() -> list[dict[str, Any]]:
    return list(table()["fact"])


class World:
    """A local cloud with a fresh thing for every question. `close` it."""

    def __init__(self) -> None:
        rules = Rulebook(SystemClock(), REGION, latencies=_LATENCIES, seed=1)
        self.endpoint = Endpoint(rules)
        self.endpoint.batch = Batch(rules, _no_container)
        self.endpoint.efs.seconds = type(self.endpoint.efs.seconds)(0, 0, 0)
        self._numbers = itertools.count(1)
        self._clients: dict[str, Any] = {}
        ec2 = self.client("ec2")
        vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
        subnets = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]
        self.known: dict[str, Any] = {
            "region": REGION, "zone": A, "vpc": vpc, "bucket": "facts",
            "role_arn": "arn:aws:iam::123456789012:role/facts",
            "subnet": subnets[0]["SubnetId"], "trust": json.dumps({"Version": "2012-10-17", "Statement": [_TRUST]}),
            "image": EXAMPLE_IMAGE,
            "since": datetime(2020, 1, 1, tzinfo=timezone.utc),
        }  # fmt: skip
        self.client("s3").create_bucket(Bucket="facts", CreateBucketConfiguration={"LocationConstraint": REGION})

    def close(self) -> None:
        self.endpoint.close()

    def client(self, service: str) -> Any:
        if service not in self._clients:
            key = self.endpoint.key_of_person(OWNER)
            maker: Any = boto3.session.Session(key.id, key.secret, region_name=REGION)
            config = Config(retries={"total_max_attempts": 1, "mode": "standard"}, s3={"addressing_style": "path"})
            self._clients[service] = maker.client(service, endpoint_url=self.endpoint.url, config=config)
        return self._clients[service]

    def ask(self, fact: Mapping[str, Any]) -> tuple[int, str, dict[str, Any]]:
        """Status, code, and the answer or the error."""
        known = {**self.known, "key": f"key-{next(self._numbers)}"}
        for name in fact.get("given", []):
            known |= _GIVEN[name](self, known)
        params = _filled(fact.get("params", {}), known)
        try:
            answer = getattr(self.client(fact["service"]), fact["call"])(**params)
        except ClientError as error:
            said: dict[str, Any] = dict(error.response["Error"])
            return error.response["ResponseMetadata"]["HTTPStatusCode"], said["Code"], said
        return answer["ResponseMetadata"]["HTTPStatusCode"], "", answer

    def name(self) -> str:
        return f"facts-{next(self._numbers)}"


def _no_container(*_: Any) -> Any:
    raise AssertionError("no fact starts a container")


def _filled(value: Any, known: Mapping[str, Any]) -> Any:
    """`value` with its $words replaced; a word that is all of a text keeps its type."""
    if isinstance(value, dict):
        return {key: _filled(one, known) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, known) for one in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    if value[1:] in known:
        return known[value[1:]]
    for word in sorted(known, key=len, reverse=True):
        value = value.replace(f"${word}", str(known[word]))
    return value


def holds(answer: Any, field: str) -> bool:
    """Whether the field is there, in each item of lists on the way, of which there is at least one."""
    head, _, rest = field.partition(".")
    if isinstance(answer, list):
        return bool(answer) and all(holds(one, field) for one in answer)
    if not isinstance(answer, Mapping) or head not in answer:
        return False
    return not rest or holds(answer[head], rest)


# --------------------------------------------------------------------------------------------------------- preparations
Known = Mapping[str, Any]


def _object(world: World, known: Known) -> dict[str, Any]:
    etag = world.client("s3").put_object(Bucket=known["bucket"], Key=known["key"], Body=b"0123456789")["ETag"]
    return {"etag": etag, "bare": etag.strip('"')}


def _deleted_object(world: World, known: Known) -> dict[str, Any]:
    made = _object(world, known)
    world.client("s3").delete_object(Bucket=known["bucket"], Key=known["key"])
    return made


def _upload(world: World, known: Known) -> dict[str, Any]:
    s3, where = world.client("s3"), {"Bucket": known["bucket"], "Key": known["key"]}
    upload = s3.create_multipart_upload(**where)["UploadId"]
    return {"upload": upload, "part": s3.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x")["ETag"]}


def _volume(world: World, known: Known) -> dict[str, Any]:
    token = world.name()
    made = world.client("ec2").create_volume(AvailabilityZone=A, Size=1, ClientToken=token)
    return {"volume": made["VolumeId"], "token": token}


def _instances(world: World, known: Known) -> dict[str, Any]:
    def run(zone: str) -> str:
        place = {"AvailabilityZone": zone}
        made = world.client("ec2").run_instances(
            ImageId=known["image"], InstanceType="m5.large", MinCount=1, MaxCount=1, Placement=place
        )
        return str(made["Instances"][0]["InstanceId"])

    return {"instance": run(A), "elsewhere": run(B)}


def _attached(world: World, known: Known) -> dict[str, Any]:
    made = {**_volume(world, known), **_instances(world, known), "other": _volume(world, known)["volume"]}
    world.client("ec2").attach_volume(VolumeId=made["volume"], InstanceId=made["instance"], Device="/dev/sdf")
    return made


def _pending_snapshot(world: World, known: Known) -> dict[str, Any]:
    made = _volume(world, known)
    return {**made, "snapshot": world.client("ec2").create_snapshot(VolumeId=made["volume"])["SnapshotId"]}


def _group(world: World, known: Known) -> dict[str, Any]:
    name, ec2 = world.name(), world.client("ec2")
    group = ec2.create_security_group(GroupName=name, Description="x", VpcId=known["vpc"])["GroupId"]
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    return {"group": group, "name": name}


def _template(world: World, known: Known) -> dict[str, Any]:
    name = world.name()
    data = {"InstanceType": "m5.large", "ImageId": known["image"]}
    world.client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    return {"template": name}


def _fleet(world: World, known: Known) -> dict[str, Any]:
    config = {
        "IamFleetRole": known["role_arn"], "TargetCapacity": 1, "Type": "maintain",
        "LaunchSpecifications": [{"ImageId": known["image"], "InstanceType": "m5.large"}],
    }  # fmt: skip
    return {"fleet": world.client("ec2").request_spot_fleet(SpotFleetRequestConfig=config)["SpotFleetRequestId"]}


def _role(world: World, known: Known) -> dict[str, Any]:
    name, iam = world.name(), world.client("iam")
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=known["trust"])
    iam.create_instance_profile(InstanceProfileName=name)
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return {"role": name}


def _parameter(world: World, known: Known) -> dict[str, Any]:
    name = f"/spotheal/x/{world.name()}"
    world.client("ssm").put_parameter(Name=name, Value="v", Type="SecureString")
    return {"parameter": name}


def _secret(world: World, known: Known) -> dict[str, Any]:
    name = f"spotheal/x/{world.name()}"
    world.client("secretsmanager").create_secret(Name=name, SecretString="v")
    return {"secret": name}


def _deleted_secret(world: World, known: Known) -> dict[str, Any]:
    made = _secret(world, known)
    world.client("secretsmanager").delete_secret(SecretId=made["secret"])
    return made


def _log_group(world: World, known: Known) -> dict[str, Any]:
    name = f"/spotheal/{world.name()}"
    world.client("logs").create_log_group(logGroupName=name)
    return {"group": name}


def _repository(world: World, known: Known) -> dict[str, Any]:
    name = world.name()
    world.client("ecr").create_repository(repositoryName=name)
    return {"repository": name}


def _file_system(world: World, known: Known) -> dict[str, Any]:
    token = world.name()
    return {"token": token, "system": world.client("efs").create_file_system(CreationToken=token)["FileSystemId"]}


def _mount_target(world: World, known: Known) -> dict[str, Any]:
    made = _file_system(world, known)
    where = {"FileSystemId": made["system"], "SubnetId": known["subnet"]}
    return {**made, "target": world.client("efs").create_mount_target(**where)["MountTargetId"]}


def _job_definition(world: World, known: Known) -> dict[str, Any]:
    name, needs = world.name(), [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
    made = world.client("batch").register_job_definition(
        jobDefinitionName=name, type="container", containerProperties={"image": "x", "resourceRequirements": needs}
    )
    return {"name": name, "definition": made["jobDefinitionArn"]}


def _schedule(world: World, known: Known) -> dict[str, Any]:
    name = world.name()
    target = {"Arn": "arn:aws:scheduler:::aws-sdk:ec2:modifySpotFleetRequest", "RoleArn": known["role_arn"]}
    world.client("scheduler").create_schedule(
        Name=name, ScheduleExpression="at(2030-01-01T00:00:00)", FlexibleTimeWindow={"Mode": "OFF"},
        Target={**target, "Input": "{}"},
    )  # fmt: skip
    return {"schedule": name}


_GIVEN: dict[str, Callable[[World, Known], dict[str, Any]]] = {
    "no object": lambda world, known: {},
    "object": _object,
    "deleted object": _deleted_object,
    "upload": _upload,
    "volume": _volume,
    "instances": _instances,
    "attached volume": _attached,
    "pending snapshot": _pending_snapshot,
    "group": _group,
    "template": _template,
    "fleet": _fleet,
    "role": _role,
    "parameter": _parameter,
    "secret": _secret,
    "deleted secret": _deleted_secret,
    "log group": _log_group,
    "repository": _repository,
    "file system": _file_system,
    "mount target": _mount_target,
    "schedule": _schedule,
    "job definition": _job_definition,
}
