"""A clone over ssh from a real sshd: a deploy key out of SSM, the host's key pinned, no prompt, nothing forwarded."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import structlog
from moto import mock_aws

from spotheal.agent.cage.secrets import REPOSITORY, Vault
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.repository.checkout import checkout
from spotheal.fleet.rehearsal.machines.sshd import find_sshd
from spotheal.fleet.request import known_hosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (find_sshd() and shutil.which("ssh")), reason="no ssh and sshd (Debian: openssh-server)"),
]
LOG = structlog.get_logger()
_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/authorized
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowAgentForwarding yes
UsePAM no
LogLevel ERROR
ForceCommand {folder}/forced.sh
"""


@dataclass
class Host:
    """An sshd with a repository of one commit; `trace` is the environment of the last session."""

    folder: Path
    port: int
    commit: str

    @property
    def url(self) -> str:
        return f"ssh://{os.environ.get('USER') or 'root'}@127.0.0.1:{self.port}{self.folder}/repository"

    @property
    def key(self) -> str:
        return (self.folder / "deploy").read_text()

    def known(self, of: str = "host") -> str:
        kind, key, *_ = (self.folder / f"{of}.pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {kind} {key}\n"

    @property
    def trace(self) -> str:
        return (self.folder / "trace").read_text()


def _key(file: Path, phrase: str = "") -> None:
    made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-C", "", "-f", str(file)]
    subprocess.run(made, check=True, stdin=subprocess.DEVNULL)


def _repository(folder: Path) -> str:
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    for name in ("host", "other", "deploy"):
        _key(folder / name)
    (folder / "authorized").write_text((folder / "deploy.pub").read_text())
    trace = shlex.quote(str(folder / "trace"))
    (folder / "forced.sh").write_text(f'#!/bin/sh\nenv > {trace}\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    (folder / "forced.sh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "config").write_text(_CONFIG.format(port=port, folder=folder))
    commit = _repository(folder / "repository")
    server = subprocess.Popen([str(find_sshd()), "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
    try:
        _await(port)
        yield Host(folder, port, commit)
    finally:
        server.terminate()
        server.wait(10)


def _await(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh reads no file of whoever runs the tests (it asks the system for the home: hence the file of hosts alone)."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GIT_SSH_COMMAND", raising=False)


def clone(host: Host, tmp_path: Path, secret: str, hosts: str) -> Path:
    job = {"name": "j", "repository": host.url, "command": ["python", "train.py"], "known_hosts": hosts}
    config = InstanceConfig(parse_job({"job": job}), "run", "us-west-2", StoreUrl("b", "j/run"), host.commit)
    return checkout(config, tmp_path / "src", clock=SystemClock(), log=LOG, secret=secret,
                    private=tmp_path / "private", network_seconds_max=20)  # fmt: skip


def test_a_deploy_key_out_of_ssm_clones_from_the_host_whose_key_is_pinned(host: Host, tmp_path: Path) -> None:
    with mock_aws():
        ssm: Any = boto3.client("ssm", region_name="us-west-2")
        ssm.put_parameter(Name="/spotheal/j/DEPLOY", Value=host.key, Type="SecureString")
        vault = Vault(lambda _: ssm, SystemClock(), never(), LOG)
        secret = vault.fetch({REPOSITORY: "ssm:/spotheal/j/DEPLOY"})[REPOSITORY]
    with structlog.testing.capture_logs() as logged:
        made = clone(host, tmp_path, secret, host.known())
    assert (made / "train.py").read_text() == "print(1)\n"
    body = host.key.splitlines()[2]
    assert body not in str(logged)
    left = [file for file in tmp_path.rglob("*") if file.is_file() and body in file.read_text(errors="replace")]
    assert left == [], "the key is gone when git is done"


def test_a_host_with_another_key_than_the_pinned_one_gets_nothing_and_is_named(host: Host, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed) as caught:
        clone(host, tmp_path, host.key, host.known("other"))
    assert "ost key verification failed" in caught.value.message or "HAS CHANGED" in caught.value.message
    assert "known_hosts" in caught.value.next_step
    assert not (tmp_path / "src" / "train.py").exists()


def test_a_key_that_is_not_let_in_ends_the_setup(host: Host, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match="ermission denied"):
        clone(host, tmp_path, (host.folder / "other").read_text(), host.known())


def test_a_key_with_a_passphrase_is_not_asked_for_it(host: Host, tmp_path: Path) -> None:
    _key(tmp_path / "locked", "secret phrase")
    with pytest.raises(SetupFailed):
        clone(host, tmp_path, (tmp_path / "locked").read_text(), host.known())


def test_no_agent_is_forwarded(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.run(["ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    named = dict(part.split("=") for part in started.replace("\n", "").split(";") if "=" in part)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", named["SSH_AUTH_SOCK"])
        clone(host, tmp_path, host.key, host.known())
        assert "SSH_CONNECTION" in host.trace and "SSH_AUTH_SOCK" not in host.trace
    finally:
        os.kill(int(named["SSH_AGENT_PID"]), 15)


# ------------------------------------------------------------------------------------------------- where keys come from
@pytest.mark.parametrize(
    ("repository", "host"),
    [("git@github.com:a/b.git", "github.com"), ("ssh://git@h.example:2222/a", "[h.example]:2222"), ("/srv/a:b", ""),
     ("ssh://git@h.example:22/a", "h.example"), ("https://github.com/a/b", ""), (".", ""), ("ssh://h:x/a", "")],
)  # fmt: skip
def test_the_host_of_an_address_is_named_as_known_hosts_does(repository: str, host: str) -> None:
    assert host == known_hosts.host_of(repository)


def test_the_keys_that_this_machine_knows_go_to_the_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh-keygen reads the known_hosts of the account's own home; here one that prints as it does."""
    said = "# Host h.example found: line 3 \\n|1|abc=|def= ssh-ed25519 AAAAkey\\n# Host h\\n@revoked h ssh-rsa AAAAold"
    program = tmp_path / "ssh-keygen"
    program.write_text(f"#!/bin/sh\n[ \"$1 $2\" = '-F h.example' ] && printf '{said}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert known_hosts.known("git@h.example:a/b") == "h.example ssh-ed25519 AAAAkey\n"
    assert known_hosts.known("git@other.example:a/b") == ""


@pytest.mark.parametrize("lines", ["h ssh-ed25519", "h ssh-ed25519 AAAA\n-oProxyCommand=x y z", "# h ssh-rsa AAAA", 1])
def test_what_is_no_line_of_known_hosts_is_refused(lines: Any) -> None:
    from spotheal.agent.protocol.errors import ConfigError

    job = {"name": "j", "repository": "git@h:a/b", "command": ["x"], "known_hosts": lines}
    with pytest.raises(ConfigError, match="known_hosts"):
        parse_job({"job": job})
