"""What a foreign program is given: the environment of the contract, the interpreter, and no credentials of ours."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from spotheal.agent.files.folders import Folders
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.environment import base_environment
from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig

_WANDB = ("WANDB_RUN_ID", "WANDB_RESUME")
_VARIABLE = re.compile(r"\$\{(SPOTHEAL_[A-Z0-9_]*)\}")


def trainer_environment(
    config: InstanceConfig,
    folders: Folders,
    interpreter: Path,
    own: Mapping[str, str],
    account: Account | None,
    attempt: int,
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of a trainer (and of `setup`): the contract's variables over `given` (the trainer's
    secrets, the cage's metadata service) over [environment] over `own`."""
    variables = base_environment(own, account, folders.home)
    variables.setdefault("AWS_REGION", config.region)
    variables.setdefault("PYTHONUNBUFFERED", "1")  # through a pipe, Python would keep back the last lines before a kill
    variables.setdefault("PYTHONFAULTHANDLER", "1")  # a Python that hangs says where, at the SIGABRT that ends it
    variables |= {**config.job.environment, **(given or {})}
    _name_the_tracked_run(variables, config.run)
    variables |= {
        contract.JOB: config.job.job.name,
        contract.RUN: config.run,
        contract.DATASETS_DIR: str(folders.datasets),
        contract.CHECKPOINT_DIR: str(folders.checkpoints),
        contract.RESULTS_DIR: str(folders.results),
        contract.LOG_DIR: str(folders.logs),
        contract.ATTEMPT: str(attempt),
        contract.NOTICE_FILE: str(folders.notice_file),
        contract.REBALANCE_FILE: str(folders.rebalance_file),
        contract.PROGRESS_FILE: str(folders.progress_file),
        contract.METRICS_FILE: str(folders.metrics_file),
    }
    index = own.get(contract.INDEX) or own.get(contract.BATCH_INDEX)
    if config.index is not None:
        index = str(config.index)
        variables[contract.PARAMS_FILE] = str(folders.params_file)
    if index is not None:
        variables |= {contract.INDEX: index, contract.BATCH_INDEX: index}
    shims = make_shims(folders.run_dir / "bin", interpreter)
    variables["PATH"] = ":".join([str(interpreter.parent), *shims, variables["PATH"]])
    if os.path.exists(interpreter.parent.parent / "pyvenv.cfg"):
        variables["VIRTUAL_ENV"] = str(interpreter.parent.parent)
    path = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
    variables["PYTHONPATH"] = ":".join([*path, str(folders.trainer_lib)])
    return variables


def _name_the_tracked_run(environment: dict[str, str], run: str) -> None:
    """Weights & Biases makes each attempt a run of its own, unless it is told the id. The user's values win.

    An id may have no `/\\#?%:` and at most 64 characters (docs.wandb.ai, "Resume a run"); ours, of a run or of an entry
    of a sweep, have at most 40 letters and digits. W&B refuses an empty value, so an empty one asks for none of both.
    """
    tracker = {name: environment[name] for name in _WANDB if name in environment}
    if "" in tracker.values():
        for name in tracker:
            del environment[name]
    elif "WANDB_RESUME" not in tracker:
        environment |= {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow", **tracker}


def make_shims(folder: Path, interpreter: Path) -> list[str]:
    """A folder for PATH in which `python` is the interpreter; none where its own folder has one already.

    A script and no link: an interpreter of a virtual environment finds that by the path it is called by.
    """
    if os.path.exists(interpreter.parent / "python"):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    shim = folder / "python"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(str(interpreter))} "$@"\n')
    shim.chmod(0o755)
    return [str(folder)]


def expand(argv: Sequence[str], environment: Mapping[str, str], interpreter: Path) -> list[str]:
    """`argv` with `${SPOTHEAL_…}` filled in and the program `python` resolved; nothing else is expanded.

    Raises SetupFailed where a variable is none of the contract's.
    """

    def value(match: re.Match[str]) -> str:
        if match.group(1) not in environment:
            names = ", ".join(sorted(name for name in environment if name.startswith("SPOTHEAL_")))
            raise SetupFailed(
                f"the command names ${{{match.group(1)}}}, which is not set", next_step=f"use one of {names}"
            )
        return environment[match.group(1)]

    words = [_VARIABLE.sub(value, word) for word in argv]
    if words and words[0] in ("python", "python3") and interpreter.is_absolute():
        words[0] = str(interpreter)
    return words
