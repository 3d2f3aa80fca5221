"""The rule book's cruelty: stale, throttled, lost, stuck, failed; seeded, so that a story can be told again."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from rulebook_world import A, Region, VirtualClock, refused

from spotheal.fleet.rehearsal.ec2.rulebook import Call, Faults, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2


@pytest.fixture()
def region() -> Region:
    return Region()


def test_a_stale_describe_shows_neither_the_new_nor_the_end_of_the_old(region: Region) -> None:
    old = region.a_volume()
    region.after(60)
    new = region.a_volume()
    region.ec2.delete_volume(VolumeId=old)
    region.after(10)
    region.rules.faults.stale_seconds_max = 30
    seen: dict[str, set[bool]] = {old: set(), new: set()}
    for _ in range(200):
        found = {one["VolumeId"] for one in region.ec2.describe_volumes()["Volumes"]}
        for volume in seen:
            seen[volume].add(volume in found)
    assert {old: {True, False}, new: {True, False}} == seen
    region.after(31)
    for _ in range(50):
        assert [new] == [one["VolumeId"] for one in region.ec2.describe_volumes()["Volumes"]]


def test_a_young_volume_is_not_found_by_other_calls_either(region: Region) -> None:
    region.rules.faults.stale_seconds_max = 30
    tagged = 0
    codes = set()
    volume = region.a_volume()
    for _ in range(50):
        try:
            region.ec2.create_tags(Resources=[volume], Tags=[{"Key": "a", "Value": "b"}])
            tagged += 1
        except ClientError as error:
            codes.add(error.response["Error"]["Code"])
    assert tagged > 0
    assert {"InvalidVolume.NotFound"} == codes


def test_a_throttled_call_has_no_effect(region: Region) -> None:
    region.rules.faults.throttle = 1.0
    assert "RequestLimitExceeded" == refused(region.ec2.create_volume, AvailabilityZone=A, Size=1)
    assert [] == region.rules.volumes()
    region.rules.faults.clear()
    region.a_volume()
    assert {"RequestLimitExceeded": 1, "ok": 1} == _outcomes(region.rules.calls)


def test_throttling_is_for_the_operations_named(region: Region) -> None:
    region.rules.faults.throttle = 1.0
    region.rules.faults.throttled_operations = ("CreateSnapshot",)
    assert "RequestLimitExceeded" == refused(region.ec2.create_snapshot, VolumeId=region.a_volume())


def test_a_call_whose_reply_is_lost_had_its_effect(region: Region) -> None:
    region.rules.faults.lose_reply = 1.0
    with pytest.raises(ConnectionClosedError):
        region.ec2.create_volume(AvailabilityZone=A, Size=1)
    assert 1 == len(region.ec2.describe_volumes()["Volumes"])
    assert "ReplyLost" == region.rules.calls[0].outcome


def test_one_call_can_be_made_to_fail(region: Region) -> None:
    region.rules.faults.plan("CreateVolume", "InternalError", status=500)
    region.rules.faults.plan("CreateVolume", "InternalError", after_effect=True)
    region.rules.faults.plan("CreateVolume")
    for _ in range(2):
        assert "InternalError" == refused(region.ec2.create_volume, AvailabilityZone=A, Size=1)
    with pytest.raises(ConnectionClosedError):
        region.ec2.create_volume(AvailabilityZone=A, Size=1)
    region.ec2.create_volume(AvailabilityZone=A, Size=1)
    assert 3 == len(region.rules.volumes())


def test_a_stuck_attach_stays_until_it_is_detached(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.rules.faults.attaches_stuck = 1
    region.attached(volume, instance)
    region.after(3600)
    assert "attaching" == region.volume(volume)["Attachments"][0]["State"]
    region.ec2.detach_volume(VolumeId=volume)
    region.after(3)
    region.attached(volume, instance)
    assert "attached" == region.volume(volume)["Attachments"][0]["State"]


def test_a_stuck_detach_ends_with_the_instance(region: Region) -> None:
    volume, instance = region.a_volume(), region.an_instance()
    region.attached(volume, instance)
    region.rules.faults.detaches_stuck = 1
    region.ec2.detach_volume(VolumeId=volume)
    region.after(3600)
    assert "detaching" == region.volume(volume)["Attachments"][0]["State"]
    region.ec2.terminate_instances(InstanceIds=[instance])
    region.after(20)
    assert "available" == region.volume(volume)["State"]


def test_a_snapshot_can_take_hours_and_fail(region: Region) -> None:
    volume = region.a_volume()
    region.rules.faults.snapshot_seconds = 3 * 3600
    region.rules.faults.snapshots_fail = 1
    snapshot = region.ec2.create_snapshot(VolumeId=volume)["SnapshotId"]
    region.after(3 * 3600 - 1)
    assert ("pending", "99%") == (region.snapshot(snapshot)["State"], region.snapshot(snapshot)["Progress"])
    region.after(1)
    assert "error" == region.snapshot(snapshot)["State"]


def test_a_volume_can_vanish_without_a_word(region: Region) -> None:
    """As one whose key its maker may not use."""
    region.rules.faults.volumes_vanish = 1
    volume = region.ec2.create_volume(AvailabilityZone=A, Size=10, VolumeType="gp3", ClientToken="t")["VolumeId"]
    assert "creating" == region.volume(volume)["State"]
    region.after(5)
    assert "InvalidVolume.NotFound" == refused(region.ec2.describe_volumes, VolumeIds=[volume])


def test_a_volume_can_end_in_error(region: Region) -> None:
    region.rules.faults.volumes_fail = 1
    volume = region.a_volume()
    assert "error" == region.volume(volume)["State"]
    instance = region.an_instance()
    assert "IncorrectState" == refused(
        region.ec2.attach_volume, VolumeId=volume, InstanceId=instance, Device="/dev/sdf"
    )
    assert "IncorrectState" == refused(region.ec2.create_snapshot, VolumeId=volume)
    region.ec2.delete_volume(VolumeId=volume)


def test_the_same_seed_tells_the_same_story() -> None:
    def story(seed: int) -> list[Any]:
        region = Region()
        region.rules = Rulebook(region.clock, seed=seed, faults=Faults(seed, throttle=0.3, stale_seconds_max=20))
        region.ec2 = InMemoryEc2(region.rules)
        for _ in range(30):
            try:
                region.ec2.create_volume(AvailabilityZone=A, Size=1)
            except ClientError:
                region.after(1)
        return [(call.operation, call.outcome) for call in region.rules.calls] + [
            one.id for one in region.rules.volumes()
        ]

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_time_passes_in_its_own_order_however_late_it_is_looked_at() -> None:
    """One long jump of the clock and many short ones end alike: what is due happens at its own time."""

    def history(step: float) -> list[Any]:
        region = Region()
        fleet, first = region.a_fleet_that_runs()
        region.rules.interrupt(first)
        for _ in range(int(600 / step)):
            region.after(step)
        return [(event.time, event.sub_type, event.instance) for event in region.rules.history(fleet)]

    assert history(600) == history(1)


def test_who_owns_the_clock_is_told_where_to_go_next(region: Region) -> None:
    assert region.rules.next_event_time() is None
    region.ec2.create_volume(AvailabilityZone=A, Size=1)
    assert 5.0 == region.rules.next_event_time()
    region.after(5)
    assert region.rules.next_event_time() is None


def test_a_hook_may_call_the_rule_book(region: Region) -> None:
    seen: list[str] = []

    def look(volume: str, snapshot: str | None) -> None:
        found = region.rules.volume(volume)
        assert found is not None
        seen.append(found.state)
        if len(seen) < 3:
            region.ec2.create_volume(AvailabilityZone=A, Size=1)

    region.rules.hooks.on_volume_created = look
    region.ec2.create_volume(AvailabilityZone=A, Size=1)
    assert ["creating"] * 3 == seen


def test_many_threads_find_every_hook_told_before_their_answer(region: Region) -> None:
    """A snapshot's bytes are copied when CreateSnapshot is answered, whoever else is calling."""
    copied: set[str] = set()
    late: list[str] = []

    def copy(snapshot: str, volume: str) -> None:
        time.sleep(0.002)
        region.rules.snapshots()
        copied.add(snapshot)

    region.rules.hooks.on_snapshot_taken = copy
    volumes = [region.a_volume() for _ in range(8)]

    def work(volume: str) -> None:
        client = InMemoryEc2(region.rules, volume)
        for _ in range(5):
            snapshot = client.create_snapshot(VolumeId=volume)["SnapshotId"]
            if snapshot not in copied:
                late.append(snapshot)
            client.delete_snapshot(SnapshotId=snapshot)

    threads = [threading.Thread(target=work, args=(volume,)) for volume in volumes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (40, []) == (len(copied), late)


def test_calls_carry_their_caller() -> None:
    clock = VirtualClock()
    rules = Rulebook(clock)
    InMemoryEc2(rules, "i-0a").describe_volumes()
    clock.sleep(7)
    InMemoryEc2(rules).describe_volumes()
    assert [("DescribeVolumes", "i-0a", 0.0), ("DescribeVolumes", None, 7.0)] == [
        (call.operation, call.caller, call.moment) for call in rules.calls
    ]
    assert {"DescribeVolumes": 2} == rules.counts()


def test_what_iam_does_not_allow_is_denied(region: Region) -> None:
    instance = region.an_instance()
    region.rules.authorize = lambda operation, _, caller: "no" if caller and operation != "DescribeVolumes" else ""
    ec2 = InMemoryEc2(region.rules, instance)
    ec2.describe_volumes()
    assert "UnauthorizedOperation" == refused(ec2.delete_volume, VolumeId=region.a_volume())


def test_an_access_key_names_its_instance(region: Region) -> None:
    instance = region.an_instance()
    key = region.rules.key_of(instance)
    assert 20 == len(key)
    assert instance == region.rules.caller_of(key)
    assert region.rules.caller_of("AKIAOPERATOR") is None


def _outcomes(calls: list[Call]) -> dict[str, int]:
    outcomes = [call.outcome for call in calls]
    return {outcome: outcomes.count(outcome) for outcome in outcomes}
