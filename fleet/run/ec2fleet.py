"""A spot fleet's request as a request of EC2 Fleet, AWS's successor of Spot Fleet. Pure.

The operator's file stays AWS's SpotFleetRequestConfig with either engine; `[fleet] engine = "ec2-fleet"` sends this.
Source: the CreateFleet and RequestSpotFleet shapes of botocore's EC2 service model.
"""

from __future__ import annotations

import copy
from typing import Any

from spotheal.agent.protocol.errors import ConfigError

_STRATEGIES = {
    "lowestPrice": "lowest-price",
    "diversified": "diversified",
    "capacityOptimized": "capacity-optimized",
    "capacityOptimizedPrioritized": "capacity-optimized-prioritized",
    "priceCapacityOptimized": "price-capacity-optimized",
}
_ON_DEMAND_STRATEGIES = {"lowestPrice": "lowest-price", "prioritized": "prioritized"}
_EXCESS = {"default": "termination", "noTermination": "no-termination"}
_SAME = ("ValidFrom", "ValidUntil", "TerminateInstancesWithExpiration", "ReplaceUnhealthyInstances", "Context")
# The spot fleet's name of an option, and CreateFleet's.
_SPOT_OPTIONS = {
    "InstanceInterruptionBehavior": "InstanceInterruptionBehavior",
    "InstancePoolsToUseCount": "InstancePoolsToUseCount",
    "SpotMaxTotalPrice": "MaxTotalPrice",
}
# IamFleetRole: an EC2 fleet uses the service-linked role. The rest is set here or read elsewhere.
_READ = {
    *_SAME, *_SPOT_OPTIONS, "AllocationStrategy", "ClientToken", "ExcessCapacityTerminationPolicy", "IamFleetRole",
    "LaunchTemplateConfigs", "OnDemandAllocationStrategy", "OnDemandMaxTotalPrice", "OnDemandTargetCapacity",
    "SpotPrice", "TagSpecifications", "TargetCapacity", "Type",
}  # fmt: skip


def check(document: dict[str, Any]) -> list[str]:
    """Keys of the operator's file that an EC2 fleet does not know."""
    known_keys = _READ | {"LaunchSpecifications"}
    return [f"{name}: an EC2 fleet has no such setting" for name in document if name not in known_keys]


def create_fleet(config: dict[str, Any]) -> dict[str, Any]:
    """CreateFleet's arguments, without ClientToken, from a spot fleet's configuration that has launch templates only.

    Raises ConfigError, which names every key that CreateFleet does not know.
    """
    if faults := check(config):
        raise ConfigError(
            "\n".join(faults), next_step='take it out of the fleet\'s file, or set [fleet] engine = "spot-fleet"'
        )
    spot = {theirs: config[ours] for ours, theirs in _SPOT_OPTIONS.items() if ours in config}
    if "AllocationStrategy" in config:
        spot["AllocationStrategy"] = _STRATEGIES[config["AllocationStrategy"]]
    on_demand = {}
    if "OnDemandAllocationStrategy" in config:
        on_demand["AllocationStrategy"] = _ON_DEMAND_STRATEGIES[config["OnDemandAllocationStrategy"]]
    if "OnDemandMaxTotalPrice" in config:
        on_demand["MaxTotalPrice"] = config["OnDemandMaxTotalPrice"]
    total, on_demand_target = config["TargetCapacity"], config.get("OnDemandTargetCapacity", 0)
    arguments: dict[str, Any] = {
        "Type": config["Type"],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": total,
            "OnDemandTargetCapacity": on_demand_target,
            "SpotTargetCapacity": total - on_demand_target,
            "DefaultTargetCapacityType": "spot",
        },
        "LaunchTemplateConfigs": [_template_config(entry, config) for entry in config["LaunchTemplateConfigs"]],
        "TagSpecifications": [_tags(entry) for entry in config.get("TagSpecifications", [])],
        **{name: config[name] for name in _SAME if name in config},
    }
    if spot:
        arguments["SpotOptions"] = spot
    if on_demand:
        arguments["OnDemandOptions"] = on_demand
    if "ExcessCapacityTerminationPolicy" in config:
        arguments["ExcessCapacityTerminationPolicy"] = _EXCESS[config["ExcessCapacityTerminationPolicy"]]
    return arguments


def _template_config(entry: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Both kinds of fleet launch what the template says if there is no override, but a price needs an override."""
    overrides = [_override(override, config) for override in entry.get("Overrides", [])]
    if not overrides and "SpotPrice" in config:
        overrides = [{"MaxPrice": config["SpotPrice"]}]
    template = {"LaunchTemplateSpecification": copy.deepcopy(entry["LaunchTemplateSpecification"])}
    return {**template, "Overrides": overrides} if overrides else template


def _override(override: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """CreateFleet has no price for the whole fleet, so each override gets it, as MaxPrice."""
    changed = {name: value for name, value in copy.deepcopy(override).items() if name != "SpotPrice"}
    price = override.get("SpotPrice") or config.get("SpotPrice")
    return {**changed, "MaxPrice": price} if price else changed


def _tags(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("ResourceType") == "spot-fleet-request":
        return {**entry, "ResourceType": "fleet"}
    return entry
