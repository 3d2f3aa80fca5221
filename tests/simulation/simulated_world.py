"""A simulated region in which the real healing runs: the rule book as EC2, disks with steps on them, and instances that
heal, train, hand over and die. The invariants of the run are checked after each step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from simulated_time import Actor, Ended, SimulatedLock, SimulatedStop, Time

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.contract import Progress, Saved
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Conflict, Fatal, Interrupted, MountRefused, SpothealError
from spotheal.agent.protocol.names import LAYOUT, TAG_RUN, TAG_STATE, StoreUrl
from spotheal.agent.record.status import Status
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.heal import Held, heal
from spotheal.agent.volume.release import create_handover, detach
from spotheal.agent.volume.retention import clean_up
from spotheal.agent.volume.seen import Desired
from spotheal.fleet.rehearsal.ec2.rulebook import Faults, Latencies, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2, InMemoryS3

RUN, MOUNT = "01RUN", "/dltraining"
TAGS = {"spotheal:job": "digits", TAG_RUN: RUN, "Name": "data"}
STEP_SECONDS = 10.0
CALL_SECONDS = 0.1
BOOT_SECONDS = 90.0
AGENT_RESTART_SECONDS = 5.0


class Broken(AssertionError):
    """An invariant does not hold."""


class Quiet:
    """A log that keeps what was said, for the story of a failure."""

    def __init__(self, time: Time, name: str, story: list[str]) -> None:
        self._time, self._name, self._story = time, name, story

    def _say(self, text: str, **fields: object) -> None:
        self._story.append(f"{self._time.seconds:9.1f} {self._name} {text} {fields or ''}")

    debug = info = warning = error = _say


@dataclass
class Disk:
    """What is on a volume: `steps` are acknowledged checkpoints."""

    filesystem: str = ""
    unfinished: bool = False  # a mkfs was cut short: it has a signature, and no mount accepts it
    used: bool = False  # a trainer was started on it
    steps: tuple[int, ...] = ()
    garbage: bool = False
    memory: Any = None


@dataclass
class Machine:
    """One instance: `agent` is the process, started again where it dies; `disks` the devices it sees."""

    id: str
    zone: str
    disks: dict[str, str] = field(default_factory=dict)  # volume -> path
    mounted: str | None = None
    agents: list[Actor] = field(default_factory=list)
    notice: SimulatedStop | None = None
    alive: bool = True
    hung: bool = False
    calls: int = 0
    trained_from: list[int] = field(default_factory=list)
    shell: str = ""  # who keeps the mount busy
    going_down: bool = False
    noticed: bool = False
    ended_by: str = ""  # code of StateReason
    launched_at: float = 0.0
    imds: Any = None  # set where the metadata service has something new
    asked_to_stop: Any = None  # SIGTERM


class Region:
    """The world. `crash` maps the number of a call (counted over all machines) to "before" or "after"."""

    def __init__(
        self,
        seed: int = 0,
        zones: tuple[str, ...] = ("us-west-2a", "us-west-2b"),
        snapshot_seconds: float | None = 90.0,
        crash: dict[int, str] | None = None,
        crash_kind: str = "agent",
        latencies: Latencies | None = None,
    ) -> None:
        self.time, self.random = Time(), random.Random(seed)
        self.story: list[str] = []
        self.faults = Faults(seed, snapshot_seconds=snapshot_seconds)
        self.rules = Rulebook(self.time, zones=zones, latencies=latencies, seed=seed, faults=self.faults)
        self.s3 = InMemoryS3("bucket", clock=self.time)
        self.disks: dict[str, Disk] = {}
        self.copies: dict[str, Disk] = {}
        self.machines: dict[str, Machine] = {}
        self.acknowledged = 0
        self.calls: list[tuple[str, str]] = []
        self.ends: list[End] = []
        self.crash, self.crash_kind = crash or {}, crash_kind
        self.replacement_zones: list[str] = []
        self.goal = 3  # steps on the disk after which a machine has trained enough to be left alone
        self.mounts = 0  # made so far
        self._checked: tuple[int, ...] = ()
        self._names = itertools.count()
        hooks = self.rules.hooks
        hooks.on_attach, hooks.on_detach = self._on_attach, self._on_detach
        hooks.on_volume_created, hooks.on_snapshot_taken = self._on_volume, self._on_snapshot
        hooks.on_terminate = hooks.on_stop = self._on_end
        hooks.is_mounted = lambda volume, instance: self.machines[instance].mounted == volume
        self.time.next_of_world = self.rules.world.next_event_time
        self.time.world_tick = self.rules.tick
        self.time.after_each = self.check

    def __enter__(self) -> Region:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.time.close()
        if kind is not None:
            print("\n".join(self.story[-120:]))

    # -------------------------------------------------------------------------------------------------- what EC2 does
    def _on_attach(self, volume: str, instance: str, device: str) -> None:
        self.machines[instance].disks[volume] = f"/dev/nvme-{volume}"

    def _on_detach(self, volume: str, instance: str, device: str) -> None:
        machine = self.machines[instance]
        machine.disks.pop(volume, None)
        if machine.mounted == volume and machine.alive:
            raise Broken(f"{volume} was pulled from under {instance}, which has it mounted")

    def _on_volume(self, volume: str, snapshot: str | None) -> None:
        self.disks[volume] = replace(self.copies[snapshot]) if snapshot else Disk()

    def _on_snapshot(self, snapshot: str, volume: str) -> None:
        self.copies[snapshot] = replace(self.disks[volume])

    def _on_end(self, instance: str) -> None:
        machine = self.machines[instance]
        machine.alive, machine.mounted = False, None
        machine.ended_by = self.rules.world.instances[instance].reason[0]
        machine.disks.clear()
        for agent in machine.agents:
            agent.end()
        self.story.append(f"{self.time.seconds:9.1f} {instance} is gone")
        if self.replacement_zones:
            zone = self.replacement_zones.pop(0)
            self.time.at(self.rules.world.latencies.replacement, lambda: self.launch(zone))

    # ------------------------------------------------------------------------------------------------------ the story
    @contextmanager
    def _faultless(self) -> Iterator[None]:
        """The operator's own calls are not what is tried."""
        self.rules.world.faults = Faults()
        try:
            yield
        finally:
            self.rules.world.faults = self.faults

    def make_volume(self, zone: str, **disk: object) -> str:
        """What `request` makes; with `disk` an adopted volume that has a life behind it."""
        state = "current" if disk else "new"
        tags = [{"Key": k, "Value": v} for k, v in {**TAGS, TAG_STATE: state, "spotheal:term": "0"}.items()]
        specification = [{"ResourceType": "volume", "Tags": tags}]
        request = {"AvailabilityZone": zone, "Size": 100, "VolumeType": "gp3", "TagSpecifications": specification}
        with self._faultless():
            answer = self.rules.call("CreateVolume", request)
        if disk:
            self.disks[answer["VolumeId"]] = Disk(**disk)  # type: ignore[arg-type]
            self.acknowledged = max(self.disks[answer["VolumeId"]].steps, default=0)
        return str(answer["VolumeId"])

    def launch(self, zone: str) -> Machine:
        tags = [{"Key": k, "Value": v} for k, v in TAGS.items()]
        request = {
            "ImageId": "ami-1",
            "InstanceType": "g5.xlarge",
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceInitiatedShutdownBehavior": "terminate",  # as our templates say
            "Placement": {"AvailabilityZone": zone},
            "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
        }
        with self._faultless():
            answer = self.rules.call("RunInstances", request)
        machine = Machine(answer["Instances"][0]["InstanceId"], zone)
        self.machines[machine.id] = machine
        self.story.append(f"{self.time.seconds:9.1f} {machine.id} is launched in {zone}")
        self._start_agent(machine, BOOT_SECONDS)
        return machine

    def kill(self, machine: Machine) -> None:
        """Taken by spot without a notice."""
        self.rules.kill(machine.id)

    def break_down(self, machine: Machine) -> None:
        """Its operating system goes down by itself, without a word to the agent."""
        self.story.append(f"{self.time.seconds:9.1f} {machine.id} breaks down")
        self.rules.powered_off(machine.id)

    def interrupt(self, machine: Machine, lead: float = 120.0) -> None:
        self.story.append(f"{self.time.seconds:9.1f} {machine.id} gets a notice")
        self.rules.interrupt(machine.id, "terminate", lead)
        if machine.notice is not None:
            machine.notice.set()

    def hang(self, machine: Machine) -> None:
        """It stays alive, with all it has attached and mounted, and does not do another thing."""
        self.story.append(f"{self.time.seconds:9.1f} {machine.id} hangs")
        machine.hung = True
        for agent in machine.agents:
            agent.freeze()

    def _start_agent(self, machine: Machine, after: float) -> None:
        machine.notice = SimulatedStop(self.time)
        found = self.rules.instance(machine.id)
        if found is not None and found.notice is not None:
            machine.notice.set()
        agent = Agent(self, machine, machine.notice)
        machine.agents.append(self.time.spawn(f"{machine.id}-{next(self._names)}", agent.run, after))

    def agent_died(self, machine: Machine) -> None:
        """The agent's process is gone; systemd starts it again, and the mount stays."""
        for other in machine.agents:
            if other is not self.time.current:
                other.end()
        if machine.alive:
            self._start_agent(machine, AGENT_RESTART_SECONDS)

    # ------------------------------------------------------------------------------------------------------- the gate
    def gate(self, machine: Machine, name: str, call: Callable[[], object]) -> object:
        """Every call and host action passes here: it takes time, and may be the last thing its process does."""
        self.time.sleep(CALL_SECONDS)
        number = len(self.calls)
        self.calls.append((machine.id, name))
        machine.calls += 1
        fate = self.crash.get(number)
        if fate == "before":
            self._crash(machine, name)
        answer = call()
        if fate == "after":
            self._crash(machine, name)
        return answer

    def _crash(self, machine: Machine, name: str) -> None:
        self.story.append(f"{self.time.seconds:9.1f} {machine.id} crashes at {name}")
        if self.crash_kind == "agent":
            self.agent_died(machine)
        else:
            self.rules.powered_off(machine.id)
        assert self.time.current is not None
        self.time.current.killed = True  # also what stands in a `finally` is not done any more
        raise Ended

    # ----------------------------------------------------------------------------------------------------- invariants
    def writers(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.alive and machine.mounted is not None]

    def check(self) -> None:
        """I2 and I3, after each step that could have changed what they are about."""
        world = self.rules.world
        state = (world.volumes.changes, world.snapshots.changes, self.acknowledged, self.mounts)
        if state == self._checked:
            return
        self._checked = state
        writers = self.writers()
        if len(writers) > 1:
            raise Broken(f"mounted at {[(m.id, m.mounted) for m in writers]} at once")
        if self.acknowledged:
            volumes = [v for v in world.volumes.all() if v.state != "error" and v.tags.get(TAG_STATE) != "superseded"]
            copies = [self.disks[v.id] for v in volumes] + [
                self.copies[s.id] for s in world.snapshots.all() if s.state == "completed"
            ]
            if not any(max(disk.steps, default=0) >= self.acknowledged for disk in copies):
                raise Broken(f"no intact copy holds step {self.acknowledged}")

    def converged(self) -> bool:
        """Somebody trains, and has acknowledged `goal` steps on this machine and cleaned up."""
        return any(m.alive and m.mounted and len(self.disks[m.mounted].steps) >= self.goal for m in self.writers())


