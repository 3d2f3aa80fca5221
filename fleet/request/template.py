"""Launch specifications as launch templates. Pure.

A spot fleet's launch specification has no MetadataOptions: only a launch template can require IMDSv2 and keep the hop
limit at 1, and only a template can have both user data and overrides. So each specification becomes a new template for
the run, with one override for each zone or subnet; the user's own template is copied, never changed.
"""

from __future__ import annotations

import copy
from typing import Any

from spotheal.fleet.files.checks import USER_DATA_PLACEHOLDER
from spotheal.fleet.files.places import spec_subnets, split_list
from spotheal.fleet.files.shape import input_shape

# Same name and same shape on both sides.
_SAME = (
    "BlockDeviceMappings",
    "EbsOptimized",
    "IamInstanceProfile",
    "ImageId",
    "KernelId",
    "KeyName",
    "NetworkInterfaces",
)
METADATA_OPTIONS = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"}


def template_data(spec: dict[str, Any], user_data: str, tags: list[dict[str, str]], *, harden: bool) -> dict[str, Any]:
    """LaunchTemplateData from a launch specification; the zones and subnets are in `overrides`."""
    data: dict[str, Any] = {name: copy.deepcopy(spec[name]) for name in _SAME if name in spec}
    if "RamdiskId" in spec:
        data["RamDiskId"] = spec["RamdiskId"]
    if "Monitoring" in spec:
        data["Monitoring"] = {"Enabled": bool(spec["Monitoring"].get("Enabled"))}
    groups = spec.get("SecurityGroups", [])
    if by_id := [group["GroupId"] for group in groups if group.get("GroupId")]:
        data["SecurityGroupIds"] = by_id
    if by_name := [group["GroupName"] for group in groups if group.get("GroupName") and not group.get("GroupId")]:
        data["SecurityGroups"] = by_name
    placement = {
        name: spec["Placement"][name] for name in ("GroupName", "Tenancy") if spec.get("Placement", {}).get(name)
    }
    if placement:
        data["Placement"] = placement
    for card in data.get("NetworkInterfaces", []):
        card.pop("SubnetId", None)  # the override names it
    theirs = own_instance_tags(spec)
    if theirs:
        data["TagSpecifications"] = [{"ResourceType": "instance", "Tags": theirs}]
    return completed(data, user_data, tags, harden=harden)


def completed(data: dict[str, Any], user_data: str, tags: list[dict[str, str]], *, harden: bool) -> dict[str, Any]:
    """Template data with the agent's needs: user data, tags on instances and their disks, IMDSv2."""
    whole = copy.deepcopy(data)
    whole["UserData"] = user_data
    # EC2 terminates a spot instance that shuts down, but only stops an on-demand one, whose disk then costs for ever.
    whole["InstanceInitiatedShutdownBehavior"] = "terminate"
    if harden:
        whole["MetadataOptions"] = {**whole.get("MetadataOptions", {}), **METADATA_OPTIONS}
    other_tags = [entry for entry in whole.get("TagSpecifications", []) if entry.get("ResourceType") != "instance"]
    instance = {"ResourceType": "instance", "Tags": with_ours(own_instance_tags(whole), tags)}
    whole["TagSpecifications"] = [*other_tags, instance]
    return whole


def overrides(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """One override for each subnet, else each zone: only launch specifications accept a list in one text."""
    base: dict[str, Any] = {
        name: spec[name]
        for name in ("InstanceType", "InstanceRequirements", "SpotPrice", "WeightedCapacity")
        if name in spec
    }
    if subnets := spec_subnets(spec):
        return [{**base, "SubnetId": subnet} for subnet in subnets]
    zones = split_list(spec.get("Placement", {}).get("AvailabilityZone", ""))
    return [{**base, "AvailabilityZone": zone} for zone in zones] or [base]


def from_described(described: dict[str, Any]) -> dict[str, Any]:
    """LaunchTemplateData for a new template, from DescribeLaunchTemplateVersions' answer for another.

    The answer has keys that the request does not accept; botocore's model of the request says which to leave out.
    """
    result = _pruned(described, input_shape("CreateLaunchTemplate").members["LaunchTemplateData"])
    assert isinstance(result, dict)
    if result.get("UserData") == USER_DATA_PLACEHOLDER:
        del result["UserData"]
    return result


def merged(tags: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each key once; the later value wins."""
    return [{"Key": key, "Value": value} for key, value in {tag["Key"]: tag["Value"] for tag in tags}.items()]


def with_ours(theirs: list[dict[str, str]], ours: list[dict[str, str]]) -> list[dict[str, str]]:
    """The user's `Name` stays; the tags by which the agent finds its run (`spotheal:…`) are ours."""
    return merged([*ours, *theirs, *(tag for tag in ours if tag["Key"].startswith("spotheal:"))])


def own_instance_tags(holder: dict[str, Any]) -> list[dict[str, str]]:
    return [
        tag
        for entry in holder.get("TagSpecifications", [])
        if entry.get("ResourceType", "instance") == "instance"
        for tag in entry.get("Tags", [])
    ]


def _pruned(value: Any, shape: Any) -> Any:
    if shape.type_name == "structure":
        members = {name: _pruned(item, shape.members[name]) for name, item in value.items() if name in shape.members}
        return {name: item for name, item in members.items() if item not in ({}, [])}
    if shape.type_name == "list":
        return [_pruned(item, shape.member) for item in value]
    return value
