"""CreateTags, DeleteTags and DescribeTags over everything the rule book owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spotheal.fleet.rehearsal.ec2.filters import Field, Item, checked_tags, page, select
from spotheal.fleet.rehearsal.ec2.world import ApiError, Table, World

Params = Mapping[str, Any]
PREFIXES = {
    "vol-": "volume",
    "snap-": "snapshot",
    "i-": "instance",
    "sir-": "spot-instances-request",
    "sfr-": "spot-fleet-request",
    "fleet-": "fleet",
    "lt-": "launch-template",
}


def owns(resource: str) -> bool:
    """Whether the rule book knows this kind of thing (else it is moto's)."""
    return resource.startswith(tuple(PREFIXES))


def tables(world: World) -> dict[str, Table[Any]]:
    return {
        "volume": world.volumes,
        "snapshot": world.snapshots,
        "instance": world.instances,
        "spot-instances-request": world.requests,
        "spot-fleet-request": world.fleets,
        "fleet": world.fleets,
        "launch-template": world.templates,
    }


def create_tags(world: World, params: Params, caller: str | None) -> Item:
    new = checked_tags(params.get("Tags") or [])
    for table, thing in _things(world, params):
        merged = dict(thing.tags) | new
        if len([key for key in merged if not key.startswith("aws:")]) > 50:
            raise ApiError("TagLimitExceeded", "The maximum number of Tags for a resource is 50")
        table.put(replace(thing, tags=merged))
    return {}


def delete_tags(world: World, params: Params, caller: str | None) -> Item:
    """Without tags all are deleted but AWS's own; a tag with a value only where the value is the same."""
    named = params.get("Tags")
    for tag in named or []:
        if str(tag.get("Key", "")).startswith("aws:"):
            raise ApiError("InvalidParameterValue", "Tag keys starting with 'aws:' are reserved for internal use")
    for table, thing in _things(world, params):
        remaining_tags = {
            key: value for key, value in thing.tags.items() if key.startswith("aws:") or not _meant(named, key, value)
        }
        table.put(replace(thing, tags=remaining_tags))
    return {}


def _meant(named: list[Mapping[str, str]] | None, key: str, value: str) -> bool:
    if not named:
        return True
    return any(tag.get("Key") == key and tag.get("Value", value) in (value, None) for tag in named)


def _things(world: World, params: Params) -> list[tuple[Table[Any], Any]]:
    """All the things named, before the first is changed: a call with an unknown id changes nothing."""
    resources = []
    for resource in params.get("Resources") or []:
        kind = next((kind for prefix, kind in PREFIXES.items() if resource.startswith(prefix)), None)
        if kind is None:
            raise ApiError("InvalidID", f"The ID '{resource}' is not valid")
        if kind == "volume":
            world.volume(resource)
        elif kind == "snapshot":
            world.snapshot(resource)
        elif kind == "instance":
            world.instance(resource)
        table = tables(world)[kind]
        thing = table.get(resource)
        if thing is None:
            raise ApiError("InvalidID", f"The ID '{resource}' is not valid")
        resources.append((table, thing))
    return resources


def describe_tags(world: World, params: Params, caller: str | None) -> Item:
    items: list[Item] = []
    for prefix, kind in PREFIXES.items():
        for thing in tables(world)[kind].at(world.viewed()):
            if thing.id.startswith(prefix):
                items += [
                    {"ResourceId": thing.id, "ResourceType": kind, "Key": key, "Value": value}
                    for key, value in sorted(thing.tags.items())
                ]
    filters = [
        {"Name": "key-value:" + condition["Name"][4:], "Values": condition["Values"]}
        if condition["Name"].startswith("tag:")
        else condition
        for condition in params.get("Filters") or []
    ]
    fields: dict[str, Field] = {
        "resource-id": lambda one: [one["ResourceId"]],
        "resource-type": lambda one: [one["ResourceType"]],
        "key": lambda one: [one["Key"]],
        "value": lambda one: [one["Value"]],
    }
    for condition in filters:
        if str(condition["Name"]).startswith("key-value:"):
            fields[condition["Name"]] = _value_of(str(condition["Name"])[10:])
    return page(params, select(items, filters, fields), "Tags", world.page_size, 5)


def _value_of(key: str) -> Field:
    return lambda one: [one["Value"]] if one["Key"] == key else []


OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "CreateTags": create_tags,
    "DeleteTags": delete_tags,
    "DescribeTags": describe_tags,
}
