"""Instances and the spot requests behind them: launch, the states they pass through, interruption, and their end."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from spotheal.fleet.files.shape import known_types
from spotheal.fleet.rehearsal.ec2.capacity import has_no_capacity
from spotheal.fleet.rehearsal.ec2.ebs import ROOT_DEVICE, attached_to, let_go
from spotheal.fleet.rehearsal.ec2.filters import (
    Field,
    Item,
    named,
    no_ids_with_pages,
    page,
    select,
    tag_list,
    tags_for,
)
from spotheal.fleet.rehearsal.ec2.spotmarket import spot_price
from spotheal.fleet.rehearsal.ec2.world import ApiError, Instance, Notice, SpotRequest, World, not_here

Params = Mapping[str, Any]
_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
_TERMINATED_VISIBLE_SECONDS = 3600.0
USER_DATA_BYTES_MAX = 16384
# Code and message of StateReason, as EC2's reference and people's describes have them.
BY_SPOT = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Spot instance termination")
STOPPED_BY_SPOT = ("Server.SpotInstanceShutdown", "Server.SpotInstanceShutdown: Spot instance shutdown")
BY_USER = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")
BY_ITSELF = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")


def user_data(encoded: str | None) -> bytes:
    """User data as the instance will see it; refused above 16,384 bytes."""
    if not encoded:
        return b""
    try:
        raw = base64.b64decode(encoded, validate=False)
    except ValueError:
        raise ApiError("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from None
    if len(raw) > USER_DATA_BYTES_MAX:
        raise ApiError("InvalidParameterValue", "User data is limited to 16384 bytes")
    return raw


# --------------------------------------------------------------------------------------------------------------- launch
def launch(
    world: World,
    spec: Params,
    zone: str,
    *,
    spot: bool,
    fleet: str = "",
    fleet_tags: Mapping[str, str] | None = None,
    weight: int = 1,
    reservation: str = "",
) -> Instance:
    """A new instance, `pending`; with `spot` its active spot request too."""
    own_tags = tags_for(spec, "instance") | dict(fleet_tags or {})
    instance_id = world.new_id("i")
    request = None
    if spot:
        request = world.requests.put(
            SpotRequest(
                id=f"sir-{world.random.getrandbits(40):010x}"[:12],
                instance=instance_id,
                fleet=fleet,
                created=world.now(),
                price=spot_price(spec.get("InstanceType", ""), zone),
                spec={key: value for key, value in spec.items() if key not in ("UserData", "TagSpecifications")},
                zone=zone,
                tags=tags_for(spec, "spot-instances-request") | dict(fleet_tags or {}),
            )
        )
    instance = world.instances.put(
        Instance(
            id=instance_id,
            reservation=reservation or world.new_id("r"),
            zone=zone,
            type=str(spec.get("InstanceType", "m1.small")),
            image=str(spec.get("ImageId", "")),
            launched=world.now().replace(microsecond=0),
            spec=spec,
            user_data=user_data(spec.get("UserData")),
            spot_request=request.id if request else "",
            fleet=fleet,
            weight=weight,
            tags=own_tags,
        )
    )
    world.tell(world.hooks.on_launch, instance.id)
    world.later(world.latencies.running, lambda: _move(world, instance.id, "pending", "running"))
    return instance


def _move(world: World, instance_id: str, old: str, new: str) -> None:
    instance = world.instances.get(instance_id)
    if instance is not None and instance.state == old:
        world.instances.put(replace(instance, state=new))


def run_instances(world: World, params: Params, caller: str | None) -> Item:
    """On-demand, or one-time spot with InstanceMarketOptions; all or nothing."""
    if params.get("LaunchTemplate"):
        raise not_here("RunInstances with LaunchTemplate")
    for key in ("ImageId", "MinCount", "MaxCount"):
        if not params.get(key):
            raise ApiError("MissingParameter", f"The request must contain the parameter {key}")
    user_data(params.get("UserData"))
    if (kind := params.get("InstanceType")) and kind not in known_types():
        raise ApiError("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
    if absent := world.image_fault(params["ImageId"]):
        raise ApiError("InvalidAMIID.NotFound", absent)
    if fault := world.launch_fault(params):
        raise ApiError("InvalidParameterValue", fault)
    token = params.get("ClientToken", "")
    stored = world.tokens.get(("RunInstances", token)) if token else None
    if stored is not None:
        earlier = [instance for instance in world.instances.all() if instance.reservation == stored[1]]
        return _reservation(world, earlier)
    zone = (params.get("Placement") or {}).get("AvailabilityZone") or world.zone_of_subnet(params.get("SubnetId", ""))
    zone = zone or world.random.choice(world.zones)
    if zone not in world.zones:
        raise ApiError("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
    if has_no_capacity(world, zone):
        raise ApiError(
            "InsufficientInstanceCapacity",
            f"We currently do not have sufficient {params.get('InstanceType', '')} capacity in the Availability Zone"
            f" you requested ({zone}).",
            500,
        )
    spot = (params.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
    reservation = world.new_id("r")
    spec = {key: value for key, value in params.items() if key not in ("MinCount", "MaxCount", "ClientToken", "DryRun")}
    new_instances = [launch(world, spec, zone, spot=spot, reservation=reservation) for _ in range(params["MaxCount"])]
    if token:
        world.tokens["RunInstances", token] = (None, reservation, world.moment())
    return _reservation(world, new_instances)


# ------------------------------------------------------------------------------------------------------------------ end
def terminate_instances(world: World, params: Params, caller: str | None) -> Item:
    changes = []
    for instance in [world.instance(instance_id) for instance_id in params["InstanceIds"]]:
        before = instance.state
        shut_down(world, instance.id, BY_USER)
        changes.append(_change(instance.id, before, world.instances[instance.id].state))
    return {"TerminatingInstances": changes}


def stop_instances(world: World, params: Params, caller: str | None) -> Item:
    changes = []
    for instance in [world.instance(instance_id) for instance_id in params["InstanceIds"]]:
        if instance.is_spot:
            raise ApiError(
                "UnsupportedOperation", f"You can't stop the Spot Instance '{instance.id}' of a one-time request"
            )
        if instance.state not in ("running", "stopping", "stopped"):
            raise ApiError(
                "IncorrectInstanceState", f"The instance '{instance.id}' is not in a state it can be stopped from."
            )
        before = instance.state
        if before == "running":
            stop(world, instance.id, BY_USER)
        changes.append(_change(instance.id, before, world.instances[instance.id].state))
    return {"StoppingInstances": changes}


def shut_down(world: World, instance_id: str, reason: tuple[str, str]) -> None:
    """Begin the end: the operating system gets its time, then the power is cut. Ended twice is ended."""
    instance = world.instances.get(instance_id)
    if instance is None or instance.state in ("shutting-down", "terminated"):
        return
    was_on = instance.state not in ("stopped",)
    ending = replace(instance, state="shutting-down", reason=reason, reason_at=world.now(), leaving=True)
    world.instances.put(ending)
    close_request(
        world, instance, "instance-terminated-by-user" if "Client" in reason[0] else "instance-terminated-no-capacity"
    )
    seconds = world.latencies.shutdown if was_on else 0.0
    world.tell(world.hooks.on_shutdown, instance_id, seconds)
    world.later(seconds, lambda: cut(world, instance_id, reason))


def cut(world: World, instance_id: str, reason: tuple[str, str]) -> None:
    """The instance is gone now: terminated, its volumes free."""
    instance = world.instances.get(instance_id)
    if instance is None or instance.state == "terminated":
        return
    moment = world.now()
    ended = replace(instance, state="terminated", reason=reason, reason_at=instance.reason_at or moment, leaving=True)
    world.instances.put(replace(ended, ended=moment))
    close_request(world, instance, "instance-terminated-no-capacity")
    world.tell(world.hooks.on_terminate, instance_id)
    for volume in attached_to(world, instance_id):
        let_go(world, volume)
    world.later(_TERMINATED_VISIBLE_SECONDS, lambda: world.instances.remove(instance_id))


def switched_off(world: World, instance_id: str) -> None:
    """A one-time spot instance is terminated. Another one stops, with its volumes attached, unless its launch data says
    `terminate` (EC2 API reference, RunInstances, InstanceInitiatedShutdownBehavior: "Default: stop")."""
    instance = world.instances.get(instance_id)
    if instance is None or instance.is_spot or instance.spec.get("InstanceInitiatedShutdownBehavior") == "terminate":
        cut(world, instance_id, BY_ITSELF)
    elif instance.state in ("pending", "running"):
        world.instances.put(replace(instance, state="stopped", reason=BY_ITSELF, reason_at=world.now()))
        world.tell(world.hooks.on_stop, instance_id)


def stop(world: World, instance_id: str, reason: tuple[str, str]) -> None:
    """Stop: the power is cut after the operating system's time, the volumes stay attached."""
    instance = world.instances.get(instance_id)
    if instance is None or instance.state not in ("running", "pending"):
        return
    world.instances.put(replace(instance, state="stopping", reason=reason, reason_at=world.now()))
    world.tell(world.hooks.on_shutdown, instance_id, world.latencies.shutdown)

    def stopped() -> None:
        instance = world.instances.get(instance_id)
        if instance is not None and instance.state == "stopping":
            world.instances.put(replace(instance, state="stopped"))
            world.tell(world.hooks.on_stop, instance_id)

    world.later(world.latencies.shutdown, stopped)


