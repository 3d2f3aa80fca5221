"""Secrets: put by an operator, fetched on the instance, given to the trainer alone, and in nothing that it leaves."""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
import structlog
from agent_world import AgentWorld
from botocore.exceptions import ClientError
from fleet_desk import HandClock
from moto import mock_aws
from typer.testing import CliRunner

from spotheal.agent.cage.secrets import Vault
from spotheal.agent.cage.trainer_role import TrainerRole
from spotheal.agent.protocol.clock import Stop, SystemClock, never
from spotheal.agent.protocol.errors import (
    ConfigError,
    ExitCode,
    Fatal,
    Interrupted,
    NoCredentials,
    Retryable,
    SetupFailed,
)
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.protocol.redaction import SECRETS
from spotheal.agent.repository import git_access
from spotheal.agent.repository.checkout import checkout
from spotheal.fleet.cli import app
from spotheal.fleet.files.config import read_job
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook
from spotheal.fleet.rehearsal.scenarios import serve
from spotheal.fleet.rehearsal.scenarios.api import Endpoint

LOG = structlog.get_logger()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    SECRETS.forget()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    with mock_aws():
        yield


def client(service: str) -> Any:
    return boto3.client(service, region_name="us-west-2")  # type: ignore[call-overload]


def vault(clock: Any = None, clients: Any = client, stop: Any = None) -> Vault:
    return Vault(clients, clock or HandClock(), stop or never(), LOG)


def parameter(name: str, value: str) -> None:
    client("ssm").put_parameter(Name=name, Value=value, Type="SecureString")


# ------------------------------------------------------------------------------------------------------------- fetching
def test_secrets_of_both_services_are_fetched_and_known_to_the_redaction(account: None) -> None:
    parameter("/spotheal/j/TOKEN", "parameter-value")
    client("secretsmanager").create_secret(Name="team/db", SecretString='{"user": "ml", "password": "p4ssw0rd-x"}')
    wanted = {"A": "ssm:/spotheal/j/TOKEN", "B": "secretsmanager:team/db#password", "C": "secretsmanager:team/db#user"}
    assert vault().fetch(wanted) == {"A": "parameter-value", "B": "p4ssw0rd-x", "C": "ml"}
    assert "value" not in SECRETS.text("parameter-value") and "p4ss" not in SECRETS.text("p4ssw0rd-x")


def test_more_than_ten_parameters_are_fetched(account: None) -> None:
    for number in range(13):
        parameter(f"/p/{number}", f"value-{number}-long")
    found = vault().fetch({f"N{number}": f"ssm:/p/{number}" for number in range(13)})
    assert found == {f"N{number}": f"value-{number}-long" for number in range(13)}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("ssm:/nothing", r"TOKEN \(ssm:/nothing\) is not there"),
        ("secretsmanager:nothing", "is not there"),
        ("secretsmanager:plain#field", "no JSON document with the field 'field'"),
        ("secretsmanager:document#nofield", "no JSON document with the field 'nofield'"),
        ("secretsmanager:binary", "is not there, or is no text"),
    ],
)
def test_a_secret_that_cannot_be_had_fails_the_set_up_and_names_it(account: None, reference: str, message: str) -> None:
    manager = client("secretsmanager")
    manager.create_secret(Name="plain", SecretString="no document")
    manager.create_secret(Name="document", SecretString='{"field": "x"}')
    manager.create_secret(Name="binary", SecretBinary=b"\0\1")
    with pytest.raises(SetupFailed, match=message) as caught:
        vault().fetch({"TOKEN": reference})
    assert caught.value.next_step
    assert "no document" not in str(caught.value)


class Failing:
    """An SSM that raises `code` so many times, then has everything."""

    def __init__(self, code: str, times: int) -> None:
        self.code, self.left, self.calls = code, times, 0

    def get_parameters(self, Names: list[str], WithDecryption: bool) -> dict[str, Any]:
        assert WithDecryption
        self.calls += 1
        if self.left:
            self.left -= 1
            raise ClientError({"Error": {"Code": self.code, "Message": "no"}}, "GetParameters")
        return {"Parameters": [{"Name": name, "Value": "some-value"} for name in Names]}


