"""What a caged program may write, and what it does not even see. `cage_exec` builds it around the program.

The agent builds the sandbox itself, of what systemd too makes NoNewPrivileges=, ProtectSystem=strict, PrivateTmp=,
PrivateIPC=, InaccessiblePaths= and CapabilityBoundingSet= of, and does not ask systemd for a transient service: that
would be a child of systemd, but the supervisor must hold the trainer's pid (SIGUSR1 only where it is handled, the exit
code, the end at the deadline), and the same cage must stand in a container and in the tests, where systemd is not.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotheal.agent.processes.system_calls import MACHINES, Machine, build
from spotheal.agent.protocol.errors import SetupFailed

PROGRAM = Path(__file__).with_name("sandbox_exec.py")
# Of /run only this is seen: D-Bus, container engines, package daemons and systemd's own sockets are ways out of the
# cage. A mount over each of them would not do: it goes when the service starts again and makes a new socket.
_KEPT = (
    "/run/systemd/resolve", "/run/resolvconf", "/run/nscd",  # names of hosts and users
    # As NVIDIA's container toolkit passes them on; topologyd's file is NCCL's.
    "/run/nvidia-persistenced", "/run/nvidia-fabricmanager", "/run/nvidia-topologyd",
)  # fmt: skip
_HIDDEN = ("/var/lib/cloud", "/var/log/cloud-init.log", "/var/log/cloud-init-output.log")
_RUN = ("/run", "/var/run")


@dataclass(frozen=True)
class Sandbox:
    """`writable` folders keep their place; `scratch` is where the private /tmp and /var/tmp lie, on disk.

    Everything else of the machine is read-only. GPUs and other devices are reached by their own rights. Of /run only
    `kept` is seen. `limits_calls`: the filter of `cage_calls`; `tell(program, call)` of each first refused call.
    """

    writable: tuple[Path, ...]
    scratch: Path
    hidden: tuple[str, ...] = _HIDDEN
    kept: tuple[str, ...] = ()
    limits_calls: bool = True
    tell: Callable[[str, str], None] = lambda program, call: None

    @property
    def machine(self) -> Machine | None:
        """For `cage_calls`; None where calls are not limited."""
        if not self.limits_calls:
            return None
        name = platform.machine()
        if name not in MACHINES:
            raise SetupFailed(
                f"the trainer's cage knows no system calls of a machine {name}",
                next_step='`[cage] mode = "calls"` runs the trainer with all system calls open',
            )
        return MACHINES[name]

    def to_orders(self) -> dict[str, Any]:
        """For `cage_exec`. The folders of the private /tmp are made here, as nobody else's."""
        places = []
        for name in ("tmp", "var-tmp"):
            folder = self.scratch / name
            folder.mkdir(parents=True, exist_ok=True)
            os.chmod(folder, 0o1777)
            places.append(["/" + name.replace("-", "/"), str(folder)])
        machine = self.machine
        return {
            "writable": [str(path) for path in self.writable],
            "temporary": places,
            "memory": ["/dev/shm"],
            "hidden": list(self.hidden),
            "emptied": list(_RUN),
            "kept": [*_KEPT, *self.kept, os.path.realpath("/etc/resolv.conf")],
            "filters": None if machine is None else [build(machine, notify=True), build(machine)],
        }
