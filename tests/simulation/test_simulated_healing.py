"""The real healing in a simulated region: main cases, then each of them with a crash at every call."""

from __future__ import annotations

import os
import zlib

import pytest
from simulated_world import Region

A, B, C = "us-west-2a", "us-west-2b", "us-west-2c"
HOUR = 3600.0
CRASHES = int(os.environ.get("SPOTHEAL_CRASHES", "4"))  # crash points tried of each story; 0: all


def run_until_training(region, seconds=4 * HOUR):
    """Until a machine has gone on training for three steps; the machine."""

    def done():
        return [
            machine
            for machine in region.writers()
            if machine.trained_from
            and not machine.hung
            and max(region.disks[machine.mounted].steps, default=0) > machine.trained_from[-1] + 2
        ]

    assert region.time.run(region.time.seconds + seconds, lambda: bool(done())), "nobody trains"
    return done()[0]


def leaves_nothing_behind(region):
    """After a while of training: one volume, at most two snapshots."""
    region.time.run(region.time.seconds + 200)
    volumes = [(volume.id, dict(volume.tags)) for volume in region.rules.volumes()]
    assert 1 == len(volumes), volumes
    assert len(region.rules.snapshots()) <= 2
    assert not region.ends


def succession(region, zone, notice):
    """A first instance trains in zone A and goes; a second one comes in `zone`. The first, and the calls up to then."""
    region.make_volume(A)
    first = region.launch(A)
    run_until_training(region)
    begin = len(region.calls)
    if notice:
        region.interrupt(first)
        region.time.at(60.0, lambda: region.launch(zone))
    else:
        region.kill(first)
        region.launch(zone)
    return first, begin


def test_a_first_run_formats_and_trains():
    with Region() as region:
        region.make_volume(A)
        region.launch(A)
        assert run_until_training(region).trained_from == [0]
        leaves_nothing_behind(region)


def test_a_first_run_in_the_other_zone_makes_a_blank_volume_there():
    with Region() as region:
        old = region.make_volume(A)
        region.launch(B)
        assert run_until_training(region).mounted != old
        assert not region.rules.snapshots()
        leaves_nothing_behind(region)


@pytest.mark.parametrize("zone", [A, B], ids=["same zone", "other zone"])
@pytest.mark.parametrize("notice", [True, False], ids=["notice", "kill"])
@pytest.mark.parametrize("snapshot_seconds", [0.0, 600.0])
def test_a_successor_goes_on_where_the_last_one_stopped(zone, notice, snapshot_seconds):
    with Region(snapshot_seconds=snapshot_seconds) as region:
        first, _ = succession(region, zone, notice)
        region.time.run(region.time.seconds + 200)
        second = run_until_training(region)
        assert second is not first
        leaves_nothing_behind(region)


