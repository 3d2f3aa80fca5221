"""AWS's error codes as our errors: the class decides whether we wait, who is asked, and the exit code."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError
from botocore.parsers import create_parser

from spotheal.agent.aws import clients
from spotheal.agent.protocol.errors import ExitCode, Fatal, NotFound, PermissionDenied, Retryable, SpothealError


def error_of(code: str, status: int, message: str = "words") -> SpothealError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return clients.from_client_error("ask", ClientError(response, "Ask"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("ResourceNotFoundException", 404),  # Scheduler
        ("ResourceNotFoundException", 400),  # Secrets Manager, CloudWatch Logs
        ("NoSuchEntity", 404),  # IAM
        ("NotFound", 404),  # SNS
        ("ParameterNotFound", 400),
        ("RepositoryNotFoundException", 400),
        ("InvalidLaunchTemplateName.NotFoundException", 400),
        ("InvalidVolume.NotFound", 400),
        ("NoSuchUpload", 404),
        ("SomeCodeThatNobodyHasSeen", 404),
    ],
)
def test_what_is_not_there_is_not_found(code: str, status: int) -> None:
    error = error_of(code, status)
    assert (NotFound, code) == (type(error), error.code)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("AuthorizationError", 403),  # SNS
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403),  # EC2
        ("InvalidSignatureException", 403),
        ("InvalidToken", 400),  # S3
    ],
)
def test_a_refusal_is_a_refusal_in_every_service(code: str, status: int) -> None:
    error = error_of(code, status)
    assert (PermissionDenied, ExitCode.PERMISSION) == (type(error), error.exit_code)
    assert "get-caller-identity" in error.next_step


def test_the_encoded_reason_of_a_refusal_stands_in_the_command_that_decodes_it() -> None:
    """About 1,000 characters: in the message they would hide the next step."""
    who = "User: arn:aws:iam::123456789012:user/me is not authorized to perform: ec2:RunInstances"
    blob = "zX4_" * 250
    said = f"You are not authorized to perform this operation. {who} Encoded authorization failure message: {blob}"
    error = error_of("UnauthorizedOperation", 403, said)
    assert error.message == f"could not ask: You are not authorized to perform this operation. {who}"
    assert error.next_step.endswith(f"`aws sts decode-authorization-message --encoded-message {blob}`")
    assert error.next_step.startswith("check who you are")


def test_an_object_whose_key_is_gone_is_not_an_absent_object() -> None:
    """S3 passes KMS's answer on. Read as "no such object" it would let us write over what is there."""
    assert type(error_of("KMS.NotFoundException", 400)) is Fatal


def test_an_answer_without_a_known_code_is_judged_by_its_status() -> None:
    assert [Retryable, Retryable, Fatal] == [type(error_of("Strange", status)) for status in (500, 429, 400)]


@pytest.mark.parametrize("body", [b"", b"<html>proxy</html>", b"<Response><Errors/></Response>", b"{}"])
@pytest.mark.parametrize("status", [400, 405, 409, 502])
def test_an_answer_that_names_no_error_is_asked_again_and_its_reason_says_the_status(body: bytes, status: int) -> None:
    """What a proxy or a VPC endpoint answers, and every answer to a HEAD, as botocore reads them."""
    parser = create_parser("rest-xml")
    parsed = parser.parse({"status_code": status, "headers": {}, "body": body}, None)
    parsed["ResponseMetadata"]["HTTPStatusCode"] = status
    error = clients.from_client_error("claim", ClientError(parsed, "PutObject"))
    assert type(error) is Retryable
    assert f"(HTTP {status})" in error.message
    assert "proxy" in error.next_step
