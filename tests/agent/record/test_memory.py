"""What a run remembers of itself on its volume."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotheal.agent.files.folders import Folders
from spotheal.agent.record.run_state import RunMemory

RUN = "01J8Z3T2QK5V9W7X6Y5Z4A3B2C"


def folders(root: Path) -> Folders:
    found = Folders.at(root, "/dltraining")
    found.environments.mkdir(parents=True)
    return found


def test_the_next_instance_of_the_same_request_counts_on(tmp_path: Path) -> None:
    here = folders(tmp_path)
    memory = RunMemory(RUN, attempt=4, best_step=70, saved_step=60, failures=2, requested_at="2026-11-21T12:00:00Z")
    memory.write(here)
    assert RunMemory.read(here, RUN, "2026-11-21T12:00:00Z") == memory


def test_a_resumed_run_keeps_its_steps_and_is_forgiven_its_failures(tmp_path: Path) -> None:
    here = folders(tmp_path)
    RunMemory(RUN, attempt=4, best_step=70, saved_step=60, failures=3, requested_at="2026-11-21T12:00:00Z").write(here)
    resumed = RunMemory.read(here, RUN, "2026-11-22T08:00:00Z")
    assert (resumed.attempt, resumed.best_step, resumed.saved_step, resumed.failures) == (4, 70, 60, 0)


def test_another_runs_memory_and_garbage_are_no_memory(tmp_path: Path) -> None:
    here = folders(tmp_path)
    RunMemory("0" * 26, attempt=4).write(here)
    assert RunMemory.read(here, RUN) == RunMemory(RUN)
    (here.environments / "run.json").write_text("{")
    assert RunMemory.read(here, RUN) == RunMemory(RUN)


def test_what_a_run_remembers_is_on_the_disk_before_it_takes_the_old_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is killed half a minute after an attempt began left an empty file, and the run began at attempt 1:
    with its `command` and not its `resume_command`."""
    here, synced, replaced = folders(tmp_path), set(), []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    def noted_replace(old: Path, new: Path) -> None:
        replaced.append((os.stat(old).st_ino, os.stat(old).st_size))
        assert replaced[-1] in synced
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    RunMemory(RUN, attempt=4).write(here)
    assert replaced and os.stat(here.environments).st_ino in {inode for inode, _ in synced}
