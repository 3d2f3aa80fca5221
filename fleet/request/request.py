"""The exact calls of a request. Pure: an order in, the arguments of boto3's calls out.

`gather` makes the order, `submit` sends the result; `--dry-run` prints it, `--render` writes it as files for the aws
CLI. So all three are the same request.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shlex
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from spotheal.agent.protocol.clock import parse_rfc3339, rfc3339
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import TAG_JOB, TAG_NAME, TAG_RUN, TAG_STORE
from spotheal.fleet.files.config import FleetConfig
from spotheal.fleet.request import template
from spotheal.fleet.run import ec2fleet, engine

DEFAULT_STRATEGY = "priceCapacityOptimized"
VALID_DAYS = 30  # without limits.hours
VALID_MARGIN_HOURS = 6  # beyond limits.hours: the agent's own end comes first, with a checkpoint
TAG_LENGTH_MAX = 256
_TEMPLATE_NAME_LENGTH_MAX = 128


@dataclass(frozen=True)
class Order:
    """The inputs of a fleet's request. `generation` counts the fleets of the run, from 1."""

    fleet: FleetConfig
    job: JobConfig
    run: str
    requested_at: str  # RFC 3339; ValidUntil counts from here, so that the same order gives the same request tomorrow
    user_data: str  # base64
    generation: int = 1
    instances: int = 1  # more than one for a sweep, whose runs have their own volumes
    described_templates: tuple[dict[str, Any], ...] = field(default=())  # the data of the user's templates, in order
    store: str = ""  # the prefix above all jobs


@dataclass(frozen=True)
class Request:
    """`templates`: arguments of CreateLaunchTemplate, in order; `fleet`: those of RequestSpotFleet, or of CreateFleet
    (`[fleet] engine = "ec2-fleet"`), which has no SpotFleetRequestConfig around it."""

    templates: tuple[dict[str, Any], ...]
    fleet: dict[str, Any]

    def to_document(self) -> dict[str, Any]:
        return {"create_launch_templates": list(self.templates), call_of(self.fleet): self.fleet}


def _refuse_weights(fleet: FleetConfig) -> None:
    """ConfigError for weights: for a fleet of four, with weights of four, AWS launches one machine."""
    overrides = (override for config in fleet.template_configs for override in config.get("Overrides") or [])
    places = [*fleet.specifications, *overrides]
    if any(place.get("WeightedCapacity") not in (None, 1) for place in places):
        raise ConfigError(
            f"{fleet.source}: WeightedCapacity counts units, and the machines of a sweep, or of `nodes`, are counted",
            next_step="take it out (SpotPrice is then the limit for one machine)",
        )


def call_of(arguments: dict[str, Any]) -> str:
    """The boto3 method that takes a fleet's arguments."""
    return "create_fleet" if engine.is_ec2_fleet_request(arguments) else "request_spot_fleet"


def build(order: Order) -> Request:
    """The request of `order`; the same order always gives the same request, byte for byte."""
    config = copy.deepcopy(order.fleet.document)
    if order.instances > 1:
        _refuse_weights(order.fleet)
    config["Type"] = "maintain"
    config["TargetCapacity"] = order.instances
    config.setdefault("AllocationStrategy", DEFAULT_STRATEGY)
    config.setdefault("ValidUntil", valid_until(order))
    config.setdefault("TerminateInstancesWithExpiration", True)
    # A machine that hangs fails EC2's status check, and nothing else would replace the fleet's only machine.
    config.setdefault("ReplaceUnhealthyInstances", True)
    config.pop("ClientToken", None)
    tags = run_tags(order)
    theirs = config.get("TagSpecifications", [])
    fleet_tags = [
        tag for entry in theirs if entry.get("ResourceType") == "spot-fleet-request" for tag in entry.get("Tags", [])
    ]
    config["TagSpecifications"] = [
        *(entry for entry in theirs if entry.get("ResourceType") != "spot-fleet-request"),
        {"ResourceType": "spot-fleet-request", "Tags": template.merged([*fleet_tags, *tags])},
    ]
    templates: list[dict[str, Any]] = []
    if order.fleet.template_configs:
        config["LaunchTemplateConfigs"] = [
            _copied(order, index, entry, templates) for index, entry in enumerate(order.fleet.template_configs)
        ]
    elif order.job.fleet.harden or order.job.fleet.engine == "ec2-fleet":  # an EC2 fleet launches templates only
        del config["LaunchSpecifications"]
        config["LaunchTemplateConfigs"] = [
            _as_template(order, index, spec, templates) for index, spec in enumerate(order.fleet.specifications)
        ]
    else:
        config["LaunchSpecifications"] = [_specification(order, spec) for spec in order.fleet.specifications]
    if order.job.fleet.engine == "ec2-fleet":
        arguments = ec2fleet.create_fleet(config)
        return Request(tuple(templates), {**arguments, "ClientToken": token(order, "fleet", arguments)})
    config["ClientToken"] = token(order, "fleet", config)
    return Request(tuple(templates), {"SpotFleetRequestConfig": config})


