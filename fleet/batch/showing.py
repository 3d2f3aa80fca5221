"""The plan of `fleetctl batch create` as people and as programs read it. Pure."""

from __future__ import annotations

from typing import Any

from spotheal.fleet.batch.creating import Plan

SCHEMA_VERSION = 1


def plan_text(plan: Plan) -> str:
    lines = [f"job {plan.names.job} on AWS Batch, account {plan.account}, {plan.region}"]
    lines += [f"  {step.says()}" for step in plan.steps] or ["  everything is there already"]
    if plan.prices:
        best: dict[str, Any] = {}
        for price in plan.prices:
            if price.instance_type not in best or price.spot < best[price.instance_type].spot:
                best[price.instance_type] = price
        lines.append("a host costs, while containers run:")
        for name, price in sorted(best.items(), key=lambda pair: float(pair[1].spot)):
            listed = f", ${price.on_demand:.3f} on demand" if price.on_demand else ""
            lines.append(f"  {name}: ${price.spot:.3f} an hour in {price.zone}{listed}")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def plan_document(plan: Plan, *, is_made: bool) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION, "job": plan.names.job, "region": plan.region, "account": plan.account,
        "queue": plan.names.queue, "made": is_made, "steps": [step.says() for step in plan.steps],
        "prices": [vars(price) for price in plan.prices], "notes": list(plan.notes), "request": plan.request,
    }  # fmt: skip
