"""One look at cloud, store and host: the only reading that healing does. Calls do not grow with the account.

What is not needed for the decision is not asked for: in the zone of the volume no snapshot is listed, and of a holder
that is dead no heartbeat is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spotheal.agent.aws.ec2 import Instance, Snapshot, Volume
from spotheal.agent.protocol.clock import parse_rfc3339
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.names import LAYOUT, SILENT_SECONDS, TAG_SAVED_STEP, TAG_STATE, VolumeState
from spotheal.agent.volume.actions import Action, Attach, MakeFilesystem, Mount, Promote, SetTerm, Supersede, TakeOver
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.seen import (
    GONE_STATES,
    HELD_STATES,
    DeviceSeen,
    Observed,
    Source,
    adoptable,
    source_of,
    term_of,
)

_MARK = re.compile(r"terms/(\d+)(?:\.(holds|released|formatting)(?:\.(vol-[0-9a-f]+))?)?")
_STEP = re.compile(r"step-(\d+)(-\d+)?(\.safetensors)?")  # a set of many ranks has no suffix, but may have a number
DESCRIBE_LAG_SECONDS = 60.0  # how long something we asked for may be missing from the describes


def observe(ctx: Context) -> Observed:
    """What there is now."""
    claim, holds, released, formatting = terms(ctx)
    volumes = _volumes(ctx)
    source = source_of(holds, volumes)
    mine = claim is not None and claim.instance == ctx.desired.instance
    if claim is not None and mine and claim.number in holds and claim.number != ctx.memory.took_over:
        # An earlier life of ours has written under it, and may have left a handover that says all of this term is in
        # it: what is written now must stand under a later one. That life's own mark can be missing, where the store
        # hung when it handed over, and so can the handover itself in a stale describe; what the term holds cannot.
        released |= {claim.number}
    if ctx.memory.term != (claim.number if claim is not None and mine else None):
        _new_term(ctx, claim.number if claim is not None and mine else None)
    holders = _others(ctx, claim, volumes)
    instances = {instance.id: instance for instance in ctx.ec2.instances(holders)}
    dead = (
        claim is not None
        and claim.instance in instances
        and instances[claim.instance].state in ("terminated", "stopped")
    )
    released_by = claim.instance if claim is not None and claim.number in released and not dead else ""
    snapshots = _snapshots(ctx, source, released_by)
    status = _status(ctx, claim, source, instances, holders)
    absent = {name: ctx.memory.watch.seconds("absent", name) for name in holders if name not in instances}
    silent = {}
    for holder in holders:
        seconds = _silent(ctx, holder, claim, status)
        if seconds is not None:
            silent[holder] = seconds
    attached_for = {
        (volume.id, a.instance): ctx.memory.watch.seconds("attachment", volume.id, a.instance, a.state)
        for volume in volumes
        for a in volume.attachments
    }
    is_lost = source is None or (source.volume is None)
    observed = Observed(
        claim=claim,
        holds=holds,
        released=released,
        formatting=formatting - ctx.memory.formatted,
        unmountable=frozenset(ctx.memory.unmountable),
        volumes=volumes,
        snapshots=snapshots,
        known=instances,
        absent=absent,
        silent=silent,
        attached_for=attached_for,
        volume_gone_for=ctx.memory.watch.seconds("no volume") if is_lost else 0.0,
        saved_step=_saved_step(ctx, source, snapshots),
        term_set=frozenset(v.id for v in volumes if ctx.recently("term", v.id, DESCRIBE_LAG_SECONDS)),
        attach_asked=frozenset(v.id for v in volumes if ctx.recently("attach", v.id, DESCRIBE_LAG_SECONDS)),
        asked_snapshot=_asked_snapshot(ctx, source, snapshots),
        asked_copy=_asked_copy(ctx, volumes),
        attempt=ctx.memory.attempt + _dead_copies(volumes, claim, ctx.desired.zone),
    )
    ctx.memory.watch.end_round()
    return _with_host(ctx, observed)


def advance(ctx: Context, observed: Observed, action: Action) -> Observed | None:
    """What there is after `action` has succeeded, without asking the cloud again; None where it must be asked.

    Only for what we know by our own doing: a poll saved is three calls saved, and seconds where describes are stale.
    """
    match action:
        case Attach(volume):
            return replace(observed, attach_asked=observed.attach_asked | {volume})
        case SetTerm(volume):  # for the wait for its device; it is mounted only when a describe shows the term
            return replace(observed, term_set=observed.term_set | {volume})
        case MakeFilesystem():
            return _with_host(ctx, replace(observed, formatting=observed.formatting - ctx.memory.formatted))
        case Mount():
            return _with_host(ctx, observed)
        case TakeOver(volume, term):
            return replace(observed, holds={**observed.holds, term: volume})
        case Promote(volume):
            return _with_state(observed, (volume,), VolumeState.CURRENT)
        case Supersede(volumes):
            return _with_state(observed, volumes, VolumeState.SUPERSEDED)
        case _:
            return None


def _with_state(observed: Observed, ids: tuple[str, ...], state: VolumeState) -> Observed:
    volumes = tuple(replace(v, tags={**v.tags, TAG_STATE: state.value}) if v.id in ids else v for v in observed.volumes)
    return replace(observed, volumes=volumes)


def steps_in(names: Iterable[str]) -> tuple[int, ...]:
    """The steps of the checkpoints among `names`: `step-<n>…`, made by a save: training/slotfile/slots.py."""
    matches = (_STEP.fullmatch(name) for name in names)
    return tuple(sorted(int(match.group(1)) for match in matches if match))


def checkpoint_names(mountpoint: str) -> tuple[str, ...]:
    """Names in the checkpoint folder below `mountpoint`; () where there is none."""
    try:
        return tuple(sorted(os.listdir(os.path.join(mountpoint, "checkpoints"))))
    except FileNotFoundError:
        return ()


# ---------------------------------------------------------------------------------------------------------------- store
def terms(ctx: Context) -> tuple[Claim | None, dict[int, str], frozenset[int], frozenset[str]]:
    """The last claim, what each term wrote to and released, and which volumes were to be formatted: one list, strongly
    consistent."""
    numbers, holds, released, formatting = set(), {}, set(), set()
    for key in ctx.store.keys(LAYOUT.terms):
        match = _MARK.fullmatch(key)
        if match is None:
            continue
        number, mark, volume = int(match.group(1)), match.group(2), match.group(3)
        if mark is None:
            numbers.add(number)
        elif mark == "released":
            released.add(number)
        elif mark == "formatting" and volume is not None:
            formatting.add(volume)
        elif volume is not None:
            holds[number] = volume
    if not numbers:
        return None, holds, frozenset(released), frozenset(formatting)
    highest = max(numbers)
    if highest not in ctx.memory.claims:
        claim = ctx.store.term(highest)
        if claim is not None:
            ctx.memory.claims[highest] = claim
    return ctx.memory.claims.get(highest), holds, frozenset(released), frozenset(formatting)


def _new_term(ctx: Context, term: int | None) -> None:
    """What was remembered is about another term."""
    memory = ctx.memory
    memory.term, memory.snapshot, memory.copy, memory.attempt = term, None, None, 0
    memory.lazy = False
    memory.asked.clear()
    memory.formatted.clear()
    memory.unmountable.clear()
    memory.states.clear()


def _status(
    ctx: Context,
    claim: Claim | None,
    source: Source | None,
    instances: dict[str, Instance],
    holders: frozenset[str],
) -> dict[str, Any] | None:
    """status.json, where the heartbeat or the saved step of another writer counts. It is overwritten by our own as soon
    as we have a term, so what it says of saved steps is remembered."""
    alive = any(
        holder not in instances or instances[holder].state not in ("terminated", "stopped") for holder in holders
    )
    mine = claim is None or claim.instance == ctx.desired.instance
    moving = not mine and source is not None and source.writer > 0 and not _is_here(ctx, source)
    if not alive and not moving:
        return None
    status = ctx.store.read_status()
    term = None if status is None else status.get("term")
    saved = (((status or {}).get("progress") or {}).get("saved") or {}).get("step")
    if isinstance(term, int) and isinstance(saved, int):
        ctx.memory.saved[term] = saved
    return status


def _saved_step(ctx: Context, source: Source | None, snapshots: tuple[Snapshot, ...]) -> int | None:
    """The last step that the source's writer is known to have saved: by its status, and by what is adopted."""
    if source is None:
        return None
    steps = [int(s.tags[TAG_SAVED_STEP]) for s in adoptable(source, snapshots)[:1] if _is_step(s)]
    steps += [ctx.memory.saved[source.writer]] if source.writer in ctx.memory.saved else []
    return max(steps, default=None)


