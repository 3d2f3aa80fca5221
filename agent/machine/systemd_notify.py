"""What the service manager is told: ready, a word of status, and that the agent lives. Standard library only.

The protocol is sd_notify(3): one datagram of NAME=value lines to the socket that NOTIFY_SOCKET names. Without a
manager, as in a rehearsal, nothing is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

_NAMES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """`watchdog_seconds`: the manager ends us where it hears no `alive` for so long; None where it does not watch."""

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address  # @: Linux's abstract names
        self.watchdog_seconds = watchdog_seconds if address else None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> Notifier:
        """What the manager has left there, which is taken out: no trainer is to speak in the agent's name."""
        environment = os.environ if environment is None else environment
        address, microseconds, process = (environment.pop(name, "") for name in _NAMES)
        watched = microseconds.isdigit() and int(microseconds) > 0 and process in ("", str(os.getpid()))
        if not address.startswith(("/", "@")):  # vsock is for machines' managers
            return cls()
        return cls(address, int(microseconds) / 1e6 if watched else None)

    @property
    def is_there(self) -> bool:
        return bool(self._address)

    def ready(self, status: str = "") -> bool:
        """The agent is up: with Type=notify the start is over, and the watchdog begins."""
        return self._send(READY=1, STATUS=status)

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(STATUS=text)

    def alive(self) -> bool:
        return self._send(WATCHDOG=1)

    def stopping(self, status: str = "") -> bool:
        return self._send(STOPPING=1, STATUS=status)

    def _send(self, **fields: object) -> bool:
        """Whether the manager was told; it is no fault where it cannot be."""
        if not self._address:
            return False
        lines = [f"{name}={' '.join(str(value).split())}" for name, value in fields.items() if value != ""]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as line:
                line.settimeout(1.0)
                line.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True
