"""docs/permissions.md says which verb needs which permission: held against what verbs call, and the policies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fleet_desk import Desk, desk, moto_clients, wheels

from spotheal.agent.protocol.names import Phase
from spotheal.fleet import cli
from spotheal.iam.calls import CALLS, Who

__all__ = ["desk", "moto_clients", "wheels"]
TEXT = (Path(__file__).resolve().parents[2] / "docs/permissions.md").read_text()
EVERYWHERE = {"sts:GetCallerIdentity", "s3:ListBucket", "s3:GetObject"}
_FOUND = re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXT, re.MULTILINE)
ROWS = {verb: set(re.findall(r"`(\w[\w-]*:\w+)`", row)) for verb, row in _FOUND}
ALLOWED = {call.action for call in CALLS if call.who & {Who.OPERATOR, Who.ADMINISTRATOR}}
BY_OPERATION = {name: call.action for call in CALLS if call.who & {Who.OPERATOR} for name in call.names}


def test_every_verb_that_speaks_to_aws_has_its_row() -> None:
    without_aws = {"validate", "rehearse", "cloud", "iam"}  # iam's is the administrator's policy
    assert set(cli.VERBS) - without_aws - set(ROWS) <= {"sweep", "batch"}  # which are the other verbs, many times


def test_every_permission_that_is_named_is_in_a_policy_and_every_one_of_the_operators_is_named() -> None:
    named = set().union(*ROWS.values()) | EVERYWHERE
    assert named - ALLOWED == set()
    assert {call.action for call in CALLS if Who.OPERATOR in call.who} - named == set()


class Recorded:
    """The operations that reach AWS, EC2's and the others'."""

    def __init__(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations: set[str] = set()
        self._wrap(monkeypatch, desk.account.rules, "call")
        for client in desk.account._others.values():
            self._wrap(monkeypatch, client, "_make_api_call")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def recorded(operation: str, *more: Any, **keywords: Any) -> Any:
            self.operations.add(operation)
            return real(operation, *more, **keywords)

        monkeypatch.setattr(owner, name, recorded)


def test_a_verb_calls_nothing_that_its_row_does_not_name(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    done = desk.request()
    desk.pass_time(60)
    recorded = Recorded(desk, monkeypatch)

    def missing(*arguments: str) -> set[str]:
        recorded.operations.clear()
        result = desk.run(*arguments)
        assert 0 == result.exit_code, result.output
        assert recorded.operations
        needed = {action for name, action in BY_OPERATION.items() if name.partition(":")[2] in recorded.operations}
        return needed - EVERYWHERE - ROWS[arguments[0]]

    for arguments in (["status"], ["status", "--all"], ["logs"], ["results", "ls"], ["cancel", "--yes"]):
        assert missing(*arguments) == set()
    desk.pass_time(120)
    store = desk.store(done["run"])
    store.write_status({**(store.read_status() or {}), "phase": Phase.DONE.value})
    store.put_bytes("results/model", b"x")
    assert missing("clean", "cifar", "--store", "--all", "--yes") == set()
    assert {"DeleteObject", "DescribeSnapshots"} <= recorded.operations
