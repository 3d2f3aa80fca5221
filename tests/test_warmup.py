"""Reading ahead: what is read, and that it never stands in anybody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog

from spotheal.agent import warmup
from spotheal.agent.warmup import Warmup, newest_files, pythons, torch_libraries

LOG = structlog.get_logger()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A Python's folders with torch in them; the path of that Python."""
    site = tmp_path / "env/lib/python3.12/site-packages"
    for name in ("torch/lib/libtorch.so", "torch/lib/libc10.so.1", "nvidia/cublas/lib/libcublas.so.12", "torch/x.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(b"x" * 1000)
    python = tmp_path / "env/bin/python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    return python


def test_the_libraries_that_torch_opens_are_found_without_starting_python(environment: Path, tmp_path: Path) -> None:
    found = [path.name for path in torch_libraries([tmp_path / "none/bin/python", environment])]
    assert ["libc10.so.1", "libtorch.so", "libcublas.so.12"] == found


def test_a_python_that_job_toml_names_is_the_only_one_looked_at(environment: Path) -> None:
    assert [environment] == list(pythons(str(environment)))
    assert [] == list(pythons("no-such-python"))


def test_the_newest_checkpoint_is_a_file_or_all_files_of_a_folder(tmp_path: Path) -> None:
    for age, name in ((30, "step-1"), (20, "step-2"), (10, "checkpoint-3/model"), (10, "checkpoint-3/optimizer")):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
        os.utime(file, (time.time() - age,) * 2)
    os.utime(tmp_path / "checkpoint-3", (time.time() - 25,) * 2)
    assert [tmp_path / "step-2"] == newest_files(tmp_path)
    os.utime(tmp_path / "checkpoint-3", (time.time(),) * 2)
    assert ["model", "optimizer"] == [path.name for path in newest_files(tmp_path)]


def test_links_pipes_and_what_exceeds_the_bound_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a", 10), ("b", 100), ("c", 20)):
        (tmp_path / name).write_bytes(b"x" * size)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    monkeypatch.setattr(warmup, "BYTES_MAX", 40)
    files = [tmp_path / name for name in ("pipe", "link", "gone", "a", "b", "c")]
    assert ["a", "c"] == [path.name for path in warmup._within(files)]


def test_an_empty_or_missing_folder_is_no_fault(tmp_path: Path) -> None:
    warming = Warmup(LOG)
    warming.newest_checkpoint(tmp_path / "none")
    warming.newest_checkpoint(tmp_path)
    warming.libraries_of_torch("no-such-python")
    warming.end()


@pytest.mark.processes
def test_all_of_it_is_read(environment: Path) -> None:
    warming = Warmup(LOG)
    warming.libraries_of_torch(str(environment))
    assert 3 == len(warming._readers)
    warming.wait(10)
    assert [0, 0, 0] == [reader.returncode for reader in warming._readers]
    warming.end()


@pytest.mark.processes
def test_a_reader_is_gone_when_it_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is still there keeps the volume busy, and the unmount at a notice would wait for it."""
    file = tmp_path / "step-1"
    file.write_bytes(b"x")
    slow = tmp_path / "bin/cat"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nexec 3<{file}\nsleep 60 & wait\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    warming = Warmup(LOG)
    warming.newest_checkpoint(tmp_path)
    group = warming._readers[0].pid
    warming.end()
    left = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True, check=False)
    assert "" == "".join(line for line in left.stdout.splitlines() if not line.startswith("Z"))


@pytest.mark.processes
def test_reading_ends_by_itself_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-1").write_bytes(b"x")
    slow = tmp_path / "bin/cat"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    os.utime(slow.parent, (1, 1))
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    warming = Warmup(LOG, seconds_max=1)
    warming.newest_checkpoint(tmp_path)
    warming.wait(10)
    warming.end()


def test_a_machine_without_these_programs_boots_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-1").write_bytes(b"x")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    warming = Warmup(LOG)
    warming.newest_checkpoint(tmp_path)
    assert [] == warming._readers
