"""The evaluator of policies, and with it: what an instance's role can do to what is not its run's."""

from __future__ import annotations

from typing import Any

import pytest

from spotheal.agent.protocol.names import StoreUrl
from spotheal.iam import policies
from spotheal.iam.evaluation import Question, is_allowed

RUN = "01J0"
SCOPE = policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", "team/job"), run=RUN)
PLAIN = [policies.instance_role(SCOPE)]
ROLE = [*PLAIN, policies.instance_with_rescue(SCOPE), policies.instance_of_sweep(SCOPE)]
EC2 = "arn:aws:ec2:us-west-2:123456789012"
HERE = {"aws:RequestedRegion": ["us-west-2"]}


def of(run: str, state: str = "current") -> dict[str, list[str]]:
    return {**HERE, "ec2:ResourceTag/spotheal:run": [run], "ec2:ResourceTag/spotheal:state": [state]}


def allows(action: str, resource: str, **context: Any) -> bool:
    return is_allowed(ROLE, Question(action, resource, context or HERE))


@pytest.mark.parametrize(
    ("statement", "question", "expected"),
    [
        ({"Action": "s3:Get*", "Resource": "*"}, Question("s3:GetObject", "x"), True),
        ({"Action": "S3:getobject", "Resource": "*"}, Question("s3:GetObject", "x"), True),
        ({"Action": "s3:GetObject", "Resource": "a/?"}, Question("s3:GetObject", "a/b"), True),
        ({"Action": "s3:GetObject", "Resource": "a/?"}, Question("s3:GetObject", "a/bc"), False),
        ({"Condition": {"StringEquals": {"k": "v"}}}, Question("a:b", "x"), False),
        ({"Condition": {"StringEqualsIfExists": {"k": "v"}}}, Question("a:b", "x"), True),
        ({"Condition": {"Null": {"k": "false"}}}, Question("a:b", "x", {"k": ["1"]}), True),
        ({"Condition": {"Null": {"k": "true"}}}, Question("a:b", "x", {"k": ["1"]}), False),
        ({"Condition": {"ForAllValues:StringEquals": {"k": ["1"]}}}, Question("a:b", "x", {"k": ["1", "3"]}), False),
        ({"Condition": {"ForAllValues:StringEquals": {"k": ["1"]}}}, Question("a:b", "x"), True),
    ],
)
def test_a_statement_is_read_as_iam_reads_it(statement: dict[str, Any], question: Question, expected: bool) -> None:
    whole = {"Effect": "Allow", "Action": "*", "Resource": "*", **statement}
    assert is_allowed([{"Statement": [whole]}], question) is expected


def test_a_deny_wins_and_what_is_not_known_is_an_error() -> None:
    allow = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    deny = {"Effect": "Deny", "Action": "s3:DeleteObject", "Resource": "*"}
    assert not is_allowed([{"Statement": [allow, deny]}], Question("s3:DeleteObject", "x"))
    assert is_allowed([{"Statement": [allow, deny]}], Question("s3:GetObject", "x"))
    for strange in ({**allow, "NotAction": "x"}, {**allow, "Condition": {"IpAddress": {"k": "1"}}}):
        with pytest.raises(ValueError, match="cannot evaluate"):
            is_allowed([{"Statement": [strange]}], Question("a:b", "x", {"k": ["1"]}))


@pytest.mark.parametrize("action", ["ec2:AttachVolume", "ec2:DetachVolume", "ec2:TerminateInstances",
                                    "ec2:CancelSpotFleetRequests", "ec2:DeleteFleets", "ec2:ModifyFleet"])  # fmt: skip
def test_the_runs_own_things_may_be_changed_and_anothers_may_not(action: str) -> None:
    kind = {"ec2:TerminateInstances": "instance", "ec2:CancelSpotFleetRequests": "spot-fleet-request",
            "ec2:DeleteFleets": "fleet", "ec2:ModifyFleet": "fleet"}.get(action, "volume")  # fmt: skip
    assert allows(action, f"{EC2}:{kind}/x", **of(RUN))
    assert not allows(action, f"{EC2}:{kind}/x", **of("01OTHER"))
    assert not allows(action, f"{EC2}:{kind}/x"), "no tag at all"
    assert not allows(action, f"arn:aws:ec2:eu-west-1:123456789012:{kind}/x", **of(RUN)), "another region"
    assert not allows(action, f"arn:aws:ec2:us-west-2:999999999999:{kind}/x", **of(RUN)), "another account"


