"""Copies of checkpoints in the store: whole or not there, the newest whole one is read back."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from spotheal.agent.aws.s3 import Store
from spotheal.agent.batch.copies import Copies
from spotheal.agent.batch.copying import Copying
from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.services.client import InMemoryS3


@dataclass
class Disk:
    """One attempt's disk."""

    folders: Folders
    copies: Copies

    def write(self, name: str, text: str) -> Path:
        path = self.folders.checkpoints / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def read(self) -> dict[str, str]:
        top = self.folders.checkpoints
        return {str(path.relative_to(top)): path.read_text() for path in sorted(top.rglob("*")) if path.is_file()}


@pytest.fixture
def store() -> Store:
    return Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/run"))


def disk(tmp_path: Path, store: Store, term: int) -> Disk:
    folders = Folders.at(tmp_path / str(term), "/dltraining")
    folders.make(None)
    log: Any = structlog.get_logger()
    return Disk(folders, Copies(store, folders, term, SystemClock(), log))


def manifests(store: Store) -> list[str]:
    return [key for key in store.keys("checkpoints/") if key.endswith(".json")]


def blobs(store: Store) -> list[str]:
    return store.keys("checkpoints/blobs/")


def test_what_was_copied_is_read_back_with_links_modes_and_times(tmp_path: Path, store: Store) -> None:
    first, second = disk(tmp_path, store, 1), disk(tmp_path, store, 2)
    path = first.write("checkpoint-5/model.pt", "five")
    path.chmod(0o600)
    os.utime(path, ns=(1, 2_000_000_000))
    (first.folders.checkpoints / "last").symlink_to("checkpoint-5/model.pt")
    first.folders.metrics_file.write_text('{"step": 5}\n')
    assert first.copies.copy(5)
    found = second.copies.read_back()
    assert found is not None and found.saved_step == 5
    there = second.folders.checkpoints / "checkpoint-5/model.pt"
    assert (there.read_text(), there.stat().st_mode & 0o777, there.stat().st_mtime_ns) == ("five", 0o600, 2_000_000_000)
    assert os.readlink(second.folders.checkpoints / "last") == "checkpoint-5/model.pt"
    assert second.folders.metrics_file.read_text() == '{"step": 5}\n'


def test_nothing_to_read_back_is_a_run_that_begins(tmp_path: Path, store: Store) -> None:
    assert disk(tmp_path, store, 1).copies.read_back() is None


def test_a_copy_whose_contents_are_gone_or_wrong_is_passed_over(tmp_path: Path, store: Store) -> None:
    first = disk(tmp_path, store, 1)
    first.write("model.pt", "old")
    first.copies.copy(1)
    kept = set(blobs(store))
    first.write("model.pt", "new")
    first.copies.copy(2)
    (newest,) = set(blobs(store)) - kept
    store.put_bytes(newest, b"ne")
    second = disk(tmp_path, store, 2)
    found = second.copies.read_back()
    assert found is not None and (found.saved_step, second.read()) == (1, {"model.pt": "old"})
    store.delete(newest)
    assert disk(tmp_path, store, 3).copies.read_back() == found


