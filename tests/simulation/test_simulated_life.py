"""The whole life of a run: its ends, notices at any moment, a store that hangs, GPUs that lack."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from botocore.exceptions import ClientError
from crashes import tell
from histories import leaves_nothing_behind
from simulated_life import LifeRegion, asking
from simulated_world import BOOT_SECONDS

from spotheal.agent.aws import ec2, s3
from spotheal.agent.life.gpus import BARRED_LAUNCHES_MAX, Found
from spotheal.agent.volume import seen
from spotheal.agent.volume.actions import GiveUp
from spotheal.agent.volume.plan import decide

A, B, C, D = "us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"
HOUR = 3600.0


@pytest.mark.parametrize("rate", [50, 100])
def test_a_rate_that_ec2_refuses_ends_no_run(rate):
    """50 MiB/s is what a file of an older version may still ask for; a quota is refused in the same way."""
    with LifeRegion(ending=("done", 7)) as region:
        job = region.config.job
        volume = replace(job.volume, initialization_rate=rate)
        region.config = replace(region.config, job=replace(job, volume=volume))
        region.at_step[3] = region.interrupt
        region.request(A, launch_in=[A, B])
        assert region.time.run(2 * HOUR, region.is_over)
        assert "done" == region.documents("status.json")[0]["phase"]
        copies = [one for one in region.rules.world.volumes.all() if one.snapshot]
        assert [None if rate == 50 else 100] == [one.initialization_rate for one in copies]
        warned = [line for line in region.story if "refuses the initialization rate" in line]
        assert len(warned) == (rate == 50)
        filled = [one.get("initialization_rate") for one in region.ledger() if one.get("moved_from")]
        assert [None if rate == 50 else 100] == filled


def test_a_run_takes_one_base_snapshot_after_its_first_checkpoint_and_is_done_without_it():
    """So the first move waits for what has changed since, and not for a copy of the whole volume."""
    with LifeRegion(ending=("done", 12)) as region:
        for step in (3, 6):
            region.at_step[step] = region.kill
        region.request(A, launch_in=[A, A, B])
        assert region.time.run(2 * HOUR, lambda: region.acknowledged >= 2)
        assert ["base"] == [one.tags["spotheal:purpose"] for one in region.rules.world.snapshots.all()]
        assert region.time.run(2 * HOUR, region.is_over)
        taken = [one["snapshot"] for one in region.ledger() if one["event"] == "snapshot"]
        assert 1 == len(taken)
        deleted = [name for one in region.ledger() if one["event"] == "deleted" for name in one["snapshots"]]
        assert taken == deleted
        assert ["handover"] == [one.tags["spotheal:purpose"] for one in region.rules.world.snapshots.all()]


@pytest.mark.parametrize("kind", ["st1", "sc1"])
def test_a_base_never_stands_in_the_way_of_a_handover(kind):
    """Of these types EC2 takes one snapshot at a time, and a first one of a large volume takes hours."""
    with LifeRegion(ending=("done", 7)) as region:
        region.at_step[3] = region.interrupt
        volume = region.request(A, launch_in=[A, A])
        world = region.rules.world
        world.volumes.put(replace(world.volumes[volume], type=kind))
        assert region.time.run(2 * HOUR, region.is_over)
        assert ["handover"] == [one.tags["spotheal:purpose"] for one in world.snapshots.all()]


def test_an_answer_of_the_store_that_names_no_error_ends_no_run():
    """A proxy or a VPC endpoint answers the claim of a term with a 4xx that S3 never sent."""
    with LifeRegion(ending=("done", 3)) as region:
        put, refused = region.s3.put_object, []

        def answer(**request):
            if request["Key"].endswith("terms/1") and not refused:
                refused.append(request)
                answer = {"Error": {"Code": "", "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": 409}}
                raise ClientError(answer, "PutObject")
            return put(**request)

        region.request(A, launch_in=[A])
        region.s3.put_object = answer
        assert region.time.run(2 * HOUR, region.is_over)
        assert (1, "done") == (len(refused), region.documents("status.json")[0]["phase"])
        assert [line for line in region.story if "(HTTP 409)" in line]


def test_a_machine_that_is_killed_during_its_setup_stands_in_the_ledger():
    with LifeRegion(ending=("done", 3)) as region:
        region.setup_seconds = 50.0
        volume = region.request(A, launch_in=[A, A])
        assert region.time.run(HOUR, lambda: "setup" in [call for _, call in region.calls])
        region.time.run(region.time.seconds + 5.0)
        (first,) = region.machines.values()
        region.kill(first)
        assert {"boot", "volume"} <= {one["event"] for one in region.ledger() if one["instance"] == first.id}
        assert region.time.run(2 * HOUR, region.is_over)
        assert {volume} == {one["volume"] for one in region.ledger() if one["event"] == "volume"}


# ------------------------------------------------------------------------------------------------- ends that take long
def test_a_volume_that_is_gone_parks_the_run_and_cancels_its_fleet():
    """Its fleet and no other; no sooner than 15 minutes of describes without the volume prove it."""
    with LifeRegion() as region:
        region.add_another_job(D)
        volume = region.request(A, launch_in=[A])
        region.time.run(50.0)
        region.rules.call("DeleteVolume", {"VolumeId": volume})
        region.gone = True
        region.time.run(100 + 14 * 60)
        assert "active" == region.fleet_state(region.fleet)
        assert region.time.run(HOUR, region.is_over)
        assert "gone" in region.documents("status.json")[0]["reason"]
        (story,) = region.documents("stories/")
        names = {**vars(seen), **vars(ec2), **vars(s3), "datetime": datetime}
        desired, *looks = (
            eval(text, names)  # noqa: S307 - our own document
            for text in (story["desired"], *(look["observed"] for look in story["story"]))
        )
        replayed = [decide(desired, look) for look in looks]
        assert [look["action"] for look in story["story"]] == [repr(action) for action in replayed]
        assert isinstance(replayed[-1], GiveUp)


def test_five_launches_that_gain_nothing_park_the_run():
    with LifeRegion(ending=("done", 10**6)) as region:
        region.add_another_job(D)
        region.request(A, launch_in=[A] * 9)
        for number in range(1, 6):
            assert region.time.run(region.time.seconds + HOUR, lambda n=number: len(region.machines) == n)
            region.time.run(region.time.seconds + 95.0)  # the agent has counted its launch
            region.break_down(list(region.machines.values())[-1])
        assert region.time.run(region.time.seconds + HOUR, region.is_over)
        assert 6 == len(region.machines)
        assert "5 launches in a row" in region.documents("status.json")[0]["reason"]


def test_launches_that_spot_took_without_a_word_park_nothing():
    """Killed without a notice, or hung when it came: nothing on them could note it, and AWS tells it afterwards."""
    with LifeRegion(ending=("done", 3)) as region:
        region.add_another_job(D)
        region.request(A, launch_in=[A] * 9)
        for number in range(1, 8):
            assert region.time.run(region.time.seconds + HOUR, lambda n=number: len(region.machines) == n)
            region.time.run(region.time.seconds + 95.0)
            machine = list(region.machines.values())[-1]
            if number % 2:
                region.kill(machine)
            else:
                region.hang(machine)
                region.interrupt(machine, action="stop" if number == 2 else "terminate")
        assert region.time.run(region.time.seconds + HOUR, region.is_over)
        assert "done" == region.documents("status.json")[0]["phase"]


def test_five_instances_that_wait_for_a_living_writer_park_nothing():
    with LifeRegion(ending=("done", 60), zones=(A, B, C, D)) as region:
        region.add_another_job(D)
        region.request(A, target=6, launch_in=[A, A, B, B, C, C])
        assert region.time.run(2 * HOUR, region.is_over)
        assert "done" == region.documents("status.json")[0]["phase"]


def test_a_store_that_is_throttled_for_a_quarter_of_an_hour_parks_nothing():
    with LifeRegion(ending=("done", 5)) as region:
        region.request(A, launch_in=[A])
        region.s3.faults.throttle = 0.7
        region.time.run(15 * 60.0)
        region.s3.faults.clear()
        assert region.time.run(2 * HOUR, region.is_over)
        assert "done" == region.documents("status.json")[0]["phase"]


def test_a_fleet_whose_cancelling_is_refused_is_cancelled_in_the_end():
    with LifeRegion(ending=("done", 3)) as region:
        region.add_another_job(D)
        region.request(A, launch_in=[A])
        region.faults.cancels_unsuccessful = 5
        assert region.time.run(2 * HOUR, region.is_over)


# ------------------------------------------------------------------------------------------------------------- notices
def test_a_notice_that_is_withdrawn_ends_no_run_and_takes_no_step():
    with LifeRegion(ending=("done", 12)) as region:
        region.at_step[3] = region.interrupt
        region.request(A, launch_in=[A, A])
        region.time.run(HOUR, lambda: region.acknowledged >= 4)
        first = next(iter(region.machines.values()))
        region.withdraw(first)
        assert region.time.run(2 * HOUR, region.is_over)
        assert [0, 4] == first.trained_from or 1 < len(region.machines)


def hanging_store(region, machine):
    region.store_hangs = True
    region.interrupt(machine)


def test_a_store_that_hangs_at_the_notice_delays_no_handover():
    with LifeRegion(ending=("done", 7)) as region:
        region.store_may_hang = True
        region.at_step[3] = lambda machine: hanging_store(region, machine)
        region.request(A, launch_in=[A, B])
        assert region.time.run(HOUR, lambda: bool(region.rules.snapshots()))
        trained_until = region.acknowledged_at  # what the notice made the trainer save
        assert region.time.seconds <= trained_until + 10.0
        assert region.time.run(region.time.seconds + 300.0, lambda: not next(iter(region.machines.values())).alive)
        region.store_hangs = False
        assert region.time.run(2 * HOUR, region.is_over)
        assert [4] == list(region.machines.values())[1].trained_from


@pytest.mark.parametrize("stale_seconds", [0.0, 120.0])
def test_a_machine_that_lives_on_writes_nothing_that_its_handover_would_hide(stale_seconds):
    """The store hung, so nothing there says that the term is released; the agent died, so it remembers nothing; and the
    describes are too old to show the handover. What is trained now is newer than that snapshot, and under a later term.
    The trainer is a foreign one: no step that it has saved is known, by which the copy could be found too old."""
    with LifeRegion(ending=("done", 30)) as region:
        region.store_may_hang = region.trainer_is_foreign = True
        region.at_step[3] = lambda machine: hanging_store(region, machine)
        region.request(A, launch_in=[A, B, B])
        assert region.time.run(HOUR, lambda: bool(region.rules.snapshots()))
        first = next(iter(region.machines.values()))
        region.faults.stale_seconds_max = stale_seconds
        region.kill_agent(first)
        region.withdraw(first)
        region.store_hangs = False
        assert region.time.run(HOUR, lambda: region.acknowledged >= 8)
        region.kill(first)
        assert region.time.run(2 * HOUR, region.is_over)
        assert [0, 4] == first.trained_from


def test_a_holder_that_was_stopped_and_starts_again_writes_nothing_under_its_old_term():
    with LifeRegion(ending=("done", 40)) as region:
        region.at_step[3] = lambda machine: region.interrupt(machine, action="stop")
        region.request(A, launch_in=[A, A])
        assert region.time.run(HOUR, lambda: len(region.machines) == 2)
        first, second = region.machines.values()
        assert region.time.run(HOUR, lambda: bool(second.trained_from))
        region.start_again(first)
        assert region.time.run(2 * HOUR, region.is_over)
        assert [0] == first.trained_from


def test_a_mount_that_nothing_frees_stays_attached_and_loses_nothing():
    tell("notice, mount stays busy")


def noticed_at(second, **region):
    """A run in another zone than its volume, with a clone and a setup of ten seconds each; its first machine gets a
    notice so many seconds after its user data began."""
    with LifeRegion(ending=("done", 5), snapshot_seconds=5.0, **region) as found:
        found.clone_seconds = found.setup_seconds = 10.0
        found.add_another_job(D)
        found.request(A, launch_in=[B, A], filesystem="xfs", steps=(1, 2))
        found.time.run(BOOT_SECONDS + 10.0 + second)
        first = next(iter(found.machines.values()))
        if first.alive and not first.going_down:
            found.interrupt(first)
        assert found.time.run(2 * HOUR, found.is_over)
        assert "done" == found.documents("status.json")[0]["phase"]
        leaves_nothing_behind(found)
        return first, found


@pytest.mark.parametrize("begin", range(0, 100, 20))
def test_a_notice_at_any_second_of_a_life_loses_nothing(begin):
    """While the volume is moved, during the clone and `setup`, at the first step, during a save, and after the end."""
    for second in range(begin, begin + 20, 2):
        noticed_at(float(second))


def test_a_notice_during_the_clone_and_during_setup_trains_nothing_there():
    for second in (4.0, 20.0):  # the clone goes on while the volume is moved; then comes setup
        first, region = noticed_at(second)
        assert [] == first.trained_from
        assert (second == 20.0) == ((first.id, "setup") in region.calls)
        assert "interrupted" == region.launches()[0]["outcome"]


def test_a_permanent_fault_of_the_setup_ends_the_fleet_within_three_minutes():
    with LifeRegion(ending=("set-up failed", 0)) as region:
        region.clone_seconds = region.setup_seconds = 30.0
        region.request(A, launch_in=[A])
        assert region.time.run(HOUR, lambda: region.fleet_state(region.fleet).startswith("cancelled"))
        launched = next(iter(region.machines.values())).launched_at
        assert region.time.seconds - (launched + BOOT_SECONDS) < 180.0


@pytest.mark.parametrize("lead", [0.0, 5.0, 30.0])
def test_a_notice_that_comes_late_loses_no_acknowledged_step(lead):
    with LifeRegion(ending=("done", 7)) as region:
        region.at_step[3] = lambda machine: region.interrupt(machine, lead=lead)
        region.request(A, launch_in=[A, B])
        assert region.time.run(2 * HOUR, region.is_over)


# ---------------------------------------------------------------------------------------------------------------- GPUs
SMALL, LARGE = "g4dn.xlarge", "g5.xlarge"


@pytest.mark.parametrize("slow", [False, True])
def test_a_type_whose_gpu_is_too_small_is_barred_and_another_goes_on(slow):
    """No failure is counted, and only a machine that looks at its GPU first may have the volume by then."""
    with LifeRegion(ending=("done", 5)) as region:
        region.driver_is_slow = slow
        region.config, region.types = asking(24), {SMALL: (A, B), LARGE: (C,)}
        region.add_another_job(D)
        region.request(A, launch_in=[A, B, B, B, B, B, C])
        assert region.time.run(2 * HOUR, region.is_over)
        assert "done" == region.documents("status.json")[0]["phase"]
        *small, large = region.machines.values()
        assert (6, [], [0]) == (len(small), [at for one in small for at in one.trained_from], large.trained_from)
        assert {large.id, *([small[0].id] if slow else [])} == set(region.claims().values())
        assert ["barred"] * 6 + ["ended"] == [one["outcome"] for one in region.launches()]


def test_a_fleet_that_launches_nothing_but_barred_types_is_parked_with_what_they_lack():
    with LifeRegion(ending=("done", 5)) as region:
        region.config, region.types = asking(24), {SMALL: (A, B)}
        region.request(A, launch_in=[A, B] * 9)
        assert region.time.run(2 * HOUR, region.is_over)
        status = region.documents("status.json")[0]
        assert ("parked", BARRED_LAUNCHES_MAX) == (status["phase"], len(region.machines))
        assert "g4dn.xlarge has 1 GPU of 15 GiB, and the job asks for 1 GPU of 24 GiB or more" in status["reason"]


def test_barred_machines_beside_a_living_writer_park_nothing():
    with LifeRegion(ending=("done", 200)) as region:
        region.config, region.types = asking(24), {SMALL: (A, B), LARGE: (C,)}
        region.request(C, target=2, launch_in=[C, *[A, B] * 9])
        assert region.time.run(2 * HOUR, region.is_over)
        assert "done" == region.documents("status.json")[0]["phase"]
        assert len(region.machines) > BARRED_LAUNCHES_MAX


def test_one_machine_whose_gpu_is_broken_bars_no_type_and_two_do():
    broken = Found(said="No devices were found", on_bus=1)
    with LifeRegion(ending=("done", 5)) as region:
        region.config, region.gpus[LARGE] = asking(0), broken
        region.request(A, launch_in=[A, A, A, A])
        assert region.time.run(HOUR, lambda: len(region.machines) == 2)
        region.gpus[LARGE] = Found((23028,), 1)
        assert region.time.run(2 * HOUR, region.is_over)
        assert ["barred", "ended"] == [one["outcome"] for one in region.launches()]
    with LifeRegion(ending=("done", 5)) as region:
        region.config, region.gpus[LARGE] = asking(0), broken
        region.request(A, launch_in=[A] * 12)
        assert region.time.run(HOUR, lambda: len(region.machines) == 3)
        region.gpus[LARGE] = Found((23028,), 1)
        assert region.time.run(2 * HOUR, region.is_over)
        assert "parked" == region.documents("status.json")[0]["phase"]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("kind", ["agent", "machine"])
def test_a_machine_that_leaves_survives_a_crash_at_its_calls(kind, slow):
    def live(crash):
        with LifeRegion(ending=("done", 3), crash=crash, crash_kind=kind) as region:
            region.driver_is_slow = slow
            region.config, region.types = asking(24), {SMALL: (A,), LARGE: (C,)}
            region.request(A, launch_in=[A, A, C, C])
            assert region.time.run(4 * HOUR, region.is_over)
            assert "done" == region.documents("status.json")[0]["phase"]
            return region.calls

    calls = live({})
    small = [number for number, (machine, _) in enumerate(calls) if machine == calls[0][0]]
    for number in small[::2]:
        for fate in ("before", "after"):
            live({number: fate})
