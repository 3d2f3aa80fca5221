"""The EC2 boundary over the rule book: dataclasses out, AWS's codes translated, "already so" is success."""

from __future__ import annotations

import pytest

from spotheal.agent.aws.ec2 import DeviceNameTaken, Ec2, TokenUsed, VolumeSpec, ZoneMismatch
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import CapacityError, Conflict, Fatal, NotFound, Retryable
from spotheal.fleet.rehearsal.ec2 import ebs
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2

A, B = "us-west-2a", "us-west-2b"
TAGS = {"spotheal:run": "r1", "Name": "data"}
AT_ONCE = Latencies(
    create_volume=0, attach=0, device_node=0, detach=0, delete_volume=0, snapshot=(0.0,), snapshot_interval=0,
    running=0, shutdown=0,
)  # fmt: skip


@pytest.fixture
def rules():
    return Rulebook(SystemClock(), zones=(A, B), latencies=AT_ONCE, page_size=5)


@pytest.fixture
def ec2(rules):
    return Ec2(InMemoryEc2(rules, validate=True))


def launch(rules, zone=A):
    request = {"ImageId": "ami-1", "InstanceType": "m5.large", "MinCount": 1, "MaxCount": 1}
    made = rules.call("RunInstances", request | {"Placement": {"AvailabilityZone": zone}})
    return made["Instances"][0]["InstanceId"]


def spec(token="t", zone=A, **more):
    return VolumeSpec(zone, 10, "gp3", TAGS, token, **more)


def test_a_volume_comes_back_as_it_was_asked_for(ec2):
    made = ec2.create_volume(spec(iops=4000, throughput=200))
    found = ec2.volume(made.id)
    assert (A, "available", 10, "gp3", 4000, 200) == (
        found.zone, found.state, found.size_gib, found.type, found.iops, found.throughput
    )  # fmt: skip
    assert (found,) == ec2.volumes_of_run("r1") == ec2.volumes_named("data")
    assert () == ec2.volumes_of_run("r2") and ec2.volume("vol-0123456789abcdef0") is None


def test_all_pages_of_a_describe_are_read(ec2):
    made = {ec2.create_volume(spec(str(number))).id for number in range(12)}
    assert made == {volume.id for volume in ec2.volumes_of_run("r1")}


def test_the_same_token_makes_one_volume_and_another_request_under_it_is_refused(ec2, monkeypatch):
    first = ec2.create_volume(spec())
    assert first.id == ec2.create_volume(spec()).id
    with pytest.raises(TokenUsed):
        ec2.create_volume(spec(iops=5000))
    ec2.delete_volume(first.id)
    monkeypatch.setattr(ebs, "REMEMBERED_SECONDS", -1.0)
    with pytest.raises(TokenUsed):
        ec2.create_volume(spec())


@pytest.mark.parametrize(
    ("kind", "sent"), [("gp3", {"Iops", "Throughput"}), ("gp2", set()), ("io2", {"Iops"}), ("st1", set())]
)
def test_only_what_the_type_takes_is_asked_for(kind, sent):
    request = VolumeSpec(A, 500, kind, TAGS, "t", iops=3000, throughput=125).request()
    assert sent == {"Iops", "Throughput"} & set(request)


def test_an_initialization_rate_is_asked_for_only_with_a_snapshot():
    assert "VolumeInitializationRate" not in spec(initialization_rate=200).request()
    assert 200 == spec(initialization_rate=200, snapshot="snap-1").request()["VolumeInitializationRate"]


@pytest.fixture
def snapshot(rules, ec2):
    made = ec2.create_snapshot(ec2.create_volume(spec("source")).id, TAGS).id
    rules.tick()
    return made


@pytest.mark.parametrize("rate", [1, 50, 99, 301])
def test_a_rate_that_is_refused_is_left_out_and_told(ec2, snapshot, rate):
    told = []
    made = ec2.create_volume(spec(snapshot=snapshot, initialization_rate=rate), told.append)
    assert made.snapshot == snapshot
    assert 1 == len(told) and "100-300" in told[0]
    again = ec2.create_volume(spec(snapshot=snapshot, initialization_rate=rate), told.append)
    assert made.id == again.id


def test_a_volume_that_was_made_without_its_rate_is_found_when_the_rate_is_taken_again(ec2, snapshot):
    """The reply of the second call was lost, and what refused the rate has passed."""
    made = ec2.create_volume(spec(snapshot=snapshot))
    assert made.id == ec2.create_volume(spec(snapshot=snapshot, initialization_rate=100)).id


