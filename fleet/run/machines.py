"""The machines of a run on several machines: what each has written about itself in the store. Pure, except `read`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import parse_rfc3339
from spotheal.agent.protocol.names import LAYOUT

GONE_SECONDS = 300.0  # if AWS does not answer, a machine that was silent for longer is not shown


def read(store: Store) -> tuple[dict[str, Any], ...]:
    """`nodes/<instance>.json` of all machines; empty for a run on one machine."""
    documents = (store.get_json(key) for key in store.keys(LAYOUT.nodes))
    return tuple(document for document in documents if document is not None)


def summarise(documents: Sequence[Mapping[str, Any]], alive: set[str] | None, moment: datetime) -> list[dict[str, Any]]:
    """The live machines, the leader first. `alive`: the instances that AWS shows; None if AWS did not answer.

    `rendezvous`: the number of the rendezvous that the machine's ranks are in; None: in none, and `doing` says why.
    """
    machines = []
    for document in documents:
        name = str(document.get("instance", ""))
        age = _age(document.get("time"), moment)
        if (alive is not None and name not in alive) or (alive is None and (age is None or age > GONE_SECONDS)):
            continue
        machines.append({
            "instance": name, "type": document.get("instance_type"), "zone": document.get("zone"),
            "address": document.get("address"), "doing": str(document.get("doing") or ""),
            "rendezvous": document.get("term"), "leads": bool(document.get("leads")), "heard_seconds": age,
        })  # fmt: skip
    return sorted(machines, key=lambda machine: (not machine["leads"], str(machine["instance"])))


def in_words(machine: Mapping[str, Any]) -> str:
    """`g5.xlarge us-west-2a  training in rendezvous 3, which it hosts`."""
    place = " ".join(str(machine[key]) for key in ("type", "zone") if machine[key])
    doing = str(machine["doing"] or "booting")
    if machine["rendezvous"] is not None:
        doing += f" in rendezvous {machine['rendezvous']}" + (", which it hosts" if machine["leads"] else "")
    return f"{place}  {doing}"


def _age(text: Any, moment: datetime) -> float | None:
    try:
        return max(0.0, (moment - parse_rfc3339(str(text))).total_seconds())
    except ValueError:
        return None
