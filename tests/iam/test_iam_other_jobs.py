"""With the role that `fleetctl request` gives a job's instances nothing of another job can be touched: each call is
made at the rehearsal's cloud, which asks the policies as AWS would, and is refused; the same on its own is allowed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import PermissionDenied
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies, Rulebook
from spotheal.fleet.rehearsal.scenarios.api import Endpoint
from spotheal.fleet.rehearsal.services.authorization import OWNER
from spotheal.fleet.rehearsal.services.client import InMemoryEc2

ZONE = "us-west-2a"
QUICK = Latencies(
    create_volume=0, attach=0, device_node=0, detach=0, delete_volume=0, snapshot=(0,), snapshot_interval=0, running=0,
    shutdown=0, launch=0, replacement=0, set_aside=0, fleet_terminate=0,
)  # fmt: skip
REFUSED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
_tokens = itertools.count()


@dataclass
class Job:
    """What one job has in the account."""

    name: str
    run: str
    volume: str = ""
    old_volume: str = ""
    snapshot: str = ""
    fleet: str = ""
    instance: str = ""

    def tags(self, kind: str, state: str = "current") -> list[dict[str, Any]]:
        tags = {"spotheal:job": self.name, "spotheal:run": self.run, "spotheal:state": state}
        return [{"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}]


class Account:
    """Two jobs; `client` speaks as the first one's instance."""

    def __init__(self) -> None:
        self.rules = Rulebook(SystemClock(), latencies=QUICK, seed=1)
        self.endpoint = Endpoint(self.rules)
        self.operator: Any = InMemoryEc2(self.rules)
        self.ours, self.theirs = self._job("cifar", "01" + "A" * 24), self._job("imagenet", "01" + "B" * 24)
        self._clients: dict[str, Any] = {}
        for job in (self.ours, self.theirs):
            key = f"{job.name}/{job.run}/status.json"
            self._make("s3", OWNER).put_object(Bucket=self._bucket(), Key=key, Body=b"{}")

    def _bucket(self) -> str:
        s3 = self._make("s3", OWNER)
        if "store" not in [one["Name"] for one in s3.list_buckets()["Buckets"]]:
            s3.create_bucket(Bucket="store", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        return "store"

    def _job(self, name: str, run: str) -> Job:
        job, ec2 = Job(name, run), self.operator
        place = {"AvailabilityZone": ZONE, "Size": 1, "VolumeType": "gp3"}
        job.volume = ec2.create_volume(**place, TagSpecifications=job.tags("volume"))["VolumeId"]
        job.old_volume = ec2.create_volume(**place, TagSpecifications=job.tags("volume", "superseded"))["VolumeId"]
        job.snapshot = ec2.create_snapshot(VolumeId=job.volume, TagSpecifications=job.tags("snapshot"))["SnapshotId"]
        launch = {"ImageId": "ami-00000000000000001", "InstanceType": "g5.xlarge",
                  "Placement": {"AvailabilityZone": ZONE}}  # fmt: skip
        job.instance = ec2.run_instances(
            MinCount=1, MaxCount=1, IamInstanceProfile={"Name": f"spotheal-job-{name}"},
            TagSpecifications=job.tags("instance"), **launch,
        )["Instances"][0]["InstanceId"]  # fmt: skip
        job.fleet = ec2.request_spot_fleet(SpotFleetRequestConfig={
            "IamFleetRole": "arn:aws:iam::123456789012:role/fleet", "TargetCapacity": 1,
            "LaunchSpecifications": [launch], "AllocationStrategy": "lowestPrice",
            "TagSpecifications": job.tags("spot-fleet-request"),
        })["SpotFleetRequestId"]  # fmt: skip
        return job

    def _make(self, service: str, key: str) -> Any:
        found = self.rules.world.keys.of(key)
        maker: Any = boto3.session.Session(key, found.secret, found.token or None, region_name="us-west-2")
        config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        return maker.client(service, endpoint_url=self.endpoint.url, config=config)

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._make(service, self.rules.key_of(self.ours.instance))
        return self._clients[service]


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    found = Account()
    yield found
    found.endpoint.close()


def is_refused(call: Callable[[], Any]) -> bool:
    """Whether IAM says no; another fault of the call is past that."""
    try:
        call()
    except ClientError as error:
        return error.response["Error"]["Code"] in REFUSED
    return False


TAGS = [{"Key": "spotheal:state", "Value": "superseded"}]
OTHERS = [{"Key": "spotheal:job", "Value": "cifar"}]
_TOKENS: Callable[[], str] = lambda: f"token-{next(_tokens)}"  # noqa: E731
# verb -> the call on a job's things, as an instance of ours makes it
CALLS: dict[str, Callable[[Account, Job], Any]] = {
    "attach its volume": lambda a, j: a.client("ec2").attach_volume(
        VolumeId=j.old_volume, InstanceId=a.ours.instance, Device="/dev/sdf"),
    "attach a volume to its instance": lambda a, j: a.client("ec2").attach_volume(
        VolumeId=a.ours.old_volume, InstanceId=j.instance, Device="/dev/sdg"),
    "detach its volume": lambda a, j: a.client("ec2").detach_volume(VolumeId=j.old_volume),
    "tag its volume": lambda a, j: a.client("ec2").create_tags(Resources=[j.volume], Tags=TAGS),
    "tag its snapshot": lambda a, j: a.client("ec2").create_tags(Resources=[j.snapshot], Tags=TAGS),
    "tag its instance": lambda a, j: a.client("ec2").create_tags(Resources=[j.instance], Tags=TAGS),
    "copy its volume": lambda a, j: a.client("ec2").create_snapshot(
        VolumeId=j.volume, TagSpecifications=a.ours.tags("snapshot")),
    "copy its snapshot": lambda a, j: a.client("ec2").create_volume(
        SnapshotId=j.snapshot, AvailabilityZone=ZONE, TagSpecifications=a.ours.tags("volume"), ClientToken=_TOKENS()),
    "make a volume in its name": lambda a, j: a.client("ec2").create_volume(
        Size=1, AvailabilityZone=ZONE, TagSpecifications=j.tags("volume"), ClientToken=_TOKENS()),
    "read its objects": lambda a, j: a.client("s3").get_object(Bucket="store", Key=f"{j.name}/{j.run}/status.json"),
    "write its objects": lambda a, j: a.client("s3").put_object(
        Bucket="store", Key=f"{j.name}/{j.run}/status.json", Body=b"{}"),
    "list its objects": lambda a, j: a.client("s3").list_objects_v2(Bucket="store", Prefix=f"{j.name}/"),
    "delete its objects": lambda a, j: a.client("s3").delete_object(
        Bucket="store", Key=f"{j.name}/{j.run}/status.json"),
    "read its secrets": lambda a, j: a.client("ssm").get_parameters(Names=[f"/spotheal/{j.name}/TOKEN"]),
    "delete its snapshot": lambda a, j: a.client("ec2").delete_snapshot(SnapshotId=j.snapshot),
    "delete its volume": lambda a, j: a.client("ec2").delete_volume(VolumeId=j.old_volume),
    "resize its fleet": lambda a, j: a.client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=j.fleet, TargetCapacity=1),
    "cancel its fleet": lambda a, j: a.client("ec2").cancel_spot_fleet_requests(
        SpotFleetRequestIds=[j.fleet], TerminateInstances=False),
    "terminate its instance": lambda a, j: a.client("ec2").terminate_instances(InstanceIds=[j.instance]),
}  # fmt: skip


