"""A file that was written for another account, region or day is refused before anything is made."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from fleet_desk import BUCKET, FLEET, Desk, desk, moto_clients, wheels

from spotheal.agent.protocol.errors import ExitCode

__all__ = ["desk", "moto_clients", "wheels"]  # fixtures
SUBNET, GROUP, IMAGE = "subnet-0123456789abcdef0", "sg-0123456789abcdef0", "ami-0fedcba9876543210"
Change = Callable[[dict[str, Any]], None]


def write(desk: Desk, change: Change) -> None:
    fleet = copy.deepcopy(FLEET)
    change(fleet)
    (desk.folder / "spot_fleet_config.json").write_text(json.dumps(fleet))


def each(**values: Any) -> Change:
    """Every launch specification with these fields."""

    def change(fleet: dict[str, Any]) -> None:
        for spec in fleet["LaunchSpecifications"]:
            spec.update(values)

    return change


def in_a_subnet(fleet: dict[str, Any]) -> None:
    for spec in fleet["LaunchSpecifications"]:
        del spec["Placement"]
        spec["SubnetId"] = SUBNET


def of_another_account(fleet: dict[str, Any]) -> None:
    text = json.dumps(fleet).replace("123456789012", "999999999999")
    fleet.update(json.loads(text))


def with_a_template(fleet: dict[str, Any]) -> None:
    del fleet["LaunchSpecifications"]
    named = {"LaunchTemplateId": "lt-0123456789abcdef0", "Version": "1"}
    fleet["LaunchTemplateConfigs"] = [{"LaunchTemplateSpecification": named}]


@pytest.mark.parametrize(
    ("change", "named", "code"),
    [
        (of_another_account, "is written for account 999999999999", ExitCode.USAGE),
        (each(IamInstanceProfile={"Arn": "arn:aws:iam::999999999999:instance-profile/agent"}), "999999999999",
         ExitCode.USAGE),
        (in_a_subnet, f"subnet {SUBNET}", ExitCode.NOT_FOUND),
        (each(ImageId=IMAGE), f"image {IMAGE}", ExitCode.NOT_FOUND),
        (each(SecurityGroups=[{"GroupId": GROUP}]), f"security group {GROUP}", ExitCode.NOT_FOUND),
        (with_a_template, "lt-0123456789abcdef0", ExitCode.NOT_FOUND),
    ],
    ids=["role of another account", "profile of another account", "subnet", "image", "group", "template"],
)  # fmt: skip
def test_what_the_account_does_not_have_is_refused_before_anything_is_made(
    desk: Desk, change: Change, named: str, code: ExitCode
) -> None:
    write(desk, change)
    changed = desk.account.changed
    refused = desk.run("request", "--yes", "--region", "us-west-2")
    assert refused.exit_code == code, refused.output
    assert named in refused.stderr and "fleetctl init --force" in refused.stderr
    assert desk.account.changed == changed and desk.live_fleets() == []


def test_a_misspelt_instance_type_is_refused_with_the_nearest_that_the_region_offers(desk: Desk) -> None:
    def misspelt(fleet: dict[str, Any]) -> None:
        fleet["LaunchSpecifications"][1]["InstanceType"] = "g5.xlage"

    write(desk, misspelt)
    changed = desk.account.changed
    refused = desk.run("request", "--yes", "--region", "us-west-2")
    assert refused.exit_code == ExitCode.USAGE, refused.output
    assert "g5.xlage (did you mean g5.xlarge?)" in refused.stderr and "us-west-2" in refused.stderr
    assert desk.account.changed == changed
    validated = desk.run("validate")
    assert "InstanceType g5.xlage is not known here; did you mean g5.xlarge?" in validated.stderr


def with_volume(desk: Desk, **values: str) -> None:
    table = "".join(f'{name} = "{value}"\n' for name, value in values.items())
    job = desk.folder / "job.toml"
    text = job.read_text()
    text = text if "[volume]\n" in text else f"{text}[volume]\n"
    job.write_text(text.replace("[volume]\n", f"[volume]\n{table}"))


def a_key() -> str:
    return str(boto3.client("kms", region_name="us-west-2").create_key()["KeyMetadata"]["Arn"])


def a_snapshot(desk: Desk, **encryption: Any) -> str:
    made = desk.account.create_volume(AvailabilityZone="us-west-2a", Size=1, **encryption)
    desk.account.clock.sleep(60)
    return str(desk.account.create_snapshot(VolumeId=made["VolumeId"])["SnapshotId"])


def refused(desk: Desk) -> Any:
    changed, volumes = desk.account.changed, desk.account.rules.volumes()
    result = desk.run("request", "--yes", "--region", "us-west-2")
    assert desk.account.changed == changed and desk.account.rules.volumes() == volumes
    return result


def test_a_snapshot_that_is_not_there_is_refused_before_anything_is_made(desk: Desk) -> None:
    with_volume(desk, snapshot="snap-0123456789abcdef0")
    result = refused(desk)
    assert result.exit_code == ExitCode.NOT_FOUND, result.output
    assert "there is no snap-0123456789abcdef0 in account" in " ".join(result.stderr.split())


def test_a_snapshot_of_a_customer_key_is_refused_until_kms_key_names_that_key(desk: Desk) -> None:
    key = a_key()
    snapshot = a_snapshot(desk, Encrypted=True, KmsKeyId=key)
    with_volume(desk, snapshot=snapshot)
    result = refused(desk)
    assert result.exit_code == ExitCode.USAGE and f'write kms_key = "{key}"' in " ".join(result.stderr.split())
    with_volume(desk, kms_key=key)
    desk.good("request", "--dry-run")


def test_a_key_that_makes_no_volume_is_refused_with_the_command_that_enables_it(desk: Desk) -> None:
    key = a_key()
    boto3.client("kms", region_name="us-west-2").disable_key(KeyId=key.rpartition("/")[2])
    with_volume(desk, kms_key=key)
    result = refused(desk)
    assert result.exit_code == ExitCode.USAGE and f"`aws kms enable-key --key-id {key}`" in " ".join(
        result.stderr.split()
    )


def test_a_snapshot_without_a_key_needs_none(desk: Desk) -> None:
    with_volume(desk, snapshot=a_snapshot(desk))
    desk.good("request", "--dry-run")


def test_a_key_pair_that_is_gone_is_refused_before_anything_is_made(desk: Desk) -> None:
    write(desk, each(KeyName="gone"))
    changed = desk.account.changed
    refused = desk.run("request", "--yes", "--region", "us-west-2")
    assert refused.exit_code == ExitCode.NOT_FOUND and "public_key" in refused.stderr
    assert desk.account.changed == changed


@pytest.mark.parametrize("order", [("request", "--yes"), ("volume", "prepare", "--yes", "--", "true")])
def test_a_bucket_in_another_region_is_refused_with_both_regions(desk: Desk, order: tuple[str, ...]) -> None:
    """fleetctl's client follows S3's redirect, the bootstrap on an instance does not: no machine could boot."""
    where = {"LocationConstraint": "eu-west-1"}
    boto3.client("s3", region_name="eu-west-1").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
    changed = desk.account.changed
    refused = desk.run(*order)
    assert refused.exit_code == ExitCode.USAGE, refused.output
    assert f"bucket {BUCKET} is in eu-west-1" in refused.stderr and "us-west-2" in refused.stderr
    assert desk.account.changed == changed and desk.account.rules.volumes() == []


def test_a_bucket_of_the_users_that_the_public_may_reach_is_noted_and_left_as_it_is(desk: Desk) -> None:
    desk.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    told = desk.run("request", "--dry-run")
    assert f"bucket {BUCKET} does not block public access" in told.output
    assert f"`aws s3api put-public-access-block --bucket {BUCKET} --public-access-block-configuration" in told.output
    desk.request()
    with pytest.raises(Exception, match="NoSuchPublicAccessBlockConfiguration"):
        desk.s3.get_public_access_block(Bucket=BUCKET)


def test_a_bucket_that_request_made_needs_no_note(desk: Desk) -> None:
    desk.request()
    assert "public access" not in desk.run("request", "--new-run", "--dry-run").output
