"""fleetctl init: what it chooses, what it writes, and what it refuses before it writes anything."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from cloud_desk import CloudDesk, cloud_desk, served
from typer.testing import CliRunner

from spotheal.agent.protocol.errors import ConfigError, ExitCode
from spotheal.agent.protocol.job import parse_job
from spotheal.fleet import cli
from spotheal.fleet.account import init_files, network, quotas, types
from spotheal.fleet.account.environments import NOTHING, propose
from spotheal.fleet.account.types import InstanceType, Need
from spotheal.fleet.files import config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["cloud_desk", "served"]  # fixtures
COMMAND = ("init", "--command", "python train.py --lr 3e-4")


# -------------------------------------------------------------------------------------------------------- the choosing
def _type(name: str, *, vcpus: int = 4, current: bool = True) -> InstanceType:
    return InstanceType(name, vcpus, 16, 1, "L4", 22, current)


def _choose(found: list[InstanceType], prices: dict[str, float], most: float = 0.0) -> tuple[list[str], list[str]]:
    need = Need(1, max_price=most)
    zones = {one.name: ["a"] for one in found}
    chosen, notes = types.choose(found, zones, {(name, "a"): price for name, price in prices.items()}, need)
    return [one.name for one in chosen], notes


def test_the_cheapest_current_types_are_chosen_and_dear_ones_left_out_once_there_are_three() -> None:
    found = [_type(name) for name in ("g6.xlarge", "g6e.xlarge", "g5.xlarge", "g6.8xlarge")]
    prices = {"g6.xlarge": 0.30, "g6e.xlarge": 0.60, "g5.xlarge": 0.40, "g6.8xlarge": 2.0}
    assert _choose(found, prices) == (["g6.xlarge", "g5.xlarge", "g6e.xlarge"], [])


def test_three_are_chosen_though_the_third_is_dear() -> None:
    found = [_type(name) for name in ("a.1", "b.1", "c.1")]
    assert _choose(found, {"a.1": 0.1, "b.1": 1.0, "c.1": 9.0})[0] == ["a.1", "b.1", "c.1"]


def test_an_earlier_generation_fills_up_and_is_named() -> None:
    found = [_type("g6.xlarge"), _type("g5.xlarge", current=False), _type("g4dn.xlarge", current=False)]
    chosen, notes = _choose(found, {"g6.xlarge": 0.3, "g5.xlarge": 0.2, "g4dn.xlarge": 0.4})
    assert chosen == ["g5.xlarge", "g6.xlarge", "g4dn.xlarge"]
    assert "earlier generation" in notes[0]


def test_what_no_zone_sells_or_is_above_the_price_is_not_chosen() -> None:
    found = [_type("a.1"), _type("b.1"), _type("c.1")]
    chosen, notes = _choose(found, {"a.1": 0.5, "b.1": 1.5}, 1.0)
    assert chosen == ["a.1"]
    assert "only 1 type" in notes[0]


@pytest.mark.parametrize(
    ("name", "code"),
    [("g4dn.xlarge", "L-3819A6DF"), ("gr6.4xlarge", "L-3819A6DF"), ("p4d.24xlarge", "L-7212CCBC"),
     ("p5en.48xlarge", "L-C4BD4855"), ("c7i.xlarge", "L-34B43A08"), ("inf2.xlarge", "L-B5D1601B"),
     ("dl1.24xlarge", "L-85EED4F7"), ("trn1.2xlarge", "L-6B0D517C")],
)  # fmt: skip
def test_each_family_counts_towards_its_quota(name: str, code: str) -> None:
    known = quotas.quota_of(name)
    assert known is not None and known[0] == code


@pytest.mark.parametrize("text", ["0.0.0.0/0", "::/0", "nowhere", "1.2.3.4/40", ""])
def test_ssh_is_never_opened_to_everybody(text: str) -> None:
    with pytest.raises(ConfigError):
        network.cidr(text)


@pytest.mark.parametrize("text", ['quo"te', "back\\slash", "line\nfeed", "ü💥", "\x7f\x01", "'''", "#", "= [x]"])
def test_whatever_is_written_to_job_toml_is_read_again(text: str) -> None:
    assert tomllib.loads(f"x = {init_files.toml([text])}")["x"] == [text]


# ------------------------------------------------------------------------------------------------------ with an account
def test_an_empty_account_gets_two_files_that_are_good_and_explain_themselves(cloud_desk: CloudDesk) -> None:
    (cloud_desk.folder / "requirements.txt").write_text("torch\n")
    said = cloud_desk.good(*COMMAND, "--gpus", "1", "--gpu-memory", "20")
    assert cloud_desk.good("validate")["valid"] is True
    fleet, job = config.read_request(Path("spot_fleet_config.json"), Path("job.toml"))
    assert len(fleet.instance_types) >= 3
    assert all(one["gpus"] == 1 and one["spot"] and one["on_demand"] for one in said["types"])
    assert fleet.instance_types == tuple(one["name"] for one in sorted(said["types"], key=lambda one: one["spot"]))
    assert fleet.document["AllocationStrategy"] == "priceCapacityOptimized"
    assert "pytorch-2.10-ubuntu-24.04" in said["image"]["parameter"]  # newest by number, not by letter
    for spec, one in zip(fleet.specifications, said["types"], strict=True):
        assert spec["SubnetId"] == ", ".join(one["subnets"])
        assert len(one["subnets"]) == len(one["zones"]) >= 3
        assert spec["SecurityGroups"] == [{"GroupName": "spotheal-ssh"}]
    assert job.job.name == "my-project" and job.job.repository == "." and job.job.region == "us-west-2"
    assert job.job.command == ("python", "train.py", "--lr", "3e-4")
    assert job.job.setup == (("python", "-m", "pip", "install", "-r", "requirements.txt"),)
    assert job.fleet.ssh_from == "127.0.0.1/32"
    assert job.limits.hours == 24 and job.limits.dollars == said["dollars"] > 0
    text = Path("job.toml").read_text()
    for word in ("ImageId", "InstanceType", "SubnetId", "SecurityGroups", "KeyName", "AllocationStrategy", "quota"):
        assert f"#   {word} " in text
    assert not cloud_desk.cloud.rules.world.templates.all()


def test_nothing_is_made_in_the_account(cloud_desk: CloudDesk) -> None:
    calls = len(cloud_desk.cloud.endpoint.forwarded)
    cloud_desk.good(*COMMAND)
    made = [call.operation for call in cloud_desk.cloud.endpoint.forwarded[calls:]]
    reads = ("Describe", "Get", "List", "POST")  # SSM and the quotas are POSTs of JSON
    assert made and not [one for one in made if not one.partition(":")[2].startswith(reads)]
    assert not [one for one in cloud_desk.cloud.rules.counts() if not one.startswith("Describe")]


def test_a_public_key_is_imported_by_request_where_there_is_one(cloud_desk: CloudDesk) -> None:
    key = Path.home() / ".ssh" / "id_ed25519.pub"
    key.parent.mkdir(parents=True)
    key.write_text("ssh-ed25519 AAAA me\n")
    assert cloud_desk.good(*COMMAND)["public_key"] == "~/.ssh/id_ed25519.pub"
    fleet, job = config.read_request(Path("spot_fleet_config.json"), Path("job.toml"))
    assert {spec["KeyName"] for spec in fleet.specifications} == {"spotheal"}
    assert job.fleet.public_key == "~/.ssh/id_ed25519.pub"


def test_without_gpus_plain_ubuntu_and_types_of_as_many_vcpus(cloud_desk: CloudDesk) -> None:
    said = cloud_desk.good(*COMMAND, "--gpus", "0", "--vcpus", "8")
    assert "canonical" in said["image"]["parameter"]
    assert {(one["gpus"], one["vcpus"]) for one in said["types"]} == {(0, 8)}
    assert "the image is plain Ubuntu, without torch" in "\n".join(said["notes"])
    Path("requirements.txt").write_text("torch\n")
    assert "plain Ubuntu" not in "\n".join(cloud_desk.good(*COMMAND, "--gpus", "0", "--force")["notes"])


UV = ["python", "-m", "pip", "install", "uv"]


@pytest.mark.parametrize(
    ("files", "setup"),
    [
        ({"uv.lock": "", "requirements.txt": ""}, [UV, ["uv", "sync", "--frozen", "--inexact", "--active"]]),
        ({"requirements.txt": "six"}, [[*UV[:4], "-r", "requirements.txt"]]),
        ({"pyproject.toml": '[build-system]\nrequires = ["hatchling"]'}, [[*UV[:4], "-e", "."]]),
        ({"setup.py": ""}, [[*UV[:4], "-e", "."]]),
        (
            {"pyproject.toml": '[project]\nname = "a"\ndependencies = ["six"]'},
            [UV, ["uv", "pip", "install", "--python", "python", "-r", "pyproject.toml"]],
        ),
        ({"pyproject.toml": "[tool.ruff]\nline-length = 100"}, []),
        ({"pyproject.toml": "not [ toml"}, []),
        ({"environment.yml": "name: a"}, []),
    ],
)
def test_init_proposes_the_setup_of_the_checkouts_own_files(
    cloud_desk: CloudDesk, files: dict[str, str], setup: list[list[str]]
) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    result = cloud_desk.run("init", "--offline", "--command", "python train.py", "--dir", ".")
    assert result.exit_code == 0, result.stderr
    assert tomllib.loads(Path("job.toml").read_text())["job"].get("setup", []) == setup
    assert ("environment.yml is not read" in result.stderr) == ("environment.yml" in files)


def test_a_project_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").symlink_to("/dev/zero")
    assert propose(tmp_path) == NOTHING
    (tmp_path / "pyproject.toml").unlink()
    (tmp_path / "pyproject.toml").write_text("[build-system]\n" + "#" * (1 << 20))
    assert propose(tmp_path) == NOTHING


@pytest.mark.parametrize(
    ("command", "operator"),
    [("torchrun train.py && echo done", "&&"), ("python train.py | tee log", "|"), ("python train.py > log", ">"),
     ("python a.py; python b.py", ";"), ("python train.py --seed $(date +%s)", "("), ("python train.py `nproc`", "`"),
     ("OMP_NUM_THREADS=1 python a.py", "OMP"), ("python train.py --out $HOME/x", "$HOME"),
     ("python train.py --data=${DATA}/x", "--data=${DATA}")],
)  # fmt: skip
def test_what_only_a_shell_understands_is_refused_with_the_form_that_works(
    cloud_desk: CloudDesk, command: str, operator: str
) -> None:
    """operator.md 12: `&&`, `echo` and `done` became arguments of the trainer."""
    result = cloud_desk.run("init", "--command", command)
    assert result.exit_code == ExitCode.USAGE and f"`{operator}" in result.stderr
    (form,) = re.findall(r"--command (.*)", result.stderr.split("next: ", 1)[1].replace("\n", " "))
    (words,) = shlex.split(form)
    assert cloud_desk.run("init", "--command", words).exit_code == 0
    assert tomllib.loads(Path("job.toml").read_text())["job"]["command"] == ["sh", "-c", command]


def test_a_command_without_quotes_is_printed_in_a_form_that_reads_well(cloud_desk: CloudDesk) -> None:
    result = cloud_desk.run("init", "--command", "python train.py && echo ok")
    assert """--command "sh -c 'python train.py && echo ok'\"""" in " ".join(result.stderr.split())