def test_what_else_is_refused_is_refused_with_a_rate_too(ec2, snapshot):
    with pytest.raises(Fatal):
        ec2.create_volume(VolumeSpec(A, 5, "gp3", TAGS, "small", snapshot=snapshot, initialization_rate=100))
    with pytest.raises(NotFound):
        ec2.create_volume(spec(snapshot="snap-0123456789abcdef0", initialization_rate=100))


def test_attaching_twice_and_detaching_twice_succeed(rules, ec2):
    instance, volume = launch(rules), ec2.create_volume(spec()).id
    ec2.attach(volume, instance, "/dev/sdf")
    ec2.attach(volume, instance, "/dev/sdg")
    assert [(instance, "/dev/sdf", "attached")] == [
        (one.instance, one.device, one.state) for one in ec2.volume(volume).attachments
    ]
    ec2.detach(volume, instance)
    ec2.detach(volume, instance)
    assert "available" == ec2.volume(volume).state


def test_a_volume_of_another_instance_is_a_conflict(rules, ec2):
    volume = ec2.create_volume(spec()).id
    ec2.attach(volume, launch(rules), "/dev/sdf")
    with pytest.raises(Conflict):
        ec2.attach(volume, launch(rules), "/dev/sdf")


def test_another_zone_and_a_taken_device_name_are_told_apart(rules, ec2):
    instance = launch(rules)
    ec2.attach(ec2.create_volume(spec("1")).id, instance, "/dev/sdf")
    with pytest.raises(DeviceNameTaken):
        ec2.attach(ec2.create_volume(spec("2")).id, instance, "/dev/sdf")
    with pytest.raises(ZoneMismatch):
        ec2.attach(ec2.create_volume(spec("3", B)).id, instance, "/dev/sdg")


def test_an_instance_that_is_not_running_yet_is_waited_for():
    rules = Rulebook(SystemClock(), zones=(A,))
    with pytest.raises(Retryable):
        ec2 = Ec2(InMemoryEc2(rules))
        ec2.attach(ec2.create_volume(spec()).id, launch(rules), "/dev/sdf")


def test_deleting_what_is_gone_succeeds(rules, ec2):
    volume = ec2.create_volume(spec()).id
    snapshot = ec2.create_snapshot(volume, TAGS)
    assert (snapshot.id,) == tuple(found.id for found in ec2.snapshots_of_run("r1"))
    for _ in range(2):
        ec2.delete_snapshot(snapshot.id)
        ec2.delete_volume(volume)
    ec2.terminate("i-0123456789abcdef0")


def test_instances_are_found_by_filter_so_that_an_unknown_one_hides_none(rules, ec2):
    instance = launch(rules)
    assert [instance] == [found.id for found in ec2.instances([instance, "i-0123456789abcdef0"])]
    assert () == ec2.instances([])


def test_a_refusal_inside_a_successful_cancel_is_tried_again():
    class Refusing:
        code = "unexpectedError"

        def cancel_spot_fleet_requests(self, **_):
            error = {"Code": self.code, "Message": "try again"}
            return {"UnsuccessfulFleetRequests": [{"SpotFleetRequestId": "sfr-1", "Error": error}]}

    client = Refusing()
    with pytest.raises(Retryable):
        Ec2(client).cancel_fleet("sfr-1")
    client.code = "fleetRequestNotInCancellableState"
    Ec2(client).cancel_fleet("sfr-1")
    client.code = "fleetRequestIdDoesNotExist"
    with pytest.raises(Fatal):
        Ec2(client).cancel_fleet("sfr-1")


@pytest.mark.parametrize(
    "code",
    [
        "PendingSnapshotLimitExceeded", "EC2ThrottledException", "InsufficientVolumeCapacity", "RequestThrottled",
        "ConcurrentTagAccess", "InvalidState", "InvalidSecurity.RequestHasExpired", "InvalidPaginationToken",
        "RetryableError",
    ],
)  # fmt: skip
def test_what_passes_by_itself_is_no_end_of_a_run(code, rules, ec2):
    """A code that is not known as passing is Fatal, and in healing that cancels the fleet."""
    made = ec2.create_volume(spec())
    rules.faults.plan("CreateSnapshot", code, status=400)
    with pytest.raises(Retryable):
        ec2.create_snapshot(made.id, TAGS)


def test_a_quota_of_iops_is_waited_for_as_others_are(rules, ec2):
    rules.faults.plan("CreateVolume", "MaxIOPSLimitExceeded", status=400)
    with pytest.raises(CapacityError):
        ec2.create_volume(spec())


def test_both_of_awss_codes_for_another_zone_are_known(rules, ec2):
    instance, volume = launch(rules), ec2.create_volume(spec()).id
    rules.faults.plan("AttachVolume", "InvalidVolumeID.ZoneMismatch", status=400)
    with pytest.raises(ZoneMismatch):
        ec2.attach(volume, instance, "/dev/sdf")
