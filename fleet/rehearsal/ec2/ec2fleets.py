"""EC2 fleets of type `maintain` (and `request`): their own shapes around the engine of `fleets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from spotheal.fleet.rehearsal.ec2.filters import Field, Item, page, select, tag_list, tags_for
from spotheal.fleet.rehearsal.ec2.fleets import begin, counted, end_fleet, history_item, refusal, set_targets, utc
from spotheal.fleet.rehearsal.ec2.launchspecs import of_templates, unknown_types
from spotheal.fleet.rehearsal.ec2.world import ApiError, Fleet, World, not_here

Params = Mapping[str, Any]
_STATES = {
    "cancelled": "deleted",
    "cancelled_running": "deleted_running",
    "cancelled_terminating": "deleted_terminating",
}


def create_fleet(world: World, params: Params, caller: str | None) -> Item:
    token = params.get("ClientToken", "")
    fingerprint = json.dumps({**params, "ClientToken": ""}, sort_keys=True, default=str)
    stored = world.tokens.get(("CreateFleet", token)) if token else None
    if stored is not None:
        if stored[0] != fingerprint:
            raise ApiError("IdempotentParameterMismatch", "The client token was used with other parameters.")
        return {"FleetId": stored[1]}
    kind = params.get("Type") or "maintain"
    if kind not in ("maintain", "request"):
        raise not_here(f"CreateFleet of type {kind}")
    target = params["TargetCapacitySpecification"]
    total, on_demand = int(target["TotalTargetCapacity"]), target.get("OnDemandTargetCapacity")
    if on_demand is None:
        spot = (
            target.get("DefaultTargetCapacityType", "on-demand") == "spot" or target.get("SpotTargetCapacity") == total
        )
        on_demand = 0 if spot else total
    fleet = Fleet(
        id=f"fleet-{world.random.getrandbits(128):032x}",
        config={key: value for key, value in params.items() if key not in ("DryRun", "TagSpecifications")},
        specs=of_templates(world, params.get("LaunchTemplateConfigs") or []),
        created=world.now(),
        target=total,
        on_demand=int(on_demand),
        kind=kind,
        valid_until=utc(params.get("ValidUntil")),
        terminate_at_expiry=bool(params.get("TerminateInstancesWithExpiration")),
        tags=tags_for(params, "fleet"),
    )
    if not fleet.specs:
        raise ApiError("MissingParameter", "The request must contain the parameter LaunchTemplateConfigs")
    # The words for a type that the region lacks (hashicorp/terraform-provider-aws PR 41272, at ModifyFleet).
    if unknown := unknown_types(fleet.specs):
        pools = ", ".join(f"ResourcePoolType(instanceType={name}, os=generic, addressing=novice)" for name in unknown)
        listed = f"Unsupported instancetypes specified in the batch request[{pools}]"
        raise ApiError("InvalidFleetConfig", f"Invalid: Parameter: InstanceTypes. {listed}")
    if token:
        world.tokens["CreateFleet", token] = (fingerprint, fleet.id, world.moment())
    begin(world, fleet)
    return {"FleetId": fleet.id}


def delete_fleets(world: World, params: Params, caller: str | None) -> Item:
    successful, unsuccessful = [], []
    for fleet_id in params["FleetIds"]:
        fault = refusal(world, fleet_id, "fleet-", "fleet")
        if fault is not None:
            unsuccessful.append({"FleetId": fleet_id, "Error": fault})
            continue
        fleet = world.fleets[fleet_id]
        state = end_fleet(world, fleet, bool(params["TerminateInstances"]))
        change = {"CurrentFleetState": _STATES[state], "PreviousFleetState": _STATES.get(fleet.state, fleet.state)}
        successful.append({"FleetId": fleet_id, **change})
    return {"SuccessfulFleetDeletions": successful, "UnsuccessfulFleetDeletions": unsuccessful}


def modify_fleet(world: World, params: Params, caller: str | None) -> Item:
    fleet = _known(world, params["FleetId"])
    if fleet.state != "active" or fleet.kind != "maintain":
        raise ApiError("InvalidFleetState", f"The fleet {fleet.id} cannot be modified now.")
    target = params.get("TargetCapacitySpecification") or {}
    policy = "default" if params.get("ExcessCapacityTerminationPolicy", "termination") == "termination" else "no"
    set_targets(world, fleet, target.get("TotalTargetCapacity"), target.get("OnDemandTargetCapacity"), policy)
    return {"Return": True}


def describe_fleets(world: World, params: Params, caller: str | None) -> Item:
    fleets = [fleet for fleet in world.fleets.at(world.viewed()) if fleet.id.startswith("fleet-")]
    if params.get("FleetIds"):
        fleets = [_known(world, fleet_id) for fleet_id in params["FleetIds"]]
    fields: dict[str, Field] = {
        "fleet-state": lambda one: [one["FleetState"]],
        "type": lambda one: [one["Type"]],
        "activity-status": lambda one: [one.get("ActivityStatus", "")],
    }
    items = select([_shaped(world, fleet) for fleet in fleets], params.get("Filters"), fields)
    return page(params, items, "Fleets", world.page_size)


def describe_fleet_instances(world: World, params: Params, caller: str | None) -> Item:
    fleet = _known(world, params["FleetId"])
    items = [
        {"InstanceId": instance.id, "InstanceType": instance.type, "SpotInstanceRequestId": instance.spot_request}
        for instance in world.instances.at(world.viewed())
        if instance.fleet == fleet.id and instance.state in ("pending", "running")
    ]
    return {**page(params, items, "ActiveInstances", world.page_size), "FleetId": fleet.id}


def describe_fleet_history(world: World, params: Params, caller: str | None) -> Item:
    fleet = _known(world, params["FleetId"])
    since = utc(params["StartTime"])
    assert since is not None
    items = []
    for event in world.history[fleet.id]:
        kind = {"fleetRequestChange": "fleet-change", "instanceChange": "instance-change", "error": "service-error"}
        if event.time >= since and params.get("EventType") in (None, kind.get(event.type)):
            items.append({**history_item(event), "EventType": kind.get(event.type, event.type)})
    times = {"FleetId": fleet.id, "StartTime": since, "LastEvaluatedTime": world.now().replace(microsecond=0)}
    return {**page(params, items, "HistoryRecords", world.page_size), **times}


def _known(world: World, fleet_id: str) -> Fleet:
    fleet = next((candidate for candidate in world.fleets.at(world.viewed()) if candidate.id == fleet_id), None)
    if fleet is None:
        raise ApiError("InvalidFleetId.NotFound", f"The fleet ID '{fleet_id}' does not exist")
    return fleet


def _shaped(world: World, fleet: Fleet) -> Item:
    running = counted(world, fleet.id)
    config = fleet.config
    target = {**config["TargetCapacitySpecification"], "TotalTargetCapacity": fleet.target}
    shaped: Item = {
        "FleetId": fleet.id,
        "FleetState": _STATES.get(fleet.state, fleet.state),
        "CreateTime": fleet.created,
        "Type": fleet.kind,
        "TargetCapacitySpecification": {**target, "OnDemandTargetCapacity": fleet.on_demand},
        "FulfilledCapacity": float(sum(instance.weight for instance in running)),
        "FulfilledOnDemandCapacity": float(sum(instance.weight for instance in running if not instance.is_spot)),
        "LaunchTemplateConfigs": config["LaunchTemplateConfigs"],
        "TerminateInstancesWithExpiration": fleet.terminate_at_expiry,
        "ReplaceUnhealthyInstances": False,
        "Tags": tag_list(fleet.tags),
    }
    if fleet.valid_until is not None:
        shaped["ValidUntil"] = fleet.valid_until
    if config.get("SpotOptions"):
        shaped["SpotOptions"] = config["SpotOptions"]
    if fleet.state in ("active", "modifying"):
        shaped["ActivityStatus"] = fleet.activity
    return shaped


OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "CreateFleet": create_fleet,
    "DeleteFleets": delete_fleets,
    "ModifyFleet": modify_fleet,
    "DescribeFleets": describe_fleets,
    "DescribeFleetInstances": describe_fleet_instances,
    "DescribeFleetHistory": describe_fleet_history,
}
