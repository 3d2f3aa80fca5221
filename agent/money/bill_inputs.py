"""What a bill is made of: the ledger, and what else is known of the run's instances, volumes and prices. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from spotheal.agent.protocol.clock import parse_rfc3339

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """What AWS says of an instance; None where it does not (any more)."""

    launched: datetime | None = None
    alive: bool | None = None
    interrupted: bool = False  # AWS took it: StateReason
    instance_type: str = ""
    zone: str = ""
    lifecycle: str = ""


@dataclass(frozen=True)
class Disk:
    """A volume as AWS shows it."""

    size_gib: int
    type: str
    zone: str = ""
    iops: int | None = None
    throughput: int | None = None  # MiB/s


@dataclass(frozen=True)
class History:
    """All that a bill is made of. `events` are the ledger's, `launches` the documents below launches/.

    `listed`: dollars an hour on demand by type; `spot_then`: spot at the request, by (type, zone); `maximum`: the
    fleet's own maximum price, where it has one. `volumes` None: AWS was not asked which are still there.
    """

    events: Sequence[Event]
    now: datetime
    requested_at: datetime | None = None
    launches: Sequence[Event] = ()
    listed: Mapping[str, Decimal] = field(default_factory=dict)
    spot_then: Mapping[tuple[str, str], Decimal] = field(default_factory=dict)
    maximum: Decimal | None = None
    known: Mapping[str, Known] = field(default_factory=dict)
    volumes: Mapping[str, Disk] | None = None
    disk: Disk = Disk(0, "gp3")  # what job.toml asks for, for volumes that AWS does not show
    heard: Mapping[str, datetime] = field(default_factory=dict)  # last heartbeats, beside the ledger's
    recorded_end: datetime | None = None  # by status.json; a ledger can lack it

    @property
    def ended(self) -> datetime | None:
        """When the run ended, None while it goes on."""
        return ended_at(self.events) or self.recorded_end


def ended_at(events: Sequence[Event]) -> datetime | None:
    """When the run ended, unless a fleet of a later request goes on with it."""
    ended = None
    for event in events:
        if event["event"] == "end":
            ended = moment_of(event.get("time")) or ended
        elif event["event"] in ("trainer-started", "volume"):
            ended = None
    return ended


def dollars(value: Any) -> Decimal | None:
    """A price an hour as AWS or a document of ours writes it; None where it is none."""
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and 0 <= amount < 100_000 else None


def whole(value: Any) -> int | None:
    """A size in GiB as an event has it; None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 20 else None


def moment_of(text: Any) -> datetime | None:
    """The moment that an RFC 3339 text names; None where it names none."""
    try:
        return parse_rfc3339(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Listed:
    """Dollars an hour that `fleetctl request` knew: on demand by type, spot by (type, zone), the fleet's maximum."""

    on_demand: Mapping[str, Decimal] = field(default_factory=dict)
    spot: Mapping[tuple[str, str], Decimal] = field(default_factory=dict)
    maximum: Decimal | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Listed:
        """From fleet.json; what cannot be read is left out."""
        on_demand: dict[str, Decimal] = {}
        spot: dict[tuple[str, str], Decimal] = {}
        rows = document.get("prices")
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, Mapping):
                continue
            kind = str(row.get("instance_type", ""))
            if (price := dollars(row.get("on_demand"))) is not None:
                on_demand[kind] = price
            if (price := dollars(row.get("spot"))) is not None:
                spot[kind, str(row.get("zone", ""))] = price
        return cls(on_demand, spot, max(_maxima(document.get("request")), default=None))


def _maxima(node: Any) -> Iterator[Decimal]:
    """Every maximum price in a request, wherever AWS takes one."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key in ("SpotPrice", "MaxPrice") and (price := dollars(value)):
                yield price
            elif isinstance(value, (Mapping, list)):
                yield from _maxima(value)
    elif isinstance(node, list):
        for value in node:
            yield from _maxima(value)


def seconds_between(start: datetime, end: datetime) -> int:
    return max(0, round((end - start).total_seconds()))
