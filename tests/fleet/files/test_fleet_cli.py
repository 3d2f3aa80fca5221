"""fleetctl as a program: what goes where, which exit code, and nothing but messages for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet import cli
from spotheal.fleet.files.config import FleetConfig
from spotheal.fleet.files.shape import fleet_config_faults, request_faults

FLEET: dict[str, Any] = {
    "TargetCapacity": 1,
    "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
    "LaunchSpecifications": [
        {
            "ImageId": "ami-0123456789abcdef0",
            "InstanceType": "g5.xlarge",
            "Placement": {"AvailabilityZone": "us-west-2a, us-west-2b"},
            "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/agent"},
            "UserData": "base64_encoded_bash_script",
        }
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job without an AWS account."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "spot_fleet_config.json").write_text(json.dumps(FLEET))
    (work / "job.toml").write_text('[job]\nname = "cifar"\nrepository = "."\ncommand = ["python", "train.py"]\n')
    (work / "train.py").write_text("print(1)\n")
    for arguments in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.email=a@example.org", "-c", "user.name=a", *arguments], cwd=work, check=True)
    monkeypatch.chdir(work)
    return work


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_a_dry_run_without_credentials_prints_the_exact_request_and_says_what_it_could_not_know(folder: Path) -> None:
    result = run("request", "--dry-run")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["account"] == "000000000000"
    assert any("without credentials" in note for note in document["notes"])
    assert request_faults("RequestSpotFleet", document["request"]["request_spot_fleet"]) == []
    (template,) = document["request"]["create_launch_template"]
    assert request_faults("CreateLaunchTemplate", template) == []
    assert "will do:" in result.stderr


@pytest.mark.parametrize("harden", [True, False])
def test_render_writes_what_the_aws_cli_takes(folder: Path, harden: bool) -> None:
    with (folder / "job.toml").open("a") as job:
        job.write(f"[fleet]\nharden = {str(harden).lower()}\n")
    result = run("request", "--render", "out.json")
    assert result.exit_code == 0, result.output
    assert fleet_config_faults(json.loads((folder / "out.json").read_text())) == []
    written = sorted(path.name for path in folder.glob("out.json*"))
    assert written == (["out.json", "out.json.commands", "out.json.template-0.json"] if harden else ["out.json"])
    assert sorted(result.stdout.split()) == written
    if harden:
        subprocess.run(["sh", "-n", "out.json.commands"], check=True)
    assert run("request", "--dry-run").exit_code == 0  # the files it wrote are no uncommitted work


def test_without_a_terminal_and_without_yes_nothing_is_asked_and_nothing_done(folder: Path) -> None:
    result = run("request")
    assert result.exit_code == ExitCode.USAGE
    assert "--yes" in result.stderr


def test_without_credentials_a_request_says_what_to_do(folder: Path) -> None:
    result = run("request", "--yes")
    assert result.exit_code == ExitCode.PERMISSION
    assert "no AWS credentials were found" in result.stderr
    assert "next: " in result.stderr


def test_an_unknown_profile_is_a_matter_of_credentials(folder: Path) -> None:
    result = run("--profile", "nobody", "status", "--region", "us-west-2")
    assert result.exit_code == ExitCode.PERMISSION
    assert "nobody" in result.stderr


@pytest.mark.parametrize(
    ("endpoint", "code", "says"),
    [("http://127.0.0.1:9", ExitCode.UNEXPECTED, "next: check the network"), ("no url", ExitCode.USAGE, "no url")],
)
def test_an_endpoint_that_does_not_answer_or_is_none_is_said_with_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, code: ExitCode, says: str
) -> None:
    for name, value in (("ENDPOINT_URL", endpoint), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "y")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("time.sleep", lambda _: None)
    result = run("--region", "us-west-2", "status", "cifar")
    assert code == result.exit_code
    assert says in result.stderr
    assert "AWS_ENDPOINT_URL" in result.stderr
    assert "" == result.stdout


def test_uncommitted_work_is_refused_before_anything_is_read_from_aws(folder: Path) -> None:
    (folder / "train.py").write_text("changed\n")
    result = run("request", "--dry-run")
    assert result.exit_code == ExitCode.CONFLICT
    assert "uncommitted work: changed: train.py" in result.stderr


def test_another_region_than_the_files_zones_is_refused(folder: Path) -> None:
    result = run("request", "--dry-run", "--region", "eu-west-1")
    assert result.exit_code == ExitCode.USAGE
    assert "us-west-2a" in result.stderr


@pytest.mark.parametrize("arguments", [["request", "--yes"], ["validate"], ["request", "--dry-run"]])
def test_missing_files_are_named_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "there is no spot_fleet_config.json" in result.stderr
    assert "next: " in result.stderr


def test_validate_reports_all_faults_and_says_so_in_json_too(folder: Path) -> None:
    assert run("validate").exit_code == 0
    (folder / "spot_fleet_config.json").write_text('{"TargetCapacity": 2, "LaunchSpecifications": []')
    result = run("validate", "--output", "json")
    assert result.exit_code == ExitCode.USAGE
    document = json.loads(result.stdout)
    assert document["valid"] is False
    first, *others = document["faults"]
    assert first["file"] == "spot_fleet_config.json" and first["place"] == "1:49" and "add }" in first["cure"]
    (capacity,) = [one for one in others if one["place"] == "TargetCapacity"]
    assert capacity["message"].startswith("must be 1, is 2")
    assert all(one["message"] and one["cure"] for one in document["faults"])


def test_validate_says_that_a_path_is_for_rehearsals_and_refuses_a_token_in_an_address(folder: Path) -> None:
    job = folder / "job.toml"
    job.write_text(job.read_text().replace('"."', f'"{folder}"'))
    said = run("validate")
    assert said.exit_code == 0 and "`fleetctl rehearse` only" in said.stderr
    job.write_text(job.read_text().replace(str(folder), "https://token@example.org/a.git"))
    assert run("validate").exit_code == ExitCode.USAGE


def test_a_rehearsal_of_a_job_file_takes_the_fleets_file_beside_it_and_not_the_example(folder: Path) -> None:
    (folder / "spot_fleet_config.json").write_text("{")
    result = run("rehearse", "--job", "job.toml")
    assert result.exit_code == ExitCode.USAGE
    assert "spot_fleet_config.json" in result.stderr


def test_a_fleets_file_that_is_named_and_not_there_is_not_replaced_by_stand_ins(folder: Path) -> None:
    (folder / "spot_fleet_config.json").unlink()
    result = run("rehearse", "spot_fleet_config.json", "--job", "job.toml")
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "there is no spot_fleet_config.json" in result.stderr
    assert "fleetctl rehearse --job job.toml" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["request", "--resume", "--new-run", "--yes"],
        ["request", "--dry-run", "--timeout", "soon"],
        ["status", "--output", "xml"],
        ["logs", "x", "--source", "kernel"],
        ["logs", "x", "--attempt", "1", "--instance", "i-0a"],
        ["status", "No/Name", "--region", "us-west-2"],
        ["status", "x", "--region", "../.."],
        ["rehearse", "--scenario", "nope"],
        ["frobnicate"],
        ["request", "--no-such-option"],
    ],
)
def test_wrong_usage_is_exit_2(folder: Path, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "Traceback" not in result.output


def test_validate_refuses_what_would_not_fit_into_user_data(folder: Path) -> None:
    import secrets

    with (folder / "job.toml").open("a") as job:
        job.write("[environment]\n" + "".join(f'V{n} = "{secrets.token_hex(200)}"\n' for n in range(60)))
    result = run("validate")
    assert result.exit_code == ExitCode.USAGE
    assert "16384" in result.stderr


def test_no_job_named_and_no_job_toml_says_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("status")
    assert result.exit_code == ExitCode.USAGE
    assert "--job FILE" in result.stderr


def test_what_nobody_foresaw_is_one_line_and_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: FleetConfig) -> str:
        raise RuntimeError("the unforeseen")

    monkeypatch.setattr(FleetConfig, "region", property(broken))
    result = run("request", "--dry-run")
    assert result.exit_code == ExitCode.UNEXPECTED
    assert "RuntimeError: the unforeseen" in result.stderr
    assert "Traceback" not in result.output
    log = folder.parent / "cache" / "spotheal" / "last-error.log"
    assert "Traceback" in log.read_text()


def test_ctrl_c_is_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: FleetConfig) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(FleetConfig, "region", property(interrupted))
    assert run("request", "--dry-run").exit_code == ExitCode.INTERRUPTED


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_help_with_an_example_and_the_line_of_the_overall_help(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Example: fleetctl {name}" in result.stdout
    assert cli.VERBS[name] in " ".join(result.stdout.split())


def test_the_overall_help_is_the_same_by_every_way_and_names_every_option_of_the_program() -> None:
    assert run("--help").stdout == run("-h").stdout == cli.help_text() + "\n"
    options = {option for parameter in typer.main.get_command(cli.app).params for option in parameter.opts}
    assert options - set(cli.help_text().replace(",", "").split()) == set()


def test_a_shell_completes_verbs_and_their_options() -> None:
    words = {"COMP_WORDS": "fleetctl sta", "COMP_CWORD": "1", "_FLEETCTL_COMPLETE": "complete_bash"}
    assert CliRunner().invoke(cli.app, prog_name="fleetctl", env=words).stdout.split() == ["status"]
    more = words | {"COMP_WORDS": "fleetctl logs --foll", "COMP_CWORD": "2"}
    assert "--follow" in CliRunner().invoke(cli.app, prog_name="fleetctl", env=more).stdout.split()


def test_help_is_a_word_too_and_a_mistyped_verb_is_guessed() -> None:
    run = CliRunner().invoke
    assert run(cli.app, ["help"]).stdout.strip() == cli.help_text()
    assert run(cli.app, ["help", "sweep", "run"]).stdout == run(cli.app, ["sweep", "run", "--help"]).stdout
    for typed, said in (("statsu", "Did you mean 'status'?"), ("xyzzy", "No such command 'xyzzy'.\n")):
        wrong = run(cli.app, [typed])
        assert (wrong.exit_code, said in wrong.stderr) == (ExitCode.USAGE, True), wrong.stderr


def test_the_version_is_data() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("fleetctl ")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom spotheal.fleet import cli\n"
        "sys.argv = ['fleetctl', '--help']\ncli.main()\n"
        "heavy = ('typer', 'click', 'boto3', 'botocore', 'torch', 'moto', 'rich', 'requests', 'subprocess')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "[]"
