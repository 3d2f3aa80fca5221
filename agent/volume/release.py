"""What a writer leaves behind: the handover snapshot, the base snapshot, a free volume. The order is the caller's."""

from __future__ import annotations

from typing import Protocol

from spotheal.agent.protocol.errors import Conflict, NotFound, Retryable, SpothealError
from spotheal.agent.protocol.names import LAYOUT, TAG_PURPOSE, Purpose
from spotheal.agent.volume.act import let_go, snapshot_tags
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.seen import HELD_STATES, term_of

LISTED_SECONDS_MAX = 60.0
ONE_SNAPSHOT_TYPES = ("st1", "sc1")
RELEASE_SECONDS_MAX = 120.0
_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 10.0


class Writer(Protocol):
    """`heal.Held`."""

    @property
    def volume(self) -> str: ...

    @property
    def term(self) -> int: ...


def create_handover(ctx: Context, writer: Writer, saved_step: int | None) -> str:
    """Take the handover snapshot of the unmounted (or frozen) volume and see it listed; returns its id.

    The store is told meanwhile that this term will not write again, which lets a successor go on before this machine
    is gone; a store that hangs delays the successor, not the snapshot. No safety hangs on that mark: this machine,
    should it live on, claims another term whether the mark is there or not (`observe`), and a successor that finds no
    mark waits for our end. Retryable while no describe lists the snapshot: a volume that is detached then would be free
    for a successor that cannot see the handover. May be called again after it failed.
    """
    if not ctx.memory.releasing:
        ctx.memory.releasing = True
        ctx.beside(lambda: _mark_released(ctx, writer.term))
    start = ctx.clock.monotonic()
    snapshot, made = _own_handover(ctx, writer), ctx.memory.handover
    if snapshot is not None:
        return snapshot
    if not made:
        tags = snapshot_tags(ctx, Purpose.HANDOVER, writer.term, saved_step)
        made = ctx.memory.handover = ctx.ec2.create_snapshot(writer.volume, tags).id
    while ctx.clock.monotonic() - start < LISTED_SECONDS_MAX:
        try:
            snapshot = _own_handover(ctx, writer)
            if snapshot is not None:
                return snapshot
        except (Retryable, NotFound) as error:
            ctx.log.warning("the handover cannot be seen yet", error=error.message)
        ctx.clock.sleep(_LOOK_SECONDS)
    ctx.memory.handover = "" if _has_failed(ctx, made) else made
    raise Retryable(f"no describe lists the handover {made}; {writer.volume} stays attached")


def _mark_released(ctx: Context, term: int) -> None:
    """Tried until the store has it; this machine is about to end, and the thread with it. A fault is told once: the
    try after it comes a second later."""
    start, message = ctx.clock.monotonic(), ""
    while True:
        try:
            ctx.store.put_json(LAYOUT.released(term), {"instance": ctx.desired.instance})
            return
        except SpothealError as error:
            if error.message != message:
                ctx.log.warning("the store does not know yet that the term is released", term=term, error=error.message)
            message = error.message
        if ctx.clock.monotonic() - start > RELEASE_SECONDS_MAX:
            return
        ctx.clock.sleep(_LOOK_SECONDS)


def _has_failed(ctx: Context, snapshot: str) -> bool:
    current = ctx.ec2.snapshot(snapshot)
    return current is not None and current.state == "error"


def _own_handover(ctx: Context, writer: Writer) -> str | None:
    """This term's handover, should it exist: CreateSnapshot takes no token, so a lost reply is found by tags."""
    snapshots = [
        snapshot.id
        for snapshot in ctx.ec2.snapshots_of_run(ctx.desired.run)
        if snapshot.volume == writer.volume
        and term_of(snapshot) == writer.term
        and snapshot.tags.get(TAG_PURPOSE) == Purpose.HANDOVER.value
        and snapshot.state != "error"
    ]
    return min(snapshots, default=None)


def create_base(ctx: Context, writer: Writer, saved_step: int | None, *, first: bool = False) -> str:
    """A snapshot beside a running trainer: it makes the next one small and is never adopted. `first`: only if the run
    has no snapshot yet; "" if it has one.

    Conflict where it might stand in the way of the handover: while EC2 works on as many snapshots of a volume as it
    allows (EBS quotas: five, of an HDD volume one) it refuses the next, for hours where the first copies a whole disk.
    """
    snapshots = ctx.ec2.snapshots_of_run(ctx.desired.run)
    if first and any(snapshot.state != "error" for snapshot in snapshots):
        return ""
    pending = [
        snapshot.id for snapshot in snapshots if snapshot.volume == writer.volume and snapshot.state == "pending"
    ]
    if pending:
        raise Conflict(f"{', '.join(pending)} of {writer.volume} is not completed yet")
    volume = ctx.ec2.volume(writer.volume)
    if volume is not None and volume.type in ONE_SNAPSHOT_TYPES:
        raise Conflict(f"of an {volume.type} volume EC2 takes one snapshot at a time, and a handover may be needed")
    made = ctx.ec2.create_snapshot(writer.volume, snapshot_tags(ctx, Purpose.BASE, writer.term, saved_step)).id
    ctx.memory.bases.add(made)
    return made


def detach(ctx: Context, writer: Writer) -> None:
    """Ask for the end of the attachment, after the unmount and after the handover was listed."""
    mountpoint = ctx.desired.mountpoint
    if ctx.host.mounted_at(mountpoint) is not None:
        raise Conflict(f"{writer.volume} is still mounted at {mountpoint} and is not detached")
    let_go(ctx, (writer.volume,))  # which asks whether the kernel, too, is through with it


def leave(ctx: Context) -> None:
    """Stop healing half-way: unmount, detach, and release the term, so that a successor need not wait for our end.

    Nothing was written by a trainer in this term, so the snapshots of before stay good. Tried for ten seconds; what
    fails is put right by the end of this machine.
    """
    start = ctx.clock.monotonic()
    while ctx.clock.monotonic() - start < _LEAVE_SECONDS:
        try:
            volumes = ctx.ec2.volumes_of_run(ctx.desired.run)
            me = ctx.desired.instance
            ours = [v.id for v in volumes if any(a.instance == me and a.state in HELD_STATES for a in v.attachments)]
            let_go(ctx, tuple(ours))
            if ctx.memory.term is not None:
                ctx.store.put_json(LAYOUT.released(ctx.memory.term), {"instance": me})
            return
        except SpothealError as error:
            ctx.log.warning("letting go", error=error.message)
            ctx.clock.sleep(_LOOK_SECONDS)
