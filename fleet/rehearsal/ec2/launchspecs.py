"""What a fleet's configuration lets it launch: one entry for each way, with the zones it may go to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spotheal.fleet.files.shape import known_types
from spotheal.fleet.rehearsal.ec2 import templates
from spotheal.fleet.rehearsal.ec2.instances import user_data
from spotheal.fleet.rehearsal.ec2.world import ApiError, World

Params = Mapping[str, Any]
Way = dict[str, Any]  # {"spec": shaped as for RunInstances, "zones": (…), "weight": n, "price": "" or dollars}
_FAULTY = "InvalidSpotFleetRequestConfig"


def resolve(world: World, config: Params) -> tuple[Way, ...]:
    """The ways of a SpotFleetRequestConfig; refuses what AWS refuses when the fleet is requested."""
    plain, templated = config.get("LaunchSpecifications") or [], config.get("LaunchTemplateConfigs") or []
    if bool(plain) == bool(templated):
        raise ApiError(_FAULTY, "Exactly one of LaunchSpecifications and LaunchTemplateConfigs must be specified.")
    ways = tuple(_of_specification(world, specification) for specification in plain) or of_templates(world, templated)
    # The words for a type that the region lacks (c6fc/npk issue 45); one that AWS does not know is its like.
    if unknown := unknown_types(ways):
        invalid = ",".join(f"(InstanceType: {name} with Os: Linux/UNIX and EC2-VPC)" for name in unknown)
        raise ApiError(_FAULTY, f"Invalid: {invalid}")
    return tuple({**way, "price": way["price"] or config.get("SpotPrice", "")} for way in ways)


def of_templates(world: World, configs: Iterable[Params]) -> tuple[Way, ...]:
    """The ways of launch template configs, which spot fleets and EC2 fleets share but for one case of letters."""
    ways: list[Way] = []
    for config in configs:
        specification = config.get("LaunchTemplateSpecification")
        if not specification:
            raise ApiError("MissingParameter", "The request must contain the parameter LaunchTemplateSpecification")
        data = templates.data_of(world, specification)
        for override in config.get("Overrides") or [{}]:
            ways.append(_of_template(world, data, override))
    return tuple(ways)


def _of_specification(world: World, specification: Params) -> Way:
    if not specification.get("ImageId"):
        raise ApiError(_FAULTY, "Parameter: ImageId is required in a launch specification.")
    if not specification.get("InstanceType") and not specification.get("InstanceRequirements"):
        raise ApiError(_FAULTY, "Parameter: InstanceType is required in a launch specification.")
    user_data(specification.get("UserData"))
    zones = (specification.get("Placement") or {}).get("AvailabilityZone", "")
    return _way(world, dict(specification), specification.get("SubnetId", ""), zones, specification)


def _of_template(world: World, data: Params, override: Params) -> Way:
    spec = dict(data)
    for key in ("InstanceType", "ImageId"):
        if override.get(key):
            spec[key] = override[key]
    if not spec.get("ImageId"):
        raise ApiError(_FAULTY, "The launch template names no ImageId.")
    spec.setdefault("InstanceType", "m5.large")
    placement = override.get("Placement") or data.get("Placement") or {}
    zone = override.get("AvailabilityZone") or placement.get("AvailabilityZone") or ""
    subnet = override.get("SubnetId") or _subnet(data)
    return _way(world, spec, subnet, zone, override)


def unknown_types(ways: Iterable[Params]) -> list[str]:
    """Instance types that AWS does not know, each once."""
    types = dict.fromkeys(str(way["spec"].get("InstanceType") or "") for way in ways)
    return [name for name in types if name and name not in known_types()]


def _subnet(data: Params) -> str:
    return next(
        (str(interface["SubnetId"]) for interface in data.get("NetworkInterfaces") or [] if interface.get("SubnetId")),
        "",
    )


def _way(world: World, spec: dict[str, Any], subnets: str, zones: str, terms: Params) -> Way:
    """`subnets` and `zones` may be lists with commas, as in a launch specification; `terms` has weight and price."""
    named = [zone.strip() for zone in zones.split(",") if zone.strip()]
    for subnet in (part.strip() for part in subnets.split(",") if part.strip()):
        zone = world.zone_of_subnet(subnet)
        if zone is None:
            raise ApiError("InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist")
        named.append(zone)
    unknown = [zone for zone in named if zone not in world.zones]
    if unknown:
        raise ApiError(_FAULTY, f"Parameter: AvailabilityZone {unknown[0]} is invalid.")
    spec.pop("SubnetId", None)
    return {
        "spec": spec,
        "zones": tuple(dict.fromkeys(named)) or world.zones,
        "weight": int(terms.get("WeightedCapacity") or 1),
        "price": terms.get("SpotPrice") or terms.get("MaxPrice") or "",
    }
