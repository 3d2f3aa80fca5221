"""Options of verbs that no other test gives, each with its effect in an account of the local cloud."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import pytest
from cloud_desk import CloudDesk, as_person, cloud_desk, owner, served
from typer.testing import CliRunner

from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.names import LAYOUT
from spotheal.fleet.cli import app
from spotheal.fleet.rehearsal.services.authorization import OWNER

__all__ = ["cloud_desk", "served"]  # fixtures
FLEETCTL = (sys.executable, "-m", "spotheal.fleet.cli")
JOB = '[job]\nname = "asked"\nrepository = "."\ncommand = ["python", "train.py"]\n'


def document(path: Path) -> Any:
    return json.loads(path.read_text())


def test_init_writes_what_it_was_told(cloud_desk: CloudDesk) -> None:
    ec2 = owner("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    cloud_desk.good(
        "init", "--command", "python train.py", "--gpus", "0", "--type", "c7i.xlarge", "--image", "ami-12c6146b",
        "--hours", "3", "--dollars", "7", "--vpc", vpc, "--ssh-from", "203.0.113.7/32", "--max-price", "2",
        "--repo", "https://example.org/a.git", "--volume", "5", "--name", "told", "--dir", "below", "--vcpus", "4",
    )  # fmt: skip
    fleet = document(cloud_desk.folder / "below" / "spot_fleet_config.json")
    (spec,) = fleet["LaunchSpecifications"]
    assert ("c7i.xlarge", "ami-12c6146b", "2") == (spec["InstanceType"], spec["ImageId"], fleet["SpotPrice"])
    assert spec["IamInstanceProfile"]["Arn"].endswith("/spotheal-job-told")
    found = {one["SubnetId"] for one in ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]}
    assert set(spec["SubnetId"].split(", ")) <= found
    text = (cloud_desk.folder / "below" / "job.toml").read_text()
    for line in ("hours = 3", "dollars = 7", 'ssh_from = "203.0.113.7/32"', "size_gib = 5", 'name = "told"',
                 'repository = "https://example.org/a.git"'):  # fmt: skip
        assert f"\n{line}\n" in text, line
    cloud_desk.good("init", "--command", "true", "--gpus", "1", "--gpu-memory", "20", "--dir", "below", "--force")
    assert "gpus = 1\n" in (cloud_desk.folder / "below" / "job.toml").read_text()


def test_init_without_an_account_leaves_placeholders(cloud_desk: CloudDesk) -> None:
    cloud_desk.good("init", "--command", "python train.py", "--gpus", "0", "--offline")
    assert "<ACCOUNT" in (cloud_desk.folder / "spot_fleet_config.json").read_text()


def test_a_profile_gives_credentials_and_region(cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [(key, os.environ[name]) for key, name in (("aws_access_key_id", "AWS_ACCESS_KEY_ID"),
                                                      ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"))]  # fmt: skip
    lines = ["[profile asked]", "region = us-west-2", *(f"{key} = {value}" for key, value in keys)]
    (cloud_desk.folder / "config").write_text("\n".join(lines))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(cloud_desk.folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    given = ("init", "--command", "python train.py", "--gpus", "0", "--name", "asked")
    cloud_desk.good(*given)
    assert "<ACCOUNT" in (cloud_desk.folder / "spot_fleet_config.json").read_text(), "nothing names credentials"
    cloud_desk.good(*given, "--profile", "asked", "--force")
    assert "<ACCOUNT" not in (cloud_desk.folder / "spot_fleet_config.json").read_text()
    assert 'region = "us-west-2"' in (cloud_desk.folder / "job.toml").read_text()


def test_roles_have_the_names_that_are_given(cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    as_person(monkeypatch, cloud_desk.cloud, OWNER)  # the printed policies name the usual roles
    made = ("--instance-role", "told-instances", "--fleet-role", "told-fleets")
    cloud_desk.good("iam", "create", *made, "--store", "s3://told-store/below", "--yes")
    iam = owner("iam")
    names = iam.list_role_policies(RoleName="told-instances")["PolicyNames"]
    policies = [iam.get_role_policy(RoleName="told-instances", PolicyName=name)["PolicyDocument"] for name in names]
    assert "told-store/below/*" in json.dumps(policies)
    assert iam.get_role(RoleName="told-fleets")
    key = "arn:aws:kms:us-west-2:123456789012:key/told"
    given = ("--instance-role", "told-instances", "--fleet-role", "told-fleets", "--store", "s3://told-store/below",
             "--kms-key", key)  # fmt: skip
    shown = [cloud_desk.run("iam", "show", which, *given).stdout for which in ("operator", "operator-store")]
    assert "role/told-fleets" in "".join(shown) and "told-store" in "".join(shown)
    assert key in shown[1] and "kms:CreateGrant" in shown[1]
    cloud_desk.good("iam", "delete", "--instance-role", "told-instances", "--fleet-role", "told-fleets", "--yes")
    names = {one["RoleName"] for one in iam.list_roles()["Roles"]}
    assert not names & {"told-instances", "told-fleets"}


def test_a_secret_is_encrypted_with_the_key_that_is_given(
    cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_person(monkeypatch, cloud_desk.cloud, OWNER)
    (cloud_desk.folder / "job.toml").write_text(JOB)
    key = owner("kms").create_key()["KeyMetadata"]["Arn"]
    for store in ("ssm", "secretsmanager"):
        given = ["secret", "put", "TOKEN", "--store", store, "--key", key]
        assert 0 == CliRunner().invoke(app, given, input="of-the-key").exit_code
    ssm, manager = (owner(name) for name in ("ssm", "secretsmanager"))
    assert key == ssm.describe_parameters()["Parameters"][-1]["KeyId"]
    assert key == manager.describe_secret(SecretId="spotheal/asked/TOKEN")["KmsKeyId"]
    for store in ("ssm", "secretsmanager"):
        assert 0 == cloud_desk.run("secret", "rm", "TOKEN", "--store", store, "--yes").exit_code


def test_a_file_system_of_another_name_lies_where_the_fleet_or_the_vpc_is(cloud_desk: CloudDesk) -> None:
    vpc = owner("ec2").describe_vpcs()["Vpcs"][0]["VpcId"]
    cloud_desk.good("init", "--command", "true", "--gpus", "0", "--name", "asked", "--dir", "below")
    fleet = "below/spot_fleet_config.json"
    made = cloud_desk.good("results", "create-efs", "--name", "one", "--fleet", fleet, "--yes")
    assert made["file_system"].startswith("fs-")
    assert 0 == cloud_desk.run("results", "delete-efs", "--name", "one", "--yes").exit_code
    cloud_desk.good("results", "create-efs", "--name", "one", "--vpc", vpc, "--dry-run")


def test_a_quota_of_the_local_cloud_is_ordered_and_lifted(cloud_desk: CloudDesk) -> None:
    assert "at most 0 instances" in cloud_desk.good("cloud", "quota", "--count", "0")["said"]
    assert 0 == cloud_desk.cloud.rules.world.instances_max
    cloud_desk.good("cloud", "quota")
    assert cloud_desk.cloud.rules.world.instances_max is None


def test_a_cloud_keeps_its_machines_and_volumes_in_the_folder_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, kept = tmp_path / "cloud.env", tmp_path / "kept"
    with subprocess.Popen([*FLEETCTL, "cloud", "--keep", str(kept), "--env", str(lines)]) as cloud:
        try:
            while not lines.exists():
                assert cloud.poll() is None
                time.sleep(0.1)
            text = next(line for line in lines.read_text().splitlines() if "AWS_ENDPOINT_URL=" in line)
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(kept / "credentials"))
            ec2 = boto3.session.Session(profile_name="owner", region_name="us-west-2").client(
                "ec2", endpoint_url=text.partition("=")[2]
            )
            volume = ec2.create_volume(AvailabilityZone="us-west-2a", Size=1)["VolumeId"]
        finally:
            cloud.send_signal(signal.SIGINT)
    assert 0 == cloud.returncode
    assert list(kept.rglob(f"*{volume}*")), "the volume's files stay"


def test_what_a_job_on_batch_is_told_this_time(cloud_desk: CloudDesk) -> None:
    (cloud_desk.folder / "job.toml").write_text(
        JOB + '[batch]\nimage = "rehearsed/spotheal"\ngpus = 1\nvcpus = 3\non_demand = false\n'
    )
    vpc = owner("ec2").describe_vpcs()["Vpcs"][0]["VpcId"]
    cloud_desk.good("batch", "create", "--vpc", vpc, "--dry-run")
    cloud_desk.good("batch", "create", "--vpc", vpc, "--yes")
    (made,) = owner("batch").describe_compute_environments()["computeEnvironments"]
    assert "SPOT" == made["computeResources"]["type"], "on_demand = false"
    sent = cloud_desk.good("batch", "submit", "--command", "python -c 1", "--yes")
    first = str(sent["job_id"])
    told = cloud_desk.good(
        "batch", "submit", "--vcpus", "2", "--memory", "3", "--gpus", "1", "--env", "COLOUR=red",
        "--command", "python train.py --other", "--depends-on", first, "--yes",
    )  # fmt: skip
    cloud_desk.good("batch", "submit", "--array", "2", "--dry-run")
    bucket, _, key = str(told["store"]).removeprefix("s3://").partition("/")
    body = owner("s3").get_object(Bucket=bucket, Key=f"{key}/{LAYOUT.job_document}")
    text = json.dumps(told) + body["Body"].read().decode()
    for part in ("COLOUR", "--other", first, '"3072"', '"GPU"'):
        assert part in text, part
    cut = cloud_desk.run("batch", "logs", "--run", told["run"], "--follow", "--timeout", "1s")
    assert ExitCode.WAIT_TIMED_OUT == cut.exit_code, cut.output
    cloud_desk.good("batch", "cancel", "--yes")
    (cloud_desk.folder / "list.yml").write_text("- {a: 1}\n- {a: 2}\n- {a: 3}\n")
    swept = cloud_desk.good("sweep", "run", "list.yml", "--engine", "batch", "--yes")
    assert {"size": 3} == swept["request"]["arrayProperties"]
    cloud_desk.good("batch", "cancel", "--yes")
    cloud_desk.good("batch", "delete", "--yes")


def test_a_sweep_takes_another_fleet_file_and_engine(cloud_desk: CloudDesk) -> None:
    cloud_desk.good("init", "--command", "python train.py", "--gpus", "0", "--name", "swept", "--dir", "below")
    (cloud_desk.folder / "list.yml").write_text("- {a: 1}\n- {a: 2}\n")
    given = ("--fleet", "below/spot_fleet_config.json", "--job", "below/job.toml", "--parallel", "2", "--dry-run")
    told = cloud_desk.good("sweep", "run", "list.yml", *given)
    assert "request_spot_fleet" in json.dumps(told)
