"""Signed addresses end with the credentials that signed them: no filling of a volume lasts longer than these."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.exceptions import ClientError
from cloud_desk import CloudDesk, cloud_desk, served
from typer.testing import CliRunner

from spotheal.agent.aws.ec2 import Instance, Volume
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import ExitCode, WaitTimedOut
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.cli import app
from spotheal.fleet.rehearsal.scenarios.serve import shell_lines
from spotheal.fleet.rehearsal.services.objects import InMemoryS3
from spotheal.fleet.run.session import Session
from spotheal.fleet.volumes import filling
from spotheal.fleet.volumes.filling import Filling, Followed

__all__ = ["cloud_desk", "served"]  # fixtures
MINUTE = 60.0
JOB = {"job": {"name": "digits", "repository": ".", "command": ["true"]}}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CREDENTIAL_EXPIRATION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    return monkeypatch


def make_temporary(keys: pytest.MonkeyPatch, seconds: float | None) -> None:
    """Credentials that end in so many seconds; None: they do not say when."""
    keys.setenv("AWS_SESSION_TOKEN", "token")
    if seconds is not None:
        ends = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        keys.setenv("AWS_CREDENTIAL_EXPIRATION", ends.isoformat())


def asked(hours: float) -> Filling:
    return Filling(Volume("vol-1", "us-west-2a", "available", 1, "gp3"), parse_job(JOB), "ami-1", "c7i.large",
                   "subnet-1", hours_max=hours)  # fmt: skip


def test_a_filling_ends_before_the_credentials_that_sign_its_addresses(keys: pytest.MonkeyPatch) -> None:
    make_temporary(keys, 60 * MINUTE + 30)
    limited, note = filling.limited(Session("us-west-2"), asked(12))
    assert limited.hours_max == pytest.approx(50 / 60) and "not 12 h" in note and "duration_seconds" in note
    assert filling.limited(Session("us-west-2"), asked(0.5)) == (asked(0.5), "")


def test_the_keys_of_a_user_set_no_limit_and_addresses_last_as_long_as_the_command(keys: pytest.MonkeyPatch) -> None:
    session = Session("us-west-2")
    assert filling.limited(session, asked(48)) == (asked(48), "")
    urls = filling._addresses(session, StoreUrl("bucket", "x"), asked(48)).values()
    assert {int(parse_qs(urlsplit(url).query)["X-Amz-Expires"][0]) for url in urls} == {48 * 3600 + 600}


def test_credentials_that_do_not_say_when_they_end_are_named_before_anything_is_made(keys: pytest.MonkeyPatch) -> None:
    make_temporary(keys, None)
    limited, note = filling.limited(Session("us-west-2"), asked(12))
    assert limited == asked(12) and "AWS_CREDENTIAL_EXPIRATION" in note


@pytest.mark.parametrize("verb", [("prepare", "--yes", "--", "true"), ("upload", ".", "--yes")])
def test_credentials_that_end_in_minutes_fill_no_volume(
    verb: tuple[str, ...], cloud_desk: CloudDesk, keys: pytest.MonkeyPatch
) -> None:
    (cloud_desk.folder / "job.toml").write_text('[job]\nname = "short"\nrepository = "."\ncommand = ["true"]\n')
    rules = cloud_desk.cloud.rules
    before = len(rules.volumes()), len(rules.instances())
    for name, value in cloud_desk.cloud.endpoint.lend(14 * MINUTE).items():
        keys.setenv(name, value)
    refused = cloud_desk.run("volume", *verb)
    assert refused.exit_code == ExitCode.PERMISSION, refused.output
    assert "end in 13 min" in refused.stderr and "export new ones" in refused.stderr
    assert (len(rules.volumes()), len(rules.instances())) == before


class Machine:
    """Session and EC2 for `follow`: one machine that runs, and is ended if it is asked to."""

    def __init__(self, s3: InMemoryS3, signing_seconds: float | None) -> None:
        self.s3, self.seconds, self.ended = s3, signing_seconds, False
        self.ec2 = self

    def client(self, service: str) -> InMemoryS3:
        return self.s3

    def signing_seconds(self, wanted: float) -> float | None:
        return self.seconds

    def instance(self, instance: str) -> Instance:
        return Instance(instance, "running", "us-west-2a", "c7i.large", datetime.now(timezone.utc))

    def attach(self, *_: str) -> None:
        pass

    def tag(self, *_: object) -> None:
        pass

    def terminate(self, instance: str) -> None:
        self.ended = True


@pytest.mark.parametrize(("seconds", "ended"), [(None, False), (MINUTE, True)], ids=["end unknown", "end known"])
def test_a_machine_that_has_spoken_is_not_ended_because_its_addresses_may_have_ended(
    seconds: float | None, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(filling, "_SILENT_SECONDS_MAX", 0.0)
    machine, prefix = Machine(InMemoryS3("bucket"), seconds), StoreUrl("bucket", "prepare/vol-1/x")
    Store(machine.s3, prefix).put_json("status.json", {"phase": "running"})
    with pytest.raises(WaitTimedOut) as stop:
        filling.follow(machine, Followed("i-1", "vol-1", prefix), SystemClock(), print, print, print)  # type: ignore[arg-type]
    assert machine.ended is ended
    assert ended or "terminate-instances --instance-ids i-1" in stop.value.next_step


# --------------------------------------------------------------------------------------------------- the local cloud's
def test_lent_credentials_work_and_then_end_with_all_that_they_signed(
    cloud_desk: CloudDesk, keys: pytest.MonkeyPatch
) -> None:
    lent = cloud_desk.cloud.endpoint.lend(3600)
    for name, value in lent.items():
        keys.setenv(name, value)
    assert cloud_desk.run("volume", "ls").exit_code == 0
    boto3.client("s3").create_bucket(
        Bucket="lent", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})  # fmt: skip
    signed = Session("us-west-2").signed_url("PUT", StoreUrl("lent", "key"), 3600)
    urllib.request.urlopen(urllib.request.Request(signed, b"x", method="PUT")).close()
    cloud_desk.cloud.endpoint.ends[lent["AWS_ACCESS_KEY_ID"]] = 0.0
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(signed, b"x", method="PUT"))
    assert b"<Code>ExpiredToken</Code>" in refused.value.read()
    for service, call, code in (("ec2", "describe_volumes", "RequestExpired"), ("s3", "list_buckets", "ExpiredToken"),
                                ("iam", "list_roles", "ExpiredToken"), ("sts", "get_caller_identity", "ExpiredToken"),
                                ("batch", "describe_job_queues", "ExpiredTokenException"),
                                ("ssm", "describe_parameters", "ExpiredTokenException")):  # fmt: skip
        with pytest.raises(ClientError) as ended:
            getattr(boto3.client(service), call)()  # type: ignore[call-overload]
        assert ended.value.response["Error"]["Code"] == code
    result = cloud_desk.run("volume", "ls")
    assert result.exit_code == ExitCode.PERMISSION and "export new ones" in result.stderr


def test_a_cloud_with_temporary_credentials_serves_until_they_end(tmp_path: Path, keys: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "cloud.env"
    fleetctl = [sys.executable, "-m", "spotheal.fleet.cli"]
    with subprocess.Popen([*fleetctl, "cloud", "--credentials-seconds", "200", "--env", str(lines)]) as cloud:
        try:
            while not lines.exists():
                assert cloud.poll() is None
                time.sleep(0.1)
        finally:
            cloud.terminate()
    given = dict(line.removeprefix("export ").split("=", 1) for line in lines.read_text().splitlines()[1:])
    for name, value in given.items():
        keys.setenv(name, shlex.split(value)[0] if value else "")
    assert given["AWS_SESSION_TOKEN"] and 0 < (Session("us-west-2").signing_seconds(3600) or 0) < 200


def test_the_lines_of_a_cloud_take_away_the_end_of_other_credentials() -> None:
    lines = shell_lines({"AWS_SESSION_TOKEN": "t"}).splitlines()
    assert "AWS_CREDENTIAL_EXPIRATION" in lines[0] and "export AWS_SESSION_TOKEN=t" in lines


def test_credentials_whose_time_is_over_end_in_the_way_to_new_ones(keys: pytest.MonkeyPatch) -> None:
    """botocore raises a RuntimeError for them, before it asks AWS."""
    make_temporary(keys, -5)
    result = CliRunner().invoke(app, ["volume", "ls", "--region", "us-west-2"])
    assert result.exit_code == ExitCode.PERMISSION and "export new ones" in result.stderr, result.output
    assert "Traceback" not in result.output
