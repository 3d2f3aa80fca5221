"""The cage's own user: made by the agent, a system user without login, password, home, sudo, cron or at."""

from __future__ import annotations

import glob
import os
import pwd
from pathlib import Path

from spotheal.agent.processes import programs
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.sandbox import Sandbox
from spotheal.agent.protocol.errors import Fatal, SetupFailed

_SECONDS_MAX = 60.0
_SYSTEM_UID_MAX = 999  # /etc/login.defs, SYS_UID_MAX: above are people
_NO_SHELLS = ("nologin", "false")
# Who may open these may use the GPUs (video, render) and the network cards of clusters; no other group is kept.
_DEVICES = ("/dev/nvidia*", "/dev/dri/*", "/dev/kfd", "/dev/infiniband/*", "/dev/gdrdrv")
_OFF = '`[cage] user` names another, and `[cage] mode = "off"` runs the trainer without a cage'


def cage_account(user: str, home: Path, sandbox: Sandbox, etc: Path = Path("/etc")) -> Account:
    """The account `user` for the cage alone; made where it is not there. Root only.

    Raises SetupFailed where it cannot be made or is a person's: all processes of it are killed at the end.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        _make(user)
        entry = pwd.getpwnam(user)
    _refuse_persons(entry)
    _deny_schedulers(user, etc)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, _device_groups(), str(home), sandbox)


def _make(user: str) -> None:
    """No home: ssh looks for keys in /nonexistent, and a trainer can write none there."""
    argv = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    try:
        process = programs.run([*argv, "--shell", "/usr/sbin/nologin", user], seconds_max=_SECONDS_MAX)
    except Fatal as error:
        raise SetupFailed(error.message, next_step=error.next_step) from error
    try:
        pwd.getpwnam(user)  # also where another has made it at the same moment
    except KeyError:
        raise SetupFailed(f"the trainer's user {user} cannot be made: {process.said}", next_step=_OFF) from None


def _refuse_persons(entry: pwd.struct_passwd) -> None:
    reason = ""
    if entry.pw_uid == 0:
        reason = "is root"
    elif entry.pw_uid > _SYSTEM_UID_MAX and os.path.basename(entry.pw_shell) not in _NO_SHELLS:
        reason = f"is a person's account (uid {entry.pw_uid}, shell {entry.pw_shell})"
    if reason:
        raise SetupFailed(
            f"the cage's user {entry.pw_name} {reason}: the cage kills every process of its user at the end",
            next_step=f"leave `[cage] user` out: the agent makes one. {_OFF}",
        )


def _deny_schedulers(user: str, etc: Path) -> None:
    """cron and at run what they are given outside of every cage. Where NAME.allow exists only its users may."""
    for name in ("cron", "at"):
        deny = etc / f"{name}.deny"
        if (etc / f"{name}.allow").exists():
            continue
        # Without either file Debian's cron is open to all; elsewhere, and for at, to root alone.
        if not deny.exists() and not (name == "cron" and (etc / "debian_version").exists()):
            continue
        text = deny.read_text(errors="replace") if deny.exists() else ""
        if user not in text.split():
            with deny.open("a") as file:
                file.write(("" if not text or text.endswith("\n") else "\n") + f"{user}\n")


def _device_groups() -> tuple[int, ...]:
    groups = set()
    for path in (path for pattern in _DEVICES for path in glob.glob(pattern)):
        try:
            groups.add(os.stat(path).st_gid)
        except OSError:
            continue
    return tuple(sorted(groups - {0}))
