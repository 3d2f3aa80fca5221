"""Reading ahead: what is read, and that it never stands in anybody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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


def read_newest_of(folder: Path, warming: Warmup) -> None:
    """As of a moved volume that has nothing but checkpoints; until a reader is at work."""
    warming.moved_volume(lambda: [], folder / "none", folder)
    until = time.monotonic() + 20
    while not warming._readers and time.monotonic() < until:
        time.sleep(0.01)
    assert warming._readers


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
    assert ["a", "c"] == [path.name for path in warmup._within(files, threading.Event())]


def test_an_empty_or_missing_folder_is_no_fault(tmp_path: Path) -> None:
    warming = Warmup(LOG)
    for folder in (tmp_path / "none", tmp_path):
        warming.moved_volume(lambda: [], folder, folder)
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
    read_newest_of(tmp_path, warming)
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
    read_newest_of(tmp_path, warming)
    warming.wait(10)
    assert [reader.returncode for reader in warming._readers] != [None]
    warming.end()


def test_a_machine_without_these_programs_boots_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-1").write_bytes(b"x")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    warming = Warmup(LOG)
    warming.moved_volume(lambda: [tmp_path / "step-1"], tmp_path, tmp_path)
    warming.end()
    assert [] == warming._readers


@pytest.mark.processes
def test_of_a_moved_volume_the_code_comes_first_and_the_checkpoint_last(tmp_path: Path) -> None:
    """What a trainer reads at its start, in its order: a copy gives each block slowly at its first reading."""
    for name in ("code/train.py", "environments/env-old/a", "environments/env-new/lib/b.py", "checkpoints/step-1"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    os.utime(tmp_path / "environments/env-old", (1, 1))
    warming = Warmup(LOG)
    commit = [tmp_path / "code/train.py", tmp_path / "code/deleted.py"]
    warming.moved_volume(lambda: commit, tmp_path / "environments", tmp_path / "checkpoints")
    assert warming._thread is not None
    warming._thread.join(20)
    assert ["train.py", "b.py", "step-1"] == [Path(str(reader.args[-1])).name for reader in warming._readers]  # type: ignore[index]
    assert {0} == {reader.returncode for reader in warming._readers}
    warming.end()


@pytest.mark.processes
def test_what_is_listed_for_reading_ends_with_the_volume_and_goes_on_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    warming = Warmup(LOG)
    listing, over = threading.Event(), threading.Event()

    def slowly() -> Iterator[Path]:
        for _ in range(1000):
            listing.set()
            over.wait(0.05)
            yield tmp_path / "a"

    warming.moved_volume(slowly, tmp_path / "none", tmp_path / "none")
    assert listing.wait(20)
    first = warming._thread
    warming.end()
    assert first is not None and not first.is_alive()
    assert [] == warming._readers
    read_newest_of(tmp_path, warming)
    warming.end()
