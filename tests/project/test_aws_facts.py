"""What AWS itself answered (tests/data/aws_facts.toml), held against the local cloud and against our parsers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import boto3
import pytest
from aws_facts import World, facts, holds, table
from botocore.exceptions import ClientError
from rulebook_world import BEGIN, A, B, Region

from spotheal.agent.aws import clients
from spotheal.fleet.rehearsal.services.authorization import OWNER
from spotheal.fleet.run import engine
from spotheal.fleet.run.engine import FleetEvent
from spotheal.fleet.status.shortage import shortage
from spotheal.iam.calls import CALLS

FACTS = facts()
_SERVICES = {"efs": "elasticfilesystem", "service-quotas": "servicequotas"}  # as IAM names them


TEMPLATE = {"LaunchTemplateSpecification": {"LaunchTemplateName": "facts", "Version": "1"}}


def named(fact: dict[str, Any]) -> str:
    return f"{fact['service']}: {fact['ask']}"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    cloud = World()
    yield cloud
    cloud.close()


@pytest.mark.parametrize("fact", [fact for fact in FACTS if "call" in fact], ids=named)
def test_the_local_cloud_answers_as_aws_does(world: World, fact: dict[str, Any]) -> None:
    status, code, said = world.ask(fact)
    assert (fact["status"], fact.get("code", "")) == (status, code), said
    assert fact.get("says", "") in said.get("Message", "")
    assert [field for field in fact.get("fields", []) if not holds(said, field)] == []


@pytest.mark.parametrize("fact", [fact for fact in FACTS if "code" in fact], ids=named)
def test_an_error_code_has_the_class_that_its_situation_needs(fact: dict[str, Any]) -> None:
    assert fact["kind"] == clients._kind(fact["code"], fact["status"]).__name__


@pytest.mark.parametrize("history", table()["history"], ids=lambda history: history["ask"])
def test_the_cause_of_a_recorded_history_is_right(history: dict[str, Any]) -> None:
    events = [
        FleetEvent(BEGIN + timedelta(seconds=second), kind, what, words, "")
        for second, (kind, what, words) in enumerate(history["events"])
    ]
    found = shortage(events)
    assert history["cause"] == (found.cause if found else "")


@pytest.mark.parametrize("history", [one for one in table()["history"] if "order" in one], ids=lambda one: one["order"])
def test_the_local_cloud_writes_the_history_that_aws_writes(history: dict[str, Any]) -> None:
    region = Region()
    if history["order"] == "quota":
        region.rules.limit_instances(0)
    else:
        region.rules.no_capacity([A, B], 3600)
    fleet = region.a_fleet()
    region.after(60)
    written = [event for event in engine.history(region.ec2, fleet, BEGIN) if event.kind in ("error", "information")]
    kinds = list(dict.fromkeys((event.kind, event.subtype) for event in written))  # one event a pool
    assert [(kind, what) for kind, what, _ in history["events"]] == kinds
    for kind, what, words in history["events"]:
        assert all(words in event.description for event in written if (event.kind, event.subtype) == (kind, what))


def test_the_local_cloud_changes_what_aws_changes_in_its_echo(world: World) -> None:
    echoes = {echo["operation"]: echo for echo in table()["echo"]}
    batch, actions = world.client("batch"), echoes["RegisterJobDefinition"]
    rules = [{"onReason": "*", "action": action} for action in actions["sent"]]
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
    batch.register_job_definition(
        jobDefinitionName="facts", type="container", retryStrategy={"attempts": 2, "evaluateOnExit": rules},
        containerProperties={"image": "x", "resourceRequirements": needs},
    )  # fmt: skip
    (described,) = batch.describe_job_definitions(jobDefinitionName="facts")["jobDefinitions"]
    assert actions["back"] == [rule["action"] for rule in described["retryStrategy"]["evaluateOnExit"]]
    region = Region()
    volume = region.a_volume()
    snapshot = region.ec2.create_snapshot(VolumeId=volume)
    seen = [snapshot["Progress"]]
    for _ in range(2):
        region.after(44)
        seen.append(region.snapshot(snapshot["SnapshotId"])["Progress"])
    assert echoes["CreateSnapshot"]["back"] == seen


def test_every_call_of_ours_has_a_fact_or_is_named_as_one_without() -> None:
    made = {name for call in CALLS for name in call.names}
    known = {f"{_SERVICES.get(fact['service'], fact['service'])}:{fact['operation']}" for fact in FACTS}
    known |= {f"{'ec2' if 'napshot' in echo['operation'] else 'batch'}:{echo['operation']}" for echo in table()["echo"]}
    assert sorted(made - known) == sorted(table()["nothing_recorded"])
    assert known <= made


def test_every_fact_has_its_own_name_and_a_source_that_anybody_can_look_up() -> None:
    assert [name for name, count in Counter(map(named, FACTS)).items() if count > 1] == []
    everything = (*FACTS, *table()["history"], *table()["echo"])
    assert {one["source"] for one in everything} <= set(table()["source"])
    assert all(source["text"] and source["licence"] for source in table()["source"].values())


@pytest.mark.parametrize(
    ("call", "params", "said"),
    [
        ("describe_instance_attribute", {"InstanceId": "i-0123456789abcdef0", "Attribute": "userData"},
         "DescribeInstanceAttribute"),
        ("start_instances", {"InstanceIds": ["i-0123456789abcdef0"]}, "StartInstances"),
        ("modify_volume", {"VolumeId": "vol-0123456789abcdef0", "Size": 2}, "ModifyVolume"),
        ("run_instances", {"MinCount": 1, "MaxCount": 1, "LaunchTemplate": {"LaunchTemplateName": "x"}},
         "RunInstances with LaunchTemplate"),
        ("create_fleet", {"Type": "instant", "TargetCapacitySpecification": {"TotalTargetCapacity": 1},
                          "LaunchTemplateConfigs": [TEMPLATE]}, "CreateFleet of type instant"),
        ("describe_launch_template_versions", {"Versions": ["$Latest"]}, "of all launch templates"),
    ],
)  # fmt: skip
def test_what_the_local_cloud_does_not_do_is_refused_by_name(
    world: World, call: str, params: dict[str, Any], said: str
) -> None:
    status, code, error = world.ask({"service": "ec2", "call": call, "params": params})
    assert (400, "UnsupportedOperation") == (status, code)
    assert "This local cloud does not do" in error["Message"] and said in error["Message"]


def test_another_region_than_the_local_clouds_is_refused_by_name(world: World) -> None:
    """Its zones and instances would be read as those of the region that was asked."""
    key = world.endpoint.key_of_person(OWNER)
    elsewhere: Any = boto3.session.Session(key.id, key.secret, region_name="eu-west-1")
    with pytest.raises(ClientError, match=r"WrongRegion.*is in us-west-2, and the call is for eu-west-1"):
        elsewhere.client("ec2", endpoint_url=world.endpoint.url).describe_availability_zones()