def valid_until(order: Order) -> str:
    """The time at which AWS ends the fleet by itself: this stop needs no agent."""
    hours = order.job.limits.hours
    length = timedelta(hours=hours + VALID_MARGIN_HOURS) if hours else timedelta(days=VALID_DAYS)
    return rfc3339(parse_rfc3339(order.requested_at) + length)


def run_tags(order: Order) -> list[dict[str, str]]:
    tags = {TAG_JOB: order.job.job.name, TAG_RUN: order.run, TAG_STORE: order.store[:TAG_LENGTH_MAX]}
    return [{"Key": key, "Value": value} for key, value in tags.items() if value]


def token(order: Order, purpose: str, content: dict[str, Any]) -> str:
    """ClientToken, at most 64 characters: always the same for the same run, generation and content.

    The content is part of it, so that a refused request can be corrected and sent again for the same run.
    """
    parts = (order.run, str(order.generation), purpose, json.dumps(content, sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:60]


def template_name(order: Order, index: int) -> str:
    return f"spotheal-{order.job.job.name}-{order.run}-{order.generation}-{index}"[:_TEMPLATE_NAME_LENGTH_MAX]


def _instance_tags(order: Order) -> list[dict[str, str]]:
    return [*run_tags(order), {"Key": TAG_NAME, "Value": f"spotheal {order.job.job.name}"}]


def _specification(order: Order, spec: dict[str, Any]) -> dict[str, Any]:
    spec["UserData"] = order.user_data
    specifications = spec.get("TagSpecifications", [])
    other_tags = [entry for entry in specifications if entry.get("ResourceType", "instance") != "instance"]
    tags = template.with_ours(template.own_instance_tags(spec), _instance_tags(order))
    spec["TagSpecifications"] = [*other_tags, {"ResourceType": "instance", "Tags": tags}]
    return spec


def _created(order: Order, index: int, data: dict[str, Any], templates: list[dict[str, Any]]) -> dict[str, Any]:
    name = template_name(order, index)
    tags = [{"ResourceType": "launch-template", "Tags": run_tags(order)}]
    arguments = {"LaunchTemplateName": name, "LaunchTemplateData": data, "TagSpecifications": tags}
    templates.append({**arguments, "ClientToken": token(order, f"template {index}", arguments)})
    return {"LaunchTemplateName": name, "Version": "1"}


def _as_template(order: Order, index: int, spec: dict[str, Any], templates: list[dict[str, Any]]) -> dict[str, Any]:
    harden = order.job.fleet.harden
    data = template.template_data(spec, order.user_data, _instance_tags(order), harden=harden)
    return {
        "LaunchTemplateSpecification": _created(order, index, data, templates),
        "Overrides": template.overrides(spec),
    }


def _copied(order: Order, index: int, entry: dict[str, Any], templates: list[dict[str, Any]]) -> dict[str, Any]:
    theirs = order.described_templates[index] if index < len(order.described_templates) else {}
    data = template.completed(theirs, order.user_data, _instance_tags(order), harden=order.job.fleet.harden)
    return {**entry, "LaunchTemplateSpecification": _created(order, index, data, templates)}


# --------------------------------------------------------------------------------------------------- for the aws CLI
def render(request: Request, fleet_file: str) -> dict[str, str]:
    """Files for the aws CLI by name suffix: "" the fleet, ".template-N.json" each template, ".commands" for a shell.

    `aws ec2 request-spot-fleet --spot-fleet-request-config file://FILE` accepts a spot fleet's file unchanged,
    `aws ec2 create-fleet --cli-input-json file://FILE` an EC2 fleet's.
    """
    spot_fleet = request.fleet.get("SpotFleetRequestConfig")
    files = {"": json.dumps(spot_fleet or request.fleet, indent=2) + "\n"}
    commands = []
    for index, arguments in enumerate(request.templates):
        suffix = f".template-{index}.json"
        files[suffix] = json.dumps(arguments, indent=2) + "\n"
        commands.append(
            f"aws ec2 create-launch-template --cli-input-json {shlex.quote(f'file://{fleet_file}{suffix}')}"
        )
    command = "request-spot-fleet --spot-fleet-request-config" if spot_fleet else "create-fleet --cli-input-json"
    commands.append(f"aws ec2 {command} {shlex.quote(f'file://{fleet_file}')}")
    if request.templates:
        files[".commands"] = (
            "\n".join(["#!/bin/sh", "# What `fleetctl request` sends, for the aws CLI.", "set -e", *commands]) + "\n"
        )
    return files