def close_request(world: World, instance: Instance, status: str) -> None:
    request = world.requests.get(instance.spot_request)
    if request is not None:
        world.requests.put(replace(request, state="closed", status=status, updated=world.now()))


# -------------------------------------------------------------------------------------------------- what AWS does to it
def give_notice(world: World, instance_id: str, action: str, lead: float) -> None:
    """The interruption notice: the spot request is terminal from now on, the instance runs `lead` seconds more."""
    instance = world.instances[instance_id]
    if instance.state not in ("pending", "running"):
        return
    notice = Notice(action, world.now().replace(microsecond=0) + timedelta(seconds=lead))
    world.instances.put(replace(instance, notice=notice, leaving=True))
    close_request(world, instance, "marked-for-stop" if action == "stop" else "marked-for-termination")

    def comes_true() -> None:
        instance = world.instances.get(instance_id)
        if instance is None or instance.notice != notice:  # withdrawn, or given again
            return
        if action == "terminate":
            shut_down(world, instance_id, BY_SPOT)
        else:
            stop(world, instance_id, STOPPED_BY_SPOT)

    world.later(lead, comes_true)


# ------------------------------------------------------------------------------------------------------------- describe
def describe_instances(world: World, params: Params, caller: str | None) -> Item:
    no_ids_with_pages(params, "InstanceIds")
    items = [item(world, instance) for instance in world.instances.at(world.viewed())]
    items = named(items, params.get("InstanceIds"), "InstanceId", "InvalidInstanceID.NotFound")
    items_on_page = select(items, params.get("Filters"), _FIELDS)
    paged = page(params, items_on_page, "Instances", world.page_size, 5)
    reservations: dict[str, Item] = {}
    for instance_item in paged.pop("Instances"):
        reservation = world.instances.get(instance_item["InstanceId"])
        key = reservation.reservation if reservation else f"r-{instance_item['InstanceId'][2:]}"
        whole = {"ReservationId": key, "OwnerId": world.account, "Groups": [], "Instances": []}
        reservations.setdefault(key, whole)["Instances"].append(instance_item)
    return {"Reservations": list(reservations.values()), **paged}


