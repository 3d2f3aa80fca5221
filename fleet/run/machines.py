"""The machines of a run that has several at once: what each says of itself in the store. Pure, but for `read`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import parse_rfc3339
from spotheal.agent.protocol.names import LAYOUT

GONE_SECONDS = 300.0  # one that says nothing for so long, and that AWS does not show, is not shown either


def read(store: Store) -> tuple[dict[str, Any], ...]:
    """`nodes/<instance>.json` of all of them; empty for a run on one machine."""
    found = (store.get_json(key) for key in store.keys(LAYOUT.nodes))
    return tuple(one for one in found if one is not None)


def summarise(told: Sequence[Mapping[str, Any]], alive: set[str] | None, now: datetime) -> list[dict[str, Any]]:
    """Those that are there: the one that leads first. `alive`: instances that AWS shows, None where it did not answer.

    `rendezvous`: the number of the one its ranks are in; None: of none, and `doing` says why.
    """
    found = []
    for one in told:
        name = str(one.get("instance", ""))
        age = _age(one.get("time"), now)
        if (alive is not None and name not in alive) or (alive is None and (age is None or age > GONE_SECONDS)):
            continue
        found.append({
            "instance": name, "type": one.get("instance_type"), "zone": one.get("zone"), "address": one.get("address"),
            "doing": str(one.get("doing") or ""), "rendezvous": one.get("term"), "leads": bool(one.get("leads")),
            "heard_seconds": age,
        })  # fmt: skip
    return sorted(found, key=lambda one: (not one["leads"], str(one["instance"])))


def in_words(machine: Mapping[str, Any]) -> str:
    """`g5.xlarge us-west-2a  training in rendezvous 3, which it hosts`."""
    place = " ".join(str(machine[key]) for key in ("type", "zone") if machine[key])
    doing = str(machine["doing"] or "booting")
    if machine["rendezvous"] is not None:
        doing += f" in rendezvous {machine['rendezvous']}" + (", which it hosts" if machine["leads"] else "")
    return f"{place}  {doing}"


def _age(text: Any, now: datetime) -> float | None:
    try:
        return max(0.0, (now - parse_rfc3339(str(text))).total_seconds())
    except ValueError:
        return None
