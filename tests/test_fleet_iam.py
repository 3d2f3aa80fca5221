"""fleetctl iam: policies printed, roles made once and taken away."""

from __future__ import annotations

import json

import boto3
import pytest
from cloud_desk import CloudDesk, cloud_desk, served

from spotheal.agent.errors import ExitCode

__all__ = ["cloud_desk", "served"]  # fixtures
FLEET_ROLE = "aws-ec2-spot-fleet-tagging-role"


def test_each_document_is_printed_as_iam_takes_it(cloud_desk: CloudDesk) -> None:
    every = cloud_desk.good("iam", "show")
    assert set(every) - {"schema_version"} == {
        "operator", "administrator", "instance-role", "instance-trust", "fleet-role", "fleet-trust"
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
    assert gone == ["instance profile spotheal-instance", "role spotheal-instance", f"role {FLEET_ROLE}"]
    assert cloud_desk.good("iam", "delete", "--yes")["deleted"] == []


def test_a_fleet_role_that_fleetctl_did_not_make_is_left(cloud_desk: CloudDesk) -> None:
    iam = boto3.client("iam", region_name="us-west-2")
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