def test_the_next_step_names_the_folder_of_the_files(cloud_desk: CloudDesk) -> None:
    said = cloud_desk.run(*COMMAND, "--dir", "elsewhere").stderr
    assert "fleetctl request elsewhere/spot_fleet_config.json" in " ".join(said.split())


def test_a_quota_of_nothing_is_exit_5_and_prints_the_command_that_raises_it(cloud_desk: CloudDesk) -> None:
    for code, (name, _) in list(cloud_desk.cloud.endpoint.account.quotas.items()):
        cloud_desk.cloud.endpoint.account.quotas[code] = name, 0.0
    result = cloud_desk.run(*COMMAND)
    assert result.exit_code == ExitCode.CAPACITY
    assert "All G and VT Spot Instance Requests" in result.stderr
    assert "aws service-quotas request-service-quota-increase" in result.stderr
    assert "--quota-code L-3819A6DF" in result.stderr
    assert not Path("job.toml").exists() and not Path("spot_fleet_config.json").exists()


def test_a_small_quota_leaves_the_large_types_out(cloud_desk: CloudDesk) -> None:
    cloud_desk.cloud.endpoint.account.quotas["L-3819A6DF"] = "All G and VT Spot Instance Requests", 4.0
    said = cloud_desk.good(*COMMAND)
    assert {one["vcpus"] for one in said["types"]} == {4}


