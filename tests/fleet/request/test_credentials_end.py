"""Credentials that have ended, in every verb: exit code 3, and the command that renews them as the next step."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main
from fleet_desk import FLEET
from typer.testing import CliRunner

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import CredentialsEnded, ExitCode, PermissionDenied
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.cli import app
from spotheal.fleet.ending import stopping
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.session import Session, renewal
from spotheal.fleet.status import live, wait
from spotheal.fleet.sweep import following

VOLUME = "vol-0123456789abcdef0"
# Every verb that speaks to AWS, with what it needs to get there.
VERBS = {
    "init": ("--command", "python train.py", "--force"),
    "request": ("--yes",),
    "volume ls": (), "volume create": ("--yes",), "volume adopt": (VOLUME, "--yes"), "volume rm": (VOLUME, "--yes"),
    "volume prepare": ("--yes", "--", "true"), "volume upload": ("data", "--yes"),
    "iam create": ("--yes",), "iam delete": ("--yes",),
    "secret put": ("TOKEN",), "secret ls": (), "secret rm": ("TOKEN", "--yes"),
    "batch create": ("--yes",), "batch submit": ("--yes",), "batch status": (), "batch logs": (),
    "batch cancel": ("--yes",), "batch delete": ("--yes",),
    "sweep run": ("list.yml", "--yes"), "sweep status": (), "sweep report": (), "sweep retry": ("digits",),
    "sweep scale": ("digits", "2"),
    "status": (), "logs": (), "ssh": (), "report": (), "cancel": ("--yes",), "clean": ("--yes",),
    "results ls": (), "results get": (), "results create-efs": ("--yes",), "results delete-efs": ("--yes",),
}  # fmt: skip
# `batch image push` needs docker before AWS; the others speak to no account.
WITHOUT_AWS = {"validate", "iam show", "rehearse", "cloud", "batch image push"}


class _Ended(BaseHTTPRequestHandler):
    """AWS's answer to a session token that has ended, in the form of each protocol (API references, "Common errors";
    EC2's own code is RequestExpired)."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = "The security token included in the request is expired"
        kind = self.headers.get("Content-Type", "")
        if "json" in kind:
            return self._answer(400, json.dumps({"__type": "ExpiredTokenException", "message": said}))
        if b"Version=2016-11-15" in body:
            inner = "<Errors><Error><Code>RequestExpired</Code><Message>Request has expired.</Message></Error></Errors>"
            return self._answer(400, f"<Response>{inner}<RequestID>r</RequestID></Response>")
        if b"Action=" in body:
            inner = f"<Error><Code>ExpiredToken</Code><Message>{said}</Message></Error>"
            return self._answer(403, f"<ErrorResponse>{inner}<RequestId>r</RequestId></ErrorResponse>")
        if "/v1/" in self.path or "/2015-02-01/" in self.path:  # Batch, EFS
            self.send_response(403)
            self.send_header("x-amzn-ErrorType", "ExpiredTokenException")
            return self._end(json.dumps({"message": said}))
        return self._answer(400, f"<Error><Code>ExpiredToken</Code><Message>{said}</Message></Error>")

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self._end(text)

    def _end(self, text: str) -> None:
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Ended)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Path:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-west-2", "HOME": str(tmp_path),
                "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
                "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "spot_fleet_config.json").write_text(json.dumps(FLEET))
    (tmp_path / "job.toml").write_text('[job]\nname = "digits"\nrepository = "."\ncommand = ["true"]\n')
    (tmp_path / "list.yml").write_text("- {lr: 0.1}\n- {lr: 0.2}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("a")
    for arguments in (["init", "-q"], ["add", "list.yml"], ["commit", "-qm", "x"]):
        who = ["-c", "user.email=a@example.org", "-c", "user.name=a"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(verb: str, cure: str) -> None:
    result = CliRunner().invoke(app, [*verb.split(), *VERBS[verb]], input="secret\n")
    assert result.exit_code == ExitCode.PERMISSION, result.output
    assert cure in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_ended_temporary_credentials_end_in_the_way_to_new_ones(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ACCESS_KEY_ID", "ASIAENDED"), ("SECRET_ACCESS_KEY", "x"), ("SESSION_TOKEN", "y")):
        monkeypatch.setenv(f"AWS_{name}", value)
    check(verb, "export new ones")


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_sso_session_ends_in_the_login_of_that_profile(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config").write_text(
        "[profile work]\nsso_session = office\nsso_account_id = 123456789012\nsso_role_name = dev\n"
        "[sso-session office]\nsso_start_url = https://example.org/start\nsso_region = us-west-2\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    check(verb, "`aws sso login --profile work`")


@pytest.mark.parametrize(
    ("profile", "cure"),
    [("credential_process = false\n", "`false`"),
     ("role_arn = arn:aws:iam::123456789012:role/a\nsource_profile = base\n"
      "mfa_serial = arn:aws:iam::123456789012:mfa/a\n", "in a terminal")],
    ids=["a program", "MFA"],
)  # fmt: skip
def test_each_kind_of_profile_has_its_own_way_to_renew(
    profile: str, cure: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config").write_text(f"[profile work]\n{profile}")
    (folder / "keys").write_text("[base]\naws_access_key_id = AKIABASE\naws_secret_access_key = x\n")
    monkeypatch.setattr("getpass.getpass", lambda prompt: input(prompt))  # as it reads without a terminal
    result = CliRunner().invoke(app, ["volume", "ls", "--profile", "work"])
    assert result.exit_code == ExitCode.PERMISSION, result.output
    assert cure in result.stderr


def test_a_profile_of_aws_login_is_renewed_by_it(folder: Path) -> None:
    """botocore uses such a profile only with its optional part `crt`, so no verb gets this far here."""
    (folder / "config").write_text("[profile work]\nlogin_session = arn:aws:iam::123456789012:user/a\n")
    assert renewal("work") == "`aws login --profile work`, then the same command"


def test_the_table_names_every_verb() -> None:
    context = typer.Context(typer.main.get_command(app))

    def verbs(command: Any, words: tuple[str, ...]) -> Iterator[str]:
        if not hasattr(command, "list_commands"):
            yield " ".join(words)
            return
        for name in command.list_commands(context):
            yield from verbs(command.get_command(context, name), (*words, name))

    assert set(verbs(typer.main.get_command(app), ())) == VERBS.keys() | WITHOUT_AWS


class Ended:
    """Any client or store, all of whose calls are signed with credentials that have ended."""

    def __getattr__(self, name: str) -> Ended:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        raise CredentialsEnded("could not look: Request has expired.", code="RequestExpired")


@pytest.mark.parametrize(
    "look",
    [
        lambda session, run: live.Look(session, run, SystemClock())(),
        lambda session, run: wait._check_fleet(session, run),
        lambda session, run: stopping._status(run),
        lambda session, run: following.follow(session, run, SystemClock(), print, 5.0),
    ],
    ids=["status --watch", "--wait", "cancel --save", "sweep --wait"],
)
def test_credentials_that_end_while_a_run_is_followed_end_the_look(look: Callable[[Any, Run], object]) -> None:
    with pytest.raises(CredentialsEnded) as ended:
        look(Ended(), Run("digits", "01J", Ended()))  # type: ignore[arg-type]
    assert ended.value.exit_code == ExitCode.PERMISSION


def test_a_head_that_names_no_code_is_asked_again_by_a_get(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 400 without a body: github.com/boto/botocore issue 1400."""
    for name, value in (("ACCESS_KEY_ID", "ASIAENDED"), ("SECRET_ACCESS_KEY", "x"), ("SESSION_TOKEN", "y")):
        monkeypatch.setenv(f"AWS_{name}", value)
    store = Store(Session("us-west-2").client("s3"), StoreUrl("bucket", "digits/01J"))
    with pytest.raises(PermissionDenied) as ended:
        store.download("results/a", folder / "a")
    assert ended.value.code == "ExpiredToken"
