"""Where a fleet's next instance goes, or why it goes nowhere: capacity, price, quota, and images that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.fleet.rehearsal.spotmarket import spot_price
from spotheal.fleet.rehearsal.world import Fleet, World


@dataclass(frozen=True)
class Place:
    way: Mapping[str, Any]  # one of Fleet.specs
    zone: str


@dataclass(frozen=True)
class NoPlace:
    """As the fleet's history says it."""

    type: str
    sub_type: str
    description: str


def has_no_capacity(world: World, zone: str) -> bool:
    return world.no_capacity_until.get(zone, 0.0) > world.moment()


def place(world: World, fleet: Fleet, spot: bool) -> Place | NoPlace:
    """The pinned zone where the fleet may use it, else one that is drawn."""
    if world.instances_max is not None and _running(world) >= world.instances_max:
        return NoPlace("error", "spotInstanceCountLimitExceeded", "Max spot instance count exceeded")
    usable = [way for way in fleet.specs if _fault(world, way) is None]
    if not usable:
        way = fleet.specs[0]
        kind, image = way["spec"].get("InstanceType", ""), way["spec"].get("ImageId", "")
        return NoPlace(
            "error", "launchSpecTemporarilyBlacklisted", f"{kind}, {image}, Linux/UNIX: {_fault(world, way)}"
        )
    paid = [Place(way, zone) for way in usable for zone in way["zones"] if not spot or _pays(way, zone)]
    if not paid:
        named = ", ".join(sorted({f"{way['spec'].get('InstanceType', '')} at {way['price']}" for way in usable}))
        return NoPlace(
            "information", "launchSpecUnusable", f"{named}, Linux/UNIX: Spot bid price is less than Spot market price"
        )
    free = [one for one in paid if not spot or not has_no_capacity(world, one.zone)]
    if not free:
        kinds = ", ".join(sorted({str(one.way["spec"].get("InstanceType", "")) for one in paid}))
        zones = ", ".join(sorted({one.zone for one in paid}))
        return NoPlace("error", "allLaunchSpecsTemporarilyBlacklisted",
                       "Several attempts to launch instances have failed. Either the request could not be satisfied or"
                       f" the configuration is not valid: {kinds} in {zones}: There is no Spot capacity available that"
                       " matches your request.")  # fmt: skip
    if world.next_zones:
        pinned = [one for one in free if one.zone == world.next_zones[0]]
        if pinned:
            world.next_zones.pop(0)
            return pinned[0]
    return world.random.choice(free)


def _running(world: World) -> int:
    return len([one for one in world.instances.all() if one.state in ("pending", "running", "shutting-down")])


def _fault(world: World, way: Mapping[str, Any]) -> str | None:
    """Why this way can never launch: an image or an instance profile that the scenario has taken away."""
    profile = way["spec"].get("IamInstanceProfile") or {}
    named = (way["spec"].get("ImageId"), profile.get("Name"), profile.get("Arn"))
    return next((world.unusable[name] for name in named if name in world.unusable), world.launch_fault(way["spec"]))


def _pays(way: Mapping[str, Any], zone: str) -> bool:
    price = way.get("price")
    return not price or float(price) >= float(spot_price(str(way["spec"].get("InstanceType", "")), zone))
