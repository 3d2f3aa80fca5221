"""The exact calls of a request: the same for the same order, and accepted by AWS's own model."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.files.config import FleetConfig, parse_fleet
from spotheal.fleet.files.shape import fleet_config_faults, request_faults
from spotheal.fleet.request import request, userdata
from spotheal.fleet.request.request import Order, build

RUN = "01J8Z3T2QK5V9W7X6Y5Z4A3B2C"
ARTICLE = Path(__file__).resolve().parents[2] / "data" / "article_spot_fleet_config.json"


def article() -> FleetConfig:
    text = ARTICLE.read_text().rstrip() + "]}"
    text = text.replace("<SECURITY_GROUP_ID>", '"sg-0123456789abcdef0"').replace("<ACCOUNT_NUMBER>", "123456789012")
    return parse_fleet(text.replace("<KEYPAIR_NAME>", "mine"))


def order(config: FleetConfig | None = None, **tables: Any) -> Order:
    job = parse_job({"job": {"name": "cifar", "repository": ".", "command": ["python"]}, **tables})
    return Order(config or article(), job, RUN, "2026-11-21T12:00:00Z", base64.b64encode(b"#!/bin/sh\n").decode())


def config_of(made: request.Request) -> dict[str, Any]:
    config = made.fleet["SpotFleetRequestConfig"]
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("harden", [True, False])
def test_the_request_is_what_the_apis_model_accepts(harden: bool) -> None:
    made = build(order(fleet={"harden": harden}))
    assert fleet_config_faults(config_of(made)) == []
    assert request_faults("RequestSpotFleet", made.fleet) == []
    for arguments in made.templates:
        assert request_faults("CreateLaunchTemplate", arguments) == []


def test_the_same_order_gives_the_same_request() -> None:
    assert build(order()).to_document() == build(order()).to_document()


def test_building_changes_nothing_of_the_order() -> None:
    one = order()
    before = copy.deepcopy(one.fleet.document)
    build(one)
    assert one.fleet.document == before


def test_what_the_file_leaves_out_is_filled() -> None:
    config = config_of(build(order()))
    assert config["Type"] == "maintain"
    assert config["TerminateInstancesWithExpiration"] is True
    assert config["ValidUntil"] == "2026-12-21T12:00:00Z"
    tags = {tag["Key"]: tag["Value"] for tag in config["TagSpecifications"][0]["Tags"]}
    assert tags == {"spotheal:job": "cifar", "spotheal:run": RUN}
    assert config["AllocationStrategy"] == "lowestPrice"  # the file's own stays
    plain = article()
    del plain.document["AllocationStrategy"]
    assert config_of(build(order(plain)))["AllocationStrategy"] == "priceCapacityOptimized"


def test_a_limit_on_hours_bounds_the_fleet_too() -> None:
    assert config_of(build(order(limits={"hours": 10})))["ValidUntil"] == "2026-11-22T04:00:00Z"


def test_tokens_differ_by_run_generation_and_purpose_and_fit() -> None:
    one = order()
    two = replace(one, generation=2)
    tokens = [build(o).fleet["SpotFleetRequestConfig"]["ClientToken"] for o in (one, two, replace(one, run="X" * 26))]
    tokens += [arguments["ClientToken"] for arguments in build(one).templates]
    assert len(set(tokens)) == len(tokens)
    assert all(len(token) <= 64 for token in tokens)


def test_hardened_specifications_become_templates_that_require_imdsv2() -> None:
    made = build(order())
    assert "LaunchSpecifications" not in config_of(made)
    assert len(made.templates) == 2
    for arguments, entry in zip(made.templates, config_of(made)["LaunchTemplateConfigs"], strict=True):
        data = arguments["LaunchTemplateData"]
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert base64.b64decode(data["UserData"]) == b"#!/bin/sh\n"
        assert data["SecurityGroupIds"] == ["sg-0123456789abcdef0"]
        assert data["KeyName"] == "mine"
        assert entry["LaunchTemplateSpecification"] == {
            "LaunchTemplateName": arguments["LaunchTemplateName"],
            "Version": "1",
        }
        assert [o["AvailabilityZone"] for o in entry["Overrides"]] == [
            "us-west-2a",
            "us-west-2b",
            "us-west-2c",
            "us-west-2d",
        ]
    assert [e["Overrides"][0]["InstanceType"] for e in config_of(made)["LaunchTemplateConfigs"]] == [
        "p3.2xlarge",
        "p2.xlarge",
    ]


def test_without_hardening_user_data_replaces_the_articles_placeholder() -> None:
    made = build(order(fleet={"harden": False}))
    specs = config_of(made)["LaunchSpecifications"]
    assert made.templates == ()
    assert {spec["UserData"] for spec in specs} == {order().user_data}
    tags = {tag["Key"]: tag["Value"] for tag in specs[0]["TagSpecifications"][0]["Tags"]}
    assert tags["spotheal:run"] == RUN


def test_the_operators_own_tags_stay_and_ours_cannot_be_overridden() -> None:
    fleet = article()
    fleet.document["LaunchSpecifications"][0]["TagSpecifications"] = [
        {
            "ResourceType": "instance",
            "Tags": [{"Key": "Name", "Value": "mine"}, {"Key": "spotheal:run", "Value": "forged"}],
        }
    ]
    for harden in (True, False):
        made = build(order(fleet, fleet={"harden": harden}))
        holder = made.templates[0]["LaunchTemplateData"] if harden else config_of(made)["LaunchSpecifications"][0]
        tags = {tag["Key"]: tag["Value"] for tag in holder["TagSpecifications"][0]["Tags"]}
        assert tags == {"Name": "mine", "spotheal:run": RUN, "spotheal:job": "cifar"}


def test_subnets_become_overrides_and_leave_the_network_cards() -> None:
    fleet = article()
    for spec in fleet.document["LaunchSpecifications"]:
        del spec["Placement"]
        spec["NetworkInterfaces"] = [{"DeviceIndex": 0, "SubnetId": "subnet-0123456789abcdef0", "Groups": ["sg-1"]}]
    made = build(order(fleet))
    assert config_of(made)["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"InstanceType": "p3.2xlarge", "SubnetId": "subnet-0123456789abcdef0"}
    ]
    assert "SubnetId" not in made.templates[0]["LaunchTemplateData"]["NetworkInterfaces"][0]


def test_the_operators_own_template_is_copied_and_completed() -> None:
    document = {
        "TargetCapacity": 1,
        "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": "lt-0123456789abcdef0", "Version": "3"},
                "Overrides": [{"InstanceType": "g5.xlarge", "AvailabilityZone": "us-west-2a"}],
            }
        ],
    }
    theirs = {
        "ImageId": "ami-0123456789abcdef0",
        "MetadataOptions": {"HttpTokens": "optional", "HttpEndpoint": "enabled"},
    }
    one = replace(order(parse_fleet(json.dumps(document))), described_templates=(theirs,))
    made = build(one)
    data = made.templates[0]["LaunchTemplateData"]
    assert data["ImageId"] == "ami-0123456789abcdef0"
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["UserData"] == one.user_data
    entry = config_of(made)["LaunchTemplateConfigs"][0]
    assert entry["Overrides"] == document["LaunchTemplateConfigs"][0]["Overrides"]  # type: ignore[index]
    assert entry["LaunchTemplateSpecification"]["LaunchTemplateName"] == made.templates[0]["LaunchTemplateName"]
    assert request_faults("CreateLaunchTemplate", made.templates[0]) == []


def test_rendered_files_hold_exactly_what_is_sent() -> None:
    made = build(order())
    files = request.render(made, "out.json")
    assert json.loads(files[""]) == config_of(made)
    assert json.loads(files[".template-0.json"]) == made.templates[0]
    assert "aws ec2 create-launch-template --cli-input-json file://out.json.template-1.json\n" in files[".commands"]
    assert (
        files[".commands"].rstrip().endswith("aws ec2 request-spot-fleet --spot-fleet-request-config file://out.json")
    )
    alone = request.render(build(order(fleet={"harden": False})), "out.json")
    assert list(alone) == [""]


# ------------------------------------------------------------------------------------------------------------ user data
def instance(**environment: str) -> InstanceConfig:
    job = parse_job({"job": {"name": "cifar", "repository": ".", "command": ["python"]}, "environment": environment})
    return InstanceConfig(job, RUN, "us-west-2", StoreUrl("bucket", f"cifar/{RUN}"), "a" * 40, "2026-11-21T12:00:00Z")


def test_user_data_fits_and_is_the_same_for_the_same_job() -> None:
    text = userdata.render(instance(), "0" * 64)
    assert text.startswith("#!/bin/sh\n")
    assert len(text.encode()) <= userdata.LIMIT_BYTES
    assert userdata.render(instance(), "0" * 64) == text


def test_user_data_that_is_too_large_is_refused_by_name() -> None:
    import random

    noise = random.Random(0)
    values = {f"V{n}": "".join(chr(noise.randrange(33, 126)) for _ in range(200)) for n in range(100)}
    with pytest.raises(ConfigError) as caught:
        userdata.render(instance(**values), "0" * 64)
    assert "EC2 takes 16384" in caught.value.message
    assert "job.toml" in caught.value.message
    assert "[environment]" in caught.value.next_step
