"""Signature Version 4, checked as AWS checks it, with the secret of the access key that a request names.

Chunks of a body that is signed chunk by chunk are taken as they come: the headers' signature alone is checked.
Source: IAM User Guide, "Create a signed AWS API request"; S3 API reference, "Authenticating requests" and "Error
responses"; EC2 API reference, "Error codes"; the services' "Common errors".
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape

from botocore.utils import normalize_url_path

from spotheal.fleet.rehearsal.ec2.access_keys import AccessKey
from spotheal.fleet.rehearsal.services import wire

Environ = dict[str, Any]
BODY_BYTES_MAX = 16 << 20  # of services besides S3: no request of theirs that we know is larger
_ALGORITHM = "AWS4-HMAC-SHA256"
_SKEW_SECONDS = 900.0
_EXPIRES_SECONDS_MAX = 604_800
_PART = re.compile(r"(Credential|SignedHeaders|Signature)=([^,\s]+)")
_SCOPE = re.compile(r"([\w-]+)/(\d{8})/([\w-]*)/([\w-]+)/aws4_request")
_HASH = re.compile(r"[0-9a-f]{64}")


class Fault(Enum):
    MISSING = "the request is not signed"
    UNKNOWN = "there is no such access key, or the session token is another"
    WRONG = "the signature is not the one that the key's secret gives"
    SKEWED = "it was signed at another time"
    EXPIRED = "a signed address has ended"
    ENDED = "the temporary credentials have ended"
    BODY = "the body is not the one that was signed"


@dataclass(frozen=True)
class Signed:
    """What a request says of its signature. `expires_seconds` is None if the headers carry the signature."""

    key: str
    day: str
    region: str
    service: str
    headers: tuple[str, ...]
    signature: str
    moment: str
    token: str
    expires_seconds: int | None = None


def read(environ: Environ) -> Signed | None:
    """None if the request carries no signature of version 4."""
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    if authorization.startswith(_ALGORITHM):
        parts = dict(_PART.findall(authorization))
        moment, token = environ.get("HTTP_X_AMZ_DATE", ""), environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        return _signed(parts.get, moment, token, None)
    query = {name: values[0] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
    if query.get("X-Amz-Algorithm") != _ALGORITHM:
        return None
    expires = query.get("X-Amz-Expires", "")
    if not expires.isdigit() or not 1 <= len(expires) <= 6 or int(expires) > _EXPIRES_SECONDS_MAX:
        return None
    parameters = {name.removeprefix("X-Amz-"): value for name, value in query.items()}
    return _signed(parameters.get, parameters.get("Date", ""), parameters.get("Security-Token", ""), int(expires))


def _signed(part: Callable[[str], str | None], moment: str, token: str, expires: int | None) -> Signed | None:
    scope = _SCOPE.fullmatch(part("Credential") or "")
    headers = tuple((part("SignedHeaders") or "").split(";"))
    if scope is None or "host" not in headers or _age(moment) is None or scope.group(2) != moment[:8]:
        return None
    key, day, region, service = scope.groups()
    return Signed(key, day, region, service, headers, part("Signature") or "", moment, token, expires)


def check(environ: Environ, signed: Signed, key: AccessKey | None) -> Fault | None:
    """`key` is None if the cloud knows no key of that id. Leaves the body to be read again."""
    if key is None or not hmac.compare_digest(signed.token.encode(), key.token.encode()):
        return Fault.UNKNOWN
    hashed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if signed.service != "s3":
        body = _body(environ, BODY_BYTES_MAX + 1)
        if len(body) > BODY_BYTES_MAX:
            return Fault.BODY
        hashed = hashlib.sha256(body).hexdigest()
    elif signed.expires_seconds is not None:
        hashed = hashed or "UNSIGNED-PAYLOAD"
    if not hmac.compare_digest(_signature(environ, signed, hashed, key.secret).encode(), signed.signature.encode()):
        return Fault.WRONG
    age = _age(signed.moment) or 0.0
    if age < -_SKEW_SECONDS or (signed.expires_seconds is None and age > _SKEW_SECONDS):
        return Fault.SKEWED
    if signed.expires_seconds is not None and age > signed.expires_seconds:
        return Fault.EXPIRED
    if signed.service == "s3" and _HASH.fullmatch(hashed) and hashlib.sha256(_body(environ)).hexdigest() != hashed:
        return Fault.BODY
    return None


def _age(moment: str) -> float | None:
    try:
        signed = datetime.strptime(moment, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return time.time() - signed.timestamp()


def _body(environ: Environ, bytes_max: int | None = None) -> bytes:
    """The body, which is left to be read again; without a length only one that ends by itself (in chunks) has any."""
    header = str(environ.get("CONTENT_LENGTH") or "")
    length = int(header) if header.isdigit() else None if environ.get("wsgi.input_terminated") else 0
    limits = [number for number in (length, bytes_max) if number is not None]
    body: bytes = environ["wsgi.input"].read(min(limits, default=-1))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _signature(environ: Environ, signed: Signed, hashed: str, secret: str) -> str:
    scope = f"{signed.day}/{signed.region}/{signed.service}/aws4_request"
    digest = hashlib.sha256(_canonical(environ, signed, hashed).encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for word in (signed.day, signed.region, signed.service, "aws4_request"):
        key = hmac.digest(key, word.encode(), hashlib.sha256)
    return hmac.digest(key, f"{_ALGORITHM}\n{signed.moment}\n{scope}\n{digest}".encode(), hashlib.sha256).hex()


def _canonical(environ: Environ, signed: Signed, hashed: str) -> str:
    """The request as it was signed. S3 signs a path as it is, the others encode it again."""
    path, _, query = str(environ.get("REQUEST_URI", "")).partition("?")
    if signed.service == "s3":
        path = quote(unquote(path), safe="/-_.~") or "/"
    else:
        path = quote(normalize_url_path(path), safe="/-_.~")
    pairs = [part.partition("=") for part in query.split("&") if part]
    encoded = [(quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~")) for name, _, value in pairs]
    query_string = "&".join(f"{name}={value}" for name, value in sorted(encoded) if name != "X-Amz-Signature")
    lines = "".join(f"{name}:{' '.join(_header(environ, name).split())}\n" for name in signed.headers)
    return "\n".join([environ["REQUEST_METHOD"], path, query_string, lines, ";".join(signed.headers), hashed])


def _header(environ: Mapping[str, Any], name: str) -> str:
    named = name.upper().replace("-", "_")
    value = environ.get(named if named in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{named}", "")
    return str(value).encode("latin-1", "replace").decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------- the answers
_TOKEN = "The security token included in the request is"
_WRONG = ("The request signature we calculated does not match the signature you provided. Check your AWS Secret Access "
          "Key and signing method. Consult the service documentation for details.")  # fmt: skip
_SKEWED = "Signature expired: it was signed more than 15 minutes before or after now"
_VALIDATE = "AWS was not able to validate the provided access credentials"
_TOO_LARGE = (413, "RequestEntityTooLarge", "The request is too large.")
_S3 = {
    Fault.MISSING: (403, "AccessDenied", "Access Denied"),
    Fault.UNKNOWN: (403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
    Fault.WRONG: (403, "SignatureDoesNotMatch", _WRONG),
    Fault.SKEWED: (403, "RequestTimeTooSkewed", "The difference between the request time and the current time is too "
                   "large."),
    Fault.EXPIRED: (403, "AccessDenied", "Request has expired"),
    Fault.ENDED: (400, "ExpiredToken", "The provided token has expired."),
    Fault.BODY: (400, "XAmzContentSHA256Mismatch", "The provided 'x-amz-content-sha256' header does not match what was "
                 "computed."),
}  # fmt: skip
_EC2 = {
    Fault.MISSING: (401, "AuthFailure", _VALIDATE),
    Fault.UNKNOWN: (401, "AuthFailure", _VALIDATE),
    Fault.WRONG: (403, "SignatureDoesNotMatch", _WRONG),
    Fault.SKEWED: (400, "RequestExpired", "Request has expired."),
    Fault.EXPIRED: (400, "RequestExpired", "Request has expired."),
    Fault.ENDED: (400, "RequestExpired", "Request has expired."),
    Fault.BODY: _TOO_LARGE,
}
_QUERY = {
    Fault.MISSING: (403, "MissingAuthenticationToken", "Request is missing Authentication Token"),
    Fault.UNKNOWN: (403, "InvalidClientTokenId", f"{_TOKEN} invalid."),
    Fault.WRONG: (403, "SignatureDoesNotMatch", _WRONG),
    Fault.SKEWED: (403, "SignatureDoesNotMatch", _SKEWED),
    Fault.EXPIRED: (403, "SignatureDoesNotMatch", _SKEWED),
    Fault.ENDED: (403, "ExpiredToken", f"{_TOKEN} expired"),
    Fault.BODY: _TOO_LARGE,
}
_JSON = {
    Fault.MISSING: (400, "MissingAuthenticationTokenException", "Missing Authentication Token"),
    Fault.UNKNOWN: (400, "UnrecognizedClientException", f"{_TOKEN} invalid."),
    Fault.WRONG: (400, "InvalidSignatureException", _WRONG),
    Fault.SKEWED: (400, "InvalidSignatureException", _SKEWED),
    Fault.EXPIRED: (400, "InvalidSignatureException", _SKEWED),
    Fault.ENDED: (400, "ExpiredTokenException", f"{_TOKEN} expired"),
    Fault.BODY: (413, "RequestEntityTooLargeException", "The request is too large."),
}


def refusal(fault: Fault, service: str, *, is_json: bool) -> tuple[int, bytes]:
    """Status and body, in the form and with the code that the service has for it."""
    table = {"ec2": _EC2, "s3": _S3}.get(service, _JSON if is_json else _QUERY)
    status, code, message = table[fault]
    if table is _EC2:
        return status, wire.error(code, message, str(uuid.uuid4()))
    if table is _JSON:
        return status, json.dumps({"__type": code, "message": message}).encode()
    fields = f"<Code>{code}</Code><Message>{escape(message)}</Message>"
    if table is _S3:
        return status, f"<Error>{fields}</Error>".encode()
    error = f"<Error><Type>Sender</Type>{fields}</Error>"
    return status, f"<ErrorResponse>{error}<RequestId>{uuid.uuid4()}</RequestId></ErrorResponse>".encode()
