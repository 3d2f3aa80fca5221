"""ssh to a job's instance: whose configuration wins, which keys are taken, and what is said when nobody comes in."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aws_calls
import pytest
from botocore.exceptions import ClientError

from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied, Retryable
from spotheal.fleet.logs.tail import Tail
from spotheal.fleet.rehearsal.machines import sshd
from spotheal.fleet.rehearsal.machines.sshd import Shells
from spotheal.fleet.run import ssh
from spotheal.fleet.run.ssh import Connection, Host, user_of

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
needs_sshd = pytest.mark.skipif(
    sshd.find_sshd() is None or shutil.which("ssh") is None or not sys.platform.startswith("linux"),
    reason="there is no sshd here (openssh-server)",
)
needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh here (openssh-client)")


OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


def host(**changes: Any) -> Host:
    values: dict[str, Any] = {
        "instance": "i-0a", "state": "running", "zone": "us-west-2a", "address": "192.0.2.7", "is_public": True,
        "image": "ami-1", "key_name": "", "groups": ("sg-1",), "launched": NOW,
    }  # fmt: skip
    return Host(**{**values, **changes})


class Session:
    """Answers of AWS: the console, the image, EC2 Instance Connect."""

    def __init__(self, shells: Shells | None = None) -> None:
        self.shells, self.console, self.image = shells, "", "Deep Learning OSS Nvidia Driver AMI (Ubuntu 22.04)"
        self.sent: list[tuple[str, str]] = []
        self.refuses = False

    def client(self, service: str) -> Session:
        return self

    def get_console_output(self, InstanceId: str) -> dict[str, str]:
        aws_calls.note_call("ec2", "GetConsoleOutput")
        return {"Output": self.console}

    def describe_images(self, ImageIds: list[str]) -> dict[str, Any]:
        aws_calls.note_call("ec2", "DescribeImages")
        return {"Images": [{"Name": self.image}]}

    def send_ssh_public_key(self, **given: str) -> dict[str, Any]:
        aws_calls.note_call("ec2-instance-connect", "SendSSHPublicKey")
        if self.refuses:
            error = {"Error": {"Code": "AccessDeniedException", "Message": "not authorized"}}
            raise ClientError(error, "SendSSHPublicKey")  # type: ignore[arg-type]
        self.sent.append((given["InstanceId"], given["InstanceOSUser"]))
        if self.shells is not None:
            self.shells.allow(given["InstanceId"], given["SSHPublicKey"])
        return {"Success": True}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPOTHEAL_SSH_CONFIG", str(tmp_path / "ssh_config"))
    return tmp_path


def connect(session: Session, said: list[str] | None = None, **options: Any) -> Connection:
    which = options.pop("host", None) or host()
    return Connection(session, which, (said if said is not None else []).append, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "user"),
    [
        ("Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.7 (Ubuntu 22.04) 20251101", "ubuntu"),
        ("Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.7 (Amazon Linux 2023) 20251101", "ec2-user"),
        ("al2023-ami-2023.6.20241010.0-kernel-6.1-x86_64", "ec2-user"),
        ("amzn2-ami-hvm-2.0.20240719.0-x86_64-gp2", "ec2-user"),
        ("debian-12-amd64-20241004-1890", "admin"),
        ("ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20240927", "ubuntu"),
        ("my own image", "ubuntu"),
        ("", "ubuntu"),
    ],
)
def test_the_login_is_the_one_that_the_image_is_known_to_have(image: str, user: str) -> None:
    assert user == user_of(image)


@needs_ssh
def test_the_users_own_configuration_wins_over_ours(home: Path) -> None:
    (home / "ssh_config").write_text("Host 192.0.2.*\n  User somebody\n  Port 2222\n  ProxyJump bastion\n")
    session = Session()
    with connect(session) as connection:
        assert "somebody" == connection.user
        asked = subprocess.run([*connection.argv(options=["-G"])], capture_output=True, text=True, check=True)
    assert {"port 2222", "proxyjump bastion", "hostkeyalias i-0a"} <= set(asked.stdout.splitlines())
    assert [("i-0a", "somebody")] == session.sent  # the key is for whoever logs in


@needs_ssh
def test_a_login_that_is_asked_for_wins_over_both(home: Path) -> None:
    (home / "ssh_config").write_text("Host *\n  User somebody\n")
    with connect(Session(), user="me") as connection:
        assert "me" == connection.user


@needs_ssh
def test_its_files_end_with_the_connection() -> None:
    with connect(Session()) as connection:
        (config,) = [word for word in connection.argv() if word.endswith("/config")]
        assert Path(config).exists()
    assert not Path(config).parent.exists()


@needs_ssh
def test_a_console_without_a_host_key_is_said_before_the_login() -> None:
    said = list[str]()
    with connect(Session(), said):
        assert ["the console of i-0a shows no host key: the key that it sends is trusted"] == said


@needs_ssh
def test_a_key_that_is_refused_is_said_once_and_ones_own_keys_are_tried() -> None:
    session, said = Session(), list[str]()
    session.refuses, session.console = True, BLOCK.format(OTHER_KEY)
    with connect(session, said, host=host(key_name="mine")) as connection:
        connection.argv()
        connection.argv()
    (note,) = said
    assert "EC2 Instance Connect" in note and "the key pair mine" in note


@needs_ssh
def test_a_configuration_that_ssh_refuses_is_named(home: Path) -> None:
    (home / "ssh_config").write_text("Nonsense yes\n")
    with pytest.raises(ConfigError, match=r"(?i)nonsense"), connect(Session()):
        pass


def test_without_ssh_the_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no program 'ssh'"), connect(Session()):
        pass


@needs_ssh
def test_why_ssh_failed_is_asked_of_the_port_itself(home: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, and nobody listens: refused
        (home / "ssh_config").write_text(f"Host *\n  HostName 127.0.0.1\n  Port {held.getsockname()[1]}\n")
        with connect(Session()) as connection:
            assert isinstance(connection.refusal(), Retryable)
            held.listen()
            refused = connection.refusal("Permission denied (publickey).")
    assert isinstance(refused, PermissionDenied) and "ubuntu" in refused.message
    assert "--identity" in refused.next_step


@needs_ssh
def test_an_instance_that_nobody_reaches_names_its_group_and_the_cure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(ssh.socket, "create_connection", unreachable)
    with connect(Session()) as connection:
        refused = connection.refusal()
    assert isinstance(refused, NotFound)
    assert "security group" in refused.message and "sg-1" in refused.next_step
    with connect(Session(), host=host(is_public=False)) as connection:
        assert "no public address" in connection.refusal().message


# ------------------------------------------------------------------------------------------------------- a real sshd
@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, Path, Shells]]:
    """An instance of the rehearsal that takes ssh; its root is a folder."""
    folder = tmp_path / "machine"
    root = folder / "root"
    (root / "var/log/spotheal").mkdir(parents=True)
    shells = Shells(tmp_path / "cloud")
    shells.is_on = True
    shells.start("i-0a", folder, "192.0.2.7", {"SPOTHEAL_ROOT": str(root), "HOME": str(root), "PATH": "/usr/bin:/bin"})
    monkeypatch.setenv("SPOTHEAL_SSH_CONFIG", str(shells.config))
    session = Session(shells)
    session.console = (folder / "console.log").read_text()
    yield session, root, shells
    shells.close()


def await_port(connection: Connection) -> None:
    import time

    for _ in range(100):
        if not isinstance(connection.refusal(), Retryable):
            return
        time.sleep(0.1)
    pytest.fail("sshd does not listen")


@needs_sshd
@pytest.mark.processes
def test_a_command_runs_there_with_a_key_of_a_minute_and_the_consoles_host_key(machine: Any) -> None:
    session, root, _ = machine
    with connect(session) as connection:
        await_port(connection)
        done = subprocess.run(
            connection.argv(["echo in $SPOTHEAL_ROOT; exit 3"], ["-T", "-o", "BatchMode=yes"]),
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert (3, f"in {root}\n") == (done.returncode, done.stdout), done.stderr


@needs_sshd
@pytest.mark.processes
def test_a_host_that_shows_another_key_than_its_console_is_not_talked_to(machine: Any) -> None:
    session, _, _ = machine
    session.console = BLOCK.format(OTHER_KEY)
    with connect(session) as connection:
        await_port(connection)
        argv = connection.argv(["true"], ["-T", "-o", "BatchMode=yes"])
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert 255 == done.returncode
        assert isinstance(connection.refusal("Host key verification failed."), PermissionDenied)


BLOCK = "-----BEGIN SSH HOST KEY KEYS-----\n{}\n-----END SSH HOST KEY KEYS-----\n"


@pytest.mark.parametrize(
    ("console", "keys"),
    [
        (BLOCK.format("ssh-ed25519 AAAATRUE a@ip") + BLOCK.format("ssh-ed25519 AAAAEVIL"), ["ssh-ed25519 AAAATRUE"]),
        ("agent: " + BLOCK.format("ssh-ed25519 AAAAEVIL x") + BLOCK.format("ssh-rsa AAAATRUE"), ["ssh-rsa AAAATRUE"]),
        (BLOCK.format("agent: ssh-ed25519 AAAAEVIL x"), []),
        (BLOCK.format("ssh-ed25519 AAAATRUE\n@cert-authority * ssh-rsa AAAAEVIL"), ["ssh-ed25519 AAAATRUE"]),
        (BLOCK.format("ssh-ed25519 AAAATRUE a\n\nssh-rsa BBBB b\n").replace("\n", "\r\n"),
         ["ssh-ed25519 AAAATRUE", "ssh-rsa BBBB"]),
        ("-----BEGIN SSH HOST KEY KEYS-----\nssh-ed25519 AAAAHALF", []),
        ("", []),
    ],
)  # fmt: skip
def test_only_whole_lines_of_the_consoles_first_block_are_keys(console: str, keys: list[str]) -> None:
    """A `setup` command can print a block of its own later, below a line of the agent's log."""
    assert ssh.console_keys(console) == keys