class Gated:
    """A client whose calls pass the gate; a paginated describe counts as one call."""

    def __init__(self, region: Region, machine: Machine, client: object) -> None:
        self._region, self._machine, self._client = region, machine, client

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._region.gate(self._machine, name, lambda: method(*args, **kwargs))

    def get_paginator(self, name: str) -> GatedPages:
        return GatedPages(self._region, self._machine, name, self._client.get_paginator(name))  # type: ignore[attr-defined]


class GatedPages:
    def __init__(self, region: Region, machine: Machine, name: str, pages: object) -> None:
        self._region, self._machine, self._name, self._pages = region, machine, name, pages

    def paginate(self, **params: object) -> object:
        pages = self._pages
        return self._region.gate(self._machine, self._name, lambda: list(pages.paginate(**params)))  # type: ignore[attr-defined]


class SimulatedHost:
    """The machine's disks. Mounting the wrong thing, or formatting what is not blank, breaks the test."""

    def __init__(self, region: Region, machine: Machine) -> None:
        self._region, self._machine = region, machine

    def _disk(self, device: str) -> Disk:
        volume = device.removeprefix("/dev/nvme-")
        if volume not in self._machine.disks:
            raise Fatal(f"{device} is not there")
        return self._region.disks[volume]

    def find_device(self, volume: str, attached_as: str = "") -> str | None:
        return self._machine.disks.get(volume)

    def filesystem(self, device: str) -> str:
        return self._disk(device).filesystem

    def is_blank(self, device: str) -> bool:
        disk = self._disk(device)
        return not disk.filesystem and not disk.garbage

    def make_filesystem(self, device: str, fstype: str, again: bool = False) -> None:
        """In two parts, so that a crash between them leaves what a mkfs leaves that is cut short."""

        def begin() -> None:
            disk = self._disk(device)
            if disk.used or disk.steps or disk.garbage:
                raise Broken(f"{device} is formatted and held data")
            if disk.filesystem and not disk.unfinished:
                raise Broken(f"{device} is formatted and held a whole filesystem")
            if not self.is_blank(device) and not again:
                raise Fatal(f"{device} is not blank and is not formatted")
            disk.filesystem, disk.unfinished = fstype, True

        def end() -> None:
            self._disk(device).unfinished = False

        self._region.gate(self._machine, "mkfs", begin)
        self._region.gate(self._machine, "mkfs ends", end)

    def mount(self, device: str, mountpoint: str, fstype: str = "", volume: str = "", attached_as: str = "") -> None:
        def mount() -> None:
            if not self._disk(device).filesystem:
                raise Fatal(f"{device} has no filesystem")
            if self._disk(device).unfinished:
                raise MountRefused(f"mounting {device} at {mountpoint} failed: wrong fs type, bad superblock")
            if self._machine.mounted not in (None, volume):
                raise Conflict(f"{self._machine.mounted} is mounted at {mountpoint}")
            self._machine.mounted = volume
            self._region.mounts += 1
            self._region.check()

        self._region.gate(self._machine, "mount", mount)

    def mounted_at(self, mountpoint: str) -> str | None:
        return None if self._machine.mounted is None else f"/dev/nvme-{self._machine.mounted}"

    def unmount(self, mountpoint: str, seconds_max: float = 0.0) -> bool:
        def unmount() -> bool:
            self._machine.mounted = None
            return True

        return bool(self._region.gate(self._machine, "umount", unmount))

    def checkpoint_names(self, mountpoint: str) -> Iterable[str]:
        return [f"step-{step:09d}.safetensors" for step in self._region.disks[self._machine.mounted or ""].steps]