def _is_step(snapshot: Snapshot) -> bool:
    return snapshot.tags.get(TAG_SAVED_STEP, "").isdigit()


# ------------------------------------------------------------------------------------------------------------------ EC2
def _volumes(ctx: Context) -> tuple[Volume, ...]:
    """The run's volumes, with the states that we have written ourselves and the describe may not show yet."""
    states = ctx.memory.states
    return tuple(
        replace(volume, tags={**volume.tags, TAG_STATE: states[volume.id]}) if volume.id in states else volume
        for volume in ctx.ec2.volumes_of_run(ctx.desired.run)
    )


def _others(ctx: Context, claim: Claim | None, volumes: tuple[Volume, ...]) -> frozenset[str]:
    """Instances that hold something we may want."""
    holders = {a.instance for volume in volumes for a in volume.attachments if a.state in HELD_STATES}
    return frozenset(holders | ({claim.instance} if claim is not None else set())) - {ctx.desired.instance}


def _is_here(ctx: Context, source: Source) -> bool:
    return source.volume is not None and source.volume.zone == ctx.desired.zone and source.volume.state != "error"


def _snapshots(ctx: Context, source: Source | None, released_by: str) -> tuple[Snapshot, ...]:
    """The run's snapshots, where the volume must move, or where one proves that a holder who lives has let go."""
    if source is None:
        return ()
    others_release = released_by not in ("", ctx.desired.instance)
    if _is_here(ctx, source) and not others_release:
        return ()
    rejected, completed = ctx.memory.rejected, ctx.memory.completed
    failed = ctx.memory.failed
    snapshots = [s for s in ctx.ec2.snapshots_of_run(ctx.desired.run) if s.id not in rejected]
    failed.update({s.id: s for s in snapshots if s.state == "error"})
    # A staler describe than the one that showed it as completed takes nothing back.
    current = (replace(s, state="completed") if s.id in completed and s.state == "pending" else s for s in snapshots)
    return (*(s for s in current if s.id not in failed), *failed.values())


