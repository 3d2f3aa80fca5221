"""Reading ahead: what is read, and that it never stands in anybody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog

from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import never
from spotheal.agent.repository.working_copy import Record
from spotheal.agent.volume import extents, warmup
from spotheal.agent.volume.read_ahead import BLOCK_BYTES, EXTENTS, EXTENTS_BYTES_MAX, Reader, newest, read_all, recorded
from spotheal.agent.volume.warmup import Warmup, pythons, torch_libraries

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


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Of a volume that an earlier machine left."""
    found = Folders.at(tmp_path, "/volume")
    texts = {
        "working-copy/train.py": "x", "working-copy/__pycache__/train.pyc": "x", "working-copy/wrote.csv": "x",
        ".spotheal/env-old/a": "x", ".spotheal/env-new/lib/b.py": "x", "checkpoints/step-1": "x" * 3_000_000,
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / "volume" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "volume" / name).write_text(text)
    os.utime(found.environments / "env-old", (1, 1))
    Record("run", "1", {}, {"train.py": "x", "deleted.py": "x"}).write(found.private / "working-copy.json")
    return found


class Noting(Reader):
    """`seen`: what was opened, in that order."""

    def __init__(self, bytes_max: int = 1 << 30) -> None:
        self.seen: list[str] = []
        super().__init__(bytes_max)

    def read(self, top: Path, path: str) -> None:
        super().read(top, path)
        self.seen.append(Path(path).name)

    def read_block(self, device: int, offset: int) -> None:
        super().read_block(device, offset)
        self.seen.append(f"block {offset // BLOCK_BYTES}")


def read_all_of(folders: Folders, reader: Reader, device: str | Path = "/no/device") -> None:
    order = {"device": device, "extents": folders.private / EXTENTS,
             "copy": folders.clone, "record": folders.private / "working-copy.json",
             "environments": folders.environments, "checkpoints": folders.checkpoints}  # fmt: skip
    read_all({name: str(path) for name, path in order.items()}, reader)


def test_the_libraries_that_torch_opens_are_found_without_starting_python(environment: Path, tmp_path: Path) -> None:
    found = [path.name for path in torch_libraries([tmp_path / "none/bin/python", environment])]
    assert ["libc10.so.1", "libtorch.so", "libcublas.so.12"] == found


def test_a_python_that_job_toml_names_is_the_only_one_looked_at(environment: Path) -> None:
    assert [environment] == list(pythons(str(environment)))
    assert [] == list(pythons("no-such-python"))


def test_the_newest_checkpoint_is_a_file_or_a_folder(tmp_path: Path) -> None:
    for age, name in ((30, "step-1"), (20, "step-2"), (10, "checkpoint-3/model"), (5, ".hidden")):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
        os.utime(file, (time.time() - age,) * 2)
    os.utime(tmp_path / "checkpoint-3", (time.time() - 25,) * 2)
    assert "step-2" == newest(tmp_path)
    os.utime(tmp_path / "checkpoint-3", (time.time(),) * 2)
    assert "checkpoint-3" == newest(tmp_path)
    assert newest(tmp_path, "env-") == "" == newest(tmp_path / "none")


def test_links_pipes_and_what_exceeds_the_bound_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a", 10), ("b", 100), ("c", 20)):
        (tmp_path / name).write_bytes(b"x" * size)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    monkeypatch.setattr(warmup, "BYTES_MAX", 40)
    files = [tmp_path / name for name in ("pipe", "link", "gone", "a", "b", "c")]
    assert ["a", "c"] == [path.name for path in warmup._within(files, threading.Event())]


@pytest.mark.processes
def test_an_empty_or_missing_folder_is_no_fault(tmp_path: Path) -> None:
    warming = Warmup(LOG)
    warming.moved_volume(Folders.at(tmp_path, "/volume"), "/no/device")
    warming.libraries_of_torch("no-such-python")
    warming.wait(20)
    assert [0] == [reader.returncode for reader in warming._readers]
    warming.end()


@pytest.mark.processes
def test_all_of_it_is_read(environment: Path) -> None:
    warming = Warmup(LOG)
    warming.libraries_of_torch(str(environment))
    assert 3 == len(warming._readers)
    warming.wait(10)
    assert [0, 0, 0] == [reader.returncode for reader in warming._readers]
    warming.end()


def test_of_a_moved_volume_the_code_comes_first_and_the_checkpoint_last(folders: Folders) -> None:
    """What a trainer reads at its start, in its order; an import reads the byte code."""
    reader = Noting()
    read_all_of(folders, reader)
    assert ["train.pyc", "train.py", "b.py", "step-1"] == reader.seen


def test_what_a_trainer_put_in_a_files_place_is_not_read_ahead(folders: Folders) -> None:
    (folders.clone / "train.py").unlink()
    (folders.clone / "train.py").symlink_to("/dev/zero")
    (folders.clone / "__pycache__/away").symlink_to("/etc")
    (folders.environments / "env-new/away").symlink_to("/etc")
    os.mkfifo(folders.clone / "__pycache__/pipe")
    os.mkfifo(folders.clone / "deleted.py")
    reader = Noting(bytes_max=1000)
    read_all_of(folders, reader)
    assert reader._left == 998, "two files: no pipe, nothing behind a link, and not more than the bound"


