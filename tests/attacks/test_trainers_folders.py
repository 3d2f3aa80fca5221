"""Whatever a trainer leaves in its folders, what root does there ends well, and touches nothing outside of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import hostile_trees
import pytest
import structlog

from spotheal.agent.aws.s3 import Store
from spotheal.agent.batch.copies import files_to_copy
from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders, give, publish
from spotheal.agent.life.finish import Finishing, store_results
from spotheal.agent.machine import efs_files
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.launchers import _script
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.logs import Logs
from spotheal.agent.record.metrics_shipping import Metrics
from spotheal.agent.record.status import Status
from spotheal.agent.record.unplaced_results import unplaced_results
from spotheal.agent.repository.working_copy import Record, files_of
from spotheal.agent.trainer.progress_files import describe, drop_metrics_after, grown_elsewhere, newest, progress_of
from spotheal.agent.trainer.ranks import last_words
from spotheal.agent.trainer.saved_files import SavedFiles
from spotheal.agent.trainer.set_aside import SaveShelf
from spotheal.agent.trainer.torn_saves import TornSave
from spotheal.agent.volume import extents
from spotheal.agent.volume.read_ahead import Reader, read_all
from spotheal.agent.volume.space import grown

MEMORY_MAX = 1 << 30
LOG = structlog.get_logger()
NOW = datetime(2026, 11, 22, tzinfo=timezone.utc)


class Taking(Store):
    """Takes every file's name, and reads no byte: a sparse file has more of them than any store."""

    def __init__(self) -> None:
        super().__init__(None, StoreUrl("bucket", "job/run"))
        self.taken: list[str] = []

    def put_file(self, key: str, path: Any, halt: Any = None) -> None:
        self.taken.append(key)

    def put_json(self, key: str, body: Any) -> None:
        self.taken.append(key)


def finishing(folders: Folders) -> Finishing:
    store, clock = Taking(), SystemClock()
    status, ledger = Status(store, clock, LOG), Ledger(store, clock, "i-1", "us-west-2a")
    return Finishing(store, None, clock, ledger, status, LOG, "i-1", "vol-1", folders.results)  # type: ignore[arg-type]


def account(uid: int = 54321) -> Account:
    return Account("spotheal-trainer", uid, uid, (uid,), Path("/nonexistent"))


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """The agent must not read a sparse file of 8 TiB; without this limit such a test takes the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_MAX, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    found = Folders.at(tmp_path, "/volume")
    found.make(None)
    found.clone.mkdir()
    return found


READER = Reader(1 << 30)


def order(folders: Folders) -> dict[str, str]:
    """Of a commit that has files where the trainer has put something else."""
    record = folders.private / "working-copy.json"
    Record("run", "1", {}, dict.fromkeys(("model.pt", "d/model.pt", "pipe.pt", "to-root/etc/passwd"), "")).write(record)
    found = {"copy": folders.clone, "environments": folders.environments, "checkpoints": folders.checkpoints}
    found |= {"record": record, "device": Path("/no/device"), "extents": folders.private / "extents.json"}
    return {name: str(path) for name, path in found.items()}


# What root does below the trainer's folders, which are one and the same here.
DEEDS: dict[str, Callable[[Folders], object]] = {
    "the mark of the saves": lambda it: SavedFiles(it).mark(),
    "torn saves": lambda it: SavedFiles(it).torn(),
    "whether anything is saved": lambda it: SavedFiles(it).anything(),
    "the newest checkpoint": lambda it: [describe(seen) for seen in [newest(it.checkpoints)] if seen],
    "files that grew elsewhere": lambda it: grown_elsewhere(it.clone, 0.0),
    "metrics after a step": lambda it: drop_metrics_after(it.metrics_file, 3),
    "the metrics": lambda it: Metrics(it.metrics_file).read(),
    "the progress": lambda it: progress_of(it.metrics_file),
    "what has grown": lambda it: grown(it.datasets, 0.0, never()),
    "unplaced results": lambda it: unplaced_results(it),
    "the commit's files": lambda it: None if (it.clone / "model.pt").exists() else files_of(it.clone),
    "what a container copies": lambda it: list(files_to_copy(it)),
    "the results": lambda it: store_results(finishing(it), never()),
    "the last words of ranks": lambda it: last_words(it.logs),
    "what is read ahead": lambda it: read_all(order(it), READER),
    "where the code lies": lambda it: extents.record(it, never()),
    "another owner": lambda it: give(it.checkpoints, account(os.getuid())),
    "a new environment": lambda it: untrusted_folders.remove(it.environments / "env-1"),
}


@pytest.mark.parametrize("tree", hostile_trees.TREES)
def test_no_tree_of_a_trainer_ends_what_root_does_there(folders: Folders, tree: str) -> None:
    top = folders.environments / "env-1"
    top.mkdir()
    hostile_trees.TREES[tree](top)
    one = dict.fromkeys(("datasets", "checkpoints", "results", "logs", "keep", "clone"), top)
    faults = []
    for deed, act in DEEDS.items():
        try:
            act(replace(folders, **one))
        except Exception as fault:  # noqa: BLE001 - whatever it is, it would end the agent
            faults.append(f"{deed}: {fault!r}")
    assert faults == []


def test_results_that_cannot_be_listed_are_not_called_stored(folders: Folders) -> None:
    hostile_trees.chain(folders.results, 60, "n" * 120)
    assert "lies too deep" in store_results(finishing(folders), never())


def test_more_files_than_a_walk_takes_are_left_out_and_no_result_is_called_stored(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million files would take the agent's memory."""
    monkeypatch.setattr(untrusted_folders, "WALK_BYTES_MAX", 20_000)
    for number in range(500):
        (folders.results / str(number)).touch()
    assert len(list(untrusted_folders.files(folders.results))) < 200
    assert "more files than can be listed" in store_results(finishing(folders), never())


