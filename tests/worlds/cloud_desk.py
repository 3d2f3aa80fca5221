"""An empty account at a local endpoint, with instances that really run, and fleetctl pointed at it in this process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from typer.testing import CliRunner, Result

from spotheal.fleet.account import prerequisites
from spotheal.fleet.cli import app
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
from spotheal.fleet.rehearsal.scenarios.serve import environment, serving
from spotheal.fleet.rehearsal.services import account

REGION = "us-west-2"


def speaking_to(cloud: Cloud) -> dict[str, str]:
    """The environment of a client, whose profiles are those of the cloud's people."""
    return environment(cloud.endpoint, REGION) | {"AWS_SHARED_CREDENTIALS_FILE": str(cloud.credentials)}


def as_person(monkeypatch: pytest.MonkeyPatch, cloud: Cloud, person: str) -> None:
    """This process speaks as one of the people of the cloud, or as OWNER."""
    for name, value in cloud.endpoint.key_of_person(person).environment.items():
        monkeypatch.setenv(name, value)


def owner(service: str) -> Any:
    """A client of the account's owner, who may do everything; the environment's is an operator and administrator."""
    maker: Any = boto3.session.Session(profile_name="owner", region_name=REGION)
    return maker.client(service, config=Config(s3={"addressing_style": "path"}))


@dataclass
class CloudDesk:
    """A folder with a repository, and the cloud."""

    cloud: Cloud
    folder: Path

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    def good(self, *arguments: str) -> dict[str, Any]:
        result = self.run(*arguments, "--output", "json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert isinstance(document, dict) and document["schema_version"] == 1
        return document


@pytest.fixture(scope="module")
def served() -> Iterator[Cloud]:
    """One for a module: moto takes seconds to begin."""
    with serving(REGION, strict=True) as cloud:
        yield cloud


@pytest.fixture
def cloud_desk(served: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CloudDesk:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in speaking_to(served).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(account, "IAM_SECONDS", 0.4)
    monkeypatch.setattr(account, "BUCKET_SECONDS", 0.0)
    monkeypatch.setattr(prerequisites, "IAM_SECONDS", 0.5)
    folder = tmp_path / "My Project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    for arguments in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "x"]):
        subprocess.run(
            ["git", "-c", "user.email=a@example.org", "-c", "user.name=a", *arguments], cwd=folder, check=True
        )
    monkeypatch.chdir(folder)
    served.endpoint.account.quotas = dict(account.QUOTAS)
    return CloudDesk(served, folder)
