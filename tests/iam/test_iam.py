"""The policies allow exactly the calls that the code makes, and those only on what is the run's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

import spotheal.agent.aws.ec2
import spotheal.fleet
from spotheal import userdata
from spotheal.agent.protocol.names import TAG_JOB, TAG_RUN, StoreUrl
from spotheal.iam import policies
from spotheal.iam.__main__ import main
from spotheal.iam.calls import CALLS, NOT_CALLS, Who

AGENT = Path(spotheal.agent.__file__).resolve().parent
FLEET = Path(spotheal.fleet.__file__).resolve().parent
SCOPE = policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", "team"), run="01J0")
SERVICES = ("service-quotas", "ec2-instance-connect", "ec2", "s3", "sts", "ssm", "iam", "pricing", "sns",
            "secretsmanager", "scheduler", "efs", "batch", "logs", "ecr")  # fmt: skip
CALL_AWS = ("aws/ec2.py", "aws/s3.py", "life/on_demand.py", "cage/secrets.py", "cage/trainer_role.py", "machine/efs.py")
IAM_NAMES = {"service-quotas": "servicequotas", "efs": "elasticfilesystem"}  # where IAM has another
# boto3's own, which stand for several operations; and words of our own classes that are API operations by chance.
TRANSFERS = {
    "download_file": ("HeadObject", "GetObject"),
    "upload_fileobj": ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload",
                       "AbortMultipartUpload"),
}  # fmt: skip
BY_CHANCE = {"list_commands", "publish"}


def _operations() -> dict[str, set[str]]:
    session = botocore.session.get_session()
    named: dict[str, set[str]] = {}
    for service in reversed(SERVICES):
        for operation in session.get_service_model(service).operation_names:
            named[xform_name(operation)] = {f"{IAM_NAMES.get(service, service)}:{operation}"}
    return {**named, **{name: {f"s3:{one}" for one in several} for name, several in TRANSFERS.items()}}


OPERATIONS = _operations()


def _called(tree: ast.AST) -> set[str]:
    """Names of methods called, and of the operations that are named to a paginator."""
    called: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add(node.func.attr)
            if node.func.attr in ("get_paginator", "_pages") and isinstance(node.args[0], ast.Constant):
                called.add(str(node.args[0].value))
    return called


def _apis(names: Iterable[str]) -> set[str]:
    return {api for name in names if name not in BY_CHANCE for api in OPERATIONS.get(name, ())}


def _methods(path: Path, cls: str) -> dict[str, set[str]]:
    """API operations of each method of a class, those of its own methods that it calls included."""
    tree = ast.parse(path.read_text())
    (body,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls]
    calls = {node.name: _called(node) for node in body.body if isinstance(node, ast.FunctionDef)}
    reached = {name: set(names) for name, names in calls.items()}
    for _ in calls:
        for names in reached.values():
            names |= {inner for name in list(names) if name in calls for inner in calls[name]}
    return {name: _apis(names) for name, names in reached.items()}


def made_by_the_instance() -> set[str]:
    made = _apis(set().union(*(_called(ast.parse((AGENT / name).read_text())) for name in CALL_AWS)))
    source = (Path(userdata.__file__).parent / "bootstrap.py").read_text()
    made |= {f"ec2:{name}" for name in re.findall(r"aws\.ec2\(\s*\"(\w+)\"", source)}
    if "TopicArn=" in (AGENT / "money/notify.py").read_text():  # `publish` is a word of ours, too
        made.add("sns:Publish")
    return made | ({"s3:GetObject"} if '"GET"' in source else set())


def made_by_the_operator() -> set[str]:
    ours = {**_methods(AGENT / "aws/ec2.py", "Ec2"), **_methods(AGENT / "aws/s3.py", "Store")}
    made: set[str] = set()
    for path in (path for path in FLEET.rglob("*.py") if "rehearsal" not in path.parts):
        names = _called(ast.parse(path.read_text()))
        made |= _apis(name for name in names if name not in ours)
        made |= {api for name in names for api in ours.get(name, ())}
    return made


def allowed(who: Who) -> set[str]:
    return {name for call in CALLS if who in call.who for name in call.names}


def statements(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["Statement"]
    return found


def test_an_instance_is_allowed_every_call_it_makes_and_no_other() -> None:
    assert made_by_the_instance() == allowed(Who.INSTANCE)


def test_an_operator_is_allowed_every_call_fleetctl_makes() -> None:
    assert made_by_the_operator() - allowed(Who.OPERATOR) - allowed(Who.ADMINISTRATOR) == set()


def test_making_roles_is_no_part_of_an_operators_policy() -> None:
    """Who may write a role's policy and pass it may do everything."""
    assert {name for name in allowed(Who.OPERATOR) if name.startswith("iam:")} == {
        "iam:GetRole", "iam:GetRolePolicy", "iam:GetInstanceProfile", "iam:ListRolePolicies",
        "iam:ListAttachedRolePolicies", "iam:CreateServiceLinkedRole",  # AWS's own roles, with AWS's own policies
    }  # fmt: skip
    made, passed = statements(policies.administrator(SCOPE))
    assert passed["Action"] == ["iam:PassRole"] and passed["Condition"]
    assert set(made["Action"]) == {name for name in allowed(Who.ADMINISTRATOR)}
    assert all(":role/" in one or ":instance-profile/" in one for one in made["Resource"])


