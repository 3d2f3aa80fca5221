"""The whole agent on a machine that is all its own: what a caged trainer finds, and what is left of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_network import needs, own_network

HERE = Path(__file__).resolve().parents[2]
USER = "spotheal-test-l"
SPACE = f"spotheal-life-{os.getpid()}"
pytestmark = needs("ip", "nft", "useradd", "git")


@pytest.fixture(scope="module")
def lived() -> Iterator[dict[str, Any]]:
    """What came of one life in a network namespace with an address of the metadata service."""
    with own_network(SPACE, USER, ("169.254.169.254/32",)) as network:
        done = network.run_script(HERE / "worlds/caged_life.py", beside=("worlds", "harness"))
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        yield {**found, "tables": network.run("nft", "list", "tables").stdout, "said": done.stderr}


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
