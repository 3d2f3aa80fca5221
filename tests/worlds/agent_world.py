"""A whole agent in one process: the real `run` over the in-memory cloud, a folder as volume, a real trainer process."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spotheal.agent.aws.imds import NOTHING, Answer, Identity, Metadata, Rebalance, SpotAction
from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.paths import Paths
from spotheal.agent.life.run import run
from spotheal.agent.life.world import World
from spotheal.agent.machine.host import Host
from spotheal.agent.protocol.clock import SystemClock, rfc3339
from spotheal.agent.protocol.errors import ExitCode, Retryable
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.record.logs import Logs
from spotheal.fleet.rehearsal.ec2.rulebook import Hooks, Latencies, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2, InMemoryS3
from spotheal.fleet.rehearsal.services.schedules import InMemoryScheduler, Schedules

RUN = "01TESTRUN0000000000000000"
BUCKET = "spotheal-test"
QUICK = Latencies(
    create_volume=0, attach=0, device_node=0, detach=0, delete_volume=0, snapshot=(0,), snapshot_interval=0, running=0,
    shutdown=0, launch=0, replacement=3600, set_aside=0, fleet_terminate=0,
)  # fmt: skip


class FolderHost(Host):
    """A host whose disks are folders: a mounted volume is a link to its folder."""

    def __init__(self, disks: Path, rulebook: Rulebook, instance: str) -> None:
        self.disks, self.rulebook, self.me = disks, rulebook, instance
        self.nfs_fault: Retryable | None = None  # what mount says of the file system, whose content is in `disks`/nfs

    def find_device(self, volume: str, attached_as: str = "") -> str | None:
        attached = [found for found, _, _ in self.rulebook.attached(self.me)]
        return str(self.disks / volume) if volume in attached else None

    def filesystem(self, device: str) -> str:
        return "xfs" if Path(device).is_dir() else ""

    def is_blank(self, device: str) -> bool:
        return not Path(device).exists()

    def make_filesystem(self, device: str, fstype: str, again: bool = False) -> None:
        Path(device).mkdir()

    def mount(self, device: str, mountpoint: str, fstype: str = "", volume: str = "", attached_as: str = "") -> None:
        Path(mountpoint).parent.mkdir(parents=True, exist_ok=True)
        Path(mountpoint).symlink_to(device)

    def mounted_at(self, mountpoint: str) -> str | None:
        return str(Path(mountpoint).readlink()) if Path(mountpoint).is_symlink() else None

    def unmount(self, mountpoint: str, seconds_max: float = 1) -> bool:
        Path(mountpoint).unlink(missing_ok=True)
        return True

    def resolves(self, name: str) -> bool:
        return True

    def install_nfs_client(self) -> None:
        return None

    def mount_nfs(self, source: str, mountpoint: str, options: str, seconds_max: float) -> None:
        if self.nfs_fault is not None:
            raise self.nfs_fault
        (self.disks / "nfs").mkdir(exist_ok=True)
        (self.disks / "nfs.source").write_text(source)
        self.mount(str(self.disks / "nfs"), mountpoint)

    def nfs_source(self, mountpoint: str) -> str:
        return (self.disks / "nfs.source").read_text() if Path(mountpoint).is_symlink() else ""

    def holders(self, mountpoint: str) -> tuple[int, ...]:
        return ()

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]:
        return ()

    def sync(self, mountpoint: str, seconds_max: float = 1) -> None:
        return None


class ToldMetadata(Metadata):
    """Metadata whose answers the test gives."""

    def __init__(self, identity: Identity) -> None:
        super().__init__("http://127.0.0.1:1")
        self.who = identity
        self.action: SpotAction | Answer = NOTHING
        self.recommendation: Rebalance | Answer = NOTHING

    def identity(self, wait_seconds_max: float = 0, progress: Any = None) -> Identity:
        return self.who

    def lifecycle(self) -> str:
        return "spot"

    def spot_action(self) -> SpotAction | Answer:
        return self.action

    def rebalance(self) -> Rebalance | Answer:
        return self.recommendation


@dataclass
class AgentWorld:
    """One account with a volume and a fleet of one; `live()` is one life of the agent on the fleet's instance."""

    folder: Path
    script: str
    job: dict[str, Any] = field(default_factory=dict)
    revision: str = ""
    client: Any = None  # of ssm, secretsmanager and sts
    target: int = 1  # instances of the fleet; `another()` is the next one
    nfs_fault: Retryable | None = None

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        self.s3 = InMemoryS3(BUCKET)
        self.launched: list[str] = []
        self.terminated = threading.Event()
        hooks = Hooks(
            on_launch=self.launched.append,
            on_terminate=lambda _: self.terminated.set(),
            on_snapshot_taken=self._copy,
        )
        self.rulebook = Rulebook(self.clock, latencies=QUICK, hooks=hooks)
        self.schedules = Schedules(self.rulebook)
        self.operator = InMemoryEc2(self.rulebook)
        self.disks = self.folder / "disks"
        self.disks.mkdir()
        self.config = self._configure()
        self.store = Store(self.s3, self.config.store)
        self.volume = self.operator.create_volume(
            AvailabilityZone="us-west-2a",
            Size=10,
            VolumeType="gp3",
            TagSpecifications=[{"ResourceType": "volume", "Tags": _tags(self.config)}],
        )["VolumeId"]
        self.fleet = self.operator.request_spot_fleet(SpotFleetRequestConfig=_fleet(self.target))["SpotFleetRequestId"]
        self.store.put_json("fleet.json", {"fleet_id": self.fleet})
        self.rulebook.pin_next_zone("us-west-2a")
        deadline = time.monotonic() + 10
        while len(self.launched) < self.target and time.monotonic() < deadline:
            self.rulebook.tick()
            time.sleep(0.01)
        self.instance = self.launched[0]
        self.asked_to_stop = threading.Event()
        self.metadata = ToldMetadata(
            Identity(self.instance, "us-west-2a", "us-west-2", "g5.xlarge", "123456789012", "ami-1")
        )

    def _configure(self) -> InstanceConfig:
        repository = self.folder / "repository"
        repository.mkdir()
        (repository / "train.py").write_text(self.script)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(repository)]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *command], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        job = {"name": "j", "repository": str(repository), "command": ["python", "train.py"], "python": sys.executable}
        document = {"job": job, "cage": {"mode": "off"}, "volume": {"size_gib": 10}}
        for table, values in self.job.items():
            document.setdefault(table, {}).update(values)
        url = StoreUrl(BUCKET, f"j/{RUN}")
        return InstanceConfig(
            parse_job(document), RUN, "us-west-2", url, self.revision or head, rfc3339(self.clock.now())
        )

    def _copy(self, snapshot: str, volume: str) -> None:
        (self.disks / snapshot).mkdir()

    @property
    def root(self) -> Path:
        return self.folder / self.instance

    @property
    def mounted(self) -> Path:
        return self.disks / self.volume

    def live(self) -> ExitCode:
        """One life, which ends with the instance: what cancelling the fleet does on a real machine."""

        def power_cut() -> None:
            if self.terminated.wait(60):
                self.asked_to_stop.set()

        threading.Thread(target=power_cut, daemon=True).start()
        host = FolderHost(self.disks, self.rulebook, self.instance)
        host.nfs_fault = self.nfs_fault
        world = World(
            clock=self.clock,
            paths=Paths(self.root),
            host=host,
            metadata=self.metadata,
            logs=Logs(self.root / "var/log/spotheal"),
            ec2=InMemoryEc2(self.rulebook, self.instance),
            s3=self.s3,
            scheduler=InMemoryScheduler(self.schedules) if self.config.job.fleet.on_demand_after != "0m" else None,
            asked_to_stop=self.asked_to_stop,
            client=self.client,
        )
        return run(self.config, world)

    def another(self) -> AgentWorld:
        """The same account, seen by the fleet's second instance."""
        other = copy.copy(self)
        other.instance, other.asked_to_stop = self.launched[1], threading.Event()
        other.metadata = ToldMetadata(replace(self.metadata.who, instance=other.instance))
        return other

    def status(self) -> dict[str, Any]:
        return self.store.read_status() or {}

    def events(self) -> list[dict[str, Any]]:
        from spotheal.agent.record.ledger import read_events

        return read_events((self.store.get_bytes("ledger.jsonl") or b"").decode())

    def fleet_state(self) -> str:
        return next(found.state for found in self.rulebook.fleets() if found.id == self.fleet)

    def volume_tags(self) -> dict[str, str]:
        found = self.rulebook.volume(self.volume)
        assert found is not None
        return dict(found.tags)


def _tags(config: InstanceConfig) -> list[dict[str, str]]:
    tags = {"spotheal:job": "j", "spotheal:run": config.run, "spotheal:state": "new", "spotheal:term": "0"}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _fleet(target: int) -> dict[str, Any]:
    specification = {
        "ImageId": "ami-00000000000000001",
        "InstanceType": "g5.xlarge",
        "Placement": {"AvailabilityZone": "us-west-2a"},
        "UserData": "",
    }
    return {
        "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
        "TargetCapacity": target,
        "Type": "maintain",
        "AllocationStrategy": "lowestPrice",
        "LaunchSpecifications": [specification],
    }
