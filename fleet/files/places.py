"""The zones and subnets of a launch specification, read from the words of AWS's file. Pure."""

from __future__ import annotations

import re
from typing import Any

from spotheal.agent.protocol.names import REGION

ZONE = re.compile(rf"({REGION})[a-z]|({REGION})-[a-z]+-\d[a-z]")  # the second: local zones


def split_list(text: str) -> list[str]:
    """AWS's own "us-west-2a, us-west-2b"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def spec_subnets(spec: dict[str, Any]) -> list[str]:
    direct = split_list(spec.get("SubnetId") or "")
    return direct or [card["SubnetId"] for card in spec.get("NetworkInterfaces") or [] if card.get("SubnetId")]


def region_of(zone: str) -> str:
    match = ZONE.fullmatch(str(zone))
    return (match.group(1) or match.group(2)) if match else ""
