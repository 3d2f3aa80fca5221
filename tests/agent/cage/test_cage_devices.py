"""GPUs in the cage: device nodes as the driver makes them stay reachable, those of disks and of others do not."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotheal.agent.cage.user import cage_account
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.group import ForeignProgram, end_all_of
from spotheal.agent.processes.sandbox import Sandbox
from spotheal.agent.protocol.clock import SystemClock

USER = "spotheal-test-g"
CLOCK = SystemClock()
ZERO = os.makedev(1, 5)  # /dev/zero's numbers: what reads it gets bytes, what writes it is swallowed
GROUP, OTHERS = 64123, 64124
pytestmark = [
    pytest.mark.root,
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("useradd") is None, reason="needs root, useradd and mknod"),
]


def _node(path: str, mode: int, group: int, kind: int = stat.S_IFCHR, device: int = ZERO) -> None:
    try:
        os.mknod(path, kind | 0o600, device)
    except PermissionError:
        pytest.skip("this container may make no device nodes")
    os.chown(path, 0, group)
    os.chmod(path, mode)


@pytest.fixture
def devices() -> Iterator[None]:
    """As the NVIDIA driver makes its own (open to all, or to a group); a disk, and something of another group's."""
    made = {
        "/dev/nvidia-spotheal0": lambda path: _node(path, 0o666, 0),
        "/dev/nvidia-spotheal1": lambda path: _node(path, 0o660, GROUP),
        "/dev/spotheal-other": lambda path: _node(path, 0o660, OTHERS),
        "/dev/spotheal-disk": lambda path: _node(path, 0o660, 6, stat.S_IFBLK, os.makedev(7, 250)),
    }
    try:
        for path, make in made.items():
            make(path)
        yield
    finally:
        for path in (*made, "/dev/nvidia-spotheal2"):
            Path(path).unlink(missing_ok=True)


@pytest.fixture
def caged(devices: None) -> Iterator[Callable[..., str]]:
    """Runs a shell script in the cage; gives its output. `meanwhile` is called at its first line."""
    place = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/var/lib"))
    place.chmod(0o755)
    (place / "etc").mkdir()
    (place / "work").mkdir()
    account = cage_account(USER, place / "work", Sandbox((place / "work",), place / "scratch"), place / "etc")
    os.chown(place / "work", account.uid, account.gid)
    yield lambda script, meanwhile=None: _run(account, place, script, meanwhile)
    end_all_of(account, CLOCK)
    shutil.rmtree(place)
    subprocess.run(["userdel", USER], capture_output=True, check=False)


def _run(account: Account, place: Path, script: str, meanwhile: Callable[[], None] | None) -> str:
    lines: list[str] = []
    ended = threading.Event()

    def on_line(line: str) -> None:
        if not lines and meanwhile is not None:
            meanwhile()
        lines.append(line)

    program = ForeignProgram(
        ["/bin/sh", "-c", script], directory=place / "work", account=account, on_line=on_line, on_end=ended.set,
        environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": account.home},
    )  # fmt: skip
    ended.wait(30)
    program.end_all(CLOCK)
    return "\n".join(lines)


READ = "head -c 4 {0} 2>/dev/null | wc -c"


@pytest.mark.parametrize("name", ["nvidia-spotheal0", "nvidia-spotheal1"])
def test_a_gpus_device_is_read_and_written(caged: Callable[..., str], name: str) -> None:
    path = f"/dev/{name}"
    assert "4" == caged(READ.format(path))
    assert "written" == caged(f"echo x 2>/dev/null > {path} && echo written")


@pytest.mark.parametrize("name", ["spotheal-other", "spotheal-disk"])
def test_a_disk_and_a_device_of_another_group_are_closed(caged: Callable[..., str], name: str) -> None:
    path = f"/dev/{name}"
    assert "closed" == caged(f"test -r {path} || test -w {path} || echo closed")
    assert "0" == caged(READ.format(path))


def test_a_device_that_the_driver_makes_later_is_there(caged: Callable[..., str]) -> None:
    """/dev/nvidia-uvm comes at the first use of CUDA."""
    script = f"echo waiting; until test -e /dev/nvidia-spotheal2; do sleep 0.05; done; {READ}"
    said = caged(script.format("/dev/nvidia-spotheal2"), lambda: _node("/dev/nvidia-spotheal2", 0o666, 0))
    assert said.splitlines() == ["waiting", "4"]


def test_no_device_can_be_made_or_removed(caged: Callable[..., str]) -> None:
    said = caged(
        "mknod disk b 7 250 2>/dev/null && echo made; mknod zero c 1 5 2>/dev/null && echo made;"
        " rm -f /dev/nvidia-spotheal0 2>/dev/null; test -e /dev/nvidia-spotheal0 && echo there"
    )
    assert "there" == said


def test_no_group_but_those_of_gpus_is_kept(caged: Callable[..., str]) -> None:
    groups = caged("id -G").split()
    assert str(GROUP) in groups
    assert not {str(OTHERS), "0", "6"} & set(groups)
