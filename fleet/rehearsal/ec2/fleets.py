"""Spot fleets and EC2 fleets: the launches, the replacement of what is lost (type `maintain`), and the end.

One engine for both; the EC2 fleet's own shapes are in `ec2fleets`. What a fleet may launch is resolved when it is
requested, as AWS resolves a template's version.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from spotheal.fleet.rehearsal.ec2 import instances
from spotheal.fleet.rehearsal.ec2.capacity import NoPlace, place
from spotheal.fleet.rehearsal.ec2.filters import Item, page, tag_list, tags_for
from spotheal.fleet.rehearsal.ec2.launchspecs import resolve
from spotheal.fleet.rehearsal.ec2.world import ApiError, Fleet, FleetEvent, Instance, World

Params = Mapping[str, Any]
TAG_SPOT_FLEET = "aws:ec2spot:fleet-request-id"
TAG_EC2_FLEET = "aws:ec2:fleet-id"
_CANCELLED = ("cancelled_running", "cancelled_terminating", "cancelled")


# -------------------------------------------------------------------------------------------------------------- request
def request_spot_fleet(world: World, params: Params, caller: str | None) -> Item:
    config = params["SpotFleetRequestConfig"]
    for key in ("IamFleetRole", "TargetCapacity"):
        if config.get(key) in (None, ""):
            raise ApiError("MissingParameter", f"The request must contain the parameter {key}")
    token = config.get("ClientToken", "")
    fingerprint = json.dumps(config, sort_keys=True, default=str)
    stored = world.tokens.get(("RequestSpotFleet", token)) if token else None
    if stored is not None:
        if stored[0] != fingerprint:
            raise ApiError("IdempotentParameterMismatch", "The client token was used with other parameters.")
        return {"SpotFleetRequestId": stored[1]}
    if not str(config["IamFleetRole"]).startswith("arn:aws"):
        raise ApiError("InvalidSpotFleetRequestConfig", f"Parameter: iamFleetRole {config['IamFleetRole']} is invalid.")
    if fault := world.role_fault(str(config["IamFleetRole"])):
        raise ApiError("InvalidSpotFleetRequestConfig", fault)
    fleet = Fleet(
        id=f"sfr-{uuid.UUID(int=world.random.getrandbits(128), version=4)}",
        config=config,
        specs=resolve(world, config),
        created=world.now(),
        target=int(config["TargetCapacity"]),
        on_demand=int(config.get("OnDemandTargetCapacity") or 0),
        kind=config.get("Type") or "maintain",
        valid_until=utc(config.get("ValidUntil")),
        terminate_at_expiry=bool(config.get("TerminateInstancesWithExpiration")),
        tags=tags_for(config, "spot-fleet-request"),
    )
    if token:
        world.tokens["RequestSpotFleet", token] = (fingerprint, fleet.id, world.moment())
    begin(world, fleet)
    return {"SpotFleetRequestId": fleet.id}


def begin(world: World, fleet: Fleet) -> None:
    """Enter a fleet: it becomes active, launches, and expires at its time."""
    if fleet.valid_until is not None and fleet.valid_until <= world.now():
        raise ApiError("InvalidSpotFleetRequestConfig", "Parameter: validUntil is in the past.")
    world.fleets.put(fleet)
    record(world, fleet.id, "fleetRequestChange", "submitted", "")
    world.later(0.0, lambda: _activate(world, fleet.id))
    if fleet.valid_until is not None:
        world.later((fleet.valid_until - world.now()).total_seconds(), lambda: _expire(world, fleet.id))


def _activate(world: World, fleet_id: str) -> None:
    fleet = world.fleets[fleet_id]
    if fleet.state == "submitted":
        world.fleets.put(replace(fleet, state="active"))
        record(world, fleet_id, "fleetRequestChange", "active", "")
        balance(world, fleet_id)


def _expire(world: World, fleet_id: str) -> None:
    fleet = world.fleets.get(fleet_id)
    if fleet is None or fleet.valid_until is None or fleet.state in _CANCELLED:
        return
    seconds = (fleet.valid_until - world.now()).total_seconds()
    if seconds > 0.001:  # the wall clock was set back, or the expiry put off
        world.later(seconds, lambda: _expire(world, fleet_id))
        return
    record(world, fleet_id, "fleetRequestChange", "expired", "")
    end_fleet(world, fleet, fleet.terminate_at_expiry)


# --------------------------------------------------------------------------------------------------------------- engine
def members(world: World, fleet_id: str) -> list[Instance]:
    """Instances of the fleet that are not gone: those under a notice and the stopped ones too."""
    return [
        instance for instance in world.instances.all() if instance.fleet == fleet_id and instance.state != "terminated"
    ]


def counted(world: World, fleet_id: str) -> list[Instance]:
    """The instances that fulfil the fleet's capacity: not those that AWS is taking away."""
    return [
        instance
        for instance in members(world, fleet_id)
        if not instance.leaving and instance.state in ("pending", "running")
    ]


