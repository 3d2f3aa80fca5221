"""What to do next: one pure function of the desired and the observed. The rules are those of docs/architecture.md.

No clock, no client, no log in here. Every answer may be wrong for a while (describes are stale both ways), so nothing
is concluded from an absence that has not lasted, and whatever must not be stale is read from the store.
"""

from __future__ import annotations

from spotheal.agent.aws.ec2 import Instance, Volume, VolumeSpec, key_next_step
from spotheal.agent.protocol.names import (
    SILENT_CONFIRM_SECONDS,
    TAG_RUN,
    TAG_STATE,
    TAG_TERM,
    Phase,
    VolumeState,
    volume_token,
)
from spotheal.agent.volume.actions import (
    Action,
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
from spotheal.agent.volume.seen import (
    DEAD_STATES,
    GONE_STATES,
    HELD_STATES,
    Desired,
    Observed,
    Source,
    adoptable,
    is_unwritten,
    source_of,
    state_of,
    term_of,
)

VOLUME_GONE_SECONDS = 15 * 60.0
ABSENT_SECONDS = 120.0  # an instance that claimed a term long ago cannot be missing for so long and run
STUCK_SECONDS = 90.0
FORCE_SECONDS = 300.0
FOREIGN_SECONDS = 3600.0
SNAPSHOT_FAILURES_MAX = 3
COPY_FAILURES_MAX = 5
DAY = 24 * 3600.0
SNAPSHOT_LOOK_SECONDS = 60.0  # between whole looks while a snapshot is pending


def decide(desired: Desired, observed: Observed) -> Action:
    """The one thing to do now."""
    claim = observed.claim
    if claim is not None and claim.instance == desired.instance and claim.number not in observed.released:
        return _as_holder(desired, observed, claim.number)
    if claim is not None and claim.instance != desired.instance:
        ours = tuple(v.id for v in observed.volumes if _held_by(v, desired.instance) or v.id in observed.devices)
        if observed.mounted or ours:
            return StepAside(claim.number, claim.instance, ours)
    return _as_candidate(desired, observed)


# ---------------------------------------------------------------------------------------------- who may be the writer
def _as_candidate(desired: Desired, observed: Observed) -> Action:
    """A term is claimed only where the last one's holder is gone or has released; a living one is waited for."""
    claim, source = observed.claim, source_of(observed.holds, observed.volumes)
    if claim is None or claim.instance == desired.instance:
        if source is None or (source.volume is None and not adoptable(source, observed.snapshots)):
            return _without_volume(observed, source)
        return ClaimTerm(
            1 if claim is None else claim.number + 1, "first of the run" if claim is None else "ours ended"
        )
    holder, state = claim.instance, observed.instance_state(claim.instance)
    dead = state in DEAD_STATES or (state == "absent" and _is_long_gone(observed, holder))
    if dead or _has_released(observed, source):
        if source is None or (source.volume is None and not adoptable(source, observed.snapshots)):
            return _without_volume(observed, source)
        reason = f"{holder} is {state}" if dead else f"{holder} has released the volume"
        return ClaimTerm(claim.number + 1, reason)
    return _await_release(observed, holder, f"{holder} holds term {claim.number}")


def _has_released(observed: Observed, source: Source | None) -> bool:
    """Whether the last term wrote its handover (or never wrote at all) and let every volume go."""
    claim = observed.claim
    if claim is None or source is None or claim.number not in observed.released:
        return False
    if any(a.state in HELD_STATES for volume in observed.volumes for a in volume.attachments):
        return False
    wrote = claim.number in observed.holds
    return not wrote or bool(adoptable(source, observed.snapshots))


def _await_release(observed: Observed, instance: str, reason: str) -> Action:
    """Wait for an instance that is not seen to be dead; fence it where it is silent."""
    state, silent = observed.instance_state(instance), observed.silent.get(instance)
    if silent is not None and silent >= SILENT_CONFIRM_SECONDS and state in ("pending", "running", "stopping"):
        return FenceHolder(instance, f"{reason}, is {state} and has shown no sign of life")
    if state == "absent":
        return Wait(f"{reason}; no describe shows it", f"absent {instance}", None)
    quiet = "" if silent is None else f", silent for {silent:.0f} s more than allowed"
    return Wait(f"{reason} and is {state}{quiet}", f"held by {instance}", None)


def _is_long_gone(observed: Observed, instance: str) -> bool:
    """Terminated instances leave the describes after an hour; a young one may not be in them yet."""
    return observed.absent.get(instance, 0.0) >= ABSENT_SECONDS and instance in observed.silent


def _without_volume(observed: Observed, source: Source | None) -> Action:
    """No volume is shown. An empty answer is no proof: only a long row of them is."""
    name = "a volume of this run" if source is None else source.id
    if observed.volume_gone_for < VOLUME_GONE_SECONDS:
        return Wait(f"no describe shows {name}", "no volume", 2 * VOLUME_GONE_SECONDS)
    return GiveUp(Phase.PARKED, f"the volume is gone: no describe has shown {name} for 15 minutes")


# ------------------------------------------------------------------------------------------------------- as the writer
def _as_holder(desired: Desired, observed: Observed, term: int) -> Action:
    source = source_of(observed.holds, observed.volumes)
    if source is None:
        return _without_volume(observed, source)
    if source.volume is not None and source.volume.zone == desired.zone and source.volume.state != "error":
        return _take(desired, observed, term, source, source.volume)
    copies = [
        volume
        for volume in observed.volumes
        if state_of(volume) == VolumeState.MOVING.value
        and term_of(volume) == term
        and volume.zone == desired.zone
        and volume.state not in (*GONE_STATES, "error")
    ]
    copy = min(copies, key=lambda volume: volume.id, default=None)
    if copy is None:
        return _make_copy(desired, observed, term, source)
    return _take(desired, observed, term, source, copy)


def _make_copy(desired: Desired, observed: Observed, term: int, source: Source) -> Action:
    """Snapshot, then a volume in our zone. The source is only read, and stays until its successor is verified."""
    volume = source.volume
    if volume is not None:
        blocked = _free(desired, observed, volume)
        if blocked is not None:
            return blocked
        if is_unwritten(source):
            return _create(desired, observed, term, volume, volume.snapshot, volume.size_gib)
    snapshots = adoptable(source, observed.snapshots)
    if snapshots:
        best = snapshots[0]
        if best.state == "completed":
            return _create(desired, observed, term, volume, best.id, best.size_gib)
        percent = "" if best.progress is None else f", {best.progress} %"
        reason = f"{best.id} of {source.id} is {best.state}{percent}"
        return Wait(reason, f"snapshot {best.id}", DAY, SNAPSHOT_LOOK_SECONDS, snapshot=best.id)
    if volume is None:
        return _without_volume(observed, source)
    if volume.state == "error":
        return GiveUp(Phase.PARKED, f"{volume.id} is in error and no snapshot holds all that was on it")
    if volume.state == "creating":
        return Wait(f"{volume.id} is being created", f"creating {volume.id}", 3600.0)
    if observed.asked_snapshot is not None:
        snapshot_name = observed.asked_snapshot or f"the snapshot of {volume.id} that was asked for"
        return Wait(f"no describe shows {snapshot_name} yet", f"unseen snapshot of {volume.id}", 600.0)
    failed = [s for s in observed.snapshots if s.volume == volume.id and term_of(s) == term]
    if len(failed) >= SNAPSHOT_FAILURES_MAX:
        return GiveUp(Phase.PARKED, f"{len(failed)} snapshots of {volume.id} in a row failed; the volume is kept")
    return TakeSnapshot(volume.id, term, observed.saved_step)


def _create(
    desired: Desired, observed: Observed, term: int, like: Volume | None, snapshot: str | None, size_gib: int
) -> Action:
    if observed.attempt >= COPY_FAILURES_MAX:
        # EC2 says of a key that may not be used only this: the volume is gone again.
        key = f"; {key_next_step(like.kms_key)}" if like and like.kms_key else ""
        return GiveUp(Phase.PARKED, f"{observed.attempt} volumes in a row could not be made in {desired.zone}{key}")
    if observed.asked_copy is not None:
        return Wait(f"no describe shows {observed.asked_copy} yet", "unseen copy", 600.0)
    tags = {**desired.tags, TAG_TERM: str(term), TAG_STATE: VolumeState.MOVING.value}
    spec = VolumeSpec(
        zone=desired.zone,
        size_gib=max(size_gib, like.size_gib if like else 0),
        type=like.type if like else desired.type,
        tags=tags,
        token=volume_token(desired.run, term, desired.zone, snapshot or "", observed.attempt),
        snapshot=snapshot,
        iops=like.iops if like else None,
        throughput=like.throughput if like else None,
        encrypted=like.encrypted if like else False,
        kms_key=like.kms_key if like else None,
        initialization_rate=desired.initialization_rate,
    )
    return CreateVolume(spec)


def _take(desired: Desired, observed: Observed, term: int, source: Source, target: Volume) -> Action:
    """From a volume in our zone to a verified mount of it."""
    device = observed.devices.get(target.id)
    blocked = _attach(desired, observed, target, attached=device is not None)
    if blocked is not None:
        return blocked
    if term_of(target) != term and target.id not in observed.term_set:
        return SetTerm(target.id, term)
    if device is None:
        return _await_device(desired, observed, target)
    if term_of(target) != term:
        return Wait(f"term {term} on {target.id} is to be read back", f"term of {target.id}", 600.0)
    if observed.mounted is None:
        return _mount(desired, observed, term, source, target)
    if observed.mounted != device.path:
        mount = f"{observed.mounted} is mounted at {desired.mountpoint}"
        return GiveUp(Phase.SETUP_FAILED, f"{mount}, where {target.id} ({device.path}) belongs")
    if target.id != source.id and target.snapshot is not None and source.writer > 0:
        fault = "" if _is_all_there_is(observed, term, source, target) else unverified(observed, target)
        if fault:
            return Reject(target.id, target.snapshot, f"{target.id}, made from {target.snapshot}, {fault}")
    return _hand_out(desired, observed, term, source, target, device.path)


def _hand_out(desired: Desired, observed: Observed, term: int, source: Source, target: Volume, device: str) -> Action:
    """It is mounted and verified: say so in the store, promote it, and only then supersede what it replaces."""
    if observed.holds.get(term) != target.id:
        return TakeOver(target.id, term)
    if state_of(target) != VolumeState.CURRENT.value:
        return Promote(target.id, term)
    live = (VolumeState.NEW.value, VolumeState.MOVING.value, VolumeState.CURRENT.value, VolumeState.DONE.value)
    replaced = [
        volume.id
        for volume in observed.volumes
        if volume.id != target.id
        and state_of(volume) in live
        and volume.state not in GONE_STATES
        and term_of(volume) <= term
    ]
    if replaced:
        return Supersede(tuple(replaced), target.id)
    older = [number for number in observed.holds if number < term]
    before = observed.holds[max(older)] if older else None
    return Ready(target.id, term, device, before if before != target.id else None)


def _is_all_there_is(observed: Observed, term: int, source: Source, target: Volume) -> bool:
    """Whether `target` is a copy of what we ourselves have taken of the source, which nobody had: what it lacks was
    never there under that name. A trainer may count its files otherwise than its steps, or keep them elsewhere."""
    return any(
        snapshot.id == target.snapshot and snapshot.volume == source.id and term_of(snapshot) == term
        for snapshot in observed.snapshots
    )


def unverified(observed: Observed, target: Volume) -> str:
    """What a copy lacks, "" where it is good. A trainer with checkpoints of another form: it has some."""
    if observed.saved_step is None:
        return ""
    if observed.steps:
        newest = max(observed.steps)
        return "" if newest >= observed.saved_step else f"ends at step {newest}, not at {observed.saved_step}"
    return "" if observed.checkpoints_present else f"holds no checkpoint, but step {observed.saved_step} was saved"


# ------------------------------------------------------------------------------------------------------------ attaching
def _held_by(volume: Volume, instance: str) -> bool:
    return any(a.instance == instance and a.state in HELD_STATES for a in volume.attachments)


def _free(desired: Desired, observed: Observed, volume: Volume) -> Action | None:
    """What must happen before nobody else has `volume`, or None. A living holder is waited for, never robbed."""
    for attachment in volume.attachments:
        holder = attachment.instance
        if holder == desired.instance or attachment.state not in HELD_STATES:
            continue
        state, since = observed.instance_state(holder), observed.attached_for.get((volume.id, holder), 0.0)
        reason = f"{volume.id} is {attachment.state} at {holder}, which is {state}"
        if state == "stopped" and attachment.state != "detaching":
            return DetachFrom(volume.id, holder, reason)
        if state in DEAD_STATES or (state == "absent" and _is_long_gone(observed, holder)):
            # A terminated instance's volumes come free by themselves, within seconds. By force only from the dead: a
            # detach that was asked for at a stopped instance can be stuck for ever.
            if since >= STUCK_SECONDS:
                return DetachFrom(volume.id, holder, reason, force=since >= FORCE_SECONDS)
            return _held(reason, holder)
        if state != "absent" and not _is_ours(desired, observed, observed.known[holder]):
            return _await_foreign(f"{reason} and not of this run", volume.id, holder, since)
        return _await_release(observed, holder, f"{holder} has {volume.id} ({attachment.state})")
    return None


def _await_foreign(reason: str, volume: str, instance: str, since: float) -> Action:
    """Whose it is, or why, cannot be known here: only a person can free it, and a machine that waits for one costs."""
    if since < FOREIGN_SECONDS:
        return Wait(reason, f"foreign {instance}", 2 * FOREIGN_SECONDS)
    command = f"`aws ec2 detach-volume --volume-id {volume}`"
    return GiveUp(
        Phase.PARKED, f"for an hour, {reason}: {command} when that is right, then `fleetctl request --resume`"
    )


def _is_ours(desired: Desired, observed: Observed, instance: Instance) -> bool:
    """Only instances of this run are ever terminated."""
    claimed = observed.claim is not None and observed.claim.instance == instance.id
    return claimed or instance.tags.get(TAG_RUN) == desired.run


def _held(reason: str, instance: str) -> Wait:
    return Wait(reason, f"detaching {instance}", 3600.0)


def _attach(desired: Desired, observed: Observed, target: Volume, attached: bool) -> Action | None:
    """What must happen before `target` is attached here, or None where it is (or is about to be)."""
    blocked = _free(desired, observed, target)
    if blocked is not None:
        return blocked
    attachments_here = (a for a in target.attachments if a.instance == desired.instance)
    attachment = next((a for a in attachments_here if a.state in HELD_STATES), None)
    if attachment is not None:
        since = observed.attached_for.get((target.id, desired.instance), 0.0)
        if attachment.state in ("detaching", "busy"):
            if since >= STUCK_SECONDS:
                # Nobody is robbed: it is attached to us, and we have nothing mounted.
                force = since >= FORCE_SECONDS and observed.mounted is None
                reason = f"{attachment.state} has been stuck for {since:.0f} s"
                return DetachFrom(target.id, desired.instance, reason, force)
            return _held(f"{target.id} is being detached from here", desired.instance)
        return None
    if attached or target.id in observed.attach_asked:
        return None
    if target.state == "creating":
        return Wait(f"{target.id} is being created", f"creating {target.id}", 3600.0)
    if target.state == "in-use":
        return _held(f"{target.id} is in use, but no describe shows by whom", "unknown")
    return Attach(target.id)


def _await_device(desired: Desired, observed: Observed, target: Volume) -> Action:
    since = observed.attached_for.get((target.id, desired.instance), 0.0)
    attachment = next((a for a in target.attachments if a.instance == desired.instance), None)
    if since >= STUCK_SECONDS and attachment is not None:
        reason = f"{attachment.state} for {since:.0f} s and no device has appeared"
        return DetachFrom(target.id, desired.instance, reason)
    return Wait(f"{target.id} has no device yet", f"device of {target.id}", 3600.0, device_of=target.id)


def _mount(desired: Desired, observed: Observed, term: int, source: Source, target: Volume) -> Action:
    """Formatting needs every proof that nothing is lost by it; a filesystem that is there is mounted as it is.

    A mkfs that was cut short leaves a signature that no mount accepts (xfs), or bytes without one (ext4). If the store
    says that it began, and no term has taken the volume over since, there is nothing else on it. The mount is tried
    first: what can be mounted is whole, whatever a mark or a tag says.
    """
    device = observed.devices[target.id]
    fresh = state_of(target) == VolumeState.NEW.value or (
        state_of(target) == VolumeState.MOVING.value and is_unwritten(source)
    )
    unused = fresh and target.snapshot is None and target.id not in observed.holds.values()
    half_made = target.id in observed.formatting and (not device.filesystem or target.id in observed.unmountable)
    if unused and (device.blank or half_made):
        return MakeFilesystem(target.id, device.path, desired.filesystem, term, again=not device.blank)
    if device.filesystem:
        return Mount(target.id, device.path)
    contents = "is blank but was written to" if device.blank else "holds data, but no filesystem"
    return GiveUp(Phase.SETUP_FAILED, f"{target.id} ({device.path}) {contents}; it is not formatted")