def _asked_snapshot(ctx: Context, source: Source | None, snapshots: tuple[Snapshot, ...]) -> str | None:
    """The snapshot that we asked for, as long as it may be missing from the describes only because they are stale."""
    snapshot_id = ctx.memory.snapshot
    if snapshot_id is None or source is None or not ctx.recently("snapshot", source.id, 2 * DESCRIBE_LAG_SECONDS):
        return None
    return None if any(snapshot.id == snapshot_id for snapshot in snapshots) else snapshot_id


def _asked_copy(ctx: Context, volumes: tuple[Volume, ...]) -> str | None:
    copy_id = ctx.memory.copy
    if copy_id is None or not ctx.recently("copy", copy_id, 2 * DESCRIBE_LAG_SECONDS):
        return None
    return None if any(volume.id == copy_id for volume in volumes) else copy_id


def _dead_copies(volumes: tuple[Volume, ...], claim: Claim | None, zone: str) -> int:
    """Copies of this term that came to nothing: each makes the next attempt's token another."""
    dead = (*GONE_STATES, "error")
    return sum(1 for v in volumes if claim and term_of(v) == claim.number and v.zone == zone and v.state in dead)


def _silent(ctx: Context, holder: str, claim: Claim | None, status: dict[str, Any] | None) -> float | None:
    """Seconds for which we have watched `other` being silent, None where it is not.

    Silent: its last sign of life (heartbeat, or the last claim) is older than `SILENT_SECONDS`. The same sign has to be
    seen twice: that its age is told by two wall clocks would not do alone.
    """
    signs = [] if claim is None else [claim.time]
    if status is not None and status.get("instance") == holder:
        signs.append(str(status.get("heartbeat", "")))
    moments = [moment for sign in signs if (moment := _moment(sign)) is not None]
    if not moments:
        return None
    last = max(moments)
    if ctx.clock.now().timestamp() - last < SILENT_SECONDS:
        return None
    return ctx.memory.watch.seconds("silent", holder, str(last))


def _moment(text: str) -> float | None:
    try:
        return parse_rfc3339(text).timestamp()
    except ValueError:
        return None


# ----------------------------------------------------------------------------------------------------------------- host
def _with_host(ctx: Context, observed: Observed) -> Observed:
    mounted = ctx.host.mounted_at(ctx.desired.mountpoint)
    names = tuple(ctx.checkpoint_names(ctx.desired.mountpoint)) if mounted else ()
    return replace(
        observed,
        mounted=mounted,
        devices=_devices(ctx, observed.volumes, mounted),
        steps=steps_in(names) if mounted else None,
        checkpoints_present=bool(names),
    )


def _devices(ctx: Context, volumes: tuple[Volume, ...], mounted: str | None) -> dict[str, DeviceSeen]:
    """The run's volumes that this machine has as disks."""
    devices = {}
    for volume in volumes:
        attached_as = next((a.device for a in volume.attachments if a.instance == ctx.desired.instance), "")
        if volume.zone != ctx.desired.zone:
            continue
        path = ctx.host.find_device(volume.id, attached_as)
        if path is None:
            continue
        filesystem = "" if path == mounted else ctx.host.filesystem(path)
        blank = path != mounted and not filesystem and ctx.host.is_blank(path)
        devices[volume.id] = DeviceSeen(path, filesystem, blank)
    return devices
