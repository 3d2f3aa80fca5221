"""The network of the instances, and the way to them: the VPC's subnets, this machine's address, the ssh key."""

from __future__ import annotations

import ipaddress
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

SSH_GROUP = "spotheal-ssh"
_CHECK_ADDRESS = "https://checkip.amazonaws.com"  # AWS's own; answers with the caller's address
_CHECK_SECONDS = 4.0
_PUBLIC_KEYS = ("id_ed25519.pub", "id_rsa.pub")  # EC2 imports no other kind (API reference, ImportKeyPair)


@dataclass(frozen=True)
class Network:
    """`subnets`: one per zone; `public`: instances there get a public address."""

    vpc: str
    subnets: dict[str, str]
    public: bool


def network(session: Session, vpc: str = "") -> Network:
    """The default VPC's subnets, or those of `vpc`. NotFound if there is none."""
    ec2 = session.client("ec2")
    if not vpc:
        with translated("look for the default VPC"):
            vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        if not vpcs:
            raise NotFound(
                f"region {session.region} of this account has no default VPC",
                next_step="`aws ec2 create-default-vpc` makes one; or name another with --vpc vpc-…",
            )
        vpc = str(vpcs[0]["VpcId"])
    subnets: dict[str, dict[str, Any]] = {}
    with translated(f"list the subnets of {vpc}"):
        pages = ec2.get_paginator("describe_subnets").paginate(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
        for page in pages:
            for subnet in page["Subnets"]:
                best = subnets.get(subnet["AvailabilityZone"])
                if best is None or _rank(subnet) > _rank(best):
                    subnets[subnet["AvailabilityZone"]] = subnet
    if not subnets:
        raise NotFound(f"{vpc} has no subnet", next_step="`aws ec2 create-default-subnet --availability-zone ZONE`")
    public = all(bool(subnet.get("MapPublicIpOnLaunch")) for subnet in subnets.values())
    return Network(vpc, {zone: str(subnets[zone]["SubnetId"]) for zone in sorted(subnets)}, public)


def _rank(subnet: dict[str, Any]) -> tuple[bool, bool, int]:
    """The best subnet of a zone gives public addresses (instances must reach AWS), is the default, has the most free
    addresses."""
    room = int(subnet.get("AvailableIpAddressCount") or 0)
    return bool(subnet.get("MapPublicIpOnLaunch")), bool(subnet.get("DefaultForAz")), room


def cidr(text: str) -> str:
    """`203.0.113.7` or `203.0.113.0/24` in EC2's form; ConfigError if it is no network, or the whole internet."""
    try:
        block = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ConfigError(f"--ssh-from {text!r} is no address and no network", next_step="write 203.0.113.7") from None
    if block.prefixlen == 0:
        raise ConfigError(f"--ssh-from {text} would open ssh to the whole internet", next_step="write 203.0.113.7")
    return str(block)


def own_address() -> str:
    """This machine's address as AWS sees it, as a network of one address; "" if it is not known."""
    endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL", "")).hostname or ""
    if endpoint in ("127.0.0.1", "localhost", "::1"):
        return "127.0.0.1/32"
    try:
        with urllib.request.urlopen(_CHECK_ADDRESS, timeout=_CHECK_SECONDS) as answer:
            return cidr(answer.read(100).decode("ascii", "replace"))
    except (OSError, ConfigError):
        return ""


def public_key() -> Path | None:
    """The operator's public key, the newest kind first."""
    folder = Path.home() / ".ssh"
    return next((folder / name for name in _PUBLIC_KEYS if (folder / name).is_file()), None)