def test_a_price_that_nothing_meets_names_the_cheapest(cloud_desk: CloudDesk) -> None:
    result = cloud_desk.run(*COMMAND, "--max-price", "0.001")
    assert result.exit_code == ExitCode.CAPACITY
    assert "the cheapest is g" in result.stderr and "--max-price 0." in result.stderr


def test_a_max_price_is_kept_by_aws(cloud_desk: CloudDesk) -> None:
    said = cloud_desk.good(*COMMAND, "--max-price", "0.25")
    assert all(one["spot"] <= 0.25 for one in said["types"])
    assert json.loads(Path("spot_fleet_config.json").read_text())["SpotPrice"] == "0.25"


def test_files_that_are_there_are_never_written_over_without_force(cloud_desk: CloudDesk) -> None:
    Path("job.toml").write_text("mine")
    result = cloud_desk.run(*COMMAND)
    assert result.exit_code == ExitCode.CONFLICT and "--force" in result.stderr
    assert Path("job.toml").read_text() == "mine" and not Path("spot_fleet_config.json").exists()
    assert cloud_desk.run(*COMMAND, "--force").exit_code == 0
    assert Path("job.toml").read_text() != "mine"


@pytest.mark.parametrize(
    ("files", "message", "next_step"),
    [(["job.toml"], "job.toml is there already and was kept; nothing was written", "`init --force` writes both files"),
     (["spot_fleet_config.json", "job.toml"],
      "spot_fleet_config.json and job.toml are there already and were kept; nothing was written",
      "`fleetctl validate spot_fleet_config.json` checks them as they are; `init --force` writes both files")],
)  # fmt: skip
def test_init_says_what_it_kept_and_the_next_step(
    nowhere: Path, files: list[str], message: str, next_step: str
) -> None:
    for name in files:
        Path(name).write_text("mine")
    result = run(*COMMAND, "--offline")
    words = " ".join(result.stderr.split())
    assert result.exit_code == ExitCode.CONFLICT
    assert f"{message} " in words and f"next: {next_step} again, `--dir NAME` writes them elsewhere" in words
    assert files == sorted(path.name for path in nowhere.iterdir())[::-1]


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [("AccessDeniedException", ExitCode.PERMISSION, "docs/permissions.md"),
     ("ThrottlingException", ExitCode.UNEXPECTED, "could not list the Deep Learning AMIs")],
)  # fmt: skip
def test_what_aws_refuses_is_one_message(
    cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch, code: str, exit_code: ExitCode, says: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    answer = cloud_desk.cloud.endpoint.account.answer

    def refused(target: str, body: bytes) -> Any:
        return (400, {"__type": code, "message": "no"}) if "GetParametersByPath" in target else answer(target, body)

    monkeypatch.setattr(cloud_desk.cloud.endpoint.account, "answer", refused)
    result = cloud_desk.run(*COMMAND)
    assert result.exit_code == exit_code
    assert says in result.stderr and code in result.stderr and "Traceback" not in result.output


# ---------------------------------------------------------------------------------------------------------- without one
@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import os

    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.mark.parametrize("more", [(), ("--gpus", "4"), ("--gpus", "8", "--gpu-memory", "40"), ("--gpus", "0")])
def test_offline_placeholders_are_left_and_validate_names_each_with_its_cure(
    nowhere: Path, more: tuple[str, ...]
) -> None:
    assert run(*COMMAND, *more).exit_code == 0
    result = run("validate", "--output", "json")
    assert result.exit_code == ExitCode.USAGE
    faults = json.loads(result.stdout)["faults"]
    words = ("<ACCOUNT_NUMBER>", "<AMI_ID>", "<SUBNET_ID>")
    assert [next(word for word in words if word in fault["message"]) for fault in faults] == list(words)
    assert all(fault["file"] == "spot_fleet_config.json" and fault["cure"] and fault["place"] for fault in faults)
    parse_job(tomllib.loads(Path("job.toml").read_text()))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--name", "No Name; rm -rf /"),
        ("--name", "x" * 41),
        ("--repo", "https://token@example.org/a.git"),
        ("--repo", "--upload-pack=evil"),
        ("--repo", "ext::sh -c x"),
        ("--command", "python 'train.py"),
        ("--command", ""),
        ("--gpus", "3"),
        ("--gpus", "-1"),
        ("--ssh-from", "0.0.0.0/0"),
        ("--region", "../.."),
        ("--volume", "0"),
    ],
)
def test_hostile_and_senseless_options_are_exit_2_and_write_nothing(nowhere: Path, arguments: tuple[str, ...]) -> None:
    result = run(*COMMAND, "--offline", *arguments)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "Traceback" not in result.output
    assert list(nowhere.glob("*.json")) == list(nowhere.glob("*.toml")) == []


def test_a_profile_that_is_not_there_is_no_reason_to_write_placeholders(nowhere: Path) -> None:
    result = run(*COMMAND, "--profile", "nobody", "--region", "us-west-2")
    assert result.exit_code == ExitCode.PERMISSION and "nobody" in result.stderr
    assert not Path("job.toml").exists()


@pytest.mark.parametrize(
    ("repository", "name"),
    [("https://github.com/you/ResNet_50.git", "resnet-50"), ("git@host:team/My.Repo", "my-repo"),
     ("ssh://git@host/a/---", "training"), ("https://example.org/" + "y" * 60, "y" * 40)],
)  # fmt: skip
def test_a_job_is_named_after_its_repository(nowhere: Path, repository: str, name: str) -> None:
    assert run(*COMMAND, "--offline", "--repo", repository).exit_code == 0
    assert config.read_job(Path("job.toml")).job.name == name
