"""The role of caged trainers at the rehearsal's cloud: taken with the instance's role, handed out by the relay, and
good for what role and job's policy both allow."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from cloud_desk import CloudDesk, cloud_desk, owner, served
from fleet_desk import HandClock

from spotheal.agent.cage.imds_proxy import Relay
from spotheal.agent.cage.trainer_role import TrainerRole
from spotheal.agent.protocol.clock import Clock, SystemClock, never
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.fleet.account import roles
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.services.client import InMemoryEc2
from spotheal.fleet.run.session import Session

__all__ = ["cloud_desk", "served"]  # fixtures
PLACE = {"AvailabilityZone": "us-west-2a"}


def reads(*buckets: str) -> dict[str, Any]:
    """A policy: to read what is in these buckets."""
    one = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": [f"arn:aws:s3:::{name}/*" for name in buckets]}
    return {"Version": "2012-10-17", "Statement": [one]}


def client(desk: CloudDesk, service: str, key: str, secret: str = "secret", token: str = "") -> Any:
    maker: Any = boto3.session.Session(key, secret, token or None, region_name="us-west-2")
    config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
    return maker.client(service, endpoint_url=desk.cloud.url, config=config)


def refusal(call: Any, **arguments: Any) -> str:
    try:
        call(**arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


@pytest.fixture
def account(cloud_desk: CloudDesk) -> Any:
    """Roles as `iam create` makes them: trainers may read two buckets; the store has an object, too."""
    (cloud_desk.folder / "policy.json").write_text(json.dumps(reads("data", "more")))
    cloud_desk.good("iam", "create", "--yes")
    cloud_desk.good("iam", "create", "--yes", "--job", "cifar", "--trainer-policy", "policy.json")
    s3 = owner("s3")
    for bucket in ("data", "more", "store"):
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        s3.put_object(Bucket=bucket, Key="x", Body=bucket.encode())
    yield cloud_desk
    for bucket in ("data", "more", "store"):
        s3.delete_object(Bucket=bucket, Key="x")
        s3.delete_bucket(Bucket=bucket)
    cloud_desk.good("iam", "delete", "--yes", "--job", "cifar")
    cloud_desk.good("iam", "delete", "--yes")


def instance_with(desk: CloudDesk, profile: str) -> str:
    ec2 = InMemoryEc2(desk.cloud.rules)
    launch = {"MinCount": 1, "MaxCount": 1, "ImageId": EXAMPLE_IMAGE, "InstanceType": "g5.xlarge"}
    for _ in range(100):  # a profile made a moment ago is not known everywhere yet
        try:
            made = ec2.run_instances(**launch, Placement=PLACE, IamInstanceProfile={"Name": profile})
            return str(made["Instances"][0]["InstanceId"])
        except ClientError:
            SystemClock().sleep(0.1)
    raise AssertionError(f"{profile} never became usable")


def role_of(desk: CloudDesk, instance: str, policy: dict[str, Any], clock: Clock | None = None) -> TrainerRole:
    key = desk.cloud.rules.world.keys.of(desk.cloud.rules.key_of(instance))
    sts = client(desk, "sts", key.id, key.secret, key.token)
    return TrainerRole(sts, clock or SystemClock(), "123456789012", "us-west-2", "cifar", instance, json.dumps(policy))


def ask(relay: Relay, path: str, method: str = "GET", **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(relay.url + path, method=method, headers=named)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_trainer_has_from_the_relay_what_its_role_and_its_jobs_policy_both_allow(account: CloudDesk) -> None:
    role = role_of(account, instance_with(account, "spotheal-instance"), reads("data", "store"))
    role.check(never())
    relay = Relay(lambda _: None, role.credentials)
    try:
        token = ask(relay, "/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
        below = "/latest/meta-data/iam/security-credentials/"
        name = ask(relay, below, X_aws_ec2_metadata_token=token)
        given = json.loads(ask(relay, below + name, X_aws_ec2_metadata_token=token))
    finally:
        relay.close()
    keys = given["AccessKeyId"], given["SecretAccessKey"], given["Token"]
    s3, ec2 = client(account, "s3", *keys), client(account, "ec2", *keys)
    assert s3.get_object(Bucket="data", Key="x")["Body"].read() == b"data"
    assert refusal(s3.get_object, Bucket="more", Key="x") == "AccessDenied", "the role may, this job's policy does not"
    assert refusal(s3.get_object, Bucket="store", Key="x") == "AccessDenied", "the policy would, the role may not"
    assert refusal(s3.put_object, Bucket="data", Key="y", Body=b"") == "AccessDenied"
    assert refusal(ec2.describe_volumes) == "UnauthorizedOperation"


def test_a_machine_with_another_role_cannot_take_it(account: CloudDesk) -> None:
    iam = owner("iam")
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    iam.create_role(RoleName="theirs", AssumeRolePolicyDocument=trust)
    iam.put_role_policy(RoleName="theirs", PolicyName="all", PolicyDocument=json.dumps(everything))
    iam.create_instance_profile(InstanceProfileName="theirs")
    iam.add_role_to_instance_profile(InstanceProfileName="theirs", RoleName="theirs")
    with pytest.raises(SetupFailed, match="trainer's role cannot be taken"):
        role_of(account, instance_with(account, "theirs"), reads("data"), HandClock()).check(never())


def test_a_role_that_is_not_there_fails_the_set_up_with_the_way_to_it(account: CloudDesk) -> None:
    roles.delete_role(Session("us-west-2"), "spotheal-trainer-cifar", has_profile=False)
    with pytest.raises(SetupFailed) as caught:
        role_of(account, instance_with(account, "spotheal-instance"), reads("data"), HandClock()).check(never())
    assert "iam create" in caught.value.next_step
