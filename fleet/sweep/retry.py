"""Runs of a sweep that failed, begun again from their last checkpoints.

A run that ended is one whose store says so; here that is taken back, its claim is given up, and last the mark of its
end goes. Cut off anywhere and called again, it does the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import Conflict, NotFound
from spotheal.agent.protocol.names import LAYOUT, STATUS_SCHEMA_VERSION, Phase
from spotheal.fleet.run import engine
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.session import Session


def chosen(rows: Sequence[dict[str, Any]], indices: Collection[int]) -> list[int]:
    """The rows of a summary to begin again: `indices`, or else all that failed.

    NotFound if there is no such run, Conflict if it has not failed, or if none has.
    """
    states = {int(row["index"]): str(row["state"]) for row in rows}
    if missing := sorted(set(indices) - states.keys()):
        raise NotFound(f"there is no run {missing[0]}: the sweep has {len(states)}, 0 to {len(states) - 1}",
                       next_step="`fleetctl sweep status` lists them")  # fmt: skip
    if unfit := [index for index in sorted(set(indices)) if states[index] != "failed"]:
        raise Conflict(f"run {unfit[0]} is {states[unfit[0]]}: only one that failed is begun again",
                       next_step="`fleetctl sweep status` names those that failed")  # fmt: skip
    selection = sorted(set(indices) or {index for index, state in states.items() if state == "failed"})
    if not selection:
        raise Conflict("no run of this sweep has failed", next_step="`fleetctl sweep status` lists them")
    return selection


def give_back(sweep: Run, index: int, clock: Clock) -> None:
    """Let any instance take run `index`, which failed, from its last checkpoint on."""
    entry_store, now = Store(sweep.store.client, sweep.store.url.below(LAYOUT.entry(index))), rfc3339(clock.now())
    number = max(_claims(sweep, index), default=0)
    before = entry_store.read_status() or {}
    entry_store.write_status({
        "schema_version": STATUS_SCHEMA_VERSION, "job": sweep.job, "run": f"{sweep.id}{index:05d}",
        "phase": Phase.REQUESTED.value, "reason": "", "heartbeat": now, "term": None, "fleet": None, "instance": None,
        "instance_type": None, "zone": None, "attempt": before.get("attempt"), "launches": None, "volume": None,
        "revision": before.get("revision"), "progress": before.get("progress"), "notice": None,
    })  # fmt: skip
    # Launches without a checkpoint are counted towards parking; the earlier ones are forgiven.
    entry_store.count_launch(f"retry-{number}", {"time": now, "acknowledged": True, "outcome": "retried"})
    if number:
        sweep.store.put_json(LAYOUT.queue_back(index, number), {"time": now})
    sweep.store.delete(LAYOUT.queue_ended(index, False))


def _claims(sweep: Run, index: int) -> list[int]:
    start = f"{LAYOUT.queue}{index:05d}."
    suffixes = [key.removeprefix(start) for key in sweep.store.keys(start)]
    return [int(suffix) for suffix in suffixes if suffix.isdigit()]


def make_room(session: Session, sweep: Run, fleet: str, added: int, summary: dict[str, Any]) -> int | None:
    """Raise the fleet's target for `added` runs that begin again, if no other run waits for an instance.

    `summary`: the sweep's, after the runs were given back. Returns the new target, None if it stays. Conflict if the
    fleet is not the sweep's.
    """
    state = engine.describe_own(session.client("ec2"), fleet, sweep.id, sweep.job)
    count = summary["runs"]
    if state is None or not state.is_live or count["waiting"] > added:
        return None
    target = min(state.target + added, count["running"] + count["waiting"])
    if target <= state.target:
        return None
    session.ec2.set_capacity(fleet, target)
    return int(target)
