"""What a kind local cloud hid: keys that EC2 does not import, buckets that are young, machines that only stop."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from cloud_desk import CloudDesk, cloud_desk, owner, served
from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels
from rulebook_world import A, Region
from typer.testing import CliRunner

from spotheal.fleet.account import network
from spotheal.fleet.account.images import DEEP_LEARNING_FAMILIES
from spotheal.fleet.account.types import KNOWN, Need, suits
from spotheal.fleet.cli import app
from spotheal.fleet.rehearsal.scenarios.api import is_importable
from spotheal.fleet.rehearsal.services import account
from spotheal.fleet.request import submit
from spotheal.fleet.run.session import Session

__all__ = ["cloud_desk", "desk", "moto_clients", "served", "wheels"]  # fixtures


def test_init_picks_no_key_that_ec2_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ecdsa.pub").write_text("ecdsa-sha2-nistp256 AAAA me")
    assert network.public_key() is None
    (tmp_path / ".ssh" / "id_rsa.pub").write_text("ssh-rsa AAAA me")
    assert network.public_key() == tmp_path / ".ssh" / "id_rsa.pub"


@pytest.mark.parametrize(("key", "taken"), [("ssh-ed25519 AAAA me", True), ("ssh-rsa AAAA", True),
                                            ("ecdsa-sha2-nistp256 AAAA me", False), ("", False)])  # fmt: skip
def test_the_local_cloud_imports_the_keys_that_ec2_imports(key: str, taken: bool) -> None:
    assert is_importable(base64.b64encode(key.encode()).decode()) is taken


@pytest.mark.parametrize("code", ["NoSuchBucket", "OperationAborted"])
def test_a_young_bucket_is_closed_to_the_public_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    call, refused = desk.s3._make_api_call, [2]

    def young(operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "PutPublicAccessBlock" and refused[0]:
            refused[0] -= 1
            raise ClientError({"Error": {"Code": code, "Message": "young"}}, operation)
        return call(operation, arguments)

    monkeypatch.setattr(desk.s3, "_make_api_call", young)
    monkeypatch.setattr("spotheal.agent.protocol.clock.SystemClock.sleep", lambda self, seconds, until=None: False)
    desk.request()
    block = desk.s3.get_public_access_block(Bucket=BUCKET)["PublicAccessBlockConfiguration"]
    assert refused == [0] and set(block.values()) == {True}


def test_a_bucket_of_the_local_cloud_is_young_and_a_request_waits_for_it(
    cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "BUCKET_SECONDS", 0.4)
    monkeypatch.setattr(submit, "_BUCKET_TRY_SECONDS", 0.05)
    submit.ensure_bucket(Session("us-west-2"), "young-bucket")
    s3 = owner("s3")
    assert set(s3.get_public_access_block(Bucket="young-bucket")["PublicAccessBlockConfiguration"].values()) == {True}
    s3.create_bucket(Bucket="younger", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    monkeypatch.setattr(account, "BUCKET_SECONDS", 3600.0)
    seen = cloud_desk.cloud.endpoint.account._seen
    for age, code in ((0.0, "NoSuchBucket"), (2400.0, "OperationAborted")):
        seen["bucket younger"] -= age
        with pytest.raises(ClientError) as young:
            s3.put_public_access_block(Bucket="younger", PublicAccessBlockConfiguration={"BlockPublicAcls": True})
        assert young.value.response["Error"]["Code"] == code


def test_a_machine_that_switches_itself_off_ends_on_demand_too(desk: Desk) -> None:
    """EC2 stops an on-demand machine by default, and its disk costs for ever."""
    (template, *_) = desk.good("request", "--dry-run")["request"]["create_launch_template"]
    assert template["LaunchTemplateData"]["InstanceInitiatedShutdownBehavior"] == "terminate"


@pytest.mark.parametrize(
    ("terms", "state"),
    [({}, "stopped"), ({"InstanceInitiatedShutdownBehavior": "stop"}, "stopped"),
     ({"InstanceInitiatedShutdownBehavior": "terminate"}, "terminated"),
     ({"InstanceMarketOptions": {"MarketType": "spot"}}, "terminated")],
    ids=["by default", "stop", "terminate", "spot"],
)  # fmt: skip
def test_a_machine_of_the_local_cloud_that_switches_itself_off_ends_as_ec2s_would(
    terms: dict[str, Any], state: str
) -> None:
    region = Region()
    made = region.ec2.run_instances(ImageId="ami-0abc", InstanceType="m5.large", MinCount=1, MaxCount=1,
                                    Placement={"AvailabilityZone": A}, **terms)  # fmt: skip
    instance = str(made["Instances"][0]["InstanceId"])
    region.after(10)
    volume = region.a_volume()
    region.attached(volume, instance)
    region.rules.powered_off(instance)
    (item,) = region.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"]
    assert (item["State"]["Name"], item["StateReason"]["Code"]) == (state, "Client.InstanceInitiatedShutdown")
    held = region.rules.volume(volume)
    assert held is not None and held.state == ("in-use" if state == "stopped" else "available")


def test_cards_of_24_gib_suit_a_need_of_24_gib() -> None:
    """EC2 shows 22 GiB of an A10G and an L4; the agent's own check on the machine allows for that."""
    cards = {one.gpu for one in KNOWN if suits(one, Need(1, gpu_memory=24))}
    assert {"A10G", "L4"} <= cards and "T4" not in cards


def test_no_type_is_proposed_that_the_pytorch_image_does_not_support() -> None:
    assert not {"g7e", "p6-b300"} & set(DEEP_LEARNING_FAMILIES)


def test_a_region_before_the_verb_cloud_holds() -> None:
    refused = CliRunner().invoke(app, ["--region", "moon", "cloud"])
    assert refused.exit_code == 2 and "'moon' is no AWS region" in refused.stderr