def balance(world: World, fleet_id: str) -> None:
    """Order what is missing. A fleet that has launched before takes the time of a replacement."""
    fleet = world.fleets.get(fleet_id)
    if fleet is None or fleet.state not in ("active", "modifying"):
        return
    had = any(instance.fleet == fleet_id for instance in world.instances.all())
    if had and fleet.kind == "request":
        return
    on_its_way = world.launching.get(fleet_id, 0)
    smallest_weight = min(int(spec["weight"]) for spec in fleet.specs)
    missing = fleet.target - _weight(counted(world, fleet_id))
    while missing - on_its_way * smallest_weight > 0:
        on_its_way += 1
        world.later(world.latencies.replacement if had else world.latencies.launch, lambda: _launch(world, fleet_id))
    world.launching[fleet_id] = on_its_way
    _set_activity(world, fleet_id)


def _is_ec2(fleet: Fleet) -> bool:
    return fleet.id.startswith("fleet-")


def _launch(world: World, fleet_id: str) -> None:
    fleet = world.fleets.get(fleet_id)
    world.launching[fleet_id] = max(0, world.launching.get(fleet_id, 0) - 1)
    if fleet is None or fleet.state not in ("active", "modifying"):
        return
    if _weight(counted(world, fleet_id)) >= fleet.target:
        return
    spot = len([member for member in counted(world, fleet_id) if not member.is_spot]) >= fleet.on_demand
    place_of_launch = place(world, fleet, spot)
    if isinstance(place_of_launch, NoPlace):
        _try_later(world, fleet, place_of_launch)
        return
    spec, zone = place_of_launch.way, place_of_launch.zone
    tags = {TAG_EC2_FLEET if _is_ec2(fleet) else TAG_SPOT_FLEET: fleet_id}
    instance = instances.launch(
        world, spec["spec"], zone, spot=spot, fleet=fleet_id, fleet_tags=tags, weight=int(spec["weight"])
    )
    event = {
        "instanceType": instance.type,
        "image": instance.image,
        "productDescription": "Linux/UNIX",
        "availabilityZone": zone,
    }
    record(world, fleet_id, "instanceChange", "launched", json.dumps(event), instance.id)
    _set_activity(world, fleet_id)


def _try_later(world: World, fleet: Fleet, refused: NoPlace) -> None:
    for refusal in refused.refusals:
        record(world, fleet.id, refusal.type, refusal.sub_type, refusal.description)
    world.launching[fleet.id] = world.launching.get(fleet.id, 0) + 1
    world.later(world.latencies.set_aside, lambda: _launch(world, fleet.id))
    _set_activity(world, fleet.id)


def _weight(instances: list[Instance]) -> int:
    return sum(instance.weight for instance in instances)


def _set_activity(world: World, fleet_id: str) -> None:
    fleet = world.fleets[fleet_id]
    last = world.history[fleet_id][-1]
    full = _weight(counted(world, fleet_id)) >= fleet.target
    activity = "fulfilled" if full else "error" if last.type == "error" else "pending_fulfillment"
    if activity != fleet.activity or fleet.state == "modifying":
        world.fleets.put(
            replace(fleet, activity=activity, state="active" if fleet.state == "modifying" else fleet.state)
        )


def record(world: World, fleet_id: str, kind: str, sub_type: str, description: str, instance: str = "") -> None:
    event = FleetEvent(world.now(), kind, sub_type, description, instance)
    world.history.setdefault(fleet_id, []).append(event)


# ------------------------------------------------------------------------------------------------------------------ end
def end_fleet(world: World, fleet: Fleet, terminate: bool) -> str:
    """Cancel: no launches any more; its instances end soon, or go on. Returns the new state.

    A fleet that has no instance, too, is `deleted_running` or `deleted_terminating` at first (moto's
    `test_delete_fleet`, which was run against AWS).
    """
    instances_of_fleet = members(world, fleet.id)
    state = "cancelled_terminating" if terminate else "cancelled_running"
    world.ending.add(fleet.id)
    world.fleets.put(replace(fleet, state=state))
    record(world, fleet.id, "fleetRequestChange", state, "")
    world.launching[fleet.id] = 0
    if terminate:
        for instance in instances_of_fleet:
            _end_later(world, instance.id)
    world.later(world.latencies.fleet_terminate, lambda: _seen_to_its_end(world, fleet.id))
    world.later(world.latencies.cancelled_visible, lambda: world.fleets.remove(fleet.id))
    return state


