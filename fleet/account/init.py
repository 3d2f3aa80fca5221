"""`fleetctl init`: reads an account and chooses what a job needs. Nothing is created in AWS here.

`survey` asks AWS, `offline` does not and leaves placeholders; both return a `Choice`, from which `init_files` writes
the two files. `fleetctl request` creates the roles, security group, key pair, bucket and volume, as its plan says.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spotheal.agent.protocol.errors import CapacityError, ConfigError
from spotheal.agent.protocol.names import JOB_NAME
from spotheal.fleet.account import images, network, quotas, roles, types
from spotheal.fleet.account.environments import NOTHING, Environment
from spotheal.fleet.account.images import Image
from spotheal.fleet.account.types import InstanceType, Need

if TYPE_CHECKING:
    from spotheal.agent.protocol.clock import Clock
    from spotheal.fleet.account.environments import Environment
from spotheal.fleet.run.session import Session
from spotheal.iam import job_roles

HOURS = 24.0
KEY_NAME = "spotheal"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wishes:
    """The operator's options. If `types` are named, none is chosen; `dollars` None: a proposed limit."""

    name: str
    repository: str
    command: tuple[str, ...]
    need: Need
    hours: float = HOURS
    dollars: float | None = None
    volume_gib: int = 100
    image: str = ""
    types: tuple[str, ...] = ()
    vpc: str = ""
    ssh_from: str | None = None  # None: this machine's address
    environment: Environment = NOTHING  # of the checkout


@dataclass(frozen=True)
class Offer:
    """An instance type with its zones; prices in dollars an hour, None if unknown."""

    type: InstanceType
    zones: tuple[str, ...]
    subnets: tuple[str, ...]
    spot: float | None = None
    on_demand: float | None = None


@dataclass(frozen=True)
class Choice:
    """The content of the two files. `account` and `region` may be "" offline."""

    wishes: Wishes
    account: str
    region: str
    image: Image
    types: tuple[Offer, ...]
    fleet_role: str  # ARN
    profile: str  # ARN
    ssh_from: str = ""
    key_file: str = ""
    quota: str = ""
    dollars: float = 0.0
    notes: tuple[str, ...] = field(default=())


# -------------------------------------------------------------------------------------------------------- from AWS
def survey(session: Session, wishes: Wishes, clock: Clock, say: Say) -> Choice:
    """Choose from the account and the market. CapacityError if a quota or a price excludes every type."""
    account = session.account
    say("reading quotas and instance types …")
    image = images.deep_learning(session) if wishes.need.gpus else images.ubuntu(session)
    if wishes.image:
        image = replace(image, id=wishes.image, parameter="", says="named with --image")
    families = sorted({name.partition(".")[0] for name in wishes.types}) or image.families
    need = wishes.need
    candidates = types.describe(session, families, need)
    if wishes.types:
        candidates = _named(wishes.types, candidates)
    if not candidates:
        raise ConfigError(_nothing_suits(need), next_step="ask for another --gpus or less --gpu-memory")
    candidates, quota, notes = _within_quota(session, candidates)
    say("reading zones, subnets and spot prices …")
    net = network.network(session, wishes.vpc)
    chosen, price_notes = _choose(session, candidates, net, need, clock)
    notes += price_notes
    ssh_from, ssh_note = _ssh_from(wishes)
    notes += [note for note in (ssh_note, wishes.environment.note) if note]
    if not net.public:
        notes.append(f"subnets of {net.vpc} give no public address: instances need a NAT or endpoints to reach AWS")
    if not need.gpus and not wishes.image and not wishes.environment.setup:
        notes.append("the image is plain Ubuntu, without torch: name packages in requirements.txt or [job] setup")
    key = network.public_key()
    return Choice(
        wishes=wishes, account=account, region=session.region, image=image, types=chosen,
        fleet_role=roles.profile_arn(session, roles.FLEET_ROLE).replace(":instance-profile/", ":role/"),
        profile=roles.profile_arn(session, job_roles.job_role(wishes.name)),
        ssh_from=ssh_from, key_file=_at_home(key) if key else "",
        quota=quota, dollars=_dollars(wishes, chosen), notes=tuple(notes),
    )  # fmt: skip


