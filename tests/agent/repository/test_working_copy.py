"""The working copy on the volume: what survives a machine, a commit and a run, whenever a machine is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from working_copies import FIRST, LOG, PYTHON, SECOND, WHERE, configured, fetched, texts, written

from spotheal.agent.files.folders import Folders, give
from spotheal.agent.processes import programs
from spotheal.agent.processes.account import Account, trainer_account
from spotheal.agent.processes.foreign_command import Surroundings
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import Interrupted, Retryable, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.repository import carry_over, working_copy
from spotheal.agent.repository.working_copy import (
    changed_by_setup,
    is_on_volume,
    link_kept,
    make_working_copy,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    found = Folders.at(tmp_path / "root", "/volume")
    found.make(None)
    return found


def make(folders: Folders, config: InstanceConfig, files: dict[str, str], **more: Any) -> str:
    """As an instance does."""
    there = is_on_volume(config, folders)
    found = None if there else fetched(folders, files)
    return make_working_copy(config, folders, WHERE, PYTHON, LOG, fetched=found, **more)


# ---------------------------------------------------------------------------------------------------- of one commit
def test_what_a_script_writes_next_to_its_code_is_there_on_the_next_machine(folders: Folders) -> None:
    make(folders, configured(), FIRST)
    written(folders.clone, {"checkpoints/last.pt": "step 7", "log.csv": "step,loss\n7,0.5\n"})
    shutil.rmtree(folders.fetched)
    assert is_on_volume(configured(), folders)
    make(folders, configured(), FIRST)
    assert texts(folders.clone) == {**FIRST, "checkpoints/last.pt": "step 7", "log.csv": "step,loss\n7,0.5\n"}
    assert not folders.fetched.exists(), "neither the network nor the repository is needed"


@pytest.mark.parametrize("other", [
    configured("2" * 40), configured(run="another"), configured(submodules=True), configured(repository="https://h/s"),
])  # fmt: skip
def test_a_working_copy_of_something_else_does_not_count(folders: Folders, other: InstanceConfig) -> None:
    make(folders, configured(), FIRST)
    assert not is_on_volume(other, folders)


def test_a_working_copy_that_was_taken_away_is_made_again_and_setup_with_it(folders: Folders) -> None:
    before = make(folders, configured(), FIRST)
    assert make(folders, configured(), FIRST) == before != ""
    shutil.rmtree(folders.clone)
    assert make(folders, configured(), FIRST) not in ("", before)
    assert texts(folders.clone) == FIRST


def test_a_copy_that_is_not_on_the_disk_is_not_called_complete(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = programs.run
    failing = programs.Result(1, "", "sync: Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(programs, "run", lambda argv, **more: failing if argv[0] == "sync" else run(argv, **more))
        with pytest.raises(Retryable, match="Input/output error"):
            make(folders, configured(), FIRST)
    assert not is_on_volume(configured(), folders)
    make(folders, configured(), FIRST)
    assert texts(folders.clone) == FIRST


def test_a_volume_without_room_is_a_setup_failure_that_says_so(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = programs.Result(1, "", "cp: error writing '/v/a': No space left on device")
    monkeypatch.setattr(programs, "run", lambda argv, **_: full)
    with pytest.raises(SetupFailed, match="no room") as caught:
        make(folders, configured(), FIRST)
    assert "size_gib" in caught.value.next_step


@pytest.mark.parametrize("fault", [errno.ESTALE, errno.EIO])
def test_a_record_that_cannot_be_read_sets_no_copy_aside(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    """The server of EFS was away for a moment, or the disk failed one read."""
    make(folders, configured(), FIRST)
    written(folders.clone, {"checkpoints/last.pt": "step 7"})
    found, read = fetched(folders, FIRST), Path.read_text

    def failing(path: Path, **more: Any) -> str:
        if path.name == "working-copy.json":
            raise OSError(fault, os.strerror(fault))
        return read(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing)
        with pytest.raises(Retryable, match="cannot be read"):
            make_working_copy(configured(), folders, WHERE, PYTHON, LOG, fetched=found)
    make(folders, configured(), FIRST)
    assert texts(folders.clone) == {**FIRST, "checkpoints/last.pt": "step 7"}


# ------------------------------------------------------------------------------------------------- of another commit
def test_another_commit_replaces_its_own_files_and_keeps_what_the_script_wrote(folders: Folders) -> None:
    before = make(folders, configured(), FIRST)
    wrote = {"checkpoints/last.pt": "step 7", "lib/cache.bin": "cached", "log.csv": "step,loss\n7,0.5\n"}
    written(folders.clone, {**wrote, "__pycache__/train.pyc": "of the old commit"})
    (folders.clone / "run.sh").chmod(0o755)
    with capture_logs() as logged:
        after = make(folders, configured("2" * 40), SECOND)
    assert texts(folders.clone) == {**SECOND, **wrote}
    assert after == before, "setup's own files moved along"
    changed = [line["files"] for line in logged if "stay in place" in line["event"]]
    assert changed == [["log.csv (changed)"]], "appended to by the script: named"
    assert sorted(os.listdir(folders.environments)) == ["working-copy.json"]


def test_a_file_that_setup_patched_becomes_the_new_commits(folders: Folders) -> None:
    """`sed -i` in `setup`, which runs again at the new commit; what the script changed stays."""
    make(folders, configured(), FIRST)
    with changed_by_setup(folders, WHERE, PYTHON):
        written(folders.clone, {"lib/net.py": "patched", "train.py": "patched", "built.so": "made"})
    written(folders.clone, {"train.py": "patched, then changed by the script", "log.csv": "7,0.5\n"})
    with changed_by_setup(folders, WHERE, PYTHON):  # of another machine image: what the script wrote is not setup's
        written(folders.clone, {"log.csv": "7,0.5\npatched"})
    files = {**SECOND, "lib/net.py": "class Net: more"}
    make(folders, configured("2" * 40), files)
    mine = {"train.py": "patched, then changed by the script", "log.csv": "7,0.5\npatched", "built.so": "made"}
    assert texts(folders.clone) == {**files, **mine}


def test_what_setup_changed_when_the_machine_was_lost_counts_as_the_scripts(folders: Folders) -> None:
    make(folders, configured(), FIRST)
    with pytest.raises(Interrupted), changed_by_setup(folders, WHERE, PYTHON):
        written(folders.clone, {"lib/net.py": "half patched"})
        raise Interrupted("a notice")
    make(folders, configured("2" * 40), SECOND)
    assert (folders.clone / "lib/net.py").read_text() == "half patched"


def test_a_folder_of_the_scripts_is_renamed_whole(folders: Folders) -> None:
    """A data set of a million files costs one rename."""
    make(folders, configured(), FIRST)
    written(folders.clone, {"data/a": "a", "lib/more/b": "b"})
    inodes = [(folders.clone / name).stat().st_ino for name in ("data", "lib/more")]
    make(folders, configured("2" * 40), SECOND)
    assert [(folders.clone / name).stat().st_ino for name in ("data", "lib/more")] == inodes


def test_where_the_new_commit_has_another_kind_of_thing_nothing_of_the_scripts_is_lost(folders: Folders) -> None:
    make(folders, configured(), {**FIRST, "out/README": ""})
    written(folders.clone, {"runs/1": "one", "out/last.pt": "last", "model": "a file"})
    with capture_logs() as logged:
        make(folders, configured("2" * 40), {"train.py": "", "runs": "a file now", "out": "too", "model/net.py": ""})
    assert texts(folders.clone) == {
        "train.py": "", "runs/1": "one", "runs.spotheal": "a file now", "out/last.pt": "last", "out.spotheal": "too",
        "model/net.py": "", "model.spotheal": "a file",
    }  # fmt: skip
    named = [line["files"] for line in logged if "files" in line and isinstance(line["files"], list)]
    assert named == [["model (moved to model.spotheal)", "out (changed)", "runs (changed)"]]


def test_links_in_a_working_copy_are_moved_and_never_followed(folders: Folders, tmp_path: Path) -> None:
    written(tmp_path / "elsewhere", {"train.py": "of somebody else"})
    make(folders, configured(), FIRST)
    shutil.rmtree(folders.clone / "lib")
    (folders.clone / "lib").symlink_to(tmp_path / "elsewhere")
    (folders.clone / "train.py").unlink()
    (folders.clone / "train.py").symlink_to(tmp_path / "elsewhere/train.py")
    make(folders, configured("2" * 40), SECOND)
    assert os.readlink(folders.clone / "train.py") == str(tmp_path / "elsewhere/train.py")
    assert texts(tmp_path / "elsewhere") == {"train.py": "of somebody else"}


def test_a_folder_that_the_script_closed_is_carried_over_too(folders: Folders) -> None:
    make(folders, configured(), FIRST)
    written(folders.clone, {"lib/cache.bin": "cached"})
    (folders.clone / "lib").chmod(0o500)
    make(folders, configured("2" * 40), SECOND)
    assert (folders.clone / "lib/cache.bin").read_text() == "cached"


# ---------------------------------------------------------------------------------------------------- of another run
def test_a_new_run_begins_with_a_clean_copy_and_deletes_nothing(folders: Folders) -> None:
    before = make(folders, configured(), FIRST)
    written(folders.clone, {"checkpoints/last.pt": "of the first run"})
    assert make(folders, configured(run="second"), FIRST) != before
    assert texts(folders.clone) == FIRST
    aside = folders.clone.with_name("working-copy-run")
    assert (aside / "checkpoints/last.pt").read_text() == "of the first run"


def test_a_folder_of_the_users_own_in_its_place_is_set_aside(folders: Folders) -> None:
    written(folders.clone, {"notes.txt": "mine"})
    make(folders, configured(), FIRST)
    assert texts(folders.clone) == FIRST
    assert texts(folders.clone.with_name("working-copy-unknown")) == {"notes.txt": "mine"}


# -------------------------------------------------------------------------------------------------------- kept paths
def test_kept_paths_stay_links_over_another_commit(folders: Folders) -> None:
    keep = ["out", "log.csv"]
    make(folders, configured(keep=keep), FIRST)
    written(folders.clone, {"out/last.pt": "step 7"})
    make(folders, configured("2" * 40, keep=keep), {**SECOND, "out/README": "of the commit"})
    assert (folders.clone / "out").is_symlink() and (folders.clone / "log.csv").is_symlink()
    assert texts(folders.keep) == {"out/last.pt": "step 7", "out/README": "of the commit", "log.csv": "step,loss\n"}


@pytest.mark.parametrize(("revision", "keep"), [("1", ["out", "notes.csv"]), ("2", ["out", "notes.csv"]), ("2", [])])
def test_kept_paths_are_found_where_the_volume_is_mounted_elsewhere(
    folders: Folders, revision: str, keep: list[str]
) -> None:
    make(folders, configured(keep=["out", "notes.csv"]), FIRST)
    written(folders.clone, {"out/last.pt": "step 7", "notes.csv": "1,0.5\n"})
    folders.clone.parent.rename(folders.clone.parent.with_name("elsewhere"))
    moved = Folders.at(folders.clone.parent.parent, "/elsewhere")
    moved.make(None)
    make(moved, configured(revision * 40, keep=keep), SECOND)
    assert (moved.clone / "out/last.pt").read_text() == "step 7"
    assert (moved.clone / "notes.csv").read_text() == "1,0.5\n"
    assert texts(moved.keep) == {"out/last.pt": "step 7", "notes.csv": "1,0.5\n"}


def test_what_an_earlier_version_kept_is_found_also_where_job_toml_no_longer_names_it(folders: Folders) -> None:
    written(folders.keep, {"out/last.pt": "step 7", "lib/cache.bin": "cached", "train.py": "old"})
    make(folders, configured(), FIRST, began_earlier=True)
    assert (folders.clone / "out/last.pt").read_text() == "step 7"
    assert (folders.clone / "lib/cache.bin").read_text() == "cached"
    assert (folders.clone / "train.py").read_text() == FIRST["train.py"]
    make(folders, configured("2" * 40), SECOND)
    assert (folders.clone / "out/last.pt").read_text() == "step 7"


def test_a_new_run_on_a_volume_with_kept_paths_of_another_begins_clean(folders: Folders) -> None:
    written(folders.keep, {"out/last.pt": "step 7"})
    make(folders, configured(), FIRST)
    assert not (folders.clone / "out").exists()


def saved(folder: Path, name: str, text: str) -> None:
    """As a careful script saves: whole, under its name, by rename."""
    folder.mkdir(exist_ok=True)
    (folder / "new").write_text(text)
    os.replace(folder / "new", folder / name)


def test_the_newest_of_saves_that_replace_the_link_of_a_kept_path_is_found(folders: Folders) -> None:
    config = configured(keep=["last.pt"])
    make(folders, config, FIRST)
    for step in ("100", "200", "300"):
        saved(folders.clone, "last.pt", step)
        with capture_logs() as logged:
            make(folders, config, FIRST)
        assert (folders.clone / "last.pt").is_symlink()
        assert (folders.clone / "last.pt").read_text() == step
    assert texts(folders.keep) == {"last.pt": "300", "last.pt.spotheal": "100", "last.pt.spotheal2": "200"}
    assert [line["files"] for line in logged if "kept path" in line["event"]] == [
        ["last.pt (the copy before is last.pt.spotheal2)"]
    ]


def test_the_newest_of_saves_that_replace_the_link_of_a_kept_path_is_found_by_another_commit(folders: Folders) -> None:
    for step, (revision, files) in enumerate((("1", FIRST), ("2", SECOND), ("3", FIRST))):
        make(folders, configured(revision * 40, keep=["out/last.pt", "log.csv"]), files)
        if step:
            assert (folders.clone / "out/last.pt").read_text() == str(step - 1)
            assert (folders.clone / "log.csv").read_text() == "of the script"
        saved(folders.clone / "out", "last.pt", str(step))
        saved(folders.clone, "log.csv", "of the script")


def test_a_kept_folder_that_the_script_made_again_has_its_newest_files(folders: Folders) -> None:
    config, files = configured(keep=["out"]), {**FIRST, "out/README": "of the commit"}
    make(folders, config, files)
    written(folders.clone, {"out/a.pt": "old", "out/c.pt": "c", "out/README": "of the script", "out/runs": "a file"})
    (folders.clone / "out").rename(folders.clone / "out.old")
    written(folders.clone, {"out/a.pt": "new", "out/b.pt": "new", **files, "out/runs/1": "one", "out/c.pt": "c"})
    make(folders, config, files)
    assert (folders.clone / "out").is_symlink()
    assert texts(folders.keep / "out") == {
        "a.pt": "new", "a.pt.spotheal": "old", "b.pt": "new", "c.pt": "c", "README": "of the script",
        "runs/1": "one", "runs.spotheal": "a file",
    }  # fmt: skip


def test_a_file_in_place_of_a_kept_folder_wins_and_the_folder_stays_next_to_it(folders: Folders) -> None:
    config = configured(keep=["out/"])
    make(folders, config, FIRST)
    written(folders.clone, {"out/a.pt": "old"})
    (folders.clone / "out").unlink()
    (folders.clone / "out").write_text("a file")
    make(folders, config, FIRST)
    assert (folders.clone / "out").read_text() == "a file"
    assert texts(folders.keep) == {"out": "a file", "out.spotheal/a.pt": "old"}


def test_a_kept_path_in_a_folder_that_the_script_closed_is_moved(folders: Folders) -> None:
    make(folders, configured(), FIRST)
    written(folders.clone, {"closed/x": "1"})
    (folders.clone / "closed").chmod(0o555)
    link_kept(["closed"], folders, WHERE, PYTHON)
    assert texts(folders.keep) == {"closed/x": "1"}


# ------------------------------------------------------------------------------------------------------------ crashes
class Lost(BaseException):
    """The machine is gone."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The machine is lost before the n-th step that changes the volume; what it had done stays."""
    left = [10**6]

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Lost
            return work(*arguments, **more)

        return step

    def here(order: str, details: dict[str, str], *_: Any) -> list[dict[str, str]]:
        """The program's work in this process, so that it can be cut short."""
        assert order == "carry"
        files = json.loads(Path(details["record"]).read_text())["files"]
        carried = carry_over.carry(details["old"], details["new"], files, details["keep"])
        return [{"path": path, "what": what} for path, what in carried]

    monkeypatch.setattr(working_copy, "_run_program", here)
    for module, name in ((os, "rename"), (os, "mkdir"), (shutil, "rmtree"), (programs, "run"),
                         (working_copy, "publish"), (Path, "unlink")):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name)))

    def set_crash(number: int) -> None:
        left[0] = number

    return set_crash


