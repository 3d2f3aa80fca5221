"""The same lives on the in-memory world and over HTTP on the rehearsal's endpoint, with boto3 and moto's S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from crashes import tell_in
from moto.s3 import models as s3_models
from simulated_life import LifeRegion, Machine

from spotheal.fleet.rehearsal.ec2.rulebook import Faults, Rulebook
from spotheal.fleet.rehearsal.scenarios.api import Endpoint
from spotheal.fleet.rehearsal.services.authorization import OWNER


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """Its store dates objects by the simulated time: what was written last is read first."""
    from spotheal.agent.protocol.clock import SystemClock

    with Endpoint(Rulebook(SystemClock())) as served, pytest.MonkeyPatch.context() as patched:
        patched.setattr(s3_models, "utcnow", lambda: served.rulebook.world.now().replace(tzinfo=None))
        yield served


def over_http(endpoint: Endpoint) -> type[LifeRegion]:
    """A region whose machines speak HTTP to the same rule book, each with its own credentials."""

    class HttpRegion(LifeRegion):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            endpoint.rulebook = self.rules
            self._made: dict[tuple[str, str], Any] = {}
            self.s3 = self._client("s3", OWNER)
            self.s3.faults = Faults()
            existing = self.s3.list_objects_v2 if self.s3.list_buckets()["Buckets"] else None
            if existing is None:
                self.s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
            else:
                for one in existing(Bucket="bucket").get("Contents", []):
                    self.s3.delete_object(Bucket="bucket", Key=one["Key"])

        def _client(self, service: str, key: str) -> Any:
            if (service, key) not in self._made:
                found = self.rules.world.keys.of(key)
                maker: Any = boto3.session.Session(key, found.secret, found.token or None, region_name="us-west-2")
                once = Config(retries={"mode": "standard", "total_max_attempts": 1}, s3={"addressing_style": "path"})
                self._made[service, key] = maker.client(service, endpoint_url=endpoint.url, config=once)
            return self._made[service, key]

        def clients(self, machine: Machine) -> tuple[object, object]:
            key = self.rules.key_of(machine.id)
            return self._client("ec2", key), self._client("s3", key)

        def bodies(self, start: str) -> list[tuple[str, bytes]]:
            listed = self.s3.list_objects_v2(Bucket="bucket", Prefix=start).get("Contents", [])
            keys = [one["Key"] for one in listed]
            return [(key, self.s3.get_object(Bucket="bucket", Key=key)["Body"].read()) for key in keys]

    return HttpRegion


@pytest.mark.parametrize(
    ("story", "crash"),
    [
        ("first run, other zone", None),
        ("notice, other zone", {60: "after", 90: "before"}),
        ("kill, same zone", None),
        ("set-up failed", None),
    ],
)
def test_in_memory_and_over_http_the_agent_decides_and_calls_the_same(endpoint, story, crash):
    in_memory, http = tell_in(LifeRegion, story, "agent", crash), tell_in(over_http(endpoint), story, "agent", crash)
    assert in_memory.calls == http.calls
    assert in_memory.story == http.story
    assert in_memory.time.seconds == http.time.seconds


def test_faults_too_are_the_same_over_http(endpoint):
    """The rule book's own: throttled, stale, and replies that are lost."""

    def life(world):
        with world(seed=7, ending=("done", 6), snapshot_seconds=90.0) as region:
            region.faults.stale_seconds_max, region.faults.throttle, region.faults.lose_reply = 30.0, 0.2, 0.1
            region.at_step[3] = region.interrupt
            region.request("us-west-2a", launch_in=["us-west-2a", "us-west-2b"])
            assert region.time.run(3 * 3600.0, region.is_over)
            return region

    in_memory, http = life(LifeRegion), life(over_http(endpoint))
    assert in_memory.calls == http.calls
