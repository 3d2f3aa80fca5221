"""What real trainers do works in the cage, and meets no refused call."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotheal.agent.cage.user import cage_account
from spotheal.agent.processes.group import ForeignProgram, end_all_of
from spotheal.agent.processes.sandbox import Sandbox
from spotheal.agent.protocol.clock import SystemClock

USER = "spotheal-test-w"
CLOCK = SystemClock()
WORKLOADS = Path(__file__).with_name("workloads.py")
SECONDS_MAX = 300.0
pytestmark = [
    pytest.mark.root,
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(name) is None for name in ("useradd", "git", "cc")),
        reason="needs root, useradd, git and cc",
    ),
]


@pytest.fixture
def caged() -> Iterator[Callable[..., tuple[str, list[str]]]]:
    """Runs parts of workloads.py with this Python and its packages, which the other user may not be allowed to reach
    where they lie; gives the output and the calls that were refused."""
    place = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/var/lib"))
    place.chmod(0o755)
    torch = importlib.util.find_spec("torch")
    mounted = {"python": sys.base_prefix, "extra": os.environ.get("SPOTHEAL_EXTRA_PACKAGES", "")}
    mounted["packages"] = "" if torch is None else str(Path(torch.origin or "").parents[1])
    for name in ("etc", "work", *mounted):
        (place / name).mkdir()
    told: list[str] = []
    sandbox = Sandbox((place / "work",), place / "scratch", tell=lambda program, call: told.append(call))
    account = cage_account(USER, place / "work", sandbox, place / "etc")
    os.chown(place / "work", account.uid, account.gid)
    for name, folder in mounted.items():
        if folder:
            subprocess.run(["mount", "--bind", folder, str(place / name)], check=True)
    shutil.copy(WORKLOADS, place / "work")

    def run(*parts: str) -> tuple[str, list[str]]:
        lines: list[str] = []
        ended = threading.Event()
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        program = ForeignProgram(
            [str(place / "python/bin" / version), str(place / "work/workloads.py"), *parts],
            directory=place / "work",
            environment={
                "PATH": f"/usr/local/bin:/usr/bin:/bin:{place}/extra/bin", "HOME": str(place / "work"),
                "PYTHONHOME": str(place / "python"), "LD_LIBRARY_PATH": str(place / "python/lib"),
                "PYTHONPATH": f"{place}/packages:{place}/extra",
                "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            },
            account=account, on_line=lines.append, on_end=ended.set,
        )  # fmt: skip
        ended.wait(SECONDS_MAX)
        program.end_all(CLOCK)
        return "\n".join(lines), told

    try:
        yield run
    finally:
        end_all_of(account, CLOCK)
        for name in mounted:
            subprocess.run(["umount", str(place / name)], check=False, capture_output=True)
        shutil.rmtree(place)
        subprocess.run(["userdel", USER], capture_output=True, check=False)


def test_git_pip_threads_and_compilers_work(caged: Callable[..., tuple[str, list[str]]]) -> None:
    assert caged("git", "pip", "subprocesses") == ("git\npip\nsubprocesses", [])


@pytest.mark.torch
def test_workers_of_a_data_loader_and_ranks_of_gloo_work(caged: Callable[..., tuple[str, list[str]]]) -> None:
    assert caged("workers", "gloo") == ("workers\ngloo", [])


@pytest.mark.torch
@pytest.mark.skipif(not os.environ.get("SPOTHEAL_SLOW_WORKLOADS"), reason="takes a minute: part of `make soak`")
def test_a_compiled_model_a_profiler_and_spawned_workers_work(caged: Callable[..., tuple[str, list[str]]]) -> None:
    parts = ["spawned_workers", "profiler", "compiled"]
    said, told = caged(*parts)
    assert ([line for line in said.splitlines() if line in parts], told) == (parts, []), said


# A folder with wandb, py-spy and uv in it (`pip install --target`), which the tests do not install.
@pytest.mark.skipif("SPOTHEAL_EXTRA_PACKAGES" not in os.environ, reason="needs SPOTHEAL_EXTRA_PACKAGES, a folder")
@pytest.mark.parametrize("part", ["tracker", "sampler", "installer"])
def test_programs_that_trainers_bring_work(part: str, caged: Callable[..., tuple[str, list[str]]]) -> None:
    said, told = caged(part)
    assert (said.splitlines()[-1:], told) == ([part], [])
