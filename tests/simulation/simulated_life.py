"""The whole agent in a simulated region: `agent.run` with its real stages, its watcher, handover, finish and threads.

Only what lies outside is simulated: EC2 with its fleets and the store (the rule book), the host's disks, the metadata
service, the clone, and the trainer's process. The threads of the agent are actors in virtual time.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from botocore.exceptions import ReadTimeoutError
from simulated_time import Actor, SimulatedLock, SimulatedStop, Time
from simulated_world import (
    BOOT_SECONDS,
    RUN,
    STEP_SECONDS,
    TAGS,
    Broken,
    Gated,
    Machine,
    Quiet,
    Region,
    SimulatedHost,
)

from spotheal.agent.aws.imds import NOTHING, Answer, Identity, Rebalance, SpotAction
from spotheal.agent.interruption import watcher
from spotheal.agent.life import boot, code, gpu_check, run, stages, storage, trainer_stage
from spotheal.agent.life.gpus import BARRED_LAUNCHES_MAX, Found
from spotheal.agent.life.world import World
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.contract import Notice, Progress, Saved
from spotheal.agent.protocol.ends import LAUNCHES_WITHOUT_PROGRESS_MAX, STARTS_WITHOUT_PROGRESS_MAX, TrainerEnd
from spotheal.agent.protocol.errors import Interrupted, SetupFailed, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.agent.record import ledger, status
from spotheal.agent.record.run_state import RunMemory
from spotheal.agent.volume.context import Context
from spotheal.fleet.rehearsal.ec2.rulebook import Faults
from spotheal.fleet.rehearsal.services.client import InMemoryEc2

RESTART_SECONDS = 3.0  # of the unit
RETENTION_SECONDS = 120.0  # shorter than the agent's, so that a history need not train for long
SAVE_SECONDS = 3.0
JOB = {
    "job": {"name": "digits", "repository": "https://example.org/r.git", "command": ["python", "train.py"]},
    "volume": {"name": "data"},
}
CONFIG = InstanceConfig(parse_job(JOB), RUN, "us-west-2", StoreUrl("bucket", f"digits/{RUN}"), "0" * 40, "")


def asking(gpu_memory_gib: float) -> InstanceConfig:
    """The job with a GPU of so much memory at least."""
    table = {**JOB["job"], "gpus": 1, "gpu_memory_gib": gpu_memory_gib}  # type: ignore[dict-item]
    return replace(CONFIG, job=parse_job({**JOB, "job": table}))


OVER = {kind: kind for kind in ("done", "failed", "limit", "set-up failed")}  # how a trainer ends -> the run's phase


class LifeRegion(Region):
    """`request` starts the run. `ending`: (kind, step) at which the trainer is done, fails, or is out of hours.

    Another job's fleet, instance and volume are there too; whatever happens to ours, nothing happens to them.
    """

    def __init__(self, *, ending: tuple[str, int] | None = None, **options: Any) -> None:
        super().__init__(**{"zones": ("us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"), **options})
        self.ending, self.ended_by = ending, ""
        self.fleet = self.other = ""
        self.hostages: tuple[str, ...] = ()
        self.acknowledged_at = self.training_since = -1.0
        self.s3.faults = Faults(self.faults.seed)
        self.gone = False  # the volume was deleted by the operator's hand
        self.recorded: set[str] = set()  # the end that the status says
        self.config, self.types = CONFIG, {"g5.xlarge": tuple(self.rules.zones)}  # and the zones each may be placed in
        self.gpus = {"g5.xlarge": Found((23028,), 1), "g4dn.xlarge": Found((15360,), 1)}
        self.clone_seconds = self.setup_seconds = 0.0
        self.on_machine: Callable[[Machine], object] = lambda machine: None
        self.driver_is_slow = False  # the look at the GPUs takes longer than healing
        self.store_may_hang = self.store_hangs = False
        self.trainer_is_foreign = False  # it writes no progress file: nobody knows what it has saved
        self.at_step: dict[int, Callable[[Machine], object]] = {}  # what befalls the machine that saves this step
        hooks = self.rules.hooks
        hooks.on_launch, hooks.on_shutdown, hooks.on_stop = self._on_launch, self._on_shutdown, self._on_stop

    def __enter__(self) -> LifeRegion:
        threads = SimulatedThreading(self)
        self._patches = contextlib.ExitStack()
        for module in (boot, stages, status, ledger, watcher, trainer_stage):
            self._patch(module, "threading", threads)
        self._patch(run, "VolumeStorage", SimulatedVolume)
        self._patch(stages, "Watcher", SimulatedWatcher)
        self._patch(code, "Confinement", lambda *_: NoConfinement())
        self._patch(run, "Code", SimulatedCode)
        self._patch(stages, "GpuCheck", partial(SimulatedGpuCheck, self))
        self._patch(stages.Life, "_watch_shutdown", watch_shutdown)
        self._patch(stages, "Warmup", lambda log: NoWarmup())
        self._patch(trainer_stage, "Supervisor", lambda *a, **k: SimulatedTrainer(self, *a, **k))
        self._patch(trainer_stage, "RunMemory", memory_of(self))
        self._patch(trainer_stage, "SavedFiles", lambda folders, over: SimpleNamespace(mark=frozenset))
        written = SimpleNamespace(predecessor=dict, look=lambda attempt: None)  # no file system here
        self._patch(trainer_stage, "WrittenFiles", lambda *_: written)
        self._patch(trainer_stage, "RETENTION_SECONDS", RETENTION_SECONDS)
        return self

    def _patch(self, module: Any, name: str, value: object) -> None:
        self._patches.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            super().__exit__(kind, *rest)
        finally:
            self._patches.close()

    # ------------------------------------------------------------------------------------------------------ the fleets
    def request(self, zone: str, target: int = 1, launch_in: Iterable[str] = (), **disk: Any) -> str:
        """The run's volume in `zone` and its fleet, which launches in `launch_in` first; the volume's id.

        With `disk` an adopted volume, which has a life behind it.
        """
        volume = self.make_volume(zone, **disk)
        with self._faultless():
            self.rules.pin_next_zone(*launch_in)
            self.fleet = self._request_fleet(TAGS, target)
            document = json.dumps({"fleet_id": self.fleet}).encode()
            faults, self.s3.faults = self.s3.faults, Faults()
            self.s3.put_object(Bucket="bucket", Key=f"digits/{RUN}/{LAYOUT.fleet_document}", Body=document)
            self.s3.faults = faults
        return volume

    def add_another_job(self, zone: str) -> None:
        tags = {**TAGS, "spotheal:job": "other", "spotheal:run": "01OTHER"}
        listed = [{"Key": key, "Value": value} for key, value in {**tags, "spotheal:state": "current"}.items()]
        specification = [{"ResourceType": "volume", "Tags": listed}]
        request = {"AvailabilityZone": zone, "Size": 1, "VolumeType": "gp3", "TagSpecifications": specification}
        with self._faultless():
            self.hostages = (self.rules.call("CreateVolume", request)["VolumeId"],)
            self.other = self._request_fleet(tags, 1, (zone,))

    def _request_fleet(self, tags: dict[str, str], target: int, zones: tuple[str, ...] = ()) -> str:
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        specifications = [
            {
                "ImageId": "ami-1",
                "InstanceType": kind,
                "Placement": {"AvailabilityZone": ", ".join(zones or places)},
                "TagSpecifications": [{"ResourceType": "instance", "Tags": listed}],
            }
            for kind, places in self.types.items()
        ]
        role = "arn:aws:iam::123456789012:role/fleet"
        config = {"IamFleetRole": role, "TargetCapacity": target, "LaunchSpecifications": specifications}
        answer = self.rules.call("RequestSpotFleet", {"SpotFleetRequestConfig": config})
        return str(answer["SpotFleetRequestId"])

    def fleet_state(self, fleet: str) -> str:
        found = self.rules.world.fleets.get(fleet)
        return "" if found is None else found.state

    def _on_launch(self, instance: str) -> None:
        found = self.rules.world.instances[instance]
        if found.fleet == self.other:
            return
        machine = Machine(instance, found.zone, launched_at=self.time.seconds)
        self.machines[instance] = machine
        self.tell(f"{instance} is launched in {found.zone}")
        self.on_machine(machine)
        self._start_agent(machine, BOOT_SECONDS)

    def _on_end(self, instance: str) -> None:
        if instance in self.machines:
            super()._on_end(instance)

    def _on_stop(self, instance: str) -> None:
        """Its power is cut, and its volumes stay attached to it."""
        super()._on_end(instance)

    def _on_shutdown(self, instance: str, seconds: float) -> None:
        if instance in self.machines:
            self.machines[instance].going_down = True
            self.machines[instance].asked_to_stop.set()

    def tell(self, text: str) -> None:
        self.story.append(f"{self.time.seconds:9.1f} {text}")

    # ----------------------------------------------------------------------------------------------------- the machines
    def interrupt(self, machine: Machine, lead: float = 120.0, action: str = "terminate") -> None:
        self.tell(f"{machine.id} gets a notice: {action} in {lead:.0f} s")
        self.rules.interrupt(machine.id, action, lead)
        machine.noticed = True
        machine.imds.set()

    def withdraw(self, machine: Machine) -> None:
        self.tell(f"{machine.id}: the notice is withdrawn")
        self.rules.withdraw_notice(machine.id)
        machine.imds.set()

    def rebalance(self, machine: Machine) -> None:
        self.tell(f"{machine.id} gets a rebalance recommendation")
        self.rules.rebalance(machine.id)
        machine.imds.set()

    def kill_agent(self, machine: Machine) -> None:
        self.tell(f"{machine.id}: its agent is killed")
        self.agent_died(machine)

    def start_again(self, machine: Machine) -> None:
        """What AWS does to a stopped spot instance when there is capacity again; it has what is still attached."""
        self.tell(f"{machine.id} is started again")
        world = self.rules.world
        world.instances.put(replace(world.instances[machine.id], state="running", notice=None))
        attached = [volume for volume in world.volumes.all() if volume.attachment is not None]
        held = [volume.id for volume in attached if volume.attachment.instance == machine.id]
        machine.alive, machine.going_down, machine.noticed = True, False, False
        machine.disks = {volume: f"/dev/nvme-{volume}" for volume in held}
        self._start_agent(machine, BOOT_SECONDS)

    def _start_agent(self, machine: Machine, after: float) -> None:
        machine.imds = SimulatedStop(self.time)
        machine.asked_to_stop = SimulatedStop(self.time)
        if machine.going_down:
            return
        actor = self.time.spawn(f"{machine.id}-agent", lambda: self._process(machine), after)
        actor.machine = machine
        machine.agents = [each for each in machine.agents if not each.ended] + [actor]

    def clients(self, machine: Machine) -> tuple[object, object]:
        """Of EC2 and S3, as this machine has them."""
        return InMemoryEc2(self.rules, machine.id), HangingS3(self)

    def live(self, world: World) -> int:
        """What the agent's process does; its exit code."""
        return int(run.run(self.config, world))

    def _process(self, machine: Machine) -> None:
        """One process of the agent, from its start to its exit code."""
        ec2, s3 = self.clients(machine)
        log = Quiet(self.time, machine.id, self.story)
        world = World(
            self.time,
            SimulatedPaths(),  # type: ignore[arg-type]
            LifeHost(self, machine),  # type: ignore[arg-type]
            SimulatedMetadata(self, machine),  # type: ignore[arg-type]
            SimulatedLogs(log),  # type: ignore[arg-type]
            Gated(self, machine, ec2),
            Gated(self, machine, s3),
            asked_to_stop=machine.asked_to_stop,  # type: ignore[arg-type]
        )
        try:
            code = self.live(world)
        except SpothealError as error:
            log.error("the agent ends", why=str(error))
            code = 1
        log.info(f"the agent has ended with {code}")
        for other in machine.agents:
            if other is not self.time.current:
                other.end()
        if code != 0 and machine.alive:
            self._start_agent(machine, RESTART_SECONDS)

    # ----------------------------------------------------------------------------------------------------- invariants
    def check(self) -> None:
        super().check()
        world = self.rules.world
        if world.fleets.changes == self._fleets_checked:
            return
        self._fleets_checked = world.fleets.changes
        if self.other and self.fleet_state(self.other) not in ("submitted", "active"):
            raise Broken(f"another job's fleet is {self.fleet_state(self.other)}")
        if self.hostages and not all(world.volumes.get(volume) for volume in self.hostages):
            raise Broken("another job's volume is gone")
        if self.fleet and self.fleet_state(self.fleet).startswith("cancelled") and not self.may_be_over():
            raise Broken("the fleet is cancelled, and nothing has ended the run")

    _fleets_checked = -1

    def may_be_over(self) -> set[str]:
        """The ends of the run that are true, by what has happened; empty where it must go on."""
        phases = ({OVER[self.ended_by]} if self.ended_by else set()) | self.recorded
        fruitless = barred = 0
        for launch in self.launches():
            machine = self.machines[launch["instance"]]
            barred = 0 if launch["acknowledged"] else barred + (launch["outcome"] == "barred")
            if barred >= BARRED_LAUNCHES_MAX - 1:  # the one that decides is the last
                phases.add("parked")
            if machine.launched_at < self.acknowledged_at or launch["acknowledged"]:
                fruitless = 0
            elif not machine.alive and not machine.ended_by.startswith("Server.SpotInstance"):
                fruitless += 1
            if fruitless >= LAUNCHES_WITHOUT_PROGRESS_MAX or launch["starts"] > STARTS_WITHOUT_PROGRESS_MAX:
                phases.add("parked")
        return phases | {"parked"} if self.gone else phases

    def status_written(self) -> None:
        """An end must be true when it is recorded; what comes later takes nothing back."""
        phase = str(self.documents(LAYOUT.status)[0]["phase"])
        if self.recorded and phase not in self.recorded:
            raise Broken(f"the run was {self.recorded}, and its status says {phase}")
        if Phase(phase).is_end and not self.recorded:
            if phase not in self.may_be_over():
                raise Broken(f"the run is said to be {phase}, and nothing has ended it so")
            self.recorded = {phase}

    def launches(self) -> list[dict[str, Any]]:
        return sorted(self.documents(LAYOUT.launches), key=lambda one: (one["time"], one["instance"]))

    def documents(self, prefix: str) -> list[dict[str, Any]]:
        start = f"digits/{RUN}/{prefix}"
        found = self.bodies(start)
        return [json.loads(body) for key, body in found if "." not in key[len(start) :].removesuffix(".json")]

    def ledger(self) -> list[dict[str, Any]]:
        found = self.bodies(f"digits/{RUN}/{LAYOUT.ledger}")
        return ledger.read_events(found[0][1].decode()) if found else []

    def bodies(self, start: str) -> list[tuple[str, bytes]]:
        """What the store has below `start`, whatever faults it has for the agents."""
        objects = self.s3._buckets["bucket"]
        return [(key, objects[key].body) for key in sorted(objects) if key.startswith(start)]

    def claims(self) -> dict[int, str]:
        """Term -> the instance that claimed it."""
        return {int(one["number"]): one["instance"] for one in self.documents(LAYOUT.terms) if "number" in one}

    def is_over(self) -> bool:
        """The end is in the store, the fleet is cancelled, and no instance of it is left."""
        if self.fleet_state(self.fleet) != "cancelled":
            return False
        if any(one.fleet == self.fleet and one.state != "terminated" for one in self.rules.world.instances.all()):
            return False
        return {one.get("phase") for one in self.documents(LAYOUT.status)} <= self.may_be_over()