def test_only_instances_of_a_sweep_may_resize_the_fleet_and_only_rescued_ones_write_a_schedule() -> None:
    resize = Question("ec2:ModifyFleet", f"{EC2}:fleet/x", of(RUN))
    schedule = f"arn:aws:scheduler:us-west-2:123456789012:schedule/default/spotheal-{RUN}"
    assert not is_allowed(PLAIN, resize)
    assert not is_allowed(PLAIN, Question("scheduler:UpdateSchedule", schedule, HERE))
    assert is_allowed(ROLE, resize)


def test_another_jobs_volume_and_snapshot_cannot_be_tagged_as_ours_copied_or_deleted() -> None:
    theirs = of("01OTHER")
    assert not allows("ec2:CreateTags", f"{EC2}:volume/v", **theirs, **{"aws:TagKeys": ["spotheal:state"]})
    assert not allows("ec2:CreateTags", f"{EC2}:volume/v", **of(RUN), **{"aws:TagKeys": ["spotheal:run"]})
    assert allows("ec2:CreateTags", f"{EC2}:volume/v", **of(RUN), **{"aws:TagKeys": ["spotheal:state"]})
    assert not allows("ec2:CreateSnapshot", f"{EC2}:volume/v", **theirs)
    assert not allows("ec2:CreateVolume", "arn:aws:ec2:us-west-2::snapshot/s", **theirs)
    assert not allows("ec2:DeleteVolume", f"{EC2}:volume/v", **of("01OTHER", "superseded"))
    assert not allows("ec2:DeleteVolume", f"{EC2}:volume/v", **of(RUN, "current")), "only what is superseded"
    assert allows("ec2:DeleteVolume", f"{EC2}:volume/v", **of(RUN, "superseded"))
    assert not allows("ec2:DeleteSnapshot", "arn:aws:ec2:us-west-2::snapshot/s", **theirs)


def test_only_the_stores_own_prefix_is_read_written_and_listed() -> None:
    assert allows("s3:GetObject", "arn:aws:s3:::bucket/team/job/run/status.json")
    assert not allows("s3:GetObject", "arn:aws:s3:::bucket/team/other/run/status.json")
    assert not allows("s3:PutObject", "arn:aws:s3:::other/team/job/run/status.json")
    assert allows("s3:ListBucket", "arn:aws:s3:::bucket", **{"s3:prefix": ["team/job/x"]})
    assert not allows("s3:ListBucket", "arn:aws:s3:::bucket", **{"s3:prefix": ["team/other/"]})


@pytest.mark.parametrize(
    "action",
    ["iam:CreateUser", "iam:PutRolePolicy", "ec2:RunInstances", "s3:PutBucketPolicy", "ec2:ModifyInstanceAttribute",
     "ec2:RequestSpotFleet", "sts:AssumeRole"],
)  # fmt: skip
def test_what_nobody_needs_on_an_instance_is_not_allowed(action: str) -> None:
    assert not allows(action, "*", **of(RUN))


def test_the_schedule_is_the_runs_own_and_only_its_role_is_passed() -> None:
    schedule = "arn:aws:scheduler:us-west-2:123456789012:schedule/default/spotheal-0123456789ab-"
    assert allows("scheduler:UpdateSchedule", schedule + RUN)
    assert not allows("scheduler:UpdateSchedule", schedule + "01OTHER")
    passed = {"iam:PassedToService": ["scheduler.amazonaws.com"]}
    assert allows("iam:PassRole", "arn:aws:iam::123456789012:role/spotheal-rescue-job", **passed)
    assert not allows("iam:PassRole", "arn:aws:iam::123456789012:role/admin", **passed)
    assert not allows("iam:PassRole", "arn:aws:iam::123456789012:role/spotheal-rescue-job",
                      **{"iam:PassedToService": ["ec2.amazonaws.com"]})  # fmt: skip
