"""What an instance's role allows, asked at every call that an instance makes: moto ignores the conditions of policies.

The policies are those of the role that the instance was launched with, as they stand in the account; where there is no
such role (a rehearsal makes none) the one that `fleetctl request` would make. Operators may do everything here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from spotheal.fleet.rehearsal.world import World
from spotheal.iam.evaluation import Context, Question, is_allowed

Policies = Callable[[str], list[Mapping[str, Any]]]  # of a role by name
_KINDS = {"vol-": "volume", "snap-": "snapshot", "i-": "instance", "sfr-": "spot-fleet-request", "fleet-": "fleet",
          "lt-": "launch-template"}  # fmt: skip
_OWN_TAGS = ("CreateVolume", "CreateSnapshot")


class Authorization:
    """`refused` lists every no: (caller, action, resource).

    `key_counts_as_prefix`: how S3 answers for an absent key to a caller who may list below a prefix only. True: the key
    itself counts as `s3:prefix`, so S3 says 404 below that prefix and 403 beside it. False: 403 everywhere. Two public
    projects measured the first (ceph/s3-tests `test_head_object_404_with_policy_prefix`, kopia PR 3072); AWS documents
    neither, so tests run with both.
    """

    def __init__(self, world: World, policies: Policies) -> None:
        self._world, self._policies = world, policies
        self.refused: list[tuple[str, str, str]] = []
        self.key_counts_as_prefix = True
        self.session_policies: dict[str, Mapping[str, Any]] = {}  # of callers that have taken a role with one

    def ec2(self, operation: str, params: Mapping[str, Any], caller: str | None) -> bool:
        """Whether `caller`, an instance id, may make this call of EC2's."""
        return caller is None or self._all(caller, self._of_ec2(operation, params))

    def s3(self, caller: str | None, method: str, path: str, query: str) -> bool:
        """The same for a request to S3, path style."""
        return caller is None or self._all(caller, _of_s3(method, path, query))

    def tells_what_is_missing(self, caller: str | None, path: str) -> bool:
        """Whether S3 answers 404 for an absent object: to a caller who may list it. Others get 403."""
        bucket, _, key = path.lstrip("/").partition("/")
        asked = f"prefix={quote(key)}" if self.key_counts_as_prefix else ""
        return caller is None or self._refusal(caller, _of_s3("GET", bucket, asked)) is None

    def service(self, caller: str | None, action: str, resource: str, context: Context | None = None) -> bool:
        """The same for one action of another service."""
        return caller is None or self._all(caller, iter([Question(action, resource, context or {})]))

    def _all(self, caller: str, questions: Iterator[Question]) -> bool:
        refused = self._refusal(caller, questions)
        if refused is not None:
            self.refused.append((caller, refused.action, refused.resource))
        return refused is None

    def _refusal(self, caller: str, questions: Iterator[Question]) -> Question | None:
        """The first of the questions that is answered with no."""
        found = self._world.instances.get(caller)
        role = caller.split("/")[1] if caller.startswith("role/") else found.role if found else ""
        documents = self._policies(role)
        narrowed = [self.session_policies[caller]] if caller in self.session_policies else documents
        region = {"aws:RequestedRegion": (self._world.region,)}
        for question in questions:
            asked = Question(question.action, question.resource, {**region, **question.context})
            if not (is_allowed(documents, asked) and is_allowed(narrowed, asked)):
                return question
        return None

    # ------------------------------------------------------------------------------------------------------------- EC2
    def _of_ec2(self, operation: str, params: Mapping[str, Any]) -> Iterator[Question]:
        """What AWS asks of IAM for this call: one question a resource, and one for the tags that it sets."""
        action = f"ec2:{operation}"
        if operation.startswith("Describe") or operation.startswith("Get"):
            yield Question(action, "*")
        elif operation in _OWN_TAGS:
            yield from self._creation(operation, action, params)
        elif operation == "CreateTags":
            keys = tuple(tag["Key"] for tag in params.get("Tags") or [])
            for name in params.get("Resources") or []:
                yield Question(action, self._arn(name), {**self._tags(name), "aws:TagKeys": keys})
        else:
            for name in self._named(params):
                yield Question(action, self._arn(name), self._tags(name))

    def _creation(self, operation: str, action: str, params: Mapping[str, Any]) -> Iterator[Question]:
        kind, source = ("volume", "SnapshotId") if operation == "CreateVolume" else ("snapshot", "VolumeId")
        asked = {tag["Key"]: tag["Value"] for one in params.get("TagSpecifications") or [] for tag in one["Tags"]}
        context = {f"aws:RequestTag/{key}": (value,) for key, value in asked.items()}
        keys = {"aws:TagKeys": tuple(asked)}
        new = self._arn_of(kind, "*")
        yield Question(action, new, {**context, **keys})
        if params.get(source):
            yield Question(action, self._arn(params[source]), self._tags(params[source]))
        if asked:
            yield Question("ec2:CreateTags", new, {**context, **keys, "ec2:CreateAction": (operation,)})

    @staticmethod
    def _named(params: Mapping[str, Any]) -> Iterator[str]:
        """Every id in the parameters."""
        for key, value in params.items():
            if key.endswith(("Id", "Ids")):
                yield from value if isinstance(value, list) else [str(value)]

    def _tags(self, name: str) -> dict[str, tuple[str, ...]]:
        world = self._world
        tables = (world.volumes, world.snapshots, world.instances, world.fleets, world.templates)
        found: Any = next((table.get(name) for table in tables if table.get(name) is not None), None)
        tags = found.tags if found is not None else {}
        both = ("ec2:ResourceTag", "aws:ResourceTag")
        return {f"{where}/{key}": (value,) for where in both for key, value in tags.items()}

    def _arn(self, name: str) -> str:
        kind = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), "unknown")
        return self._arn_of(kind, name)

    def _arn_of(self, kind: str, name: str) -> str:
        account = "" if kind == "snapshot" else self._world.account
        return f"arn:aws:ec2:{self._world.region}:{account}:{kind}/{name}"


