"""What agent and fleetctl ask of AWS only now and then: an EC2 fleet cancelled or made smaller, an upload given up, a
surplus snapshot deleted, the zones of a fleet that names none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import structlog
from fleet_desk import Desk, desk, moto_clients, wheels
from moto import mock_aws

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.life.finish import cancel
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import TAG_JOB, TAG_RUN, Phase, StoreUrl
from spotheal.agent.record.results import InStore
from spotheal.agent.sweep.worker import Worker
from spotheal.fleet.files.config import FleetConfig
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2
from spotheal.fleet.request import steps, submit
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.session import Session

__all__ = ["desk", "moto_clients", "wheels"]  # fixtures
LOG = structlog.get_logger()
QUICK = Latencies(running=0, shutdown=0, launch=0, replacement=0, set_aside=0, fleet_terminate=0)
PLACE = {"AvailabilityZone": "us-west-2a"}
LAUNCH = {"ImageId": "ami-00000000000000001", "InstanceType": "g5.xlarge", "Placement": PLACE}


def spot_fleet(ec2: Any) -> str:
    config = {"IamFleetRole": "arn:aws:iam::123456789012:role/fleet", "TargetCapacity": 2, "Type": "maintain",
              "AllocationStrategy": "lowestPrice", "LaunchSpecifications": [LAUNCH]}  # fmt: skip
    return str(ec2.request_spot_fleet(SpotFleetRequestConfig=config)["SpotFleetRequestId"])


def ec2_fleet(ec2: Any) -> str:
    ec2.create_launch_template(LaunchTemplateName="one", LaunchTemplateData=LAUNCH)
    template = {"LaunchTemplateName": "one", "Version": "$Latest"}
    return str(ec2.create_fleet(
        LaunchTemplateConfigs=[{"LaunchTemplateSpecification": template}], Type="maintain",
        TargetCapacitySpecification={"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"},
    )["FleetId"])  # fmt: skip


KINDS = {"spot fleet": spot_fleet, "EC2 fleet": ec2_fleet}


def begun(kind: str) -> tuple[Rulebook, str, str]:
    """A fleet of two machines: the rule book, the fleet, one of its instances."""
    rules = Rulebook(SystemClock(), latencies=QUICK, seed=1)
    fleet = KINDS[kind](InMemoryEc2(rules))
    for _ in range(20):
        rules.tick()
    first = min(one.id for one in rules.instances())
    return rules, fleet, first


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_run_cancels_its_fleet_whichever_kind_it_is(kind: str) -> None:
    rules, fleet, instance = begun(kind)
    cloud = Ec2(InMemoryEc2(rules, instance))
    work: Any = SimpleNamespace(cloud=cloud, clock=SystemClock(), log=LOG, instance=instance)
    assert cancel(work, Event())
    (found,) = [one for one in rules.fleets() if one.id == fleet]
    assert found.state.startswith(("cancelled", "deleted"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_without_runs_makes_its_sweeps_fleet_smaller_and_goes(kind: str) -> None:
    rules, fleet, instance = begun(kind)
    stopped = Event()
    stopped.set()
    worker: Any = SimpleNamespace(
        _cloud=Ec2(InMemoryEc2(rules, instance)), _here=SimpleNamespace(instance=instance), _log=LOG, _store=None,
        _clock=SystemClock(), _idle_since=0.0,
        _world=SimpleNamespace(logs=SimpleNamespace(ship=lambda *_: None), asked_to_stop=stopped),
    )  # fmt: skip
    Worker._go(worker, 1)
    (found,) = [one for one in rules.fleets() if one.id == fleet]
    assert found.target == 1
    rules.tick()
    assert rules.instance(instance).state in ("shutting-down", "terminated")  # type: ignore[union-attr]


@pytest.fixture
def s3() -> Iterator[Any]:
    with mock_aws():
        client: Any = boto3.client("s3", region_name="us-west-2")
        client.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        yield client


def test_an_upload_in_parts_that_fails_leaves_no_parts_behind(s3: Any, tmp_path: Path) -> None:
    """Parts that are not given up cost money until somebody deletes them."""

    def refused(**_: Any) -> Any:
        return SimpleNamespace(status_code=403, headers={}, content=b""), {
            "Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}
        }  # fmt: skip

    s3.meta.events.register("before-call.s3.UploadPart", refused)
    large = SimpleNamespace(name="spotheal-0-py3-none-any.whl", size=1)
    (tmp_path / large.name).write_bytes(b"x" * (9 << 20))
    ready: Any = SimpleNamespace(wheelhouse=SimpleNamespace(wheels=[large], folder=tmp_path))
    with pytest.raises(SpothealError):
        submit._upload_wheels(Store(s3, StoreUrl("bucket", "j/r")), ready)
    (tmp_path / "weights").write_bytes(b"x" * (9 << 20))
    place = InStore(Store(s3, StoreUrl("bucket", "j/r")), "results/")
    (put,) = place.put([("weights", tmp_path / "weights")])
    assert put.fault and not put.again
    assert s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []


# ------------------------------------------------------------------------------------------------------------- fleetctl
def test_clean_deletes_the_snapshots_of_a_run_that_is_done(desk: Desk) -> None:
    done = desk.request()
    desk.pass_time(60)
    tags = [{"Key": f"spotheal:{key}", "Value": value} for key, value in {"job": "cifar", "run": done["run"]}.items()]
    made = desk.account.create_snapshot(
        VolumeId=done["volume_id"], TagSpecifications=[{"ResourceType": "snapshot", "Tags": tags}]
    )
    desk.end(done["run"], Phase.DONE)
    desk.store(done["run"]).put_bytes("results/model", b"x")
    desk.pass_time(3600)
    assert made["SnapshotId"] in desk.good("clean", "cifar", "--yes")["deleted"]


def test_launch_templates_that_name_no_zone_may_use_all_of_the_region(desk: Desk) -> None:
    template = {"LaunchTemplateSpecification": {"LaunchTemplateName": "theirs", "Version": "1"}}
    fleet = FleetConfig({"TargetCapacity": 1, "LaunchTemplateConfigs": [template]}, "spot_fleet_config.json")
    zones = steps.zones_of(Session("us-west-2"), fleet)
    assert {"us-west-2a", "us-west-2b", "us-west-2c"} <= set(zones)


def test_a_sweep_of_an_ec2_fleet_that_begins_a_run_again_gets_its_instance_back() -> None:
    from spotheal.fleet.sweep import retry

    rules, fleet, _ = begun("EC2 fleet")
    sweep = Run("digits", "01J8Z3T2QK5V9W7X6Y5Z4A3B2C", Store(None, StoreUrl("b", "run")))
    tags = {TAG_RUN: sweep.id, TAG_JOB: sweep.job}
    rules.world.fleets.put(replace(next(one for one in rules.fleets() if one.id == fleet), tags=tags))
    client = InMemoryEc2(rules)
    session: Any = SimpleNamespace(client=lambda _: client, ec2=Ec2(client))
    assert 3 == retry.make_room(session, sweep, fleet, 1, {"runs": {"running": 2, "waiting": 1}})
    (found,) = [one for one in rules.fleets() if one.id == fleet]
    assert found.target == 3