def _choose(
    session: Session, candidates: list[InstanceType], net: network.Network, need: Need, clock: Clock
) -> tuple[tuple[Offer, ...], list[str]]:
    from spotheal.fleet.account.prices import on_demand_prices, spot_prices_only

    names = tuple(candidate.name for candidate in candidates)
    offered = types.offered_zones(session, names)
    zones = {name: [zone for zone in offered.get(name, []) if zone in net.subnets] for name in names}
    prices = spot_prices_only(session, names, tuple(net.subnets), clock)
    picked, notes = types.choose(candidates, zones, prices, need)
    if not picked:
        _refuse_price(candidates, zones, prices, need)
    listed = on_demand_prices(session, [candidate.name for candidate in picked])
    chosen = []
    for candidate in picked:
        used = tuple(zone for zone in zones[candidate.name] if (candidate.name, zone) in prices)
        subnets = tuple(net.subnets[zone] for zone in used)
        spot = types.lowest(prices, candidate.name, used)
        chosen.append(Offer(candidate, used, subnets, spot, listed.get(candidate.name)))
    return tuple(chosen), notes


def _named(names: tuple[str, ...], candidates: list[InstanceType]) -> list[InstanceType]:
    by_name = {candidate.name: candidate for candidate in candidates}
    if strange := [name for name in names if name not in by_name]:
        raise ConfigError(
            f"{', '.join(strange)}: no type of this region that suits --gpus and --gpu-memory and runs as spot",
            next_step="`aws ec2 describe-instance-types` lists them",
        )
    return [by_name[name] for name in names]


def _within_quota(session: Session, candidates: list[InstanceType]) -> tuple[list[InstanceType], str, list[str]]:
    """The types that the account may run, its quotas in words, and notes. CapacityError if it may run none."""
    codes = [code_and_name for candidate in candidates if (code_and_name := quotas.quota_of(candidate.name))]
    read, notes = quotas.read(session, codes)
    usable = [candidate for candidate in candidates if quotas.allows(read, candidate)]
    summary = "; ".join(f'"{quota.name}" is {quota.vcpus:g}' for quota in read.values() if quota.vcpus is not None)
    if not usable:
        smallest = min(candidates, key=lambda candidate: candidate.vcpus)
        code, name = quotas.quota_of(smallest.name) or ("", "")
        vcpus = sorted(candidate.vcpus for candidate in candidates)[: types.TYPES_MIN][-1]
        raise CapacityError(
            f'this account may run none of the types that suit: its quota "{name}" in {session.region} is '
            f"{read[code].vcpus:g} vCPUs, and {smallest.name} has {smallest.vcpus}",
            next_step=quotas.command(code, vcpus, session.region)
            + "\n  AWS answers in minutes to days; the same init then",
        )
    excluded = [candidate for candidate in candidates if candidate not in usable]
    if excluded and len(usable) < types.TYPES_MIN:
        code, name = quotas.quota_of(excluded[0].name) or ("", "")
        vcpus_needed = min(candidate.vcpus for candidate in excluded)
        notes.append(
            f'the quota "{name}" of {read[code].vcpus:g} vCPUs leaves out {len(excluded)} type(s) that suit; more: '
            + quotas.command(code, vcpus_needed, session.region)
        )
    return usable, summary, notes


