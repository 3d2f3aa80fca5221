"""`[notify] webhook`: addresses to which the instance must not post, even if job.toml names them.

The link-local addresses are the metadata service's (credentials), the loopback ones the relay's and other programs' on
the machine. Names are not resolved: they may mean another address on the instance.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

_NAMES = ("localhost", "instance-data", "instance-data.ec2.internal")  # the last two: AWS's for the metadata service


def fault(url: str) -> str:
    """The fault of the address, "" if it has none."""
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
    """The address in any form that a resolver accepts: 2852039166 and 0xa9.254.43518 are 169.254.169.254 as well."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None
