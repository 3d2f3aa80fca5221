"""The user's own ssh to a job's instance: a key that EC2 Instance Connect accepts for a minute, the host's key from the
console, and the login of the image.

The user's ssh configuration comes first and wins (`Include`): a bastion (`Host 10.* / ProxyJump …`), another user or
port stay as they are there. SPOTHEAL_SSH_CONFIG names another file than ~/.ssh/config.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied, Retryable, SpothealError
from spotheal.agent.protocol.names import TAG_RUN
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session

CONNECT_SECONDS = 10
_KEYS = re.compile(r"(?ms)^-----BEGIN SSH HOST KEY KEYS-----\r?$(.*?)^-----END SSH HOST KEY KEYS-----\r?$")
_KEY_LINE = re.compile(r"(?m)^((?:ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+)(?: [^\n]*)?\r?$")
_USERS = (("ubuntu", "ubuntu"), ("debian", "admin"), ("amazon linux", "ec2-user"), ("amzn", "ec2-user"),
          ("al2023", "ec2-user"), ("al2", "ec2-user"), ("suse", "ec2-user"), ("rhel", "ec2-user"),
          ("rocky", "rocky"), ("centos", "centos"), ("fedora", "fedora"))  # fmt: skip
_PRIVATE = "it has no public address, and there is no way to its private one from here"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Host:
    """A pending or running instance. `address`: the public one, else the private one; "" while it has none."""

    instance: str
    state: str
    zone: str
    address: str
    is_public: bool
    image: str
    key_name: str
    groups: tuple[str, ...]
    launched: datetime


def hosts(session: Session, run: runs.Run) -> tuple[Host, ...]:
    """The run's pending and running instances, newest first."""
    filters = [{"Name": f"tag:{TAG_RUN}", "Values": [run.id]},
               {"Name": "instance-state-name", "Values": ["pending", "running"]}]  # fmt: skip
    instances = []
    with translated(f"list the instances of run {run.id}"):
        for page in session.client("ec2").get_paginator("describe_instances").paginate(Filters=filters):
            instances += [host_of(item) for reservation in page["Reservations"] for item in reservation["Instances"]]
    return tuple(sorted(instances, key=lambda host: host.launched, reverse=True))


def writer(session: Session, run: runs.Run, instance: str = "") -> Host | None:
    """The job's current instance: the instance that writes its status if it is up, else the newest that is up.

    Or `instance`, for a run on several machines; NotFound if it is not up.
    """
    up = [host for host in hosts(session, run) if host.state == "running" and host.address]
    if instance:
        match = next((host for host in up if host.instance == instance), None)
        if match is None:
            names = ", ".join(host.instance for host in up) or "none"
            raise NotFound(f"{instance} is no instance of run {run.id} that is up", next_step=f"up: {names}")
        return match
    named = str((run.store.read_status() or {}).get("instance") or "")
    return next((host for host in up if host.instance == named), up[0] if up else None)


def host_of(item: dict[str, Any]) -> Host:
    """An instance as EC2 describes it."""
    public = str(item.get("PublicIpAddress") or "")
    return Host(
        instance=str(item["InstanceId"]),
        state=str(item["State"]["Name"]),
        zone=str(item["Placement"]["AvailabilityZone"]),
        address=public or str(item.get("PrivateIpAddress") or ""),
        is_public=bool(public),
        image=str(item.get("ImageId") or ""),
        key_name=str(item.get("KeyName") or ""),
        groups=tuple(str(group.get("GroupId")) for group in item.get("SecurityGroups") or []),
        launched=item["LaunchTime"],
    )


def user_of(image_name: str) -> str:
    """The login of an image with this name; ubuntu if the name does not tell."""
    name = image_name.lower()
    matches = [(name.rfind(word), user) for word, user in _USERS if word in name]
    return max(matches)[1] if matches else "ubuntu"


