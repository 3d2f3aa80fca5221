"""Carries out one action, without opinions. Everything may be done again; "already so" is success."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from spotheal.agent.aws.ec2 import DeviceNameTaken, TokenUsed, was_refused
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.errors import MountRefused, Retryable, SpothealError
from spotheal.agent.protocol.names import (
    LAYOUT,
    TAG_PURPOSE,
    TAG_REASON,
    TAG_SAVED_STEP,
    TAG_STATE,
    TAG_TERM,
    Purpose,
    VolumeState,
)
from spotheal.agent.volume.actions import (
    POLL_SECONDS,
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
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.seen import REJECTED

DEVICE_NAMES = tuple(f"/dev/sd{letter}" for letter in "fghijklmnop")
_DEVICE_LOOK_SECONDS = 1.0
_UNMOUNT_SECONDS = 60.0


def act(action: Action, ctx: Context) -> None:
    """Raises what the boundary raises; `Ready` and `GiveUp` are for the caller."""
    match action:
        case Wait():
            _wait(action, ctx)
        case ClaimTerm(number):
            _claim(number, ctx)
        case StepAside(_, _, volumes):
            let_go(ctx, volumes)
        case FenceHolder(instance):
            ctx.ec2.terminate(instance)
            ctx.clock.sleep(5.0, until=ctx.stop)
        case DetachFrom(volume, instance, _, force):
            ctx.memory.asked.pop(("attach", volume), None)
            ctx.ec2.detach(volume, instance, force=force)
        case TakeSnapshot(volume, term, saved_step):
            _take_snapshot(volume, snapshot_tags(ctx, Purpose.HANDOVER, term, saved_step), ctx)
        case CreateVolume(spec):
            try:
                ctx.memory.copy = ctx.ec2.create_volume(spec, partial(_filled_lazily, ctx)).id
                ctx.ask("copy", ctx.memory.copy)
            except TokenUsed as error:
                ctx.memory.attempt += 1
                ctx.log.warning("trying another token", why=error.message)
        case Attach(volume):
            _attach(volume, ctx)
        case SetTerm(volume, term):
            ctx.ec2.tag([volume], {TAG_TERM: str(term)})
            ctx.ask("term", volume)
        case MakeFilesystem(volume, device, filesystem, term, again):
            ctx.store.put_json(LAYOUT.formatting(term, volume), {"instance": ctx.desired.instance})
            ctx.host.make_filesystem(device, filesystem, again)
            ctx.memory.formatted.add(volume)
        case Mount(volume, device):
            try:
                ctx.host.mount(device, ctx.desired.mountpoint, ctx.desired.filesystem, volume, _name_of(volume, ctx))
            except MountRefused:
                ctx.memory.unmountable.add(volume)
                raise
        case Reject(volume, snapshot, why):
            # In this order: left mounted it would stand where its successor belongs; and once its snapshot is rejected
            # nothing may tell of the step that the copy lacks, which would then be promoted.
            let_go(ctx, (volume,))
            _set_state(ctx, [volume], VolumeState.SUPERSEDED)
            ctx.ec2.tag([snapshot], {TAG_REASON: REJECTED + why})
            ctx.memory.rejected.add(snapshot)
        case TakeOver(volume, term):
            ctx.memory.took_over = term
            ctx.store.put_json(LAYOUT.holds(term, volume), {"instance": ctx.desired.instance})
        case Promote(volume, term):
            ctx.ec2.tag([volume], {TAG_STATE: VolumeState.CURRENT.value, TAG_TERM: str(term)})
            ctx.memory.states[volume] = VolumeState.CURRENT.value
        case Supersede(volumes):
            _set_state(ctx, list(volumes), VolumeState.SUPERSEDED)
        case Ready() | GiveUp():
            pass
        case _:
            _assert_never(action)


def snapshot_tags(ctx: Context, purpose: Purpose, term: int, saved_step: int | None) -> dict[str, str]:
    tags = {**ctx.desired.tags, TAG_PURPOSE: purpose.value, TAG_TERM: str(term)}
    return tags if saved_step is None else {**tags, TAG_SAVED_STEP: str(saved_step)}


def _filled_lazily(ctx: Context, reason: str) -> None:
    ctx.memory.lazy = True
    ctx.log.warning("AWS refuses the initialization rate; the copy is filled as it is read, which is slow", why=reason)


def let_go(ctx: Context, volumes: tuple[str, ...]) -> None:
    """Unmount, then detach: never a mounted volume. Retryable where the mount point stays busy."""
    mountpoint = ctx.desired.mountpoint
    # Asked even where no mount is shown: the kernel takes it off its table before it has written everything out.
    if not ctx.host.unmount(mountpoint, _UNMOUNT_SECONDS):
        raise Retryable(f"{mountpoint} is busy and cannot be unmounted", next_step=f"`fuser -vm {mountpoint}`")
    for volume in volumes:
        ctx.ec2.detach(volume, ctx.desired.instance)


def _wait(action: Wait, ctx: Context) -> None:
    until = ctx.clock.monotonic() + action.seconds
    if action.snapshot is not None:
        return _await_snapshot(action.snapshot, until, ctx)
    while (remaining_seconds := until - ctx.clock.monotonic()) > 0:
        step = remaining_seconds if action.device_of is None else min(remaining_seconds, _DEVICE_LOOK_SECONDS)
        if ctx.clock.sleep(step, until=ctx.stop):
            return
        volume = action.device_of
        if volume is not None and ctx.host.find_device(volume, _name_of(volume, ctx)) is not None:
            return


def _await_snapshot(snapshot: str, until: float, ctx: Context) -> None:
    """Until it is pending no more, or a whole look is due. One call a look, and the beat is kept over whole looks: what
    the calls themselves take would add up over the hours of a large snapshot."""
    beat = ctx.memory.asked.setdefault(("look", snapshot), ctx.clock.monotonic())
    while True:
        beat += POLL_SECONDS
        while beat <= ctx.clock.monotonic():
            beat += POLL_SECONDS
        if ctx.clock.sleep(beat - ctx.clock.monotonic(), until=ctx.stop):
            return
        ctx.ask("look", snapshot)
        if beat + POLL_SECONDS > until:
            return
        snapshot_now = ctx.ec2.snapshot(snapshot)
        if snapshot_now is not None and snapshot_now.state != "pending":
            ctx.memory.completed |= {snapshot} if snapshot_now.state == "completed" else set()
            return


def _claim(number: int, ctx: Context) -> None:
    """A claim that fails is no fault: another instance was faster, and the next look says so."""
    desired = ctx.desired
    claim = Claim(number, desired.instance, desired.zone, rfc3339(ctx.clock.now()))
    won = ctx.store.claim_term(claim)
    if won:
        ctx.memory.claims[number] = claim
    ctx.log.info("claimed the term" if won else "another instance claimed the term first", number=number)


def _take_snapshot(volume: str, tags: dict[str, str], ctx: Context) -> None:
    """A snapshot that may have been made is waited for by the next looks; one that was refused is not."""
    ctx.memory.snapshot = ""
    ctx.ask("snapshot", volume)
    try:
        ctx.memory.snapshot = ctx.ec2.create_snapshot(volume, tags).id
    except SpothealError as error:
        if was_refused(error):
            ctx.memory.snapshot = None
        if error.code == "ConcurrentSnapshotLimitExceeded":
            _make_room(volume, ctx)
        raise


def _make_room(volume: str, ctx: Context) -> None:
    """Snapshots that have failed count against what EC2 works on at a time, which is one of an HDD volume."""
    for snapshot in ctx.ec2.snapshots_of_run(ctx.desired.run):
        if snapshot.volume == volume and snapshot.state == "error":
            try:
                ctx.ec2.delete_snapshot(snapshot.id)
            except SpothealError as error:  # the instance's role may be one that deletes nothing
                ctx.log.warning("a failed snapshot is not deleted", snapshot=snapshot.id, error=error.message)


def _attach(volume: str, ctx: Context) -> None:
    """As the first device name that is free; the kernel's own name for it is another matter."""
    device_error: SpothealError | None = None
    for name in DEVICE_NAMES[ctx.memory.device_letter :]:
        try:
            ctx.ec2.attach(volume, ctx.desired.instance, name)
        except DeviceNameTaken as error:
            device_error = error
            ctx.memory.device_letter += 1
            continue
        ctx.ask("attach", volume)
        return
    ctx.memory.device_letter = 0
    raise Retryable(f"no device name is free for {volume}") from device_error


def _name_of(volume: str, ctx: Context) -> str:
    """The device name given to AttachVolume; needed only on Xen machines."""
    letter = min(ctx.memory.device_letter, len(DEVICE_NAMES) - 1)
    return DEVICE_NAMES[letter] if ("attach", volume) in ctx.memory.asked else ""


def _set_state(ctx: Context, volumes: list[str], state: VolumeState) -> None:
    ctx.ec2.tag(volumes, {TAG_STATE: state.value})
    ctx.memory.states.update({volume: state.value for volume in volumes})


def _assert_never(action: NoReturn) -> NoReturn:
    raise AssertionError(f"unknown action {action!r}")
