"""What healing looks at: the desired state, and one observation of cloud, store and host. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotheal.agent.aws.ec2 import Instance, Snapshot, Volume
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.names import TAG_PURPOSE, TAG_REASON, TAG_STATE, TAG_TERM, Purpose, VolumeState

REJECTED = "rejected: "  # begins spotheal:reason of a snapshot whose copy did not hold what it must
GONE_STATES = ("deleting", "deleted")
DEAD_STATES = ("terminated", "stopped")  # of an instance
HELD_STATES = ("attaching", "attached", "busy", "detaching")


@dataclass(frozen=True)
class Desired:
    """What the job wants: its volume mounted at `mountpoint` on `instance`, which is in `zone`."""

    run: str
    instance: str
    zone: str
    mountpoint: str
    filesystem: str
    size_gib: int
    type: str
    tags: Mapping[str, str]  # job, run, Name: on everything that is made
    initialization_rate: int = 0


@dataclass(frozen=True)
class DeviceSeen:
    path: str
    filesystem: str  # "" where there is none
    blank: bool  # no signature, no partition, first and last MiB zero; looked at where there is no filesystem


@dataclass(frozen=True)
class Observed:
    """One look at everything. Durations are seconds of our own watching, by the monotonic clock.

    `holds`: what each term wrote to, from the store. `formatting`: volumes whose first mkfs began and may not have
    ended, from the store. `unmountable`: volumes that we tried to mount in vain. `known`: instances by id, of those
    that hold something. `absent`: how long an instance named somewhere has been missing from the describes; `silent`:
    how long one has been seen without a sign of life (a key that is missing: not silent). `attached_for`: (volume,
    instance) -> how long the attachment has been in its state. `term_set`: volumes whose term tag we have just written.
    """

    claim: Claim | None = None
    holds: Mapping[int, str] = field(default_factory=dict)
    released: frozenset[int] = frozenset()
    formatting: frozenset[str] = frozenset()
    unmountable: frozenset[str] = frozenset()
    volumes: tuple[Volume, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    known: Mapping[str, Instance] = field(default_factory=dict)
    absent: Mapping[str, float] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    attached_for: Mapping[tuple[str, str], float] = field(default_factory=dict)
    volume_gone_for: float = 0.0
    devices: Mapping[str, DeviceSeen] = field(default_factory=dict)
    mounted: str | None = None
    steps: tuple[int, ...] | None = None  # of the checkpoints on what is mounted; None: not looked at
    checkpoints_present: bool = False  # anything at all in the checkpoint folder
    saved_step: int | None = None  # the last acknowledged one that the store knows of
    term_set: frozenset[str] = frozenset()
    attach_asked: frozenset[str] = frozenset()  # volumes we have just asked EC2 to attach here
    asked_snapshot: str | None = None  # a snapshot we have asked for that the describes do not show yet
    asked_copy: str | None = None  # likewise, a volume
    attempt: int = 0  # of CreateVolume in this term

    def instance_state(self, instance: str) -> str:
        """Its state, or "absent" where the describe does not show it."""
        return self.known[instance].state if instance in self.known else "absent"


@dataclass(frozen=True)
class Source:
    """The job's volume: the copy that holds the newest acknowledged checkpoint."""

    id: str
    volume: Volume | None  # None: the describes do not show it
    writer: int  # the last term that may have written to it; 0: none


def term_of(item: Volume | Snapshot) -> int:
    """`spotheal:term`; 0 where there is none."""
    text = item.tags.get(TAG_TERM, "")
    return int(text) if text.isdigit() else 0


def state_of(volume: Volume) -> str:
    return volume.tags.get(TAG_STATE, "")


def source_of(holds: Mapping[int, str], volumes: tuple[Volume, ...]) -> Source | None:
    """Which copy counts: the one the highest term took over, by the store; before that, the highest `current` by tags.

    Tags alone would do if describes were never stale: a promoted volume can be shown as `moving` for a while, and
    taken for half-made it would be superseded with all that was saved on it.
    """
    alive = [volume for volume in volumes if volume.state not in GONE_STATES]
    current = [v for v in alive if state_of(v) in (VolumeState.CURRENT.value, VolumeState.DONE.value)]
    best = min(current, key=lambda volume: (-term_of(volume), volume.id), default=None)
    writer = max(holds, default=0)
    if writer and (best is None or term_of(best) <= writer):
        volume_of_writer = next((volume for volume in alive if volume.id == holds[writer]), None)
        return Source(holds[writer], volume_of_writer, writer)
    if best is not None:
        return Source(best.id, best, term_of(best))
    fresh = min((v for v in alive if state_of(v) == VolumeState.NEW.value), key=lambda v: v.id, default=None)
    return None if fresh is None else Source(fresh.id, fresh, 0)


def is_unwritten(source: Source) -> bool:
    """A volume that `request` made and no term ever took over: there is nothing on it that must be kept."""
    return source.writer == 0 and source.volume is not None and state_of(source.volume) == VolumeState.NEW.value


def adoptable(source: Source, snapshots: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
    """Snapshots that hold all that was ever written to `source`, the best first. Equal in content, all of them.

    Handovers only: a `base` snapshot is taken beside a running trainer. Not older than the last term that wrote, and
    not older than the last that prepared to mount (its tag on the volume).
    """
    oldest = max(source.writer, 0 if source.volume is None else term_of(source.volume))
    good = [
        snapshot
        for snapshot in snapshots
        if snapshot.volume == source.id
        and snapshot.tags.get(TAG_PURPOSE) == Purpose.HANDOVER.value
        and term_of(snapshot) >= max(oldest, 1)
        and snapshot.state in ("pending", "completed")
        and not snapshot.tags.get(TAG_REASON, "").startswith(REJECTED)
    ]
    return tuple(sorted(good, key=lambda s: (s.state != "completed", -term_of(s), s.id)))