class HangingS3:
    """The store, which answers nothing while `region.store_hangs`: five tries of 20 s, as the agent's clients make."""

    def __init__(self, region: LifeRegion) -> None:
        self._region = region

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._region.s3, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            for _ in range(5):
                if not self._region.store_hangs:
                    answer = method(*args, **kwargs)
                    if name == "put_object" and kwargs["Key"].endswith(f"/{LAYOUT.status}"):
                        self._region.status_written()
                    return answer
                self._region.time.sleep(20.0)
            raise ReadTimeoutError(endpoint_url="https://bucket.s3.us-west-2.amazonaws.com")

        return call


class SimulatedThreading:
    """Stands for the module `threading` in the agent's modules."""

    def __init__(self, region: LifeRegion) -> None:
        self._region = region

    def Event(self) -> SimulatedStop:
        return SimulatedStop(self._region.time)

    def Lock(self) -> SimulatedLock:
        return SimulatedLock(self._region.time)

    RLock = Lock

    def Thread(self, target: Callable[[], None], name: str = "", daemon: bool = True) -> SimulatedThread:
        return SimulatedThread(self._region.time, target, name)


class SimulatedThread:
    def __init__(self, time: Time, target: Callable[[], None], name: str) -> None:
        self._time, self._target, self._name = time, target, name
        self._actor: Actor | None = None

    def start(self) -> None:
        parent = self._time.current
        assert parent is not None
        machine = parent.machine
        self._actor = self._time.spawn(f"{machine.id}-{self._name}", self._target)
        self._actor.machine = machine
        machine.agents.append(self._actor)

    def join(self, timeout: float = 1e9) -> None:
        until = self._time.seconds + timeout
        while self.is_alive() and self._time.seconds < until:
            self._time.sleep(0.1)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.ended


