"""What a run has cost so far, by AWS's rules of charging. Pure; dollars are Decimal.

Volumes, snapshots and addresses are charged by the second of a month of 30 days (EBS pricing); instances as in `stays`.
What AWS will bill is AWS's to say: everything here is an estimate from list prices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal

from spotheal.agent.money.bill_inputs import Disk, Event, History, moment_of, seconds_between, whole
from spotheal.agent.money.instance_time import Stay, launch_times, stays

# List prices of us-east-1, us-east-2 and us-west-2, November 2026 (aws.amazon.com/ebs/pricing, /vpc/pricing); other
# regions are up to twice as dear.
PRICES_AS_OF = "2026-11"
PRICES_REGIONS = ("us-east-1", "us-east-2", "us-west-2")
GIB_MONTH = {"gp3": Decimal("0.08"), "gp2": Decimal("0.10"), "io1": Decimal("0.125"), "io2": Decimal("0.125"),
             "st1": Decimal("0.045"), "sc1": Decimal("0.015")}  # fmt: skip
IOPS_MONTH = {"gp3": Decimal("0.005"), "io1": Decimal("0.065"), "io2": Decimal("0.065")}
IOPS_INCLUDED = {"gp3": 3000}
MIBPS_MONTH = {"gp3": Decimal("0.04")}
MIBPS_INCLUDED = {"gp3": 125}
SNAPSHOT_GIB_MONTH = Decimal("0.05")
# Of a copy that is filled at a provisioned rate: $0.0036 a GiB of the snapshot at 300 MiB/s, in proportion to the rate
# (aws.amazon.com/ebs/pricing, example 12).
FILLING_GIB = Decimal("0.000012")  # a GiB and MiB/s
ADDRESS_HOUR = Decimal("0.005")  # a public IPv4 address
MONTH_SECONDS = 30 * 86400
CENT = Decimal("0.01")


@dataclass(frozen=True)
class Held:
    """A volume or snapshot, from when it was charged for until when."""

    id: str
    zone: str
    start: datetime
    end: datetime
    gib: int
    dollars: Decimal
    month: Decimal  # dollars a month while it exists
    exists: bool


@dataclass(frozen=True)
class Bill:
    """Exact dollars by kind; round with `cents`. `unpriced`: instances whose price nobody knows, which are left out."""

    stays: tuple[Stay, ...]
    volumes: tuple[Held, ...]
    snapshots: tuple[Held, ...]
    spot: Decimal
    on_demand: Decimal
    addresses: Decimal
    roots: Decimal
    filling: Decimal  # of copies, at `initialization_rate`
    unpriced: tuple[str, ...]
    until: datetime  # the run's end, or now

    @property
    def exact(self) -> dict[str, Decimal]:
        volumes = sum((volume.dollars for volume in self.volumes), Decimal(0))
        snapshots = sum((snapshot.dollars for snapshot in self.snapshots), Decimal(0))
        return {"spot": self.spot, "on_demand": self.on_demand, "volumes": volumes, "snapshots": snapshots,
                "root_disks": self.roots, "public_ipv4": self.addresses, "filling": self.filling}  # fmt: skip

    @property
    def lines(self) -> dict[str, Decimal]:
        """To the cent; their sum is the total."""
        return {name: cents(value) for name, value in self.exact.items()}

    @property
    def total(self) -> Decimal:
        return sum(self.lines.values(), Decimal(0))

    @property
    def rate(self) -> Decimal:
        """Dollars an hour that the run costs now: living instances, volume and addresses."""
        living = [stay for stay in self.stays if stay.runs]
        instances = sum((stay.price_now or Decimal(0) for stay in living), Decimal(0))
        monthly = sum((storage.month for storage in (*self.volumes, *self.snapshots) if storage.exists), Decimal(0))
        return instances + ADDRESS_HOUR * len(living) + monthly * 3600 / MONTH_SECONDS


def cents(dollars: Decimal) -> Decimal:
    return dollars.quantize(CENT, ROUND_HALF_UP)


def about(dollars: Decimal | float) -> str:
    """An estimate in words: `about $3.21`, and `under $0.01` where cents would say that it is nothing."""
    return "under $0.01" if dollars > 0 and f"{dollars:.2f}" == "0.00" else f"about ${dollars:,.2f}"


def bill(history: History, since: datetime | None = None) -> Bill:
    """The bill of a run; with `since` of what began after it (the fleets before a --resume are left out)."""
    until = min(history.ended or history.now, history.now)
    machines = [stay for stay in stays(history) if since is None or stay.end > since]
    volumes, snapshots = _volumes(history, until), _snapshots(history, until)
    if since is not None:
        volumes = tuple(_after(volume, since) for volume in volumes if volume.end > since)
        snapshots = tuple(_after(snapshot, since) for snapshot in snapshots if snapshot.end > since)
    disks = (_month(stay.root_gib * GIB_MONTH["gp3"], stay.seconds) for stay in machines if stay.root_gib)
    roots = sum(disks, Decimal(0))
    return Bill(
        stays=tuple(machines),
        volumes=volumes,
        snapshots=snapshots,
        spot=sum((s.dollars for s in machines if s.dollars is not None and s.lifecycle == "spot"), Decimal(0)),
        on_demand=sum((s.dollars for s in machines if s.dollars is not None and s.lifecycle != "spot"), Decimal(0)),
        addresses=ADDRESS_HOUR * sum(stay.seconds for stay in machines) / 3600,
        roots=roots,
        filling=_filling(history, since),
        unpriced=tuple(stay.instance for stay in machines if stay.dollars is None),
        until=until,
    )


# ---------------------------------------------------------------------------------------------- volumes and snapshots
def _volumes(history: History, until: datetime) -> tuple[Held, ...]:
    """Each from the launch of the instance that made it (the first: from the request) to its deletion, or `until`. One
    that AWS no longer shows, and whose deletion nobody noted, ends with the last sign of the machines that had it."""
    deletions = _deleted(history.events)
    launched = launch_times(history)
    creations: dict[str, tuple[datetime, Event]] = {}
    for event in history.events:
        name, moment = str(event.get("volume") or ""), moment_of(event.get("time"))
        if event["event"] != "volume" or not name or name in creations or moment is None:
            continue
        made_by_run = event.get("moved_from") or creations
        start = launched.get(str(event.get("instance")), moment) if made_by_run else history.requested_at or moment
        creations[name] = (start, event)
    volumes = []
    for name, (start, event) in creations.items():
        description = (history.volumes or {}).get(name)
        disk, zone = description or _noted(event) or history.disk, str(event.get("zone", ""))
        is_newest = name == next(reversed(creations))
        is_missing = history.volumes is not None and description is None and not (is_newest and history.ended)
        end = deletions.get(name) or (min(until, _last_sign(history, name)) if is_missing else until)
        exists = name not in deletions and (description is not None or history.volumes is None)
        volumes.append(_held(name, zone, start, end, disk.size_gib, disk_month(disk), exists))
    return tuple(volumes)


def _last_sign(history: History, volume: str) -> datetime:
    """When a machine that had `volume` was last heard of."""
    holders = {str(event.get("instance")) for event in history.events if event.get("volume") == volume}
    times = [event.get("time") for event in history.events if event.get("instance") in holders]
    times += [event.get("heard") for event in history.events if event.get("predecessor") in holders]
    beats = [moment for name, moment in history.heard.items() if name in holders]
    return max((*beats, *(moment for moment in map(moment_of, times) if moment)), default=history.now)


def _filling(history: History, since: datetime | None) -> Decimal:
    """What the copies' initialization rates cost: each GiB that was used on the volume when its snapshot was taken."""
    total, used, filled = Decimal(0), None, set[str]()
    for event in history.events:
        if event["event"] in ("handover", "snapshot"):
            used = whole(event.get("used_gib")) or used
        name, rate = str(event.get("volume") or ""), whole(event.get("initialization_rate"))
        if event["event"] != "volume" or not rate or not name or name in filled:
            continue
        filled.add(name)
        moment, disk = moment_of(event.get("time")), _noted(event) or history.disk
        if since is None or (moment is not None and moment >= since):
            total += FILLING_GIB * rate * (disk.size_gib if used is None else used)
    return total


