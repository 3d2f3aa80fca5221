"""STS AssumeRole by an instance: its own policies are asked, then the role's trust; what the session may do is what the
role and the session policy both allow. moto hands out the credentials, and asks nobody.

Source: IAM User Guide, "Session policies" and "AWS JSON policy elements: Principal".
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import unescape

from moto.iam.models import iam_backends

from spotheal.fleet.rehearsal.ec2.access_keys import AccessKey
from spotheal.fleet.rehearsal.ec2.world import World
from spotheal.fleet.rehearsal.services.authorization import Authorization
from spotheal.iam.evaluation import Question, is_allowed

_KEY = re.compile(rb"<(AccessKeyId|SecretAccessKey|SessionToken)>([^<]+)</")


class Sessions:
    """`keys` gets the access key ids of sessions, as `role/NAME/number`."""

    def __init__(self, world: World, authorization: Authorization, keys: dict[str, str]) -> None:
        self._world, self._authorization, self._keys = world, authorization, keys
        self._numbers = itertools.count(1)

    def may_assume(self, caller: str, form: Mapping[str, str]) -> bool:
        """Whether this instance may take the role; False too where there is no such role, as AWS answers."""
        role_arn = form.get("RoleArn", "")
        role = _role(self._world.account, role_arn.rpartition("/")[2])
        instance = self._world.instances.get(caller)
        if role is None or instance is None or not instance.role:
            return False
        mine = f"arn:aws:iam::{self._world.account}:role/{instance.role}"
        return self._authorization.service(caller, "sts:AssumeRole", role_arn) and _trusts(
            _parsed(role.assume_role_policy_document), mine, self._world.account
        )

    def note(self, form: Mapping[str, str], answer: bytes) -> None:
        """Whose the credentials in moto's answer are."""
        fields = {name.decode(): unescape(value.decode()) for name, value in _KEY.findall(answer)}
        if len(fields) == 3:
            name = f"role/{form['RoleArn'].rpartition('/')[2]}/{next(self._numbers)}"
            key = AccessKey(fields["AccessKeyId"], fields["SecretAccessKey"], fields["SessionToken"])
            self._world.keys.add(key)
            self._keys[key.id] = name
            if form.get("Policy"):
                self._authorization.session_policies[name] = json.loads(form["Policy"])


def refusal(form: Mapping[str, str]) -> bytes:
    message = f"You are not authorized to perform: sts:AssumeRole on resource: {form.get('RoleArn', '')}"
    return (
        '<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type>'
        f"<Code>AccessDenied</Code><Message>{message}</Message></Error></ErrorResponse>"
    ).encode()


def _role(account: str, name: str) -> Any:
    return next((role for role in iam_backends[account]["aws"].roles.values() if role.name == name), None)


def _trusts(document: Mapping[str, Any], caller: str, account: str) -> bool:
    """Whether a trust policy lets the role `caller` (an ARN) take its role."""
    question = Question("sts:AssumeRole", "*", {"aws:PrincipalArn": (caller,)})
    for statement in document.get("Statement", []):
        named = statement.get("Principal", {}).get("AWS", [])
        principals = [named] if isinstance(named, str) else named
        rest = {key: value for key, value in statement.items() if key != "Principal"} | {"Resource": "*"}
        if {f"arn:aws:iam::{account}:root", caller} & set(principals) and is_allowed([{"Statement": [rest]}], question):
            return True
    return False


def _parsed(document: Any) -> dict[str, Any]:
    policy: dict[str, Any] = json.loads(document) if isinstance(document, str) else document
    return policy
