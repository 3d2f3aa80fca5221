"""The user the trainer runs as. Foreign code never runs as root where there is such a user."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from typing import TypedDict

from spotheal.agent.processes.sandbox import Sandbox


class AsUser(TypedDict, total=False):
    """The arguments of subprocess.Popen that change the user; done in C between fork and exec."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class Account:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    sandbox: Sandbox | None = None  # where there is one, the account is the cage's own: nobody else runs as it

    def as_user(self) -> AsUser:
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}


def trainer_account(user: str) -> Account | None:
    """The account `user` (`cage.user`), or None where we are not root or it does not exist: then as ourselves.

    Supplementary groups are the account's own: access to GPUs is often given by group `video` or `render`.
    """
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return None
    if entry.pw_uid == 0:
        return None
    groups = tuple(group for group in os.getgrouplist(entry.pw_name, entry.pw_gid) if group != entry.pw_gid)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)