class SimulatedCode(code.Code):
    """No clone, and no interpreter."""

    def start(self) -> None:
        boot, region = self._boot, self._region

        def clone() -> None:
            self._host.gate("git clone")
            boot.clock.sleep(region.clone_seconds, until=boot.stop)

        self._thread = SimulatedThread(region.time, clone, "clone")
        self._thread.start()

    def prepare(self) -> Any:
        self._thread.join()
        self._host.gate("setup")
        if self._boot.clock.sleep(self._region.setup_seconds, until=self._boot.stop):
            raise Interrupted("this machine goes away")
        if self._region.ending == ("set-up failed", 0):
            self._region.ended_by = "set-up failed"
            raise SetupFailed("the setup command exited with 1")
        return SimpleNamespace(path=Path("/python"))

    @property
    def _host(self) -> LifeHost:
        return self._boot.world.host  # type: ignore[return-value]

    @property
    def _region(self) -> LifeRegion:
        return self._host.region


class SimulatedGpuCheck(gpu_check.GpuCheck):
    """The look is over at once, or lasts until healing is over."""

    def __init__(self, region: LifeRegion, start: boot.Boot) -> None:
        super().__init__(start)
        self._region = region

    def start(self, pool: object) -> None:
        found = self._region.gpus[self._boot.here.instance_type]
        self._found = SimpleNamespace(done=lambda: not self._region.driver_is_slow, result=lambda: found)  # type: ignore[assignment]


