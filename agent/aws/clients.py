"""boto3 clients as this project uses them, and AWS's errors as ours.

One retry policy a call (botocore's `standard`); waiting for states is the caller's. Throttling that outlasts it is
`Retryable`. The endpoint comes from AWS_ENDPOINT_URL, the credentials from boto3's usual chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spotheal.agent.protocol.errors import (
    CapacityError,
    ConfigError,
    Conflict,
    CredentialsEnded,
    Fatal,
    NoCredentials,
    NotFound,
    PermissionDenied,
    Retryable,
    SpothealError,
)

# What the agent makes clients of. The wheels of an instance keep botocore's models of these and of no others
# (fleet/request/wheelhouse.py), and no instance starts an agent that lacks one.
SERVICES = ("ec2", "s3", "scheduler", "sns", "ssm", "secretsmanager", "sts", "efs")

# Names are AWS's; sources: EC2 API reference "Error codes", S3 API reference "Error responses".
_RETRYABLE = {
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException", "SlowDown",
    "InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "RequestTimeout",
    "500", "502", "503", "504", "ConditionalRequestConflict", "OperationAborted", "IncorrectState",
    "SnapshotCreationPerVolumeRateExceeded", "ConcurrentSnapshotLimitExceeded",
    "PendingSnapshotLimitExceeded", "IncorrectInstanceState", "InsufficientVolumeCapacity",
    "ThrottledException", "RequestThrottled", "RequestThrottledException", "EC2ThrottledException",
    "PriorRequestNotComplete", "BandwidthLimitExceeded",
    "DependencyTimeout", "IncorrectFileSystemLifeCycleState", "IncorrectMountTargetState",
    "ConcurrentTagAccess", "InvalidState", "InvalidPaginationToken",
    "InvalidNextToken", "RetryableError",
}  # fmt: skip
_SIGNED_TOO_EARLY = {"RequestExpired", "RequestTimeTooSkewed", "InvalidSecurity.RequestHasExpired"}
_PERMISSION = {
    "UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "AuthFailure", "InvalidClientTokenId",
    "ExpiredToken", "ExpiredTokenException", "SignatureDoesNotMatch", "OptInRequired", "UnrecognizedClientException",
    "InvalidAccessKeyId", "MissingAuthenticationToken", "IncompleteSignature", "403",
    "AuthorizationError", "InvalidSignatureException", "InvalidToken", "CustomerKeyHasBeenRevoked",
}  # fmt: skip
_CAPACITY = {
    "InsufficientInstanceCapacity", "SpotMaxPriceTooLow", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded",
    "InstanceLimitExceeded", "VolumeLimitExceeded", "SnapshotLimitExceeded", "MaxSpotFleetRequestCountExceeded",
    "MaxIOPSLimitExceeded", "ResourceLimitExceeded", "InsufficientCapacity",
    "AttachmentLimitExceeded", "FileSystemLimitExceeded", "ThroughputLimitExceeded", "NetworkInterfaceLimitExceeded",
}  # fmt: skip
_CONFLICT = {
    "PreconditionFailed", "412", "VolumeInUse", "InvalidVolume.ZoneMismatch", "InvalidVolumeID.ZoneMismatch",
    "IdempotentParameterMismatch", "FileSystemInUse", "FileSystemAlreadyExists", "MountTargetConflict",
}  # fmt: skip
_NOT_FOUND = ("NotFound", "NotFoundException")  # ends of codes; those of IAM and S3 begin with NoSuch
_NEXT_STEP = {
    PermissionDenied: "check who you are with `aws sts get-caller-identity`, and what is needed in docs/permissions.md",
    ConfigError: "--region REGION, or AWS_REGION",
    CapacityError: "allow more instance types and zones in spot_fleet_config.json, or raise the quota named",
    Retryable: "AWS is busy for a moment: the same command again",
    CredentialsEnded: "get new credentials; if they are new, set this machine's clock (`timedatectl`)",
}

_NOT_AWS = "look whether a proxy (HTTPS_PROXY) or a VPC endpoint stands between here and AWS, and try again"
# Credentials that were good once: AWS's codes (RequestExpired is EC2's word for it), and botocore's errors, by name.
MFA_WANTED = "MfaCodeWanted"  # ours
_ENDED_SESSIONS = {
    "SSOError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError", "NoAuthTokenError",
    "LoginError", "LoginTokenLoadError", "LoginRefreshRequired", "LoginAuthorizationCodeError",
    "LoginInsufficientPermissions", "RefreshWithMFAUnsupportedError", "PendingAuthorizationExpiredError",
}  # fmt: skip
TO_BE_RENEWED = _ENDED_SESSIONS | {
    "ExpiredToken", "ExpiredTokenException", "RequestExpired", "CredentialRetrievalError", MFA_WANTED,
}  # fmt: skip
WRONG_REGION = "WrongRegion"  # ours, of the local cloud: AWS has another endpoint for each region
_ENCODED = "Encoded authorization failure message:"  # and about 1,000 characters, at the end of EC2's refusals
_UNREACHED = "check the network, the region's name, AWS_ENDPOINT_URL and the proxy settings, and try again"


def client(service: str, region: str, session: Any = None) -> Any:
    """A boto3 client for `service` in `region`; imports boto3 only now (it costs a third of a second)."""
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": 5},
        connect_timeout=5,
        read_timeout=20,
        user_agent_extra="spotheal",
        s3={"addressing_style": "path"} if _has_own_endpoint() else None,
    )
    maker: Any = session or boto3.session.Session()  # the stubs know only literal service names
    try:
        return maker.client(service, region_name=region, config=config)
    except ValueError as error:  # botocore's own word for an endpoint that is no URL
        raise ConfigError(str(error), next_step="correct AWS_ENDPOINT_URL, or unset it") from error


def missing_services() -> list[str]:
    """Those of `SERVICES` whose models are not installed here."""
    import botocore.session

    return sorted(set(SERVICES) - set(botocore.session.get_session().get_available_services()))


def _has_own_endpoint() -> bool:
    """A bucket's name as host name resolves only at AWS."""
    import os

    return bool(os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3"))


@contextmanager
def translated(task: str) -> Iterator[None]:
    """Raise what AWS answers inside as our errors; `what` completes "could not …"."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        yield
    except ClientError as error:
        raise from_client_error(task, error) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise NoCredentials(
            f"could not {task}: no AWS credentials were found",
            next_step="`aws configure`, or set AWS_PROFILE; on an instance, give it the instance profile",
        ) from error
    except EOFError as error:  # botocore asks for an MFA code where a profile wants one
        raise NoCredentials(f"could not {task}: the profile asks for an MFA code, and there is no terminal",
                            code=MFA_WANTED) from error  # fmt: skip
    except UnicodeError as error:  # a file's name, which on Linux may be any bytes, as the key of an object
        message = f"could not {task}: {error}".encode("utf-8", "backslashreplace").decode()
        raise Fatal(message, next_step="rename the file") from error
    except RuntimeError as error:  # botocore's word for credentials that end before they are first used
        if "credentials are still expired" not in str(error):
            raise
        raise NoCredentials(f"could not {task}: the credentials have ended", code="ExpiredToken") from error
    except BotoCoreError as error:  # connection, timeout, a reply that cannot be read
        name = type(error).__name__
        if name in _ENDED_SESSIONS:
            raise NoCredentials(f"could not {task}: {error}", code=name) from error
        if name == "CredentialRetrievalError":  # an instance's metadata service, too: asking again may help there
            raise Retryable(f"could not {task}: {error}", next_step=_UNREACHED, code=name) from error
        raise Retryable(f"could not {task}: {error}", next_step=_UNREACHED) from error


def from_client_error(task: str, error: Any) -> SpothealError:
    """Our error for a botocore ClientError."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    request_id = str(error.response.get("ResponseMetadata", {}).get("RequestId", ""))
    kind = _kind(code, status)
    message, _, encoded = message.partition(_ENCODED)
    message, next_step = message.strip(), _NEXT_STEP.get(kind, "")
    if encoded:
        command = "aws sts decode-authorization-message --encoded-message"
        next_step += f"; AWS's reason in full: `{command} {encoded.strip()}`"
    if _is_nameless(code):
        message = f"{message or 'an answer that names no error'} (HTTP {status})"
        next_step = _NOT_AWS if kind is Retryable else next_step
    return kind(f"could not {task}: {message or code}", next_step=next_step, code=code, request_id=request_id)


def _is_nameless(code: str) -> bool:
    """Whether the answer names no error: a proxy's, a VPC endpoint's, or one to a HEAD, which has no body. botocore
    gives the HTTP status as the code then, or none."""
    return not code or code.isdigit() or code == "Unknown"


def _kind(code: str, status: int) -> type[SpothealError]:
    if code in _PERMISSION or code.startswith("AuthFailure."):
        return PermissionDenied
    if code in _CAPACITY:
        return CapacityError
    if code == WRONG_REGION:
        return ConfigError
    if code in _CONFLICT:
        return Conflict
    if code in _SIGNED_TOO_EARLY:
        return CredentialsEnded
    if code in _RETRYABLE:
        return Retryable
    if code.startswith("KMS."):  # the key is gone, not the object: who reads "absent" would write over the object
        return Fatal
    if status == 404 or code == "404" or code.endswith(_NOT_FOUND) or code.startswith("NoSuch"):
        return NotFound
    # What names no error may not be AWS's, and says nothing of the next answer: no run ends for it at once.
    return Retryable if status >= 500 or status == 429 or _is_nameless(code) else Fatal
