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
    """One entry for each fault; `place` is a key's path, a line and column, or None."""
    names = sorted(files, key=len, reverse=True)
    texts: list[str] = []
    for line in error.message.split("\n"):
        if texts and (line.startswith((" ", "\t")) or not any(line.startswith(f"{name}:") for name in names)):
            texts[-1] += f"\n{line}"  # the faulty line, and the caret below it
        else:
            texts.append(line)
    return [_entry(text, names, error.next_step) for text in texts]


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
    first, _, excerpt = rest.partition("\n")
    problem, _, cure = first.partition("; ")
    message = problem + (f"\n{excerpt}" if excerpt else "")
    return {"file": file, "place": place, "message": message, "cure": cure or next_step or None}
