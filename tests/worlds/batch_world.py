"""Containers of AWS Batch in this process: real checkout, supervisor and trainer, over an S3 in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agent_world import ToldMetadata

from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.batch.child import Child
from spotheal.agent.batch.place import Place, read_config
from spotheal.agent.files.paths import Paths
from spotheal.agent.life.world import World
from spotheal.agent.machine.host import Host
from spotheal.agent.protocol.clock import SystemClock, rfc3339
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.record.logs import Logs
from spotheal.fleet.rehearsal.services.client import InMemoryS3

RUN = "01BATCHRUN000000000000000"
BUCKET = "spotheal-test"
JOB = "1a2b3c4d-0000-0000-0000-000000000000"
HOST = Identity("i-0123", "us-west-2a", "us-west-2", "g5.xlarge", "123456789012", "ami-1")


@dataclass
class BatchWorld:
    """One run in the store; `child` is one container of it, on a disk of its own."""

    folder: Path
    script: str
    entries: list[dict[str, Any]] | None = None
    job: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock, self.s3 = SystemClock(), InMemoryS3(BUCKET)
        self.config = self._configure()
        self.store = Store(self.s3, self.config.store)
        self.store.put_json("job.json", json.loads(self.config.to_json()))
        if self.entries is not None:
            self.store.put_json("sweep.json", {"entries": self.entries})
        self.metadata = ToldMetadata(HOST)
        self.stops: dict[str, threading.Event] = {}

    def _configure(self) -> InstanceConfig:
        repository = self.folder / "repository"
        repository.mkdir()
        (repository / "train.py").write_text(self.script)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(repository)]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *command], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        job = {"name": "j", "repository": str(repository), "command": ["python", "train.py"], "python": sys.executable}
        document: dict[str, Any] = {"job": job, "batch": {"copy_every": "1s"}, "limits": {"failures": 1}}
        for table, values in self.job.items():
            document.setdefault(table, {}).update(values)
        count = len(self.entries) if self.entries is not None else 0
        url, now = StoreUrl(BUCKET, f"j/{RUN}"), rfc3339(self.clock.now())
        return InstanceConfig(parse_job(document), RUN, "us-west-2", url, head, now, count)

    def live(self, index: int | None = None, attempt: int = 1) -> int:
        """One container, to its end."""
        name = f"{index}-{attempt}"
        paths = Paths(self.folder / name)
        stop = self.stops.setdefault(name, threading.Event())
        world = World(
            self.clock, paths, Host(), self.metadata, Logs(paths.logs), ec2=None, s3=self.s3, asked_to_stop=stop
        )
        place = Place(self.config.store, JOB if index is None else f"{JOB}:{index}", attempt, index)
        with Child(read_config(self.s3, place), world, place) as child:
            return child.live()

    def in_background(self, index: int | None = None, attempt: int = 1) -> tuple[threading.Thread, list[int]]:
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(self.live(index, attempt)))
        thread.start()
        return thread, codes

    def of_entry(self, index: int | None) -> Store:
        return self.store if index is None else Store(self.s3, self.config.store.below(f"entries/{index:05d}"))

    def status(self, index: int | None = None) -> dict[str, Any]:
        return self.of_entry(index).read_status() or {}


@pytest.fixture(autouse=True)
def no_efs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTHEAL_EFS", raising=False)
