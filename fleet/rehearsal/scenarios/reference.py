"""The same command once, never interrupted, in the same contract's environment: what exactness is measured against.

    python -m spotheal.fleet.rehearsal.scenarios.reference CONFIG   below SPOTHEAL_ROOT; exit 0 if the trainer was done

CONFIG is the instance's configuration. It runs as a machine of its own (no API, no metadata), at the lowest priority,
beside the rehearsal.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.processes.foreign_command import Surroundings
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.repository.checkout import checkout
from spotheal.agent.repository.working_copy import Fetched, files_of, make_working_copy
from spotheal.agent.trainer.interpreter import find_interpreter
from spotheal.agent.trainer.setup import prepare
from spotheal.agent.trainer.supervisor import Hooks, Supervisor
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine

NAME = "reference"
_NOWHERE = "http://127.0.0.1:9"  # nothing listens on the discard port: refused at once


class Reference:
    """The uninterrupted run as a process beside the rehearsal."""

    def __init__(self, folder: Path, config: InstanceConfig, repository: Path | str, passed_on: dict[str, str]) -> None:
        (folder / NAME).mkdir(parents=True)
        document = folder / NAME / "config.json"
        document.write_text(config.to_json(), encoding="utf-8")
        argv = [sys.executable, "-m", "spotheal.fleet.rehearsal.scenarios.reference", str(document), str(repository)]
        script = f"#!/bin/sh\nexec nice -n 19 {shlex.join(argv)}\n"
        environment = {**passed_on, "AWS_EC2_METADATA_SERVICE_ENDPOINT": _NOWHERE}
        self._machine = Machine(folder / NAME, Launch(NAME, "", "", script.encode(), environment))
        self._mount = config.job.volume.mount
        self._machine.boot()

    @property
    def volume(self) -> Path:
        """The folder that stands for the volume."""
        return Paths(self._machine.root).mount_point(self._mount)

    @property
    def console(self) -> Path:
        return self._machine.folder / "console.log"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        code = self._machine.user_data_exit()
        return code if code is not None or self._machine.running else -1

    def last_words(self) -> str:
        lines = self.console.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def close(self) -> None:
        self._machine.end()


def main(arguments: list[str]) -> int:
    """Check out, prepare and train with the agent's own modules; what differs is only that nobody disturbs it."""
    config = InstanceConfig.from_json(Path(arguments[0]).read_text(encoding="utf-8"), source=arguments[0])
    folders = Folders.at(Paths.from_environment().root, config.job.volume.mount)
    try:
        _place_library(folders.trainer_lib)
        return _train(config, folders, arguments[1])
    except SpothealError as error:
        print(error, file=sys.stderr)
        return 1


def _train(config: InstanceConfig, folders: Folders, repository: str) -> int:
    clock, log = SystemClock(), _Lines()
    local_config = replace(config, job=replace(config.job, job=replace(config.job.job, repository=repository)))
    surroundings = Surroundings(None, clock, never())
    code = checkout(local_config, folders.fetched, clock=clock, log=log)
    folders.make(None)
    found = find_interpreter(local_config, folders, surroundings, log)
    copy = make_working_copy(
        local_config, folders, surroundings, found.path, log, fetched=Fetched(code, files_of(code))
    )
    interpreter = prepare(local_config, folders, found, surroundings, log, copy=copy)
    ended = Supervisor(
        local_config,
        folders,
        clock,
        log,
        interpreter=interpreter.path,
        hooks=Hooks(on_line=lambda line: print(line, flush=True)),
    ).run()
    print(f"the uninterrupted run ended: {ended.kind}, {ended.reason}", flush=True)
    return 0 if ended.kind == "done" else 1


class _Lines:
    """A log of plain lines, for what the agent's modules say."""

    def info(self, text: str, **fields: Any) -> None:
        print(text, *(f"{name}={value}" for name, value in fields.items()), flush=True)

    warning = error = info


def _place_library(folder: Path) -> None:
    """As the bootstrap does: our packages alone, for the trainer's interpreter."""
    (folder / "spotheal").mkdir(parents=True, exist_ok=True)
    for package in ("agent", "training"):
        source = Path(str(resources.files(f"spotheal.{package}")))
        subprocess.run(["cp", "-a", str(source), str(folder / "spotheal" / package)], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
