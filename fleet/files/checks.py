"""This project's own rules for a fleet, stricter than AWS's. Pure; a fault reads `field: the fault and the cure`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from spotheal.fleet.files.places import ZONE, region_of, spec_subnets, split_list
from spotheal.fleet.files.shape import known_types

USER_DATA_PLACEHOLDER = "base64_encoded_bash_script"  # stands for the script in the article's file
_PLACEHOLDER = re.compile(r"<[A-Za-z_][A-Za-z0-9_ -]*>")
_PLACEHOLDER_CURES = {
    "ACCOUNT_NUMBER": "`aws sts get-caller-identity --query Account --output text` prints it",
    "KEYPAIR_NAME": "`aws ec2 describe-key-pairs --query 'KeyPairs[].KeyName'` lists them",
    "SECURITY_GROUP_ID": "`aws ec2 describe-security-groups --query 'SecurityGroups[].[GroupId,GroupName]'` lists them",
    "AMI_ID": "`fleetctl init` with credentials finds the newest Deep Learning AMI; or write one of yours",
    "SUBNET_ID": "`aws ec2 describe-subnets --query 'Subnets[].[SubnetId,AvailabilityZone]'` lists them",
}
_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_SUBNET = re.compile(r"subnet-[0-9a-f]{8}(?:[0-9a-f]{9})?")
_AMI = re.compile(r"ami-[0-9a-f]{8}(?:[0-9a-f]{9})?")
_IAM_ARN = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):")
_ROLE_ARN = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")


def is_walkable(document: dict[str, Any]) -> bool:
    """Whether lists are lists and objects are objects, so that our checks can look inside."""
    specs, configs = document.get("LaunchSpecifications", []), document.get("LaunchTemplateConfigs", [])
    if not isinstance(specs, list) or not isinstance(configs, list):
        return False
    for spec in specs:
        if not isinstance(spec, dict) or not isinstance(spec.get("Placement", {}), dict):
            return False
        texts = [
            spec.get("SubnetId", ""),
            spec.get("Placement", {}).get("AvailabilityZone", ""),
            spec.get("UserData", ""),
        ]
        cards = spec.get("NetworkInterfaces", [])
        if not all(isinstance(text, str) for text in texts) or not isinstance(cards, list):
            return False
        if not all(isinstance(card, dict) and isinstance(card.get("SubnetId", ""), str) for card in cards):
            return False
    for config in configs:
        overrides = config.get("Overrides", []) if isinstance(config, dict) else None
        if not isinstance(overrides, list) or not all(isinstance(override, dict) for override in overrides):
            return False
    return True


def _strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}[{index}]")


def placeholder_faults(document: dict[str, Any]) -> list[str]:
    """One fault for each `<WORD>` in the file: its places, and how to find its value."""
    places: dict[str, list[str]] = {}
    for path, text in _strings(document):
        for word in _PLACEHOLDER.findall(text):
            places.setdefault(word, []).append(path)
    faults = []
    for word, paths in places.items():
        cure = _PLACEHOLDER_CURES.get(
            word.strip("<>").upper().replace("-", "_").replace(" ", "_"), "write the value in its place"
        )
        faults.append(f"the placeholder {word} is still in {_few(paths)}; {cure}")
    return faults


def _few(places: list[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def _filled(value: Any) -> bool:
    """Whether there is a value to check: placeholders have their own fault."""
    return isinstance(value, str) and value != "" and not _PLACEHOLDER.search(value)


def fleet_faults(document: dict[str, Any]) -> list[str]:
    """What AWS would accept, but this project cannot use."""
    return [*_whole_faults(document), *_place_faults(document)]


def _whole_faults(document: dict[str, Any]) -> Iterator[str]:
    """A job has one volume, and one instance at a time may write to it."""
    capacity = document.get("TargetCapacity")
    if isinstance(capacity, int) and not isinstance(capacity, bool) and capacity != 1:
        yield f"TargetCapacity: must be 1, is {capacity}: the job's volume can be attached to one instance"
    if document.get("OnDemandTargetCapacity"):
        yield "OnDemandTargetCapacity: must be left out: this fleet is spot only"
    kind = document.get("Type", "maintain")
    if kind != "maintain":
        yield f'Type: must be "maintain", is {kind!r}: no other type replaces an interrupted instance'
    strategies = document.get("SpotMaintenanceStrategies")
    if isinstance(strategies, dict) and strategies.get("CapacityRebalance"):
        yield "SpotMaintenanceStrategies.CapacityRebalance: must be left out: it runs two instances side by side"
    if document.get("InstanceInterruptionBehavior") == "hibernate":
        yield 'InstanceInterruptionBehavior: must not be "hibernate", which comes without two minutes\' notice'
    role = document.get("IamFleetRole")
    if _filled(role) and not _ROLE_ARN.fullmatch(str(role)):
        yield f'IamFleetRole: "{role}" is not of the form arn:aws:iam::123456789012:role/NAME'
    yield from _account_faults(document)
    has_specs, has_configs = bool(document.get("LaunchSpecifications")), bool(document.get("LaunchTemplateConfigs"))
    if has_specs and has_configs:
        yield "LaunchSpecifications and LaunchTemplateConfigs: AWS takes one of them; remove the other"
    if not has_specs and not has_configs:
        yield "LaunchSpecifications: is required (or LaunchTemplateConfigs): which instances to launch, and where"


def _account_faults(document: dict[str, Any]) -> Iterator[str]:
    """AWS accepts such a request, and then launches nothing: a fleet's role cannot pass a role of another account."""
    first: dict[str, str] = {}
    for path, text in _strings(document):
        if match := _IAM_ARN.match(text):
            first.setdefault(match.group(1), path)
    if len(first) > 1:
        places = " and ".join(f"{path} is of account {account}" for account, path in first.items())
        cure = "`aws sts get-caller-identity` prints yours, `fleetctl init --force` writes the file for it"
        yield f"{places}, but a fleet has one account; {cure}"


