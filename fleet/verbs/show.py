"""A plan as people read it before they say yes, and as JSON. Pure."""

from __future__ import annotations

import json
from typing import Any

from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.account.prices import Price
from spotheal.fleet.ending.cancel import CancelPlan
from spotheal.fleet.request.costs import cost_rows, costs
from spotheal.fleet.request.plan import AdoptVolume, CreateTemplate, CreateVolume, KeepVolume, Plan
from spotheal.fleet.run.table import lines_of, table

SCHEMA_VERSION = 1
_PRICES_SHOWN = 12


def plan_text(plan: Plan) -> str:
    """Everything that will be made, and what it costs as far as it is known."""
    place = (
        f"{plan.repository} at {plan.commit[:10]}"
        if plan.repository != "."
        else f"this checkout's commit {plan.commit[:10]}"
    )
    rows = [
        ("job", plan.job),
        ("run", plan.run + (f" (fleet {plan.generation} of it)" if plan.generation > 1 else "")),
        ("account", f"{plan.account}, {plan.region}"),
        ("trains", place),
        ("types", ", ".join(plan.types) or "as the launch templates say"),
        ("zones", ", ".join(plan.zones) or "as the launch templates say"),
        ("store", str(plan.store)),
        *cost_rows(plan),
    ]
    parts = [lines_of(rows)]
    if plan.prices:
        parts.append(_prices(plan.prices))
    parts.append("will do:\n" + "\n".join(f"  {number}. {line}" for number, line in enumerate(_steps(plan), 1)))
    parts += [f"note: {printable(note)}" for note in plan.notes]
    return "\n\n".join(parts)


def _steps(plan: Plan) -> list[str]:
    """One line a step; the launch templates, one for each type and zone, are one line."""
    templates = [step for step in plan.steps if isinstance(step, CreateTemplate)]
    lines = []
    for step in plan.steps:
        if len(templates) < 2 or not isinstance(step, CreateTemplate):
            lines.append(printable(step.says()))
        elif step is templates[0]:
            lines.append(f"create launch templates: {len(templates)}")
    return lines


def _prices(prices: tuple[Price, ...]) -> str:
    rows = []
    for price in sorted(prices, key=lambda row: row.spot)[:_PRICES_SHOWN]:
        share = f"{100 * (1 - price.spot / price.on_demand):.0f} % less" if price.on_demand else "-"
        rows.append(
            (
                price.instance_type,
                price.zone,
                f"${price.spot:.4f}",
                f"${price.on_demand:.4f}" if price.on_demand else "-",
                share,
            )
        )
    rest = len(prices) - len(rows)
    return table(("TYPE", "ZONE", "SPOT/H", "ON-DEMAND/H", ""), rows) + (f"\n… and {rest} more" if rest > 0 else "")


def plan_document(plan: Plan, *, is_sent: bool, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """`request --output json` and `--dry-run`: the plan, and the exact calls in `request`."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "sent": is_sent,
        "job": plan.job,
        "run": plan.run,
        "generation": plan.generation,
        "account": plan.account,
        "region": plan.region,
        "store": str(plan.store),
        "repository": plan.repository,
        "revision": plan.commit,
        "instance_types": list(plan.types),
        "zones": list(plan.zones),
        "prices": [vars(price) for price in plan.prices],
        "costs": costs(plan),
        "volume": next(
            (_volume(step) for step in plan.steps if isinstance(step, CreateVolume | AdoptVolume | KeepVolume)), None
        ),
        "steps": [step.says() for step in plan.steps],
        "user_data_bytes": plan.user_data_bytes,
        "notes": list(plan.notes),
        "request": plan.request,
    }
    return document | (result or {})


def _volume(step: CreateVolume | AdoptVolume | KeepVolume) -> dict[str, Any]:
    if isinstance(step, CreateVolume):
        return {"action": "create", "id": None, "zone": step.spec.zone, "size_gib": step.spec.size_gib}
    action = "adopt" if isinstance(step, AdoptVolume) else "keep"
    return {"action": action, "id": step.volume.id, "zone": step.volume.zone, "size_gib": step.volume.size_gib}


def cancel_text(plan: CancelPlan) -> str:
    ends = [f"  fleet {plan.fleet}"] if plan.fleet else []
    ends += [
        f"  instance {instance.id} ({instance.type} in {instance.zone}, {instance.state})"
        for instance in plan.instances
    ]
    volumes = [
        f"  {volume.id}: {volume.size_gib} GiB in {volume.zone}, with its checkpoints" for volume in plan.volumes
    ]
    return "\n".join(
        [f"job {plan.job}, run {plan.run}", "ends:", *(ends or ["  nothing"]), "stays:", *(volumes or ["  no volume"])]
    )


def cancel_document(plan: CancelPlan, *, cancelled: bool) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "job": plan.job,
        "run": plan.run,
        "cancelled": cancelled,
        "fleet_id": plan.fleet or None,
        "instances": [instance.id for instance in plan.instances],
        "volumes_kept": [volume.id for volume in plan.volumes],
    }


def as_json(document: Any) -> str:
    return json.dumps(document, indent=2, default=str)