@pytest.mark.parametrize("then", ["the same commit", "the commit before", "another run"])
def test_a_machine_may_be_lost_at_any_step_of_a_change_of_commit(
    tmp_path: Path, crash_at: Callable[[int], None], then: str
) -> None:
    wrote = {"checkpoints/last.pt": "step 7", "lib/cache.bin": "cached", "log.csv": "7,0.5\n", "old/mine": "", "z": "z"}
    number, crashed = 0, True
    while crashed:
        folders = Folders.at(tmp_path / str(number), "/volume")
        crash_at(10**6)
        folders.make(None)
        make(folders, configured(), FIRST)
        written(folders.clone, wrote)
        second = fetched(folders, SECOND)
        crash_at(number)
        try:
            make_working_copy(configured("2" * 40), folders, WHERE, PYTHON, LOG, fetched=second)
            crashed = False
        except Lost:
            crashed = True
        crash_at(10**6)
        if then == "another run":
            make(folders, configured("2" * 40, run="other"), SECOND)
            assert texts(folders.clone) == SECOND, number
            aside = texts(folders.clone.with_name("working-copy-run"))
            assert {name: aside.get(name) for name in wrote} == wrote, number
        else:
            config, files = (configured("2" * 40), SECOND) if then == "the same commit" else (configured(), FIRST)
            make(folders, config, files)
            assert texts(folders.clone) == {**files, **wrote}, number
            assert is_on_volume(config, folders)
        assert sorted(os.listdir(folders.environments)) == ["working-copy.json"]
        number += 1
    assert number > 12


