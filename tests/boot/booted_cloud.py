"""A rehearsal's cloud whose instances boot real operating systems, and a job that is requested there as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import boto3
from booted_machine import BootedMachine
from caged import SECRET

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.scenarios.cloud import LATENCIES, Cloud
from spotheal.fleet.rehearsal.scenarios.serve import environment
from spotheal.fleet.rehearsal.services.authorization import OWNER

REGION = "us-west-2"
FLEETCTL = Path(sys.executable).with_name("fleetctl")
TRAINER = Path(__file__).parent / "count_steps.py"
FLEET: dict[str, Any] = {
    "TargetCapacity": 1,
    "AllocationStrategy": "priceCapacityOptimized",
    "IamFleetRole": "arn:aws:iam::123456789012:role/aws-ec2-spot-fleet-tagging-role",
    "LaunchSpecifications": [
        {
            "ImageId": "ami-0027dfad6168539c7",
            "InstanceType": "g5.xlarge",
            "Placement": {"AvailabilityZone": "us-west-2a, us-west-2b"},
            # The job's own role, as `init` writes it.
            "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/spotheal-job-counting"},
        }
    ],
}
JOB = """\
[job]
name = "counting"
repository = "."
command = ["python3", "count_steps.py", "{seconds}"]
[volume]
size_gib = 1
filesystem = "{filesystem}"
[secrets]
TOKEN = "ssm:/spotheal/counting/TOKEN"
"""
T = TypeVar("T")
MakeMachine = Callable[[Path, Launch, Callable[[Machine], None] | None], Machine]


@dataclass
class Job:
    """One run, as its user sees it."""

    cloud: Cloud
    folder: Path
    store: Store
    volume: str

    def fleetctl(self, *arguments: str) -> str:
        return fleetctl(self.cloud, self.folder, *arguments)

    def status(self) -> dict[str, Any]:
        return self.store.read_status() or {}

    def saved(self) -> int:
        """The last step that the store knows to be saved."""
        return int(((self.status().get("progress") or {}).get("saved") or {}).get("step") or 0)


@contextmanager
def booted_cloud(folder: Path, make: Callable[[Callable[[], Cloud]], MakeMachine], shutdown: float) -> Iterator[Cloud]:
    """`shutdown`: the seconds that AWS leaves an operating system to go down."""
    found: list[Cloud] = []
    zones = tuple(f"{REGION}{letter}" for letter in "ab")
    latencies = replace(LATENCIES, shutdown=shutdown)
    with Cloud(folder, REGION, zones, 0, None, latencies, make(lambda: found[0])) as cloud:
        found.append(cloud)
        cloud.endpoint.authorization.key_counts_as_prefix = False  # the harder of S3's answers: 403 of what is absent
        yield cloud


def nspawn(debian: Path) -> Callable[[Callable[[], Cloud]], MakeMachine]:
    return lambda cloud: lambda folder, launch, on_end: BootedMachine(folder, launch, on_end, debian, cloud)


def request(cloud: Cloud, folder: Path, seconds: float, filesystem: str) -> Job:
    """`fleetctl request` of a job that counts, from a checkout of its own."""
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(seconds=seconds, filesystem=filesystem))
    (folder / "spot_fleet_config.json").write_text(json.dumps(FLEET))
    (folder / "count_steps.py").write_text(TRAINER.read_text())
    who = ["-c", "user.name=user", "-c", "user.email=user@localhost"]
    for argv in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "the job"]):
        subprocess.run(["git", *argv], cwd=folder, check=True, timeout=60)
    fleetctl(cloud, folder, "secret", "put", "TOKEN", given=SECRET)
    said = fleetctl(cloud, folder, "request", "spot_fleet_config.json", "--yes", "--output", "json")
    document = json.loads(said)
    key = cloud.endpoint.key_of_person(OWNER)
    session = boto3.session.Session(key.id, key.secret, region_name=REGION)
    store = Store(session.client("s3", endpoint_url=cloud.url), StoreUrl.parse(document["store"]))
    return Job(cloud, folder, store, document["volume_id"])


def fleetctl(cloud: Cloud, folder: Path, *arguments: str, given: str = "") -> str:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [str(FLEETCTL), *arguments], cwd=folder, input=given, capture_output=True, text=True,
        timeout=120, check=False, env=ours | environment(cloud.endpoint, REGION),
    )  # fmt: skip
    assert done.returncode == 0, f"fleetctl {arguments[0]}: {done.returncode}\n{done.stderr}"
    return done.stdout


def until(what: str, fact: Callable[[], T | None], seconds_max: float, pause: float = 0.2) -> T:
    """What `fact` returns, once it is true."""
    limit = time.monotonic() + seconds_max
    while not (found := fact()):
        if time.monotonic() > limit:
            raise AssertionError(f"not in {seconds_max:.0f} s: {what}")
        time.sleep(pause)
    return found
