"""The printed policies of people, asked as AWS asks them, and held against IAM's limits in every partition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import botocore.session
import pytest

from spotheal.agent.protocol.names import StoreUrl, partition_of
from spotheal.fleet.account.roles import INLINE_CHARACTERS_MAX
from spotheal.iam import policies
from spotheal.iam.calls import Who
from spotheal.iam.evaluation import Question, is_allowed

ACCOUNT, REGION = "123456789012", "us-west-2"
SCOPE = policies.Scope(ACCOUNT, REGION, StoreUrl("bucket", ""))
OPERATOR, ADMINISTRATOR, BATCH = "operator", "administrator", "batch"
WHOSE = {
    OPERATOR: [policies.operator(SCOPE), policies.operator_of_store(SCOPE)],
    BATCH: [policies.operator_of_batch(SCOPE)],
    ADMINISTRATOR: [policies.administrator(SCOPE)],
}
MANAGED_POLICY_CHARACTERS, POLICIES_OF_AN_IDENTITY = 6_144, 10  # IAM user guide, "IAM and AWS STS quotas"
JOB = "a-job-whose-name-is-as-long-as-one-may-be-0123456789-0123456789"


def ec2(kind: str, name: str = "*") -> str:
    return f"arn:aws:ec2:{REGION}:{ACCOUNT}:{kind}/{name}"


def role(name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:role/{name}"


def tags(where: str, **values: str) -> dict[str, tuple[str, ...]]:
    return {f"{where}/{name if name == 'Name' else f'spotheal:{name}'}": (value,) for name, value in values.items()}


def asks(who: str, action: str, resource: str, context: Mapping[str, tuple[str, ...]] | None = None) -> bool:
    return is_allowed(WHOSE[who], Question(action, resource, {"aws:RequestedRegion": (REGION,), **(context or {})}))


# what the call is for -> (who, action, resource, context)
NEEDED: dict[str, tuple[str, str, str, dict[str, tuple[str, ...]]]] = {
    "volume create": (
        OPERATOR, "ec2:CreateVolume", ec2("volume"), tags("aws:RequestTag", Name="job-data", state="new")),
    "the volume of a request": (
        OPERATOR, "ec2:CreateVolume", ec2("volume"), tags("aws:RequestTag", run="r", job="j", state="new")),
    "the end of a machine that fills a volume": (
        OPERATOR, "ec2:TerminateInstances", ec2("instance", "i-1"), tags("ec2:ResourceTag", purpose="prepare")),
    "secret ls": (
        OPERATOR, "ssm:GetParametersByPath", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/spotheal/job", {}),
    "secret put": (
        OPERATOR, "ssm:PutParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/spotheal/job/TOKEN", {}),
    "the tags of an EC2 Fleet": (
        OPERATOR, "ec2:CreateTags", ec2("fleet"),
        {"ec2:CreateAction": ("CreateFleet",), **tags("aws:RequestTag", run="r")}),
    "iam create puts a role into its profile": (
        ADMINISTRATOR, "iam:PassRole", role("spotheal-job-cifar"), {"iam:PassedToService": ("ec2.amazonaws.com",)}),
    "batch create puts the hosts' role into its profile": (
        ADMINISTRATOR, "iam:PassRole", role("spotheal-batch-host-cifar"),
        {"iam:PassedToService": ("ec2.amazonaws.com",)}),
    "batch image push by Docker with containerd's store": (
        BATCH, "ecr:BatchGetImage", f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/spotheal", {}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str, str, dict[str, tuple[str, ...]]]] = {
    "a volume without a tag of ours": (OPERATOR, "ec2:CreateVolume", ec2("volume"), {}),
    "the end of a machine of somebody else": (
        OPERATOR, "ec2:TerminateInstances", ec2("instance", "i-1"), tags("ec2:ResourceTag", Name="web")),
    "parameters of somebody else": (
        OPERATOR, "ssm:GetParametersByPath", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/other", {}),
    "another role for an instance": (
        ADMINISTRATOR, "iam:PassRole", role("admin"), {"iam:PassedToService": ("ec2.amazonaws.com",)}),
    "an instance's role for another service": (
        ADMINISTRATOR, "iam:PassRole", role("spotheal-instance"), {"iam:PassedToService": ("lambda.amazonaws.com",)}),
}  # fmt: skip


@pytest.mark.parametrize("call", NEEDED)
def test_the_printed_policy_allows(call: str) -> None:
    assert asks(*NEEDED[call])


@pytest.mark.parametrize("call", REFUSED)
def test_the_printed_policy_refuses(call: str) -> None:
    assert not asks(*REFUSED[call])


# ---------------------------------------------------------------------------------------------------------- IAM's sizes
def longest_regions() -> list[str]:
    """The region with the longest name of each partition."""
    session = botocore.session.get_session()
    every = {name: session.get_available_regions("ec2", name) for name in session.get_available_partitions()}
    return [max(regions, key=len) for regions in every.values() if regions]


def scopes(region: str) -> Iterable[policies.Scope]:
    """Names as long as AWS takes them, and every option."""
    bucket = f"spotheal-{ACCOUNT}-{region}".ljust(63, "b")
    for store in (StoreUrl(f"spotheal-{ACCOUNT}-{region}", ""), StoreUrl(bucket, "teams/vision/experiments/2026")):
        yield policies.Scope(ACCOUNT, region, store)
        yield policies.Scope(
            ACCOUNT, region, store, instance_role="r" * 64, fleet_role="f" * 64,
            kms_key=f"arn:{partition_of(region)}:kms:{region}:{ACCOUNT}:key/mrk-{'0' * 32}",
        )  # fmt: skip


def size(document: dict[str, Any]) -> int:
    """Characters as IAM counts them: without white space between them."""
    return len(json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize("region", longest_regions())
def test_what_one_job_can_need_fits_the_inline_policies_of_a_role(region: str) -> None:
    for scope in scopes(region):
        of_job = replace(scope, job=JOB, store=scope.store.below(JOB), results=StoreUrl("r" * 63, "results"))
        every = [make(of_job) for make in policies.DOCUMENTS[Who.INSTANCE]]
        assert sum(map(size, every)) <= INLINE_CHARACTERS_MAX


@pytest.mark.parametrize("region", longest_regions())
def test_every_policy_of_people_fits_a_managed_policy_in_every_partition(region: str) -> None:
    of_people = (Who.OPERATOR, Who.ADMINISTRATOR)
    documents = [make for who in of_people for make in policies.DOCUMENTS[who]]
    assert len(documents) <= POLICIES_OF_AN_IDENTITY
    for scope in scopes(region):
        sizes = {make.__name__: size(make(scope)) for make in documents}
        assert {name: each for name, each in sizes.items() if each > MANAGED_POLICY_CHARACTERS} == {}


def test_an_operator_of_one_job_ends_no_machine_that_fills_a_volume_of_another() -> None:
    document = policies.operator(replace(SCOPE, job="ours"))
    for job, answer in (("ours", True), ("theirs", False)):
        context = tags("ec2:ResourceTag", purpose="prepare", job=job)
        assert is_allowed([document], Question("ec2:TerminateInstances", ec2("instance", "i-1"), context)) is answer