def watch_shutdown(life: stages.Life) -> None:
    """Without a look every second."""
    world, closing = life._world, life._boot.closing
    if life._clock.sleep(1e9, until=world.asked_to_stop) and not closing.is_set():
        life._watcher.shutdown(life._clock.now() + stages.timedelta(seconds=stages.SHUTDOWN_SECONDS))


class SimulatedVolume(storage.VolumeStorage):
    """The real one on the simulated disks."""

    def _healing(self) -> Context:
        host = self._boot.world.host
        dice = random.Random(host.region.random.random())  # type: ignore[attr-defined]
        return replace(super()._healing(), checkpoint_names=host.checkpoint_names, random=dice)  # type: ignore[attr-defined]


class SimulatedWatcher(watcher.Watcher):
    """Polls on the same beat, but only while there is something to see: what is the same needs no look."""

    def _watch(self) -> None:
        source, time = self._metadata, self._clock
        began = time.monotonic()
        while not self._stop.is_set():
            self.poll()
            changed = source.machine.imds  # type: ignore[attr-defined]
            if self.interruption is None and not source.has_something() and self._absent > 1:  # type: ignore[attr-defined]
                changed.clear()
                time.sleep(1e9, until=changed)
                time.sleep(self._poll_seconds - (time.monotonic() - began) % self._poll_seconds, until=self._stop)
            else:
                time.sleep(self._poll_seconds, until=self._stop)

    def stop(self) -> None:
        self._stop.set()
        self._metadata.machine.imds.set()  # type: ignore[attr-defined]
        super().stop()


