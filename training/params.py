"""The parameters of a run of a sweep, as the agent hands them over: one entry of the list `fleetctl sweep` took."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spotheal.agent.contract import INDEX, PARAMS_FILE


def index() -> int | None:
    """The position in the sweep, from 0; None outside of one. ValueError where the environment holds no number."""
    text = os.environ.get(INDEX)
    return None if text is None else int(text)


def params(
    known: Collection[str] | None = None, default: Mapping[str, Any] | None = None, path: Path | None = None
) -> dict[str, Any]:
    """This run's parameters: `default` with the entry's values over it.

    `known`: the names that the trainer reads; an entry with another is refused, because a misspelt name would train
    with a default in silence. `path`: the entry's file, else that of SPOTHEAL_PARAMS_FILE; outside of a sweep the
    defaults alone. ValueError names what is wrong.
    """
    name = str(path) if path is not None else os.environ.get(PARAMS_FILE, "")
    found = dict(default or {})
    if not name:
        return found
    try:
        entry = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as fault:
        raise ValueError(f"the parameters of this run cannot be read: {fault}") from fault
    except ValueError as fault:
        raise ValueError(f"{name} is not JSON: {fault}") from fault
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must hold one mapping of names to values")
    if known is not None and (strange := sorted(set(entry) - set(known))):
        raise ValueError(f"entry {index()} has {', '.join(strange)}; the trainer knows {', '.join(sorted(known))}")
    return found | entry
