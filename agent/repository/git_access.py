"""How git gets at a secret for the repository: a token by a credential helper, an ssh key by `ssh -i`.

The secret lies in a file in a folder that git's user alone may enter, while git runs; it is in no URL, argument,
environment or configuration, and goes to the repository's own host alone (submodules of other hosts get nothing).
Source: gitcredentials(7), git-credential(1).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.errors import SetupFailed

# Where no host key is known (`[job] known_hosts`) the first one seen is taken. Never ask: nobody is there.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ForwardAgent=no -o StrictHostKeyChecking=accept-new"
USER = "x-access-token"  # GitHub's word; GitLab and others take any beside a token
_FIX = "correct what `[job] repository_secret` names: a token or user:password for https, a private key for ssh"


@dataclass(frozen=True)
class GitAccess:
    """`options` for git, `ssh` for GIT_SSH_COMMAND ("": as it is). Neither holds a secret."""

    options: tuple[str, ...] = ()
    ssh: str = ""


@contextmanager
def access(
    secret: str, repository: str, private: Path, account: Account | None, known_hosts: str = ""
) -> Iterator[GitAccess]:
    """Access with `secret` as long as the context lasts; it is put below the folder `private`, best one in memory.

    With `known_hosts`, lines of such a file, no other key of the host is taken."""
    known_hosts = known_hosts.strip() if _is_ssh(repository) else ""
    if not secret and not known_hosts:
        yield GitAccess()
        return
    private.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="git-", dir=private))
    try:
        hosts = place / "known_hosts"
        if known_hosts:
            _write(hosts, f"{known_hosts}\n")
        ssh = _pinned(hosts) if known_hosts else SSH
        is_key = "PRIVATE KEY-----" in secret
        if secret and is_key != _is_ssh(repository):
            message = "is a private key, and the repository's address is no ssh" if is_key else "is no private key"
            raise SetupFailed(f"the repository's secret {message}", next_step=_FIX)
        file = place / "secret"
        if not secret:
            key_or_token = GitAccess(ssh=ssh)
        else:
            key_or_token = _key(secret, file, ssh) if is_key else _token(secret, repository, file)
        if account is not None:
            for path in (*place.iterdir(), place):
                os.chown(path, account.uid, account.gid)
        yield key_or_token
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _pinned(hosts: Path) -> str:
    """ssh that takes the keys in that file alone; the later of two equal options would be ignored."""
    options = f"-o UserKnownHostsFile={shlex.quote(str(hosts))} -o GlobalKnownHostsFile=/dev/null -o UpdateHostKeys=no"
    return f"{SSH.replace('=accept-new', '=yes')} {options}"


def _key(secret: str, file: Path, ssh: str) -> GitAccess:
    """ssh wants line ends of Unix, one after the last line, and nobody else who may read it."""
    _write(file, "\n".join(secret.strip().splitlines()) + "\n")
    return GitAccess(ssh=f"{ssh} -F none -o IdentitiesOnly=yes -o IdentityAgent=none -i {shlex.quote(str(file))}")


def _token(secret: str, repository: str, file: Path) -> GitAccess:
    user, colon, password = secret.strip().partition(":")
    if not colon:
        user, password = USER, user
    if not user or not password or re.search(r"[\r\n\0]", user + password):
        raise SetupFailed("the repository's secret is no token", next_step=_FIX)
    _write(file, f"username={user}\npassword={password}\n")
    parts = urlsplit(repository)
    host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    helper = f'!f() {{ test "$1" = get && cat {shlex.quote(str(file))}; }}; f'
    return GitAccess(("-c", "credential.helper=", "-c", f"credential.{host}.helper={helper}"))


def _write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8", newline="") as opened:
        opened.write(text)


def _is_ssh(repository: str) -> bool:
    scheme = urlsplit(repository).scheme if "://" in repository else ""
    return scheme == "ssh" or (not scheme and ":" in repository.partition("/")[0])
