"""Boots that never reach the trainer, again and again, in the rehearsal's cloud: the fleet ends, with the reason.

Instances are processes here, and need no root. What else can be wrong with a boot is in test_userdata.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from booted_cloud import booted_cloud, request, until

from spotheal.agent.protocol.names import LAYOUT
from spotheal.fleet.rehearsal.machines.machines import Machine
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

pytestmark = pytest.mark.processes
SECONDS_MAX = 300.0


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with booted_cloud(tmp_path / "cloud", lambda cloud: Machine, 1.0) as cloud:
        cloud.rules.no_capacity((), 3600.0)  # no instance before the store is spoiled
        yield cloud


def test_five_boots_that_fail_park_the_run(cloud: Cloud, tmp_path: Path) -> None:
    job = request(cloud, tmp_path / "job", 0.1, "xfs")
    said = "could not read the store's wheel boto3"
    job.store.delete(next(key for key, _ in job.store.sizes(LAYOUT.wheels) if "boto3" in key))
    cloud.rules.no_capacity((), 0.0)
    until("the run is parked", lambda: job.status().get("phase") == "parked", SECONDS_MAX)
    until("its fleet is gone", lambda: all(f.state == "cancelled" for f in cloud.rules.fleets()), SECONDS_MAX)
    instances = cloud.rules.instances()
    assert len(instances) == 5 and {one.state for one in instances} == {"terminated"}
    reason = job.status()["reason"]
    assert reason.startswith("5 launches in a row acknowledged no new checkpoint; the last one said: ")
    assert said in reason
    assert all(said in one.tags["spotheal:reason"] for one in instances), "each instance says it in a tag"
    consoles = [(machine.folder / "console.log").read_text() for machine in cloud.machines.all()]
    assert all("this machine cannot start the job: " in text and said in text for text in consoles)
    assert "parked" in job.fleetctl("status")
