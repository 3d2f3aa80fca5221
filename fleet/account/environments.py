"""The `setup` commands that make a checkout's environment, by its lock and requirements files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Commands = tuple[tuple[str, ...], ...]
_PIP = ("python", "-m", "pip", "install")
_UV: Commands = ((*_PIP, "uv"),)  # from its wheel: few machine images have it
_CONDA = ("environment.yml", "environment.yaml")
_PROJECT_BYTES_MAX = 1 << 20  # a pyproject.toml


@dataclass(frozen=True)
class Environment:
    """`setup` for job.toml (empty if there is nothing to install), why, and what is not supported."""

    setup: Commands = ()
    reason: str = ""
    note: str = ""


NOTHING = Environment()


def propose(folder: Path) -> Environment:
    """The first file that exists: a lock says most, a project file least."""
    if (folder / "uv.lock").is_file():
        # --active: into the environment that the agent keeps on the volume. --inexact: uv itself stays in it.
        sync = ("uv", "sync", "--frozen", "--inexact", "--active")
        return Environment((*_UV, sync), "uv.lock is in the checkout; installed once, kept on the volume")
    if (folder / "requirements.txt").is_file():
        pip = ((*_PIP, "-r", "requirements.txt"),)
        return Environment(pip, "requirements.txt is in the checkout; installed once, kept on the volume")
    project = _project(folder / "pyproject.toml")
    if "build-system" in project or (folder / "setup.py").is_file():
        return Environment(((*_PIP, "-e", "."),), "the checkout is a package; installed once, kept on the volume")
    if project.get("project", {}).get("dependencies"):
        # pip cannot install what a project depends on without building the project.
        packages = ("uv", "pip", "install", "--python", "python", "-r", "pyproject.toml")
        return Environment((*_UV, packages), "pyproject.toml names packages; installed once, kept on the volume")
    conda = next((name for name in _CONDA if (folder / name).is_file()), "")
    if conda:
        return Environment(note=(
            f"{conda} is not read: list its packages in requirements.txt, or name an image that has the conda"
            ' environment, with `python = "/opt/conda/envs/NAME/bin/python"` in [job]'
        ))  # fmt: skip
    return NOTHING


def _project(path: Path) -> dict[str, Any]:
    """pyproject.toml, or {} if it cannot be read: the owner's own tools report its faults."""
    try:
        if not path.is_file():  # a device or a pipe has no end
            return {}
        with path.open("rb") as file:
            text = file.read(_PROJECT_BYTES_MAX + 1)
        return dict(tomllib.loads(text.decode())) if len(text) <= _PROJECT_BYTES_MAX else {}
    except (OSError, ValueError, RecursionError):  # a thousand brackets: it is a repository's file
        return {}
