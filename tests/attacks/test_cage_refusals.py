"""A refused call never holds a program up: not when the agent dies, not when nobody can answer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import allow_all

from spotheal.agent.cage.user import cage_account
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.group import ForeignProgram, end_all_of
from spotheal.agent.processes.sandbox import Sandbox
from spotheal.agent.protocol.clock import SystemClock

USER = f"spotheal-r{os.getpid()}"
PYTHON = "/usr/bin/python3"
CLOCK = SystemClock()
pytestmark = [
    pytest.mark.root,
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("useradd") is None or not os.path.exists(PYTHON),
        reason="needs root, useradd and a Python that other users may run",
    ),
]
# Writes the errno of a refused socket each time it is another.
TRY = """
import errno, socket, sys, time
last = 0
while True:
    try:
        socket.socket(43, 1, 0)
        now = 0
    except OSError as error:
        now = error.errno
    if now != last:
        print(errno.errorcode.get(now, now), file=open("errnos", "a"), flush=True)
    last = now
    time.sleep(0.02)
"""


@pytest.fixture
def account() -> Iterator[Account]:
    place = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/var/lib"))
    place.chmod(0o755)
    for name in ("etc", "work"):
        (place / name).mkdir()
    made = cage_account(USER, place / "work", Sandbox((place / "work",), place / "scratch"), place / "etc")
    os.chown(place / "work", made.uid, made.gid)
    yield made
    end_all_of(made, CLOCK)
    shutil.rmtree(place)
    subprocess.run(["userdel", USER], capture_output=True, check=False)


def start(account: Account, argv: list[str]) -> ForeignProgram:
    return ForeignProgram(
        argv, directory=Path(account.home), environment={"PATH": "/usr/bin:/bin"}, account=account, on_line=print
    )


def written(account: Account, count: int, name: str = "errnos") -> list[str]:
    """The words of a file in the program's folder, once there are `count`."""
    file, until = Path(account.home, name), time.monotonic() + 20
    while time.monotonic() < until:
        found = file.read_text().split() if file.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{name} was not written")


def test_a_program_goes_on_when_the_agent_that_answers_it_is_killed(account: Account) -> None:
    agent = os.fork()
    if agent == 0:
        start(account, [PYTHON, "-I", "-c", TRY])
        signal.pause()
    assert written(account, 1) == ["EAFNOSUPPORT"]
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert written(account, 2) == ["EAFNOSUPPORT", "ENOSYS"]


def test_where_somebody_answers_another_filter_calls_are_refused_all_the_same(account: Account) -> None:
    """A process has one listener at most; kernels before 5.0 know none."""
    agent = os.fork()
    if agent == 0:
        allow_all(8)  # SECCOMP_FILTER_FLAG_NEW_LISTENER
        program = start(account, [PYTHON, "-I", "-c", TRY])
        Path(account.home, "answered").write_text(str(program._refusals is not None))
        signal.pause()
    try:
        assert written(account, 1) == ["EAFNOSUPPORT"]
        assert written(account, 1, "answered") == ["False"]
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


@pytest.mark.parametrize("caged", [True, False])
def test_a_link_for_the_trainers_folder_does_not_lead_root_out_of_the_sandbox(account: Account, caged: bool) -> None:
    """By /proc/PID/root of the agent a second attempt stood in the machine's own mount namespace."""
    Path(account.home, "sub").symlink_to(f"/proc/{os.getpid()}/root/var")
    user = account if caged else replace(account, sandbox=None)
    with pytest.raises(OSError, match=r"its folder .*/sub: Permission denied"):
        ForeignProgram(
            ["sh", "-c", "pwd"], directory=Path(account.home, "sub"), environment={"PATH": "/usr/bin:/bin"},
            account=user, on_line=print,
        )  # fmt: skip