def describe_instance_status(world: World, params: Params, caller: str | None) -> Item:
    no_ids_with_pages(params, "InstanceIds")
    items = [item(world, instance) for instance in world.instances.at(world.viewed())]
    items = named(items, params.get("InstanceIds"), "InstanceId", "InvalidInstanceID.NotFound")
    if not params.get("IncludeAllInstances"):
        items = [status for status in items if status["State"]["Name"] == "running"]
    statuses = [
        {
            "InstanceId": status["InstanceId"],
            "AvailabilityZone": status["Placement"]["AvailabilityZone"],
            "InstanceState": status["State"],
            "InstanceStatus": _health(status),
            "SystemStatus": _health(status),
        }
        for status in select(items, params.get("Filters"), _FIELDS)
    ]
    return page(params, statuses, "InstanceStatuses", world.page_size, 5)


def _health(instance_item: Item) -> Item:
    return {"Status": "ok" if instance_item["State"]["Name"] == "running" else "not-applicable"}


# --------------------------------------------------------------------------------------------------- shaped as by boto3
def item(world: World, instance: Instance) -> Item:
    live = instance.state != "terminated"
    address, public = addresses(instance)
    shaped: Item = {
        "InstanceId": instance.id,
        "ImageId": instance.image,
        "InstanceType": instance.type,
        "State": {"Code": _CODES[instance.state], "Name": instance.state},
        "LaunchTime": instance.launched,
        "Placement": {"AvailabilityZone": instance.zone, "Tenancy": "default"},
        "PrivateIpAddress": address if live else "",
        "PrivateDnsName": f"ip-{address.replace('.', '-')}.{world.region}.compute.internal" if live else "",
        **({"PublicIpAddress": public} if instance.state == "running" else {}),
        "Architecture": "x86_64",
        "RootDeviceName": ROOT_DEVICE,
        "RootDeviceType": "ebs",
        "BlockDeviceMappings": _devices(world, instance) if live else [],
        "AmiLaunchIndex": 0,
    }
    if groups := security_groups(instance.spec):
        shaped["SecurityGroups"] = [{"GroupId": group} for group in groups]
    if instance.tags:
        shaped["Tags"] = tag_list(instance.tags)
    if instance.is_spot:
        shaped |= {"InstanceLifecycle": "spot", "SpotInstanceRequestId": instance.spot_request}
    if instance.role:
        shaped["IamInstanceProfile"] = {"Arn": f"arn:aws:iam::{world.account}:instance-profile/{instance.role}"}
    if instance.spec.get("KeyName"):
        shaped["KeyName"] = instance.spec["KeyName"]
    options = instance.spec.get("MetadataOptions") or {}
    shaped["MetadataOptions"] = {
        "State": "applied", "HttpTokens": "optional", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled", **options
    }  # fmt: skip
    if instance.reason[0]:
        shaped["StateReason"] = {"Code": instance.reason[0], "Message": instance.reason[1]}
    shaped["StateTransitionReason"] = _transition(instance)
    return shaped