def _of_s3(method: str, path: str, query: str) -> Iterator[Question]:
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    given = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    if not key:
        listed = {"s3:prefix": (given["prefix"],)} if "prefix" in given else {}
        yield Question("s3:ListBucket", f"arn:aws:s3:::{bucket}", listed)
        return
    reads, writes = ("GET", "HEAD"), ("PUT", "POST")
    action = "GetObject" if method in reads else "PutObject" if method in writes else "DeleteObject"
    if method == "DELETE" and "uploadId" in given:
        action = "AbortMultipartUpload"
    yield Question(f"s3:{action}", f"arn:aws:s3:::{bucket}/{key}")


def of_request(service: str, operation: str, body: bytes, path: str, region: str, account: str) -> Question | None:
    """The question of a call to SSM, Secrets Manager, SNS or Scheduler; None for what an instance never calls."""
    where = f"{region}:{account}"
    if service == "scheduler":
        name = path.rpartition("/")[2]
        verb = {"PUT": "UpdateSchedule", "GET": "GetSchedule", "DELETE": "DeleteSchedule", "POST": "CreateSchedule"}
        return Question(f"scheduler:{verb[operation]}", f"arn:aws:scheduler:{where}:schedule/default/{name}")
    if service == "elasticfilesystem":
        kind = "MountTarget" if "/mount-targets" in path else "FileSystem"
        verb = {"GET": f"Describe{kind}s", "POST": f"Create{kind}", "DELETE": f"Delete{kind}"}
        return Question(f"elasticfilesystem:{verb.get(operation, operation)}", f"arn:aws:elasticfilesystem:{where}:*")
    if service in ("ssm", "secretsmanager"):
        try:
            asked = json.loads(body or b"{}")
        except ValueError:
            return None
        name = str((asked.get("Names") or [asked.get("Name") or asked.get("SecretId") or asked.get("Path") or ""])[0])
        if service == "ssm":
            return Question(f"ssm:{operation}", f"arn:aws:ssm:{where}:parameter/{name.lstrip('/')}")
        arn = name if name.startswith("arn:") else f"arn:aws:secretsmanager:{where}:secret:{name}-AbCdEf"
        return Question(f"secretsmanager:{operation}", arn)
    if service == "sns":
        match = re.search(rb"TopicArn=([^&]+)", body)
        return Question(f"sns:{operation}", unquote(match.group(1).decode()) if match else "*")
    return None
