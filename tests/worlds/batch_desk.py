"""An operator's desk with AWS Batch in memory: containers follow a script, and time passes where somebody sleeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from fleet_desk import BUCKET, REGION, Desk
from moto.ecr.models import ecr_backends

from spotheal.agent.aws import clients as aws
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol import clock
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.account import prices, types
from spotheal.fleet.rehearsal.batch.batch import Batch, InMemoryBatch, image_fault_of
from spotheal.fleet.rehearsal.batch.things import Job
from spotheal.fleet.rehearsal.ec2.world import Hooks, Instance
from spotheal.fleet.rehearsal.services import account

IMAGE = "public.example/spotheal:1"
Script = Callable[[Job], "Scripted"]


@dataclass
class Scripted:
    """A container that prints `says` at once, `last` as it ends, and ends with `code` after `seconds`."""

    seconds: float = 5.0
    code: int = 0
    says: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    now: Callable[[], float] = lambda: 0.0
    began: float = 0.0
    told: int = 0
    stopped: bool = False
    killed: bool = False

    def poll(self) -> int | None:
        if self.stopped:
            return 75
        return self.code if self.now() - self.began >= self.seconds and not self.killed else None

    def lines(self) -> list[str]:
        found, self.says = self.says, []
        if self.poll() is not None:
            found, self.last = [*found, *self.last], []
        return found

    def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True


class Passing:
    """A clock by hand that lets Batch go on while somebody sleeps."""

    def __init__(self, desk: Desk, batch: Batch) -> None:
        self._desk, self._batch = desk, batch
        self.sleeps: list[Callable[[], object]] = []  # what happens at the next sleeps, one each

    def now(self) -> Any:
        return self._desk.account.clock.now()

    def monotonic(self) -> float:
        return self._desk.account.clock.monotonic()

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        if self.sleeps:
            self.sleeps.pop(0)()
        end = self.monotonic() + seconds
        while self.monotonic() < end:
            self._desk.pass_time(min(0.5, end - self.monotonic()))
            self._batch.tick()
        return until is not None and until.is_set()


@dataclass
class BatchDesk:
    desk: Desk
    batch: Batch
    clock: Passing
    script: dict[int | None, list[Scripted]]  # by index: of its attempts, in order; else `Scripted()`

    def job(self, text: str = "", more: str = "") -> None:
        """Write job.toml; `text` goes below [batch], `more` above it."""
        (self.desk.folder / "job.toml").write_text(
            '[job]\nname = "cifar"\nrepository = "."\ncommand = ["python", "train.py"]\n'
            f'{more}\n[batch]\nimage = "{IMAGE}"\n{text}\n'
        )

    def list(self, count: int) -> str:
        (self.desk.folder / "list.json").write_text(json.dumps([{"n": index} for index in range(count)]))
        return "list.json"

    def run(self, *arguments: str) -> Any:
        return self.desk.run("batch", *arguments)

    def good(self, *arguments: str) -> dict[str, Any]:
        return self.desk.good("batch", *arguments)

    def store(self, run: str) -> Store:
        return Store(self.desk.s3, StoreUrl(BUCKET, f"cifar/{run}"))

    def pass_time(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def calls(self, *, reads: bool = False) -> list[str]:
        return [name for name, code in self.batch.calls if code == "ok" and (reads or not name.startswith(
            ("Describe", "List")))]  # fmt: skip


@pytest.fixture
def batch_desk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchDesk]:
    rules = desk.account.rules
    script: dict[int | None, list[Scripted]] = {}

    def start(job: Job, host: Instance) -> Scripted:
        found = script.get(job.index) or []
        made = found.pop(0) if found else Scripted()
        made.now, made.began = desk.account.clock.monotonic, desk.account.clock.monotonic()
        return made

    batch = Batch(rules, start)
    batch.image_fault = image_fault_of(_images)
    rules.world.hooks = Hooks(on_terminate=batch.host_ended, on_shutdown=lambda host, _: batch.host_shuts_down(host))
    clients = {"batch": InMemoryBatch(batch), "logs": InMemoryBatch(batch, "logs")}

    def client(service: str, region: str, session: Any = None) -> Any:
        if service == "ecr":
            clients[service] = clients.get(service) or boto3.client("ecr", region_name=REGION)
        return clients.get(service) or desk.account.client(service, region, session)

    monkeypatch.setattr(aws, "client", client)
    # moto makes 800 types into XML at each call, which takes it seconds.
    monkeypatch.setattr(types, "describe", lambda session, families, need: [
        one for one in types.KNOWN if types.suits(one, need)])  # fmt: skip
    monkeypatch.setattr(prices, "on_demand_prices", lambda session, types: {})  # moto's list takes it a second
    passing = Passing(desk, batch)
    monkeypatch.setattr(clock, "SystemClock", lambda: passing)
    made = BatchDesk(desk, batch, passing, script)
    made.job()
    ecr_backends.reset()
    account.Account(rules.world)  # AWS's own policies, which moto has not
    yield made


def _images(repository: str) -> set[str] | None:
    found = ecr_backends["123456789012"][REGION].repositories.get(repository)
    return None if found is None else {str(tag) for image in found.images for tag in image.image_tags}