# ---------------------------------------------------------------------------------------- what changes while it is used
def swapped(inner: Path, outside: Path) -> None:
    """What a trainer does between a check and its use."""
    inner.rename(inner.with_name("was-" + inner.name))
    inner.symlink_to(outside)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    found = tmp_path / "outside"
    (found / "deep").mkdir(parents=True)
    (found / "secret.pt").write_text("root's")
    (found / "deep" / "secret.pt").write_text("root's")
    return found


@pytest.mark.parametrize("by", ["openat2", "each folder"])
def test_a_folder_that_becomes_a_link_is_not_walked(
    tmp_path: Path, outside: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "each folder":
        monkeypatch.setattr(untrusted_folders.sys, "platform", "an older kernel")
    top = tmp_path / "top"
    (top / "a" / "deep").mkdir(parents=True)
    (top / "a" / "x.pt").write_text("the trainer's")
    seen = []
    for path, _, names, _ in untrusted_folders.walk(top):
        seen += [os.path.join(path, name) for name in names]
        if not path:
            swapped(top / "a", outside)
    assert seen == []


def test_a_folder_that_is_exchanged_with_a_link_all_the_time_is_never_left(tmp_path: Path, outside: Path) -> None:
    top, link = tmp_path / "top", tmp_path / "top" / "link"
    (top / "a" / "deep").mkdir(parents=True)
    (top / "a" / "deep" / "mine.pt").touch()
    link.symlink_to(outside)
    over = threading.Event()

    def exchange() -> None:
        libc = ctypes.CDLL(None)
        while not over.is_set():
            libc.renameat2(-100, os.fsencode(top / "a"), -100, os.fsencode(link), 2)  # AT_FDCWD, RENAME_EXCHANGE

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        seen = {os.path.basename(path) for _ in range(300) for path, _ in untrusted_folders.files(top)}
        for _ in range(300):
            with contextlib.suppress(OSError), untrusted_folders.file(top, "a/deep/secret.pt"):
                seen.add("secret.pt")
    finally:
        over.set()
        thread.join()
    assert seen == {"mine.pt"}


@pytest.mark.parametrize(
    "path", ["a/secret.pt", "a/deep/secret.pt", "../outside/secret.pt", "/etc/passwd", "to-secret"]
)
@pytest.mark.parametrize("by", ["openat2", "each folder"])
def test_no_file_is_opened_through_a_link_or_out_of_the_folder(
    tmp_path: Path, outside: Path, path: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "each folder":
        monkeypatch.setattr(untrusted_folders.sys, "platform", "an older kernel")
    top = tmp_path / "top"
    top.mkdir()
    (top / "a").symlink_to(outside)
    (top / "to-secret").symlink_to(outside / "secret.pt")
    with pytest.raises(OSError), untrusted_folders.file(top, path):
        pass


def test_a_file_of_the_results_whose_folder_became_a_link_is_not_uploaded(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "results" / "a").mkdir(parents=True)
    swapped(tmp_path / "results" / "a", outside)
    with pytest.raises(OSError):
        Store(None, StoreUrl("bucket", "job/run")).put_file("results/x", tmp_path / "results" / "a" / "secret.pt")
    with pytest.raises(OSError):
        efs_files.put(str(tmp_path / "results" / "a" / "secret.pt"), str(tmp_path), ["taken"])
    assert not (tmp_path / "taken").exists()


def test_a_save_whose_folder_became_a_link_is_not_set_aside(folders: Folders, outside: Path) -> None:
    (folders.checkpoints / "a").mkdir()
    (folders.checkpoints / "a" / "secret.pt").touch()
    save = TornSave(folders.checkpoints, "a/secret.pt", "is empty")
    swapped(folders.checkpoints / "a", outside)
    with pytest.raises(OSError):
        SaveShelf(folders).add(save, NOW)
    assert (outside / "secret.pt").read_text() == "root's"


def test_last_words_are_not_read_through_a_link(folders: Folders, outside: Path) -> None:
    (outside / "attempt_0" / "1").mkdir(parents=True)
    (outside / "attempt_0" / "1" / "stderr.log").write_text("Error: root's")
    (folders.logs / "none").symlink_to(outside)
    assert last_words(folders.logs) == []


def test_a_trainers_link_in_place_of_its_folder_is_not_walked(tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "checkpoints"
    link.symlink_to(outside)
    assert [path for path, _ in untrusted_folders.files(link)] != []  # ours: the machine's owner may move a folder
    if os.geteuid() == 0:
        os.lchown(link, 54321, 54321)
        assert [path for path, _ in untrusted_folders.files(link)] == []


# ------------------------------------------------------------------------------------------------- pipes and hard links
def test_a_pipe_in_place_of_what_root_writes_holds_nothing_up(folders: Folders) -> None:
    place = folders.environments / "complete"
    os.mkfifo(place.with_name(f".{place.name}.{os.getpid()}"))
    publish(place, "{}")
    assert place.read_text() == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_second_name_of_a_file_of_roots_is_not_given_away(folders: Folders) -> None:
    record = folders.environments / "run.json"
    record.write_text("{}")
    os.link(record, folders.checkpoints / "mine.pt")
    (folders.checkpoints / "own.pt").touch()
    give(folders.checkpoints, account())
    assert (record.stat().st_uid, (folders.checkpoints / "own.pt").stat().st_uid) == (0, 54321)


def test_no_log_line_goes_to_a_file_with_a_second_name(folders: Folders, tmp_path: Path) -> None:
    record = folders.environments / "run.json"
    record.write_text("{}")
    os.link(record, folders.logs / "i-1.jsonl")
    logs = Logs(tmp_path / "own")
    logs.use_volume(folders.logs, "i-1")
    logs.trainer_line("x")
    assert record.read_text() == "{}"


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs a file of the kernel's")
def test_a_script_that_is_a_file_of_the_kernels_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    """As root a read of /proc/kmsg or of trace_pipe waits without end; such files are regular and have no size."""
    (tmp_path / "launcher.sh").write_text("torchrun train.py")
    (tmp_path / "kernel.sh").symlink_to("/proc/version")
    os.mkfifo(tmp_path / "pipe.sh")
    texts = [_script(f"{name}.sh", tmp_path) for name in ("launcher", "kernel", "pipe")]
    assert texts == ["torchrun train.py", "", ""]
