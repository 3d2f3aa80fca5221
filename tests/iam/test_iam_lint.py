"""parliament reads every policy that is generated, as IAM's own checks would; what it finds has its reason here."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.protocol.names import StoreUrl
from spotheal.iam import policies

_SPLIT = "one call asks for two kinds of resources with different conditions, so each kind has its statement"
_ANY = "takes images, subnets and templates of anybody's; as in AWS's own policies for it"
# (document, parliament's issue) -> actions, and why it is right as it is.
JUSTIFIED: dict[tuple[str, str], tuple[set[str], str]] = {
    ("instance_role", "RESOURCE_MISMATCH"): ({"ec2:CreateVolume", "ec2:CreateSnapshot"}, _SPLIT),
    ("operator", "RESOURCE_MISMATCH"): ({"ec2:CreateVolume"}, _SPLIT),
    ("operator", "RESOURCE_STAR"): (
        {"ec2:CreateFleet", "ec2:RequestSpotFleet", "ec2:RunInstances", "kms:DescribeKey"},
        f"{_ANY}; the key of [volume] snapshot is known only when it is looked at, and the call reads no secret",
    ),
    ("fleet_role", "RESOURCE_STAR"): (
        {"ec2:RequestSpotInstances", "ec2:RunInstances", "ec2:TerminateInstances"},
        "Spot Fleet's own role; as AWS's AmazonEC2SpotFleetTaggingRole",
    ),
    ("rescue_role", "RESOURCE_MISMATCH"): ({"ec2:ModifyFleet", "ec2:ModifySpotFleetRequest"}, _SPLIT),
}
_STORE = StoreUrl("bucket", "team")
SCOPES = {
    "any run": policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", "")),
    "one run": policies.Scope(
        "123456789012", "us-west-2", _STORE, run="01J0", job="cifar", secrets=("ssm:/team/x", "secretsmanager:db"),
        kms_key="arn:aws:kms:us-west-2:123456789012:key/1", topic="arn:aws:sns:us-west-2:123456789012:mine",
    ),
    "China": policies.Scope("123456789012", "cn-north-1", _STORE),
}  # fmt: skip
VOLUMES = SCOPES["any run"].ec2("volume")
ROLES_OF_SERVICES = (policies.fleet_role, policies.rescue_role)
EVERY = {make.__name__: make for some in (*policies.DOCUMENTS.values(), ROLES_OF_SERVICES) for make in some}


@pytest.fixture(scope="module")
def parliament() -> Any:
    """It asks setuptools' pkg_resources, which newer ones no longer have, for the paths of two files of its own."""

    def path(package: str, name: str) -> str:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        return str(Path(spec.origin).parent / name)

    stand_in = types.ModuleType("pkg_resources")
    stand_in.resource_filename = path  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        if importlib.util.find_spec("pkg_resources") is None:
            patched.setitem(sys.modules, "pkg_resources", stand_in)
        return pytest.importorskip("parliament", reason="parliament is not installed: pip install '.[test]'")


def found_in(parliament: Any, document: dict[str, Any]) -> dict[str, set[str]]:
    """Actions by issue; the whole detail where an issue is no matter of an action."""
    found: dict[str, set[str]] = {}
    for one in parliament.analyze_policy_string(json.dumps(document)).findings:
        details = one.detail if isinstance(one.detail, list) else [one.detail]
        found.setdefault(one.issue, set()).update(
            str(each["action"]) if isinstance(each, dict) else str(each) for each in details
        )
    return found


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", EVERY)
def test_a_policy_has_no_finding_but_those_with_a_reason(parliament: Any, name: str, scope: str) -> None:
    found = found_in(parliament, EVERY[name](SCOPES[scope]))
    expected = {issue: actions for (document, issue), (actions, _) in JUSTIFIED.items() if document == name}
    assert found == expected


@pytest.mark.parametrize(
    ("statement", "issue"),
    [({"Action": ["ec2:Attach"]}, "UNKNOWN_ACTION"), ({"Resource": "*"}, "RESOURCE_STAR"),
     ({"Condition": {"StringEquals": {"ec2:NoSuchKey": "x"}}}, "UNKNOWN_CONDITION_FOR_ACTION")],
)  # fmt: skip
def test_a_fault_in_a_policy_would_be_found(parliament: Any, statement: dict[str, Any], issue: str) -> None:
    sound = {"Effect": "Allow", "Action": ["ec2:DeleteVolume"], "Resource": VOLUMES}
    assert found_in(parliament, {"Version": "2012-10-17", "Statement": [sound]}) == {}
    assert issue in found_in(parliament, {"Version": "2012-10-17", "Statement": [{**sound, **statement}]})


@pytest.mark.parametrize("make", [lambda s: policies.trust("ec2.amazonaws.com"), policies.trainer_trust])
def test_who_may_take_a_role_is_no_everybody(make: Callable[[policies.Scope], dict[str, Any]]) -> None:
    """parliament reads no trust policies."""
    for scope in SCOPES.values():
        for statement in make(scope)["Statement"]:
            (principal,) = statement["Principal"].values()
            assert "*" not in str(principal)
            assert ":root" not in str(principal) or statement["Condition"]["ArnLike"]["aws:PrincipalArn"]
