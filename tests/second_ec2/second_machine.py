"""An instance of the second witness: its kernel's disks and mounts, its clock, and the agent's process on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from second_ec2 import Data
from second_time import Flag, MachineClock, Process

from spotheal.agent.interruption.watcher import Interruption
from spotheal.agent.protocol.errors import Conflict, MountRefused, Retryable

if TYPE_CHECKING:
    from second_world import World


@dataclass
class Machine:
    """What `host.Host` is to healing and handover, and what `Watcher` is to the handover."""

    world: World
    id: str
    zone: str
    clock: MachineClock
    process: Process
    nitro: bool = True
    mounted: str | None = None  # the volume
    frozen: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    seen_since: dict[str, float] = field(default_factory=dict)
    stop: Flag = field(default_factory=Flag)
    withdrawn: Flag = field(default_factory=Flag)
    shutting_down: Flag = field(default_factory=Flag)
    interruption: Interruption | None = None
    kill_at: int = -1  # the agent's process dies at this call
    calls: int = 0
    noticed: bool = False

    @property
    def alive(self) -> bool:
        return self.world.ec2.state(self.id) in ("running", "shutting-down", "stopping")

    # what `host.Host` does
    def find_device(self, volume: str, attached_as: str = "") -> str | None:
        thing = self.world.ec2.volumes.get(volume)
        held = thing.doc["Attachments"] if thing is not None and thing.gone is None else []
        if not held or held[0]["InstanceId"] != self.id or held[0]["State"] == "attaching":
            self.seen_since.pop(volume, None)
            return None
        since = self.seen_since.setdefault(volume, self.world.time.now + self.world.rng.uniform(0, 3))
        if self.world.time.now < since or not (self.nitro or attached_as):
            return None
        return self.paths.setdefault(volume, f"/dev/nvme{len(self.paths) + 2}n1")

    def _data(self, device: str) -> Data:
        volume = next((v for v, path in self.paths.items() if path == device and self.find_device(v, "/dev/sdf")), None)
        if volume is None:
            raise Retryable(f"{device} is gone")
        data: Data = self.world.ec2.volumes[volume].data
        return data

    def filesystem(self, device: str) -> str:
        return self._data(device).filesystem

    def is_blank(self, device: str) -> bool:
        return self._data(device) == Data()

    def make_filesystem(self, device: str, fstype: str, again: bool = False) -> None:
        data = self._data(device)
        half = data.filesystem.startswith("half")
        if replace(data, filesystem="") != Data() or (data.filesystem and not (again and half)):
            self.world.broken(f"{device} holds {data} and is formatted")
        data.filesystem = f"half an {fstype}"  # what is left where the process ends now
        self.world.time.sleep(1.0)
        data.filesystem = fstype

    def mount(self, device: str, mountpoint: str, fstype: str = "", volume: str = "", attached_as: str = "") -> None:
        self.world.time.sleep(0.5)
        if self.find_device(volume, attached_as or "/dev/sdf") != device:
            raise Retryable(f"{device} is not {volume}")
        if self._data(device).filesystem != "xfs":
            raise MountRefused("wrong fs type, bad option, bad superblock")
        if self.mounted not in (None, volume):
            raise Conflict(f"{self.mounted} is mounted")
        self.world.mounts(self, volume)
        self.mounted, self.frozen = volume, False

    def mounted_at(self, mountpoint: str) -> str | None:
        return self.paths[self.mounted] if self.mounted else None

    def unmount(self, mountpoint: str, seconds_max: float = 60.0) -> bool:
        self.world.time.sleep(0.3)
        if self.mounted is not None and self.world.busy_until.get(self.id, 0.0) > self.world.time.now:
            return False
        if self.mounted is not None:
            self.world.ec2.mounted.pop(self.mounted, None)
        self.mounted = None
        return True

    def holders(self, mountpoint: str) -> tuple[int, ...]:
        return (4711,)

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]:
        if self.world.rng.random() < 0.5:
            self.world.busy_until.pop(self.id, None)
        return tuple(pids)

    def sync(self, mountpoint: str, seconds_max: float = 60.0) -> None: ...

    def freeze(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        if self.world.rng.random() < 0.3:
            raise Retryable("fsfreeze hangs")
        self.frozen = True

    def thaw(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        self.frozen = False


class Log:
    def __init__(self, world: World, who: str) -> None:
        self._world, self._who = world, who

    def info(self, text: str, **more: Any) -> None:
        self._world.tell(f"{self._who} {text} {more or ''}")

    warning = error = info
