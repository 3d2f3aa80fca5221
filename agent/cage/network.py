"""The cage's way to the metadata service: nftables turns its packets to the relay, by user, whatever code sends them.

One table of our own, `inet spotheal`, replaced as a whole (so again is harmless) and removed at the end; other tables
are left alone. The user is the socket's (`meta skuid`), so a child process, a thread and a new program are all in it.
A relay that is gone means a refused connection, never an open way.
Source: nft(8); AWS, "Instance metadata and user data", "Task IAM role" and "EKS Pod Identity" for the addresses.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spotheal.agent.processes import programs
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.errors import Fatal, Retryable, SetupFailed

TABLE = "spotheal"
IMDS_ADDRESSES = ("169.254.169.254", "fd00:ec2::254")
# Credentials of ECS tasks, of EKS pods: another way to a role.
_OTHER_CREDENTIALS = ("169.254.170.2", "169.254.170.23", "fd00:ec2::23")
# EFS believes a client's user numbers, and the instance's security group is let in: a trainer with an NFS client of its
# own would be root on the file system, other jobs' results included. The kernel's mounts belong to no user here.
_NFS = 2049
_NETLINK_NETFILTER, _NFTABLES_GROUP = 12, 7  # linux/netlink.h; NFNLGRP_NFTABLES of linux/netfilter/nfnetlink.h
_LOOK_SECONDS = 1.0
_SECONDS_MAX = 180.0  # the first rules load kernel modules: 20 s ended a run on a machine that was slow
_INSTALL_SECONDS_MAX = 180.0
_INSTALLERS = {
    # An image may come with empty lists of packages.
    "apt-get": ("update -q", "-o DPkg::Lock::Timeout=120 install --yes --no-install-recommends nftables"),
    "dnf": ("install --assumeyes nftables",),
}


def rules(uid: int, port: int, endpoint: str = "") -> str:
    """The table as nft reads it. `endpoint`: the metadata service that the agent itself asks, where it is another."""
    lines = []
    for address in IMDS_ADDRESSES:
        lines.append(f"{_to(address)} tcp dport 80 redirect to :{port}")
    alias = _other(endpoint)
    if alias is not None:
        lines.append(f"{_to(alias[0])} tcp dport {alias[1]} redirect to :{port}")
    closed = "\n".join(_closed(uid, address) for address in (*IMDS_ADDRESSES, *_OTHER_CREDENTIALS))
    closed += f"\n    meta skuid {uid} tcp dport {_NFS} reject"
    turned = "\n".join(f"    meta skuid {uid} {line}" for line in lines)
    return (
        f"table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n"
        f"  chain turned {{\n    type nat hook output priority -105; policy accept;\n{turned}\n  }}\n"
        f"  chain closed {{\n    type filter hook output priority 0; policy accept;\n{closed}\n  }}\n}}\n"
    )


def close_imds(uid: int, port: int, log: Any, endpoint: str = "") -> None:
    """Redirect the user's packets to the relay at `port`. Raises SetupFailed where that cannot be: never left open."""
    try:
        _find_nft(log)
        _nft(rules(uid, port, endpoint))
    except (Fatal, Retryable, OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "message", "") or str(error)
        raise SetupFailed(
            f"the trainer cannot be kept from the instance's role: {message}",
            next_step="use an AMI with nftables (`apt-get install nftables`, `dnf install nftables`) and a kernel that"
            ' has it; `[cage] mode = "imds"` leaves the trainer the instance\'s role, and says so',
        ) from error


def is_closed() -> bool:
    """Whether the table stands with its rules; False too if nft cannot say."""
    try:
        listed = programs.run(["nft", "list", "table", "inet", TABLE], seconds_max=_SECONDS_MAX)
    except (Fatal, Retryable):
        return False
    return listed.code == 0 and "redirect" in listed.out and "reject" in listed.out


def watch_rules(on_change: Callable[[], None], over: Stop) -> None:
    """Call `on_change` after each change of the machine's rules, at once, until `over`. OSError without netlink."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as changes:
        changes.bind((0, 1 << (_NFTABLES_GROUP - 1)))
        changes.settimeout(_LOOK_SECONDS)
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                try:
                    changes.recv(1 << 16)
                except OSError as error:
                    if error.errno != errno.ENOBUFS:  # more changes than were read: one look does for all
                        raise
                on_change()


def open_imds(log: Any) -> None:
    """Remove the table; harmless where there is none."""
    try:
        _nft(f"table inet {TABLE}\ndelete table inet {TABLE}\n")
    except (Fatal, Retryable, OSError, subprocess.SubprocessError) as error:
        log.warning("the cage's nftables rules could not be removed", error=str(error))


def _to(address: str) -> str:
    return f"{'ip6' if ':' in address else 'ip'} daddr {address}"


def _closed(uid: int, address: str) -> str:
    """Also for sockets that belong to nobody: the kernel's own, as the one inside an AF_SMC socket. No rule about a
    user matches them, not even one that says which it is not. What a socket still sends after its program has closed
    it belongs to nobody either."""
    to = _to(address)
    return (
        f"    meta skuid {uid} {to} reject\n    {to} meta skuid != {uid} accept\n"
        f"    {to} ct state established,related accept\n    {to} reject"
    )


def _other(endpoint: str) -> tuple[str, int] | None:
    """Address and port of an endpoint that is not AWS's own, where it is an address."""
    try:
        parts = urlsplit(endpoint)
        address = str(ipaddress.ip_address(parts.hostname or ""))
        port = parts.port or 80
    except ValueError:
        return None
    return None if address in IMDS_ADDRESSES and port == 80 else (address, port)


def _find_nft(log: Any) -> None:
    try:
        programs.find("nft")
        return
    except Fatal:
        log.warning("nft is not on this image; installing nftables")
    for name, orders in _INSTALLERS.items():
        if not programs.exists(name):
            continue
        for order in orders:
            try:
                process = programs.run([name, *order.split()], seconds_max=_INSTALL_SECONDS_MAX)
            except (Fatal, Retryable) as error:
                log.warning(f"`{name} {order}` failed", error=error.message)
                continue
            if process.code != 0:
                log.warning(f"`{name} {order}` failed", error=process.said)
    programs.find("nft")


def _nft(script: str) -> None:
    process = subprocess.run(
        [programs.find("nft"), "-f", "-"],
        input=script,
        capture_output=True,
        text=True,
        errors="replace",
        cwd=Path("/"),
        timeout=_SECONDS_MAX,
        check=False,
    )
    if process.returncode != 0:
        lines = (process.stderr.strip() or process.stdout.strip()).splitlines()
        raise Fatal(f"nft refused the rules: {lines[0] if lines else process.returncode}")