@pytest.mark.parametrize("verb", CALLS)
def test_an_instance_cannot(account: Account, verb: str) -> None:
    """… of another job; of its own it can, and so the call is no other's to refuse."""
    assert is_refused(lambda: CALLS[verb](account, account.theirs)), f"an instance can {verb}"


@pytest.mark.parametrize("verb", [verb for verb in CALLS if verb != "terminate its instance"])
def test_on_its_own_jobs_things_the_same_call_is_allowed(account: Account, verb: str) -> None:
    assert not is_refused(lambda: CALLS[verb](account, account.ours))


def test_an_instance_cannot_make_another_jobs_volume_its_own(account: Account) -> None:
    ec2 = account.client("ec2")
    assert is_refused(lambda: ec2.create_tags(Resources=[account.theirs.volume], Tags=OTHERS))
    assert is_refused(lambda: ec2.create_tags(Resources=[account.ours.volume], Tags=OTHERS)), "nor change whose it is"


def test_a_volume_that_an_instance_makes_with_another_jobs_run_is_not_taken_for_that_runs(account: Account) -> None:
    """IAM cannot say which runs are a job's: the highest term of a run's volumes would win, whoever made it."""
    ours, theirs = account.ours, account.theirs
    tags = {"job": ours.name, "run": theirs.run, "state": "current", "term": "999", "purpose": "handover"}
    asked = [{"Key": f"spotheal:{key}", "Value": value} for key, value in tags.items()]
    ec2 = account.client("ec2")
    of = lambda kind: [{"ResourceType": kind, "Tags": asked}]  # noqa: E731
    ec2.create_volume(Size=1, AvailabilityZone=ZONE, TagSpecifications=of("volume"), ClientToken=_TOKENS())
    ec2.create_snapshot(VolumeId=ours.volume, TagSpecifications=of("snapshot"))
    for cloud, job in ((Ec2(account.operator, theirs.name), ""), (Ec2(account.operator), theirs.name)):
        assert {volume.id for volume in cloud.volumes_of_run(theirs.run, job)} == {theirs.volume, theirs.old_volume}
    seen = Ec2(account.operator, theirs.name).snapshots_of_run(theirs.run)
    assert {snapshot.id for snapshot in seen} <= {theirs.snapshot}