def _seen_to_its_end(world: World, fleet_id: str) -> None:
    world.ending.discard(fleet_id)
    fleet = world.fleets.get(fleet_id)
    if fleet is not None and fleet.state != "cancelled" and not members(world, fleet_id):
        world.fleets.put(replace(fleet, state="cancelled"))
        record(world, fleet_id, "fleetRequestChange", "cancelled", "")


def _end_later(world: World, instance_id: str) -> None:
    # A fleet that is cancelled ends its instances by the API, as a user does.
    world.later(world.latencies.fleet_terminate, lambda: instances.shut_down(world, instance_id, instances.BY_USER))


def settle(world: World) -> None:
    """Bring fleets in line with what their instances became: replace, record, and finish a cancelled fleet."""
    changes = (world.instances.changes, world.fleets.changes)
    if changes == world.settled:
        return
    for fleet in world.fleets.all():
        if fleet.state in ("cancelled_running", "cancelled_terminating") and fleet.id not in world.ending:
            _seen_to_its_end(world, fleet.id)
        _record_ends(world, fleet.id)
        balance(world, fleet.id)
    world.settled = (world.instances.changes, world.fleets.changes)


def _record_ends(world: World, fleet_id: str) -> None:
    ended = {event.instance for event in world.history[fleet_id] if event.sub_type == "terminated"}
    notified = {event.instance for event in world.history[fleet_id] if event.sub_type == "termination_notified"}
    for instance in world.instances.all():
        if instance.fleet != fleet_id:
            continue
        if instance.notice is not None and instance.id not in notified:
            record(world, fleet_id, "instanceChange", "termination_notified", "", instance.id)
        if instance.state == "terminated" and instance.id not in ended:
            record(world, fleet_id, "instanceChange", "terminated", instance.reason[1], instance.id)


def cancel_spot_fleet_requests(world: World, params: Params, caller: str | None) -> Item:
    successful, unsuccessful = [], []
    for fleet_id in params["SpotFleetRequestIds"]:
        fault = refusal(world, fleet_id, "sfr-", "fleetRequest")
        if fault is not None:
            unsuccessful.append({"SpotFleetRequestId": fleet_id, "Error": fault})
            continue
        fleet = world.fleets[fleet_id]
        state = end_fleet(world, fleet, bool(params["TerminateInstances"]))
        successful.append(
            {
                "SpotFleetRequestId": fleet_id,
                "CurrentSpotFleetRequestState": state,
                "PreviousSpotFleetRequestState": fleet.state,
            }
        )
    return {"SuccessfulFleetRequests": successful, "UnsuccessfulFleetRequests": unsuccessful}


def refusal(world: World, fleet_id: str, prefix: str, name: str) -> Item | None:
    """Why this fleet cannot be cancelled, as AWS says it inside a successful answer; None where it can."""
    if not fleet_id.startswith(prefix):
        return {"Code": f"{name}IdMalformed", "Message": f"The fleet request ID {fleet_id} is malformed."}
    fleet = world.fleets.get(fleet_id)
    if fleet is None:
        return {"Code": f"{name}IdDoesNotExist", "Message": f"The fleet request ID {fleet_id} does not exist."}
    if world.faults.take("cancels_unsuccessful"):
        return {"Code": "unexpectedError", "Message": "An unexpected error occurred."}
    can_still_end = prefix == "fleet-" and fleet.state == "cancelled_running"  # deleted once, its instances go on
    if fleet.state in _CANCELLED and not can_still_end:
        code = "fleetRequestNotInCancellableState" if prefix == "sfr-" else "fleetNotInDeletableState"
        return {"Code": code, "Message": f"The fleet request {fleet_id} is in the state {fleet.state}."}
    return None


def modify_spot_fleet_request(world: World, params: Params, caller: str | None) -> Item:
    fleet = known(world, params["SpotFleetRequestId"])
    if fleet.state != "active":
        raise ApiError("InvalidSpotFleetRequestConfig", f"The Spot Fleet request is in the state {fleet.state}.")
    if fleet.kind != "maintain":
        raise ApiError("InvalidSpotFleetRequestConfig", "Only a Spot Fleet request of type maintain can be modified.")
    target = params.get("TargetCapacity")
    on_demand = params.get("OnDemandTargetCapacity")
    set_targets(world, fleet, target, on_demand, params.get("ExcessCapacityTerminationPolicy") or "default")
    return {"Return": True}


