"""The network of one instance: its own, with the metadata service at 169.254.169.254 and the rest of AWS at 10.0.0.1.

Two network namespaces: one is the instance's, the other AWS's side of its cable. A socket belongs to the namespace it
was made in, whoever serves it; so the rehearsal's servers, in this process, listen there. Root only.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

METADATA = "169.254.169.254"
GATEWAY = "10.0.0.1"
_CLONE_NEWNET = 0x40000000


class InstanceNetwork:
    """`instance` and `aws` are names for `ip netns`. `tap` makes the cable a tap device, for a virtual machine."""

    def __init__(self, instance: str, mac: str, address: str, *, tap: bool = False) -> None:
        name = f"sp{os.getpid()}-{instance.removeprefix('i-')[:6]}"
        self.instance, self.aws = f"{name}-i", f"{name}-a"
        self._dhcp: subprocess.Popen[bytes] | None = None
        remove_networks_of_the_dead()
        try:
            ip("netns", "add", self.aws)
            if tap:
                ip("-n", self.aws, "tuntap", "add", "dev", "gw", "mode", "tap")
            else:
                ip("netns", "add", self.instance)
                ip("-n", self.instance, "link", "set", "lo", "up")
                ip("-n", self.aws, "link", "add", "gw", "type", "veth", "peer", "name", "eth0", "netns", self.instance)
                ip("-n", self.instance, "link", "set", "eth0", "address", mac)
            ip("-n", self.aws, "link", "set", "lo", "up")
            ip("-n", self.aws, "address", "add", f"{METADATA}/32", "dev", "lo")
            ip("-n", self.aws, "address", "add", f"{GATEWAY}/24", "dev", "gw")
            ip("-n", self.aws, "link", "set", "gw", "up")
            self._dhcp = subprocess.Popen(
                ["ip", "netns", "exec", self.aws, "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null",
                 "--no-resolv", "--no-hosts", "--interface=gw", "--bind-interfaces", "--leasefile-ro",
                 f"--dhcp-range={address},{address},12h", f"--dhcp-host={mac},{address}", "--user=root",
                 "--pid-file", "--log-facility=/dev/null"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def listen(self, address: str, port: int = 80) -> socket.socket:
        """A listening socket on AWS's side."""
        made: list[socket.socket | OSError] = []
        thread = threading.Thread(target=lambda: made.append(_listening(self.aws, address, port)))
        thread.start()  # a thread of its own: setns is for the thread that calls it
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def close(self) -> None:
        if self._dhcp is not None:
            self._dhcp.kill()
            self._dhcp.wait()
        for name in (self.instance, self.aws):
            if Path("/run/netns", name).exists():
                with suppress(subprocess.CalledProcessError):
                    ip("netns", "delete", name)


def remove_networks_of_the_dead() -> None:
    """What tests that were killed have left, and the processes in it."""
    folder = Path("/run/netns")
    for path in folder.iterdir() if folder.is_dir() else ():
        owner = re.fullmatch(r"sp(\d+)-[0-9a-f]+-[ai]", path.name)
        if owner and not Path("/proc", owner.group(1)).exists():
            argv = ["ip", "netns", "pids", path.name]
            for pid in subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout.split():
                with suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, timeout=30)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


def _listening(namespace: str, address: str, port: int) -> socket.socket | OSError:
    try:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                return OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        finally:
            os.close(descriptor)
        return socket.create_server((address, port), backlog=64)
    except OSError as error:
        return error
