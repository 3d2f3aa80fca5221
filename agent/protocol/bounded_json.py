"""JSON that others wrote (a trainer, the store, the clone), bounded before it is parsed.

json.loads takes what an author likes to give: brackets until Python's stack ends (RecursionError is no ValueError),
integers that no float holds (OverflowError is none either), and the last of two values of one name. Here each of those
is a ValueError, and a number that is not finite or has more than 64 bits is None, as if it had not been written.
"""

from __future__ import annotations

import json
import math
from typing import Any

BYTES_MAX = 1 << 20
DEPTH_MAX = 64
INTEGER_MAX = (1 << 63) - 1
_DIGITS_MAX = 400  # a float written with all its digits; CPython's own limit for integers is 4300
_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))


def parse(text: str | bytes, *, bytes_max: int = BYTES_MAX, depth_max: int = DEPTH_MAX) -> Any:
    """The JSON value; ValueError if it is none, not UTF-8, too long, too deep, or names something twice."""
    if len(text) > bytes_max:
        raise ValueError(f"longer than {bytes_max} bytes")
    if not isinstance(text, str):
        text = text.decode("utf-8")
    _refuse_depth(text, depth_max)
    return json.loads(
        text, parse_int=_integer, parse_float=_finite, parse_constant=_nothing, object_pairs_hook=_without_duplicates
    )


def parse_object(text: str | bytes, *, bytes_max: int = BYTES_MAX, depth_max: int = DEPTH_MAX) -> dict[str, Any]:
    """As `parse`; ValueError too if the value is no JSON object."""
    if text.lstrip()[:1] not in ("{", b"{"):  # of a million lines that are none each would be parsed
        raise ValueError("not a JSON object")
    value = parse(text, bytes_max=bytes_max, depth_max=depth_max)
    assert isinstance(value, dict)
    return value


def _refuse_depth(text: str, depth_max: int) -> None:
    if text.count("[") + text.count("{") <= depth_max:
        return
    without_escapes = text.replace("\\\\", "").replace('\\"', "").encode("utf-8", "surrogatepass")
    depth = 0
    for bracket in b"".join(without_escapes.translate(None, _OTHERS).split(b'"')[::2]):
        depth += 1 if bracket in b"[{" else -1
        if depth > depth_max:
            raise ValueError(f"brackets more than {depth_max} deep")


def _integer(digits: str) -> int | None:
    number = int(digits) if len(digits) <= 20 else INTEGER_MAX + 1
    return number if abs(number) <= INTEGER_MAX else None


def _finite(digits: str) -> float | None:
    number = float(digits) if len(digits) <= _DIGITS_MAX else math.inf
    return number if math.isfinite(number) else None


def _nothing(_: str) -> None:
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("names something twice")
    return values
