"""The whole agent on a machine that is all its own: what a caged trainer finds, and what is left of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parents[2]
USER = "spotheal-test-l"
SPACE = f"spotheal-life-{os.getpid()}"
PYTHON = "/usr/bin/python3"
NEEDED = ("ip", "nft", "useradd", "git")
pytestmark = [
    pytest.mark.root,
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(name) is None for name in NEEDED) or not os.path.exists(PYTHON),
        reason=f"needs root, {', '.join(NEEDED)} and a Python that other users may run",
    ),
]


@pytest.fixture(scope="module")
def lived() -> Iterator[dict[str, Any]]:
    """What came of one life in a network namespace with an address of the metadata service."""
    folder = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/var/lib"))
    folder.chmod(0o755)
    inside = ["ip", "netns", "exec", SPACE]
    try:
        subprocess.run(["ip", "netns", "add", SPACE], check=True)
        for command in ("link set lo up", "addr add 169.254.169.254/32 dev lo"):
            subprocess.run([*inside, "ip", *command.split()], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{HERE}/worlds:{HERE}/harness:{HERE.parent / '.ci/import_path'}"}
        done = subprocess.run(
            [*inside, sys.executable, str(HERE / "worlds/caged_life.py"), str(folder)],
            capture_output=True, text=True, timeout=120, check=False, env=environment, cwd="/",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        tables = subprocess.run([*inside, "nft", "list", "tables"], capture_output=True, text=True, check=True)
        yield {**found, "tables": tables.stdout, "said": done.stderr}
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], check=False)
        subprocess.run(["userdel", USER], capture_output=True, check=False)
        shutil.rmtree(folder)


def test_a_job_is_trained_to_its_end_in_the_cage(lived: dict[str, Any]) -> None:
    assert (lived["code"], lived["status"]["phase"]) == (0, "done"), lived
    found = lived["found"]
    assert (found["uid"], found["no_new_privs"]) == (lived["uid"], True)
    assert found["aws"] == ["AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_REGION"]
    assert found["endpoint"] == "http://127.0.0.1"


def test_it_writes_where_it_should_and_nowhere_else(lived: dict[str, Any]) -> None:
    written = lived["found"]["writes"]
    assert written[:3] == ["/tmp", "/var/tmp", "/dev/shm"]
    assert [Path(path).name for path in written[3:]] == ["home", "", "checkpoints", "results"]
    assert not any(Path(path, "of-a-caged-trainer").exists() for path in ("/tmp", "/var/tmp", "/dev/shm", "/etc"))


def test_it_gets_no_credentials_and_hears_of_notices(lived: dict[str, Any]) -> None:
    found = lived["found"]
    assert (found["credentials"], found["user_data"]) == (403, 403)
    assert found["notice"] == 503  # the service that this agent itself asks does not answer: no "nothing"


def test_its_secret_is_in_its_environment_and_in_nothing_that_the_agent_wrote(lived: dict[str, Any]) -> None:
    assert lived["found"]["secret"] == "canary-of-a-caged-life"
    assert lived["leaks"] == []
    assert "canary-of-a-caged-life" not in lived["said"]


def test_nothing_that_setup_left_running_sees_the_trainer_and_its_secrets(lived: dict[str, Any]) -> None:
    assert lived["found"]["left_by_setup"] == []


def test_no_process_and_no_rule_is_left(lived: dict[str, Any]) -> None:
    assert lived["left"] == []
    assert lived["tables"] == ""
