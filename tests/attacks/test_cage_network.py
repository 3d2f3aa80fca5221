"""Packets that belong to no user do not reach the metadata service: the kernel's own, here of a VXLAN device.

With the module of AF_SMC, in a virtual machine: tests/boot/besieged_vm.py, `make boot-vm`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from spotheal.agent.cage.network import IMDS_ADDRESSES, rules

SPACE = f"spotheal-nobody-{os.getpid()}"
UID = 54321
pytestmark = [
    pytest.mark.root,
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(name) is None for name in ("ip", "nft")),
        reason="needs root, ip and nft: a network namespace",
    ),
]
# An ARP request of the kernel's goes through the tunnel; then root's own packet, so that nobody waits for what does not
# come. Prints the protocol's port of each that went out.
_SEND = """
import socket, struct, sys
service, family = sys.argv[1], socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
wire.bind(("card", 0))
socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("10.9.9.2", 9))
try:
    socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (service, 4000))
except OSError as error:
    sys.exit(f"root's own packet: {error}")
head, at = (40, 24) if family == socket.AF_INET6 else (20, 16)
address = socket.inet_pton(family, service)
while True:
    packet = wire.recv(2048)
    if packet[at : at + len(address)] == address:
        (port,) = struct.unpack_from("!H", packet, head + 2)
        print(port)
        if port == 4000:
            break
"""


@pytest.fixture(params=IMDS_ADDRESSES)
def service(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its address, in a network namespace with a tunnel of the kernel's to it."""
    address = str(request.param)
    version, bits = ("-6", "64") if ":" in address else ("-4", "16")
    own = "fd00:ec2::1" if ":" in address else "169.254.1.1"
    subprocess.run(["ip", "netns", "add", SPACE], check=True)
    try:
        for command in (
            "link add card type veth peer name far",
            "link set far up",
            "link set card up",
            f"addr add {own}/{bits} dev card nodad",
            f"{version} neigh add {address} lladdr 02:00:00:00:00:01 dev card",
            f"link add tunnel type vxlan id 1 local {own} remote {address} dstport 4789 dev card",
            "addr add 10.9.9.1/24 dev tunnel",
            "link set tunnel up",
        ):
            done = subprocess.run(["ip", "-n", SPACE, *command.split()], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"this kernel has no such device: ip {command}: {done.stderr.strip()}")
        yield address
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], check=False)


def ports(service: str) -> set[str]:
    argv = ["ip", "netns", "exec", SPACE, sys.executable, "-I", "-c", _SEND, service]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_packets_of_nobody_do_not_reach_the_metadata_service_and_roots_do(service: str) -> None:
    assert ports(service) == {"4789", "4000"}
    inside = ["ip", "netns", "exec", SPACE, "nft"]
    subprocess.run([*inside, "-f", "-"], input=rules(UID, 4444), text=True, check=True)
    subprocess.run(["ip", "-n", SPACE, "neigh", "flush", "dev", "tunnel"], check=True)
    assert ports(service) == {"4000"}
