"""The state of the rehearsal's EC2: immutable things in tables that remember their past, and a queue of what is due.

Every change of a thing is a new version, so that a describe can be served from any moment of the last minutes
(`Table.at`), as EC2's eventually consistent describes are. No thread and no HTTP in here.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar

from spotheal.agent.protocol.clock import Clock
from spotheal.fleet.rehearsal.ec2.access_keys import AccessKeys
from spotheal.fleet.rehearsal.ec2.faults import Faults

_REMEMBERED_SECONDS = 120.0
EXAMPLE_IMAGE = "ami-0027dfad6168539c7"  # what rehearsals launch


class ApiError(Exception):
    """What AWS answers instead of a result: its error code, message and HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


def not_here(call: str) -> ApiError:
    """What AWS does and this cloud does not, said by name: a wrong answer would be taken for AWS's."""
    message = f"This local cloud does not do {call}: it is for fleetctl and the agent (docs/rehearsal.md)."
    return ApiError("UnsupportedOperation", message)


class Thing(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tags(self) -> Mapping[str, str]: ...


T = TypeVar("T", bound=Thing)


class Table(Generic[T]):
    """Things by id, in the order of their making, with their versions of the last two minutes."""

    def __init__(self, moment: Callable[[], float]) -> None:
        self._moment = moment
        self._now: dict[str, T] = {}
        self._past: dict[str, list[tuple[float, T | None]]] = {}
        self.changes = 0

    def put(self, thing: T) -> T:
        self._remember(thing.id, thing)
        self._now[thing.id] = thing
        return thing

    def remove(self, thing_id: str) -> None:
        self._remember(thing_id, None)
        self._now.pop(thing_id, None)

    def get(self, thing_id: str) -> T | None:
        return self._now.get(thing_id)

    def __getitem__(self, thing_id: str) -> T:
        return self._now[thing_id]

    def all(self) -> list[T]:
        return list(self._now.values())

    def age(self, thing_id: str) -> float:
        """Seconds since the first version that is remembered."""
        versions = self._past.get(thing_id)
        return self._moment() - versions[0][0] if versions else 0.0

    def at(self, moment: float) -> list[T]:
        """The things as they were then (not before the oldest version that is remembered)."""
        if moment >= self._moment():
            return self.all()
        things = []
        for versions in self._past.values():
            version = next((thing for time, thing in reversed(versions) if time <= moment), None)
            if version is not None:
                things.append(version)
        return things

    def _remember(self, thing_id: str, thing: T | None) -> None:
        self.changes += 1
        moment = self._moment()
        versions = self._past.setdefault(thing_id, [])
        versions.append((moment, thing))
        while len(versions) > 1 and versions[1][0] < moment - _REMEMBERED_SECONDS:
            versions.pop(0)


@dataclass(frozen=True)
class Latencies:
    """Seconds that AWS takes; the defaults are those of a real region. A rehearsal in real time passes shorter ones."""

    create_volume: float = 5.0
    attach: float = 3.0
    device_node: float = 1.0  # from `attached` until the instance sees the device
    detach: float = 3.0
    delete_volume: float = 2.0
    snapshot: tuple[float, ...] = (0.0, 90.0, 600.0)  # one is drawn for each snapshot
    snapshot_interval: float = 15.0  # between two snapshots of one volume while the first is pending
    running: float = 10.0  # from launch to `running`
    shutdown: float = 20.0  # from `shutting-down` to `terminated`: what the operating system gets
    launch: float = 10.0  # of a fleet's first instances
    replacement: float = 60.0
    set_aside: float = 13 * 60.0  # at least, in the words of a fleet's history, from a refused launch to the next try
    fleet_terminate: float = 2.0  # from cancelling a fleet to the end of its instances
    notice: float = 120.0
    cancelled_visible: float = 48 * 3600.0


@dataclass
class Hooks:
    """What the machines module, or a simulated host, wants to be told. Called outside the rule book's lock, in order.

    Arguments are the ids of things; `is_mounted` is asked under the lock and must answer at once.
    """

    on_launch: Callable[[str], None] | None = None  # instance; it is `pending` still
    on_shutdown: Callable[[str, float], None] | None = None  # instance, seconds until the power is cut
    on_terminate: Callable[[str], None] | None = None  # instance: the power is cut
    on_stop: Callable[[str], None] | None = None  # instance: the power is cut, it may be started again
    on_attach: Callable[[str, str, str], None] | None = None  # volume, instance, device: the device appears
    on_detach: Callable[[str, str, str], None] | None = None  # the device goes
    on_volume_created: Callable[[str, str | None], None] | None = None  # volume, the snapshot it is made from
    on_volume_deleted: Callable[[str], None] | None = None
    on_snapshot_taken: Callable[[str, str], None] | None = None  # snapshot, volume: copy it now
    on_snapshot_deleted: Callable[[str], None] | None = None
    is_mounted: Callable[[str, str], bool] | None = None  # volume, instance: EC2 waits for the unmount


@dataclass(frozen=True)
class Attachment:
    instance: str
    device: str
    state: str  # attaching, attached, detaching, busy
    time: datetime
    number: int = 0  # tells two attachments of one moment apart


@dataclass(frozen=True)
class Volume:
    id: str
    zone: str
    size: int
    type: str
    iops: int | None
    throughput: int | None
    encrypted: bool
    kms_key: str | None
    snapshot: str
    created: datetime
    initialization_rate: int | None = None
    state: str = "creating"
    tags: Mapping[str, str] = field(default_factory=dict)
    attachment: Attachment | None = None


@dataclass(frozen=True)
class Snapshot:
    id: str
    volume: str
    size: int
    encrypted: bool
    kms_key: str | None
    description: str
    started: datetime
    began: float  # moment
    due: float
    state: str = "pending"
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Notice:
    """What `spot/instance-action` shows."""

    action: str
    time: datetime


@dataclass(frozen=True)
class Instance:
    id: str
    reservation: str
    zone: str
    type: str
    image: str
    launched: datetime
    spec: Mapping[str, Any]  # shaped as RunInstances takes it, UserData in base64
    user_data: bytes
    spot_request: str = ""
    fleet: str = ""
    weight: int = 1
    state: str = "pending"
    reason: tuple[str, str] = ("", "")  # code and message of StateReason
    reason_at: datetime | None = None
    leaving: bool = False  # marked for interruption: the fleet counts it no longer
    notice: Notice | None = None
    rebalance: datetime | None = None
    ended: datetime | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_spot(self) -> bool:
        return bool(self.spot_request)

    @property
    def role(self) -> str:
        """Name of the instance profile, which the rehearsal takes for the role's."""
        profile = self.spec.get("IamInstanceProfile") or {}
        return str(profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2])


