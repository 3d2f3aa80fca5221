"""The decision as a table: what is observed, and the one action that follows."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from spotheal.agent.aws.ec2 import Attachment, Instance, Snapshot, Volume, VolumeSpec
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.names import Phase, volume_token
from spotheal.agent.volume.actions import (
    Attach,
    ClaimTerm,
    CreateVolume,
    DetachFrom,
    FenceHolder,
    GiveUp,
    MakeFilesystem,
    Mount,
    Promote,
    Ready,
    Reject,
    SetTerm,
    StepAside,
    Supersede,
    TakeOver,
    TakeSnapshot,
    Wait,
)
from spotheal.agent.volume.plan import decide
from spotheal.agent.volume.seen import Desired, DeviceSeen, Observed, adoptable, source_of

T0 = datetime(2026, 11, 21, 8, 0, tzinfo=timezone.utc)
TAGS = {"spotheal:job": "digits", "spotheal:run": "r1", "Name": "data"}
ME, OTHER, HERE, THERE = "i-0me", "i-0other", "us-west-2a", "us-west-2b"
WANT = Desired("r1", ME, HERE, "/dltraining", "xfs", 100, "gp3", TAGS)
DEVICE = DeviceSeen("/dev/nvme1n1", "xfs", False)


def volume(state="current", term=1, zone=HERE, id="vol-0a", held=None, **more):
    attachments = (Attachment(held, "/dev/sdf", "attached"),) if held else ()
    fields = {"state": "in-use" if held else "available", "size_gib": 100, "iops": 3000, "throughput": 125, **more}
    tags = {**TAGS, "spotheal:state": state, "spotheal:term": str(term)}
    return Volume(id=id, zone=zone, tags=tags, attachments=fields.pop("attachments", attachments), **fields)


def snapshot(term=1, id="snap-0a", of="vol-0a", state="completed", purpose="handover", **tags):
    all_tags = {**TAGS, "spotheal:term": str(term), "spotheal:purpose": purpose, **tags}
    return Snapshot(id, of, state, 100 if state == "completed" else 40, T0, 100, all_tags)


def claim(number, instance=ME):
    return Claim(number, instance, HERE, "2026-11-21T08:00:00Z")


def instance(state, id=OTHER, run="r1"):
    return {id: Instance(id, state, HERE, "g5.xlarge", T0, {"spotheal:run": run})}


def decided(**seen):
    return decide(WANT, Observed(**seen))


# ------------------------------------------------------------------------------------------------ who may be the writer
def test_the_first_instance_claims_term_1():
    assert ClaimTerm(1, "first of the run") == decided(volumes=(volume("new", 0),))


@pytest.mark.parametrize("state", ["terminated", "stopped"])
def test_a_term_is_claimed_when_the_last_holder_is_dead(state):
    seen = decided(claim=claim(3, OTHER), known=instance(state), volumes=(volume(term=3),))
    assert ClaimTerm(4, f"{OTHER} is {state}") == seen


@pytest.mark.parametrize("state", ["pending", "running", "shutting-down", "stopping"])
def test_a_living_holder_is_waited_for(state):
    seen = decided(claim=claim(3, OTHER), known=instance(state), volumes=(volume(term=3),))
    assert isinstance(seen, Wait) and seen.seconds_max is None


def test_a_holder_that_no_describe_shows_is_waited_for_until_it_is_long_gone():
    base = Observed(claim=claim(3, OTHER), volumes=(volume(term=3),))
    assert isinstance(decide(WANT, replace(base, absent={OTHER: 600.0})), Wait)  # young: its claim is a sign of life
    assert isinstance(decide(WANT, replace(base, absent={OTHER: 10.0}, silent={OTHER: 10.0})), Wait)
    gone = decide(WANT, replace(base, absent={OTHER: 120.0}, silent={OTHER: 120.0}))
    assert ClaimTerm(4, f"{OTHER} is absent") == gone


def test_a_silent_holder_is_fenced_only_when_it_was_seen_silent_three_heartbeats_ago_too():
    base = Observed(claim=claim(3, OTHER), known=instance("running"), volumes=(volume(term=3, held=OTHER),))
    assert isinstance(decide(WANT, replace(base, silent={OTHER: 179.0})), Wait)
    fenced = decide(WANT, replace(base, silent={OTHER: 180.0}))
    assert isinstance(fenced, FenceHolder) and fenced.instance == OTHER


def test_a_holder_that_has_released_is_not_waited_for():
    seen = Observed(
        claim=claim(3, OTHER), known=instance("running"), holds={3: "vol-0a"}, released=frozenset({3}),
        volumes=(volume(term=3),), snapshots=(snapshot(3),),
    )  # fmt: skip
    assert ClaimTerm(4, f"{OTHER} has released the volume") == decide(WANT, seen)


@pytest.mark.parametrize(
    "less",
    [
        {"released": frozenset()},
        {"snapshots": ()},
        {"snapshots": (snapshot(2),)},
        {"snapshots": (snapshot(3, purpose="base"),)},
        {"snapshots": (snapshot(3, state="error"),)},
        {"volumes": (volume(term=3, held=OTHER),)},
        {"volumes": (volume(term=3, attachments=(Attachment(OTHER, "/dev/sdf", "detaching"),)),)},
    ],
    ids=["no mark", "no snapshot", "older snapshot", "base snapshot", "failed snapshot", "attached", "detaching"],
)
def test_half_a_release_is_none(less):
    seen = Observed(
        claim=claim(3, OTHER), known=instance("running"), holds={3: "vol-0a"}, released=frozenset({3}),
        volumes=(volume(term=3),), snapshots=(snapshot(3),),
    )  # fmt: skip
    assert isinstance(decide(WANT, replace(seen, **less)), Wait)


def test_a_term_that_never_wrote_is_released_without_a_snapshot():
    seen = decided(
        claim=claim(3, OTHER), known=instance("running"), holds={2: "vol-0a"}, released=frozenset({3}),
        volumes=(volume(term=2),),
    )  # fmt: skip
    assert ClaimTerm(4, f"{OTHER} has released the volume") == seen


def test_our_own_released_term_is_not_taken_up_again():
    seen = decided(claim=claim(3), released=frozenset({3}), holds={3: "vol-0a"}, volumes=(volume(term=3),))
    assert ClaimTerm(4, "ours ended") == seen


def test_a_later_term_makes_us_let_go_of_what_we_have():
    held = volume(term=3, held=ME)
    seen = decided(claim=claim(4, OTHER), known=instance("running"), volumes=(held,), mounted="/dev/nvme1n1")
    assert StepAside(4, OTHER, ("vol-0a",)) == seen


def test_an_empty_answer_means_wait_and_a_long_row_of_them_is_an_end():
    assert isinstance(decided(volume_gone_for=899.0), Wait)
    assert isinstance(decided(claim=claim(1), volume_gone_for=899.0), Wait)
    ended = decided(volume_gone_for=900.0)
    assert isinstance(ended, GiveUp) and ended.phase is Phase.PARKED and "gone" in ended.reason


def test_a_volume_the_store_names_is_waited_for_though_another_is_shown():
    seen = decided(claim=claim(3), holds={2: "vol-0b"}, volumes=(volume(term=1),), volume_gone_for=10.0)
    assert isinstance(seen, Wait) and "vol-0b" in seen.why


# ------------------------------------------------------------------------------------------------------- the same zone
def same_zone(**more):
    fields = {"claim": claim(2), "holds": {1: "vol-0a"}, "volumes": (volume(term=1),), **more}
    return decided(**fields)


def test_the_way_in_the_same_zone():
    attached, ours = volume(term=1, held=ME), volume(term=2, held=ME)
    assert Attach("vol-0a") == same_zone()
    assert SetTerm("vol-0a", 2) == same_zone(attach_asked=frozenset({"vol-0a"}))
    assert SetTerm("vol-0a", 2) == same_zone(volumes=(attached,))
    waits = same_zone(volumes=(ours,))
    assert isinstance(waits, Wait) and waits.device_of == "vol-0a"
    devices = {"vol-0a": DEVICE}
    assert Mount("vol-0a", DEVICE.path) == same_zone(volumes=(ours,), devices=devices)
    mounted = {"volumes": (ours,), "devices": devices, "mounted": DEVICE.path}
    assert TakeOver("vol-0a", 2) == same_zone(**mounted)
    assert Ready("vol-0a", 2, DEVICE.path, None) == same_zone(**mounted, holds={1: "vol-0a", 2: "vol-0a"})


def test_no_mount_before_the_term_on_the_volume_is_read_back():
    seen = same_zone(volumes=(volume(term=1, held=ME),), devices={"vol-0a": DEVICE}, term_set=frozenset({"vol-0a"}))
    assert isinstance(seen, Wait) and "read back" in seen.why


def test_another_device_at_the_mount_point_is_an_end():
    seen = same_zone(volumes=(volume(term=2, held=ME),), devices={"vol-0a": DEVICE}, mounted="/dev/nvme9n1")
    assert isinstance(seen, GiveUp) and "/dev/nvme9n1" in seen.reason


@pytest.mark.parametrize(
    ("state", "seconds", "again"),
    [("attaching", 89.0, False), ("attaching", 90.0, True), ("attached", 90.0, True), ("detaching", 90.0, True)],
)
def test_what_is_stuck_here_for_90_seconds_is_detached_from_here(state, seconds, again):
    stuck = replace(volume(term=2, held=ME), attachments=(Attachment(ME, "/dev/sdf", state),))
    seen = same_zone(volumes=(stuck,), attached_for={("vol-0a", ME): seconds})
    assert isinstance(seen, DetachFrom if again else Wait)
    if again:
        assert (seen.volume, seen.instance) == ("vol-0a", ME)


# -------------------------------------------------------------------------------------------- volumes others still have
@pytest.mark.parametrize("state", ["pending", "running", "shutting-down", "stopping"])
@pytest.mark.parametrize("zone", [HERE, THERE])
def test_a_volume_is_never_taken_from_an_instance_that_runs(state, zone):
    seen = same_zone(
        volumes=(volume(term=1, held=OTHER, zone=zone),),
        known=instance(state),
        attached_for={("vol-0a", OTHER): 9999.0},
    )
    assert isinstance(seen, Wait)


def test_a_stopped_holder_is_detached():
    seen = same_zone(volumes=(volume(term=1, held=OTHER),), known=instance("stopped"))
    assert isinstance(seen, DetachFrom) and seen.instance == OTHER


def test_a_terminated_holder_lets_go_by_itself_or_is_detached_after_90_seconds():
    base = {"volumes": (volume(term=1, held=OTHER),), "known": instance("terminated")}
    assert isinstance(same_zone(**base), Wait)
    assert isinstance(same_zone(**base, attached_for={("vol-0a", OTHER): 90.0}), DetachFrom)


@pytest.mark.parametrize(("seconds", "force"), [(90.0, False), (299.0, False), (300.0, True)])
def test_a_detach_that_is_stuck_at_a_dead_machine_is_forced_after_five_minutes(seconds, force):
    """At a stopped one it can be stuck for ever: a simulated run waited for it until its fleet expired."""
    stuck = replace(volume(term=1), state="in-use", attachments=(Attachment(OTHER, "/dev/sdf", "detaching"),))
    seen = same_zone(volumes=(stuck,), known=instance("stopped"), attached_for={("vol-0a", OTHER): seconds})
    assert isinstance(seen, DetachFrom) and (OTHER, force) == (seen.instance, seen.force)


def test_a_volume_that_another_run_has_for_an_hour_parks_the_run_and_says_what_to_do():
    base = {"volumes": (volume(term=1, held="i-0f"),), "known": instance("running", id="i-0f", run="r2")}
    assert isinstance(same_zone(**base, attached_for={("vol-0a", "i-0f"): 3599.0}), Wait)
    seen = same_zone(**base, attached_for={("vol-0a", "i-0f"): 3600.0})
    assert isinstance(seen, GiveUp) and Phase.PARKED is seen.phase
    assert "i-0f" in seen.reason and "detach-volume --volume-id vol-0a" in seen.reason and "--resume" in seen.reason


def test_an_instance_of_another_run_is_never_terminated():
    seen = same_zone(
        volumes=(volume(term=1, held=OTHER),), known=instance("running", run="other"), silent={OTHER: 9999.0}
    )
    assert isinstance(seen, Wait) and "not of this run" in seen.why


# ------------------------------------------------------------------------------------------------------- the other zone
def other_zone(**more):
    fields = {"claim": claim(2), "holds": {1: "vol-0a"}, "volumes": (volume(term=1, zone=THERE),), **more}
    return decided(**fields)


def copy(state="moving", term=2, held=None, snapshot="snap-0a", id="vol-0b", **more):
    return volume(state, term, HERE, id, held, snapshot=snapshot, **more)


def test_a_volume_elsewhere_is_copied_by_snapshot_and_keeps_its_properties():
    kept = volume(
        term=1, zone=THERE, type="io2", iops=8000, throughput=None, encrypted=True, kms_key="arn:key", size_gib=250
    )
    tags = {**TAGS, "spotheal:term": "2", "spotheal:state": "moving"}
    token = volume_token("r1", 2, HERE, "snap-0a", 0)
    expected = VolumeSpec(HERE, 250, "io2", tags, token, "snap-0a", 8000, None, True, "arn:key")
    assert CreateVolume(expected) == other_zone(volumes=(kept,), snapshots=(snapshot(1),))


def test_copies_that_come_to_nothing_again_and_again_are_an_end_that_names_the_key():
    """EC2 says of a key that may not be used nothing at all: the volume is gone again."""
    kept = volume(term=1, zone=THERE, encrypted=True, kms_key="arn:key")
    assert isinstance(other_zone(volumes=(kept,), snapshots=(snapshot(1),), attempt=4), CreateVolume)
    end = other_zone(volumes=(kept,), snapshots=(snapshot(1),), attempt=5)
    assert isinstance(end, GiveUp) and end.phase is Phase.PARKED and "arn:key" in end.reason
    end = other_zone(snapshots=(snapshot(1),), attempt=5)
    assert isinstance(end, GiveUp) and "key" not in end.reason


def test_without_a_handover_a_fresh_snapshot_is_taken():
    assert TakeSnapshot("vol-0a", 2, 70) == other_zone(saved_step=70)


def test_a_snapshot_is_waited_for_as_long_as_it_takes():
    seen = other_zone(snapshots=(snapshot(1, state="pending"),))
    assert (
        isinstance(seen, Wait) and seen.seconds_max is not None and seen.seconds_max >= 3 * 3600 and "40 %" in seen.why
    )


@pytest.mark.parametrize(
    "stale",
    [
        snapshot(1, purpose="base"),
        snapshot(1, state="error"),
        snapshot(1, of="vol-0z"),
        snapshot(1, **{"spotheal:reason": "rejected: ends at step 3"}),
    ],
    ids=["base", "error", "of another volume", "rejected"],
)
def test_what_may_not_be_adopted_is_not(stale):
    assert isinstance(other_zone(snapshots=(stale,)), TakeSnapshot)


def test_a_handover_is_stale_once_a_later_term_wrote():
    assert isinstance(
        other_zone(claim=claim(3), holds={1: "vol-0a", 2: "vol-0a"}, snapshots=(snapshot(1),)), TakeSnapshot
    )


def test_a_handover_is_stale_once_a_later_term_prepared_to_mount():
    seen = other_zone(claim=claim(3), volumes=(volume(term=2, zone=THERE),), snapshots=(snapshot(1),))
    assert isinstance(seen, TakeSnapshot)


def test_a_handover_outlives_terms_that_never_wrote():
    seen = other_zone(claim=claim(7), snapshots=(snapshot(1, state="pending"),))
    assert isinstance(seen, Wait) and "snap-0a" in seen.why


def test_a_completed_snapshot_is_taken_before_a_pending_one():
    both = (snapshot(3, state="pending", id="snap-0c"), snapshot(2, id="snap-0b"))
    made = other_zone(claim=claim(4), snapshots=both)
    assert isinstance(made, CreateVolume) and made.spec.snapshot == "snap-0b"


def test_three_failed_snapshots_in_a_row_are_an_end_that_keeps_the_volume():
    failed = tuple(snapshot(2, state="error", id=f"snap-0{n}") for n in range(3))
    seen = other_zone(snapshots=failed)
    assert isinstance(seen, GiveUp) and "kept" in seen.reason


def test_a_source_in_error_is_replaced_from_its_handover_or_the_run_is_parked():
    broken = replace(volume(term=1), state="error")
    assert isinstance(same_zone(volumes=(broken,), snapshots=(snapshot(1),)), CreateVolume)
    assert isinstance(same_zone(volumes=(broken,)), GiveUp)


def test_a_volume_that_is_gone_is_made_again_from_a_handover_that_holds_everything():
    made = decided(claim=claim(2), holds={1: "vol-0a"}, snapshots=(snapshot(1),), volume_gone_for=901.0)
    assert isinstance(made, CreateVolume)
    assert isinstance(decided(claim=claim(2), holds={1: "vol-0a"}, snapshots=(snapshot(1, purpose="base"),)), Wait)


def test_the_way_of_a_copy():
    source = volume(term=1, zone=THERE)
    base = {"snapshots": (snapshot(1),), "saved_step": 70}
    assert Attach("vol-0b") == other_zone(volumes=(source, copy()), **base)
    here = {"volumes": (source, copy(held=ME)), "devices": {"vol-0b": DEVICE}, **base}
    assert Mount("vol-0b", DEVICE.path) == other_zone(**here)
    here["mounted"] = DEVICE.path
    assert TakeOver("vol-0b", 2) == other_zone(**here, steps=(60, 70), checkpoints_present=True)
    here["holds"] = {1: "vol-0a", 2: "vol-0b"}
    assert Promote("vol-0b", 2) == other_zone(**here)
    here["volumes"] = (source, copy("current", held=ME))
    assert Supersede(("vol-0a",), "vol-0b") == other_zone(**here)
    here["volumes"] = (replace(source, tags={**source.tags, "spotheal:state": "superseded"}), copy("current", held=ME))
    assert Ready("vol-0b", 2, DEVICE.path, "vol-0a") == other_zone(**here)


@pytest.mark.parametrize(
    ("steps", "anything", "good"),
    [((60, 70), True, True), ((71,), True, True), ((60,), True, False), ((), False, False), ((), True, True)],
)
def test_a_copy_must_hold_the_saved_step_before_it_is_promoted(steps, anything, good):
    seen = other_zone(
        volumes=(volume(term=1, zone=THERE), copy(held=ME)), snapshots=(snapshot(1),), saved_step=70,
        devices={"vol-0b": DEVICE}, mounted=DEVICE.path, steps=steps, checkpoints_present=anything,
    )  # fmt: skip
    assert isinstance(seen, TakeOver if good else Reject)


def test_a_copy_of_what_this_term_has_taken_of_the_free_volume_is_all_there_is():
    """A trainer that counts its files by epochs, or keeps them outside the checkpoint folder: rejected three times, its
    run was parked at its first move."""
    seen = other_zone(
        volumes=(volume(term=1, zone=THERE), copy(held=ME)), snapshots=(snapshot(2),), saved_step=70,
        devices={"vol-0b": DEVICE}, mounted=DEVICE.path, steps=(5,), checkpoints_present=True,
    )  # fmt: skip
    assert isinstance(seen, TakeOver)


def test_of_two_copies_of_one_term_the_lowest_id_counts():
    seen = other_zone(
        volumes=(volume(term=1, zone=THERE), copy(id="vol-0c"), copy(id="vol-0b")), snapshots=(snapshot(1),)
    )
    assert Attach("vol-0b") == seen


def test_a_half_made_volume_of_an_earlier_term_is_never_taken():
    seen = other_zone(claim=claim(3), volumes=(volume(term=1, zone=THERE), copy(term=2)), snapshots=(snapshot(1),))
    assert isinstance(seen, CreateVolume) and seen.spec.tags["spotheal:term"] == "3"


def test_a_promoted_copy_counts_though_a_stale_describe_shows_it_as_moving():
    seen = decided(claim=claim(3), holds={1: "vol-0a", 2: "vol-0b"}, volumes=(volume(term=1, zone=THERE), copy(term=2)))
    assert Attach("vol-0b") == seen


@pytest.mark.parametrize(("progress", "said"), [(None, "is pending"), (0, "is pending, 0 %"), (99, "is pending, 99 %")])
def test_a_pending_snapshot_is_told_with_its_percentage_if_aws_names_one(progress, said):
    pending = replace(snapshot(1, state="pending"), progress=progress)
    assert f"snap-0a of vol-0a {said}" == other_zone(snapshots=(pending,)).why


def test_a_dead_copy_is_made_anew_under_another_token():
    dead = replace(copy(), state="error")
    made = other_zone(volumes=(volume(term=1, zone=THERE), dead), snapshots=(snapshot(1),), attempt=1)
    assert isinstance(made, CreateVolume) and made.spec.token == volume_token("r1", 2, HERE, "snap-0a", 1)


# ------------------------------------------------------------------------------------------------------------- new ones
def first_run(device=None, **more):
    fields = {"claim": claim(1), "volumes": (volume("new", 1, held=ME),), "devices": {"vol-0a": device}, **more}
    return decided(**fields)


BLANK, FILLED = DeviceSeen("/dev/nvme1n1", "", True), DeviceSeen("/dev/nvme1n1", "", False)


def test_a_blank_new_volume_is_formatted():
    assert MakeFilesystem("vol-0a", BLANK.path, "xfs", 1) == first_run(BLANK)


HALF = DeviceSeen("/dev/nvme1n1", "xfs", False)  # a mkfs.xfs that was cut short; one of ext4 can leave no signature


@pytest.mark.parametrize("device", [HALF, FILLED], ids=["xfs", "ext4"])
def test_a_volume_whose_first_mkfs_may_not_have_ended_is_formatted_again(device):
    again = MakeFilesystem("vol-0a", device.path, "xfs", 1, again=True)
    assert again == first_run(device, formatting=frozenset({"vol-0a"}), unmountable=frozenset({"vol-0a"}))


def test_a_volume_that_a_mkfs_of_ours_began_is_mounted_before_it_is_formatted_again():
    """mkfs may have ended all the same, and only the store does not say so yet."""
    assert Mount("vol-0a", HALF.path) == first_run(HALF, formatting=frozenset({"vol-0a"}))


@pytest.mark.parametrize("device", [HALF, FILLED], ids=["xfs", "ext4"])
@pytest.mark.parametrize(
    "more",
    [
        {"holds": {1: "vol-0a"}, "claim": claim(2), "volumes": (volume("new", 2, held=ME),)},
        {"volumes": (volume("current", 1, held=ME),)},
        {"volumes": (volume("new", 1, held=ME, snapshot="snap-0d"),)},
        {"formatting": frozenset({"vol-0b"})},
        {"formatting": frozenset()},
    ],
    ids=["a term held it", "not new", "from a snapshot", "another volume's mkfs", "no mkfs of ours"],
)
def test_what_can_hold_data_is_never_formatted_again(device, more):
    refused = frozenset({"vol-0a"})
    decision = first_run(device, **{"formatting": refused, "unmountable": refused, **more})
    assert isinstance(decision, Mount if device.filesystem else GiveUp)


def test_a_new_volume_with_a_filesystem_is_mounted_as_it_is():
    assert Mount("vol-0a", DEVICE.path) == first_run(DEVICE)


@pytest.mark.parametrize(
    ("device", "more"),
    [
        (FILLED, {}),
        (BLANK, {"volumes": (volume("current", 1, held=ME),)}),
        (BLANK, {"volumes": (volume("new", 1, held=ME, snapshot="snap-0d"),)}),
        (BLANK, {"volumes": (volume("new", 1, held=ME),), "holds": {1: "vol-0a"}}),
    ],
    ids=["holds bytes", "not new", "from a snapshot", "written before"],
)
def test_nothing_else_is_ever_formatted(device, more):
    seen = first_run(device, **more)
    assert isinstance(seen, GiveUp) and seen.phase is Phase.SETUP_FAILED


def test_a_blank_new_volume_in_another_zone_needs_no_snapshot():
    elsewhere = volume("new", 0, THERE)
    made = decided(claim=claim(1), volumes=(elsewhere,))
    assert isinstance(made, CreateVolume) and made.spec.snapshot is None
    here = copy(snapshot=None, term=1, held=ME)
    seen = decided(claim=claim(1), volumes=(elsewhere, here), devices={"vol-0b": BLANK})
    assert MakeFilesystem("vol-0b", BLANK.path, "xfs", 1) == seen


def test_a_new_volume_from_a_dataset_is_made_from_it_in_the_other_zone():
    made = decided(claim=claim(1), volumes=(volume("new", 0, THERE, snapshot="snap-0d"),))
    assert isinstance(made, CreateVolume) and made.spec.snapshot == "snap-0d"


# ----------------------------------------------------------------------------------------------------------- the pieces
def test_before_any_term_wrote_the_highest_current_volume_counts():
    found = source_of(
        {}, (volume(term=1), volume(term=3, id="vol-0c"), volume(term=3, id="vol-0b"), volume("moving", 9))
    )
    assert found is not None and ("vol-0b", 3) == (found.id, found.writer)


def test_adoptable_snapshots_are_none_without_a_term():
    source = source_of({}, (volume(term=0),))
    assert source is not None and () == adoptable(source, (snapshot(0),))
