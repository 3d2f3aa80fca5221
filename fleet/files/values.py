"""Values that have the right form but make no sense: a price of zero, an end in the past. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

_DEAR = 100.0  # dollars an hour; the dearest instance costs less on spot
_GROUP = re.compile(r"sg-[0-9a-f]{8}(?:[0-9a-f]{9})?")


def value_faults(document: dict[str, Any], moment: datetime) -> Iterator[str]:
    """Like `checks.fleet_faults`; `document` is walkable."""
    for path, price in prices(document):
        if (amount := dollars(price)) is None or amount <= 0:
            yield f'{path}: must be dollars an hour, more than 0, is "{price}"; leave it out for the price on demand'
    start, end = _time(document.get("ValidFrom")), _time(document.get("ValidUntil"))
    for name, time in (("ValidFrom", start), ("ValidUntil", end)):
        if document.get(name) and time is None:
            yield f'{name}: "{document[name]}" is no time such as 2026-12-31T23:59:59Z; correct it or leave it out'
    if end is not None and end <= moment:
        yield f"ValidUntil: {document['ValidUntil']} is past; leave it out, for `limits.hours` in job.toml ends the run"
    if start is not None and end is not None and end <= start:
        yield "ValidUntil: is not after ValidFrom; correct one of them"
    for index, spec in enumerate(document.get("LaunchSpecifications") or []):
        groups = spec.get("SecurityGroups")
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            group_id = group.get("GroupId") if isinstance(group, dict) else None
            if isinstance(group_id, str) and "<" not in group_id and not _GROUP.fullmatch(group_id):
                yield (
                    f'LaunchSpecifications[{index}].SecurityGroups[{number}].GroupId: "{group_id}" is not of the form '
                    "sg-0123456789abcdef0; a name goes into GroupName"
                )


def value_warnings(document: dict[str, Any]) -> Iterator[str]:
    for path, price in prices(document):
        amount = dollars(price)
        if amount is not None and amount > _DEAR:
            yield f"{path}: {price} dollars an hour is more than any instance costs on spot; meant in cents?"


def prices(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The path and value of every SpotPrice."""
    if document.get("SpotPrice") is not None:
        yield "SpotPrice", str(document["SpotPrice"])
    for index, spec in enumerate(document.get("LaunchSpecifications") or []):
        if spec.get("SpotPrice") is not None:
            yield f"LaunchSpecifications[{index}].SpotPrice", str(spec["SpotPrice"])
    for index, config in enumerate(document.get("LaunchTemplateConfigs") or []):
        for number, override in enumerate(config.get("Overrides") or []):
            if override.get("SpotPrice") is not None:
                yield f"LaunchTemplateConfigs[{index}].Overrides[{number}].SpotPrice", str(override["SpotPrice"])


def dollars(text: str) -> float | None:
    """None if `text` is no number."""
    try:
        amount = float(text)
    except ValueError:
        return None
    return amount if math.isfinite(amount) else None


def _time(value: Any) -> datetime | None:
    """A time in the form of AWS's JSON; without a zone it is UTC."""
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)
