"""What is rehearsed: the example, and the operator's own files with what only his account has replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spotheal.agent.protocol.errors import ConfigError, Fatal, NotFound
from spotheal.fleet.cli import app
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.scenarios import job, run, stage
from spotheal.fleet.rehearsal.scenarios.scenario import scenario

SPEC: dict[str, Any] = {
    "ImageId": "ami-0027dfad6168539c7",
    "KeyName": "<KEYPAIR_NAME>",
    "InstanceType": "p3.2xlarge",
    "Placement": {"AvailabilityZone": "us-west-2a, us-west-2b"},
    "UserData": "base64_encoded_bash_script",
    "IamInstanceProfile": {"Arn": "arn:aws:iam::<ACCOUNT_NUMBER>:instance-profile/DL-Training"},
}
FLEET: dict[str, Any] = {
    "TargetCapacity": 1,
    "IamFleetRole": "arn:aws:iam::<ACCOUNT_NUMBER>:role/DL-Training-Spot-Fleet-Role",
    "LaunchSpecifications": [SPEC],
}
JOB = '[job]\nname = "mine"\nrepository = "repo"\ncommand = ["python", "train.py"]\n'


def files(folder: Path, fleet: Any = None, job_text: str = JOB) -> Path:
    (folder / "repo").mkdir()
    (folder / "job.toml").write_text(job_text)
    path = folder / "spot_fleet_config.json"
    path.write_text(json.dumps(FLEET if fleet is None else fleet))
    return path


def test_the_example_is_two_files_and_a_repository_with_a_commit(tmp_path: Path) -> None:
    found = job.example(tmp_path / "job")
    assert found.notes == ()
    assert found.fleet.zones == ("us-west-2a", "us-west-2b")
    assert (found.job.job.python, found.job.cage.mode) == (sys.executable, "on")
    assert (Path(found.job.job.repository) / ".git").is_dir()


def test_the_operators_repository_and_command_stay_and_every_change_is_said(tmp_path: Path) -> None:
    text = JOB + 'python = "/opt/pytorch/bin/python"\n[volume]\nsnapshot = "snap-0123456789abcdef0"\n'
    found = job.users(files(tmp_path, job_text=text))
    assert (found.job.job.command, found.job.job.repository) == (("python", "train.py"), str(tmp_path / "repo"))
    assert (found.job.job.python, found.job.volume.snapshot) == (sys.executable, "")
    said = "\n".join(found.notes)
    assert all(word in said for word in ("<KEYPAIR_NAME>", "<ACCOUNT_NUMBER>", "/opt/pytorch/bin/python", "snap-0123"))


def test_a_repository_by_address_or_in_the_checkout_is_left_alone(tmp_path: Path) -> None:
    for number, address in enumerate((".", "https://example.org/a.git", "git@example.org:a.git")):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = job.users(files(folder, job_text=JOB.replace('"repo"', json.dumps(address))))
        assert found.job.job.repository == address


def test_placeholders_without_quotes_are_filled_in_with_quotes() -> None:
    text = '{"GroupId": <SECURITY_GROUP_ID>, "Arn": "arn:aws:iam::<ACCOUNT_NUMBER>:role/x", "List": [<A>]}'
    filled = json.loads(job.fill_placeholders(text))
    assert filled["GroupId"].startswith("sg-")
    assert filled["Arn"] == "arn:aws:iam::123456789012:role/x"


def test_what_init_writes_without_credentials_is_rehearsed_over_three_zones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick start's first two commands for a reader without an AWS account."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = CliRunner().invoke(app, ["init", "--command", "python train.py", "--gpus", "1", "--dir", str(tmp_path)])
    assert done.exit_code == 0 and "fleetctl rehearse" in done.stderr, done.output
    found = job.users(tmp_path / "spot_fleet_config.json", tmp_path / "job.toml")
    subnets = {f"us-west-2{letter}": f"subnet-{letter}" for letter in "abc"}
    local, _ = job.localise(found.fleet, subnets, "in-place")
    assert {spec["SubnetId"] for spec in local.specifications} == set(subnets.values())
    assert {spec["ImageId"] for spec in local.specifications} == {EXAMPLE_IMAGE}


def test_a_file_of_any_account_is_rehearsed_in_the_rehearsals(tmp_path: Path) -> None:
    text = json.dumps(FLEET).replace("<ACCOUNT_NUMBER>", "999999999999").replace(EXAMPLE_IMAGE, "ami-0a1b2c3d")
    found = job.users(files(tmp_path, json.loads(text)))
    local, _ = job.localise(found.fleet, {}, "in-place")
    assert "999999999999" not in json.dumps(local.document)
    assert local.specifications[0]["ImageId"] == EXAMPLE_IMAGE


def test_subnets_and_templates_of_the_account_become_those_of_the_rehearsal(tmp_path: Path) -> None:
    override = {"SubnetId": "subnet-0123456789abcdef0", "InstanceType": "g5.xlarge"}
    template = {"LaunchTemplateId": "lt-0123456789abcdef0", "Version": "3"}
    entry = {"LaunchTemplateSpecification": template, "Overrides": [override]}
    fleet = {key: value for key, value in FLEET.items() if key != "LaunchSpecifications"}
    found = job.users(files(tmp_path, fleet | {"LaunchTemplateConfigs": [entry]}))
    local, notes = job.localise(found.fleet, {"us-west-2a": "subnet-a", "us-west-2b": "subnet-b"}, "in-place")
    config = local.document["LaunchTemplateConfigs"][0]
    assert config["LaunchTemplateSpecification"] == {"LaunchTemplateName": "in-place", "Version": "$Latest"}
    assert config["Overrides"][0]["SubnetId"] == "subnet-a"
    assert len(notes) == 2


def test_a_missing_file_names_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no"):
        job.users(tmp_path / "none.json")


def test_a_scenario_across_zones_is_refused_for_a_fleet_of_one_zone(tmp_path: Path) -> None:
    spec = SPEC | {"Placement": {"AvailabilityZone": "us-west-2a"}}
    rehearsed = job.users(files(tmp_path, FLEET | {"LaunchSpecifications": [spec]}))
    with pytest.raises(ConfigError, match="one zone only"):
        run.check_zones(scenario("standard"), rehearsed)
    run.check_zones(scenario("notice"), rehearsed)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name in ("moto", "torch") else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match="moto, torch") as caught:
        run.check_extras(example=True)
    assert "\".[rehearsal,training]\"" in caught.value.next_step


def test_a_rehearsal_speaks_to_this_machine_only_and_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    before = dict(os.environ)
    with pytest.raises(Fatal, match="only to this machine"), stage.local_aws("https://ec2.amazonaws.com", "x", {}):
        pass
    with stage.local_aws("http://127.0.0.1:1234", "us-west-2", {}):
        assert "AWS_PROFILE" not in os.environ
        assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1234"
    assert dict(os.environ) == before


def test_a_folder_to_keep_things_in_must_be_new(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(ConfigError, match="not empty"):
        run.rehearse(run.Options(keep=tmp_path))


def test_a_job_file_alone_is_rehearsed_on_stand_in_machines(tmp_path: Path) -> None:
    files(tmp_path).unlink()
    found = job.users(None, tmp_path / "job.toml")
    local, _ = job.localise(found.fleet, {}, "in-place")
    assert found.fleet.zones == ("us-west-2a", "us-west-2b")
    assert local.specifications[0]["ImageId"] == EXAMPLE_IMAGE
    assert any("stand in" in note for note in found.notes)
    assert not run.Options(None, tmp_path / "job.toml").example
    run.check_zones(scenario("standard"), found)


def test_the_verb_needs_no_fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path).unlink()
    rehearsed: list[run.Options] = []

    def stop(options: run.Options, show: Any) -> Any:
        rehearsed.append(options)
        raise ConfigError("seen")

    monkeypatch.setattr(run, "rehearse", stop)
    assert CliRunner().invoke(app, ["rehearse", "--job", str(tmp_path / "job.toml")]).exit_code == 2
    assert [(options.fleet_file, options.example) for options in rehearsed] == [(None, False)]
