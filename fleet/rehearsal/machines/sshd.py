"""SSH on the rehearsal's instances: a real sshd each, as this user, on a free port of 127.0.0.1.

What AWS does around it is done here: the host's key on the console (cloud-init prints it), a key for 60 seconds
(EC2 Instance Connect), the key pair's own key, and addresses: an ssh_config leads from each public address to its port.
Where this machine has no sshd the instances have none either.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from spotheal.fleet.rehearsal import programs

KEY_SECONDS = 60  # AWS: "you have 60 seconds to connect"
_SSHD_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"
_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
LogLevel ERROR
ForceCommand {folder}/login.sh
"""


def find_sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{_SSHD_PATHS}")


@dataclass
class _Server:
    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    address: str


class Shells:
    """One sshd for each machine that is up. `config` is what an ssh client needs to find them (`ssh -F`)."""

    is_on = False  # only where somebody may log in: `fleetctl cloud`

    def __init__(self, folder: Path) -> None:
        self.config = folder / "ssh_config"
        self._sshd = find_sshd()
        self._servers: dict[str, _Server] = {}
        self._ended: set[str] = set()
        self._lock = threading.Lock()
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self._write_config()

    def start(self, instance: str, machine: Path, address: str, environment: dict[str, str], key: str = "") -> None:
        """`machine` is the machine's folder, `address` its public one, `key` the public key of its key pair."""
        if not self.is_on or self._sshd is None or shutil.which("ssh-keygen") is None:
            return
        folder = machine / "sshd"
        folder.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)  # sshd refuses to start without
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", instance, "-f", str(folder / "host_key")]
        if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
            return
        port = _free_port()
        (folder / "authorized_keys").write_text(f"{key}\n" if key else "")
        (folder / "sshd_config").write_text(_CONFIG.format(port=port, folder=folder))
        _program(folder / "login.sh", _login(environment))
        run = shlex.join([self._sshd, "-D", "-e", "-f", str(folder / "sshd_config")])
        _program(folder / "user-data.sh", f"#!/bin/sh\nexec {run}\n")
        process = subprocess.Popen(  # the first process of a machine: nothing below it outlives its pipe
            [sys.executable, "-I", "-S", str(programs.FOLDER / "init.py"), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        with self._lock:
            self._servers[instance] = _Server(folder, process, port, address)
            self._write_config()
        if instance in self._ended:  # meanwhile
            self.end(instance)
            return
        with (machine / "console.log").open("a") as console:
            public = (folder / "host_key.pub").read_text()
            console.write(f"-----BEGIN SSH HOST KEY KEYS-----\n{public}-----END SSH HOST KEY KEYS-----\n")

    def allow(self, instance: str, key: str) -> bool:
        """Let `key` in for a minute; False where the instance has no sshd."""
        with self._lock:
            server = self._servers.get(instance)
        if server is None:
            return False
        until = (datetime.now() + timedelta(seconds=KEY_SECONDS)).strftime("%Y%m%d%H%M%S")
        with (server.folder / "authorized_keys").open("a") as file:
            file.write(f'expiry-time="{until}" {key.strip()}\n')
        return True

    def end(self, instance: str) -> None:
        with self._lock:
            self._ended.add(instance)
            server = self._servers.pop(instance, None)
            if server is not None:
                self._write_config()
        if server is not None:
            with suppress(OSError):
                assert server.process.stdin is not None
                server.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(10)

    def close(self) -> None:
        for instance in list(self._servers):
            self.end(instance)

    def _write_config(self) -> None:
        lines = []
        for server in reversed(self._servers.values()):
            lines += [f"Host {server.address}", "  HostName 127.0.0.1", f"  Port {server.port}",
                      f"  User {getpass.getuser()}", ""]  # fmt: skip
        new_file = self.config.with_suffix(".part")
        new_file.write_text("\n".join(lines))
        new_file.replace(self.config)


def _login(environment: dict[str, str]) -> str:
    """The machine's own world, then the command that was asked for, or a shell."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
    return (
        f'#!/bin/sh\n{exports}cd "$HOME" 2>/dev/null || cd /\n'
        'if [ -n "$SSH_ORIGINAL_COMMAND" ]; then exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"; fi\nexec /bin/sh -i\n'
    )


def _program(path: Path, content: str) -> None:
    path.write_text(content)
    path.chmod(0o755)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