def _place_faults(document: dict[str, Any]) -> Iterator[str]:
    regions: dict[str, str] = {}
    for index, spec in enumerate(document.get("LaunchSpecifications") or []):
        yield from _specification_faults(f"LaunchSpecifications[{index}]", spec, regions)
    for index, config in enumerate(document.get("LaunchTemplateConfigs") or []):
        yield from _template_faults(f"LaunchTemplateConfigs[{index}]", config, regions)
    if len(regions) > 1:
        yield f"zones of several regions: {', '.join(regions.values())}; a fleet lives in one"


def _specification_faults(path: str, spec: dict[str, Any], regions: dict[str, str]) -> Iterator[str]:
    image = spec.get("ImageId")
    if image is None:
        yield f"{path}.ImageId: is required"
    elif _filled(image) and not _AMI.fullmatch(image):
        yield f'{path}.ImageId: "{image}" is not of the form ami-0123456789abcdef0'
    yield from _type_faults(path, spec)
    if not spec.get("InstanceType") and not spec.get("InstanceRequirements"):
        yield f"{path}.InstanceType: is required"
    if not spec.get("IamInstanceProfile"):
        yield f"{path}.IamInstanceProfile: is required, or the agent may not touch the volume"
    data = spec.get("UserData")
    if data and data != USER_DATA_PLACEHOLDER and _filled(data):
        yield f"{path}.UserData: is filled by fleetctl; leave it out (commands of your own: `setup` in job.toml)"
    zones = split_list(spec.get("Placement", {}).get("AvailabilityZone", ""))
    yield from _zone_faults(f"{path}.Placement.AvailabilityZone", zones, regions)
    for subnet in spec_subnets(spec):
        if _filled(subnet) and not _SUBNET.fullmatch(subnet):
            yield f'{path}.SubnetId: "{subnet}" is not of the form subnet-0123456789abcdef0'
    if not zones and not spec_subnets(spec):
        yield f'{path}: names no zone; add Placement.AvailabilityZone, such as "us-west-2a, us-west-2b", or SubnetId'
    yield from _weight_faults(path, spec)


def _template_faults(path: str, config: dict[str, Any], regions: dict[str, str]) -> Iterator[str]:
    named = config.get("LaunchTemplateSpecification")
    if not isinstance(named, dict) or not (named.get("LaunchTemplateId") or named.get("LaunchTemplateName")):
        yield f"{path}.LaunchTemplateSpecification: needs LaunchTemplateId or LaunchTemplateName"
    for index, override in enumerate(config.get("Overrides") or []):
        yield from _type_faults(f"{path}.Overrides[{index}]", override)
        zone = override.get("AvailabilityZone")
        yield from _zone_faults(
            f"{path}.Overrides[{index}].AvailabilityZone", [zone] if isinstance(zone, str) else [], regions
        )
        yield from _weight_faults(f"{path}.Overrides[{index}]", override)


def _type_faults(path: str, place: dict[str, Any]) -> Iterator[str]:
    kind = place.get("InstanceType")
    if _filled(kind) and not _TYPE.fullmatch(str(kind)):
        yield f'{path}.InstanceType: "{kind}" is not of the form g5.xlarge'


def _zone_faults(path: str, zones: list[str], regions: dict[str, str]) -> Iterator[str]:
    for zone in zones:
        if not _filled(zone):
            continue
        if not ZONE.fullmatch(zone):
            yield f'{path}: "{zone}" is not of the form us-west-2a'
        else:
            regions.setdefault(region_of(zone), zone)


def _weight_faults(path: str, place: dict[str, Any]) -> Iterator[str]:
    weight = place.get("WeightedCapacity")
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight < 1:
        yield f"{path}.WeightedCapacity: must be 1 or more, is {weight}: with less AWS launches several instances"


def _unknown_types(document: dict[str, Any]) -> dict[str, str]:
    """The instance types that this botocore does not know, each with the nearest that it knows, or ""."""
    places = list(document.get("LaunchSpecifications") or [])
    for config in document.get("LaunchTemplateConfigs") or []:
        places += config.get("Overrides") or []
    legal = known_types()
    names = (str(place.get("InstanceType") or "") for place in places)
    unknown = [name for name in names if name and name not in legal]
    return {name: next(iter(get_close_matches(name, sorted(legal), 1)), "") for name in unknown}


def fleet_warnings(document: dict[str, Any]) -> list[str]:
    warnings = []
    if document.get("AllocationStrategy") == "lowestPrice":
        warnings.append(
            'AllocationStrategy "lowestPrice" is interrupted most; "priceCapacityOptimized" is what AWS recommends'
        )
    for kind, near in _unknown_types(document).items():
        hint = f"; did you mean {near}?" if near else ""
        warnings.append(f"InstanceType {kind} is not known here{hint} `fleetctl request` asks AWS")
    if document.get("ClientToken"):
        warnings.append("ClientToken is replaced by one made of the run, so that the same request is never sent twice")
    if document.get("ValidUntil") and document.get("TerminateInstancesWithExpiration") is False:
        warnings.append("TerminateInstancesWithExpiration is false: after ValidUntil instances go on and cost")
    return warnings
