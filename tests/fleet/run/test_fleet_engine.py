"""`[fleet] engine`: the same file and verbs over Spot Fleet and EC2 Fleet."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from fleet_desk import FLEET, Desk, Died, desk, moto_clients, wheels

from spotheal.agent.protocol.errors import ConfigError, ExitCode
from spotheal.fleet.files.shape import input_shape
from spotheal.fleet.run import ec2fleet, engine

__all__ = ["desk", "moto_clients", "wheels"]
EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)


def use_ec2_fleet(desk: Desk) -> None:
    path = desk.folder / "job.toml"
    path.write_text(path.read_text() + '[fleet]\nengine = "ec2-fleet"\n')


def config(**more: Any) -> dict[str, Any]:
    """As `fleet.request` has it when everything is filled in."""
    template = {"LaunchTemplateSpecification": {"LaunchTemplateName": "t", "Version": "1"},
                "Overrides": [{"InstanceType": "g5.xlarge", "AvailabilityZone": "us-west-2a"}]}  # fmt: skip
    return {"Type": "maintain", "TargetCapacity": 1, "AllocationStrategy": "priceCapacityOptimized",
            "IamFleetRole": "arn:aws:iam::1:role/f", "LaunchTemplateConfigs": [template], **more}  # fmt: skip


def test_the_operators_file_makes_an_ec2_fleet_that_launches_a_spot_instance_of_the_run(desk: Desk) -> None:
    use_ec2_fleet(desk)
    done = desk.request()
    assert done["fleet_id"].startswith("fleet-")
    assert done["request"]["request_spot_fleet"] is None
    (fleet,) = desk.live_fleets()
    assert (fleet.id, fleet.target, fleet.on_demand, fleet.kind) == (done["fleet_id"], 1, 0, "maintain")
    assert fleet.tags["spotheal:run"] == done["run"]
    desk.pass_time(60)
    (instance,) = desk.account.rules.instances()
    assert instance.is_spot
    assert instance.tags["spotheal:run"] == done["run"]


def test_a_spot_fleet_that_the_organisation_forbids_names_the_other_engine(desk: Desk) -> None:
    """Control Tower's CT.EC2.PV.6 denies RequestSpotFleet in a service control policy."""
    told = "is not authorized to perform: ec2:RequestSpotFleet with an explicit deny in a service control policy"
    desk.account.rules.authorize = lambda operation, *_: told if operation == "RequestSpotFleet" else ""
    refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.PERMISSION
    assert 'engine = "ec2-fleet"' in refused.stderr and "organisation" in refused.stderr
    desk.account.rules.authorize = lambda operation, *_: ""
    use_ec2_fleet(desk)
    assert desk.request()["fleet_id"].startswith("fleet-")


def test_status_and_cancel_find_an_ec2_fleet_as_they_find_a_spot_fleet(desk: Desk) -> None:
    use_ec2_fleet(desk)
    done = desk.request()
    assert desk.good("status")["fleet"] == {"id": done["fleet_id"], "state": "active", "live": True}
    assert desk.request()["fleet"]["id"] == done["fleet_id"], "a live fleet is shown, not doubled"
    desk.good("cancel", "--yes")
    assert desk.live_fleets() == []
    assert desk.good("status")["fleet"]["live"] is False


def test_an_interrupted_request_of_an_ec2_fleet_goes_on_with_the_same_fleet(desk: Desk) -> None:
    use_ec2_fleet(desk)
    changes = 0
    while True:
        changes += 1
        desk.account.changed, desk.account.die_at = 0, changes
        result = desk.run("request", "--yes")
        if not isinstance(result.exception, Died) and result.exit_code != ExitCode.UNEXPECTED:
            break
    assert changes > 5
    assert len(desk.live_fleets()) == 1
    assert len(desk.volumes()) == 1


def test_what_is_rendered_for_the_aws_cli_is_what_create_fleet_takes(desk: Desk) -> None:
    use_ec2_fleet(desk)
    assert desk.run("request", "--render", "out.json").exit_code == 0
    arguments = json.loads((desk.folder / "out.json").read_text())
    assert set(arguments) <= set(input_shape("CreateFleet").members)
    assert "create-fleet --cli-input-json" in (desk.folder / "out.json.commands").read_text()


