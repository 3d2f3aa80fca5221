"""What is told of an event, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotheal.agent.money.notify import Message
from spotheal.agent.protocol.ends import End, resume_advice
from spotheal.agent.protocol.names import Phase

_NEXT = {
    Phase.FAILED: "fleetctl logs {job}; {resume}",
    Phase.SETUP_FAILED: "correct what it names, then fleetctl request --resume",
    Phase.LIMIT: "fleetctl request --resume goes on with the whole limit again; or raise it first",
    Phase.PARKED: "fleetctl logs {job}; fleetctl request --resume tries again",
    Phase.DONE: "fleetctl results get {job}; fleetctl report {job}",
    Phase.CANCELLED: "{resume}",
}


def end_message(end: End, requested_at: str, facts: Mapping[str, Any], dollars: str = "") -> Message:
    """The run is over. `end.reason` of a trainer that failed holds its last lines, each behind `\\n  | `.
    `facts`: job, step, saved_step."""
    reason, *tail = end.reason.split("\n  | ")
    step = facts.get("step")
    parts = [f"{end.phase.value}: {reason}", f"step {step}" if step is not None else "", dollars]
    next_step = _NEXT.get(end.phase, "").format(
        job=facts.get("job", ""), resume=resume_advice(facts.get("saved_step"))
    )
    text = "; ".join(part for part in parts if part)
    return Message(
        event=end.phase.value,
        mark=f"end-{end.phase.value.replace(' ', '-')}-{requested_at}",
        text=f"{text}\nnext: {next_step}" if next_step else text,
        tail=tail,
        fields={"reason": reason, "step": step, "next": next_step},
    )


def interruption_message(instance: str, zone: str, action: str, ends: str, saved_step: int | None) -> Message:
    """A notice: the fleet replaces the machine, so nobody needs to do anything."""
    saved = f"; last checkpoint known before it: step {saved_step}" if saved_step is not None else ""
    return Message(
        event="interruption",
        mark=f"interruption-{instance}-{ends}",
        text=f"AWS takes {instance} in {zone} ({action} at {ends}){saved}. It saves and hands over; the fleet replaces"
        " it by itself",
        fields={"instance": instance, "zone": zone, "action": action, "ends": ends, "step": saved_step},
    )


def limit_message(limit: str, requested_at: str, text: str) -> Message:
    """80 % of a limit is used up. `what`: dollars or hours."""
    return Message(
        event="limit-80",
        mark=f"limit-80-{limit}-{requested_at}",
        text=f"{text}. At 100 % it saves, ends and cancels its fleet",
        fields={"limit": f"limits.{limit}"},
    )
