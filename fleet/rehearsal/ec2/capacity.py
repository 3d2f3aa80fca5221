"""Where a fleet's next instance goes, or why it goes nowhere: capacity, price, quota, and images that do not exist.

The history's words are AWS's (tests/data/aws_facts.toml): the event of a pool names the cause behind "Error message:",
the one that all are set aside names none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.fleet.rehearsal.ec2.spotmarket import spot_price
from spotheal.fleet.rehearsal.ec2.world import Fleet, World

_NO_CAPACITY = "There is no Spot capacity available that matches your request."
_NO_QUOTA = "Spot Max Instance Count Exceeded"


@dataclass(frozen=True)
class Place:
    way: Mapping[str, Any]  # one of Fleet.specs
    zone: str


@dataclass(frozen=True)
class Refusal:
    """An event of the fleet's history."""

    type: str
    sub_type: str
    description: str


_ALL_SET_ASIDE = Refusal(
    "error",
    "allLaunchSpecsTemporarilyBlacklisted",
    "Several attempts to launch instances have failed. Either the request could not be satisfied or the configuration"
    " is not valid. We will retry the request again later. For more information, see the description of the event.",
)


@dataclass(frozen=True)
class NoPlace:
    """As the fleet's history says it, in this order."""

    refusals: tuple[Refusal, ...]


def has_no_capacity(world: World, zone: str) -> bool:
    return world.no_capacity_until.get(zone, 0.0) > world.moment()


def place(world: World, fleet: Fleet, spot: bool) -> Place | NoPlace:
    """The pinned zone where the fleet may use it, else one that is drawn."""
    pools = [Place(way, zone) for way in fleet.specs for zone in way["zones"]]
    if world.instances_max is not None and _running(world) >= world.instances_max:
        exceeded = Refusal("error", "spotInstanceCountLimitExceeded", "")
        return NoPlace((exceeded, *_set_aside((pool, _NO_QUOTA) for pool in pools)))
    usable = [pool for pool in pools if _fault(world, pool.way) is None]
    if not usable:
        return NoPlace(_set_aside((pool, str(_fault(world, pool.way))) for pool in pools))
    paid = [pool for pool in usable if not spot or _pays(pool)]
    if not paid:
        unusable = (Refusal("information", "launchSpecUnusable", _too_dear(pool)) for pool in usable)
        return NoPlace((*unusable, Refusal("information", "fleetProgressHalted", "")))
    free = [pool for pool in paid if not spot or not has_no_capacity(world, pool.zone)]
    if not free:
        return NoPlace(_set_aside((pool, _NO_CAPACITY) for pool in paid))
    if world.next_zones:
        pinned = [pool for pool in free if pool.zone == world.next_zones[0]]
        if pinned:
            world.next_zones.pop(0)
            return pinned[0]
    return world.random.choice(free)


def _set_aside(refused: Iterable[tuple[Place, str]]) -> tuple[Refusal, ...]:
    """Every pool of the fleet, with AWS's error for each."""
    events = [
        Refusal(
            "information",
            "launchSpecTemporarilyBlacklisted",
            f"{_named(pool)}: Several attempts to launch instances have failed. It will not be retried for at least"
            f" 13 minutes. Error message: {error}",
        )
        for pool, error in refused
    ]
    return (*events, _ALL_SET_ASIDE)


def _named(pool: Place) -> str:
    spec = pool.way["spec"]
    return f"{spec.get('InstanceType', '')}, {spec.get('ImageId', '')}, Linux/UNIX, {pool.zone}"


def _running(world: World) -> int:
    return len(
        [instance for instance in world.instances.all() if instance.state in ("pending", "running", "shutting-down")]
    )


def _fault(world: World, way: Mapping[str, Any]) -> str | None:
    """Why this way can never launch: an image or an instance profile that the scenario has taken away."""
    profile = way["spec"].get("IamInstanceProfile") or {}
    named = (way["spec"].get("ImageId"), profile.get("Name"), profile.get("Arn"))
    fault = next((world.unusable[name] for name in named if name in world.unusable), None)
    return fault or world.image_fault(str(way["spec"].get("ImageId", ""))) or world.launch_fault(way["spec"])


def _market_price(pool: Place) -> float:
    return float(spot_price(str(pool.way["spec"].get("InstanceType", "")), pool.zone))


def _pays(pool: Place) -> bool:
    price = pool.way.get("price")
    return not price or float(price) >= _market_price(pool)


def _too_dear(pool: Place) -> str:
    return f"{_named(pool)}, Spot bid price is less than Spot market price ${_market_price(pool):.4f}"