def test_prices_strategies_and_policies_get_the_names_of_create_fleet() -> None:
    made = ec2fleet.create_fleet(config(
        SpotPrice="0.5", SpotMaxTotalPrice="0.6", InstanceInterruptionBehavior="terminate",
        ExcessCapacityTerminationPolicy="noTermination", OnDemandTargetCapacity=0, OnDemandMaxTotalPrice="2",
        TagSpecifications=[{"ResourceType": "spot-fleet-request", "Tags": [{"Key": "a", "Value": "b"}]}],
        ValidUntil="2026-12-01T00:00:00Z", TerminateInstancesWithExpiration=True,
    ))  # fmt: skip
    assert made["SpotOptions"] == {
        "AllocationStrategy": "price-capacity-optimized", "InstanceInterruptionBehavior": "terminate",
        "MaxTotalPrice": "0.6",
    }  # fmt: skip
    assert made["OnDemandOptions"] == {"MaxTotalPrice": "2"}
    assert made["ExcessCapacityTerminationPolicy"] == "no-termination"
    assert made["TagSpecifications"][0]["ResourceType"] == "fleet"
    assert made["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"InstanceType": "g5.xlarge", "AvailabilityZone": "us-west-2a", "MaxPrice": "0.5"}
    ]
    assert set(made) <= set(input_shape("CreateFleet").members)


def test_an_overrides_own_price_goes_before_that_of_the_fleet() -> None:
    given = config(SpotPrice="0.5")
    given["LaunchTemplateConfigs"][0]["Overrides"][0]["SpotPrice"] = "0.3"
    made = ec2fleet.create_fleet(given)
    assert made["LaunchTemplateConfigs"][0]["Overrides"][0]["MaxPrice"] == "0.3"
    assert given["LaunchTemplateConfigs"][0]["Overrides"][0]["SpotPrice"] == "0.3", "the file's document is left alone"


def test_a_setting_that_an_ec2_fleet_lacks_is_refused_and_named(desk: Desk) -> None:
    use_ec2_fleet(desk)
    classic = {"ClassicLoadBalancersConfig": {"ClassicLoadBalancers": [{"Name": "x"}]}}
    balanced = {**FLEET, "LoadBalancersConfig": classic}
    (desk.folder / "spot_fleet_config.json").write_text(json.dumps(balanced))
    for verb in (["request", "--yes"], ["validate"]):
        refused = desk.run(*verb)
        assert refused.exit_code == ExitCode.USAGE
        assert "LoadBalancersConfig: an EC2 fleet has no such setting" in refused.output
    assert desk.live_fleets() == []


def test_every_setting_of_a_spot_fleet_is_either_taken_over_or_refused() -> None:
    members = set(input_shape("RequestSpotFleet").members["SpotFleetRequestConfig"].members)
    refused = {name for name in members if ec2fleet.check({name: None})}
    assert refused == {"FulfilledCapacity", "LoadBalancersConfig", "OnDemandFulfilledCapacity",
                       "SpotMaintenanceStrategies", "TargetCapacityUnitType"}  # fmt: skip
    with pytest.raises(ConfigError, match="SpotMaintenanceStrategies"):
        ec2fleet.create_fleet(config(SpotMaintenanceStrategies={}))


@pytest.mark.parametrize("kind", ["spot-fleet", "ec2-fleet"])
def test_history_and_state_read_alike_for_both(desk: Desk, kind: str) -> None:
    if kind == "ec2-fleet":
        use_ec2_fleet(desk)
    fleet = desk.request()["fleet_id"]
    desk.pass_time(60)
    described = engine.describe(desk.account, fleet)
    assert described is not None
    assert (described.state, described.target, described.on_demand, described.is_live) == ("active", 1, 0, True)
    events = engine.history(desk.account, fleet, EPOCH)
    assert [(event.kind, event.subtype) for event in events] == [
        ("fleetRequestChange", "submitted"), ("fleetRequestChange", "active"), ("instanceChange", "launched")
    ]  # fmt: skip
    assert events[-1].instance == desk.account.rules.instances()[0].id
    assert engine.describe(desk.account, "fleet-" + "0" * 8 if kind == "ec2-fleet" else "sfr-" + "0" * 8) is None


def test_the_engine_is_one_of_two(tmp_path: Path, desk: Desk) -> None:
    path = desk.folder / "job.toml"
    path.write_text(path.read_text() + '[fleet]\nengine = "karpenter"\n')
    refused = desk.run("validate")
    assert refused.exit_code == ExitCode.USAGE
    assert 'engine: must be one of "spot-fleet", "ec2-fleet"' in refused.output
