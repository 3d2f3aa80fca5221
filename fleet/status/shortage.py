"""Why a fleet has no instance, from its own history: no capacity, a price too low, a quota, an image, a role. Pure.

Event names are those of the EC2 User Guide, "Monitor fleet events using Amazon EventBridge"; their words are in
tests/data/aws_facts.toml. One event can stand for several causes (a specification is set aside for want of capacity as
for an image that is gone), so its words are read first. Two kinds of events name no cause and never hide one that does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from spotheal.agent.protocol.names import REGION
from spotheal.fleet.account import quotas
from spotheal.fleet.run.engine import FleetEvent
from spotheal.fleet.run.table import duration

_ZONE = re.compile(rf"\b{REGION}[a-z]\b")
_TYPE = re.compile(r"\b[a-z][a-z0-9-]*\d[a-z0-9-]*\.(?:\d*x?large|metal|medium|small|micro|nano)[a-z0-9-]*\b")
_QUOTA = re.compile(r"spot max instance count|max spot instance count|maxspotinstancecount|vcpu ?limit|quota")
_ERROR = re.compile(r"Error message:\s*")
_ZONES_NAMED = 4
_NO_MARKET = "price $-1.0000"  # the "price" of a zone that has no such type; AWS says so at healthy starts, too
_SAME_TIME = timedelta(minutes=30)  # covers two rounds: AWS sets a specification aside for 13 minutes or more
_UNSPECIFIC = "unspecific"


@dataclass(frozen=True)
class Shortage:
    """`cause`: capacity, price, quota, permission, configuration. `since` the first refusal after the last launch."""

    cause: str
    since: datetime
    zones: tuple[str, ...]
    types: tuple[str, ...]
    aws_message: str  # AWS's words, without the start that all refusals share
    next_step: str

    def says(self, now: datetime) -> str:
        """`no spot capacity since 12 min in 3 zones (us-west-2a, …)`."""
        named = ", ".join(self.zones[:_ZONES_NAMED]) + (" …" if len(self.zones) > _ZONES_NAMED else "")
        count = f"{len(self.zones)} zones" if len(self.zones) != 1 else "1 zone"
        place = f" in {count} ({named})" if self.zones else ""
        since = f"since {duration((now - self.since).total_seconds())}"
        match self.cause:
            case "capacity":
                return f"no spot capacity {since}{place}"
            case "price":
                return f"nothing is launched {since}: the fleet's maximum price is below the spot price{place}"
            case "quota":
                return f"nothing is launched {since}: the account's spot quota is used up"
            case "permission":
                return f"nothing is launched {since}: the fleet's role may not: {self.aws_message}"
        return f"nothing is launched {since}: {self.aws_message}"

    def to_document(self, now: datetime) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "since": self.since.isoformat(),
            "seconds": max(0.0, (now - self.since).total_seconds()),
            "zones": list(self.zones),
            "types": list(self.types),
            "aws_said": self.aws_message,
            "says": self.says(now),
            "next_step": self.next_step,
        }


def shortage(
    events: Sequence[FleetEvent], *, types: Iterable[str] = (), zones: Iterable[str] = ()
) -> Shortage | None:
    """Why the fleet launches nothing; None if its history names no refusal after the last launch.

    `types` and `zones` are the request's, for refusals that name none.
    """
    launched = max((at for at, event in enumerate(events) if event.subtype == "launched"), default=-1)
    refusals = [(event, cause) for event in events[launched + 1 :] if (cause := _cause(event))]
    if not refusals:
        return None
    cause = _decisive(refusals)
    group = [event for event, named in refusals if named == cause]
    cause = "configuration" if cause == _UNSPECIFIC else cause
    words = " ".join(event.description for event in group)
    kinds = types_in(words) or tuple(types)
    places = zones_in(words) or tuple(zones)
    message = _ERROR.split(group[-1].description)[-1] or group[-1].subtype
    return Shortage(cause, group[0].time, places, kinds, message, _next_step(cause, kinds))


def _decisive(refusals: Sequence[tuple[FleetEvent, str]]) -> str:
    """The last cause that is named. A quota outweighs the others of its time: they are its consequences."""
    latest = refusals[-1][0].time
    recent = [cause for event, cause in refusals if latest - event.time <= _SAME_TIME and cause != _UNSPECIFIC]
    if not recent:
        return _UNSPECIFIC
    return "quota" if "quota" in recent else recent[-1]


def types_in(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_TYPE.findall(text)))


def zones_in(text: str) -> tuple[str, ...]:
    return tuple(sorted(set(_ZONE.findall(text))))


def _cause(event: FleetEvent) -> str:
    """"" for an event that refuses nothing."""
    text, code = event.description.lower(), event.subtype.replace("-", "").lower()
    if event.kind not in ("error", "information") or _NO_MARKET in text:
        return ""
    if "countlimitexceeded" in code or _QUOTA.search(text):
        return "quota"
    if "capacity" in text and ("no spot" in text or "insufficient" in text or "sufficient" in text):
        return "capacity"
    if "bid price" in text or "less than spot market price" in text or "price" in code:
        return "price"
    if "roleinvalid" in code or "not authorized" in text or "unauthorized" in text:
        return "permission"
    if code.startswith("alllaunchspecs") or code == "fleetprogresshalted":
        return _UNSPECIFIC
    if "blacklisted" in code or "invalid" in code or "unusable" in code:
        return "configuration"
    return "configuration" if event.kind == "error" else ""


def _next_step(cause: str, types: Sequence[str]) -> str:
    match cause:
        case "capacity":
            return "wait, or add instance types and zones to the fleet's file and `fleetctl request --replace`"
        case "price":
            return "raise or leave out SpotPrice in the fleet's file, then `fleetctl request --replace`"
        case "quota":
            quota = quotas.quota_of(types[0]) if types else None
            if quota is None:
                return "raise the spot quota of these types (Service Quotas, EC2)"
            asking = "aws service-quotas request-service-quota-increase --service-code ec2"
            return f'raise "{quota[1]}": `{asking} --quota-code {quota[0]} --desired-value VCPUS`'
        case "permission":
            return "give IamFleetRole what docs/permissions.md lists, or let `fleetctl request` make it"
    return "correct the fleet's file (ImageId, subnets, groups, key), then `fleetctl request --replace`"

