"""The actions that healing consists of: frozen, imperative, each with all it needs, each safe to do again."""

from __future__ import annotations

from dataclasses import dataclass

from spotheal.agent.aws.ec2 import VolumeSpec
from spotheal.agent.protocol.names import Phase

POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Wait:
    """Look again after `seconds`, or as soon as the device of `device_of` appears, or `snapshot` is pending no more.

    `kind` names what is waited for and stays the same while `why` tells of progress; after `seconds_max` of the same
    kind healing is given up as timed out. None: as long as another instance holds the run and shows that it lives.
    """

    why: str
    kind: str
    seconds_max: float | None
    seconds: float = POLL_SECONDS
    device_of: str | None = None
    snapshot: str | None = None  # polled by itself every `POLL_SECONDS`: one call, where a whole look takes four


@dataclass(frozen=True)
class ClaimTerm:
    number: int
    why: str


@dataclass(frozen=True)
class StepAside:
    """Let go of everything: another instance holds a later term."""

    number: int
    holder: str
    volumes: tuple[str, ...]


@dataclass(frozen=True)
class FenceHolder:
    """Terminate an instance that is silent; never one that shows a sign of life."""

    instance: str
    why: str


@dataclass(frozen=True)
class DetachFrom:
    """Detach from ourselves, or from an instance that does not run; by force only an unmounted one from ourselves."""

    volume: str
    instance: str
    why: str
    force: bool = False


@dataclass(frozen=True)
class TakeSnapshot:
    """Of a volume that nobody writes to."""

    volume: str
    term: int
    saved_step: int | None


@dataclass(frozen=True)
class CreateVolume:
    spec: VolumeSpec


@dataclass(frozen=True)
class Attach:
    volume: str


@dataclass(frozen=True)
class SetTerm:
    """Write `spotheal:term` on the volume; it is read back before the volume is mounted."""

    volume: str
    term: int


@dataclass(frozen=True)
class MakeFilesystem:
    """Of a blank device; with `again` of one that a mkfs left unfinished, and that nothing was ever mounted from."""

    volume: str
    device: str
    filesystem: str
    term: int
    again: bool = False


@dataclass(frozen=True)
class Mount:
    """The filesystem that is there is mounted, whatever the configuration says of new ones."""

    volume: str
    device: str


@dataclass(frozen=True)
class Reject:
    """A copy that does not hold what it must: supersede it, and never adopt its snapshot again."""

    volume: str
    snapshot: str
    why: str


@dataclass(frozen=True)
class TakeOver:
    """Tell the store that this term writes to the volume from now on."""

    volume: str
    term: int


@dataclass(frozen=True)
class Promote:
    volume: str
    term: int


@dataclass(frozen=True)
class Supersede:
    volumes: tuple[str, ...]
    by: str


@dataclass(frozen=True)
class Ready:
    volume: str
    term: int
    device: str
    moved_from: str | None


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on: an end of `phase`."""

    phase: Phase
    reason: str


Action = (
    Wait
    | ClaimTerm
    | StepAside
    | FenceHolder
    | DetachFrom
    | TakeSnapshot
    | CreateVolume
    | Attach
    | SetTerm
    | MakeFilesystem
    | Mount
    | Reject
    | TakeOver
    | Promote
    | Supersede
    | Ready
    | GiveUp
)
