"""`fleetctl logs --story`: what each machine saw in each round of healing, and what it did; from the store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spotheal.agent.protocol.errors import NotFound
from spotheal.agent.protocol.names import LAYOUT
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.store_documents import sensible

_KEY = re.compile(r"stories/(?P<instance>[\w-]+)\.json")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@dataclass(frozen=True)
class Round:
    """`action` and `observed` as Python wrote them; `changes`: the fields that differ from the round before."""

    instance: str
    number: int
    action: str
    observed: str
    changes: dict[str, str] = field(default_factory=dict)


@sensible
def rounds(run: Run, instance: str = "") -> Iterator[Round]:
    """Of all machines, or of one. NotFound if no machine of the run has stored a story."""
    names = [match["instance"] for key in run.store.keys("stories/") if (match := _KEY.fullmatch(key))]
    names = [name for name in names if instance in ("", name)]
    if not names:
        raise NotFound(
            f"run {run.id} has no story{f' of {instance}' if instance else ''} in the store",
            next_step="a machine stores its story when its volume is mounted, or could not be had: `fleetctl logs`",
        )
    return iter([entry for name in names for entry in _of_machine(run, name)])


def _of_machine(run: Run, instance: str) -> Iterator[Round]:
    document: dict[str, Any] = run.store.get_json(LAYOUT.story(instance)) or {}
    before: dict[str, str] = {}
    for number, entry in enumerate(document["story"], 1):
        fields = _fields(str(entry["observed"]))
        changes = {name: value for name, value in fields.items() if before.get(name) != value}
        yield Round(instance, number, str(entry["action"]), str(entry["observed"]), changes if before else {})
        before = fields


def _fields(text: str) -> dict[str, str]:
    """Of `Observed(a=1, b=[2, 3])`: a and b. Durations grow in each round, and are left out."""
    inside, depth, start, parts = text[text.find("(") + 1 : text.rfind(")")], 0, 0, list[str]()
    for place, character in enumerate(inside):
        depth += _BRACKETS.get(character, 0)
        if character == "," and depth == 0:
            parts.append(inside[start:place])
            start = place + 1
    named = (part.strip().partition("=") for part in [*parts, inside[start:]])
    durations = ("absent", "silent", "attached_for", "volume_gone_for")
    return {name: value for name, sign, value in named if sign and name not in durations}
