"""An operator's folder and account for tests of the verbs: EC2 by the rule book, the rest by moto, time by hand."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from typer.testing import CliRunner, Result

from spotheal.agent.aws import clients
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.fleet.account import service_roles
from spotheal.fleet.cli import app
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook
from spotheal.fleet.rehearsal.ec2.world import Fleet, Volume
from spotheal.fleet.rehearsal.services.client import InMemoryEc2
from spotheal.fleet.rehearsal.services.efs import FileSystems, InMemoryEfs
from spotheal.fleet.rehearsal.services.schedules import InMemoryScheduler, Schedules
from spotheal.fleet.request import wheelhouse
from spotheal.fleet.request.wheelhouse import Wheel, Wheelhouse

REGION = "us-west-2"
BUCKET = f"spotheal-123456789012-{REGION}"
FLEET = {
    "TargetCapacity": 1,
    "AllocationStrategy": "priceCapacityOptimized",
    "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
    "LaunchSpecifications": [
        {
            "ImageId": "ami-12c6146b",
            "InstanceType": kind,
            "Placement": {"AvailabilityZone": "us-west-2a, us-west-2b"},
            "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/agent"},
        }
        for kind in ("g5.xlarge", "g4dn.xlarge")
    ],
}


class HandClock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(1_790_000_000 + self.seconds, timezone.utc)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.seconds += seconds
        return until is not None and until.is_set()


class Account:
    """EC2 by the rule book, the rest by moto; `die_at` lets the n-th changing call reach AWS and its caller die."""

    def __init__(self, others: dict[str, Any]) -> None:
        self.clock = HandClock()
        self.rules = Rulebook(self.clock)
        self.rules.world.images["ami-12c6146b"] = "of FLEET"
        self.die_at, self.calls, self.changed = 0, 0, 0
        self._own = InMemoryEc2(self.rules, validate=True)
        self.schedules = Schedules(self.rules)
        self.scheduler = InMemoryScheduler(self.schedules)
        self.file_systems = FileSystems(self.rules)
        self.efs = InMemoryEfs(self.file_systems)
        self._others = others
        self.rules.world.zone_of_subnet = self._zone_of_subnet

    def _zone_of_subnet(self, subnet: str) -> str | None:
        """Subnets are moto's."""
        found = self._others["ec2"].describe_subnets(Filters=[{"Name": "subnet-id", "Values": [subnet]}])["Subnets"]
        return str(found[0]["AvailabilityZone"]) if found else None

    def client(self, service: str, region: str, session: Any = None) -> Any:
        own = {"ec2": self, "scheduler": self.scheduler, "efs": self.efs}
        return own.get(service) or self._others[service]

    def __getattr__(self, name: str) -> Any:
        if self._own.can_paginate(name) or hasattr(self._own, name):
            return functools.partial(self.counted, getattr(self._own, name), name)
        return getattr(self._others["ec2"], name)

    def get_paginator(self, name: str) -> Any:
        source = self._own if self._own.can_paginate(name) else self._others["ec2"]
        return source.get_paginator(name)

    def counted(self, call: Any, operation: str, *arguments: Any, **keywords: Any) -> Any:
        moto = not operation.islower()
        answer = call(operation, *arguments, **keywords) if moto else call(*arguments, **keywords)
        self.calls += 1
        if not operation.lower().startswith(("describe", "get", "list", "head")):
            self.changed += 1
            if self.changed == self.die_at:
                raise Died
        return answer


class Died(Exception):
    """The operator's machine went away."""


@dataclass
class Desk:
    """An operator's folder and account."""

    folder: Path
    account: Account
    s3: Any

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    def good(self, *arguments: str) -> dict[str, Any]:
        result = self.run(*arguments, "--output", "json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert isinstance(document, dict)
        return document

    def request(self, *arguments: str) -> dict[str, Any]:
        return self.good("request", "--yes", *arguments)

    def store(self, run: str) -> Store:
        return Store(self.s3, StoreUrl(BUCKET, f"cifar/{run}"))

    def volumes(self) -> list[Volume]:
        return [volume for volume in self.account.rules.volumes() if "spotheal:run" in volume.tags]

    def live_fleets(self) -> list[Fleet]:
        return [fleet for fleet in self.account.rules.fleets() if not fleet.state.startswith("cancelled")]

    def pass_time(self, seconds: float) -> None:
        self.account.clock.seconds += seconds
        self.account.rules.tick()

    def end(self, run: str, phase: Phase) -> None:
        """What the agent does at an end."""
        store = self.store(run)
        store.write_status({**(store.read_status() or {}), "phase": phase.value, "reason": "because"})
        fleet = (store.get_json(LAYOUT.fleet_document) or {})["fleet_id"]
        self.account.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    """Two small ones in the place of fifteen: what is in them has tests of its own."""
    folder = tmp_path_factory.mktemp("wheels")
    made = []
    for name in ("spotheal-0-py3-none-any.whl", "six-1-py3-none-any.whl"):
        (folder / name).write_bytes(name.encode())
        made.append(Wheel(name, hashlib.sha256(name.encode()).hexdigest(), len(name)))
    return Wheelhouse(folder, tuple(made))


@functools.cache
def _clients() -> dict[str, Any]:
    """Made once for all modules: each reads megabytes of service model."""
    return {name: boto3.client(name, region_name=REGION) for name in ("ec2", "s3", "sts", "pricing", "iam", "kms")}


@pytest.fixture(scope="module")
def moto_clients() -> Iterator[dict[str, Any]]:
    with mock_aws():
        yield _clients()


@functools.cache
def _repository() -> Path:
    """A repository of one commit, to be copied: three programs less in each test."""
    folder = Path(tempfile.mkdtemp(prefix="desk-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "train.py").write_text("print(1)\n")
    for arguments in (["init", "-q", "--template="], ["add", "train.py"], ["commit", "-qm", "x"]):
        command = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a", *arguments]
        subprocess.run(command, cwd=folder, check=True)
    return folder


def _make_roles(iam: Any) -> None:
    """Those that `FLEET` names, of somebody's own making."""
    statement = {"Effect": "Allow", "Action": "ec2:Describe*", "Resource": "*"}
    nothing = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    for name in ("fleet", "better", "agent"):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=nothing)
        iam.put_role_policy(RoleName=name, PolicyName="theirs", PolicyDocument=nothing)
    for name in service_roles.ROLES.values():  # of an account that has had spot instances before
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=nothing)
    iam.create_instance_profile(InstanceProfileName="agent")
    iam.add_role_to_instance_profile(InstanceProfileName="agent", RoleName="agent")


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheels: Wheelhouse, moto_clients: dict[str, Any]
) -> Iterator[Desk]:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(wheelhouse, "build", lambda: wheels)
    folder = tmp_path / "job"
    shutil.copytree(_repository(), folder)
    (folder / "spot_fleet_config.json").write_text(json.dumps(FLEET))
    (folder / "job.toml").write_text('[job]\nname = "cifar"\nrepository = "."\ncommand = ["python", "train.py"]\n')
    monkeypatch.chdir(folder)
    s3_backends.reset()
    iam_backends.reset()
    _make_roles(moto_clients["iam"])
    account = Account(moto_clients)
    for client in moto_clients.values():
        monkeypatch.setattr(client, "_make_api_call", functools.partial(account.counted, client._make_api_call))
    monkeypatch.setattr(clients, "client", account.client)
    yield Desk(folder, account, moto_clients["s3"])
