"""The rehearsal's endpoint with real clients: boto3 and the aws command over HTTP, and IMDSv2 for each instance."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError
from rulebook_world import ROLE, SPECIFICATION, A, B, VirtualClock, refused

from spotheal.agent.aws.imds import NOTHING, UNKNOWN, Metadata, Rebalance, SpotAction
from spotheal.agent.protocol.clock import SystemClock
from spotheal.fleet.rehearsal.ec2.rulebook import Faults, Latencies, Rulebook
from spotheal.fleet.rehearsal.scenarios.api import Endpoint
from spotheal.fleet.rehearsal.services.authorization import OWNER
from spotheal.fleet.rehearsal.services.client import InMemoryEc2
from spotheal.fleet.rehearsal.services.elsewhere import Sink
from spotheal.fleet.rehearsal.services.imds import Imds

LATENCIES = Latencies(
    create_volume=0, attach=0, device_node=0, detach=0, snapshot=(0,), snapshot_interval=0, running=0, launch=0
)


class Cloud:
    def __init__(self) -> None:
        self.rules = Rulebook(SystemClock(), latencies=LATENCIES, seed=1)
        self.endpoint = Endpoint(self.rules)
        self._clients: dict[tuple[str, str, int], Any] = {}

    def client(self, service: str, key: str = OWNER, attempts: int = 1) -> Any:
        if (service, key, attempts) not in self._clients:  # making one costs more than all its calls here
            found = self.rules.world.keys.of(key)
            maker: Any = boto3.session.Session(key, found.secret, found.token or None, region_name="us-west-2")
            config = Config(
                retries={"mode": "standard", "total_max_attempts": attempts}, s3={"addressing_style": "path"}
            )
            made = maker.client(service, endpoint_url=self.endpoint.url, config=config)
            self._clients[service, key, attempts] = made
        return self._clients[service, key, attempts]

    def an_instance(self, **more: Any) -> str:
        params = {"MinCount": 1, "MaxCount": 1, "Placement": {"AvailabilityZone": A}, **SPECIFICATION, **more}
        return str(InMemoryEc2(self.rules).run_instances(**params)["Instances"][0]["InstanceId"])


@pytest.fixture(scope="module")
def shared() -> Iterator[Cloud]:
    cloud = Cloud()
    yield cloud
    cloud.endpoint.close()


@pytest.fixture()
def cloud(shared: Cloud) -> Cloud:
    """The endpoint with a fresh rule book behind it: its servers start once."""
    keys = shared.rules.world.keys
    shared.rules = shared.endpoint.rulebook = Rulebook(SystemClock(), latencies=LATENCIES, seed=1)
    shared.rules.world.keys = keys
    shared.rules.world.zone_of_subnet = shared.endpoint._zone_of_subnet
    shared.endpoint.store_faults = Faults()
    shared.endpoint.forwarded.clear()
    return shared


# ----------------------------------------------------------------------------------------------------------------- EC2
def story(ec2: Any) -> list[Any]:
    """What a client sees, with what differs by nature (time, request id) taken out."""
    seen: list[Any] = []

    def see(method: str, **params: Any) -> Any:
        try:
            answer = getattr(ec2, method)(**params)
        except ClientError as error:
            seen.append((method, error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]))
            return {}
        answer.pop("ResponseMetadata")
        seen.append((method, _without_time(answer)))
        return answer

    tags = [
        {"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": "data & <sets> é"}, {"Key": "e", "Value": ""}]}
    ]
    volume = see(
        "create_volume",
        AvailabilityZone=A,
        Size=7,
        VolumeType="gp3",
        Iops=4000,
        TagSpecifications=tags,
        ClientToken="t",
    )["VolumeId"]
    see("create_volume", AvailabilityZone=A, Size=8, ClientToken="t")
    see(
        "describe_volumes",
        Filters=[{"Name": "tag:Name", "Values": ["data*"]}, {"Name": "status", "Values": ["available"]}],
    )
    see(
        "run_instances",
        MinCount=1,
        MaxCount=1,
        Placement={"AvailabilityZone": B},
        UserData="#!/bin/sh",
        **SPECIFICATION,
    )
    config = {
        "IamFleetRole": ROLE,
        "TargetCapacity": 1,
        "Type": "maintain",
        "TerminateInstancesWithExpiration": True,
        "ValidUntil": datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=1),
        "LaunchSpecifications": [
            {
                **SPECIFICATION,
                "Placement": {"AvailabilityZone": A},
                "UserData": base64.b64encode(b"#!/bin/sh\n").decode(),
                "IamInstanceProfile": {"Name": "trainer"},
                "TagSpecifications": [
                    {"ResourceType": "instance", "Tags": [{"Key": "spotheal:job", "Value": "digits"}]}
                ],
            }
        ],
        "TagSpecifications": [{"ResourceType": "spot-fleet-request", "Tags": [{"Key": "a", "Value": "b"}]}],
    }
    fleet = see("request_spot_fleet", SpotFleetRequestConfig=config)["SpotFleetRequestId"]
    instances = see("describe_instances", Filters=[{"Name": "availability-zone", "Values": [A]}])["Reservations"]
    instance = instances[0]["Instances"][0]["InstanceId"]
    see("attach_volume", VolumeId=volume, InstanceId=instance, Device="/dev/sdf")
    see("attach_volume", VolumeId=volume, InstanceId=instance, Device="/dev/sdg")
    see("describe_volumes", VolumeIds=[volume])
    snapshot = see("create_snapshot", VolumeId=volume, Description="handover")["SnapshotId"]
    see("describe_snapshots", OwnerIds=["self"], Filters=[{"Name": "volume-id", "Values": [volume]}])
    see("create_tags", Resources=[snapshot, volume], Tags=[{"Key": "spotheal:purpose", "Value": "handover"}])
    see("delete_tags", Resources=[volume], Tags=[{"Key": "e"}])
    see("describe_tags", Filters=[{"Name": "resource-type", "Values": ["volume", "snapshot"]}])
    see("detach_volume", VolumeId=volume, InstanceId=instance)
    see("detach_volume", VolumeId=volume)
    see("delete_volume", VolumeId=volume)
    see("describe_volumes", VolumeIds=["vol-0123456789abcdef0"])
    see("describe_spot_fleet_requests", SpotFleetRequestIds=[fleet])
    see("describe_spot_fleet_instances", SpotFleetRequestId=fleet)
    see("describe_spot_fleet_request_history", SpotFleetRequestId=fleet, StartTime=datetime(2020, 1, 1))
    see("describe_spot_instance_requests")
    see("describe_spot_price_history", InstanceTypes=["p3.2xlarge"], AvailabilityZone=A)
    see("modify_spot_fleet_request", SpotFleetRequestId=fleet, TargetCapacity=1)
    see("get_console_output", InstanceId=instance)
    data = {"ImageId": "ami-1", "UserData": "IyEvYmluL3No", "MetadataOptions": {"HttpTokens": "required"}}
    see("create_launch_template", LaunchTemplateName="digits", LaunchTemplateData=data, ClientToken="t")
    see("describe_launch_template_versions", LaunchTemplateName="digits", Versions=["$Latest"])
    made = see(
        "create_fleet",
        ClientToken="f",
        TargetCapacitySpecification={"TotalTargetCapacity": 0, "DefaultTargetCapacityType": "spot"},
        LaunchTemplateConfigs=[{"LaunchTemplateSpecification": {"LaunchTemplateName": "digits", "Version": "1"}}],
    )
    see("describe_fleets", FleetIds=[made["FleetId"]])
    see("delete_fleets", FleetIds=[made["FleetId"]], TerminateInstances=True)
    see("cancel_spot_fleet_requests", SpotFleetRequestIds=[fleet, "sfr-no"], TerminateInstances=True)
    see("terminate_instances", InstanceIds=[instance])
    see("describe_instance_status", IncludeAllInstances=True)
    return seen


def _without_time(value: Any) -> Any:
    if isinstance(value, datetime):
        return "time"
    if isinstance(value, dict):
        return {key: _without_time(each) for key, each in value.items() if each not in ([], None)}
    if isinstance(value, list):
        return [_without_time(each) for each in value]
    return value


def test_over_http_and_in_memory_ec2_is_the_same(cloud: Cloud) -> None:
    over_http = story(cloud.client("ec2"))
    in_memory = story(InMemoryEc2(Rulebook(SystemClock(), latencies=LATENCIES, seed=1), validate=True))
    for one, other in zip(over_http, in_memory, strict=True):
        assert one == other


def test_times_and_pages_come_through(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    for _ in range(7):
        ec2.create_volume(AvailabilityZone=A, Size=1)
    pages = list(ec2.get_paginator("describe_volumes").paginate(PaginationConfig={"PageSize": 5}))
    assert [5, 2] == [len(page["Volumes"]) for page in pages]
    made = pages[0]["Volumes"][0]["CreateTime"]
    assert abs(made - datetime.now(timezone.utc)) < timedelta(minutes=1)
    assert made == cloud.rules.volumes()[0].created


def test_throttling_is_a_503_that_botocore_retries(cloud: Cloud) -> None:
    cloud.rules.faults.throttle = 1.0
    with pytest.raises(ClientError) as caught:
        cloud.client("ec2").describe_volumes()
    assert ("RequestLimitExceeded", 503) == (
        caught.value.response["Error"]["Code"],
        caught.value.response["ResponseMetadata"]["HTTPStatusCode"],
    )
    assert caught.value.response["ResponseMetadata"]["RequestId"]
    cloud.rules.faults.clear()
    cloud.rules.faults.plan("DescribeVolumes", "RequestLimitExceeded", status=503)
    assert [] == cloud.client("ec2", attempts=3).describe_volumes()["Volumes"]


def test_a_lost_reply_is_a_broken_connection(cloud: Cloud) -> None:
    cloud.rules.faults.plan("CreateVolume")
    with pytest.raises(BotoCoreError):
        cloud.client("ec2").create_volume(AvailabilityZone=A, Size=1)
    assert 1 == len(cloud.rules.volumes())


def test_the_client_token_of_boto3_makes_its_own_retry_safe(cloud: Cloud) -> None:
    cloud.rules.faults.plan("CreateVolume")
    cloud.client("ec2", attempts=3).create_volume(AvailabilityZone=A, Size=1)
    assert 1 == len(cloud.rules.volumes())


def test_a_request_that_lacks_a_parameter_is_answered_with_an_error(cloud: Cloud) -> None:
    body, key = b"Action=DeleteVolume&Version=2016-11-15", cloud.endpoint.key_of_person(OWNER)
    signed = AWSRequest("POST", cloud.endpoint.url, {"Content-Type": "application/x-www-form-urlencoded"}, body)
    SigV4Auth(Credentials(key.id, key.secret), "ec2", "us-west-2").add_auth(signed)
    request = urllib.request.Request(cloud.endpoint.url, data=body, headers=dict(signed.headers))
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=5)
    assert 400 == caught.value.code
    assert b"MissingParameter" in caught.value.read()


@pytest.mark.processes
def test_the_aws_command_works_on_it(cloud: Cloud) -> None:
    aws = shutil.which("aws")
    if aws is None:
        pytest.skip("the aws command is not installed here")
    volume = cloud.client("ec2").create_volume(AvailabilityZone=A, Size=1)["VolumeId"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "AWS_ENDPOINT_URL": cloud.endpoint.url,
        **cloud.endpoint.key_of_person(OWNER).environment,
        "AWS_DEFAULT_REGION": "us-west-2",
    }
    done = subprocess.run(
        [aws, "ec2", "describe-volumes", "--volume-ids", volume, "--output", "json"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    assert volume == json.loads(done.stdout)["Volumes"][0]["VolumeId"]


# ---------------------------------------------------------------------------------------------------------------- moto
def test_moto_answers_what_the_rule_book_does_not_own(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    subnets = ec2.describe_subnets()["Subnets"]
    assert ["a", "b", "c", "d"] == sorted(subnet["AvailabilityZone"][-1] for subnet in subnets)
    ec2.create_tags(Resources=[subnets[0]["SubnetId"]], Tags=[{"Key": "a", "Value": "b"}])
    tagged = ec2.describe_subnets(Filters=[{"Name": "tag:a", "Values": ["b"]}])["Subnets"]
    assert [subnets[0]["SubnetId"]] == [subnet["SubnetId"] for subnet in tagged]
    assert cloud.client("sts").get_caller_identity()["Account"] == cloud.rules.account
    cloud.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")
    assert "DescribeSubnets" in {call.operation.partition(":")[2] for call in cloud.endpoint.forwarded}


def test_a_fleet_goes_to_the_zone_of_its_subnet(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]}
    specification = {**SPECIFICATION, "SubnetId": subnets[B]}
    config = {"IamFleetRole": ROLE, "TargetCapacity": 3, "LaunchSpecifications": [specification]}
    ec2.request_spot_fleet(SpotFleetRequestConfig=config)
    assert [B] * 3 == [one.zone for one in cloud.rules.instances()]


def test_an_instance_is_known_by_its_credentials(cloud: Cloud) -> None:
    instance = cloud.an_instance(IamInstanceProfile={"Name": "trainer"})
    key = cloud.rules.key_of(instance)
    cloud.client("ec2", key).describe_volumes()
    assert instance == cloud.rules.calls[-1].caller
    arn = cloud.client("sts", key).get_caller_identity()["Arn"]
    assert f"arn:aws:sts::{cloud.rules.account}:assumed-role/trainer/{instance}" == arn


def test_of_many_claims_over_http_one_wins(cloud: Cloud) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="claims", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    for term in range(5):
        start, outcomes = threading.Barrier(4), []

        def claim(number: int, start: Any = start, outcomes: list[str] = outcomes, term: int = term) -> None:
            start.wait()
            try:
                s3.put_object(Bucket="claims", Key=f"terms/{term}", Body=str(number), IfNoneMatch="*")
                outcomes.append("won")
            except ClientError as error:
                outcomes.append(error.response["Error"]["Code"])

        threads = [threading.Thread(target=claim, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ["PreconditionFailed"] * 3 + ["won"] == sorted(outcomes)


def test_s3_compares_before_it_replaces(cloud: Cloud) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="ledgers", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    etag = s3.put_object(Bucket="ledgers", Key="k", Body=b"1")["ETag"]
    s3.put_object(Bucket="ledgers", Key="k", Body=b"2", IfMatch=etag)
    assert "PreconditionFailed" == refused(s3.put_object, Bucket="ledgers", Key="k", Body=b"3", IfMatch=etag)
    assert b"2" == s3.get_object(Bucket="ledgers", Key="k")["Body"].read()
    cloud.endpoint.store_faults.throttle = 1.0
    assert "SlowDown" == refused(s3.get_object, Bucket="ledgers", Key="k")


def test_large_objects_go_up_in_parts(cloud: Cloud, tmp_path: Any) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="parts", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    (tmp_path / "up").write_bytes(b"x" * (9 << 20))
    s3.upload_file(str(tmp_path / "up"), "parts", "large")
    s3.download_file("parts", "large", str(tmp_path / "down"))
    assert (tmp_path / "up").read_bytes() == (tmp_path / "down").read_bytes()


# ---------------------------------------------------------------------------------------------------------------- IMDS
@pytest.fixture()
def imds() -> Iterator[Imds]:
    rules = Rulebook(VirtualClock(), seed=1)
    config = {
        "IamFleetRole": ROLE,
        "TargetCapacity": 1,
        "LaunchSpecifications": [
            {
                **SPECIFICATION,
                "Placement": {"AvailabilityZone": A},
                "UserData": base64.b64encode(b"\x1f\x8bzip").decode(),
                "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/trainer"},
            }
        ],
    }
    InMemoryEc2(rules).request_spot_fleet(SpotFleetRequestConfig=config)
    rules.world.clock.sleep(30)
    server = Imds(rules, rules.instances()[0].id)
    yield server
    server.close()


def ask(imds: Imds, path: str, token: str | None, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(imds.url + path, method=method)
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    if token is not None:
        request.add_header("X-aws-ec2-metadata-token", token)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def a_token(imds: Imds, ttl: str = "21600") -> str:
    status, body = ask(imds, "/latest/api/token", None, "PUT", X_aws_ec2_metadata_token_ttl_seconds=ttl)
    assert 200 == status
    return body.decode()


def test_imds_wants_a_token_with_a_life_of_1_to_21600_seconds(imds: Imds) -> None:
    assert 400 == ask(imds, "/latest/api/token", None, "PUT")[0]
    for ttl in ("0", "21601", "long"):
        status, _ = ask(imds, "/latest/api/token", None, "PUT", X_aws_ec2_metadata_token_ttl_seconds=ttl)
        assert 400 == status
    for token in (None, "forged"):
        assert 401 == ask(imds, "/latest/meta-data/instance-id", token)[0]
    token = a_token(imds)
    assert (200, imds.instance.encode()) == ask(imds, "/latest/meta-data/instance-id", token)
    imds.tokens[token] = time.monotonic()
    assert 401 == ask(imds, "/latest/meta-data/instance-id", token)[0]


def test_imds_refuses_a_request_that_was_forwarded(imds: Imds) -> None:
    status, _ = ask(
        imds, "/latest/api/token", None, "PUT", X_aws_ec2_metadata_token_ttl_seconds="60", X_Forwarded_For="10.0.0.1"
    )
    assert 403 == status


def test_imds_tells_an_instance_who_it_is(imds: Imds) -> None:
    token = a_token(imds)

    def get(path: str) -> str:
        status, body = ask(imds, path, token)
        return body.decode() if status == 200 else str(status)

    assert A == get("/latest/meta-data/placement/availability-zone")
    assert "ami-0abc" == get("/latest/meta-data/ami-id")
    assert "trainer" == get("/latest/meta-data/iam/security-credentials/")
    assert {"ami-id", "instance-id", "placement/", "iam/"} <= set(get("/latest/meta-data/").splitlines())
    assert (
        imds.rulebook.key_of(imds.instance)
        == json.loads(get("/latest/meta-data/iam/security-credentials/trainer"))["AccessKeyId"]
    )
    assert (200, b"\x1f\x8bzip") == ask(imds, "/latest/user-data", token)
    for path in ("/latest/meta-data/spot/instance-action", "/latest/meta-data/tags/instance/", "/nothing", "/latest"):
        assert "404" == get(path)


def test_imds_shows_tags_where_the_launch_asked_for_them(imds: Imds) -> None:
    rules = imds.rulebook
    found = rules.instance(imds.instance)
    assert found is not None
    options = {**found.spec, "MetadataOptions": {"InstanceMetadataTags": "enabled"}}
    rules.world.instances.put(replace(found, spec=options, tags={**found.tags, "spotheal:run": "01R"}))
    assert (200, b"spotheal:run") == ask(imds, "/latest/meta-data/tags/instance/", a_token(imds))
    assert (200, b"01R") == ask(imds, "/latest/meta-data/tags/instance/spotheal:run", a_token(imds))


def test_the_agents_client_reads_it(imds: Imds) -> None:
    metadata = Metadata(imds.url)
    identity = metadata.identity()
    assert (imds.instance, A, "us-west-2", "g4dn.xlarge", "123456789012") == (
        identity.instance, identity.zone, identity.region, identity.instance_type, identity.account
    )  # fmt: skip
    assert (NOTHING, NOTHING) == (metadata.spot_action(), metadata.rebalance())
    imds.rulebook.interrupt(imds.instance)
    imds.rulebook.rebalance(imds.instance)
    now = imds.rulebook.world.clock.now()
    assert SpotAction("terminate", now + timedelta(seconds=120)) == metadata.spot_action()
    assert Rebalance(now) == metadata.rebalance()
    imds.rulebook.withdraw_notice(imds.instance)
    assert NOTHING == metadata.spot_action()


@pytest.mark.parametrize("fault", ["down", "401", "500", "503", "garbage", "html"])
def test_an_ill_imds_gives_no_notice(imds: Imds, fault: str) -> None:
    imds.rulebook.interrupt(imds.instance)
    imds.fault = fault
    metadata = Metadata(imds.url)
    assert UNKNOWN == metadata.spot_action()
    imds.fault = ""
    assert isinstance(metadata.spot_action(), SpotAction)


def test_a_slow_imds_answers_late(imds: Imds) -> None:
    imds.fault, imds.slow_seconds = "slow", 0.3
    began = time.monotonic()
    assert 200 == ask(imds, "/latest/api/token", None, "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")[0]
    assert time.monotonic() - began >= 0.3


def test_the_imds_of_a_terminated_instance_is_silent(imds: Imds) -> None:
    token = a_token(imds)
    imds.rulebook.kill(imds.instance)
    with pytest.raises((urllib.error.URLError, ConnectionError, socket.timeout)):
        ask(imds, "/latest/meta-data/instance-id", token)


def test_boto3_takes_the_credentials_of_its_instance(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    instance = cloud.an_instance(IamInstanceProfile={"Name": "trainer"})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", cloud.endpoint.metadata_url(instance))
    maker: Any = boto3.session.Session(region_name="us-west-2")
    maker.client("ec2", endpoint_url=cloud.endpoint.url).describe_volumes()
    assert instance == cloud.rules.calls[-1].caller


def test_the_webhook_of_a_rehearsal_takes_messages_at_its_own_address_alone() -> None:
    """Whoever may open a port of this machine could have told it of ends that never were."""
    sink = Sink()
    try:
        _, _, place, key = sink.url.split("/")
        address = f"http://{place}/"

        def post(url: str, body: bytes) -> int:
            try:
                with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        told = b'{"event": "done"}'
        assert [post(url, told) for url in (address, address + "x" * len(key))] == [404] * 2
        assert [post(sink.url, body) for body in (b"[" * 100_000, b"\xff", b"[]", b"{}")] == [400] * 4
        assert len(key) > 20 and sink.events == []
        assert post(sink.url, told) == 200 and sink.events == ["done"]
    finally:
        sink.close()