def test_only_the_modules_named_here_call_aws_from_an_instance() -> None:
    ours = {*_methods(AGENT / "aws/ec2.py", "Ec2"), *_methods(AGENT / "aws/s3.py", "Store"), "create_snapshot"}
    for path in AGENT.rglob("*.py"):
        if path.relative_to(AGENT).as_posix() not in CALL_AWS:
            names = _called(ast.parse(path.read_text())) - ours
            assert _apis(names) == set(), path


@pytest.mark.parametrize("who", [Who.INSTANCE, Who.OPERATOR])
def test_the_documents_hold_the_table_and_passing_roles_alone_besides(who: Who) -> None:
    scope = replace(SCOPE, kms_key="arn:aws:kms:us-west-2:123456789012:key/1")
    found = [statement for document in policies.DOCUMENTS[who] for statement in statements(document(scope))]
    named = {action for statement in found for action in statement["Action"]}
    of_keys = {action for action in NOT_CALLS if action.startswith("kms:")}
    more = set(NOT_CALLS) if who is Who.OPERATOR else {"iam:PassRole", *of_keys}
    assert named == {call.action for call in CALLS if who in call.who} | more


def test_every_change_of_ec2_by_an_instance_asks_for_the_runs_tag() -> None:
    for statement in statements(policies.instance_role(SCOPE)):
        writes = [a for a in statement["Action"] if a.startswith("ec2:") and not a.startswith("ec2:Describe")]
        if writes and statement["Sid"] != "TagNew":
            asked = statement["Condition"]["StringEquals"]
            assert asked.get(f"ec2:ResourceTag/{TAG_RUN}", asked.get(f"aws:RequestTag/{TAG_RUN}")) == "01J0", statement
        if writes:
            assert statement["Resource"] != "*"