def _refuse_price(
    candidates: Iterable[InstanceType], zones: dict[str, list[str]], prices: types.Prices, need: Need
) -> None:
    """CapacityError that names the lowest price, or says that there is none."""
    names = [candidate.name for candidate in candidates]
    lowest = [(price, name) for name in names if (price := types.lowest(prices, name, zones[name]))]
    if not lowest:
        raise CapacityError(
            "no spot price is known for any type that suits: this region has no spot capacity of them",
            next_step="choose another --region, or another --gpus or --gpu-memory",
        )
    price, name = min(lowest)
    raise CapacityError(
        f"nothing that suits costs ${need.max_price:g} an hour or less: the cheapest is {name} at ${price:.4f}",
        next_step=f"--max-price {math.ceil(price * 120) / 100:g}, or another --region",
    )


def _ssh_from(wishes: Wishes) -> tuple[str, str]:
    if wishes.ssh_from is not None:
        return (network.cidr(wishes.ssh_from) if wishes.ssh_from else ""), ""
    address = network.own_address()
    return address, "" if address else (
        "this machine's public address is not known, so ssh stays closed: --ssh-from ADDRESS, "
        "or ssh_from in job.toml, opens it to one address"
    )


def _dollars(wishes: Wishes, offers: tuple[Offer, ...]) -> float:
    """The cost of the most expensive offer in the allowed hours, plus 20 % for rising prices."""
    if wishes.dollars is not None:
        return wishes.dollars
    prices = [offer.spot for offer in offers if offer.spot]
    return float(max(1, math.ceil(max(prices) * wishes.hours * 1.2))) if prices and wishes.hours else 0.0


def _nothing_suits(need: Need) -> str:
    if need.gpus:
        memory = f" with {need.gpu_memory:g} GiB or more each" if need.gpu_memory else ""
        return f"no instance type that the image supports has exactly {need.gpus} GPU(s){memory}"
    return f"no instance type has exactly {need.vcpus} vCPUs"


def _at_home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


# ----------------------------------------------------------------------------------------------------------- offline
def offline(wishes: Wishes, region: str) -> Choice:
    """The same files, with a placeholder for each value that only AWS knows; `fleetctl validate` lists them."""
    suit = [candidate for candidate in types.KNOWN if types.suits(candidate, wishes.need)]
    if wishes.types:
        suit = [InstanceType(name, 0, 0) for name in wishes.types]
    if not suit:
        raise ConfigError(_nothing_suits(wishes.need), next_step="name types with --type, or give credentials")
    suit = suit[: max(types.TYPES_MIN, len(wishes.types))]
    chosen = tuple(Offer(candidate, (), ("<SUBNET_ID>",)) for candidate in suit)
    arn = "arn:aws:iam::<ACCOUNT_NUMBER>:"
    families = images.DEEP_LEARNING_FAMILIES if wishes.need.gpus else images.CPU_FAMILIES
    key = network.public_key()
    return Choice(
        wishes=wishes, account="", region=region, types=chosen,
        image=Image(wishes.image or "<AMI_ID>", "", "named with --image" if wishes.image else "", families),
        fleet_role=f"{arn}role/{roles.FLEET_ROLE}",
        profile=f"{arn}instance-profile/{job_roles.job_role(wishes.name)}",
        ssh_from=network.cidr(wishes.ssh_from) if wishes.ssh_from else "", key_file=_at_home(key) if key else "",
        dollars=wishes.dollars or 0.0,
        notes=("without credentials nothing was read from AWS: <…> marks what is left to fill in, and the types are "
               "not checked; the same command with credentials and --force fills in all",
               *filter(None, (wishes.environment.note,))),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- of the checkout
def guess_name(repository: str, folder: Path) -> str:
    """A job's name from the repository's, or the folder's."""
    last = folder.resolve().name
    if repository != ".":
        path = urlsplit(repository).path if "://" in repository else repository.rpartition(":")[2]
        last = path.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^a-z0-9]+", "-", last.lower().removesuffix(".git"))[:40].strip("-")
    return name if JOB_NAME.fullmatch(name) else "training"


def is_checkout(folder: Path) -> bool:
    try:
        process = subprocess.run(
            ["git", "rev-parse", "--is-inside-work-tree"], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return process.stdout.strip() == "true"