def test_throttling_is_waited_out_and_a_role_made_a_moment_ago_too() -> None:
    for code, times in (("ThrottlingException", 6), ("AccessDeniedException", 3)):
        failing = Failing(code, times)
        assert vault(clients=lambda _, failing=failing: failing).fetch({"A": "ssm:/a"}) == {"A": "some-value"}
        assert failing.calls == times + 1


def test_a_role_that_may_not_read_them_fails_the_set_up_with_the_policy_to_give(account: None) -> None:
    failing = Failing("AccessDeniedException", 100)
    with pytest.raises(SetupFailed, match="may not read the secrets A") as caught:
        vault(clients=lambda _: failing).fetch({"A": "ssm:/elsewhere/a"})
    assert "--secret ssm:/elsewhere/a" in caught.value.next_step


def test_aws_that_cannot_be_reached_is_no_end_of_the_run() -> None:
    with pytest.raises(Retryable):
        vault(clients=lambda _: Failing("InternalError", 10**6)).fetch({"A": "ssm:/a"})
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        vault(clients=lambda _: Failing("InternalError", 10**6), stop=stop).fetch({"A": "ssm:/a"})


def test_nothing_wanted_calls_nobody() -> None:
    assert Vault(lambda service: pytest.fail("called"), HandClock(), never(), LOG).fetch({}) == {}


# --------------------------------------------------------------------------------------------------- the trainer's role
class Sts:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.fault: ClientError | None = None

    def assume_role(self, **given: Any) -> dict[str, Any]:
        self.asked.append(given)
        if self.fault:
            raise self.fault
        until = datetime.fromtimestamp(1_790_000_000, timezone.utc) + timedelta(seconds=3600 * len(self.asked))
        keys = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": f"secret-{len(self.asked)}-key"}
        return {"Credentials": {**keys, "SessionToken": "t" * 40, "Expiration": until}}


def role(sts: Sts, clock: HandClock) -> TrainerRole:
    return TrainerRole(sts, clock, "123456789012", "us-west-2", "j", "i-1", '{"Statement":[]}')


def test_the_trainers_role_is_taken_with_the_jobs_policy_and_renewed_before_it_ends() -> None:
    sts, clock = Sts(), HandClock()
    one = role(sts, clock)
    one.check(never())
    first = json.loads(one.credentials())
    assert (first["Code"], first["SecretAccessKey"], first["Expiration"][-1]) == ("Success", "secret-1-key", "Z")
    assert sts.asked == [{
        "RoleArn": "arn:aws:iam::123456789012:role/spotheal-trainer-j", "RoleSessionName": "trainer-i-1",
        "DurationSeconds": 3600, "Policy": '{"Statement":[]}',
    }]  # fmt: skip
    clock.seconds = 3001
    assert json.loads(one.credentials())["SecretAccessKey"] == "secret-2-key"
    assert "secret-1-key" not in SECRETS.text("secret-1-key secret-2-key") and len(sts.asked) == 2


def test_a_role_that_cannot_be_taken_fails_the_set_up() -> None:
    sts = Sts()
    sts.fault = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole")
    clock = HandClock()
    with pytest.raises(SetupFailed, match="trainer's role cannot be taken") as caught:
        role(sts, clock).check(never())
    assert "fleetctl iam create --job j --trainer-policy FILE" in caught.value.next_step
    assert clock.seconds <= 120.0


def test_a_role_that_is_not_known_everywhere_yet_is_asked_for_again() -> None:
    sts, clock = Sts(), HandClock()
    sts.fault = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole")

    class KnownLater(HandClock):
        def sleep(self, seconds: float, until: Stop | None = None) -> bool:
            if self.seconds + seconds > 60.0:
                sts.fault = None
            return super().sleep(seconds, until)

    clock = KnownLater()
    role(sts, clock).check(never())
    assert 60.0 < clock.seconds < 120.0
    sts.fault = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole")
    gone = threading.Event()
    gone.set()
    with pytest.raises(Interrupted):
        role(sts, HandClock()).check(gone)


