"""Deletes what a run no longer needs: superseded volumes, and snapshots beyond the last two.

Called by the writer only after it has acknowledged a checkpoint of its own, so the volume it holds is newer than all
that is deleted. Only things with our run's tag are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotheal.agent.aws.ec2 import Snapshot, Volume
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import SNAPSHOTS_KEPT, TAG_PURPOSE, Purpose, VolumeState
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.release import Writer
from spotheal.agent.volume.seen import DEAD_STATES, GONE_STATES, state_of, term_of


@dataclass(frozen=True)
class Surplus:
    volumes: tuple[str, ...]
    snapshots: tuple[str, ...]


def surplus(
    writer: Writer,
    volumes: tuple[Volume, ...],
    snapshots: tuple[Snapshot, ...],
    keep_count: int = SNAPSHOTS_KEPT,
    run_ends: bool = False,
    keep_bases: bool = True,
) -> Surplus:
    """What can go, seen by the holder of the last term. Pure. `kept`: less where a newer snapshot is known of.

    Volumes: superseded ones, and copies of earlier terms that were never finished; never one that is attached.
    Snapshots: ours by purpose, all but the newest two. A pending one is left to complete, unless the run ends: nobody
    looks again then (AWS takes the deletion at once and carries it out when the snapshot has completed). Without
    `keep_bases` every base goes: nothing is ever made from one.
    """
    old = [volume.id for volume in volumes if _is_superseded(volume, writer) and not volume.attachments]
    purposes = tuple(purpose.value for purpose in Purpose)
    ours = [s for s in snapshots if s.tags.get(TAG_PURPOSE) in purposes and term_of(s) <= writer.term]
    failed = [s for s in ours if s.state == "error"]
    bases = [s for s in ours if not keep_bases and s.tags.get(TAG_PURPOSE) == Purpose.BASE.value]
    newest_first = sorted(
        (s for s in ours if s.state != "error" and s not in bases), key=lambda s: (term_of(s), s.started, s.id),
        reverse=True,
    )  # fmt: skip
    unneeded = [*bases, *(s for s in newest_first[keep_count:] if run_ends or s.state == "completed")]
    return Surplus(tuple(sorted(old)), tuple(sorted({s.id for s in (*failed, *unneeded)})))


def _is_superseded(volume: Volume, writer: Writer) -> bool:
    if volume.id == writer.volume or volume.state in GONE_STATES or term_of(volume) > writer.term:
        return False
    half_made = state_of(volume) == VolumeState.MOVING.value and term_of(volume) < writer.term
    return half_made or state_of(volume) == VolumeState.SUPERSEDED.value


def _free_stranded(ctx: Context, writer: Writer, volumes: tuple[Volume, ...]) -> None:
    """A stopped instance keeps what is attached to it while it is stopped, and EC2 may forget to take a terminated
    one's: take superseded volumes from them, and from ourselves, who have another volume mounted.

    The next call deletes them. Another instance that runs, even one that only waits, is left what it has. By force
    where a detach is under way already: it can be stuck for ever, and there is nothing to lose.
    """
    stranded = [(v.id, a.instance, a.state) for v in volumes if _is_superseded(v, writer) for a in v.attachments]
    if not stranded:
        return
    instances = ctx.ec2.instances(instance for _, instance, _ in stranded)
    free = {instance.id for instance in instances if instance.state in DEAD_STATES} | {ctx.desired.instance}
    for volume, instance, state in stranded:
        if instance in free:
            ctx.ec2.detach(volume, instance, force=state == "detaching")


def _superseded_by_us(ctx: Context, writer: Writer, volumes: tuple[Volume, ...]) -> list[str]:
    """Volumes that this life has superseded, and that describes show as something else, or not at all, for a while. A
    run that ends within that while has no later look. One that is attached is left to `_free_stranded`."""
    attached = {volume.id for volume in volumes if volume.attachments}
    ours = [volume for volume, state in ctx.memory.states.items() if state == VolumeState.SUPERSEDED.value]
    return [v for v in ours if v != writer.volume and v not in attached]


def clean_up(
    ctx: Context, writer: Writer, *, acknowledged_step: int | None, run_ends: bool = False, keep_bases: bool = True
) -> Surplus:
    """Delete the surplus and return what was deleted; nothing where this term has acknowledged no checkpoint.

    Retryable as AWS is; what could not be deleted is found again by the next call.
    """
    if acknowledged_step is None:
        return Surplus((), ())
    highest = ctx.store.highest_term()
    if highest is None or highest.number != writer.term or highest.instance != ctx.desired.instance:
        return Surplus((), ())
    seen = ctx.ec2.volumes_of_run(ctx.desired.run)
    listed = ctx.ec2.snapshots_of_run(ctx.desired.run)
    unlisted = ctx.memory.snapshot if ctx.memory.snapshot not in {one.id for one in listed} else None
    keep_count = SNAPSHOTS_KEPT - (1 if unlisted else 0)
    unneeded = surplus(writer, seen, listed, keep_count=keep_count, run_ends=run_ends, keep_bases=keep_bases)
    volumes, snapshots = [], []
    # A volume that AWS deletes may be shown for a while, and a second call for it is refused.
    for volume in sorted({*unneeded.volumes, *_superseded_by_us(ctx, writer, seen)} - ctx.memory.deleted):
        try:
            ctx.ec2.delete_volume(volume)
            ctx.memory.deleted.add(volume)
            volumes.append(volume)
        except SpothealError as error:  # one that is locked, or an AMI's, keeps no other from going
            ctx.log.warning("a superseded volume is not deleted yet", volume=volume, error=error.message)
    for snapshot in sorted({*unneeded.snapshots, *(() if keep_bases else ctx.memory.bases)}):
        try:
            ctx.ec2.delete_snapshot(snapshot)
            snapshots.append(snapshot)
        except SpothealError as error:
            ctx.log.warning("a surplus snapshot is not deleted yet", snapshot=snapshot, error=error.message)
    _free_stranded(ctx, writer, seen)
    return Surplus(tuple(volumes), tuple(snapshots))
