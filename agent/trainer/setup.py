"""`setup`: the user's own commands, run once per revision and interpreter in an environment kept on the volume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders, give, publish
from spotheal.agent.processes import programs
from spotheal.agent.processes.foreign_command import Finished, Surroundings, run_command
from spotheal.agent.protocol.errors import Retryable, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.retrying import back_off, until_it_works
from spotheal.agent.trainer.environment import expand, trainer_environment
from spotheal.agent.trainer.interpreter import Interpreter, probe

COMMAND_SECONDS_MAX = 3600.0
NETWORK_SECONDS_MAX = 1800.0
SYNC_SECONDS_MAX = 300.0
ENVIRONMENTS_KEPT = 3  # a fleet of two images uses two in turn
_TAIL_LINES = 20
_COMPLETE = "spotheal-complete.json"
# As the trainer's user, never as ourselves: where an environment keeps its packages is what foreign code says.
_WRITE = (
    "import os, sys, sysconfig\n"
    "path = os.path.join(sysconfig.get_path(sys.argv[1]), sys.argv[2])\n"
    "with open(path, 'w') as file:\n"
    "    file.write(sys.argv[3])\n"
    "os.chmod(path, 0o755)\n"
)
_NETWORK = re.compile(
    r"temporary failure in name resolution|name or service not known|could not resolve host|failed to resolve|"
    r"newconnectionerror|connecttimeout|readtimeout|read timed out|connection (?:timed out|refused|reset|aborted)|"
    r"connection was reset|network is unreachable|no route to host|failed to establish a new connection|"
    r"max retries exceeded|remotedisconnected|incompleteread|early eof|rpc failed|protocolerror|"
    r"(?:http|error|status)[^\n]{0,20}\b(?:429|500|502|503|504)\b|temporarily unavailable",
    re.IGNORECASE,
)


def prepare(
    config: InstanceConfig,
    folders: Folders,
    interpreter: Interpreter,
    surroundings: Surroundings,
    log: Any,
    *,
    copy: str = "",
    around: contextlib.AbstractContextManager[None] | None = None,
    network_seconds_max: float = NETWORK_SECONDS_MAX,
) -> Interpreter:
    """The interpreter the trainer runs with: `interpreter` itself where there is no `setup`, else the environment's.

    `copy`: which working copy the commands run in; in a new one they run again, for it lacks what they wrote there.
    `around`: entered if the commands run, left once all have succeeded.
    Raises SetupFailed with the last lines of a command that failed, Retryable where the network was down too long,
    Interrupted at the stop; a successor then makes the environment anew, as only a complete one is marked.
    """
    setup = config.job.job.setup
    if not setup:
        return interpreter
    folders.make(surroundings.account)
    place = _place(config, folders, interpreter, copy)
    if (earlier := made_before(config, folders, interpreter, surroundings, copy=copy)) is not None:
        log.info("the environment of `setup` is there already", path=str(place))
        os.utime(place)
        return earlier
    log.info("making the environment of `setup`", path=str(place), base=str(interpreter.path))
    made = _make(place, interpreter, folders, surroundings)
    environment = trainer_environment(
        config, folders, made.path, os.environ, surroundings.account, 1, surroundings.environment
    )
    with around or contextlib.nullcontext():
        for command in setup:
            _run(command, made.path, config, folders, environment, surroundings, log, network_seconds_max)
    marker = json.dumps({"setup": setup, "revision": config.revision, "base": made.version})
    try:
        _sync(place)
        publish(place / _COMPLETE, marker, durable=True)
    except (OSError, Retryable) as fault:
        log.warning("the environment of `setup` is not kept for the next machine", error=str(fault))
    _drop_old(folders.environments, place)
    return made


def made_before(
    config: InstanceConfig, folders: Folders, interpreter: Interpreter, surroundings: Surroundings, *, copy: str = ""
) -> Interpreter | None:
    """The interpreter that `prepare` would find: `interpreter` if there is no `setup`; None if it must run."""
    if not config.job.job.setup:
        return interpreter
    place = _place(config, folders, interpreter, copy)
    return probe(place / "bin/python", folders, surroundings) if os.path.isfile(place / _COMPLETE) else None


def _place(config: InstanceConfig, folders: Folders, interpreter: Interpreter, copy: str) -> Path:
    return folders.environments / f"env-{key_of(config, interpreter, copy)}"


def _sync(place: Path) -> None:
    """All that the commands wrote, before it is called complete: of a machine that is killed within half a minute the
    packages may be empty files, and every successor would believe them."""
    answer = programs.run(["sync", "-f", str(place)], seconds_max=SYNC_SECONDS_MAX)
    if answer.code != 0:
        raise Retryable(f"`sync -f {place}` failed: {answer.said}")


def key_of(config: InstanceConfig, interpreter: Interpreter, copy: str = "") -> str:
    """Equal where the environment would come out equal: commands, revision, folder, working copy, the image's Python
    and torch."""
    parts = [config.job.job.setup, config.revision, config.job.job.directory, copy]
    image = [str(interpreter.path), interpreter.version, interpreter.torch]
    return hashlib.sha256(json.dumps([parts, image]).encode()).hexdigest()[:16]


def _make(place: Path, interpreter: Interpreter, folders: Folders, surroundings: Surroundings) -> Interpreter:
    """A virtual environment that sees all packages of `interpreter`, at `place`, with pip.

    Built in place (an environment cannot be moved), so that only the marker says it is complete.
    """
    untrusted_folders.remove(place)
    place.mkdir()
    give(place, surroundings.account)
    venv = [str(interpreter.path), "-I", "-m", "venv", "--system-site-packages", "--without-pip", str(place)]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folders.home)}

    def run(argv: Sequence[str]) -> Finished:
        return run_command(
            argv, surroundings, directory=Path("/"), environment=environment, seconds_max=COMMAND_SECONDS_MAX
        )

    ended = run(venv)
    environment_python = probe(place / "bin/python", folders, surroundings) if ended.ok else None
    if environment_python is None:
        raise SetupFailed(
            f"no virtual environment could be made with {interpreter.path}:\n{ended.tail(_TAIL_LINES)}",
            next_step="name another `python` in job.toml, or an AMI whose Python has the module venv",
        )
    python, files = str(place / "bin/python"), {}
    if interpreter.is_venv:
        # The environment's "system" packages are those of the Python below, not of the environment it was made with;
        # on the deep learning AMIs torch lies in the latter.
        lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in interpreter.site)
        files["purelib", "spotheal_base.pth"] = lines
    has_pip = run([python, "-I", "-m", "pip", "--version"]).ok
    if has_pip:
        # The image's own pip, working on the environment; its script would work on the image.
        script = f'#!/bin/sh\nexec {shlex.quote(python)} -m pip "$@"\n'
        files |= {("scripts", name): script for name in ("pip", "pip3")}
    for (folder, name), text in files.items():
        if not (ended := run([python, "-I", "-c", _WRITE, folder, name, text])).ok:
            raise SetupFailed(f"{name} of the environment {place} cannot be written:\n{ended.tail(_TAIL_LINES)}")
    if not has_pip:
        run([python, "-I", "-m", "ensurepip"])  # without pip a `setup` that needs none still works
    return probe(place / "bin/python", folders, surroundings) or environment_python


def _run(
    command: Sequence[str],
    python: Path,
    config: InstanceConfig,
    folders: Folders,
    environment: dict[str, str],
    surroundings: Surroundings,
    log: Any,
    network_seconds_max: float,
) -> None:
    directory = folders.clone / config.job.job.directory
    argv = expand(command, environment, python)
    text = json.dumps(list(command), ensure_ascii=False)  # as job.toml has it, on one line

    def once() -> None:
        log.info("setup", command=text)
        try:
            ended = run_command(
                argv,
                surroundings,
                directory=directory,
                environment=environment,
                seconds_max=COMMAND_SECONDS_MAX,
                on_line=lambda line: log.info("setup: " + line),
            )
        except OSError as error:
            raise SetupFailed(
                f"the setup command {text} could not be started: {error.strerror}",
                next_step="correct `setup` in job.toml",
            ) from error
        if ended.ok:
            return
        if _NETWORK.search(ended.tail(100)):
            raise Retryable(
                f"the network was down for the setup command {text}:\n{ended.tail(_TAIL_LINES)}",
                next_step="check the subnet's route to the internet",
            )
        manner = f"exited with {ended.exit_code}"
        if ended.timed_out:
            manner = f"had not ended after {COMMAND_SECONDS_MAX:.0f} s"
        raise SetupFailed(
            f"the setup command {text} {manner}; its last lines:\n{ended.tail(_TAIL_LINES)}",
            next_step="correct `setup` in job.toml; `fleetctl rehearse` runs it here",
        )

    until_it_works(
        once, surroundings.clock, pause=back_off, seconds_max=network_seconds_max, stop=surroundings.stop,
        log=log, line="the network failed a setup command; trying again",
    )  # fmt: skip


def _drop_old(folder: Path, current: Path) -> None:
    """Keep the environments used last; the others only fill the volume."""
    places = sorted(
        (path for path in folder.glob("env-*") if path != current and not path.is_symlink()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in places[ENVIRONMENTS_KEPT - 1 :]:
        with contextlib.suppress(OSError, Retryable):
            untrusted_folders.remove(path)
