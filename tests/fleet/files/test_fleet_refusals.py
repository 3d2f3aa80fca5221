"""A verb that is given nonsense, or has nowhere to print to: one clear line, never a traceback, never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_desk import Desk, desk, moto_clients, wheels

from spotheal.agent.money import billing
from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet.files import webhook

__all__ = ["desk", "moto_clients", "wheels"]  # fixtures
FLEETCTL = [sys.executable, "-m", "spotheal.fleet.cli"]


@pytest.mark.parametrize("name", ["spot_fleet_config.json", "job.toml", "policy.json"])
def test_a_named_pipe_is_no_file_and_is_not_waited_for(desk: Desk, name: str) -> None:
    (desk.folder / "policy.json").write_text('{"Statement": []}')
    with (desk.folder / "job.toml").open("a") as job:
        job.write('[cage]\ntrainer_policy = "policy.json"\n')
    (desk.folder / name).unlink()
    os.mkfifo(desk.folder / name)
    result = desk.run("validate")
    assert result.exit_code == ExitCode.USAGE
    assert f"{name} is a named pipe, no file" in result.stderr


def test_a_folder_is_no_file(desk: Desk) -> None:
    (desk.folder / "job.toml").unlink()
    (desk.folder / "job.toml").mkdir()
    result = desk.run("validate")
    assert result.exit_code == ExitCode.USAGE and "job.toml is a folder, no file" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("arguments", [["status", "--help"], ["iam", "show", "--region", "us-west-2"]])
def test_a_standard_output_without_room_is_said_in_a_line(arguments: list[str], tmp_path: Path) -> None:
    alone = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*FLEETCTL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
                               env=alone)  # fmt: skip
    assert ended.returncode == ExitCode.UNEXPECTED
    assert "standard output could not be written: No space left on device" in ended.stderr
    assert "unexpected" not in ended.stderr and "Traceback" not in ended.stderr and "ignored" not in ended.stderr


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/latest", "http://[fd00:ec2::254]/", "http://[fe80::1%25eth0]/x", "http://127.0.0.1:8080/x",
     "https://localhost/x", "http://LOCALHOST./x", "http://[::1]/", "http://[::ffff:169.254.169.254]/", "http://0/",
     "http://2852039166/", "http://0xa9.254.43518/", "http://0.0.0.0/", "http://instance-data/latest", "http:///x"],
)  # fmt: skip
def test_a_webhook_must_not_be_the_instance_or_its_metadata_service(url: str) -> None:
    assert webhook.fault(url)


@pytest.mark.parametrize(
    "url",
    ["", "https://hooks.slack.com/services/T0/B0/x", "http://10.1.2.3/hook", "https://[2001:db8::1]/x",
     "http://chat.internal:8065/hooks/x", "https://127.example.org/"],
)  # fmt: skip
def test_any_other_address_is_taken(url: str) -> None:
    assert webhook.fault(url) == ""


def test_validate_names_the_webhook(desk: Desk) -> None:
    with (desk.folder / "job.toml").open("a") as job:
        job.write('[notify]\nwebhook = "http://169.254.169.254/latest/meta-data"\n')
    result = desk.run("validate")
    assert result.exit_code == ExitCode.USAGE
    assert "[notify] webhook" in result.stderr and "169.254.169.254" in result.stderr


def test_clean_of_a_job_that_is_nowhere_is_exit_4_with_the_jobs_there_are(desk: Desk) -> None:
    desk.request()
    result = desk.run("clean", "cifra")
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "'cifra'" in result.stderr and "cifar" in result.stderr.split("next:")[1]


def test_clean_of_a_job_where_nothing_ever_was_says_so(desk: Desk) -> None:
    result = desk.run("clean", "cifar")
    assert result.exit_code == ExitCode.NOT_FOUND and "there is no job at all" in result.stderr


@pytest.mark.parametrize(
    ("dollars", "said"),
    [(0, "about $0.00"), (0.004, "under $0.01"), (0.006, "about $0.01"), (1234.5, "about $1,234.50")],
)
def test_less_than_a_cent_is_not_said_to_be_nothing(dollars: float, said: str) -> None:
    assert said == billing.about(dollars)


def test_launch_templates_are_one_line_of_a_plan(desk: Desk) -> None:
    says = desk.run("request", "--dry-run").stderr.splitlines()
    assert [line.split(". ")[1] for line in says if "launch template" in line] == ["create launch templates: 2"]
