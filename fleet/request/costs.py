"""The expected costs of a plan: per hour, within the limits, and of the volumes that stay. Pure."""

from __future__ import annotations

from typing import Any

from spotheal.agent.money.billing import ADDRESS_HOUR, FILLING_GIB, GIB_MONTH, PRICES_AS_OF
from spotheal.fleet.request.plan import AdoptVolume, CreateVolume, KeepVolume, Plan, WriteSweep

_MONTH_HOURS = 730.0


def costs(plan: Plan) -> dict[str, Any]:
    """Dollars; None if a price is not known. `limit_…` 0 = no limit."""
    spot = [price.spot for price in plan.prices]
    listed = [price.on_demand for price in plan.prices if price.on_demand]
    hours = plan.limit_hours
    machines_min, machines = plan.machines
    dearest = max(spot) * machines * hours if spot and hours else 0.0
    limits = [amount for amount in (dearest, plan.limit_dollars * (_runs(plan) or 1)) if amount]
    return {
        "hour_min": _times(min(spot, default=None), machines_min),
        "hour_max": _times(max(spot, default=None), machines),
        "on_demand_hour_min": _times(min(listed, default=None), machines_min),
        "on_demand_hour_max": _times(max(listed, default=None), machines),
        "address_hour": float(ADDRESS_HOUR) * machines,
        "machines": machines,
        "limit_hours": hours,
        "limit_dollars": plan.limit_dollars,
        "instances_max": round(min(limits), 2) if limits else None,
        "volume_month": _volume_month(plan),
        "move": _move(plan),
    }


def _runs(plan: Plan) -> int:
    """The runs of a sweep, each with its own `limits.dollars`; 0: a single job."""
    return sum(len(step.entries) for step in plan.steps if isinstance(step, WriteSweep))


def cost_rows(plan: Plan) -> list[tuple[str, str]]:
    """The rows of the plan that show the costs."""
    amounts = costs(plan)
    rows = []
    if plan.prices:
        listed = _range(amounts["on_demand_hour_min"], amounts["on_demand_hour_max"])
        machines = f" for {_machines(plan)}" if amounts["machines"] > 1 else ""
        public = "a public address" if amounts["machines"] == 1 else "public addresses"
        rows.append(("costs", f"{_range(amounts['hour_min'], amounts['hour_max'])} an hour on spot{machines}"
                     + (f", {listed} on demand" if listed else "")
                     + f", and ${amounts['address_hour']:.3f} for {public}"))  # fmt: skip
    limits = [f"{plan.limit_hours:g} hours" if plan.limit_hours else "",
              f"${plan.limit_dollars:g}{' for each run' if _runs(plan) else ''}" if plan.limit_dollars else ""]
    text = " and ".join(filter(None, limits)) or "none: until the training ends; AWS ends the fleet after 30 days"
    if amounts["instances_max"]:
        text += f"; at most ${amounts['instances_max']:.2f} for instances at today's prices"
    rows.append(("limits", text))
    if amounts["volume_month"] is not None:
        move = f", and at most ${amounts['move']:.2f} for each move to another zone" if amounts["move"] else ""
        rows.append(("volume", f"${amounts['volume_month']:.2f} a month until it is deleted{move}"
                     f" (list price {PRICES_AS_OF})"))  # fmt: skip
    for step in plan.steps:
        if isinstance(step, WriteSweep):
            month = float(GIB_MONTH.get(step.type, GIB_MONTH["gp3"])) * step.size_gib
            rows.append(("volumes", f"${month * step.parallel / _MONTH_HOURS:.3f} an hour for {step.parallel} at once, "
                         f"${month:.2f} a month each (list price {PRICES_AS_OF})"))  # fmt: skip
    return rows


def _machines(plan: Plan) -> str:
    count_min, count_max = plan.machines
    return f"{count_min} to {count_max} machines" if count_min != count_max else f"{count_max} machines"


def _times(price: float | None, count: int) -> float | None:
    return None if price is None else price * count


def _range(low: float | None, high: float | None) -> str:
    """ "" if AWS named no price."""
    if low is None or high is None:
        return ""
    return f"${low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"${low:.2f} to ${high:.2f}"


def _move(plan: Plan) -> float | None:
    """The dollars for filling a copy of the volume, if all of it is used."""
    for step in plan.steps:
        if isinstance(step, CreateVolume):
            return float(FILLING_GIB) * plan.initialization_rate * step.spec.size_gib
        if isinstance(step, (AdoptVolume, KeepVolume)):
            return float(FILLING_GIB) * plan.initialization_rate * step.volume.size_gib
    return None


def _volume_month(plan: Plan) -> float | None:
    for step in plan.steps:
        if isinstance(step, CreateVolume):
            return float(GIB_MONTH[step.spec.type]) * step.spec.size_gib
        if isinstance(step, (AdoptVolume, KeepVolume)):
            price = GIB_MONTH.get(step.volume.type)
            return float(price) * step.volume.size_gib if price is not None else None
    return None
