"""Which Python `python` means: the configured one, else the machine image's environment with torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import Folders
from spotheal.agent.processes.environment import base_environment
from spotheal.agent.processes.foreign_command import Surroundings, run_command
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig

_PROBE_SECONDS_MAX = 120.0  # the first import on a volume that loads lazily takes long
_PROBE = (
    "import importlib.util as u, json, sys, sysconfig\n"
    "try:\n"
    "    from importlib.metadata import version; torch = version('torch')\n"
    "except Exception:\n"
    "    torch = 'unknown' if u.find_spec('torch') else ''\n"
    "paths = sysconfig.get_paths()\n"
    "print(json.dumps({'version': sys.version, 'torch': torch, 'venv': sys.prefix != sys.base_prefix,"
    " 'site': sorted({paths['purelib'], paths['platlib']})}))\n"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python: `torch` is the version it has, "" where it has none; `site` its folders of packages."""

    path: Path
    version: str
    torch: str
    is_venv: bool
    site: tuple[str, ...]


def find_interpreter(config: InstanceConfig, folders: Folders, surroundings: Surroundings, log: Any) -> Interpreter:
    """Raises SetupFailed where the configured Python cannot run, or there is none at all.

    Without `python` in job.toml: the first of `candidates` that can import torch, else the first that runs.
    """
    named = config.job.job.python
    if named:
        path = named if os.path.isabs(named) else shutil.which(named)
        interpreter = probe(Path(path), folders, surroundings) if path else None
        if interpreter is None:
            raise SetupFailed(
                f"the Python {named!r} cannot be run on this machine",
                next_step="correct `python` in job.toml, or leave it out for the AMI's environment with torch",
            )
        return interpreter
    usable = []
    for candidate in candidates():
        interpreter = probe(candidate, folders, surroundings)
        if interpreter is not None and interpreter.torch:
            log.info("using the Python with torch", path=str(interpreter.path), torch=interpreter.torch)
            return interpreter
        usable += [interpreter] if interpreter is not None else []
    if not usable:
        raise SetupFailed("this machine has no Python", next_step="use an AMI with Python, such as a deep learning AMI")
    log.info("no Python on this machine has torch; using the first that runs", path=str(usable[0].path))
    return usable[0]


def candidates(root: Path = Path("/")) -> Iterator[Path]:
    """Where machine images have their environment with torch, the likeliest first; each path once."""
    conda = os.environ.get("CONDA_PREFIX")
    paths = [Path(conda, "bin/python")] if conda else []
    paths += [root / "opt/pytorch/bin/python"]  # deep learning AMIs since 2024
    for base in ("opt/conda", "opt/miniconda3", "opt/miniforge3", "home/ubuntu/anaconda3", "home/ec2-user/anaconda3"):
        environments = sorted((root / base / "envs").glob("*/bin/python"), key=lambda path: "torch" not in str(path))
        paths += [root / base / "bin/python", *environments]
    paths += [Path(path) for name in ("python3", "python") if (path := shutil.which(name))]
    yield from dict.fromkeys(path for path in paths if path.exists())


def probe(path: Path, folders: Folders, surroundings: Surroundings) -> Interpreter | None:
    """What `path` is, asked as the trainer's user and without importing torch; None where it cannot run."""
    environment = base_environment(os.environ, surroundings.account, folders.home)
    environment.pop("PYTHONPATH", None)
    try:
        ended = run_command(
            [str(path), "-c", _PROBE],
            surroundings,
            directory=Path("/"),  # -c puts the working directory on the path
            environment=environment,
            seconds_max=_PROBE_SECONDS_MAX,
        )
    except OSError:
        return None
    if not ended.ok or not ended.lines:
        return None
    try:
        answer = bounded_json.parse_object(ended.lines[-1])
        return Interpreter(path, answer["version"], answer["torch"], answer["venv"], tuple(answer["site"]))
    except (ValueError, KeyError, TypeError):
        return None
