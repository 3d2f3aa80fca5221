"""Why a fleet has no instance, from its own history: no capacity, a price too low, a quota, an image, a role. Pure.

Event names are those of the EC2 User Guide, "Monitor fleet events using Amazon EventBridge": one event can stand for
several causes (a spec is set aside for want of capacity as for an image that is gone), so its words are read first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotheal.fleet.account import quotas
from spotheal.fleet.engine import FleetEvent
from spotheal.fleet.table import duration

_ZONE = re.compile(r"\b[a-z]{2}(?:-[a-z]+)+-\d[a-z]\b")
_TYPE = re.compile(r"\b[a-z][a-z0-9-]*\d[a-z0-9-]*\.(?:\d*x?large|metal|medium|small|micro|nano)[a-z0-9-]*\b")
_ZONES_NAMED = 4


@dataclass(frozen=True)
class Shortage:
    """`cause`: capacity, price, quota, permission, configuration. `since` the first refusal after the last launch."""

    cause: str
    since: datetime
    zones: tuple[str, ...]
    types: tuple[str, ...]
    said: str  # AWS's words
    next_step: str

    def says(self, now: datetime) -> str:
        """`no spot capacity since 12 min in 3 zones (us-west-2a, …)`."""
        named = ", ".join(self.zones[:_ZONES_NAMED]) + (" …" if len(self.zones) > _ZONES_NAMED else "")
        count = f"{len(self.zones)} zones" if len(self.zones) != 1 else "1 zone"
        where = f" in {count} ({named})" if self.zones else ""
        since = f"since {duration((now - self.since).total_seconds())}"
        match self.cause:
            case "capacity":
                return f"no spot capacity {since}{where}"
            case "price":
                return f"nothing is launched {since}: the fleet's maximum price is below the spot price{where}"
            case "quota":
                return f"nothing is launched {since}: the account's spot quota is used up"
            case "permission":
                return f"nothing is launched {since}: the fleet's role may not: {self.said}"
        return f"nothing is launched {since}: {self.said}"

    def to_document(self, now: datetime) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "since": self.since.isoformat(),
            "seconds": max(0.0, (now - self.since).total_seconds()),
            "zones": list(self.zones),
            "types": list(self.types),
            "aws_said": self.said,
            "says": self.says(now),
            "next_step": self.next_step,
        }


def shortage(
    events: Sequence[FleetEvent], *, types: Iterable[str] = (), zones: Iterable[str] = ()
) -> Shortage | None:
    """Why the fleet launches nothing; None where its history names no refusal after the last launch.

    `types` and `zones` are the request's, for refusals that name none.
    """
    launched = max((at for at, event in enumerate(events) if event.what == "launched"), default=-1)
    refused = [event for event in events[launched + 1 :] if _cause(event)]
    if not refused:
        return None
    last = refused[-1]
    cause = _cause(last)
    same = [event for event in refused if _cause(event) == cause]
    words = " ".join(event.description for event in same)
    kinds = types_in(words) or tuple(types)
    places = zones_in(words) or tuple(zones)
    return Shortage(cause, same[0].time, places, kinds, last.description or last.what, _next_step(cause, kinds))


def types_in(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_TYPE.findall(text)))


def zones_in(text: str) -> tuple[str, ...]:
    return tuple(sorted(set(_ZONE.findall(text))))


def _cause(event: FleetEvent) -> str:
    """"" for an event that refuses nothing."""
    if event.kind not in ("error", "information"):
        return ""
    said, what = event.description.lower(), event.what.replace("-", "").lower()
    if "capacity" in said and ("no spot" in said or "insufficient" in said or "sufficient" in said):
        return "capacity"
    if "bid price" in said or "less than spot market price" in said or "price" in what:
        return "price"
    if "countlimitexceeded" in what or "max spot instance count" in said or "vcpulimit" in said or "quota" in said:
        return "quota"
    if "roleinvalid" in what or "not authorized" in said or "unauthorized" in said:
        return "permission"
    if "blacklisted" in what or "invalid" in what or "unusable" in what or "halted" in what:
        return "configuration"
    return "configuration" if event.kind == "error" else ""


def _next_step(cause: str, types: Sequence[str]) -> str:
    match cause:
        case "capacity":
            return "wait, or add instance types and zones to the fleet's file and `fleetctl request --replace`"
        case "price":
            return "raise or leave out SpotPrice in the fleet's file, then `fleetctl request --replace`"
        case "quota":
            known = quotas.quota_of(types[0]) if types else None
            if known is None:
                return "raise the spot quota of these types (Service Quotas, EC2)"
            asking = "aws service-quotas request-service-quota-increase --service-code ec2"
            return f'raise "{known[1]}": `{asking} --quota-code {known[0]} --desired-value VCPUS`'
        case "permission":
            return "give IamFleetRole what docs/permissions.md lists, or let `fleetctl request` make it"
    return "correct the fleet's file (ImageId, subnets, groups, key), then `fleetctl request --replace`"

