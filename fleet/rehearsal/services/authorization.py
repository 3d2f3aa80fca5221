"""What the policies of a caller allow, asked at every request: moto ignores the conditions of policies.

Instances have the policies of the role that they were launched with, as they stand in the account; where there is no
such role (a rehearsal makes none) those that `fleetctl request` would make. People have the policies that `fleetctl iam
show` prints, as their access key says (`PEOPLE`); any other key (`OWNER`) is the account's owner, who may do all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from spotheal.agent.protocol.names import StoreUrl, partition_of
from spotheal.fleet.rehearsal.ec2.world import World
from spotheal.fleet.rehearsal.services import questions
from spotheal.iam import policies
from spotheal.iam.calls import Who
from spotheal.iam.evaluation import Question, is_allowed

Documents = list[Mapping[str, Any]]
Policies = Callable[[str], Documents]  # of a role by name
# Access key id -> the caller. A user of `fleetctl cloud` has the first, and so may make roles too.
PEOPLE = {
    "AKIAREHEARSAL0000000": "user/operator-and-administrator",
    "AKIAOPERATOR00000000": "user/operator",
    "AKIAADMINISTRATOR000": "user/administrator",
}

OWNER = "AKIAOWNER00000000000"


def of_people(scope: policies.Scope) -> dict[str, Documents]:
    """The printed policies that each caller of `PEOPLE` has, with every option."""
    operator: Documents = [make(scope) for make in policies.DOCUMENTS[Who.OPERATOR]]
    administrator: Documents = [make(scope) for make in policies.DOCUMENTS[Who.ADMINISTRATOR]]
    shared, first, second = PEOPLE.values()
    return {shared: [*operator, *administrator], first: operator, second: administrator}


def printed_scope(world: World) -> policies.Scope:
    """As printed with the `--store` and `--kms-key` that are asked for: which a job has is its job.toml's to say."""
    key = f"arn:{partition_of(world.region)}:kms:{world.region}:{world.account}:key/*"
    return policies.Scope(world.account, world.region, StoreUrl("*", ""), kms_key=key)


class Authorization:
    """`refused` lists every no: (caller, action, resource). A caller is an instance's id, `role/NAME`, one of `PEOPLE`,
    or None for the owner. Each check returns what AWS says to a caller who may not, "" to one who may.

    `key_counts_as_prefix`: how S3 answers for an absent key to a caller who may list below a prefix only. True: the key
    itself counts as `s3:prefix`, so S3 says 404 below that prefix and 403 beside it. False: 403 everywhere. Two public
    projects measured the first (ceph/s3-tests `test_head_object_404_with_policy_prefix`, kopia PR 3072); AWS documents
    neither, so tests run with both.
    """

    def __init__(self, world: World, roles: Policies) -> None:
        self._world, self._roles = world, roles
        self._people = of_people(printed_scope(world))
        self.refused: list[tuple[str, str, str]] = []
        self.on_question: Callable[[str, Question], None] = lambda caller, question: None
        self.key_counts_as_prefix = True
        self.session_policies: dict[str, Mapping[str, Any]] = {}  # of callers that have taken a role with one

    def ec2(self, operation: str, params: Mapping[str, Any], caller: str | None) -> str:
        """`params`: as boto3's caller gave them."""
        if caller is None:
            return ""
        refused = self._all(caller, questions.of_ec2(self._world, operation, params))
        if not refused:
            return ""
        encoded = base64.b64encode(hashlib.sha512(refused.encode()).digest() * 12).decode()
        message = f"You are not authorized to perform this operation. {refused}"
        return f"{message} Encoded authorization failure message: {encoded}"

    def may_use_key(self, caller: str | None, key: str, actions: tuple[str, ...]) -> bool:
        """Whether the key is there and enabled, and EC2 may do all of this with it in the name of `caller`."""
        from moto.kms.models import kms_backends

        master_key = kms_backends[self._world.account][self._world.region].keys.get(key.rpartition("/")[2])
        if master_key is None or master_key.key_state != "Enabled":
            return False
        return caller is None or not self._all(caller, questions.of_key(self._world, key, actions))

    def s3(self, caller: str | None, method: str, path: str, query: str) -> str:
        """A request in path style."""
        return "" if caller is None else self._all(caller, questions.of_s3(method, path, query))

    def tells_what_is_missing(self, caller: str | None, path: str) -> bool:
        """Whether S3 answers 404 for an absent object: to a caller who may list it. Others get 403."""
        bucket, _, key = path.lstrip("/").partition("/")
        query = f"prefix={quote(key)}" if self.key_counts_as_prefix else ""
        return caller is None or self._refusal(caller, questions.of_s3("GET", bucket, query)) is None

    def request(self, caller: str | None, service: str, operation: str, body: bytes, path: str) -> str:
        """A request to another service."""
        questions_of_request = questions.of_request(self._world, service, operation, body, path)
        return "" if caller is None else self._all(caller, questions_of_request)

    def service(self, caller: str, action: str, resource: str) -> bool:
        """Whether `caller` may do one thing."""
        return not self._all(caller, [Question(action, resource)])

    def _all(self, caller: str, questions: Iterable[Question]) -> str:
        refused = self._refusal(caller, questions)
        if refused is None:
            return ""
        self.refused.append((caller, refused.action, refused.resource))
        return (
            f"User: {self._arn(caller)} is not authorized to perform: {refused.action} on resource: {refused.resource}"
            f" because no identity-based policy allows the {refused.action} action."
        )

    def _refusal(self, caller: str, questions: Iterable[Question]) -> Question | None:
        """The first of the questions that is answered with no."""
        documents = self._documents(caller)
        narrowed = [self.session_policies[caller]] if caller in self.session_policies else None
        region = {"aws:RequestedRegion": (self._world.region,)}
        for question in questions:
            whole = Question(question.action, question.resource, {**region, **question.context})
            self.on_question(caller, whole)
            if not is_allowed(documents, whole) or (narrowed is not None and not is_allowed(narrowed, whole)):
                return question
        return None

    def _documents(self, caller: str) -> Documents:
        if caller in self._people:
            return self._people[caller]
        instance = self._world.instances.get(caller)
        return self._roles(caller.split("/")[1] if caller.startswith("role/") else instance.role if instance else "")

    def _arn(self, caller: str) -> str:
        account, instance = self._world.account, self._world.instances.get(caller)
        if instance is not None:
            return f"arn:aws:sts::{account}:assumed-role/{instance.role}/{caller}"
        return f"arn:aws:iam::{account}:{caller}"
