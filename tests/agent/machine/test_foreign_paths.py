"""What foreign code leaves on disk or says about itself never makes the agent, which is root, write somewhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from spotheal.agent.files.folders import Folders, give
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.foreign_command import Surroundings
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.repository.checkout import checkout
from spotheal.agent.trainer.interpreter import probe
from spotheal.agent.trainer.progress_files import describe, newest
from spotheal.agent.trainer.setup import prepare

LOG = structlog.get_logger()
TRAINER = Account("trainer", 64998, 64998, (), "/")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of two users")


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    found = Folders.at(tmp_path / "root", "/volume")
    found.make(None)
    found.clone.mkdir()
    return found


def with_setup(*setup: list[str]) -> InstanceConfig:
    document = {"job": {"name": "j", "repository": "/r", "command": ["python", "t.py"], "setup": list(setup)}}
    return InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("bucket", "j/run"), "0" * 40)


@pytest.mark.processes
def test_a_python_that_lies_about_its_packages_has_nothing_written_there(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`usercustomize` in the trainer's home answers the probe. A .pth among the agent's own packages runs as root."""
    monkeypatch.setenv("HOME", str(folders.home))
    where = Surroundings(None, SystemClock(), never())
    python = probe(Path(sys.executable), folders, where)
    assert python is not None
    agents = tmp_path / "agents-packages"
    agents.mkdir()
    lie = json.dumps({"version": "3", "torch": "2", "venv": True, "site": [str(agents)]})
    home = folders.home / ".local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    home.mkdir(parents=True)
    (home / "usercustomize.py").write_text(f"import os\nprint({lie!r}, flush=True)\nos._exit(0)\n")
    prepare(with_setup(["true"]), folders, replace(python, is_venv=True), where, LOG)
    assert list(agents.iterdir()) == []


@root_only
@pytest.mark.parametrize("name", ["datasets", "checkpoints", "results", "logs", "keep", ".spotheal"])
def test_a_link_in_the_place_of_a_folder_gives_a_trainer_nothing_of_the_machine(tmp_path: Path, name: str) -> None:
    volume, system = tmp_path / "volume", tmp_path / "etc"
    volume.mkdir()
    system.mkdir(mode=0o700)
    (system / "shadow").touch(0o600)
    (volume / name).symlink_to(system)
    os.lchown(volume / name, TRAINER.uid, TRAINER.gid)
    with pytest.raises(SetupFailed, match=f"{name} is a link that user {TRAINER.uid} made"):
        Folders.at(tmp_path, "/volume").make(TRAINER)
    assert {(path.stat().st_uid, oct(path.stat().st_mode & 0o7777)) for path in (system, system / "shadow")} == {
        (0, "0o700"), (0, "0o600")
    }  # fmt: skip
    os.lchown(volume / name, 0, 0)  # the machine's owner may
    Folders.at(tmp_path, "/volume").make(TRAINER)


@root_only
def test_what_is_given_to_a_trainer_is_never_what_its_links_name(tmp_path: Path) -> None:
    outside, own = tmp_path / "outside", tmp_path / "own"
    for folder in (outside, own / "below"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (own / "link").symlink_to(outside)
    (own / "below/link").symlink_to(outside / "file")
    give(own, TRAINER)
    assert {path.stat().st_uid for path in (outside, outside / "file")} == {0}
    assert {path.lstat().st_uid for path in (own, *own.rglob("*"))} == {TRAINER.uid}


def test_a_files_name_forges_no_line_of_a_log_and_steers_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "step-1\n2026-11-21 08:00:00 error forged \x1b[31m").touch()
    found = newest(tmp_path)
    assert found is not None
    assert describe(found).startswith("step-1 2026-11-21 08:00:00 error forged  (0 bytes")


@pytest.mark.processes
def test_a_pipe_in_the_place_of_the_clones_mark_is_not_waited_for(tmp_path: Path) -> None:
    repository, target = tmp_path / "repository", tmp_path / "src"
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    job = parse_job({"job": {"name": "j", "repository": str(repository), "command": ["true"]}})
    config = InstanceConfig(job, "run", "us-west-2", StoreUrl("bucket", "j/run"), head)
    for _ in range(2):
        checkout(config, target, clock=SystemClock(), log=LOG)
        mark = tmp_path / "src.json"
        assert mark.is_file(), "made anew"
        mark.unlink()
        os.mkfifo(mark)


@root_only
def test_a_trainer_of_another_number_goes_on_with_its_metrics_and_its_ranks_logs(tmp_path: Path) -> None:
    """Another image gives the cage's user another number; what root wrote stays root's."""
    folders = Folders.at(tmp_path, "/volume")
    folders.make(TRAINER)
    ranks = folders.logs / "ranks/attempt-1"
    ranks.mkdir(parents=True)
    os.mkfifo(folders.logs / "pipe")
    (folders.logs / "agent.jsonl").touch()
    folders.metrics_file.touch()
    theirs = (folders.metrics_file, ranks, ranks.parent, folders.logs / "pipe")
    for path in theirs:
        os.chown(path, 64999, 64999)
    folders.make(TRAINER)
    assert {path.stat().st_uid for path in theirs} == {TRAINER.uid}
    assert (folders.logs / "agent.jsonl").stat().st_uid == folders.logs.stat().st_uid == 0