class SimulatedMetadata:
    def __init__(self, region: LifeRegion, machine: Machine) -> None:
        self.region, self.machine = region, machine

    def identity(self, progress: Callable[[str], None] | None = None) -> Identity:
        kind = self.region.rules.world.instances[self.machine.id].type
        return Identity(self.machine.id, self.machine.zone, "us-west-2", kind, "123456789012", "ami-1")

    def lifecycle(self) -> str:
        return "spot"

    def has_something(self) -> bool:
        return self.spot_action() is not NOTHING or self.rebalance() is not NOTHING

    def spot_action(self) -> SpotAction | Answer:
        found = self.region.rules.world.instances.get(self.machine.id)
        return NOTHING if found is None or found.notice is None else SpotAction(found.notice.action, found.notice.time)

    def rebalance(self) -> Rebalance | Answer:
        found = self.region.rules.world.instances.get(self.machine.id)
        return NOTHING if found is None or found.rebalance is None else Rebalance(found.rebalance)


class SimulatedPaths:
    root, logs, is_whole_machine = Path("/simulated"), Path("/simulated/log"), True

    def mount_point(self, mount: str) -> Path:
        return Path(mount)


class SimulatedLogs:
    def __init__(self, log: Quiet) -> None:
        self.log = log

    def anew(self) -> SimulatedLogs:
        return self

    def bind(self, **fields: object) -> None: ...

    def use_volume(self, folder: Path, instance: str) -> None: ...

    def leave_volume(self) -> None: ...

    def trainer_line(self, line: str) -> None: ...

    def ship(self, store: Any, instance: str) -> bool:
        with contextlib.suppress(SpothealError):
            store.put_bytes(LAYOUT.agent_log(instance), b"")
        return True


