"""Launch specifications as launch templates. Pure.

A spot fleet's launch specification has no MetadataOptions: only a launch template can require IMDSv2 and keep the hop
limit at 1, and only a template can carry user data beside overrides. So each specification becomes a template of the
run's own and one override for each zone or subnet; a template of the user's is copied, never changed.
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
    """LaunchTemplateData of a launch specification; what varies by place goes to `overrides`."""
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
    """Template data with what the agent needs: user data, tags on instances and their disks, IMDSv2."""
    whole = copy.deepcopy(data)
    whole["UserData"] = user_data
    # EC2 ends a spot machine that switches itself off, but only stops an on-demand one, whose disk then costs for ever.
    whole["InstanceInitiatedShutdownBehavior"] = "terminate"
    if harden:
        whole["MetadataOptions"] = {**whole.get("MetadataOptions", {}), **METADATA_OPTIONS}
    kept = [entry for entry in whole.get("TagSpecifications", []) if entry.get("ResourceType") != "instance"]
    instance = {"ResourceType": "instance", "Tags": with_ours(own_instance_tags(whole), tags)}
    whole["TagSpecifications"] = [*kept, instance]
    return whole


def overrides(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """One override for each subnet, else each zone: a list in one text is for launch specifications only."""
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
    """LaunchTemplateData for a new template, of what DescribeLaunchTemplateVersions answered for another.

    AWS's answer holds keys that its request does not take; those are left out, by botocore's model of the request.
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
    """Their `Name` stays; what the agent finds its run by (`spotheal:…`) is ours."""
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
        kept = {name: _pruned(item, shape.members[name]) for name, item in value.items() if name in shape.members}
        return {name: item for name, item in kept.items() if item not in ({}, [])}
    if shape.type_name == "list":
        return [_pruned(item, shape.member) for item in value]
    return value
