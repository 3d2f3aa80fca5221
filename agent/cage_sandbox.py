"""What a caged program may write, and what it does not even see. `cage_exec` builds it around the program.

The agent builds the sandbox itself, of what systemd too makes NoNewPrivileges=, ProtectSystem=strict, PrivateTmp=,
PrivateIPC=, InaccessiblePaths= and CapabilityBoundingSet= of, and does not ask systemd for a transient service: that
would be a child of systemd, but the supervisor must hold the trainer's pid (SIGUSR1 only where it is handled, the exit
code, the end at the deadline), and the same cage must stand in a container and in the tests, where systemd is not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("cage_exec.py")
# Ways to get something done by a process that is not in the cage: D-Bus services, container engines, package daemons.
_HIDDEN = (
    "/run/dbus", "/run/user", "/run/docker.sock", "/run/containerd", "/run/podman", "/run/crio", "/run/snapd.socket",
    "/run/snapd-snap.socket", "/run/lxd.socket", "/run/udev/control", "/run/systemd/private", "/run/acpid.socket",
    "/run/systemd/io.systemd.Manager", "/run/cloud-init", "/var/lib/cloud", "/var/log/cloud-init.log",
    "/var/log/cloud-init-output.log",
)  # fmt: skip


@dataclass(frozen=True)
class Sandbox:
    """`writable` folders keep their place; `scratch` is where the private /tmp and /var/tmp lie, on disk.

    Everything else of the machine is read-only. GPUs and other devices are reached by their own rights.
    """

    writable: tuple[Path, ...]
    scratch: Path
    hidden: tuple[str, ...] = _HIDDEN

    def to_orders(self) -> dict[str, Any]:
        """For `cage_exec`. The folders of the private /tmp are made here, as nobody else's."""
        places = []
        for name in ("tmp", "var-tmp"):
            folder = self.scratch / name
            folder.mkdir(parents=True, exist_ok=True)
            os.chmod(folder, 0o1777)
            places.append(["/" + name.replace("-", "/"), str(folder)])
        return {
            "writable": [str(path) for path in self.writable],
            "temporary": places,
            "memory": ["/dev/shm"],
            "hidden": list(self.hidden),
        }
