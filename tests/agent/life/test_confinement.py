"""What one life of the agent does before anything foreign runs."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.life.confinement import Confinement
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Interrupted, NotFound, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl

pytestmark = pytest.mark.processes


class NoBundle:
    def download(self, key: str, path: Path) -> None:
        raise NotFound(key)


def confinement(root: Path) -> Confinement:
    job = {"name": "j", "repository": ".", "command": ["python", "train.py"]}
    document = {"job": job, "cage": {"mode": "off", "user": "no-such-user"}}
    config = InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("bucket", "j/run"), "1" * 40)
    folders, log, clock = Folders.at(root, "/volume"), structlog.get_logger(), SystemClock()
    folders.make(None)
    metadata: Any = SimpleNamespace(endpoint="")
    here: Any = SimpleNamespace()
    return Confinement(config, Paths(root), folders, here, metadata, clock, threading.Event(), log, lambda _: None)


def test_a_fetch_that_begins_after_its_end_was_asked_for_does_not_ask_the_store(tmp_path: Path) -> None:
    """The volume may be healed before the secrets are there, for which the fetch waits."""
    cage = confinement(tmp_path)
    cage.enter()
    cage.end_fetch()
    with pytest.raises(Interrupted):
        cage.fetch_code(NoBundle(), "")


def test_a_fetch_of_another_try_is_not_ended_by_the_one_before(tmp_path: Path) -> None:
    cage = confinement(tmp_path)
    cage.enter()
    cage.end_fetch()
    cage.enter()
    with pytest.raises(SetupFailed, match="no git bundle"):
        cage.fetch_code(NoBundle(), "")
