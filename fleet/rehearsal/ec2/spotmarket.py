"""The spot market: one price for each type and zone, and the requests behind spot instances."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from spotheal.fleet.files.shape import known_types
from spotheal.fleet.rehearsal.ec2.filters import Field, Item, named, page, plain, select, tag_list
from spotheal.fleet.rehearsal.ec2.world import SpotRequest, World, not_here

Params = Mapping[str, Any]
# Dollars an hour on demand in us-west-2 as of 2025; what is not listed costs a plausible amount.
_ON_DEMAND = {
    "g4dn.xlarge": 0.526, "g4dn.2xlarge": 0.752, "g5.xlarge": 1.006, "g5.2xlarge": 1.212, "g6.xlarge": 0.805,
    "g4dn.4xlarge": 1.204, "g4dn.8xlarge": 2.176, "g4dn.12xlarge": 3.912, "g4dn.16xlarge": 4.352, "g5.4xlarge": 1.624,
    "g5.8xlarge": 2.448, "g5.12xlarge": 5.672, "g5.16xlarge": 4.096, "g5.48xlarge": 16.288, "g6.2xlarge": 0.978,
    "g6.4xlarge": 1.323, "g6.8xlarge": 2.014, "g6.12xlarge": 4.602, "g6.16xlarge": 3.397, "g6.48xlarge": 13.35,
    "gr6.4xlarge": 1.539, "gr6.8xlarge": 2.446, "g6e.xlarge": 1.861, "g6e.2xlarge": 2.242, "g6e.4xlarge": 3.004,
    "g6e.8xlarge": 4.529, "g6e.12xlarge": 10.493, "g6e.16xlarge": 7.577, "g6e.48xlarge": 30.131, "g7e.2xlarge": 3.363,
    "g7e.4xlarge": 4.002, "g7e.8xlarge": 5.267, "p4d.24xlarge": 21.958, "p5.4xlarge": 6.88, "p5.48xlarge": 55.04,
    "p2.xlarge": 0.90, "p3.2xlarge": 3.06, "p3.8xlarge": 12.24, "c5.xlarge": 0.17, "m5.large": 0.096,
    "t3.micro": 0.0104,
}  # fmt: skip


def describe_spot_instance_requests(world: World, params: Params, caller: str | None) -> Item:
    items = [_request(world, request) for request in world.requests.at(world.viewed())]
    request_ids = params.get("SpotInstanceRequestIds")
    items = named(items, request_ids, "SpotInstanceRequestId", "InvalidSpotInstanceRequestID.NotFound")
    selected = select(items, params.get("Filters"), _REQUEST_FIELDS)
    return page(params, selected, "SpotInstanceRequests", world.page_size, 5)


def describe_spot_price_history(world: World, params: Params, caller: str | None) -> Item:
    """One price for each type and zone, which never changes. At least a type must be named."""
    zones = [params["AvailabilityZone"]] if params.get("AvailabilityZone") else list(world.zones)
    types = params.get("InstanceTypes") or [
        value
        for condition in params.get("Filters") or []
        if condition["Name"] == "instance-type"
        for value in condition["Values"]
    ]
    prices = [
        {
            "InstanceType": kind,
            "AvailabilityZone": zone,
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": spot_price(kind, zone),
            "Timestamp": world.now().replace(minute=0, second=0, microsecond=0),
        }
        for kind in types
        for zone in zones
        if zone in world.zones
    ]
    fields: dict[str, Field] = {
        "instance-type": lambda one: [one["InstanceType"]],
        "availability-zone": lambda one: [one["AvailabilityZone"]],
        "product-description": lambda one: [one["ProductDescription"]],
        "spot-price": lambda one: [one["SpotPrice"]],
    }
    return page(params, select(prices, params.get("Filters"), fields), "SpotPriceHistory", world.page_size)


def describe_instance_type_offerings(world: World, params: Params, caller: str | None) -> Item:
    """Every type that botocore knows, everywhere: which zone lacks which type changes from month to month."""
    kind = params.get("LocationType") or "region"
    places = {"region": (world.region,), "availability-zone": world.zones}.get(kind)
    if places is None:
        raise not_here(f"DescribeInstanceTypeOfferings by {kind}")
    items = [{"InstanceType": name, "LocationType": kind, "Location": place}
             for name in sorted(known_types()) for place in places]  # fmt: skip
    fields: dict[str, Field] = {"instance-type": plain("InstanceType"), "location": plain("Location")}
    return page(params, select(items, params.get("Filters"), fields), "InstanceTypeOfferings", world.page_size)


def on_demand_price(kind: str) -> float:
    return _ON_DEMAND.get(kind, 0.1 + zlib.crc32(kind.encode()) % 400 / 1000)


def spot_price(kind: str, zone: str) -> str:
    """Between 28 and 42 % of the price on demand, by type and zone."""
    share = 0.28 + zlib.crc32(f"{kind} {zone}".encode()) % 141 / 1000
    return f"{on_demand_price(kind) * share:.6f}"


def _request(world: World, request: SpotRequest) -> Item:
    shaped: Item = {
        "SpotInstanceRequestId": request.id,
        "State": request.state,
        "Status": {"Code": request.status, "Message": "", "UpdateTime": request.updated or request.created},
        "Type": "one-time",
        "CreateTime": request.created,
        "InstanceId": request.instance,
        "SpotPrice": request.price,
        "LaunchedAvailabilityZone": request.zone,
        "ProductDescription": "Linux/UNIX",
        "InstanceInterruptionBehavior": "terminate",
        "LaunchSpecification": {
            key: request.spec[key]
            for key in ("ImageId", "InstanceType", "KeyName", "SubnetId")
            if request.spec.get(key)
        },
    }
    return shaped | ({"Tags": tag_list(request.tags)} if request.tags else {})


_REQUEST_FIELDS: dict[str, Field] = {
    "spot-instance-request-id": lambda one: [one["SpotInstanceRequestId"]],
    "state": lambda one: [one["State"]],
    "status-code": lambda one: [one["Status"]["Code"]],
    "instance-id": lambda one: [one["InstanceId"]],
    "launched-availability-zone": lambda one: [one["LaunchedAvailabilityZone"]],
}
OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "DescribeSpotInstanceRequests": describe_spot_instance_requests,
    "DescribeInstanceTypeOfferings": describe_instance_type_offerings,
    "DescribeSpotPriceHistory": describe_spot_price_history,
}
