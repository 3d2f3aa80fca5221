"""A network of its own for one program: a namespace with addresses, a folder, and a user that goes again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PYTHON = "/usr/bin/python3"  # one that other users may run
_TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class OwnNetwork:
    """`folder` is below /var/lib, where a cage hides nothing."""

    folder: Path
    space: str

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", self.space, *argv],
            capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}, cwd="/",
        )  # fmt: skip

    def run_script(self, script: Path, *arguments: str, beside: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """A program of the tests, with the folders `beside` of tests/ to import from; it must end with 0."""
        path = ":".join([*(str(_TESTS / name) for name in beside), str(_TESTS.parent / ".ci/import_path")])
        done = self.run(sys.executable, str(script), str(self.folder), *arguments, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr[-4000:]
        return done


def needs(*programs: str) -> list[pytest.MarkDecorator]:
    """The marks of a module whose tests need `own_network` and these programs."""
    missing = any(shutil.which(name) is None for name in programs) or not os.path.exists(PYTHON)
    reason = f"needs root, {', '.join(programs)} and a Python that other users may run"
    return [
        pytest.mark.root, pytest.mark.processes, pytest.mark.skipif(os.geteuid() != 0 or missing, reason=reason)
    ]  # fmt: skip


@contextmanager
def own_network(space: str, user: str, addresses: Sequence[str]) -> Iterator[OwnNetwork]:
    """`addresses` lie on its loopback device; `user` is the one that the program makes."""
    folder = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/var/lib"))
    folder.chmod(0o755)
    try:
        subprocess.run(["ip", "netns", "add", space], check=True)
        made = OwnNetwork(folder, space)
        for command in ("link set lo up", *(f"addr add {address} dev lo" for address in addresses)):
            done = made.run("ip", *command.split())
            assert done.returncode == 0, done.stderr
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False)
        subprocess.run(["userdel", user], capture_output=True, check=False)
        shutil.rmtree(folder)