@dataclass(frozen=True)
class SpotRequest:
    id: str
    instance: str
    fleet: str
    created: datetime
    price: str
    spec: Mapping[str, Any]
    zone: str
    state: str = "active"
    status: str = "fulfilled"
    updated: datetime | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fleet:
    """A spot fleet (`sfr-…`) or an EC2 fleet (`fleet-…`); states are named as for a spot fleet."""

    id: str
    config: Mapping[str, Any]
    specs: tuple[Mapping[str, Any], ...]  # each: {"spec": RunInstances-like, "zones": […], "weight": n, "price": …}
    created: datetime
    target: int
    on_demand: int = 0
    kind: str = "maintain"
    valid_until: datetime | None = None
    terminate_at_expiry: bool = False
    state: str = "submitted"
    activity: str = "pending_fulfillment"
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    id: str
    name: str
    created: datetime
    versions: tuple[tuple[Mapping[str, Any], str, datetime], ...]  # data, description, time
    default: int = 1
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetEvent:
    time: datetime
    type: str  # instanceChange, fleetRequestChange, error, information
    sub_type: str
    description: str
    instance: str = ""


class World:
    """All things of one account in one region, and what is due to happen to them."""

    def __init__(
        self, clock: Clock, region: str, zones: tuple[str, ...], account: str, latencies: Latencies, seed: int
    ) -> None:
        self.clock = clock
        self.region = region
        self.zones = zones
        self.account = account
        self.latencies = latencies
        self.random = random.Random(seed)
        self.faults = Faults(seed)
        self.hooks = Hooks()
        self.page_size = 1000
        self.zone_of_subnet: Callable[[str], str | None] = lambda subnet: None
        self.tags_of_file_system: Callable[[str], Mapping[str, str]] = lambda name: {}  # or of its mount target
        # Why a launch with this specification, or a fleet with this role, cannot be yet; None where it can.
        self.launch_fault: Callable[[Mapping[str, Any]], str | None] = lambda spec: None
        # Whether the caller may do all of these with the key, each an action of KMS, in the name of EC2.
        self.may_use_key: Callable[[str | None, str, tuple[str, ...]], bool] = lambda caller, key, actions: True
        self.image_fault: Callable[[str], str] = lambda image: ""
        self.images = {EXAMPLE_IMAGE: "example"}  # names by id
        self.role_fault: Callable[[str], str | None] = lambda arn: None
        self._inside: float | None = None
        self.lag = 0.0  # of the call that is being answered
        self.volumes: Table[Volume] = Table(self.moment)
        self.snapshots: Table[Snapshot] = Table(self.moment)
        self.instances: Table[Instance] = Table(self.moment)
        self.requests: Table[SpotRequest] = Table(self.moment)
        self.fleets: Table[Fleet] = Table(self.moment)
        self.templates: Table[Template] = Table(self.moment)
        self.history: dict[str, list[FleetEvent]] = {}
        self.tokens: dict[tuple[str, ...], tuple[Any, str, float]] = {}  # key -> parameters, id, moment
        self.deleted_volumes: dict[str, tuple[Volume, float]] = {}  # with the moment of their end
        self.no_capacity_until: dict[str, float] = {}
        self.next_zones: list[str] = []
        self.instances_max: int | None = None  # the account's quota
        self.keys = AccessKeys()
        self.unusable: dict[str, str] = {}  # image or instance profile -> what AWS says of it
        self.settled = (-1, -1)
        self.ending: set[str] = set()  # fleets that were cancelled a moment ago
        self.launching: dict[str, int] = {}  # fleet -> launches on their way
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.after_each: Callable[[], None] = lambda: None  # after everything that happened, at its time
        self.told: deque[Callable[[], None]] = deque()  # hooks to be called when the lock is free

    # ----------------------------------------------------------------------------------------------------------- time
    def moment(self) -> float:
        """Monotonic seconds; while something due happens, the time it was due."""
        return self.clock.monotonic() if self._inside is None else self._inside

    def now(self) -> datetime:
        """The wall clock at `moment()`, in whole milliseconds."""
        time = self.clock.now()
        if self._inside is not None:
            time -= timedelta(seconds=self.clock.monotonic() - self._inside)
        return time.replace(microsecond=time.microsecond // 1000 * 1000)

    def viewed(self) -> float:
        """The moment that the describe in hand shows."""
        return self.moment() - self.lag

    def later(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.moment() + seconds, self.number(), happen))

    def tick(self) -> None:
        """Let everything happen that is due by now, each at its own time."""
        present = self.clock.monotonic()
        while self._due and self._due[0][0] <= present:
            time, _, happen = heapq.heappop(self._due)
            self._inside = time
            try:
                happen()
                self.after_each()
            finally:
                self._inside = None

    def next_event_time(self) -> float | None:
        """Monotonic time of the next thing that is due, or None."""
        return self._due[0][0] if self._due else None

    # ---------------------------------------------------------------------------------------------------------- things
    def number(self) -> int:
        self._count += 1
        return self._count

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-0{self.random.getrandbits(64):016x}"

    def tell(self, hook: Callable[..., None] | None, *arguments: Any) -> None:
        if hook is not None:
            self.told.append(lambda: hook(*arguments))

    def volume(self, volume_id: str) -> Volume:
        return self._find(self.volumes, volume_id, "vol-", "InvalidVolume.NotFound", "volume")

    def snapshot(self, snapshot_id: str) -> Snapshot:
        return self._find(self.snapshots, snapshot_id, "snap-", "InvalidSnapshot.NotFound", "snapshot")

    def instance(self, instance_id: str) -> Instance:
        return self._find(self.instances, instance_id, "i-", "InvalidInstanceID.NotFound", "instance ID")

    def _find(self, table: Table[T], thing_id: str, prefix: str, code: str, kind: str) -> T:
        if not thing_id.startswith(prefix):
            raise ApiError(code.replace(".NotFound", ".Malformed"), f'Invalid id: "{thing_id}"')
        thing = table.get(thing_id)
        # Other calls than describes find a young thing late too, though sooner than describes show it.
        if thing is None or table.age(thing_id) < self.lag / 4:
            raise ApiError(code, f"The {kind} '{thing_id}' does not exist.")
        return thing
