"""The recording of calls to AWS: who called, and what is said where calls and policies differ."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aws_calls
import pytest

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.services.client import InMemoryS3

HERE = Path(__file__).resolve().parents[1]
ALLOWED = {"instance": {"s3:GetObject"}, "operator": {"s3:GetObject", "ec2:DescribeVpcs"}}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> set[aws_calls.Note]:
    """Of this test alone, and no part of what the suite recorded."""
    monkeypatch.setattr(aws_calls, "notes", set())
    return aws_calls.notes


def within(module: str, act: Callable[[], Any]) -> Any:
    """Call `act` from a function of that module."""

    def call(act: Callable[[], Any]) -> Any:
        return act()

    return types.FunctionType(call.__code__, {"__name__": module})(act)


def test_what_the_agent_asks_for_is_an_instances_and_what_fleetctl_asks_for_an_operators(
    notes: set[aws_calls.Note],
) -> None:
    store = Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/r"))
    within("spotheal.agent.life.stages", lambda: store.get_bytes("x"))
    assert notes == {("instance", "s3:GetObject")}
    within("spotheal.fleet.verbs.status", lambda: within("spotheal.agent.record.ledger", lambda: store.delete("x")))
    assert notes == {("instance", "s3:GetObject"), ("operator", "s3:DeleteObject")}


def test_what_a_test_or_the_rehearsal_asks_for_is_nobodys(notes: set[aws_calls.Note]) -> None:
    store = Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/r"))
    store.get_bytes("x")
    assert notes == {(aws_calls.NOBODY, "s3:GetObject")}
    notes.clear()
    within("spotheal.fleet.rehearsal.scenarios.run", lambda: store.get_bytes("x"))
    assert notes == {(aws_calls.NOBODY, "s3:GetObject")}
    notes.clear()
    InMemoryS3("bucket").list_objects_v2(Bucket="bucket")
    assert notes == set()


def test_a_call_without_permission_is_a_fault_of_any_run() -> None:
    found = {("instance", "ec2:DescribeVpcs"), ("operator", "ec2:DescribeVpcs"), ("instance", "s3:GetObject")}
    assert aws_calls.faults(found, ALLOWED, is_whole=False) == [
        "instance called ec2:DescribeVpcs, which no policy of instances allows"
    ]


def test_what_nobody_asked_for_must_be_allowed_to_somebody() -> None:
    assert aws_calls.faults({(aws_calls.NOBODY, "ec2:DescribeVpcs")}, ALLOWED, is_whole=False) == []
    assert len(aws_calls.faults({(aws_calls.NOBODY, "ec2:DescribeTags")}, ALLOWED, is_whole=False)) == 1


def test_a_permission_that_nothing_needed_is_a_fault_of_a_whole_run_alone() -> None:
    found = {("instance", "s3:GetObject"), ("operator", "s3:GetObject"), (aws_calls.NOBODY, "ec2:DescribeVpcs")}
    assert aws_calls.faults(found, ALLOWED, is_whole=False) == []
    assert aws_calls.faults(found, ALLOWED, is_whole=True) == [
        "operators are allowed ec2:DescribeVpcs, which none of them called in any test"
    ]


def test_what_iam_asks_about_without_a_call_is_held_against_the_policies_too() -> None:
    allowed = aws_calls.allowed()
    assert aws_calls.faults({("instance", "iam:PassRole")}, allowed, is_whole=False) == []
    assert len(aws_calls.faults({("instance", "ecr:PutImage")}, allowed, is_whole=False)) == 1
    wrong = aws_calls.faults({("instance", "ec2:DescribeVolumes")}, allowed, is_whole=True)
    assert wrong and not [line for line in wrong if "iam:PassRole" in line], "there is no such call"


CALLING = """
import types
from spotheal.fleet.rehearsal.services.client import InMemoryS3
def call(s3):
    s3.create_bucket(Bucket="b")
def test_it():
    types.FunctionType(call.__code__, {"__name__": "spotheal.agent.life.stages"})(InMemoryS3())
"""


def test_a_call_in_a_worker_that_no_policy_allows_fails_a_run_all_of_whose_tests_passed(tmp_path: Path) -> None:
    for name in ("conftest.py", "harness/aws_calls.py", "harness/longest_first.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "test_one.py").write_text(CALLING)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "-p", "xdist", "-n", "1"]
    only = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    refused = subprocess.run(command, cwd=tmp_path, env=only, capture_output=True, text=True, check=False)
    assert "1 passed" in refused.stdout and refused.returncode == 1, refused.stdout + refused.stderr
    assert "instance called s3:CreateBucket, which no policy of instances allows" in refused.stdout
