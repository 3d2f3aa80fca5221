"""What AWS refuses and moto takes, or refuses with another code. Sources: tests/data/aws_facts.toml.

And what AWS does and this cloud does not: said by name, for a wrong answer would be taken for AWS's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

from moto.iam.models import iam_backends
from moto.s3.models import s3_backends

from spotheal.agent.aws.clients import WRONG_REGION
from spotheal.fleet.account import service_roles
from spotheal.fleet.files.shape import known_types
from spotheal.fleet.rehearsal.ec2.world import ApiError, not_here
from spotheal.iam.calls import CALLS

# Of the things that the rule book owns moto knows nothing: its answers would be about nobody's instances.
_OWNED = re.compile(r"Instance|Volume|Snapshot|Fleet|LaunchTemplate|Spot|GetPasswordData|GetConsole|CreateImage")
_NOT_OWNED = re.compile(r"InstanceType|InstanceConnectEndpoint|InstanceEventWindow|ReservedInstances")
_OURS = frozenset(name.removeprefix("ec2:") for call in CALLS for name in call.names)
_SESSION_NAME = re.compile(r"[\w+=,.@-]{2,64}")


def of_ec2(action: str, form: Mapping[str, str], region: str, own_region: str, *, is_owned: bool) -> ApiError | None:
    """`is_owned`: the rule book answers the call."""
    if region and region != own_region:
        return ApiError(WRONG_REGION, f"this local cloud is in {own_region}, and the call is for {region}")
    if action == "DescribeInstanceTypes":
        named = [value for key, value in form.items() if key.startswith("InstanceType.")]
        if strange := [type_name for type_name in named if type_name not in known_types()]:
            text = f"The following supplied instance types do not exist: [{', '.join(strange)}]"
            return ApiError("InvalidInstanceType", text)
    if is_owned or action in _OURS or not _OWNED.search(action) or _NOT_OWNED.search(action):
        return None
    return not_here(action)


def of_s3(environ: Mapping[str, Any], account: str) -> ApiError | None:
    """S3 knows two conditions of a put, `If-None-Match: *` and `If-Match: ETAG`, one at a time."""
    if environ["REQUEST_METHOD"] == "PUT":
        absent, if_match = environ.get("HTTP_IF_NONE_MATCH", ""), environ.get("HTTP_IF_MATCH", "")
        if absent not in ("", "*") or if_match == "*" or (absent and if_match):
            message = "A header you provided implies functionality that is not implemented"
            return ApiError("NotImplemented", message, 501)
    upload = parse_qs(environ.get("QUERY_STRING", "")).get("uploadId", [""])[0]
    if environ["REQUEST_METHOD"] == "POST" and upload:
        bucket = s3_backends[account]["aws"].buckets.get(unquote(environ.get("PATH_INFO", "")).split("/")[1])
        if bucket is not None and upload not in bucket.multiparts:
            return ApiError("NoSuchUpload", "The specified upload does not exist.", 404)
    return None


def of_iam(action: str, form: Mapping[str, str], account: str) -> ApiError | None:
    name = service_roles.ROLES.get(form.get("AWSServiceName", "")) if action == "CreateServiceLinkedRole" else None
    if name is None or all(role.name != name for role in iam_backends[account]["aws"].roles.values()):
        return None
    message = f"Service role name {name} has been taken in this account, please try a different suffix."
    return ApiError("InvalidInput", message, 400)


def of_sts(action: str, form: Mapping[str, str]) -> ApiError | None:
    if action != "AssumeRole" or _SESSION_NAME.fullmatch(form.get("RoleSessionName", "")):
        return None
    return ApiError("ValidationError", "1 validation error detected: roleSessionName does not match [\\w+=,.@-]*", 400)