class NoConfinement:
    """No cage: the simulated trainer has no process."""

    account, environment, trainers = None, {}, {}

    def enter(self) -> None: ...

    def keep_closed(self) -> None: ...

    def end_processes(self) -> None: ...

    def leave(self) -> None: ...


class NoWarmup:
    """It reads files of the machine ahead, and changes nothing."""

    def libraries_of_torch(self, python: str) -> None: ...

    def moved_volume(self, folders: Any, device: str) -> None: ...

    def end(self) -> None: ...


class LifeHost(SimulatedHost):
    """`machine.shell`: "" nobody; "shell": a process holds the mount until it is killed; "stuck": nothing frees it."""

    @property
    def region(self) -> LifeRegion:
        return self._region  # type: ignore[return-value]

    def gate(self, name: str) -> None:
        self._region.gate(self._machine, name, lambda: None)

    def unmount(self, mountpoint: str, seconds_max: float = 0.0) -> bool:
        if self._machine.mounted is not None and self._machine.shell:
            self.gate("umount")
            return False
        return super().unmount(mountpoint, seconds_max)

    def holders(self, mountpoint: str) -> tuple[int, ...]:
        return (4711,) if self._machine.shell else ()

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]:
        self.gate("kill")
        if self._machine.shell == "shell":
            self._machine.shell = ""
        return tuple(pids)

    def sync(self, mountpoint: str, seconds_max: float = 0.0) -> None:
        self.gate("sync")

    def freeze(self, mountpoint: str, seconds_max: float = 0.0) -> None:
        self.gate("freeze")

    def thaw(self, mountpoint: str, seconds_max: float = 0.0) -> None:
        self.gate("thaw")

    def power_off(self) -> None:
        self.gate("power off")
        self._machine.going_down = True
        self._region.rules.powered_off(self._machine.id)


def memory_of(region: LifeRegion) -> type[RunMemory]:
    """The run's memory, on the simulated disk that the machine which asks has mounted."""

    def disk() -> Any:
        current = region.time.current
        assert current is not None
        mounted = current.machine.mounted
        if mounted is None:
            raise OSError("nothing is mounted")
        return region.disks[mounted]

    class DiskMemory(RunMemory):
        @classmethod
        def read(cls, folders: object, run: str, requested_at: str = "") -> RunMemory:
            return disk().memory or cls(run, requested_at=requested_at)

        def write(self, folders: object, *, durable: bool = True) -> None:
            disk().memory = self

    return DiskMemory