def set_targets(world: World, fleet: Fleet, target: int | None, on_demand: int | None, policy: str) -> None:
    target = fleet.target if target is None else int(target)
    on_demand = fleet.on_demand if on_demand is None else int(on_demand)
    world.fleets.put(replace(fleet, state="modifying", target=target, on_demand=on_demand))
    record(world, fleet.id, "fleetRequestChange", "modify_in_progress", f"target capacity {target}")
    running = counted(world, fleet.id)
    excess = _weight(running) - target
    for instance in running:
        if policy.lower() == "default" and excess >= instance.weight:
            excess -= instance.weight
            _end_later(world, instance.id)
    world.launching[fleet.id] = 0  # what is set aside does not keep another kind of instance waiting
    balance(world, fleet.id)


# ------------------------------------------------------------------------------------------------------------- describe
def known(world: World, fleet_id: str) -> Fleet:
    fleet = next((candidate for candidate in world.fleets.at(world.viewed()) if candidate.id == fleet_id), None)
    if fleet is None:
        raise ApiError("InvalidSpotFleetRequestId.NotFound", f"The spot fleet request ID '{fleet_id}' does not exist")
    return fleet


def describe_spot_fleet_requests(world: World, params: Params, caller: str | None) -> Item:
    fleet_ids = params.get("SpotFleetRequestIds")
    fleets = [fleet for fleet in world.fleets.at(world.viewed()) if fleet.id.startswith("sfr-")]
    if fleet_ids:
        fleets = [known(world, fleet_id) for fleet_id in fleet_ids]
    return page(params, [_shaped(world, fleet) for fleet in fleets], "SpotFleetRequestConfigs", world.page_size)


def describe_spot_fleet_instances(world: World, params: Params, caller: str | None) -> Item:
    known(world, params["SpotFleetRequestId"])
    members_of_fleet = [
        instance for instance in world.instances.at(world.viewed()) if instance.fleet == params["SpotFleetRequestId"]
    ]
    items = [
        {
            "InstanceId": instance.id,
            "InstanceType": instance.type,
            "SpotInstanceRequestId": instance.spot_request,
            "InstanceHealth": "healthy",
        }
        for instance in members_of_fleet
        if instance.state in ("pending", "running")
    ]
    return {
        **page(params, items, "ActiveInstances", world.page_size),
        "SpotFleetRequestId": params["SpotFleetRequestId"],
    }


def describe_spot_fleet_request_history(world: World, params: Params, caller: str | None) -> Item:
    fleet_id = params["SpotFleetRequestId"]
    known(world, fleet_id)
    since = utc(params["StartTime"])
    assert since is not None
    items = [
        history_item(event)
        for event in world.history[fleet_id]
        if event.time >= since and params.get("EventType") in (None, event.type)
    ]
    times = {
        "SpotFleetRequestId": fleet_id,
        "StartTime": since,
        "LastEvaluatedTime": world.now().replace(microsecond=0),
    }
    return {**page(params, items, "HistoryRecords", world.page_size), **times}


def history_item(event: FleetEvent) -> Item:
    information = {"EventSubType": event.sub_type}
    if event.description:
        information["EventDescription"] = event.description
    if event.instance:
        information["InstanceId"] = event.instance
    return {"Timestamp": event.time, "EventType": event.type, "EventInformation": information}


def _shaped(world: World, fleet: Fleet) -> Item:
    config = {key: value for key, value in fleet.config.items() if key != "TagSpecifications"}
    running = counted(world, fleet.id)
    config |= {
        "TargetCapacity": fleet.target,
        "OnDemandTargetCapacity": fleet.on_demand,
        "FulfilledCapacity": float(_weight(running)),
        "OnDemandFulfilledCapacity": float(_weight([instance for instance in running if not instance.is_spot])),
        "AllocationStrategy": fleet.config.get("AllocationStrategy", "lowestPrice"),
        "Type": fleet.kind,
    }
    state = {"SpotFleetRequestId": fleet.id, "SpotFleetRequestState": fleet.state, "CreateTime": fleet.created}
    if fleet.state in ("active", "modifying"):
        state["ActivityStatus"] = fleet.activity
    return {**state, "SpotFleetRequestConfig": config, "Tags": tag_list(fleet.tags)}


def utc(time: Any) -> datetime | None:
    """A time as boto3 takes it: a datetime with or without a zone, or text."""
    if time is None or time == "":
        return None
    if isinstance(time, str):
        time = datetime.fromisoformat(time.replace("Z", "+00:00"))
    assert isinstance(time, datetime)
    return time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time.astimezone(timezone.utc)


OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "RequestSpotFleet": request_spot_fleet,
    "CancelSpotFleetRequests": cancel_spot_fleet_requests,
    "ModifySpotFleetRequest": modify_spot_fleet_request,
    "DescribeSpotFleetRequests": describe_spot_fleet_requests,
    "DescribeSpotFleetInstances": describe_spot_fleet_instances,
    "DescribeSpotFleetRequestHistory": describe_spot_fleet_request_history,
}
