"""Every verb, whatever AWS or the operator does wrong: the documented exit code, one clear message, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from typer.testing import CliRunner, Result

from spotheal.agent.aws import clients
from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet import cli

HOSTILE = ("../../etc", "a b", "Über", "-", "x" * 41, "a/b", "$(id)", "\x1b[2J")
# How each verb that speaks to AWS about a job is called; `{}` is the job's name.
VERBS = {
    "status": ["status", "{}"],
    "status --watch": ["status", "{}", "--watch"],
    "logs": ["logs", "{}"],
    "logs -f": ["logs", "{}", "-f"],
    "ssh": ["ssh", "{}"],
    "results ls": ["results", "ls", "{}"],
    "results get": ["results", "get", "{}"],
    "cancel": ["cancel", "{}", "--yes"],
    "cancel --save": ["cancel", "{}", "--yes", "--save"],
    "clean": ["clean", "{}", "--yes"],
    "report": ["report", "{}"],
    "sweep status": ["sweep", "status", "{}"],
    "sweep report": ["sweep", "report", "{}"],
    "sweep scale": ["sweep", "scale", "{}", "2", "--yes"],
}


class Refusing:
    """A client all of whose calls end so; `but` names those that do not."""

    def __init__(self, error: Exception, but: dict[str, Any]) -> None:
        self._error, self._but = error, but

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            if name in self._but:
                return self._but[name]
            raise self._error

        return call

    def get_paginator(self, name: str) -> Any:
        return Pages(self._but.get(name), self._error)


class Pages:
    def __init__(self, page: Any, error: Exception) -> None:
        self._page, self._error = page, error

    def paginate(self, **_: Any) -> Any:
        if self._page is None:
            raise self._error
        return [self._page]


def code(name: str, message: str = "said so", status: int = 400) -> ClientError:
    return ClientError(
        {"Error": {"Code": name, "Message": message},
         "ResponseMetadata": {"RequestId": "req-1", "HTTPStatusCode": status, "HTTPHeaders": {}, "RetryAttempts": 0}},
        "Anything",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, error: Exception, arguments: list[str], but: dict[str, Any]) -> Result:
    monkeypatch.setattr(clients, "client", lambda service, region, session=None: Refusing(error, but))
    return CliRunner().invoke(cli.app, ["--region", "us-west-2", *arguments])


def said_well(result: Result, exit_code: ExitCode) -> None:
    """One message with a next step on stderr, nothing on stdout, no traceback."""
    assert exit_code == result.exit_code, result.output
    assert "" == result.stdout
    assert 1 == result.stderr.count("fleetctl: ")
    assert "next: " in result.stderr
    assert "Traceback" not in result.output and "unexpected" not in result.output


def named(verb: str, job: str = "cifar") -> list[str]:
    return [part.format(job) for part in VERBS[verb]]


@pytest.mark.parametrize("verb", VERBS)
def test_without_credentials(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, NoCredentialsError(), named(verb), {})
    said_well(result, ExitCode.PERMISSION)
    assert "no AWS credentials were found" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_without_permission_the_code_and_the_request_are_named(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = {"get_caller_identity": {"Account": "123456789012"}}
    result = run(monkeypatch, code("AccessDenied", "not authorized"), named(verb), account)
    said_well(result, ExitCode.PERMISSION)
    assert "AccessDenied, request req-1" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_while_aws_throttles(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = {"get_caller_identity": {"Account": "123456789012"}}
    result = run(monkeypatch, code("RequestLimitExceeded", status=503), named(verb), account)
    said_well(result, ExitCode.UNEXPECTED)
    assert "RequestLimitExceeded" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_where_aws_is_not_reached(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said_well(run(monkeypatch, EndpointConnectionError(endpoint_url="https://x"), named(verb), {}), ExitCode.UNEXPECTED)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "clean"])
def test_a_job_that_is_not_there(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"get_caller_identity": {"Account": "123456789012"}, "list_objects_v2": {}}
    result = run(monkeypatch, code("NoSuchKey", status=404), named(verb), there)
    said_well(result, ExitCode.NOT_FOUND)
    assert "there is no run of a job 'cifar'" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_another_region_is_another_store_and_a_word_is_no_region(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "client", lambda *_: pytest.fail("nothing may be asked"))
    for region in ("moon", "us-west-2a", "../.."):
        said_well(CliRunner().invoke(cli.app, ["--region", region, *named(verb)]), ExitCode.USAGE)
    said_well(CliRunner().invoke(cli.app, named(verb)), ExitCode.USAGE)  # none is set at all


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith("-")])
def test_a_name_that_is_no_jobs_goes_nowhere(verb: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, AssertionError("AWS was asked"), named(verb, name), {})
    assert ExitCode.USAGE == result.exit_code
    assert "is no name of a job" in result.stderr
    assert "\x1b" not in result.output


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("logs", "logs -f", "status --watch")])
def test_an_output_that_is_neither_table_nor_json_is_refused_first(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, AssertionError("AWS was asked"), [*named(verb), "--output", "yaml"], {})
    assert ExitCode.USAGE == result.exit_code
    assert "neither table nor json" in result.stderr


def test_clean_of_an_account_with_nothing_in_it_is_json_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"get_caller_identity": {"Account": "123456789012"}, "describe_volumes": {}, "describe_snapshots": {},
             "describe_launch_templates": {}, "describe_instances": {"Reservations": []}}  # fmt: skip
    result = run(monkeypatch, code("NoSuchKey", status=404), ["clean", "--yes", "--output", "json"], empty)
    assert 0 == result.exit_code, result.output
    document = json.loads(result.stdout)
    assert (1, [], []) == tuple(document[key] for key in ("schema_version", "planned", "kept"))


# --------------------------------------------------------------------------------- verbs that are not about a job's run
OTHERS = {
    "volume ls": ["volume", "ls"],
    "iam create": ["iam", "create", "--yes"],
    "iam delete": ["iam", "delete", "--yes"],
    "init": ["init", "--command", "python train.py", "--gpus", "0", "--ssh-from", "192.0.2.1/32"],
    "status --all": ["status", "--all"],
}


@pytest.mark.parametrize("verb", OTHERS)
@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (code("AccessDenied", "not authorized"), ExitCode.PERMISSION, "AccessDenied, request req-1"),
        (code("RequestLimitExceeded", status=503), ExitCode.UNEXPECTED, "RequestLimitExceeded"),
        (EndpointConnectionError(endpoint_url="https://x"), ExitCode.UNEXPECTED, "https://x"),
    ],
)
def test_the_others_too_say_what_aws_refuses(
    verb: str, error: Exception, exit_code: ExitCode, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = {"get_caller_identity": {"Account": "123456789012"}}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")  # without any, init writes placeholders and asks nobody
    result = run(monkeypatch, error, OTHERS[verb], account)
    said_well(result, exit_code)
    assert said in result.stderr
