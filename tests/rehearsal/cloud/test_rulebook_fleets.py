"""Fleets and spot instances by the rule book: replacement, notices, capacity, the ends, launch templates."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Any

import pytest
from rulebook_world import BEGIN, ROLE, SPECIFICATION, A, B, C, Region, refused


@pytest.fixture()
def region() -> Region:
    return Region()


def placed(zones: str, **more: Any) -> dict[str, Any]:
    return {**SPECIFICATION, "Placement": {"AvailabilityZone": zones}, **more}


# ------------------------------------------------------------------------------------------------------------- request
def test_a_fleet_launches_its_instances_with_its_tag(region: Region) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "spotheal:run", "Value": "01R"}]}]
    fleet = region.a_fleet(TargetCapacity=2, LaunchSpecifications=[placed(f"{A}, {B}", TagSpecifications=tags)])
    assert "active" == region.fleet(fleet)["SpotFleetRequestState"]
    assert "pending_fulfillment" == region.fleet(fleet)["ActivityStatus"]
    region.after(20)
    assert "fulfilled" == region.fleet(fleet)["ActivityStatus"]
    instances = [region.instance(one) for one in region.running(fleet)]
    assert 2 == len(instances)
    for instance in instances:
        found = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        assert {"aws:ec2spot:fleet-request-id": fleet, "spotheal:run": "01R"} == found
        assert instance["Placement"]["AvailabilityZone"] in (A, B)
        assert "spot" == instance["InstanceLifecycle"]
    listed = region.ec2.describe_spot_fleet_instances(SpotFleetRequestId=fleet)["ActiveInstances"]
    assert {one["InstanceId"] for one in instances} == {one["InstanceId"] for one in listed}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"LaunchSpecifications": None}, "InvalidSpotFleetRequestConfig"),
        ({"LaunchTemplateConfigs": [{"LaunchTemplateSpecification": {"LaunchTemplateName": "abc", "Version": "1"}}]},
         "InvalidSpotFleetRequestConfig"),
        ({"LaunchSpecifications": [placed("eu-west-1a")]}, "InvalidSpotFleetRequestConfig"),
        ({"LaunchSpecifications": [{"InstanceType": "p3.2xlarge"}]}, "InvalidSpotFleetRequestConfig"),
        ({"LaunchSpecifications": [{**SPECIFICATION, "InstanceType": "g5.xlage"}]}, "InvalidSpotFleetRequestConfig"),
        ({"LaunchSpecifications": [{**SPECIFICATION, "SubnetId": "subnet-1"}]}, "InvalidSubnetID.NotFound"),
        ({"ValidUntil": BEGIN - timedelta(hours=1)}, "InvalidSpotFleetRequestConfig"),
        ({"IamFleetRole": "fleet"}, "InvalidSpotFleetRequestConfig"),
    ],
)  # fmt: skip
def test_a_fleet_that_aws_would_refuse_is_refused(region: Region, config: dict[str, Any], code: str) -> None:
    with pytest.raises(Exception, match=code.replace(".", r"\.")):
        region.a_fleet(**config)
    assert [] == region.rules.fleets()


def test_user_data_has_16384_bytes_at_most_before_it_is_encoded(region: Region) -> None:
    def encoded(size: int) -> str:
        return base64.b64encode(b"x" * size).decode()

    region.a_fleet(LaunchSpecifications=[placed(A, UserData=encoded(16_384))])
    with pytest.raises(Exception, match="limited to 16384 bytes"):
        region.a_fleet(LaunchSpecifications=[placed(A, UserData=encoded(16_385))])
    region.after(20)
    assert b"x" * 16_384 == region.rules.instances()[0].user_data


def test_the_same_client_token_is_the_same_fleet(region: Region) -> None:
    assert region.a_fleet(ClientToken="t") == region.a_fleet(ClientToken="t")
    with pytest.raises(Exception, match="IdempotentParameterMismatch"):
        region.a_fleet(ClientToken="t", TargetCapacity=2)


# --------------------------------------------------------------------------------------------------------- replacement
def test_an_instance_under_notice_runs_on_beside_its_replacement(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.pin_next_zone(B)
    region.rules.interrupt(first)
    request = region.ec2.describe_spot_instance_requests()["SpotInstanceRequests"][0]
    assert ("closed", "marked-for-termination") == (request["State"], request["Status"]["Code"])
    assert "running" == region.state_of(first)
    region.after(75)
    second = next(one for one in region.running(fleet) if one != first)
    assert [first, second] == region.running(fleet)
    assert B == region.instance(second)["Placement"]["AvailabilityZone"]
    region.after(45)
    assert "shutting-down" == region.state_of(first)
    assert ("on_shutdown", first, 20.0) == region.told[-1]
    region.after(20)
    assert "terminated" == region.state_of(first)
    assert [second] == region.running(fleet)


def test_the_notice_says_when(region: Region) -> None:
    _, instance = region.a_fleet_that_runs()
    region.rules.interrupt(instance)
    found = region.rules.instance(instance)
    assert found is not None and found.notice is not None
    assert ("terminate", BEGIN + timedelta(seconds=140)) == (found.notice.action, found.notice.time)


def test_a_withdrawn_notice_comes_to_nothing(region: Region) -> None:
    _, instance = region.a_fleet_that_runs()
    region.rules.interrupt(instance)
    region.rules.withdraw_notice(instance)
    region.after(300)
    found = region.rules.instance(instance)
    assert found is not None
    assert ("running", None) == (found.state, found.notice)


def test_a_second_notice_replaces_the_first(region: Region) -> None:
    _, instance = region.a_fleet_that_runs()
    region.rules.interrupt(instance)
    region.after(60)
    region.rules.interrupt(instance)
    region.after(119)
    assert "running" == region.state_of(instance)
    region.after(1)
    assert "shutting-down" == region.state_of(instance)


def test_an_interruption_that_stops_keeps_the_volume_attached(region: Region) -> None:
    fleet, instance = region.a_fleet_that_runs(zones=A)
    volume = region.a_volume(A)
    region.attached(volume, instance)
    region.rules.interrupt(instance, action="stop")
    region.after(140)
    assert "stopped" == region.state_of(instance)
    assert instance == region.volume(volume)["Attachments"][0]["InstanceId"]
    assert 1 == len(region.running(fleet))
    assert ("on_stop", instance) == region.told[-1]


def test_a_stopped_instance_ends_with_its_fleet(region: Region) -> None:
    fleet, instance = region.a_fleet_that_runs()
    region.rules.interrupt(instance, action="stop")
    region.after(140)
    region.ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)
    region.after(30)
    assert "terminated" == region.state_of(instance)
    assert "cancelled" == region.fleet(fleet)["SpotFleetRequestState"]


def test_a_fleet_has_its_share_on_demand(region: Region) -> None:
    fleet = region.a_fleet(TargetCapacity=3, OnDemandTargetCapacity=1)
    region.after(20)
    assert [False, True, True] == sorted(one.is_spot for one in region.rules.instances())
    assert 1.0 == region.fleet(fleet)["SpotFleetRequestConfig"]["OnDemandFulfilledCapacity"]


def test_a_killed_instance_is_gone_at_once_and_replaced(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.kill(first)
    assert "terminated" == region.state_of(first)
    assert ("on_terminate", first) == region.told[-1]
    region.after(59)
    assert [] == region.running(fleet)
    region.after(11)
    assert 1 == len(region.running(fleet))


def test_an_instance_that_switches_itself_off_is_terminated_and_replaced(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.powered_off(first)
    assert "terminated" == region.state_of(first)
    assert "Client.InstanceInitiatedShutdown" == region.instance(first)["StateReason"]["Code"]
    region.after(70)
    assert 1 == len(region.running(fleet))


def test_an_instance_that_is_terminated_by_hand_is_replaced(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.ec2.terminate_instances(InstanceIds=[first])
    region.after(80)
    assert 1 == len(region.running(fleet))


def test_a_fleet_of_type_request_replaces_nothing(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs(Type="request")
    region.rules.kill(first)
    region.after(600)
    assert [] == region.running(fleet)


def test_a_rebalance_recommendation_ends_nothing(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.rebalance(first)
    region.after(600)
    assert [first] == region.running(fleet)


def test_without_capacity_nothing_is_launched_and_the_history_says_so(region: Region) -> None:
    region.rules.no_capacity([A, B], 300)
    fleet = region.a_fleet()
    region.after(200)
    assert [] == region.running(fleet)
    assert "error" == region.fleet(fleet)["ActivityStatus"]
    records = region.ec2.describe_spot_fleet_request_history(
        SpotFleetRequestId=fleet, StartTime=BEGIN, EventType="error"
    )["HistoryRecords"]
    assert ["allLaunchSpecsTemporarilyBlacklisted"] == [one["EventInformation"]["EventSubType"] for one in records]
    assert "Error message: There is no Spot capacity" in told_of(region, fleet)[0]
    region.after(300)
    assert [] == region.running(fleet)  # capacity has come back, and every pool is still set aside
    region.after(13 * 60)
    assert 1 == len(region.running(fleet))


def test_an_on_demand_instance_does_not_wait_until_spot_pools_are_tried_again(region: Region) -> None:
    region.rules.no_capacity([A, B], 3600)
    fleet = region.a_fleet()
    region.after(60)
    region.ec2.modify_spot_fleet_request(SpotFleetRequestId=fleet, OnDemandTargetCapacity=1)
    region.after(60)
    assert 1 == len(region.running(fleet))


def test_capacity_is_missing_only_where_it_is_missing(region: Region) -> None:
    region.rules.no_capacity([A], 300)
    _, instance = region.a_fleet_that_runs()
    assert B == region.instance(instance)["Placement"]["AvailabilityZone"]
    assert "InsufficientInstanceCapacity" == refused(
        region.ec2.run_instances, ImageId="ami-0abc", MinCount=1, MaxCount=1, Placement={"AvailabilityZone": A}
    )


def told_of(region: Region, fleet: str) -> list[str]:
    return [event.description for event in region.rules.history(fleet) if event.type in ("error", "information")]


def test_a_price_below_the_market_launches_nothing(region: Region) -> None:
    fleet = region.a_fleet(SpotPrice="0.01")
    region.after(60)
    assert [] == region.running(fleet)
    assert "Spot bid price is less than Spot market price" in told_of(region, fleet)[0]
    cheap = placed(A, SpotPrice="0.01")
    mixed = region.a_fleet(LaunchSpecifications=[cheap, placed(B, SpotPrice="0.5")])
    region.after(60)
    assert [B] == [region.instance(one)["Placement"]["AvailabilityZone"] for one in region.running(mixed)]


def test_a_quota_is_kept_and_named(region: Region) -> None:
    region.rules.limit_instances(1)
    fleet = region.a_fleet(TargetCapacity=2)
    region.after(60)
    assert 1 == len(region.running(fleet))
    assert "Error message: Spot Max Instance Count Exceeded" in told_of(region, fleet)[1]
    region.rules.limit_instances(None)
    region.after(14 * 60)
    assert 2 == len(region.running(fleet))


def test_an_image_that_is_gone_launches_nothing_and_is_named(region: Region) -> None:
    region.rules.refuse_launches("ami-0abc", "The image id '[ami-0abc]' does not exist")
    fleet = region.a_fleet()
    region.after(60)
    assert [] == region.running(fleet)
    assert "does not exist" in told_of(region, fleet)[0]


def test_the_history_tells_the_story(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.interrupt(first)
    region.after(145)
    region.ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)
    region.after(30)
    told = [event.sub_type for event in region.rules.history(fleet)]
    assert ["submitted", "active", "launched", "termination_notified", "launched", "terminated",
            "cancelled_terminating"] == told[:7]  # fmt: skip
    assert {"terminated", "cancelled"} == set(told[7:])


# ---------------------------------------------------------------------------------------------------------------- ends
def test_a_cancelled_fleet_ends_its_instances_and_stays_visible_for_48_hours(region: Region) -> None:
    fleet, instance = region.a_fleet_that_runs()
    answer = region.ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)
    assert "cancelled_terminating" == answer["SuccessfulFleetRequests"][0]["CurrentSpotFleetRequestState"]
    assert "running" == region.state_of(instance)
    region.after(30)
    assert "terminated" == region.state_of(instance)
    assert "cancelled" == region.fleet(fleet)["SpotFleetRequestState"]
    region.after(47 * 3600)
    assert "cancelled" == region.fleet(fleet)["SpotFleetRequestState"]
    region.after(3600)
    assert "InvalidSpotFleetRequestId.NotFound" == refused(
        region.ec2.describe_spot_fleet_requests, SpotFleetRequestIds=[fleet]
    )


def test_a_fleet_is_cancelled_without_its_instances(region: Region) -> None:
    fleet, instance = region.a_fleet_that_runs()
    region.ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=False)
    region.after(600)
    assert ("cancelled_running", "running") == (region.fleet(fleet)["SpotFleetRequestState"], region.state_of(instance))
    region.rules.kill(instance)
    region.after(600)
    assert "cancelled" == region.fleet(fleet)["SpotFleetRequestState"]
    assert [] == region.running(fleet)


def test_what_cannot_be_cancelled_is_named_inside_the_answer(region: Region) -> None:
    fleet, _ = region.a_fleet_that_runs()
    unknown = "sfr-00000000-0000-4000-8000-000000000000"

    def cancel(*ids: str) -> list[str]:
        answer = region.ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=list(ids), TerminateInstances=True)
        return [one["Error"]["Code"] for one in answer["UnsuccessfulFleetRequests"]]

    region.rules.faults.cancels_unsuccessful = 1
    assert ["unexpectedError"] == cancel(fleet)
    assert ["fleetRequestIdDoesNotExist", "fleetRequestIdMalformed"] == cancel(fleet, unknown, "fleet")
    assert ["fleetRequestNotInCancellableState"] == cancel(fleet)


@pytest.mark.parametrize(("terminate", "state"), [(True, "terminated"), (False, "running")])
def test_a_fleet_expires(region: Region, terminate: bool, state: str) -> None:
    until = BEGIN + timedelta(hours=1)
    fleet, instance = region.a_fleet_that_runs(ValidUntil=until, TerminateInstancesWithExpiration=terminate)
    region.after(3600)
    assert region.fleet(fleet)["SpotFleetRequestState"].startswith("cancelled")
    region.after(60)
    assert state == region.state_of(instance)
    region.rules.kill(instance)
    region.after(600)
    assert [] == region.running(fleet)


def test_a_fleet_of_target_zero_launches_nothing_more(region: Region) -> None:
    fleet, instance = region.a_fleet_that_runs()
    region.ec2.modify_spot_fleet_request(SpotFleetRequestId=fleet, TargetCapacity=0)
    region.after(30)
    assert "terminated" == region.state_of(instance)
    region.after(600)
    assert [] == region.running(fleet)
    region.ec2.modify_spot_fleet_request(SpotFleetRequestId=fleet, TargetCapacity=2)
    region.after(80)
    assert 2 == len(region.running(fleet))


def test_excess_instances_are_kept_where_the_policy_says_so(region: Region) -> None:
    fleet, instance = region.a_fleet_that_runs()
    region.ec2.modify_spot_fleet_request(
        SpotFleetRequestId=fleet, TargetCapacity=0, ExcessCapacityTerminationPolicy="noTermination"
    )
    region.after(600)
    assert "running" == region.state_of(instance)


# ----------------------------------------------------------------------------------------------- templates, EC2 fleets
def a_template(region: Region, **data: Any) -> str:
    made = region.ec2.create_launch_template(
        LaunchTemplateName="spotheal-digits",
        LaunchTemplateData={
            "ImageId": "ami-0abc",
            "UserData": base64.b64encode(b"#!/bin/sh").decode(),
            "IamInstanceProfile": {"Name": "trainer"},
            "MetadataOptions": {"HttpTokens": "required"},
            **data,
        },
        ClientToken="token",
    )
    return str(made["LaunchTemplate"]["LaunchTemplateId"])


def overrides(*zones: str) -> list[dict[str, Any]]:
    return [{"InstanceType": "g5.xlarge", "AvailabilityZone": zone} for zone in zones]


def test_a_spot_fleet_launches_from_a_template(region: Region) -> None:
    template = a_template(region)
    config = {
        "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "$Latest"},
        "Overrides": overrides(C),
    }
    fleet = region.a_fleet(LaunchSpecifications=None, LaunchTemplateConfigs=[config])
    region.after(20)
    instance = region.rules.instances()[0]
    assert (fleet, C, "g5.xlarge", b"#!/bin/sh", "trainer") == (
        instance.fleet, instance.zone, instance.type, instance.user_data, instance.role
    )  # fmt: skip


def test_a_template_is_made_once_has_versions_and_is_deleted(region: Region) -> None:
    template = a_template(region)
    assert template == a_template(region)
    assert "InvalidLaunchTemplateName.AlreadyExistsException" == refused(
        region.ec2.create_launch_template, LaunchTemplateName="spotheal-digits", LaunchTemplateData={"ImageId": "ami-1"}
    )
    region.ec2.create_launch_template_version(
        LaunchTemplateId=template, SourceVersion="1", LaunchTemplateData={"ImageId": "ami-2"}
    )
    versions = region.ec2.describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"]
    assert [(2, "ami-2", False), (1, "ami-0abc", True)] == [
        (one["VersionNumber"], one["LaunchTemplateData"]["ImageId"], one["DefaultVersion"]) for one in versions
    ]
    assert "UserData" in versions[0]["LaunchTemplateData"]
    region.ec2.modify_launch_template(LaunchTemplateId=template, DefaultVersion="2")
    found = region.ec2.describe_launch_templates(LaunchTemplateNames=["spotheal-digits"])["LaunchTemplates"][0]
    assert (2, 2) == (found["DefaultVersionNumber"], found["LatestVersionNumber"])
    region.ec2.delete_launch_template(LaunchTemplateName="spotheal-digits")
    assert "InvalidLaunchTemplateName.NotFoundException" == refused(
        region.ec2.describe_launch_templates, LaunchTemplateNames=["spotheal-digits"]
    )


@pytest.mark.parametrize("types", [["g5.xlage"], ["g4dn.xlarge", "g5.xlage"]])
def test_an_ec2_fleet_with_a_type_that_aws_does_not_know_is_refused(region: Region, types: list[str]) -> None:
    with pytest.raises(Exception, match=r"InvalidFleetConfig\).*g5\.xlage"):
        region.ec2.create_fleet(
            TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
            LaunchTemplateConfigs=[{
                "LaunchTemplateSpecification": {"LaunchTemplateId": a_template(region), "Version": "1"},
                "Overrides": [{"InstanceType": name} for name in types],
            }],
        )  # fmt: skip
    assert [] == region.rules.fleets()


def an_ec2_fleet(region: Region, **more: Any) -> str:
    template = a_template(region)
    made = region.ec2.create_fleet(
        Type="maintain",
        TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "1"},
                "Overrides": overrides(A, B),
            }
        ],
        **more,
    )
    return str(made["FleetId"])


def test_an_ec2_fleet_replaces_and_is_deleted(region: Region) -> None:
    fleet = an_ec2_fleet(region)
    region.after(20)
    first = region.running(fleet)[0]
    assert {"Key": "aws:ec2:fleet-id", "Value": fleet} in region.instance(first)["Tags"]
    region.rules.kill(first)
    region.after(70)
    second = region.running(fleet)[0]
    listed = region.ec2.describe_fleet_instances(FleetId=fleet)["ActiveInstances"]
    assert [second] == [one["InstanceId"] for one in listed]
    answer = region.ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    assert "deleted_terminating" == answer["SuccessfulFleetDeletions"][0]["CurrentFleetState"]
    region.after(30)
    assert "deleted" == region.ec2.describe_fleets(FleetIds=[fleet])["Fleets"][0]["FleetState"]
    again = region.ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    assert "fleetNotInDeletableState" == again["UnsuccessfulFleetDeletions"][0]["Error"]["Code"]
    assert "terminated" == region.state_of(second)


def test_a_fleet_that_is_deleted_before_its_first_launch_takes_a_moment_as_at_aws(region: Region) -> None:
    """As moto's `test_delete_fleet` (aws_verified) found it: deleted twice, once to let its instances run."""
    fleet = an_ec2_fleet(region)
    states = [
        region.ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=ends)["SuccessfulFleetDeletions"][0]
        for ends in (False, True)
    ]
    assert ["deleted_running", "deleted_terminating"] == [one["CurrentFleetState"] for one in states]
    assert "deleted_terminating" == region.ec2.describe_fleets(FleetIds=[fleet])["Fleets"][0]["FleetState"]
    region.after(30)
    assert "deleted" == region.ec2.describe_fleets(FleetIds=[fleet])["Fleets"][0]["FleetState"]
    assert [] == region.running(fleet)