def console_keys(console: str) -> list[str]:
    """The host keys that cloud-init printed: the first block, at the start of lines.

    A later block may come from a `setup` command of the repository, which could forge one; its lines have a log prefix.
    """
    block = _KEYS.search(console)
    return _KEY_LINE.findall(block.group(1)) if block else []


class Connection:
    """How ssh is called for one instance. A context: its end removes the files, the temporary key among them."""

    def __init__(self, session: Session, host: Host, say: Say, *, user: str = "", identity: Path | None = None) -> None:
        self.host, self._session, self._say = host, session, say
        self._wanted_user, self._identity = user, identity
        self._pushed: bool | None = None

    def __enter__(self) -> Connection:
        for program in ("ssh", "ssh-keygen"):
            if shutil.which(program) is None:
                raise ConfigError(f"there is no program {program!r} here", next_step="install OpenSSH's client")
        self._folder = Path(tempfile.mkdtemp(prefix="spotheal-ssh-"))
        self._key, self._config = self._folder / "key", self._folder / "config"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "fleetctl", "-f", str(self._key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        self._known_hosts = self._folder / "known_hosts"
        self._key_cache, self._knows_key = _key_cache_of(self.host.instance), True
        if self._key_cache.is_file():
            shutil.copyfile(self._key_cache, self._known_hosts)
        else:
            keys = self._console_keys()
            self._known_hosts.write_text("".join(f"{self.host.instance} {key}\n" for key in keys))
            self._knows_key = bool(keys)
            if not keys:
                self._say(f"the console of {self.host.instance} shows no host key: the key that it sends is trusted")
        self._write_config()
        self.user = self._effective_user()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def argv(self, command: Iterable[str] = (), options: Iterable[str] = ()) -> list[str]:
        """The key is pushed at each call: it is valid for a minute."""
        self._push_key()
        return ["ssh", "-F", str(self._config), *options, self.host.address, *command]

    # ------------------------------------------------------------------------------------------------------ the files
    def _write_config(self) -> None:
        """ssh takes the first value that it finds, so the user's own configuration comes first."""
        user_config = os.environ.get("SPOTHEAL_SSH_CONFIG") or str(Path.home() / ".ssh" / "config")
        keys = [f'  IdentityFile "{key}"' for key in (self._identity, self._key) if key]
        user = [f"  User {self._wanted_user}"] if self._wanted_user else []
        lines = [
            *(["Host *", *user] if user else []),
            f'Include "{user_config}"',
            "Host *",
            *([] if user else [f"  User {user_of(self._image_name())}"]),
            *keys,
            f"  HostKeyAlias {self.host.instance}",
            f'  UserKnownHostsFile "{self._known_hosts}"',
            "  GlobalKnownHostsFile /dev/null",
            f"  StrictHostKeyChecking {'yes' if self._knows_key else 'accept-new'}",
            "  UpdateHostKeys no",
            f"  ConnectTimeout {CONNECT_SECONDS}",
            "  ServerAliveInterval 10",
            "  ServerAliveCountMax 3",
            "  LogLevel ERROR",
        ]
        self._config.write_text("\n".join(lines) + "\n")

    def remember(self) -> None:
        """Keep the host's key after a successful login; a wrong key from the console is so never kept."""
        if self._key_cache.is_file() or not self._known_hosts.is_file():
            return
        with suppress(OSError):  # without a cache the console is asked each time
            self._key_cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self._key_cache.with_name(f".{self._key_cache.name}.{os.getpid()}.part")
            shutil.copyfile(self._known_hosts, part)
            part.replace(self._key_cache)

    def _console_keys(self) -> list[str]:
        """The host's keys, which cloud-init prints; AWS has the console some minutes after the start."""
        try:
            with translated(f"read the console of {self.host.instance}"):
                answer = self._session.client("ec2").get_console_output(InstanceId=self.host.instance)
        except SpothealError:
            return []
        return console_keys(str(answer.get("Output") or ""))

    def _image_name(self) -> str:
        try:
            with translated(f"describe {self.host.image}"):
                images = self._session.client("ec2").describe_images(ImageIds=[self.host.image]).get("Images", [])
        except SpothealError:
            return ""
        return f"{images[0].get('Name', '')} {images[0].get('Description', '')}" if images else ""

    def _effective_user(self) -> str:
        """The login that the whole configuration gives: the key must be pushed for it."""
        return self._settings().get("user", "ubuntu")

    def _settings(self) -> dict[str, str]:
        """The settings that ssh itself reads from the whole configuration."""
        process = subprocess.run(
            ["ssh", "-F", str(self._config), "-G", self.host.address],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if process.returncode != 0:
            message = process.stderr.strip()
            raise ConfigError(f"ssh refuses its configuration: {message}", next_step="correct ~/.ssh/config")
        return dict(line.split(" ", 1) for line in process.stdout.splitlines() if " " in line)

    def _push_key(self) -> None:
        try:
            with translated(f"send a key to {self.host.instance} (EC2 Instance Connect)"):
                self._session.client("ec2-instance-connect").send_ssh_public_key(
                    InstanceId=self.host.instance,
                    InstanceOSUser=self.user,
                    SSHPublicKey=self._key.with_suffix(".pub").read_text(),
                    AvailabilityZone=self.host.zone,
                )
            self._pushed = True
        except SpothealError as error:
            if self._pushed is None:
                key_pair = f"the key pair {self.host.key_name} or " if self.host.key_name else ""
                self._say(f"note: {error.message}; {key_pair}your own keys are tried")
            self._pushed = False

    # ------------------------------------------------------------------------------------------------------ what failed
    def refusal(self, message: str = "") -> SpothealError:
        """Why ssh could not connect. The port is tried, because ssh ends with 255 in every case."""
        host = self.host
        name = f"{host.instance} ({host.address})"
        try:
            with socket.create_connection(self._place(), timeout=CONNECT_SECONDS / 2):
                pass
        except ConnectionRefusedError:
            return Retryable(f"{name} takes no SSH yet", next_step="it may be booting: the same command in a minute")
        except OSError:
            groups = " ".join(host.groups) or "SECURITY_GROUP"
            closed = "its security group lets no SSH from this address in"
            return NotFound(
                f"{name} does not answer on port 22; most likely {closed if host.is_public else _PRIVATE}",
                next_step=f"`aws ec2 authorize-security-group-ingress --group-id {groups} --protocol tcp --port 22 "
                "--cidr YOUR_ADDRESS/32`, or a ProxyJump in ~/.ssh/config",
            )
        if "host key" in (message or self._probe()).lower():
            last = "at the last login" if self._key_cache.is_file() else "its console printed first"
            cure = "read `aws ec2 get-console-output`"
            if self._key_cache.is_file():
                cure = f"if not, remove {self._key_cache}"
            return PermissionDenied(
                f"{name} shows another host key than {last}: there is no login",
                next_step=f"somebody may be in between; {cure}",
            )
        return PermissionDenied(
            f"{name} refuses the login of {self.user}" + (f": {message}" if message else ""),
            next_step="--user for another login, --identity for your key pair's private key",
        )

    def _probe(self) -> str:
        """ssh's message when it connects without a login: an interactive ssh printed it to the terminal only."""
        argv = ["ssh", "-F", str(self._config), "-T", "-o", "BatchMode=yes", "-o", "PreferredAuthentications=none",
                self.host.address, "true"]  # fmt: skip
        with suppress(OSError, subprocess.TimeoutExpired):
            process = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * CONNECT_SECONDS)
            return process.stderr.decode(errors="replace")
        return ""

    def _place(self) -> tuple[str, int]:
        """The host name and port that ssh connects to, by the whole configuration."""
        settings = self._settings()
        return settings.get("hostname", self.host.address), int(settings.get("port", "22"))


def _key_cache_of(instance: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "spotheal" / "known_hosts" / instance