def test_a_machine_may_be_lost_at_any_step_of_the_first_copy(tmp_path: Path, crash_at: Callable[[int], None]) -> None:
    number, crashed = 0, True
    while crashed:
        folders = Folders.at(tmp_path / str(number), "/volume")
        crash_at(10**6)
        folders.make(None)
        first = fetched(folders, FIRST)
        crash_at(number)
        try:
            make_working_copy(configured(), folders, WHERE, PYTHON, LOG, fetched=first)
            crashed = False
        except Lost:
            crashed = True
        crash_at(10**6)
        make(folders, configured(), FIRST)
        assert texts(folders.clone) == FIRST, number
        number += 1
    assert number > 5


# ---------------------------------------------------------------------------------------------------- another's files
@pytest.fixture
def open_folder() -> Iterator[Path]:
    """pytest's own folders are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="spotheal-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Machine:
    """Where root's agent makes the working copy of a trainer's user that is not root."""

    folders: Folders
    account: Account
    python: Path

    def make(self, config: InstanceConfig, files: dict[str, str]) -> None:
        found = None if is_on_volume(config, self.folders) else fetched(self.folders, files)
        where = Surroundings(self.account, SystemClock(), never())
        make_working_copy(config, self.folders, where, self.python, LOG, fetched=found)

    def written(self, files: dict[str, str]) -> None:
        written(self.folders.clone, files)
        give(self.folders.clone, self.account)


@pytest.fixture
def machine(open_folder: Path) -> Machine:
    account, python = trainer_account("nobody"), shutil.which("python3", path="/usr/bin:/bin")
    if account is None or python is None:
        pytest.skip("this machine has no user nobody, or no Python that it may run")
    folders = Folders.at(open_folder / "root", "/volume")
    folders.make(account)
    return Machine(folders, account, Path(python))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.root
@needs_root
def test_folders_that_the_trainers_user_may_not_write_are_carried_over(machine: Machine) -> None:
    """A read-only cache of modules, and folders that root made: over ssh, with sudo, or from a container."""
    clone = machine.folders.clone
    machine.make(configured(), FIRST)
    wrote = {"cache/x": "1", "lib/cache.bin": "2", "of-root/last.pt": "3", "old/of-root/a": "4", "old/closed/b": "5"}
    machine.written(wrote)
    for name, mode in (("cache", 0o555), ("lib", 0o555), ("old/closed", 0o000)):
        (clone / name).chmod(mode)
    for name in ("of-root", "old", "old/of-root"):
        os.chown(clone / name, 0, 0)
        (clone / name).chmod(0o700)
    machine.make(configured("2" * 40), SECOND)
    modes = [stat.S_IMODE((clone / name).stat().st_mode) for name in ("cache", "old/closed")]
    assert modes == [0o555, 0o000], "as the script left them"
    assert texts(clone) == {**SECOND, **wrote}
    assert sorted(os.listdir(machine.folders.environments)) == ["working-copy.json"]


@pytest.mark.root
@needs_root
def test_a_folder_that_cannot_be_listed_is_no_empty_one(machine: Machine) -> None:
    """It is all that the script added to a folder of the old commit."""
    machine.make(configured(), FIRST)
    machine.written({"old/closed/last.pt": "7"})
    (machine.folders.clone / "old/closed").chmod(0o000)
    machine.make(configured("2" * 40), SECOND)
    assert texts(machine.folders.clone) == {**SECOND, "old/closed/last.pt": "7"}


@pytest.mark.root
@needs_root
def test_what_cannot_be_carried_over_stays_next_to_the_new_copy(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system whose owners nobody can change."""
    clone = machine.folders.clone
    machine.make(configured(), FIRST)
    machine.written({"last.pt": "7", "of-root/a": "1", "lib/of-root/b": "2", "new.py/c": "3"})
    for name in ("of-root", "lib/of-root", "new.py"):
        os.chown(clone / name, 0, 0)
        (clone / name).chmod(0o755)
    monkeypatch.setattr(working_copy, "give", lambda path, account: path == clone or give(path, account))
    with capture_logs() as logged:
        machine.make(configured("2" * 40), SECOND)
    assert texts(clone) == {**SECOND, "last.pt": "7"}
    aside = clone.with_name("working-copy-" + "1" * 12)
    assert (aside / "of-root/a").read_text() == "1" and (aside / "lib/of-root/b").read_text() == "2"
    named = [(line["files"], line["path"]) for line in logged if "could not be moved" in line["event"]]
    assert named == [(["lib/of-root", "new.py", "of-root"], str(aside))]
    machine.make(configured("2" * 40), SECOND)
    machine.make(configured(), FIRST)
    assert (aside / "of-root/a").read_text() == "1", "another change of commit leaves it"