def test_an_instance_cannot_delete_its_current_volume(account: Account) -> None:
    current = account.operator.create_volume(
        AvailabilityZone=ZONE, Size=1, TagSpecifications=account.ours.tags("volume"), ClientToken=_TOKENS()
    )["VolumeId"]
    assert is_refused(lambda: account.client("ec2").delete_volume(VolumeId=current))


def test_an_instance_cannot_list_the_whole_store(account: Account) -> None:
    s3 = account.client("s3")
    for which in ({"Prefix": ""}, {}, {"Delimiter": "/", "MaxKeys": 1000}):
        assert is_refused(lambda: s3.list_objects_v2(Bucket="store", **which)), which  # noqa: B023


@pytest.mark.parametrize("told", [True, False], ids=["404 below the prefix", "403 everywhere"])
def test_an_absent_object_is_told_from_a_closed_one_whichever_way_s3_answers(account: Account, told: bool) -> None:
    s3, name = account.client("s3"), f"{account.ours.name}/{account.ours.run}"
    account.endpoint.authorization.key_counts_as_prefix = told
    for absent in (f"{name}/nothing", f"{name}/with space+plus/100%"):
        with pytest.raises(ClientError) as answer:
            s3.get_object(Bucket="store", Key=absent)
        assert ("NoSuchKey" if told else "AccessDenied") == answer.value.response["Error"]["Code"]
        with pytest.raises(ClientError) as answer:
            s3.head_object(Bucket="store", Key=absent)
        assert ("404" if told else "403") == answer.value.response["Error"]["Code"]
    for call in (s3.get_object, s3.head_object):
        assert_forbidden(lambda: call(Bucket="store", Key=f"{account.theirs.name}/nothing"))  # noqa: B023
    assert Store(s3, StoreUrl("store", name)).get_bytes("nothing") is None
    with pytest.raises(PermissionDenied):
        Store(s3, StoreUrl("store", f"{account.theirs.name}/{account.theirs.run}")).get_bytes("nothing")


def assert_forbidden(call: Callable[[], Any]) -> None:
    with pytest.raises(ClientError) as answer:
        call()
    assert 403 == answer.value.response["ResponseMetadata"]["HTTPStatusCode"]