def test_without_credentials_of_its_own_the_agent_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise NoCredentials("none")

    monkeypatch.setattr(TrainerRole, "_take", missing)
    with pytest.raises(NoCredentials):
        role(Sts(), HandClock()).check(never())
    assert issubclass(NoCredentials, Fatal)


# ------------------------------------------------------------------------------------------------------ fleetctl secret
@pytest.fixture
def desk(account: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.chdir(tmp_path)
    text = '[job]\nname = "cifar"\nrepository = "."\ncommand = ["python"]\n[secrets]\nOLD = "ssm:/elsewhere/OLD"\n'
    (tmp_path / "job.toml").write_text(text)
    return CliRunner()


def test_what_is_put_on_standard_input_lies_at_aws_encrypted_and_is_printed_nowhere(desk: CliRunner) -> None:
    done = desk.invoke(app, ["secret", "put", "HF_TOKEN"], input="the-very-secret-value\n")
    assert done.exit_code == 0
    assert done.stdout == 'HF_TOKEN = "ssm:/spotheal/cifar/HF_TOKEN"\n'
    assert "the-very-secret-value" not in done.output
    found = client("ssm").get_parameters(Names=["/spotheal/cifar/HF_TOKEN"], WithDecryption=True)["Parameters"][0]
    assert (found["Value"], found["Type"]) == ("the-very-secret-value", "SecureString")
    assert desk.invoke(app, ["secret", "put", "HF_TOKEN"], input="another\n").exit_code == 0
    assert vault().fetch({"X": "ssm:/spotheal/cifar/HF_TOKEN"}) == {"X": "another"}


def test_secrets_manager_takes_long_ones_and_replaces_them(desk: CliRunner) -> None:
    long = "x" * 5000
    refused = desk.invoke(app, ["secret", "put", "KEY"], input=long)
    assert refused.exit_code == 2 and "--store secretsmanager" in refused.output
    for value in (long, "short"):
        done = desk.invoke(app, ["secret", "put", "KEY", "--store", "secretsmanager"], input=value)
        assert (done.exit_code, done.stdout) == (0, 'KEY = "secretsmanager:spotheal/cifar/KEY"\n')
    assert vault().fetch({"X": "secretsmanager:spotheal/cifar/KEY"}) == {"X": "short"}


def test_secrets_are_listed_without_values_and_deleted(desk: CliRunner) -> None:
    desk.invoke(app, ["secret", "put", "HF_TOKEN"], input="the-very-secret-value")
    desk.invoke(app, ["secret", "put", "KEY", "--store", "secretsmanager"], input="the-very-secret-value")
    listed = desk.invoke(app, ["secret", "ls", "--output", "json"])
    rows = json.loads(listed.stdout)["secrets"]
    assert [(row["name"], row["in_job_toml"], bool(row["changed"])) for row in rows] == [
        ("HF_TOKEN", False, True), ("KEY", False, True), ("OLD", True, False),
    ]  # fmt: skip
    assert "the-very-secret-value" not in desk.invoke(app, ["secret", "ls"]).output + listed.output
    assert desk.invoke(app, ["secret", "rm", "HF_TOKEN"]).exit_code == 2  # nobody to ask
    assert desk.invoke(app, ["secret", "rm", "HF_TOKEN", "--yes"]).exit_code == 0
    assert desk.invoke(app, ["secret", "rm", "KEY", "--store", "secretsmanager", "--yes"]).exit_code == 0
    assert desk.invoke(app, ["secret", "rm", "HF_TOKEN", "--yes"]).exit_code == 4
    left = json.loads(desk.invoke(app, ["secret", "ls", "--output", "json"]).stdout)["secrets"]
    assert [row["name"] for row in left] == ["OLD"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(Rulebook(SystemClock())) as served:
        yield served


@pytest.fixture
def cloud_desk(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """As `desk`, with the local cloud, which answers as AWS where moto does not."""
    for name, value in serve.environment(endpoint, "us-west-2").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[job]\nname = "cifar"\nrepository = "."\ncommand = ["python"]\n')
    return CliRunner()


def test_a_secret_that_is_scheduled_for_deletion_is_named_with_both_ways_out(cloud_desk: CliRunner) -> None:
    put = ["secret", "put", "KEY", "--store", "secretsmanager"]
    assert cloud_desk.invoke(app, put, input="one").exit_code == 0
    fresh = boto3.session.Session(region_name="us-west-2")  # boto3's own keeps the credentials of other tests
    fresh.client("secretsmanager").delete_secret(SecretId="spotheal/cifar/KEY")  # type: ignore[call-overload]
    refused = cloud_desk.invoke(app, put, input="two")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "scheduled for deletion" in refused.output
    assert "aws secretsmanager restore-secret --secret-id spotheal/cifar/KEY" in refused.output
    assert "fleetctl secret rm KEY --store secretsmanager" in refused.output
    assert cloud_desk.invoke(app, ["secret", "rm", *put[2:], "--yes"]).exit_code == 0
    assert cloud_desk.invoke(app, put, input="two").exit_code == 0


@pytest.mark.parametrize("store", ["ssm", "secretsmanager"])
def test_a_mistyped_secret_is_not_said_to_be_deleted(cloud_desk: CliRunner, store: str) -> None:
    """Secrets Manager takes a forced deletion of what was never there for done."""
    refused = cloud_desk.invoke(app, ["secret", "rm", "KYE", "--store", store, "--yes"])
    assert refused.exit_code == ExitCode.NOT_FOUND and "there is no secret" in refused.output
    assert "`fleetctl secret ls`" in refused.output


@pytest.mark.parametrize(
    ("arguments", "given"),
    [(["put", "a b"], "x"), (["put", "SPOTHEAL_X"], "x"), (["put", "X"], ""), (["put", "X"], "\n"),
     (["put", "X"], "a\0b"), (["put", "X", "--store", "vault"], "x")],
)  # fmt: skip
def test_what_cannot_be_a_secret_is_refused(desk: CliRunner, arguments: list[str], given: str) -> None:
    assert desk.invoke(app, ["secret", *arguments], input=given).exit_code == 2


# ------------------------------------------------------------------------------------------------------- the repository
TOKEN = "t0ken-for-the-server"


class GitServer(http.server.BaseHTTPRequestHandler):
    """git http-backend behind basic authentication."""

    repositories = ""
    seen: list[str]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        given = self.headers.get("Authorization", "")
        wanted = "Basic " + base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
        type(self).seen.append(given)
        if given != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        environment = {
            "GIT_PROJECT_ROOT": self.repositories, "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path, "QUERY_STRING": query,
            "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)), "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""), "PATH": os.environ["PATH"],
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def private(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Address and commit of a repository that only the token opens."""
    work = tmp_path / "served/r"
    work.mkdir(parents=True)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(work)]
    (work / "train.py").write_text("print(1)\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    handler = type("Handler", (GitServer,), {"repositories": str(tmp_path / "served"), "seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/r/.git", head
    server.shutdown()
    server.server_close()


def configured(repository: str, revision: str) -> InstanceConfig:
    job = {"name": "j", "repository": repository, "command": ["python", "train.py"]}
    return InstanceConfig(parse_job({"job": job}), "run", "us-west-2", StoreUrl("bucket", "j/run"), revision)


def argvs(stop: threading.Event, found: set[str]) -> None:
    """Everything that anybody could read of any process meanwhile."""
    while not stop.wait(0.002):
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                for name in ("cmdline", "environ"):
                    try:
                        found.add(Path("/proc", entry, name).read_bytes().decode("utf-8", "replace"))
                    except OSError:
                        continue


@pytest.mark.processes
def test_a_private_repository_is_cloned_with_the_token_in_no_url_argv_environment_file_or_log(
    private: tuple[str, str], tmp_path: Path
) -> None:
    url, commit = private
    seen: set[str] = set()
    stop = threading.Event()
    watcher = threading.Thread(target=argvs, args=(stop, seen), daemon=True)
    watcher.start()
    try:
        with structlog.testing.capture_logs() as logged:
            target = checkout(
                configured(url, commit), tmp_path / "clone/src", clock=SystemClock(), log=structlog.get_logger(),
                secret=TOKEN + "\n", private=tmp_path / "private",
            )  # fmt: skip
    finally:
        stop.set()
        watcher.join()
    assert (target / "train.py").read_text() == "print(1)\n"
    assert any("credential.http://127.0.0.1" in text for text in seen), "the watch saw no git"
    encoded = base64.b64encode(TOKEN.encode()).decode()[:16]
    assert not [text for text in seen if TOKEN in text or encoded in text]
    assert TOKEN not in str(logged)
    left = [path for folder in ("clone", "private") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert not [path for path in left if TOKEN.encode() in path.read_bytes()]
    assert not list((tmp_path / "private").iterdir())


@pytest.mark.processes
def test_no_filter_that_a_trainer_set_up_runs_beside_the_token(
    private: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's home survives the agent, and git has the token in reach (audit of 2026-11-22, S3)."""
    home = tmp_path / "home"
    (home / "git").mkdir(parents=True)
    (home / "attributes").write_text("* filter=x\n")
    filters = f'[core]\n\tattributesFile = {home}/attributes\n[filter "x"]\n\tsmudge = "touch {home}/trace; cat"\n'
    for name in (".gitconfig", "git/config"):
        (home / name).write_text(filters)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    url, commit = private
    target = checkout(
        configured(url, commit), tmp_path / "clone/src", clock=SystemClock(), log=LOG, secret=TOKEN,
        private=tmp_path / "private",
    )  # fmt: skip
    assert (target / "train.py").read_text() == "print(1)\n"
    assert not (home / "trace").exists()


@pytest.mark.processes
def test_a_wrong_token_is_a_setup_failure_that_names_the_key_of_job_toml(
    private: tuple[str, str], tmp_path: Path
) -> None:
    url, commit = private
    with pytest.raises(SetupFailed, match="cannot be cloned") as caught:
        checkout(configured(url, commit), tmp_path / "src", clock=SystemClock(), log=LOG, secret="user:wrong-token")
    assert "repository_secret" in caught.value.next_step
    assert "wrong-token" not in str(caught.value)


def test_the_token_goes_to_the_repositorys_own_host_alone(tmp_path: Path) -> None:
    with git_access.access(TOKEN, "https://git.example.org:8443/a/b", tmp_path, None) as given:
        options = " ".join(given.options)
        assert "credential.https://git.example.org:8443.helper" in options and TOKEN not in options
        (place,) = tmp_path.iterdir()
        assert (place.stat().st_mode & 0o777, (place / "secret").stat().st_mode & 0o777) == (0o700, 0o600)
        for host, wanted in (("git.example.org:8443", TOKEN), ("evil.example.org", "")):
            asked = subprocess.run(
                ["git", *given.options, "credential", "fill"], input=f"protocol=https\nhost={host}\n\n", text=True,
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": ""}, capture_output=True, check=False,
            )  # fmt: skip
            assert wanted in asked.stdout and (wanted or "password" not in asked.stdout)
    assert not list(tmp_path.iterdir())


def test_an_ssh_key_is_a_file_of_its_users_and_goes_with_the_context(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    text = key.read_text().replace("\n", "\r\n").rstrip()  # as it comes out of a web form
    with git_access.access(text, "git@git.example.org:a/b", tmp_path / "private", None) as given:
        assert "PRIVATE" not in given.ssh and "-o IdentitiesOnly=yes" in given.ssh
        file = given.ssh.split()[-1]
        read = subprocess.run(["ssh-keygen", "-y", "-f", file], check=True, capture_output=True, text=True)
        assert read.stdout.split()[:2] == key.with_suffix(".pub").read_text().split()[:2]
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("secret", "repository"),
    [("-----BEGIN X PRIVATE KEY-----\n", "https://h/r"), ("token", "git@h:r"), ("to\nken", "https://h/r"), (":", "https://h/r")],
)
def test_a_secret_of_the_wrong_kind_fails_the_set_up(secret: str, repository: str, tmp_path: Path) -> None:
    given = git_access.access(secret, repository, tmp_path, None)
    with pytest.raises(SetupFailed, match="repository's secret is"), given:
        pytest.fail("it was taken")
    assert not list(tmp_path.iterdir())


def test_a_submodule_may_run_no_command_of_its_own(tmp_path: Path) -> None:
    """`update = !command`, a file of the machine, a hook of a template: whatever .gitmodules asks for."""
    (tmp_path / "outside").mkdir()
    whole = tmp_path / "whole"
    whole.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@e", "-c", "protocol.file.allow=always", "-C", str(whole)]
    subprocess.run([*git, "init", "-q"], check=True)
    (whole / ".gitmodules").write_text(
        f'[submodule "p"]\n\tpath = p\n\turl = {whole}\n\tupdate = !touch {tmp_path}/trace\n'
        f'[submodule "../../q"]\n\tpath = q\n\turl = -u./payload\n'
    )
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for name in ("p", "q"):
        subprocess.run([*git, "update-index", "--add", "--cacheinfo", f"160000,{head},{name}"], check=True)
    subprocess.run([*git, "commit", "-qm", "two"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    job = {"name": "j", "repository": str(whole), "command": ["python"], "submodules": True}
    config = InstanceConfig(parse_job({"job": job}), "run", "us-west-2", StoreUrl("bucket", "j/run"), head)
    try:
        checkout(config, tmp_path / "src", clock=SystemClock(), log=LOG)
    except (SetupFailed, Retryable) as refused:
        assert "cannot be cloned" in refused.message or "could not be reached" in refused.message
    assert not (tmp_path / "trace").exists()


def test_a_trainers_policy_is_read_from_its_file_and_reaches_the_instance_as_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "j"\nrepository = "."\ncommand = ["x"]\n[cage]\ntrainer_policy = "policy.json"\n'
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job(tmp_path / "job.toml")
    (tmp_path / "policy.json").write_text('{\n "Version": "2012-10-17",\n "Statement": []\n}\n')
    job = read_job(tmp_path / "job.toml")
    assert job.cage.trainer_policy == '{"Version":"2012-10-17","Statement":[]}'
    assert parse_job(job.to_document()) == job
    for bad in ("{", "[]", '{"Statement": "' + "x" * 2100 + '"}'):
        (tmp_path / "policy.json").write_text(bad)
        with pytest.raises(ConfigError, match="trainer_policy"):
            read_job(tmp_path / "job.toml")


def test_a_caged_trainer_with_a_policy_finds_the_credentials_of_its_own_role(account: None, tmp_path: Path) -> None:
    """By boto3's own way: the relay in the place of the metadata service, and AWS's answer to who that is."""
    script = """
import json, os, urllib.request
base = os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
def ask(path, method="GET", **headers):
    return urllib.request.urlopen(urllib.request.Request(base + path, method=method, headers=headers)).read().decode()
head = {"X-aws-ec2-metadata-token": ask("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})}
roles = "/latest/meta-data/iam/security-credentials/"
found = json.loads(ask(roles + ask(roles, **head), **head))
open(os.environ["SPOTHEAL_RESULTS_DIR"] + "/found.json", "w").write(json.dumps(found))
"""
    cage = {"mode": "on", "trainer_policy": '{"Version":"2012-10-17","Statement":[]}'}
    world = AgentWorld(tmp_path, script, {"cage": cage}, client=client)
    world.live()
    assert world.status()["phase"] == "done", world.status()["reason"]
    found = json.loads(world.store.get_bytes("results/found.json") or b"{}")
    trainer = boto3.client(
        "sts", region_name="us-west-2", aws_access_key_id=found["AccessKeyId"],
        aws_secret_access_key=found["SecretAccessKey"], aws_session_token=found["Token"],
    )  # fmt: skip
    assert ":assumed-role/spotheal-trainer-j/trainer-i-" in trainer.get_caller_identity()["Arn"]


# --------------------------------------------------------------------------------------- canaries through a whole agent
CANARIES = {
    "environment": "canary-environment-0123456789",
    "file": "canary-in-a-file-0123456789",
    "argument": "canary-argument-0123456789",
    "repository": "canary-repository-0123456789",
}
LEAKY = """
import base64, json, os, subprocess, sys, time
from pathlib import Path
secret = os.environ["ENVIRONMENT"]
for form in (secret, json.dumps(secret), base64.b64encode(secret.encode()).decode(), secret.encode().hex(),
             base64.b64encode(b"user:" + secret.encode()).decode()):
    print("leaks", form, flush=True)
    print("leaks", form, file=sys.stderr, flush=True)
sys.stdout.write("." * 8180 + secret + "," * 9000 + "\\n")
Path("note.txt").write_text(os.environ["FILE"])
print(Path("note.txt").read_text(), os.environ.get("REPOSITORY", "no repository secret here"))
subprocess.run([sys.executable, "-c", "import sys; print('child', sys.argv)", os.environ["ARGUMENT"]])
Path(os.environ["SPOTHEAL_METRICS_FILE"]).write_text(json.dumps({"step": 1, "note": secret}) + "\\n")
progress = Path(os.environ["SPOTHEAL_PROGRESS_FILE"])
(progress.parent / "new").write_text(json.dumps({"step": 1, "saved": {"step": 1, "path": secret, "time": ""}}))
os.replace(progress.parent / "new", progress)
time.sleep(0.3)
raise RuntimeError("failed with " + secret)
"""


@pytest.mark.processes
def test_canaries_in_environment_files_and_arguments_are_in_no_output_of_a_run(
    account: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in CANARIES.items():
        parameter(f"/spotheal/j/{name}", value)
    named = {name.upper(): f"ssm:/spotheal/j/{name}" for name in ("environment", "file", "argument")}
    world = AgentWorld(tmp_path, LEAKY, {"secrets": named, "limits": {"failures": 1}, "cage": {"mode": "on"}})
    world.client = client
    world.live()
    assert world.status()["phase"] == "failed"
    assert "no repository secret here" in "".join(
        (world.store.get_bytes(key) or b"").decode() for key, _ in world.store.sizes("logs/")
    )
    assert any("metrics" in key for key, _ in world.store.sizes())
    kept = {f"store:{key}": world.store.get_bytes(key) or b"" for key, _ in world.store.sizes()}
    places = [path for folder in ("var/log", "opt") for path in (world.root / folder).rglob("*") if path.is_file()]
    places += [path for path in (world.mounted / "logs").rglob("*.jsonl") if path.name != "metrics.jsonl"]  # its own
    kept |= {str(path): path.read_bytes() for path in places}
    said = capfd.readouterr()
    kept |= {"stdout": said.out.encode(), "stderr": said.err.encode(), "tags": str(world.volume_tags()).encode()}
    assert sum(b"[redacted]" in body for body in kept.values()) >= 4, list(kept)
    for value in CANARIES.values():
        forms = (value, value.encode().hex(), base64.b64encode(value.encode()).decode()[:-4], value[:20])
        assert [(place, form) for place, body in kept.items() for form in forms if form.encode() in body] == []
