"""fleetctl iam: policies printed, roles made once and taken away."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cloud_desk import CloudDesk, cloud_desk, owner, served

from spotheal.agent.protocol.errors import ExitCode

__all__ = ["cloud_desk", "served"]  # fixtures
FLEET_ROLE = "aws-ec2-spot-fleet-tagging-role"
READS_DATA = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}],
}


def test_each_document_is_printed_as_iam_takes_it(cloud_desk: CloudDesk) -> None:
    every = cloud_desk.good("iam", "show")
    assert set(every) - {"schema_version"} == {
        "operator", "operator-store", "operator-efs", "operator-batch", "administrator", "instance-role",
        "instance-trust", "fleet-role", "fleet-trust", "trainer-trust",
    }  # fmt: skip
    for name in set(every) - {"schema_version"}:
        result = cloud_desk.run("iam", "show", name)
        assert result.exit_code == 0
        assert json.loads(result.stdout) == every[name]
        assert every[name]["Version"] == "2012-10-17"
    assert "123456789012" in json.dumps(every["operator"])


def test_without_credentials_the_accounts_number_is_zeros(
    cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    result = cloud_desk.run("iam", "show", "operator")
    assert result.exit_code == 0
    assert "000000000000" in result.stdout and "without credentials" in result.stderr


def test_roles_are_made_once_and_taken_away_once(cloud_desk: CloudDesk) -> None:
    made = cloud_desk.good("iam", "create", "--yes")
    assert len(made["made"]) == 2
    assert made["instance_profile"] == "arn:aws:iam::123456789012:instance-profile/spotheal-instance"
    assert made["fleet_role"] == f"arn:aws:iam::123456789012:role/{FLEET_ROLE}"
    assert cloud_desk.good("iam", "create", "--yes")["made"] == []
    gone = cloud_desk.good("iam", "delete", "--yes")["deleted"]
    assert gone == [
        "instance profile spotheal-instance", "role spotheal-instance", f"role {FLEET_ROLE}"
    ]  # fmt: skip
    assert cloud_desk.good("iam", "delete", "--yes")["deleted"] == []


def test_the_role_of_a_job_with_a_customer_key_may_use_it(cloud_desk: CloudDesk) -> None:
    key = owner("kms").create_key()["KeyMetadata"]["Arn"]
    given = ("iam", "create", "--yes", "--job", "keyed", "--kms-key")
    refused = cloud_desk.run(*given, "alias/mine")
    assert refused.exit_code == ExitCode.USAGE and "must be the ARN of a KMS key" in refused.stderr
    cloud_desk.good(*given, key)
    iam, role = owner("iam"), {"RoleName": "spotheal-job-keyed"}
    names = iam.list_role_policies(**role)["PolicyNames"]
    documents = [iam.get_role_policy(**role, PolicyName=name)["PolicyDocument"] for name in names]
    statements = {(one["Sid"], str(one["Resource"])) for document in documents for one in document["Statement"]}
    assert {("UseKey", key), ("GrantKey", key)} <= statements
    assert cloud_desk.good(*given, key)["made"] == []
    cloud_desk.good("iam", "delete", "--yes", "--job", "keyed")
    cloud_desk.good("iam", "delete", "--yes")


def test_the_trainer_of_one_job_may_do_what_its_policy_says(cloud_desk: CloudDesk) -> None:
    Path("data.json").write_text(json.dumps(READS_DATA))
    refused = cloud_desk.run("iam", "create", "--yes", "--trainer-policy", "data.json")
    assert refused.exit_code == ExitCode.USAGE and "--job JOB" in refused.stderr
    given = ("iam", "create", "--yes", "--job", "cifar", "--trainer-policy", "data.json")
    made = cloud_desk.good(*given)
    assert made["trainer_role"] == "arn:aws:iam::123456789012:role/spotheal-trainer-cifar"
    assert any("role spotheal-trainer-cifar" in step for step in made["made"])
    iam = owner("iam")
    (name,) = iam.list_role_policies(RoleName="spotheal-trainer-cifar")["PolicyNames"]
    assert iam.get_role_policy(RoleName="spotheal-trainer-cifar", PolicyName=name)["PolicyDocument"] == READS_DATA
    assert cloud_desk.good(*given)["made"] == []
    shown = cloud_desk.good("iam", "show", "trainer-trust", "--job", "cifar")["policy"]
    assert "spotheal-job-cifar" in json.dumps(shown) and "spotheal-job-*" not in json.dumps(shown)
    assert "role spotheal-trainer-cifar" in cloud_desk.good("iam", "delete", "--yes", "--job", "cifar")["deleted"]
    cloud_desk.good("iam", "delete", "--yes")


def test_a_jobs_own_role_is_made_shown_and_taken_away_alone(cloud_desk: CloudDesk) -> None:
    made = cloud_desk.good("iam", "create", "--yes", "--job", "cifar")
    assert made["instance_profile"].endswith(":instance-profile/spotheal-job-cifar")
    shown = cloud_desk.good("iam", "show", "instance-role", "--job", "cifar")["policy"]
    assert "spotheal:run" not in json.dumps(shown).replace("StringEquals", "")
    (stored,) = [one for one in shown["Statement"] if one["Sid"] == "Store"]
    assert stored["Resource"].endswith("/cifar/*")
    gone = cloud_desk.good("iam", "delete", "--yes", "--job", "cifar")["deleted"]
    assert gone == ["instance profile spotheal-job-cifar", "role spotheal-job-cifar"]
    iam = owner("iam")
    iam.create_role(RoleName="spotheal-rescue-cifar", AssumeRolePolicyDocument="{}")
    gone = cloud_desk.good("iam", "delete", "--yes", "--job", "cifar")["deleted"]
    assert gone == ["role spotheal-rescue-cifar"], "its on-demand rescue's"
    refused = cloud_desk.run("iam", "create", "--yes", "--job", "cifar", "--instance-role", "mine")
    assert refused.exit_code == ExitCode.USAGE
    cloud_desk.good("iam", "delete", "--yes")


@pytest.mark.parametrize("text", ["{", "[]", '{"Version": "2012-10-17"}', None])
def test_a_trainers_policy_that_is_none_is_refused_before_anything_is_made(
    cloud_desk: CloudDesk, text: str | None
) -> None:
    if text is not None:
        Path("data.json").write_text(text)
    result = cloud_desk.run("iam", "create", "--yes", "--job", "cifar", "--trainer-policy", "data.json")
    assert result.exit_code == ExitCode.USAGE
    assert "data.json" in result.stderr and "Traceback" not in result.output


def test_a_fleet_role_that_fleetctl_did_not_make_is_left(cloud_desk: CloudDesk) -> None:
    iam = owner("iam")
    nobody = json.dumps({"Version": "2012-10-17", "Statement": []})
    iam.create_role(RoleName=FLEET_ROLE, AssumeRolePolicyDocument=nobody)
    try:
        result = cloud_desk.run("iam", "delete", "--yes")
        assert result.exit_code == 0 and "left alone" in result.stderr
        assert iam.get_role(RoleName=FLEET_ROLE)
    finally:
        iam.delete_role(RoleName=FLEET_ROLE)


@pytest.mark.parametrize(
    "arguments",
    [("show", "nothing"), ("show", "--store", "http://x"), ("create", "--yes", "--instance-role", "no/slash"),
     ("create", "--store", "bucket", "--yes"), ("explode",)],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_without_a_traceback(cloud_desk: CloudDesk, arguments: tuple[str, ...]) -> None:
    result = cloud_desk.run("iam", *arguments)
    assert result.exit_code in (ExitCode.USAGE, ExitCode.CONFLICT)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["show", "create", "delete"])
def test_each_has_help_with_an_example(cloud_desk: CloudDesk, name: str) -> None:
    assert f"Example: fleetctl iam {name}" in cloud_desk.run("iam", name, "--help").stdout
