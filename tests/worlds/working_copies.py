"""Working copies as an instance makes them: two commits, and what a fetch leaves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import structlog

from spotheal.agent.files.folders import Folders
from spotheal.agent.processes.foreign_command import Surroundings
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.repository.working_copy import (
    Fetched,
    files_of,
)

LOG = structlog.get_logger()
PYTHON = Path(sys.executable)
WHERE = Surroundings(None, SystemClock(), never())
BOTH = {"lib/net.py": "class Net: ...", "run.sh": ""}
FIRST = {**BOTH, "train.py": "print(1)", "log.csv": "step,loss\n", "old/gone.py": ""}
SECOND = {**BOTH, "train.py": "print(2)", "log.csv": "step,loss,time\n", "new.py": ""}


def configured(revision: str = "1" * 40, run: str = "run", **job: Any) -> InstanceConfig:
    document = {"job": {"name": "j", "repository": "https://h/r", "command": ["python", "train.py"], **job}}
    return InstanceConfig(parse_job(document), run, "us-west-2", StoreUrl("bucket", "j/run"), revision)


def fetched(folders: Folders, files: dict[str, str]) -> Fetched:
    """As `repo.checkout` leaves it."""
    shutil.rmtree(folders.fetched, ignore_errors=True)
    written(folders.fetched, {**files, ".git/HEAD": str(sorted(files.items()))})
    return Fetched(folders.fetched, files_of(folders.fetched))


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def texts(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}
