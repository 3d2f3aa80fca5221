"""The faults of a ConfigError one by one, for programs: file, place in it, what is wrong, and the cure. Pure.

A fault reads `FILE: PLACE: what is wrong; the cure`, or `FILE:LINE:COLUMN: …` with the line shown below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from spotheal.agent.protocol.errors import ConfigError

_POSITION = re.compile(r":(\d+:\d+): (.*)", re.DOTALL)
_PLACE = re.compile(r"(\[\w+\] [^:\s]+|\w[\w.\[\]]*(?: and \w+)?): (.*)", re.DOTALL)
_PLACEHOLDER = re.compile(r"the placeholder (<[^>]*>) is still in ([^;]*)")


def listed(error: ConfigError, files: Iterable[str]) -> list[dict[str, Any]]:
    """One entry a fault; `place` is a key's path, a line and column, or None."""
    names = sorted(files, key=len, reverse=True)
    found: list[str] = []
    for line in error.message.split("\n"):
        if found and (line.startswith((" ", "\t")) or not any(line.startswith(f"{name}:") for name in names)):
            found[-1] += f"\n{line}"  # the faulty line, and the caret below it
        else:
            found.append(line)
    return [_entry(text, names, error.next_step) for text in found]


def _entry(text: str, names: list[str], next_step: str) -> dict[str, Any]:
    file = next((name for name in names if text.startswith(f"{name}:")), None)
    rest = text[len(file) :] if file else text
    place: str | None = None
    if file and (position := _POSITION.match(rest)):
        place, rest = position.groups()
    else:
        rest = rest.removeprefix(": ") if file else rest
        if match := _PLACE.fullmatch(rest):
            place, rest = match.groups()
        elif match := _PLACEHOLDER.match(rest):
            place = match.group(2)
    first, _, shown = rest.partition("\n")
    what, _, cure = first.partition("; ")
    message = what + (f"\n{shown}" if shown else "")
    return {"file": file, "place": place, "message": message, "cure": cure or next_step or None}