def _noted(event: Event) -> Disk | None:
    size = whole(event.get("size_gib"))
    return None if size is None else Disk(size, str(event.get("type", "gp3")))


def disk_month(disk: Disk) -> Decimal:
    """Dollars a month of a volume: its size, and what it has of IOPS and throughput beyond what is included."""
    month = disk.size_gib * GIB_MONTH.get(disk.type, GIB_MONTH["gp3"])
    iops = max(0, (disk.iops or 0) - IOPS_INCLUDED.get(disk.type, 0)) * IOPS_MONTH.get(disk.type, Decimal(0))
    extra = max(0, (disk.throughput or 0) - MIBPS_INCLUDED.get(disk.type, 0)) * MIBPS_MONTH.get(disk.type, Decimal(0))
    return month + iops + extra


def _snapshots(history: History, until: datetime) -> tuple[Held, ...]:
    """Each as if it held everything that was used on the volume then: an upper bound, for they are incremental."""
    deletions = _deleted(history.events)
    snapshots = []
    size = history.disk.size_gib
    for event in history.events:
        if event["event"] == "volume":
            disk = (history.volumes or {}).get(str(event.get("volume"))) or _noted(event)
            size = size if disk is None else disk.size_gib
        name, moment = str(event.get("snapshot") or ""), moment_of(event.get("time"))
        if event["event"] not in ("handover", "snapshot") or not name or moment is None:
            continue
        used = whole(event.get("used_gib"))
        gib = size if used is None else used
        end = deletions.get(name) or until
        month = gib * SNAPSHOT_GIB_MONTH
        snapshots.append(_held(name, str(event.get("zone", "")), moment, end, gib, month, name not in deletions))
    return tuple({snapshot.id: snapshot for snapshot in reversed(snapshots)}.values())[::-1]


def _deleted(events: Iterable[Event]) -> dict[str, datetime]:
    deletions: dict[str, datetime] = {}
    for event in events:
        moment = moment_of(event.get("time"))
        if event["event"] == "deleted" and moment is not None:
            for key in ("volumes", "snapshots"):
                names = event.get(key)
                deletions |= dict.fromkeys(map(str, names if isinstance(names, list) else ()), moment)
    return deletions


def _held(name: str, zone: str, start: datetime, end: datetime, gib: int, month: Decimal, exists: bool) -> Held:
    end = max(start, end)
    return Held(name, zone, start, end, gib, _month(month, seconds_between(start, end)), month, exists)


def _after(rest: Held, since: datetime) -> Held:
    start = max(rest.start, since)
    return replace(rest, start=start, dollars=_month(rest.month, seconds_between(start, rest.end)))


def _month(month: Decimal, seconds: int) -> Decimal:
    return month * seconds / MONTH_SECONDS
