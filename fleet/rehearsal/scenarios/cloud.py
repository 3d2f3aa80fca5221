"""The rehearsal's AWS: the rule book and its endpoints, with real bytes for volumes and real processes for instances.

The rule book says what happens; this module makes it true: a launch starts a machine, an attach makes a device appear,
a snapshot copies a folder, a termination ends processes. Nothing outside 127.0.0.1 is touched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from spotheal.agent.protocol.clock import SystemClock
from spotheal.fleet.rehearsal.batch.batch import Batch, Container, image_fault_of
from spotheal.fleet.rehearsal.batch.containers import ProcessContainer
from spotheal.fleet.rehearsal.batch.things import Job
from spotheal.fleet.rehearsal.ec2.access_keys import profiles, write_private
from spotheal.fleet.rehearsal.ec2.instances import addresses
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies, Rulebook
from spotheal.fleet.rehearsal.ec2.world import Instance
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine, Machines, gpus_of
from spotheal.fleet.rehearsal.machines.sshd import Shells
from spotheal.fleet.rehearsal.machines.volumes import Volumes
from spotheal.fleet.rehearsal.scenarios.api import Endpoint
from spotheal.fleet.rehearsal.scenarios.scenario import (
    Fault,
    Interrupt,
    Kill,
    NextZone,
    NoCapacity,
    Rebalance,
    Throttle,
)
from spotheal.fleet.rehearsal.services.authorization import OWNER
from spotheal.fleet.rehearsal.services.efs import Seconds

ACCOUNT = "123456789012"
PROFILES = {"default": "", "operator": "user/operator", "administrator": "user/administrator", "owner": OWNER}
# A tenth of AWS's times and less: enough that every state is passed through and seen. `set_aside` is shortened most,
# from 13 minutes: after a shortage a rehearsal goes on much sooner than a real fleet, as docs/rehearsal.md says.
LATENCIES = Latencies(
    create_volume=0.5, attach=0.4, device_node=0.3, detach=0.4, delete_volume=0.3, snapshot=(1.0, 2.0),
    snapshot_interval=0.5, running=1.0, shutdown=5.0, launch=0.5, replacement=1.0, set_aside=2.0,
    fleet_terminate=0.5,
)  # fmt: skip
EFS_SECONDS = Seconds(file_system=0.5, mount_target=2.0, delete=1.0)
BOOT_SECONDS = 1.5
_TICK_SECONDS = 0.1


class Cloud:
    """One account in one region. `close` ends every process and server of it; use as a context."""

    def __init__(
        self,
        folder: Path,
        region: str,
        zones: tuple[str, ...],
        seed: int,
        passed_on: dict[str, str] | None = None,
        latencies: Latencies = LATENCIES,
        make_machine: Callable[[Path, Launch, Callable[[Machine], None] | None], Machine] = Machine,
    ) -> None:
        self.volumes = Volumes(folder)
        self.rules = Rulebook(SystemClock(), region, zones, ACCOUNT, latencies, seed)
        self.shells = Shells(folder)
        self.machines = Machines(folder / "instances", BOOT_SECONDS, self._on_end, make_machine)
        self.launched_at: dict[str, float] = {}  # monotonic
        self.killed: set[str] = set()
        self._passed_on = dict(passed_on or {})
        self.shows_gpus = False  # whether a machine has its type's GPUs; a rehearsal shows what the job asks for
        self._throttled_until = 0.0, 0  # monotonic time, and number of calls throttled by then
        self._closing = threading.Event()
        self._hook()
        self.endpoint = Endpoint(self.rules)
        self.endpoint.send_key = self.shells.allow
        self.credentials = folder / "credentials"
        keys = {profile: self.endpoint.key_of_person(person) for profile, person in PROFILES.items()}
        write_private(self.credentials, profiles(keys))
        self.batch = self.endpoint.batch = Batch(self.rules, self._container)
        self.batch.image_fault = image_fault_of(self._images)
        self.batch.role_fault = self._batch_fault
        self.folder = folder
        self.endpoint.efs.folder, self.endpoint.efs.seconds = folder / "efs", EFS_SECONDS
        self._clock = threading.Thread(target=self._tick, name="time of the rehearsal", daemon=True)
        self._clock.start()

    def __enter__(self) -> Cloud:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.end_machines()
        self.shells.close()
        self.batch.close()
        self.endpoint.close()

    def end_machines(self) -> None:
        """End every machine; time stops first, else a fleet would replace them. AWS answers until `close`."""
        self._closing.set()
        self._clock.join(5)
        self.machines.close()

    @property
    def url(self) -> str:
        return self.endpoint.url

    # ---------------------------------------------------------------------------------------------------- the scenario
    def make(self, fault: Fault, instance: str) -> str:
        """Make `fault` happen to `instance`; returns what a person is told."""
        record = self.rules.instance(instance)
        zone = record.zone if record else ""
        match fault:
            case Interrupt(lead):
                self.rules.interrupt(instance, "terminate", lead)
                return f"{instance} gets an interruption notice, {lead:.0f} s ahead"
            case Kill():
                self.killed.add(instance)
                self.rules.kill(instance)
                return f"{instance} is killed without a notice"
            case Rebalance():
                self.rules.rebalance(instance)
                return f"{instance} gets a rebalance recommendation"
            case NoCapacity(seconds):
                self.rules.no_capacity((), seconds)
                return f"no spot capacity for {seconds:.0f} s"
            case Throttle(seconds, probability, calls_min):
                self.rules.faults.throttle = probability
                self._throttled_until = time.monotonic() + seconds, self.throttled_calls() + calls_min
                return f"EC2 throttles {probability:.0%} of all calls for {seconds:.0f} s"
            case NextZone(other):
                target = self._other_zone(zone) if other else zone
                self.rules.pin_next_zone(target)
                return f"the next instance will be placed in {target}"

    def throttled_calls(self) -> int:
        return sum(call.outcome == "RequestLimitExceeded" for call in list(self.rules.calls))

    def _other_zone(self, zone: str) -> str:
        zones = [zone_of_fleet for zone_of_fleet in self.allowed_zones() if zone_of_fleet != zone]
        return zones[0] if zones else zone

    def allowed_zones(self) -> list[str]:
        """The zones the fleet may use, in order."""
        zones = [zone for fleet in self.rules.fleets() for spec in fleet.specs for zone in spec["zones"]]
        return sorted(set(zones)) or list(self.rules.zones)

    # ---------------------------------------------------------------------------------------------- rules made true
    def _hook(self) -> None:
        hooks = self.rules.hooks
        hooks.on_launch = self._on_launch
        hooks.on_shutdown = self._on_shutdown
        hooks.on_terminate = self._on_terminate
        hooks.on_stop = self._on_terminate
        hooks.on_attach = self._on_attach
        hooks.on_detach = lambda volume, instance, _: self._with(instance, lambda m: m.detach(volume))
        hooks.on_volume_created = self._on_volume_created
        hooks.on_volume_deleted = self.volumes.delete
        hooks.on_snapshot_taken = lambda snapshot, volume: self.volumes.snapshot(
            volume, snapshot, lambda: self._holder_still(volume)
        )
        hooks.on_snapshot_deleted = self.volumes.delete_snapshot
        hooks.is_mounted = self._is_mounted

    def _with(self, instance: str, do: Callable[[Machine], object]) -> None:
        machine = self.machines.get(instance)
        if machine is not None:
            do(machine)

    def _on_launch(self, instance: str) -> None:
        record = self.rules.instance(instance)
        if record is None or self._closing.is_set():
            return
        self.launched_at[instance] = time.monotonic()
        if self.batch.owns(record):
            return  # a host of Batch: what runs on it are its containers
        machine = self.machines.launch(self._launch(record))
        later = threading.Timer(BOOT_SECONDS, self._start_shell, (record, machine))
        later.daemon = True
        later.start()
        self.rules.consoles[instance] = lambda: _text(machine.folder / "console.log")

    def _start_shell(self, instance: Instance, machine: Machine) -> None:
        if self._closing.is_set() or machine.ended_at is not None:
            return
        _, address = addresses(instance)
        key = self.endpoint.public_key(str(instance.spec.get("KeyName") or ""))
        self.shells.start(instance.id, machine.folder, address, machine.environment(), key)

    def _launch(self, instance: Instance) -> Launch:
        environment = {
            **(gpus_of(instance.type) if self.shows_gpus else {}),
            **self._passed_on,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.endpoint.metadata_url(instance.id),
        }
        return Launch(instance.id, instance.zone, instance.type, instance.user_data, environment)

    def _on_attach(self, volume: str, instance: str, device: str) -> None:
        """The name that was asked for means nothing on a machine whose disks are NVMe."""
        self._with(instance, lambda machine: machine.attach(self.volumes.disk(volume)))

    def _on_shutdown(self, instance: str, seconds: float) -> None:
        """The operating system's shutdown takes time; the rule book does not wait for it."""
        self.batch.host_shuts_down(instance)
        machine = self.machines.get(instance)
        if machine is not None:
            threading.Thread(target=machine.shut_down, args=(seconds,), daemon=True).start()

    def _on_terminate(self, instance: str) -> None:
        self.shells.end(instance)
        self.batch.host_ended(instance)
        self._with(instance, lambda machine: machine.end())

    def _on_end(self, machine: Machine) -> None:
        """A machine that switched itself off, or whose processes somebody killed: EC2 notices."""
        self.shells.end(machine.launch.instance)
        record = self.rules.instance(machine.launch.instance)
        if not self._closing.is_set() and record is not None and record.state in ("pending", "running"):
            self.rules.powered_off(machine.launch.instance)

    def _on_volume_created(self, volume: str, snapshot: str | None) -> None:
        record = self.rules.volume(volume)
        assert record is not None
        self.volumes.create(volume, record.size, snapshot or "")

    def _holder_still(self, volume: str) -> AbstractContextManager[None]:
        record = self.rules.volume(volume)
        machine = self.machines.get(record.attachment.instance) if record and record.attachment else None
        return nullcontext() if machine is None else machine.still()

    def _is_mounted(self, volume: str, instance: str) -> bool:
        machine = self.machines.get(instance)
        return machine is not None and machine.ended_at is None and machine.has_mounted(volume)

    def _tick(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            if self.rules.faults.throttle:
                until, calls = self._throttled_until
                if time.monotonic() >= until and self.throttled_calls() >= calls:
                    self.rules.faults.throttle = 0.0
            self.rules.tick()
            self.batch.tick()

    # ------------------------------------------------------------------------------------------------- AWS Batch's side
    def _container(self, job: Job, host: Instance) -> Container:
        """One attempt, in a folder beside the machines'."""
        name = f"{job.id.replace(':', '-')}-{len(job.attempts) + 1}"
        role = str(job.container().get("jobRoleArn", "")).rpartition("/")[2]
        environment = {
            **self._passed_on,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.endpoint.metadata_url(host.id),
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": self.endpoint.container_credentials(name, role),
        }
        return ProcessContainer(self.folder / "containers" / name, job, host, environment, self._mounts)

    @property
    def _mounts(self) -> Path:
        """Where file systems are: a folder for each, whoever mounts it."""
        return self.folder / "efs"

    def _images(self, repository: str) -> set[str] | None:
        from moto.ecr.models import ecr_backends

        stored = ecr_backends[self.rules.account][self.rules.region].repositories.get(repository)
        return None if stored is None else {str(tag) for image in stored.images for tag in image.image_tags}

    def _batch_fault(self, resources: Mapping[str, Any]) -> str:
        profile = str(resources["instanceRole"])
        return self.endpoint.account.profile_fault({"Name": profile.rpartition("/")[2]}) or ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