class SimulatedTrainer:
    """Stands for the supervisor and its trainer: a step and a durable checkpoint every ten seconds."""

    def __init__(
        self, region: LifeRegion, *_: object, hooks: Any, first_attempt: int, failures: int, **__: Any
    ) -> None:
        self._region, self._hooks, self._failures = region, hooks, failures
        assert region.time.current is not None
        self._machine = region.time.current.machine
        self._attempt = first_attempt
        self._asked = SimulatedStop(region.time)
        self._kind, self._until = "", 0.0
        self.best_step: int | None = None

    # --------------------------------------------------------------------------------------- told from other threads
    def notify(self, notice: Notice, *, until: float) -> None:
        self._ask(self._kind or "interrupted", until)

    def stop(self, seconds: float) -> None:
        self._ask("interrupted", self._region.time.seconds + seconds)

    def stop_for_limit(self, reason: str, seconds: float = 60.0) -> None:
        self._ask("limit", self._region.time.seconds + seconds)

    def rebalance(self) -> None: ...

    def _ask(self, kind: str, until: float) -> None:
        self._kind, self._until = kind, until
        self._asked.set()

    # ----------------------------------------------------------------------------------------------------------- runs
    def run(self) -> TrainerEnd:
        region, machine = self._region, self._machine
        if machine.mounted is None:
            raise Broken(f"{machine.id} trains with nothing mounted")
        disk = region.disks[machine.mounted]
        disk.used = True
        begin = max(disk.steps, default=0)
        machine.trained_from.append(begin)
        if begin < region.acknowledged:
            raise Broken(f"resumed at {begin} on {machine.mounted}, acknowledged was {region.acknowledged}")
        region.tell(f"{machine.id} trains on {machine.mounted} from step {begin}")
        region.training_since = region.time.seconds
        self._hooks.on_attempt(self._attempt)
        self._hooks.on_event("trainer-started", attempt=self._attempt, resumed_step=begin)
        kind = self._steps(begin)
        saved = None if region.trainer_is_foreign else max(disk.steps, default=None)
        ended = {"attempt": self._attempt, "kind": kind, "last_step": saved, "saved_step": saved}
        self._tell(partial(self._hooks.on_event, "trainer-ended", **ended))
        if kind in OVER:
            region.ended_by = kind
        return TrainerEnd(kind, f"the trainer is {kind}", saved, saved, 0, None, self._attempt, self._failures)  # type: ignore[arg-type]

    def _steps(self, step: int) -> str:
        region = self._region
        while True:
            if region.ending is not None and step >= region.ending[1] > 0:
                return region.ending[0]
            asked = region.time.sleep(STEP_SECONDS, until=self._asked)
            if asked and region.time.seconds + SAVE_SECONDS > self._until:
                return self._kind
            if asked:
                region.time.sleep(SAVE_SECONDS)
            step += 1
            self._save(step)
            if asked:
                return self._kind
            saved = Saved(step, f"checkpoints/step-{step}", rfc3339(region.time.now()))
            if not region.trainer_is_foreign:
                self._tell(partial(self._hooks.on_progress, Progress(step, saved=saved)))

    def _tell(self, hook: Callable[[], None]) -> None:
        """The real supervisor tells in a thread of its own; here only where that makes a difference."""
        if self._region.store_may_hang:
            SimulatedThread(self._region.time, hook, "teller").start()
        else:
            hook()

    def _save(self, step: int) -> None:
        region, machine = self._region, self._machine
        claims = region.claims()
        if claims[max(claims)] != machine.id:
            raise Broken(f"{machine.id} writes, but term {max(claims)} is {claims[max(claims)]}'s")
        assert machine.mounted is not None
        disk = region.disks[machine.mounted]
        disk.steps = (*disk.steps[-1:], step)
        region.acknowledged, region.acknowledged_at = max(region.acknowledged, step), region.time.seconds
        befalls = region.at_step.pop(step, None)
        if befalls is not None:
            region.time.at(0.0, lambda: befalls(machine))
