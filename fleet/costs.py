"""What a plan will cost, as far as it can be said before: by the hour, in the hours allowed, and what stays. Pure."""

from __future__ import annotations

from typing import Any

from spotheal.agent.billing import ADDRESS_HOUR, GIB_MONTH, PRICES_AS_OF
from spotheal.fleet.plan import AdoptVolume, CreateVolume, KeepVolume, Plan


def costs(plan: Plan) -> dict[str, Any]:
    """Dollars; None where a price is not known. `limit_…` 0 = none."""
    spot = [price.spot for price in plan.prices]
    listed = [price.on_demand for price in plan.prices if price.on_demand]
    hours = plan.limit_hours
    most = [amount for amount in (max(spot) * hours if spot and hours else 0.0, plan.limit_dollars) if amount]
    return {
        "hour_min": min(spot, default=None),
        "hour_max": max(spot, default=None),
        "on_demand_hour_min": min(listed, default=None),
        "on_demand_hour_max": max(listed, default=None),
        "address_hour": float(ADDRESS_HOUR),
        "limit_hours": hours,
        "limit_dollars": plan.limit_dollars,
        "instances_max": round(min(most), 2) if most else None,
        "volume_month": _volume_month(plan),
    }


def cost_rows(plan: Plan) -> list[tuple[str, str]]:
    """For people, beside the plan's other rows."""
    found = costs(plan)
    rows = []
    if plan.prices:
        listed = _range(found["on_demand_hour_min"], found["on_demand_hour_max"])
        rows.append(("costs", f"{_range(found['hour_min'], found['hour_max'])} an hour on spot"
                     + (f", {listed} on demand" if listed else "")
                     + f", and ${found['address_hour']:.3f} for a public address"))  # fmt: skip
    limits = [f"{plan.limit_hours:g} hours" if plan.limit_hours else "",
              f"${plan.limit_dollars:g}" if plan.limit_dollars else ""]  # fmt: skip
    said = " and ".join(filter(None, limits)) or "none: until the training ends; AWS ends the fleet after 30 days"
    most = f"; at most ${found['instances_max']:.2f} for instances at today's prices" if found["instances_max"] else ""
    rows.append(("limits", said + most))
    if found["volume_month"] is not None:
        rows.append(("volume", f"${found['volume_month']:.2f} a month until it is deleted (list price {PRICES_AS_OF})"))
    return rows


def _range(low: float | None, high: float | None) -> str:
    """ "" where AWS told no price."""
    if low is None or high is None:
        return ""
    return f"${low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"${low:.2f} to ${high:.2f}"


def _volume_month(plan: Plan) -> float | None:
    for step in plan.steps:
        if isinstance(step, CreateVolume):
            return float(GIB_MONTH[step.spec.type]) * step.spec.size_gib
        if isinstance(step, (AdoptVolume, KeepVolume)):
            price = GIB_MONTH.get(step.volume.type)
            return float(price) * step.volume.size_gib if price is not None else None
    return None
