"""What foreign code leaves on disk or says about itself never makes the agent, which is root, write somewhere else."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from spotheal.agent.account import Account
from spotheal.agent.clock import SystemClock, never
from spotheal.agent.config import InstanceConfig, parse_job
from spotheal.agent.folders import Folders
from spotheal.agent.foreign_command import Surroundings
from spotheal.agent.interpreter import probe
from spotheal.agent.names import StoreUrl
from spotheal.agent.setup_commands import prepare

LOG = structlog.get_logger()
ME = Account("me", os.getuid(), os.getgid(), (), "/")


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    found = Folders.at(tmp_path / "root", "/volume")
    found.make(None)
    found.clone.mkdir()
    return found


def with_setup(*setup: list[str]) -> InstanceConfig:
    document = {"job": {"name": "j", "repository": "/r", "command": ["python", "t.py"], "setup": list(setup)}}
    return InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("bucket", "j/run"), "0" * 40)


@pytest.mark.processes
def test_a_python_that_lies_about_its_packages_has_nothing_written_there(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`usercustomize` in the trainer's home answers the probe. A .pth among the agent's own packages runs as root."""
    monkeypatch.setenv("HOME", str(folders.home))
    where = Surroundings(None, SystemClock(), never())
    python = probe(Path(sys.executable), folders, where)
    assert python is not None
    agents = tmp_path / "agents-packages"
    agents.mkdir()
    lie = json.dumps({"version": "3", "torch": "2", "venv": True, "site": [str(agents)]})
    home = folders.home / ".local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    home.mkdir(parents=True)
    (home / "usercustomize.py").write_text(f"import os\nprint({lie!r}, flush=True)\nos._exit(0)\n")
    prepare(with_setup(["true"]), folders, replace(python, is_venv=True), where, LOG)
    assert list(agents.iterdir()) == []
