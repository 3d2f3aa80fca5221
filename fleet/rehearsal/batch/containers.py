"""Containers of the rehearsal: the image's own entry point as processes of a machine, in a folder of its own."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

from spotheal.fleet.rehearsal.batch.things import Job
from spotheal.fleet.rehearsal.ec2.world import Instance
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.programs import GPUS
from spotheal.fleet.rehearsal.programs.init import descendants

AGENT = "spotheal-agent"  # the program of the image; here it is that of this Python


class ProcessContainer:
    """`environment` is what a host gives besides: endpoints; `mounts` holds the folders that are file systems.

    The disk is new for every attempt."""

    def __init__(self, folder: Path, job: Job, host: Instance, environment: dict[str, str], mounts: Path) -> None:
        command = [str(word) for word in job.container().get("command") or [AGENT, "batch"]]
        argv = [sys.executable, "-I", "-m", "spotheal.agent", *command[1:]] if command[:1] == [AGENT] else command
        script = f"#!/bin/sh\nexec {shlex.join(argv)}\n".encode()
        gpus = {GPUS: str(int(job.resource("GPU")))} if job.resource("GPU") else {}
        variables = {**environment, **gpus, **job.environment(), **_mounted(job, mounts)}
        variables["SPOTHEAL_ROOT"] = str(folder / "root")  # the image's own, in a container
        self.machine = Machine(folder, Launch(host.id, host.zone, host.type, script, variables))
        self._console = folder / "console.log"
        self._read = 0
        self._code: int | None = None
        self._killed = False
        self.machine.boot()

    def poll(self) -> int | None:
        if self._code is None and not self._killed:
            self._code = self.machine.user_data_exit()
            if self._code is not None:
                self.machine.end()
        return self._code

    def lines(self) -> list[str]:
        """Whole lines; the last one at the end, whole or not."""
        try:
            with self._console.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        end = len(text) if self._code is not None or self._killed else text.rfind(b"\n") + 1
        self._read += end
        return text[:end].decode("utf-8", "replace").splitlines()

    def stop(self) -> None:
        """As `docker stop`: SIGTERM to the first process alone."""
        for pid in self._first():
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        self._killed = True
        self.machine.end()

    def _first(self) -> list[int]:
        try:
            init = int((self.machine.folder / "init.pid").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return []
        return sorted(descendants(init))[:1]


def _mounted(job: Job, mounts: Path) -> dict[str, str]:
    """File systems lie where the machine keeps them, not where the definition mounts them: the one variable that names
    such a place is changed."""
    container = job.container()
    systems = {volume["name"]: (volume.get("efsVolumeConfiguration") or {}).get("fileSystemId")
               for volume in container.get("volumes") or []}  # fmt: skip
    places = {
        mount["containerPath"]: systems.get(mount["sourceVolume"]) for mount in container.get("mountPoints") or []
    }
    variables = {}
    for name, value in job.environment().items():
        if places.get(value):
            variables[name] = str(mounts / str(places[value]))
            (mounts / str(places[value])).mkdir(parents=True, exist_ok=True)
    return variables
