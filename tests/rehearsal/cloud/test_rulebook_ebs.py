"""EBS by the rule book: what moto lets pass is refused, and states take their time."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ParamValidationError
from rulebook_world import A, B, Region, refused


@pytest.fixture()
def region() -> Region:
    return Region()


# ------------------------------------------------------------------------------------------------------------- volumes
def test_a_volume_is_created_and_then_available(region: Region) -> None:
    made = region.ec2.create_volume(AvailabilityZone=A, Size=10, VolumeType="gp3")
    assert "creating" == made["State"]
    region.after(4.9)
    assert "creating" == region.volume(made["VolumeId"])["State"]
    region.after(0.1)
    assert "available" == region.volume(made["VolumeId"])["State"]
    assert (3000, 125) == (made["Iops"], made["Throughput"])
    assert [("on_volume_created", made["VolumeId"], None)] == region.told


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"AvailabilityZone": "eu-west-1a", "Size": 10}, "InvalidZone.NotFound"),
        ({"AvailabilityZone": A}, "MissingParameter"),
        ({"AvailabilityZone": A, "Size": 10, "VolumeType": "io2"}, "MissingParameter"),
        ({"AvailabilityZone": A, "Size": 10, "VolumeType": "gp2", "Throughput": 200}, "InvalidParameterCombination"),
        ({"AvailabilityZone": A, "Size": 10, "SnapshotId": "snap-0123456789abcdef0"}, "InvalidSnapshot.NotFound"),
        ({"AvailabilityZone": A, "Size": 10, "VolumeInitializationRate": 200}, "InvalidParameterValue"),
        ({"AvailabilityZone": A, "Size": 10, "ClientToken": "x" * 65}, "InvalidParameterValue"),
    ],
)
def test_a_volume_that_cannot_be_is_refused(region: Region, params: dict[str, Any], code: str) -> None:
    assert code == refused(region.ec2.create_volume, **params)


def test_a_copy_under_a_term_is_a_move_and_the_operators_first_volume_is_none(region: Region) -> None:
    def made(term: str, token: str, **more: Any) -> None:
        tags = [{"ResourceType": "volume", "Tags": [{"Key": "spotheal:term", "Value": term}]}]
        region.a_volume(ClientToken=token, TagSpecifications=tags, **more)

    snapshot = region.ec2.create_snapshot(VolumeId=region.a_volume())["SnapshotId"]
    region.after(3600.0)
    made("0", "the operator's", SnapshotId=snapshot)
    made("1", "blank, in another zone")
    assert 0 == region.rules.zone_moves()
    made("2", "a copy", SnapshotId=snapshot)
    made("2", "again, for the first came to nothing", SnapshotId=snapshot)
    assert 1 == region.rules.zone_moves()


def test_the_same_token_makes_one_volume(region: Region) -> None:
    first = region.a_volume(ClientToken="t")
    assert first == region.ec2.create_volume(AvailabilityZone=A, Size=10, VolumeType="gp3", ClientToken="t")["VolumeId"]
    assert 1 == len(region.rules.volumes())


def test_the_same_token_with_other_parameters_is_a_mismatch(region: Region) -> None:
    region.a_volume(ClientToken="t")
    code = refused(region.ec2.create_volume, AvailabilityZone=A, Size=11, VolumeType="gp3", ClientToken="t")
    assert "IdempotentParameterMismatch" == code


def test_a_token_is_no_lock_across_zones(region: Region) -> None:
    assert region.a_volume(A, ClientToken="t") != region.a_volume(B, ClientToken="t")


def test_a_token_of_a_deleted_volume_finds_it_for_a_while_and_is_refused_then(region: Region) -> None:
    volume = region.a_volume(ClientToken="t")
    region.ec2.delete_volume(VolumeId=volume)
    region.after(2)
    request = {"AvailabilityZone": A, "Size": 10, "VolumeType": "gp3", "ClientToken": "t"}
    again = region.ec2.create_volume(**request)
    assert (volume, "creating") == (again["VolumeId"], again["State"])
    region.after(120)
    assert "IdempotentParameterMismatch" == refused(region.ec2.create_volume, **request)


def test_a_token_is_forgotten_after_a_day(region: Region) -> None:
    first = region.a_volume(ClientToken="t")
    region.after(86_401)
    assert first != region.a_volume(ClientToken="t")


def test_a_volume_needs_a_completed_snapshot_and_its_size(region: Region) -> None:
    snapshot = region.ec2.create_snapshot(VolumeId=region.a_volume())["SnapshotId"]
    assert "IncorrectState" == refused(region.ec2.create_volume, AvailabilityZone=B, SnapshotId=snapshot)
    region.after(90)
    assert "InvalidParameterValue" == refused(region.ec2.create_volume, AvailabilityZone=B, SnapshotId=snapshot, Size=9)
    assert 10 == region.ec2.create_volume(AvailabilityZone=B, SnapshotId=snapshot)["Size"]


def test_an_encrypted_volume_stays_encrypted_through_a_snapshot(region: Region) -> None:
    snapshot = region.a_snapshot(region.a_volume(KmsKeyId="key-1", Encrypted=True))
    made = region.ec2.create_volume(AvailabilityZone=B, SnapshotId=snapshot)
    assert (True, "key-1") == (made["Encrypted"], made["KmsKeyId"])


def test_a_deleted_volume_is_gone_after_a_moment(region: Region) -> None:
    volume = region.a_volume()
    region.ec2.delete_volume(VolumeId=volume)
    assert "deleting" == region.volume(volume)["State"]
    region.after(2)
    assert "InvalidVolume.NotFound" == refused(region.ec2.describe_volumes, VolumeIds=[volume])
    assert ("on_volume_deleted", volume) == region.told[-1]


def test_parameters_are_checked_as_by_boto3(region: Region) -> None:
    with pytest.raises(ParamValidationError):
        region.ec2.create_volume(Size="ten")


# --------------------------------------------------------------------------------------------------------- attachments
def test_a_volume_is_attached_first_and_its_device_appears_later(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.told.clear()
    assert "attaching" == region.ec2.attach_volume(VolumeId=volume, InstanceId=instance, Device="/dev/sdf")["State"]
    assert "in-use" == region.volume(volume)["State"]
    region.after(3)
    assert "attached" == region.volume(volume)["Attachments"][0]["State"]
    assert [] == region.told
    region.after(1)
    assert [("on_attach", volume, instance, "/dev/sdf")] == region.told
    assert {"/dev/xvda", "/dev/sdf"} == {one["DeviceName"] for one in region.instance(instance)["BlockDeviceMappings"]}


def test_a_volume_of_another_zone_is_not_attached(region: Region) -> None:
    code = refused(
        region.ec2.attach_volume, VolumeId=region.a_volume(A), InstanceId=region.an_instance(B), Device="/dev/sdf"
    )
    assert "InvalidVolume.ZoneMismatch" == code


def test_a_second_instance_cannot_take_an_attached_volume(region: Region) -> None:
    volume, holder, other = region.a_volume(), region.an_instance(), region.an_instance()
    region.attached(volume, holder)
    for instance in (holder, other):
        code = refused(region.ec2.attach_volume, VolumeId=volume, InstanceId=instance, Device="/dev/sdg")
        assert "VolumeInUse" == code


def test_a_device_name_is_used_once(region: Region) -> None:
    instance = region.an_instance()
    region.attached(region.a_volume(), instance, "/dev/sdf")
    for device in ("/dev/sdf", "/dev/xvda"):
        code = refused(region.ec2.attach_volume, VolumeId=region.a_volume(), InstanceId=instance, Device=device)
        assert "InvalidParameterValue" == code


def test_nothing_is_attached_to_a_pending_instance_and_no_volume_that_is_being_created(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    young = region.ec2.create_volume(AvailabilityZone=A, Size=1)["VolumeId"]
    assert "IncorrectState" == refused(region.ec2.attach_volume, VolumeId=young, InstanceId=instance, Device="/dev/sdf")
    pending = region.ec2.run_instances(ImageId="ami-0abc", MinCount=1, MaxCount=1, Placement={"AvailabilityZone": A})[
        "Instances"
    ][0]["InstanceId"]
    assert "IncorrectState" == refused(region.ec2.attach_volume, VolumeId=volume, InstanceId=pending, Device="/dev/sdf")


def test_an_instance_takes_27_volumes(region: Region) -> None:
    instance = region.an_instance()
    for letter in "bcdefghijklmnopqrstuvwxyzAB":
        region.ec2.attach_volume(VolumeId=region.a_volume(), InstanceId=instance, Device=f"/dev/sd{letter}")
    code = refused(region.ec2.attach_volume, VolumeId=region.a_volume(), InstanceId=instance, Device="/dev/sdC")
    assert "AttachmentLimitExceeded" == code


def test_a_detach_takes_its_time_and_frees_the_volume(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.attached(volume, instance)
    assert "detaching" == region.ec2.detach_volume(VolumeId=volume)["State"]
    assert "IncorrectState" == refused(region.ec2.detach_volume, VolumeId=volume)
    region.after(3)
    assert ("available", []) == (region.volume(volume)["State"], region.volume(volume)["Attachments"])
    assert ("on_detach", volume, instance, "/dev/sdf") == region.told[-1]
    assert "IncorrectState" == refused(region.ec2.detach_volume, VolumeId=volume)


def test_a_volume_is_detached_only_from_its_holder(region: Region) -> None:
    volume, holder, other = region.a_volume(), region.an_instance(), region.an_instance()
    region.attached(volume, holder)
    assert "InvalidAttachment.NotFound" == refused(region.ec2.detach_volume, VolumeId=volume, InstanceId=other)


def test_a_mounted_volume_stays_busy_until_it_is_unmounted(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.attached(volume, instance)
    mounted = [True]
    region.rules.hooks.is_mounted = lambda volume, instance: mounted[0]
    region.ec2.detach_volume(VolumeId=volume)
    region.after(10)
    assert "busy" == region.volume(volume)["Attachments"][0]["State"]
    mounted[0] = False
    region.after(1)
    assert "available" == region.volume(volume)["State"]


def test_a_forced_detach_asks_nobody(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.attached(volume, instance)
    region.rules.hooks.is_mounted = lambda volume, instance: True
    region.ec2.detach_volume(VolumeId=volume, Force=True)
    region.after(3)
    assert "available" == region.volume(volume)["State"]


def test_an_attached_volume_is_not_deleted(region: Region) -> None:
    volume = region.a_volume()
    region.attached(volume, region.an_instance())
    assert "VolumeInUse" == refused(region.ec2.delete_volume, VolumeId=volume)


def test_a_terminated_instance_lets_go_of_its_volumes(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.attached(volume, instance)
    region.ec2.terminate_instances(InstanceIds=[instance])
    region.after(19)
    assert "in-use" == region.volume(volume)["State"]
    region.after(1)
    assert "available" == region.volume(volume)["State"]
    assert [("on_terminate", instance), ("on_detach", volume, instance, "/dev/sdf")] == region.told[-2:]


def test_a_stopped_instance_keeps_its_volumes(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.attached(volume, instance)
    region.ec2.stop_instances(InstanceIds=[instance])
    region.after(20)
    assert ("stopped", "in-use") == (region.state_of(instance), region.volume(volume)["State"])
    region.ec2.detach_volume(VolumeId=volume)
    region.after(3)
    assert "available" == region.volume(volume)["State"]


# ----------------------------------------------------------------------------------------------------------- snapshots
def test_a_snapshot_is_taken_at_the_request_and_completed_later(region: Region) -> None:
    volume = region.a_volume()
    made = region.ec2.create_snapshot(VolumeId=volume, Description="d")
    assert ("pending", "") == (made["State"], made["Progress"])
    assert ("on_snapshot_taken", made["SnapshotId"], volume) == region.told[-1]
    region.after(45)
    assert ("pending", "0%") == tuple(region.snapshot(made["SnapshotId"])[key] for key in ("State", "Progress"))
    region.after(45)
    assert ("completed", "100%") == tuple(region.snapshot(made["SnapshotId"])[key] for key in ("State", "Progress"))


def test_a_volume_has_five_pending_snapshots_at_most_and_one_in_15_seconds(region: Region) -> None:
    region.rules.faults.snapshot_seconds = 3600
    volume = region.a_volume()
    for _ in range(5):
        region.ec2.create_snapshot(VolumeId=volume)
        if len(region.rules.snapshots()) < 5:
            code = refused(region.ec2.create_snapshot, VolumeId=volume)
            assert "SnapshotCreationPerVolumeRateExceeded" == code
        region.after(15)
    assert "ConcurrentSnapshotLimitExceeded" == refused(region.ec2.create_snapshot, VolumeId=volume)


def test_of_an_hdd_volume_there_is_one_snapshot_at_a_time(region: Region) -> None:
    volume = region.a_volume(VolumeType="st1", Size=500)
    region.ec2.create_snapshot(VolumeId=volume)
    assert "ConcurrentSnapshotLimitExceeded" == refused(region.ec2.create_snapshot, VolumeId=volume)
    region.after(120)
    assert "pending" == region.ec2.create_snapshot(VolumeId=volume)["State"]


def test_a_failed_snapshot_counts_as_one_that_is_worked_on_until_it_is_deleted(region: Region) -> None:
    region.rules.faults.snapshots_fail = 1
    volume = region.a_volume(VolumeType="st1", Size=500)
    failed = region.a_snapshot(volume)
    assert "ConcurrentSnapshotLimitExceeded" == refused(region.ec2.create_snapshot, VolumeId=volume)
    region.ec2.delete_snapshot(SnapshotId=failed)
    assert "pending" == region.ec2.create_snapshot(VolumeId=volume)["State"]


def test_a_snapshot_outlives_its_volume(region: Region) -> None:
    volume = region.a_volume()
    snapshot = region.a_snapshot(volume)
    region.ec2.delete_volume(VolumeId=volume)
    region.after(2)
    assert volume == region.snapshot(snapshot)["VolumeId"]
    region.ec2.delete_snapshot(SnapshotId=snapshot)
    assert "InvalidSnapshot.NotFound" == refused(region.ec2.delete_snapshot, SnapshotId=snapshot)


def test_snapshots_of_others_are_not_ours(region: Region) -> None:
    region.a_snapshot(region.a_volume())
    assert [1, 1, 0] == [
        len(region.ec2.describe_snapshots(OwnerIds=[owner])["Snapshots"])
        for owner in ("self", "123456789012", "amazon")
    ]


# ------------------------------------------------------------------------------------------- tags, filters, pagination
def test_tags_are_given_changed_and_found(region: Region) -> None:
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "spotheal:run", "Value": "01R"}]}]
    volume = region.a_volume(TagSpecifications=tags)
    other = region.a_volume()
    region.ec2.create_tags(Resources=[volume, other], Tags=[{"Key": "b", "Value": "1"}])
    region.ec2.delete_tags(Resources=[other], Tags=[{"Key": "b", "Value": "2"}])

    def found(name: str, *values: str) -> set[str]:
        answer = region.ec2.describe_volumes(Filters=[{"Name": name, "Values": list(values)}])
        return {one["VolumeId"] for one in answer["Volumes"]}

    assert {volume} == found("tag:spotheal:run", "01R", "02R")
    assert {volume} == found("tag:spotheal:run", "0?R*")
    assert {volume, other} == found("tag-key", "b")
    assert set() == found("tag:b", "2")
    assert {("spotheal:run", "01R"), ("b", "1")} == {
        (tag["Key"], tag["Value"])
        for tag in region.ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [volume]}])["Tags"]
    }
    with_b = region.ec2.describe_tags(Filters=[{"Name": "tag:b", "Values": ["1"]}])["Tags"]
    assert {volume, other} == {tag["ResourceId"] for tag in with_b}


def test_the_tags_of_aws_are_not_ours_to_change(region: Region) -> None:
    volume = region.a_volume()
    for call in (region.ec2.create_tags, region.ec2.delete_tags):
        code = refused(call, Resources=[volume], Tags=[{"Key": "aws:ec2spot:fleet-request-id", "Value": "sfr-1"}])
        assert "InvalidParameterValue" == code


def test_a_call_that_names_one_unknown_id_tags_nothing(region: Region) -> None:
    volume = region.a_volume()
    unknown = "snap-0123456789abcdef0"
    code = refused(region.ec2.create_tags, Resources=[volume, unknown], Tags=[{"Key": "a", "Value": "b"}])
    assert "InvalidSnapshot.NotFound" == code
    assert "Tags" not in region.volume(volume)


def test_volumes_are_found_by_state_zone_and_holder(region: Region) -> None:
    held, free, instance = region.a_volume(A), region.a_volume(B), region.an_instance(A)
    region.attached(held, instance)
    for name, value, expected in [
        ("status", "in-use", held),
        ("availability-zone", B, free),
        ("attachment.instance-id", instance, held),
        ("attachment.status", "attached", held),
        ("attachment.device", "/dev/sdf", held),
        ("volume-id", free, free),
        ("encrypted", "false", held),
    ]:
        answer = region.ec2.describe_volumes(Filters=[{"Name": name, "Values": [value]}])
        assert expected in [one["VolumeId"] for one in answer["Volumes"]], name


def test_a_filter_that_ec2_does_not_know_is_an_error(region: Region) -> None:
    code = refused(region.ec2.describe_volumes, Filters=[{"Name": "colour", "Values": ["red"]}])
    assert "InvalidParameterValue" == code


def test_pages_are_followed_to_the_end(region: Region) -> None:
    volumes = [region.a_volume() for _ in range(12)]
    pages = list(region.ec2.get_paginator("describe_volumes").paginate(PaginationConfig={"PageSize": 5}))
    assert [5, 5, 2] == [len(page["Volumes"]) for page in pages]
    assert volumes == [one["VolumeId"] for page in pages for one in page["Volumes"]]
    assert "InvalidParameterValue" == refused(region.ec2.describe_volumes, MaxResults=4)
    assert "InvalidParameterCombination" == refused(region.ec2.describe_volumes, MaxResults=5, VolumeIds=volumes[:1])


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("describe_volumes", {"VolumeIds": ["vol-0123456789abcdef0"]}, "InvalidVolume.NotFound"),
        ("describe_snapshots", {"SnapshotIds": ["snap-0123456789abcdef0"]}, "InvalidSnapshot.NotFound"),
        ("describe_instances", {"InstanceIds": ["i-0123456789abcdef0"]}, "InvalidInstanceID.NotFound"),
        ("delete_volume", {"VolumeId": "vol-0123456789abcdef0"}, "InvalidVolume.NotFound"),
        ("detach_volume", {"VolumeId": "volume"}, "InvalidVolume.Malformed"),
        ("create_snapshot", {"VolumeId": "vol-0123456789abcdef0"}, "InvalidVolume.NotFound"),
        ("terminate_instances", {"InstanceIds": ["i-0123456789abcdef0"]}, "InvalidInstanceID.NotFound"),
    ],
)
def test_what_is_not_there_is_named_so(region: Region, method: str, params: dict[str, Any], code: str) -> None:
    assert code == refused(getattr(region.ec2, method), **params)