def security_groups(spec: Mapping[str, Any]) -> list[str]:
    """Their ids, which a specification may name in three places."""
    named = [group.get("GroupId") for group in spec.get("SecurityGroups") or [] if isinstance(group, Mapping)]
    cards = [group for card in spec.get("NetworkInterfaces") or [] for group in card.get("Groups") or []]
    ids = [*named, *cards, *(spec.get("SecurityGroupIds") or [])]
    return list(dict.fromkeys(str(group) for group in ids if group))


def addresses(instance: Instance) -> tuple[str, str]:
    """Private and public; no packet can reach either (RFC 5737), see `sshd`."""
    last = zlib.crc32(instance.id[::-1].encode()) % 250 + 4
    return f"10.0.{zlib.crc32(instance.id.encode()) % 250}.{last}", f"192.0.2.{last}"


def _transition(instance: Instance) -> str:
    """As AWS words it: with a time only where a user's call was the cause."""
    if instance.reason == BY_USER and instance.reason_at is not None:
        return f"User initiated ({instance.reason_at:%Y-%m-%d %H:%M:%S} GMT)"
    return instance.reason[0] if instance.reason in (BY_SPOT, STOPPED_BY_SPOT) else ""


def _devices(world: World, instance: Instance) -> list[Item]:
    """The root volume is only named here: it is no volume of the tables."""
    root = {"VolumeId": f"vol-{instance.id[2:]}", "Status": "attached", "DeleteOnTermination": True}
    devices = [
        (data_volume.attachment.device, data_volume.id, data_volume.attachment.state)
        for data_volume in attached_to(world, instance.id)
        if data_volume.attachment
    ]
    data_devices = [
        {"DeviceName": device, "Ebs": {"VolumeId": volume, "Status": state, "DeleteOnTermination": False}}
        for device, volume, state in devices
    ]
    return [{"DeviceName": ROOT_DEVICE, "Ebs": root}, *data_devices]


def _reservation(world: World, instances: list[Instance]) -> Item:
    items = [item(world, instance) for instance in instances]
    return {"ReservationId": instances[0].reservation, "OwnerId": world.account, "Groups": [], "Instances": items}


def _change(instance_id: str, before: str, after: str) -> Item:
    return {
        "InstanceId": instance_id,
        "PreviousState": {"Code": _CODES[before], "Name": before},
        "CurrentState": {"Code": _CODES[after], "Name": after},
    }


_FIELDS: dict[str, Field] = {
    "instance-id": lambda one: [one["InstanceId"]],
    "instance-state-name": lambda one: [one["State"]["Name"]],
    "instance-state-code": lambda one: [one["State"]["Code"]],
    "instance-type": lambda one: [one["InstanceType"]],
    "image-id": lambda one: [one["ImageId"]],
    "availability-zone": lambda one: [one["Placement"]["AvailabilityZone"]],
    "instance-lifecycle": lambda one: [one["InstanceLifecycle"]] if "InstanceLifecycle" in one else [],
    "spot-instance-request-id": lambda one: [one.get("SpotInstanceRequestId", "")],
    "key-name": lambda one: [one.get("KeyName", "")],
    "private-ip-address": lambda one: [one["PrivateIpAddress"]],
    "block-device-mapping.volume-id": lambda one: [each["Ebs"]["VolumeId"] for each in one["BlockDeviceMappings"]],
    "block-device-mapping.device-name": lambda one: [each["DeviceName"] for each in one["BlockDeviceMappings"]],
}
OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "RunInstances": run_instances,
    "TerminateInstances": terminate_instances,
    "StopInstances": stop_instances,
    "DescribeInstances": describe_instances,
    "DescribeInstanceStatus": describe_instance_status,
}
