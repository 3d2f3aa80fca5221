"""What a script wrote next to its code, as results, if it put none into its results folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from spotheal.agent.files.folders import Folders
from spotheal.agent.record.unplaced_results import LISTED, unplaced_results
from spotheal.agent.repository.carry_over import content_of

COMMIT = {"train.py": "print()", "log.csv": "step\n", "weights/base.pt": "of the commit"}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    found = Folders.at(tmp_path / "root", "/volume")
    found.make(None)
    write(found.clone, COMMIT)
    files = {name: content_of(str(found.clone / name)) for name in COMMIT}
    record = {"run": "run", "made": "1", "source": {}, "files": files}
    (found.environments / "working-copy.json").write_text(json.dumps(record))
    return found


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(folders: Folders, bytes_max: int = 10 << 30) -> list[str]:
    return [name for name, _ in unplaced_results(folders, bytes_max).files]


def test_what_the_script_wrote_or_changed_is_stored_and_the_commits_files_are_not(folders: Folders) -> None:
    write(folders.clone, {"model.pt": "weights", "out/a/curve.png": "curve", "log.csv": "step\n7\n"})
    assert sorted(names(folders)) == ["log.csv", "model.pt", "out/a/curve.png"]


def test_a_results_folder_that_holds_a_file_is_all_that_is_stored(folders: Folders) -> None:
    write(folders.clone, {"model.pt": "weights"})
    write(folders.results, {"deep/model.pt": "weights"})
    assert unplaced_results(folders).files == ()


def test_data_sets_environments_caches_and_wandb_are_listed_and_left(folders: Folders, tmp_path: Path) -> None:
    left = ("data/train.bin", "wandb/run/files", ".cache/x", "myenv/pyvenv.cfg", "my/conda/conda-meta/history")
    write(folders.clone, {**dict.fromkeys(left, "x"), "__pycache__/a.pyc": "x", ".git/HEAD": "x", "model.pt": "x"})
    found = unplaced_results(folders)
    assert [name for name, _ in found.files] == ["model.pt"]
    assert [line.partition(":")[0] for line in found.left_out] == [".cache/", "data/", "myenv/", "wandb/", "my/conda/"]
    assert not found.too_much
    stored = dict(found.listed_in(tmp_path))
    assert list(stored) == ["model.pt", LISTED]
    assert "wandb/" in stored[LISTED].read_text()


def test_the_smallest_come_first_and_what_is_too_much_is_named(folders: Folders) -> None:
    write(folders.clone, {"large.pt": "x" * 900, "small.pt": "x" * 50, "middle.pt": "x" * 60})
    found = unplaced_results(folders, bytes_max=120)
    assert [name for name, _ in found.files] == ["small.pt", "middle.pt"]
    assert found.too_much and found.left_out[0].startswith("large.pt: 900 bytes")


def test_links_pipes_and_names_for_terminals_do_no_harm(folders: Folders, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"secret": "x"})
    (folders.clone / "link").symlink_to(tmp_path / "elsewhere")
    (folders.clone / "file").symlink_to(tmp_path / "elsewhere/secret")
    os.mkfifo(folders.clone / "pipe")
    write(folders.clone, {"\x1b[2J.pt": "x" * 10})
    found = unplaced_results(folders, bytes_max=1)
    assert found.files == ()
    assert [line.isprintable() for line in found.left_out] == [True]


def test_nothing_is_stored_of_a_clone_that_ends_with_its_machine(folders: Folders) -> None:
    write(folders.fetched, {"model.pt": "weights"})
    assert names(replace(folders, clone=folders.fetched)) == []