def test_spot_fleets_and_ec2_fleets_are_told_apart(region: Region) -> None:
    one, other = region.a_fleet(), an_ec2_fleet(region)
    spot = region.ec2.describe_spot_fleet_requests()["SpotFleetRequestConfigs"]
    assert [one] == [found["SpotFleetRequestId"] for found in spot]
    assert [other] == [found["FleetId"] for found in region.ec2.describe_fleets()["Fleets"]]


# ----------------------------------------------------------------------------------------------------------- instances
def test_prices_are_below_those_on_demand_and_differ_by_zone(region: Region) -> None:
    prices = region.ec2.describe_spot_price_history(
        InstanceTypes=["g4dn.xlarge"], ProductDescriptions=["Linux/UNIX"], StartTime=BEGIN
    )["SpotPriceHistory"]
    assert 4 == len({one["SpotPrice"] for one in prices})
    assert all(0.1 < float(one["SpotPrice"]) < 0.3 for one in prices)


def test_a_spot_instance_is_not_stopped_by_hand(region: Region) -> None:
    _, instance = region.a_fleet_that_runs()
    assert "UnsupportedOperation" == refused(region.ec2.stop_instances, InstanceIds=[instance])


def test_instances_are_found_by_state_and_tag(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.kill(first)
    region.after(70)
    filters = [
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
        {"Name": "tag:aws:ec2spot:fleet-request-id", "Values": [fleet]},
    ]
    found = region.ec2.describe_instances(Filters=filters)["Reservations"]
    assert region.running(fleet) == [one["InstanceId"] for each in found for one in each["Instances"]]
    statuses = region.ec2.describe_instance_status()["InstanceStatuses"]
    assert region.running(fleet) == [one["InstanceId"] for one in statuses]


def test_a_terminated_instance_is_seen_for_an_hour(region: Region) -> None:
    instance = region.an_instance()
    region.ec2.terminate_instances(InstanceIds=[instance])
    region.ec2.terminate_instances(InstanceIds=[instance])
    region.after(3000)
    assert "terminated" == region.state_of(instance)
    region.after(1000)
    assert "InvalidInstanceID.NotFound" == refused(region.ec2.describe_instances, InstanceIds=[instance])


def test_the_console_is_base64_of_its_latest_64_kb_and_the_client_decodes_it(region: Region) -> None:
    instance = region.an_instance()
    text = "old\n" * 20_000 + "spotheal: no wheel\n"
    region.rules.consoles[instance] = lambda: text
    assert text[-65536:] == region.ec2.get_console_output(InstanceId=instance)["Output"]
    answer = region.rules.call("GetConsoleOutput", {"InstanceId": instance})
    assert text[-65536:].encode() == base64.b64decode(answer["Output"])


def test_user_data_of_run_instances_is_encoded_by_the_client(region: Region) -> None:
    region.ec2.run_instances(ImageId="ami-1", MinCount=1, MaxCount=1, UserData="#!/bin/sh")
    assert b"#!/bin/sh" == region.rules.instances()[0].user_data


def test_a_fleet_request_names_its_role(region: Region) -> None:
    assert "MissingParameter" == refused(
        region.ec2.request_spot_fleet,
        SpotFleetRequestConfig={"IamFleetRole": "", "TargetCapacity": 1, "LaunchSpecifications": [SPECIFICATION]},
    )
    assert ROLE == region.fleet(region.a_fleet())["SpotFleetRequestConfig"]["IamFleetRole"]


def test_a_describe_says_who_ended_or_stopped_an_instance(region: Region) -> None:
    fleet, first = region.a_fleet_that_runs()
    region.rules.kill(first)
    taken = region.instance(first)
    assert "Server.SpotInstanceTermination" == taken["StateReason"]["Code"] == taken["StateTransitionReason"]
    region.after(70)
    second = region.running(fleet)[0]
    region.rules.interrupt(second, "stop")
    region.after(145)
    assert ("stopped", "Server.SpotInstanceShutdown") == (
        region.state_of(second),
        region.instance(second)["StateReason"]["Code"],
    )
    third = region.running(fleet)[0]
    region.rules.call("CancelSpotFleetRequests", {"SpotFleetRequestIds": [fleet], "TerminateInstances": True})
    region.after(30)
    assert "Client.UserInitiatedShutdown" == region.instance(third)["StateReason"]["Code"]
    assert region.instance(third)["StateTransitionReason"].startswith("User initiated (2")
