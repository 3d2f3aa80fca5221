"""Machine images: those that AWS's public parameters name, and one that examples use. No other can be launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spotheal.fleet.rehearsal.ec2.filters import Field, Item, named, page, select
from spotheal.fleet.rehearsal.ec2.world import World

Params = Mapping[str, Any]


def describe_images(world: World, params: Params, caller: str | None) -> Item:
    items = [
        {"ImageId": image, "Name": name, "State": "available", "Architecture": "x86_64", "Public": True,
         "ImageType": "machine", "RootDeviceType": "ebs", "VirtualizationType": "hvm"}
        for image, name in sorted(world.images.items())
    ]  # fmt: skip
    items = named(items, params.get("ImageIds"), "ImageId", "InvalidAMIID.NotFound")
    return page(params, select(items, params.get("Filters"), _FIELDS), "Images", world.page_size)


_FIELDS: dict[str, Field] = {
    "image-id": lambda one: [one["ImageId"]],
    "name": lambda one: [one["Name"]],
    "state": lambda one: [one["State"]],
    "architecture": lambda one: [one["Architecture"]],
}
OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {"DescribeImages": describe_images}