@pytest.mark.root
@needs_root
def test_what_could_not_be_moved_is_kept_however_many_files_are_named_after_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last 400 lines none said that something was left, and the copy before was deleted with it."""
    clone, many = machine.folders.clone, {f"z/{number}.csv": "" for number in range(500)}
    machine.make(configured(), {**FIRST, **many})
    machine.written({"a-of-root/a": "1", **dict.fromkeys(many, "appended")})
    os.chown(clone / "a-of-root", 0, 0)
    (clone / "a-of-root").chmod(0o755)
    monkeypatch.setattr(working_copy, "give", lambda path, account: path == clone or give(path, account))
    machine.make(configured("2" * 40), SECOND)
    assert (clone.with_name("working-copy-" + "1" * 12) / "a-of-root/a").read_text() == "1"


@pytest.mark.root
@needs_root
def test_a_kept_path_that_root_wrote_is_moved_too(machine: Machine) -> None:
    machine.make(configured(), FIRST)
    machine.written({"out/a": "1"})
    os.chown(machine.folders.clone / "out", 0, 0)
    machine.make(configured(keep=["out"]), FIRST)
    assert texts(machine.folders.keep) == {"out/a": "1"}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_is_the_trainers_users_also_where_that_has_another_number_now(open_folder: Path) -> None:
    account, python = trainer_account("nobody"), shutil.which("python3", path="/usr/bin:/bin")
    if account is None or python is None:
        pytest.skip("this machine has no user nobody, or no Python that it may run")
    folders = Folders.at(open_folder / "root", "/volume")
    for uid, revision, files in ((4321, "1", FIRST), (account.uid, "2", SECOND)):
        user = replace(account, uid=uid)
        where = Surroundings(user, SystemClock(), never())
        folders.make(user)
        found = fetched(folders, files)
        make_working_copy(configured(revision * 40), folders, where, Path(python), LOG, fetched=found)
        assert {path.lstat().st_uid for path in (folders.clone, *folders.clone.rglob("*"))} == {uid}
        written(folders.clone, {"last.pt": "step 7"})
        os.chown(folders.clone / "last.pt", uid, account.gid)
    assert texts(folders.clone) == {**SECOND, "last.pt": "step 7"}
    assert folders.environments.stat().st_uid == 0


@pytest.mark.parametrize("order", ["carry", "link"])
def test_folders_that_lie_too_deep_refuse_the_order_and_are_tried_once(tmp_path: Path, order: str) -> None:
    """They ended the program with a traceback, which was tried again without end."""
    old, new, keep = (tmp_path / name for name in ("old", "new", "keep"))
    subprocess.run(["mkdir", "-p", *(f"{top}/a{200 * '/d'}" for top in (old, new, keep))], check=True)
    (tmp_path / "record").write_text('{"files": {}}')
    details = {"old": str(old), "new": str(new), "copy": str(old), "keep": str(keep), "paths": ["a"],
               "record": str(tmp_path / "record")}  # fmt: skip
    text = Path(carry_over.__file__).read_text()
    # A fifth of Python's own limit, for a fifth of the folders.
    program = "import sys; sys.setrecursionlimit(150); exec(compile(sys.argv.pop(1), '<string>', 'exec'))"
    argv = [sys.executable, "-I", "-S", "-c", program, text, order, json.dumps(details)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    subprocess.run(["rm", "-rf", str(old), str(new), str(keep)], check=True)
    assert ended.returncode == carry_over.EXIT_REFUSED, ended.stderr[-300:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "refused": "folders in the working copy lie too deep to be moved"
    }
