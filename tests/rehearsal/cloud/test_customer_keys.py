"""Volumes under a customer key of KMS: what EC2 asks KMS in its caller's name, and what follows if the answer is no."""

from __future__ import annotations

import pytest
from moto.kms.models import kms_backends
from rulebook_world import A, B, Region

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.protocol.errors import ConfigError, PermissionDenied
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.volume.first import first_volume
from spotheal.fleet.account import volumes
from spotheal.fleet.rehearsal.services.authorization import Authorization, Documents
from spotheal.fleet.rehearsal.services.client import InMemoryEc2
from spotheal.iam import policies

ACCOUNT, REGION = "123456789012", "us-west-2"
USE, GRANT = "UseKey", "GrantKey"


class World:
    """A region with a machine, and what the policies of its role say."""

    def __init__(self) -> None:
        self.region = Region()
        self.backend = kms_backends[ACCOUNT][REGION]
        self.key = self.new_key()
        self.documents: Documents = []
        authorization = Authorization(self.region.rules.world, lambda role: self.documents)
        self.region.rules.world.may_use_key = authorization.may_use_key
        self.instance = self.region.an_instance()
        self.client = InMemoryEc2(self.region.rules, caller=self.instance)

    def new_key(self) -> str:
        made = self.backend.create_key(
            policy="", key_usage="ENCRYPT_DECRYPT", key_spec="SYMMETRIC_DEFAULT", description="", tags=[]
        )
        return str(made.arn)

    def allow(self, *without: str, key: str = "") -> None:
        """What `request` gives the role of a job with that [volume] kms_key, `without` some statements."""
        scope = policies.Scope(ACCOUNT, REGION, StoreUrl("bucket", ""), kms_key=key or self.key)
        document = policies.instance_with_key(scope)
        kept = [one for one in document["Statement"] if one["Sid"] not in without]
        self.documents = [{**document, "Statement": kept}]

    def volume(self, **more: object) -> str:
        asked = {"AvailabilityZone": A, "Size": 10, "VolumeType": "gp3", "Encrypted": True, "KmsKeyId": self.key}
        made = self.client.create_volume(**{**asked, **more})
        self.region.after(30)
        return str(made["VolumeId"])

    def is_there(self, volume: str) -> bool:
        return self.region.rules.world.volumes.get(volume) is not None

    def attach(self, volume: str) -> None:
        Ec2(self.client).attach(volume, self.instance, "/dev/sdf")


@pytest.fixture
def world() -> World:
    return World()


def test_a_role_of_a_job_with_a_key_makes_attaches_and_moves_its_volumes(world: World) -> None:
    world.allow()
    volume = world.volume()
    world.attach(volume)
    world.region.after(30)
    snapshot = world.client.create_snapshot(VolumeId=volume)["SnapshotId"]
    world.region.after(120)
    assert world.is_there(world.volume(AvailabilityZone=B, SnapshotId=snapshot))


def test_a_volume_whose_key_its_maker_may_not_use_vanishes(world: World) -> None:
    """AWS answers as if it were made; its describes never show it available (aws-ebs-csi-driver issue 3010)."""
    world.allow(USE)
    assert not world.is_there(world.volume())
    world.documents = []
    assert not world.is_there(world.volume())


@pytest.mark.parametrize("state", ["Disabled", "PendingDeletion"])
def test_a_key_that_is_not_enabled_makes_no_volume(world: World, state: str) -> None:
    world.allow()
    world.backend.keys[world.key.rpartition("/")[2]].key_state = state
    assert not world.is_there(world.volume())


def test_a_volume_is_attached_with_a_grant_alone_and_the_refusal_names_the_next_step(world: World) -> None:
    world.allow(GRANT)
    volume = world.volume()
    with pytest.raises(PermissionDenied, match="unable to access the KMS master key") as refused:
        world.attach(volume)
    assert "aws kms describe-key" in refused.value.next_step and "kms_key" in refused.value.next_step


def test_a_snapshot_of_another_key_needs_both_keys(world: World) -> None:
    world.allow()
    volume = world.volume()
    snapshot = world.client.create_snapshot(VolumeId=volume)["SnapshotId"]
    world.region.after(120)
    first, world.key = world.key, world.new_key()
    world.allow()
    assert not world.is_there(world.volume(SnapshotId=snapshot))
    both = [*world.documents]
    world.allow(key=first)
    world.documents += both
    assert world.is_there(world.volume(SnapshotId=snapshot))


def test_every_first_volume_of_a_job_has_its_key() -> None:
    key = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/mrk-1"
    table = {"job": {"name": "j", "repository": "https://h/r", "command": ["python", "train.py"]}}
    job = parse_job({**table, "volume": {"kms_key": key}})
    specs = [first_volume(job, "run", A), volumes.blank(job, A, 10, "gp3")]
    specs.append(first_volume(parse_job({**table, "volume": {"kms_key": key, "snapshot": "snap-1"}}), "run", A))
    for spec in specs:
        assert (True, key) == (spec.request()["Encrypted"], spec.request()["KmsKeyId"])
    assert "KmsKeyId" not in first_volume(parse_job(table), "run", A).request()
    with pytest.raises(ConfigError, match="kms_key"):
        parse_job({**table, "volume": {"kms_key": "alias/mine"}})
