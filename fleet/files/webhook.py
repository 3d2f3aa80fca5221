"""`[notify] webhook`: addresses that the instance must not post to, whoever wrote them into job.toml.

The link-local ones are the metadata service's (credentials), the loopback ones the relay's and whatever else runs on
the machine. Names are not resolved: what they mean on the instance is not known here.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

_NAMES = ("localhost", "instance-data", "instance-data.ec2.internal")  # the last two: AWS's for the metadata service


def fault(url: str) -> str:
    """What is wrong with the address, "" where nothing is."""
    if not url:
        return ""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError as error:
        return f"is no URL: {error}"
    if not host:
        return "names no host"
    if host in _NAMES or host.endswith(".localhost"):
        return f"must not be the instance itself or its metadata service: {host}"
    address = _address(host)
    if address is None:
        return ""
    inner = getattr(address, "ipv4_mapped", None) or address
    if inner.is_loopback or inner.is_link_local or inner.is_unspecified or str(inner) == "fd00:ec2::254":
        return f"must not be the instance itself or its metadata service: {host}"
    return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """In every form that a resolver takes: 2852039166 and 0xa9.254.43518 are 169.254.169.254 as well."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None