def test_a_file_that_changes_while_it_is_sent_is_sent_again_before_the_copy_stands(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = disk(tmp_path, store, 1)
    path = one.write("model.pt", "half")
    send, changed = store.put_file, []

    def put_file(key: str, source: Path, halt: Any) -> None:
        if not changed:
            changed.append(path.write_text("whole and longer"))
        send(key, source, halt)

    monkeypatch.setattr(store, "put_file", put_file)
    monkeypatch.setattr("spotheal.agent.batch.copies._PAUSE_SECONDS", 0.01)
    assert one.copies.copy(1)
    assert len(manifests(store)) == 1 and len(blobs(store)) == 1
    second = disk(tmp_path, store, 2)
    second.copies.read_back()
    assert second.read() == {"model.pt": "whole and longer"}


def test_what_did_not_change_is_sent_once_and_what_nobody_names_is_deleted(tmp_path: Path, store: Store) -> None:
    one = disk(tmp_path, store, 1)
    one.write("tokenizer.json", "the same")
    sent = []
    for step in range(1, 6):
        one.write("model.pt", str(step))
        one.copies.copy(step)
        sent.append(len(blobs(store)))
    assert sent[-1] == 3 and len(manifests(store)) == 2, "the same file, and the model of the two newest copies"


def test_of_slots_the_two_newest_are_copied_and_no_half_written_file(tmp_path: Path, store: Store) -> None:
    one, other = disk(tmp_path, store, 1), disk(tmp_path, store, 2)
    for step in (9, 10, 11):
        one.write(f"step-{step}", str(step))
    one.write(".step.tmp", "half")
    one.write("milestone-5", "5")
    one.copies.copy(11)
    other.copies.read_back()
    assert other.read() == {"milestone-5": "5", "step-10": "10", "step-11": "11"}


def test_an_attempt_that_was_thought_dead_never_outranks_or_harms_its_successor(tmp_path: Path, store: Store) -> None:
    dead = disk(tmp_path, store, 1)
    for step in (1, 2, 3):
        dead.write("model.pt", f"dead {step}")
        dead.copies.copy(step)
    heir = disk(tmp_path, store, 2)
    heir.copies.read_back()
    heir.write("model.pt", "heir 4")
    heir.copies.copy(4)
    for step in (7, 8, 9):
        dead.write("model.pt", f"dead {step}")
        dead.copies.copy(step)
    third = disk(tmp_path, store, 3)
    third.copies.read_back()
    assert third.read() == {"model.pt": "heir 4"}


@pytest.mark.parametrize("folder", ["checkpoints", "results"])
def test_a_sparse_file_is_not_sent_as_zeros_and_keeps_no_other_from_the_copy(
    tmp_path: Path, store: Store, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TiB that takes nothing on the disk would keep a paid host for a day."""
    monkeypatch.setattr(untrusted_folders, "HOLES_BYTES_MAX", 1 << 20)
    one = disk(tmp_path, store, 1)
    one.write("a", "small")
    with (getattr(one.folders, folder) / "sparse").open("wb") as file:
        os.truncate(file.fileno(), 8 << 20)
    assert one.copies.copy(1)
    assert [store.get_bytes(key) for key in blobs(store)] == [b"small"]


def test_a_manifest_that_leads_out_of_the_folder_is_no_copy(tmp_path: Path, store: Store) -> None:
    entry = {"path": "../../etc/passwd", "size": 1, "sha256": "0" * 64, "mode": 420, "mtime_ns": 0, "link": ""}
    store.put_json("checkpoints/000001-000001.json", {"saved_step": 1, "files": [entry]})
    store.put_json("checkpoints/000001-000002.json", {"files": "none"})
    assert disk(tmp_path, store, 2).copies.read_back() is None


def planted(store: Store, *files: dict[str, Any]) -> None:
    """A copy that somebody who may write to the store has put there."""
    digest = hashlib.sha256(b"theirs").hexdigest()
    store.put_bytes(f"checkpoints/blobs/{digest}", b"theirs")
    whole = {"size": 6, "sha256": digest, "mode": 420, "mtime_ns": 0, "link": ""}
    store.put_json("checkpoints/000001-000001.json", {"saved_step": 1, "files": [whole | file for file in files]})


def test_no_link_of_a_copy_leads_another_file_of_it_out_of_the_folder(tmp_path: Path, store: Store) -> None:
    """Its own name, and the one that a link has until all contents are there, led to any folder of the container."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for term, name in enumerate(("checkpoints/.0.read-back.tmp", "checkpoints/a"), 2):
        planted(store, {"path": "checkpoints/a", "link": str(outside)}, {"path": f"{name}/b"})
        other = disk(tmp_path, store, term)
        other.copies.read_back()
        assert list(outside.iterdir()) == []
    (other.folders.checkpoints / "to-outside").symlink_to(outside)
    planted(store, {"path": "checkpoints/to-outside/b"})
    assert other.copies.read_back() is None and list(outside.iterdir()) == []


def test_a_copy_in_which_a_file_is_a_folder_too_is_no_copy(tmp_path: Path, store: Store) -> None:
    planted(store, {"path": "checkpoints/a"}, {"path": "checkpoints/a/b"})
    assert disk(tmp_path, store, 2).copies.read_back() is None


def test_contents_that_are_larger_than_the_copy_says_are_not_read_back(tmp_path: Path, store: Store) -> None:
    """They would fill the host's disk before their digest was looked at."""
    planted(store, {"path": "checkpoints/a", "size": 5})
    assert disk(tmp_path, store, 2).copies.read_back() is None


def test_the_last_copy_ends_in_time_however_large_a_file_is(tmp_path: Path, store: Store) -> None:
    one = disk(tmp_path, store, 1)
    clock = SystemClock()
    copying = Copying(one.copies, one.folders, 3600.0, lambda: 5, clock, structlog.get_logger())
    one.write("model.pt", "five")
    assert not copying.end(clock.monotonic() - 1.0) and blobs(store) == []


def test_results_come_back_too_and_one_that_changes_keeps_no_checkpoint_from_its_copy(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer drew in epoch 5 was lost with the host that it was drawn on."""
    one, other = disk(tmp_path, store, 1), disk(tmp_path, store, 2)
    one.write("model.pt", "five")
    results = one.folders.results
    (results / "plots").mkdir()
    (results / "plots/epoch-5.png").write_text("drawn")
    growing = results / "events.out"
    growing.write_text("0")
    send = store.put_file

    def put_file(key: str, source: Path, halt: Any) -> None:
        if source == growing:
            growing.write_text(growing.read_text() + "more")
        send(key, source, halt)

    monkeypatch.setattr(store, "put_file", put_file)
    assert one.copies.copy(5)
    assert other.copies.read_back() is not None and other.read() == {"model.pt": "five"}
    assert (other.folders.results / "plots/epoch-5.png").read_text() == "drawn"
    assert (other.folders.results / "events.out").read_text() == "0more"


def test_what_is_on_its_way_to_the_results_place_is_not_sent_twice_and_what_was_copied_stays(
    tmp_path: Path, store: Store
) -> None:
    one, other = disk(tmp_path, store, 1), disk(tmp_path, store, 2)
    one.write("model.pt", "five")
    (one.folders.results / "plot.png").write_text("drawn")
    copying = Copying(one.copies, one.folders, 3600.0, lambda: 5, SystemClock(), structlog.get_logger())
    one.write("model.pt", "the last")
    assert one.copies.copy(5)
    (one.folders.results / "model.bin").write_text("exported")
    sent = len(blobs(store))
    assert copying.end(None, new_results=False) and len(blobs(store)) == sent
    found = other.copies.read_back()
    assert found is not None and sorted(path.name for path in other.folders.results.iterdir()) == ["plot.png"]
    assert copying.end(None) and len(blobs(store)) == sent + 1, "the place does not take it: the copies do"


def test_a_small_file_that_names_the_newest_checkpoint_is_copied_when_it_alone_has_changed(
    tmp_path: Path, store: Store
) -> None:
    one, other = disk(tmp_path, store, 1), disk(tmp_path, store, 2)
    one.write("model-2.pt", "2" * 10_000)
    one.write("latest", "model-1.pt")
    (one.folders.checkpoints / "last").symlink_to("model-1.pt")
    copying = Copying(one.copies, one.folders, 3600.0, lambda: 5, SystemClock(), structlog.get_logger())
    one.write("latest", "model-2.pt.")
    assert copying.end(None)
    assert other.copies.read_back() is not None and other.read()["latest"] == "model-2.pt."


def test_a_disk_that_does_not_take_the_copy_is_another_hosts_to_try(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = disk(tmp_path, store, 1), disk(tmp_path, store, 2)
    one.write("model.pt", "five")
    one.copies.copy(5)

    def full(key: str, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "download", full)
    with pytest.raises(Retryable, match="cannot be read back here: No space left on device"):
        other.copies.read_back()