def test_without_a_run_the_tag_must_be_there_at_least() -> None:
    anywhere = policies.instance_role(policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", "")))
    (statement,) = [s for s in statements(anywhere) if s["Sid"] == "OnTheRun"]
    assert statement["Condition"] == {"Null": {f"ec2:ResourceTag/{TAG_RUN}": "false"}}


def test_an_instance_can_make_nothing_another_runs() -> None:
    assert TAG_RUN not in policies.TAG_KEYS and TAG_JOB not in policies.TAG_KEYS
    (own,) = [s for s in statements(policies.instance_role(SCOPE)) if s["Sid"] == "TagOwn"]
    assert own["Condition"]["ForAllValues:StringEquals"] == {"aws:TagKeys": list(policies.TAG_KEYS)}
    assert f"ec2:ResourceTag/{TAG_RUN}" in own["Condition"]["StringEquals"]


def test_an_instance_sets_only_tags_of_the_closed_list_on_what_exists() -> None:
    """Read from the code: each `.tag(ids, {TAG_X: …})` outside the tests of creation."""
    constants = {f"TAG_{key.removeprefix('spotheal:').replace('-', '_').upper()}" for key in policies.TAG_KEYS}
    used: set[str] = set()
    for path in AGENT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "tag":
                for argument in node.args:
                    keys = argument.keys if isinstance(argument, ast.Dict) else []
                    used |= {key.id for key in keys if isinstance(key, ast.Name)}
    assert used and used <= constants


def test_deleting_can_be_left_out() -> None:
    def deletes(document: dict[str, Any]) -> set[str]:
        return {a for s in statements(document) for a in s["Action"] if a.startswith("ec2:Delete")}

    assert deletes(policies.instance_role(SCOPE)) == {"ec2:DeleteVolume", "ec2:DeleteSnapshot", "ec2:DeleteFleets"}
    assert deletes(policies.instance_role(SCOPE, may_delete=False)) == {"ec2:DeleteFleets"}


def test_a_current_volume_cannot_be_deleted() -> None:
    (statement,) = [s for s in statements(policies.instance_role(SCOPE)) if "ec2:DeleteVolume" in s["Action"]]
    assert statement["Condition"]["StringEquals"]["ec2:ResourceTag/spotheal:state"] == ["moving", "superseded"]


def test_an_instance_reads_and_writes_only_below_the_stores_prefix() -> None:
    for statement in statements(policies.instance_role(SCOPE)):
        if statement["Sid"] == "Store":
            assert statement["Resource"] == "arn:aws:s3:::bucket/team/*"
        if statement["Sid"] == "ListStore":
            assert statement["Condition"] == {"StringLike": {"s3:prefix": ["team/*"]}}


def test_a_customer_key_is_granted_to_aws_resources_only() -> None:
    key = "arn:aws:kms:us-west-2:123456789012:key/1"
    scope = policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", ""), kms_key=key)
    (grant,) = [s for s in statements(policies.instance_role(scope)) if "kms:CreateGrant" in s["Action"]]
    assert grant["Resource"] == key
    assert grant["Condition"] == {
        "StringLike": {"kms:ViaService": ["ec2.us-west-2.amazonaws.com*"]},
        "Bool": {"kms:GrantIsForAWSResource": "true"},
    }


def test_a_customer_key_is_used_through_aws_services_only() -> None:
    key = "arn:aws:kms:us-west-2:123456789012:key/1"
    scope = policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", ""), kms_key=key)
    for make in (policies.instance_role, policies.instance_with_key, policies.operator_of_store):
        found = [s for s in statements(make(scope)) if any(action.startswith("kms:") for action in s["Action"])]
        assert ["UseKey", "GrantKey"] == [s["Sid"] for s in found]
        assert {key} == {s["Resource"] for s in found}
        assert all(s["Condition"]["StringLike"]["kms:ViaService"] for s in found)


@pytest.mark.parametrize(("region", "start"), [("cn-north-1", "arn:aws-cn:"), ("us-gov-west-1", "arn:aws-us-gov:")])
def test_other_partitions_have_their_own_arns(region: str, start: str) -> None:
    scope = policies.Scope("123456789012", region, StoreUrl("bucket", ""))
    for statement in statements(policies.instance_role(scope)):
        resources = statement["Resource"] if isinstance(statement["Resource"], list) else [statement["Resource"]]
        assert all(resource == "*" or resource.startswith(start) for resource in resources)


@pytest.mark.parametrize(
    "name",
    ["instance-role", "instance-trust", "fleet-role", "fleet-trust", "operator", "operator-store", "operator-efs",
     "operator-batch", "administrator"],
)
def test_documents_are_printed_and_fit_iams_limit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--account", "123456789012", "--region", "us-west-2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["Version"] == "2012-10-17"
    sids = [statement.get("Sid", "") for statement in document["Statement"]]
    assert len(sids) == len(set(sids)) and all(re.fullmatch(r"[A-Za-z0-9]*", sid) for sid in sids)
    assert len(re.sub(r"\s", "", json.dumps(document))) <= 6_144  # of a managed policy