def crash_everywhere(story, kind):
    """`story` with a crash after one of its calls, for each call or an even share of them; how many calls it has."""
    with Region() as region:
        begin = story(region)
        region.time.run(region.time.seconds + 250)
        run_until_training(region)
        count = len(region.calls)
    stride = max(1, (count - begin) // CRASHES) if CRASHES else 1
    offset = zlib.crc32(os.environ.get("PYTEST_CURRENT_TEST", "").encode()) % stride  # each test another share
    for number in range(begin + offset, count, stride):
        with Region(crash={number: "after"}, crash_kind=kind) as region:
            region.replacement_zones = [A, B]
            story(region)
            region.time.run(region.time.seconds + 250)
            run_until_training(region)
            leaves_nothing_behind(region)
    return count - begin


def first_run_here(region):
    region.make_volume(A)
    region.launch(A)
    return 0


def first_run_there(region):
    region.make_volume(A)
    region.launch(B)
    return 0


@pytest.mark.parametrize("kind", ["agent", "machine"])
@pytest.mark.parametrize("story", [first_run_here, first_run_there])
def test_a_first_run_survives_a_crash_at_every_call(story, kind):
    assert crash_everywhere(story, kind) > 20


@pytest.mark.parametrize("kind", ["agent", "machine"])
@pytest.mark.parametrize("zone", [A, B], ids=["same zone", "other zone"])
@pytest.mark.parametrize("notice", [True, False], ids=["notice", "kill"])
def test_a_succession_survives_a_crash_at_every_call(zone, notice, kind):
    assert crash_everywhere(lambda region: succession(region, zone, notice)[1], kind) > 30


# -------------------------------------------------------------------------------------------- races, silence, notices
@pytest.mark.parametrize("zones", [(A, A), (A, B), (A, B, A, B, C)], ids=["same zone", "two zones", "five"])
@pytest.mark.parametrize("seed", range(3))
def test_of_instances_that_race_for_one_volume_one_trains(zones, seed):
    with Region(seed=seed, zones=(A, B, C)) as region:
        region.make_volume(A)
        machines = [region.launch(zone) for zone in zones]
        run_until_training(region)
        region.time.run(region.time.seconds + 300)
        assert 1 == len([machine for machine in machines if machine.trained_from])
        writer = region.writers()[0]
        region.kill(writer)
        assert run_until_training(region) is not writer


def test_a_holder_that_hangs_is_terminated_after_its_silence_and_not_before():
    with Region() as region:
        region.make_volume(A)
        first = region.launch(A)
        run_until_training(region)
        hung_at = region.time.seconds
        region.hang(first)
        second = region.launch(A)
        region.time.run(hung_at + 590)
        assert "running" == region.rules.instance(first.id).state and not second.trained_from
        assert region.time.run(hung_at + 900, lambda: bool(second.trained_from))
        assert "terminated" == region.rules.instance(first.id).state


def test_a_holder_that_beats_is_waited_for_whatever_the_wall_clock_says():
    with Region() as region:
        region.make_volume(A)
        first = region.launch(A)
        run_until_training(region)
        region.launch(A)
        region.time.run(region.time.seconds + 300)
        region.time.skew = 3600.0
        region.time.run(region.time.seconds + 1200)
        assert [first] == region.writers()


def test_a_notice_during_healing_lets_a_successor_go_on_before_the_machine_is_gone():
    with Region(snapshot_seconds=3 * HOUR) as region:
        _, _ = succession(region, B, notice=False)
        region.time.run(region.time.seconds + 400)
        waiting = next(machine for machine in region.machines.values() if machine.alive)
        asked = [snapshot.id for snapshot in region.rules.snapshots()]
        region.interrupt(waiting)
        third = region.launch(B)
        assert run_until_training(region) is third
        assert asked == [snapshot.id for snapshot in region.rules.snapshots()]  # adopted, not taken again


# -------------------------------------------------------------------------------------------------------- a cruel EC2
@pytest.mark.parametrize("zone", [A, B], ids=["same zone", "other zone"])
@pytest.mark.parametrize("seed", range(4))
def test_stale_describes_lost_replies_and_throttling_lose_nothing(zone, seed):
    with Region(seed=seed) as region:
        region.replacement_zones = [A, B, A]
        region.faults.stale_seconds_max = 30.0
        region.faults.lose_reply = 0.1
        region.faults.throttle = 0.2
        succession(region, zone, notice=seed % 2 == 0)
        region.time.run(region.time.seconds + 900)
        region.faults.clear()
        run_until_training(region)
        leaves_nothing_behind(region)


def test_an_attachment_that_is_stuck_is_tried_again_after_90_seconds():
    with Region() as region:
        region.make_volume(A)
        region.faults.attaches_stuck = 1
        region.launch(A)
        run_until_training(region)
        assert 90 + 90 < region.time.seconds < 90 + 90 + 60


def test_a_snapshot_that_fails_is_taken_again():
    with Region() as region:
        region.make_volume(A)
        first = region.launch(A)
        run_until_training(region)
        region.faults.snapshots_fail = 1
        region.kill(first)
        region.launch(B)
        region.time.run(region.time.seconds + 200)
        run_until_training(region)
        leaves_nothing_behind(region)


@pytest.mark.parametrize("fault", ["volumes_fail", "volumes_vanish"])
def test_a_copy_that_fails_is_made_again_under_another_token(fault):
    with Region() as region:
        region.make_volume(A)
        first = region.launch(A)
        run_until_training(region)
        setattr(region.faults, fault, 1)
        region.kill(first)
        region.launch(B)
        region.time.run(region.time.seconds + 250)
        assert 0 == getattr(region.faults, fault)
        run_until_training(region)


def test_a_volume_that_is_gone_parks_the_run_after_15_minutes():
    with Region() as region:
        region.launch(A)
        region.time.run(90 + 14 * 60)
        assert not region.ends
        assert region.time.run(90 + 17 * 60, lambda: bool(region.ends))
        assert "parked" == region.ends[0].phase.value


# ------------------------------------------------------------------------------------------------------------ figures
def test_a_boot_in_the_same_zone_takes_at_most_15_calls():
    """The publication of the status with it; polls, of which there is one in 5 s at most, apart."""
    with Region() as region:
        succession(region, A, notice=False)
        second = list(region.machines.values())[-1]
        region.time.run(region.time.seconds + HOUR, lambda: bool(second.trained_from))
        calls = [name for instance, name in region.calls if instance == second.id and name not in ("mount", "umount")]
        assert len(calls) <= 15, "\n".join(calls)


def test_the_calls_of_a_boot_do_not_grow_with_the_account():
    def calls(others):
        with Region() as region:
            for _ in range(others):
                region.rules.call("CreateVolume", {"AvailabilityZone": A, "Size": 1, "VolumeType": "gp3"})
            succession(region, A, notice=False)
            second = list(region.machines.values())[-1]
            region.time.run(region.time.seconds + HOUR, lambda: bool(second.trained_from))
            return second.calls

    assert calls(0) == calls(300)