def test_recorded_blocks_of_the_device_are_read_before_any_file(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(4 * BLOCK_BYTES))
    record = {"extents": [[2 * BLOCK_BYTES, 2 * BLOCK_BYTES], [0, BLOCK_BYTES]]}
    (folders.private / EXTENTS).write_text(json.dumps(record))
    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)  # not every file system of a test has it
    reader = Noting()
    read_all_of(folders, reader, device)
    assert sorted(reader.seen[:3]) == ["block 0", "block 2", "block 3"]
    assert reader.seen[3:] == ["train.pyc", "train.py", "b.py", "step-1"]


def test_neighbouring_extents_become_one_of_whole_blocks() -> None:
    found = extents.merged([(3 * BLOCK_BYTES, 10), (BLOCK_BYTES + 5, 4096), (2 * BLOCK_BYTES - 1, 2), (0, 1 << 12)])
    assert found == [(0, 4 * BLOCK_BYTES)]
    assert extents.merged([(5 * BLOCK_BYTES, 1), (0, 1)]) == [(0, BLOCK_BYTES), (5 * BLOCK_BYTES, BLOCK_BYTES)]


@pytest.mark.parametrize(
    "row",
    [[-BLOCK_BYTES, BLOCK_BYTES], [8 * BLOCK_BYTES, BLOCK_BYTES], [0, 9 * BLOCK_BYTES], [0, 0], [1, BLOCK_BYTES],
     [0, 4096], [True, BLOCK_BYTES], [0.0, BLOCK_BYTES], [0], {}, None, "no", [0, 1 << 70]],
)  # fmt: skip
def test_a_recorded_extent_that_is_not_within_the_device_is_left_out(row: object) -> None:
    text = json.dumps({"extents": [row, [BLOCK_BYTES, BLOCK_BYTES]]})
    assert recorded(text, 8 * BLOCK_BYTES) == [(BLOCK_BYTES, BLOCK_BYTES)]


def test_a_record_of_extents_is_bounded_in_bytes() -> None:
    text = json.dumps({"extents": [[0, EXTENTS_BYTES_MAX], [0, BLOCK_BYTES]]})
    assert recorded(text, 1 << 40) == [(0, EXTENTS_BYTES_MAX)]
    for text in ("", "[]", "{}", '{"extents": 3}'):
        with pytest.raises(ValueError, match=r"."):
            recorded(text, 1 << 40)


def test_the_record_has_the_commits_files_their_byte_code_and_then_the_newest_environment(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the script wrote: it may be a data set. A large file is read at full speed anyway."""
    (folders.clone / "away.pyc").symlink_to("/etc/passwd")
    monkeypatch.setattr(extents, "FILE_BYTES_MAX", 100)
    (folders.clone / "__pycache__/large.pyc").write_bytes(bytes(101))
    inodes: list[int] = []

    def extents_of(file: int) -> list[tuple[int, int]]:
        inodes.append(os.fstat(file).st_ino)
        return [(10 * len(inodes) * BLOCK_BYTES, 1)]

    monkeypatch.setattr(extents, "_extents_of", extents_of)
    extents.record(folders, never())
    paths = [folders.clone / "train.py", folders.clone / "__pycache__/train.pyc"]
    assert set(inodes[:2]) == {path.stat().st_ino for path in paths}
    assert inodes[2:] == [(folders.environments / "env-new/lib/b.py").stat().st_ino]
    written = (folders.private / EXTENTS).read_text()
    assert [offset // BLOCK_BYTES for offset, _ in recorded(written, 1 << 40)] == [10, 20, 30]


def test_no_record_is_written_if_the_file_system_does_not_say_where_a_file_lies(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(extents.fcntl, "ioctl", refused)
    extents.record(folders, never())
    assert not (folders.private / EXTENTS).exists()


@pytest.mark.processes
def test_a_reader_is_gone_when_it_is_told_to_end(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is still there keeps the volume busy, and the unmount at a notice would wait for it."""
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\nexec 3<{folders.checkpoints}/step-1\nsleep 60 & wait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    warming = Warmup(LOG)
    warming.moved_volume(folders, "/no/device")
    group = warming._readers[0].pid
    warming.end()
    left = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True, check=False)
    assert "" == "".join(line for line in left.stdout.splitlines() if not line.startswith("Z"))


@pytest.mark.processes
def test_reading_ends_by_itself_in_time(folders: Folders) -> None:
    (folders.private / "working-copy.json").unlink()
    os.mkfifo(folders.private / "working-copy.json")  # nobody writes into it: a read that takes for ever
    warming = Warmup(LOG, seconds_max=1)
    warming.moved_volume(folders, "/no/device")
    warming.wait(20)
    assert [-signal.SIGALRM] == [reader.returncode for reader in warming._readers]
    warming.end()


def test_a_machine_without_these_programs_boots_all_the_same(
    environment: Path, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    warming = Warmup(LOG)
    warming.libraries_of_torch(str(environment))
    warming.moved_volume(folders, "/no/device")
    warming.end()
    assert [] == warming._readers
