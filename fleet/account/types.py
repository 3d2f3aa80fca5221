"""The instance types that suit a job: described by EC2, chosen by price. `choose` is pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.job_values import SHOWN_OF_NOMINAL

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

TYPES_MIN = 3  # fewer pools mean longer waits for capacity
TYPES_MAX = 6
_DEARER_MAX = 2.5  # times the cheapest, once there are TYPES_MIN
Prices = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class InstanceType:
    """Memory in GiB; `gpu_memory` is that of one GPU."""

    name: str
    vcpus: int
    memory: float
    gpus: int = 0
    gpu: str = ""
    gpu_memory: float = 0.0
    current: bool = True

    def says(self) -> str:
        gpus = f", {self.gpus} x {self.gpu} {self.gpu_memory:.0f} GiB" if self.gpus else ""
        return f"{self.vcpus} vCPUs, {self.memory:.0f} GiB{gpus}"


@dataclass(frozen=True)
class Need:
    """The needs of a job. `max_price` in dollars an hour, 0 = any; `vcpus` is for jobs without a GPU."""

    gpus: int
    gpu_memory: float = 0.0
    max_price: float = 0.0
    vcpus: int = 4


def describe(session: Session, families: Iterable[str], need: Need) -> list[InstanceType]:
    """All types of the families that suit, at any price; EC2 filters by name, this function by the rest."""
    filters = [
        {"Name": "instance-type", "Values": [f"{family}.*" for family in families]},
        {"Name": "processor-info.supported-architecture", "Values": ["x86_64"]},
        {"Name": "supported-usage-class", "Values": ["spot"]},
    ]
    types = []
    with translated("list instance types"):
        for page in session.client("ec2").get_paginator("describe_instance_types").paginate(Filters=filters):
            items = [item for item in page["InstanceTypes"] if not item.get("BareMetal") and _has_whole_gpus(item)]
            types += [_type(item) for item in items]
    return [instance_type for instance_type in types if suits(instance_type, need)]


def suits(instance_type: InstanceType, need: Need) -> bool:
    if need.gpus:
        return instance_type.gpus == need.gpus and instance_type.gpu_memory >= need.gpu_memory * SHOWN_OF_NOMINAL
    return instance_type.gpus == 0 and instance_type.vcpus == need.vcpus


def offered_types(session: Session, names: Sequence[str] = ()) -> list[str]:
    """Those of `names` that the region has; without names all that it has."""
    filters = [{"Name": "instance-type", "Values": list(names)}] if names else []
    with translated("list the instance types of the region"):
        pages = session.client("ec2").get_paginator("describe_instance_type_offerings")
        return [str(offering["InstanceType"]) for page in pages.paginate(LocationType="region", Filters=filters)
                for offering in page["InstanceTypeOfferings"]]  # fmt: skip


def offered_zones(session: Session, names: Iterable[str]) -> dict[str, list[str]]:
    """The zones in which each type is offered."""
    zones: dict[str, list[str]] = {}
    type_names = sorted(names)
    if not type_names:
        return zones
    with translated("list the zones of instance types"):
        pages = session.client("ec2").get_paginator("describe_instance_type_offerings")
        filters = [{"Name": "instance-type", "Values": type_names}]
        for page in pages.paginate(LocationType="availability-zone", Filters=filters):
            for offering in page["InstanceTypeOfferings"]:
                zones.setdefault(offering["InstanceType"], []).append(offering["Location"])
    return {name: sorted(locations) for name, locations in zones.items()}


def choose(
    candidates: Iterable[InstanceType], zones: Mapping[str, list[str]], prices: Prices, need: Need
) -> tuple[list[InstanceType], list[str]]:
    """The cheapest types that may be used, cheapest first, and notes on the compromises.

    Current generations first: older ones fill up to TYPES_MIN. Types that no zone offers, without a known price (no
    zone has capacity), or with a price above the limit, are left out.
    """
    limit = need.max_price or float("inf")
    priced = [(lowest(prices, item.name, zones.get(item.name, [])), item) for item in candidates]
    usable = [(price, candidate) for price, candidate in priced if price is not None and price <= limit]
    current = sorted((pair for pair in usable if pair[1].current), key=_by_price)
    older = sorted((pair for pair in usable if not pair[1].current), key=_by_price)
    chosen = [pair for pair in current[:TYPES_MAX] if pair[0] <= current[0][0] * _DEARER_MAX]
    chosen = chosen if len(chosen) >= TYPES_MIN else current[:TYPES_MIN]
    notes = []
    if len(chosen) < TYPES_MIN and older:
        added = older[: TYPES_MIN - len(chosen)]
        names = ", ".join(candidate.name for _, candidate in added)
        notes.append(f"{names}: of an earlier generation, for more capacity")
        chosen = sorted([*chosen, *added], key=_by_price)
    if 0 < len(chosen) < TYPES_MIN:
        notes.append(f"only {len(chosen)} type(s) suit: waits for capacity will be longer; a smaller need finds more")
    return [candidate for _, candidate in chosen], notes


def lowest(prices: Prices, name: str, zones: Iterable[str]) -> float | None:
    amounts = [prices[name, zone] for zone in zones if (name, zone) in prices]
    return min(amounts) if amounts else None


def _by_price(pair: tuple[float, InstanceType]) -> tuple[float, str]:
    return pair[0], pair[1].name


def _type(description: Mapping[str, Any]) -> InstanceType:
    gpus = (description.get("GpuInfo") or {}).get("Gpus") or []
    first = gpus[0] if gpus else {}
    return InstanceType(
        name=description["InstanceType"],
        vcpus=int(description["VCpuInfo"]["DefaultVCpus"]),
        memory=description["MemoryInfo"]["SizeInMiB"] / 1024,
        gpus=sum(int(gpu["Count"]) for gpu in gpus),
        gpu=str(first.get("Name", "")),
        gpu_memory=first.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024,
        current=bool(description.get("CurrentGeneration")),
    )


def _has_whole_gpus(description: Mapping[str, Any]) -> bool:
    gpus = (description.get("GpuInfo") or {}).get("Gpus") or []
    return all(float(gpu.get("GpuPartitionSize") or 1.0) >= 1.0 for gpu in gpus)


# The types for a file that is written without AWS, sorted by us-west-2's on-demand price.
KNOWN = (
    InstanceType("g4dn.xlarge", 4, 16, 1, "T4", 15), InstanceType("g4dn.2xlarge", 8, 32, 1, "T4", 15),
    InstanceType("g6.xlarge", 4, 16, 1, "L4", 22), InstanceType("g6.2xlarge", 8, 32, 1, "L4", 22),
    InstanceType("g5.xlarge", 4, 16, 1, "A10G", 22), InstanceType("g5.2xlarge", 8, 32, 1, "A10G", 22),
    InstanceType("g6e.xlarge", 4, 32, 1, "L40S", 44), InstanceType("g6e.2xlarge", 8, 64, 1, "L40S", 44),
    InstanceType("g6e.4xlarge", 16, 128, 1, "L40S", 44),
    InstanceType("g4dn.12xlarge", 48, 192, 4, "T4", 15), InstanceType("g6.12xlarge", 48, 192, 4, "L4", 22),
    InstanceType("g5.12xlarge", 48, 192, 4, "A10G", 22), InstanceType("g6e.12xlarge", 48, 384, 4, "L40S", 44),
    InstanceType("g6.48xlarge", 192, 768, 8, "L4", 22), InstanceType("g5.48xlarge", 192, 768, 8, "A10G", 22),
    InstanceType("g6e.48xlarge", 192, 1536, 8, "L40S", 44), InstanceType("p4d.24xlarge", 96, 1152, 8, "A100", 40),
    InstanceType("p4de.24xlarge", 96, 1152, 8, "A100", 80), InstanceType("p5.48xlarge", 192, 2048, 8, "H100", 80),
    InstanceType("c7i.xlarge", 4, 8), InstanceType("m7i.xlarge", 4, 16), InstanceType("c6i.xlarge", 4, 8),
    InstanceType("c7i.2xlarge", 8, 16), InstanceType("m7i.2xlarge", 8, 32), InstanceType("c6i.2xlarge", 8, 16),
)  # fmt: skip