def _login(connection: Connection, command: str = "true") -> subprocess.CompletedProcess[str]:
    argv = connection.argv([command], ["-T", "-o", "BatchMode=yes"])
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@needs_sshd
@pytest.mark.processes
def test_a_key_that_never_let_anybody_in_is_not_kept(machine: Any, home: Path) -> None:
    session, _, _ = machine
    true = session.console
    session.console = BLOCK.format(OTHER_KEY)
    with connect(session) as connection:
        await_port(connection)
        refused = connection.refusal(_login(connection).stderr)
        assert "another host key" in refused.message
    session.console = true
    with connect(session) as connection:
        assert _login(connection).returncode == 0
        assert not list((home / "cache").rglob("i-0a"))
        connection.remember()
    session.console = BLOCK.format(OTHER_KEY)
    with connect(session) as connection:
        assert _login(connection).returncode == 0  # what let somebody in once counts for more than the console


@needs_sshd
@pytest.mark.processes
def test_a_changed_key_is_said_once_with_the_file_to_remove(machine: Any, home: Path) -> None:
    session, _, _ = machine
    known = home / "cache/spotheal/known_hosts/i-0a"
    known.parent.mkdir(parents=True)
    known.write_text(f"i-0a {OTHER_KEY}\n")
    with connect(session) as connection:
        await_port(connection)
        assert _login(connection).returncode == 255
        refused = connection.refusal()  # a shell's: what ssh said went to the terminal
    assert isinstance(refused, PermissionDenied) and str(known) in refused.next_step
    assert "i-0a (192.0.2.7) shows another host key than at the last login" in refused.message
    assert "\n" not in refused.message and "@@@" not in refused.message


@needs_sshd
@pytest.mark.processes
def test_a_tail_gives_all_lines_of_the_log_from_its_start_and_ends_with_the_machine(machine: Any) -> None:
    import time

    session, root, shells = machine
    log = root / "var/log/spotheal/agent.log"
    log.write_text("one\ntwo\n")
    with connect(session) as connection:
        await_port(connection)
        tail = Tail(connection)
        found: list[str] = []
        until = time.monotonic() + 20
        while len(found) < 3 and time.monotonic() < until:
            found += tail.lines()
            if len(found) == 2 and log.read_text() == "one\ntwo\n":
                with log.open("a") as file:
                    file.write("three\nhalf a li")
            time.sleep(0.05)
        assert ["one", "two", "three"] == found
        shells.end("i-0a")
        while tail.is_open and time.monotonic() < until:
            time.sleep(0.05)
        assert not tail.is_open
        assert [] == tail.lines()  # what is half comes whole from the store
        tail.close()