class Agent:
    """The life of one agent process: heal, train, and at a notice hand over in the order of the design."""

    def __init__(self, region: Region, machine: Machine, notice: SimulatedStop) -> None:
        self.region, self.machine, self.notice = region, machine, notice
        time = region.time
        self.log = Quiet(time, machine.id, region.story)
        client = Gated(region, machine, InMemoryEc2(region.rules, machine.id))
        self.store = Store(Gated(region, machine, region.s3), StoreUrl("bucket", f"digits/{RUN}"))
        self.host = SimulatedHost(region, machine)
        self.ec2 = Ec2(client)
        self.status = Status(self.store, time, self.log, instance=machine.id)
        # It speaks to the store while it holds its lock; a real lock would stop virtual time.
        self.status._lock = SimulatedLock(time)  # type: ignore[assignment]

    def context(self) -> Context:
        region, machine = self.region, self.machine
        return Context(
            desired=Desired(RUN, machine.id, machine.zone, MOUNT, "xfs", 100, "gp3", TAGS),
            ec2=self.ec2,
            store=self.store,
            host=self.host,
            clock=region.time,
            stop=self.notice,
            log=self.log,
            checkpoint_names=self.host.checkpoint_names,
            on_term=lambda term: self.status.update(term=term),
            beside=self._beside,
            random=random.Random(region.random.random()),
        )

    def run(self) -> None:
        heart = self.region.time.spawn(f"{self.machine.id}-heart", self._beat)
        self.machine.agents.append(heart)
        try:
            while True:
                ctx = self.context()
                try:
                    found = heal(ctx)
                except Interrupted:
                    self._wait_for_the_end()
                    return
                except SpothealError as error:
                    self.log.error("the agent ends", why=str(error))
                    self.region.agent_died(self.machine)
                    return
                if isinstance(found, End):
                    self.region.ends.append(found)
                    return
                if not self._train(ctx, found):
                    self._hand_over(ctx, found)
                    self._wait_for_the_end()
                    return
        finally:
            heart.end()

    def _beside(self, work: Callable[[], None]) -> None:
        self.machine.agents.append(self.region.time.spawn(f"{self.machine.id}-beside", work))

    def _beat(self) -> None:
        self.status.beat(SimulatedStop(self.region.time), lambda: None)

    def _train(self, ctx: Context, held: Held) -> bool:
        """One checkpoint after the other; False at a notice, True where a later term has fenced us."""
        region = self.region
        disk = region.disks[held.volume]
        disk.used = True
        begin = max(disk.steps, default=0)
        self.machine.trained_from.append(begin)
        if self.machine.mounted != held.volume:
            raise Broken(f"{self.machine.id} trains on {held.volume} and has {self.machine.mounted} mounted")
        if begin < region.acknowledged:
            raise Broken(f"resumed at {begin} on {held.volume}, acknowledged was {region.acknowledged}")
        self.log.info("trains", volume=held.volume, term=held.term, step=begin)
        cleaned = 0.0
        while not region.time.sleep(STEP_SECONDS, until=self.notice):
            if self.status.fenced.is_set():
                self.host.unmount(MOUNT)
                return True
            step = max(disk.steps, default=0) + 1
            highest = max(int(k.split("/")[-1]) for k in self.raw_terms())
            if highest != held.term:
                raise Broken(f"term {held.term} writes, but {highest} was claimed")
            disk.steps = (*disk.steps[-1:], step) if step > region.goal else (*disk.steps, step)
            region.acknowledged = max(region.acknowledged, step)
            saved = Saved(step, f"checkpoints/step-{step}", rfc3339(region.time.now()))
            self.status.progress(Progress(step, saved=saved))
            if region.time.seconds >= cleaned:
                cleaned = region.time.seconds + 60.0
                try:
                    clean_up(ctx, held, acknowledged_step=step)
                except SpothealError as error:
                    self.log.warning("not cleaned up", error=str(error))
        return False

    def raw_terms(self) -> list[str]:
        start = f"digits/{RUN}/{LAYOUT.terms}"
        keys = [one for one in self.region.s3.list_objects_v2(Bucket="bucket", Prefix=start).get("Contents", [])]
        return [one["Key"] for one in keys if "." not in one["Key"]]

    def _hand_over(self, ctx: Context, held: Held) -> None:
        disk = self.region.disks[held.volume]
        saved = max(disk.steps, default=0) + 1  # the trainer's last save
        disk.steps = (*disk.steps, saved)
        self.region.acknowledged = max(self.region.acknowledged, saved)
        self.host.unmount(MOUNT)
        while True:
            try:
                create_handover(ctx, held, saved)
                detach(ctx, held)
                return
            except SpothealError as error:
                self.log.warning("handover", error=str(error))
                self.region.time.sleep(0.5)

    def _wait_for_the_end(self) -> None:
        self.region.time.sleep(600.0)
