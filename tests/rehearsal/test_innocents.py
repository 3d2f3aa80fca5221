"""Scripts that know nothing of spotheal, on two machines: the innocent are not blamed, those that lose work are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from innocent_scripts import GUILTY, WITHOUT_TORCH, command, files

from spotheal.agent.files.folders import Folders
from spotheal.fleet.rehearsal.scenarios import survival
from spotheal.fleet.rehearsal.scenarios.survival import Survival

pytestmark = pytest.mark.processes
_STEPS, _SECONDS = 12, 0.05


class Lives:
    """Machines of one script, looked at as a rehearsal does; the volume goes from one to the next."""

    def __init__(self, name: str, root: Path) -> None:
        self._root, self._argv, self._own = root, command(name, _STEPS, _SECONDS), files(name)
        self._copy = self._folders("i-1").clone
        self._copy.mkdir(parents=True)
        for file, text in self._own.items():
            (self._copy / file).write_text(text)
            (self._copy / file).chmod(0o755)
        self.seen = Survival(root / "links")

    def live(self, instance: str, killed: str = "") -> int:
        """The trainer's exit code. `killed`: "saved" soon after it has written something, "early" in any case."""
        folders = self._folders(instance)
        log = self._root / instance / "agent.log"
        for folder in (folders.home, folders.checkpoints, folders.results, folders.progress_file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self.seen.look(instance, folders, log)
        log.write_text("starting the trainer\n")
        self.seen.look(instance, folders, log)
        with subprocess.Popen(
            self._argv, cwd=folders.clone, env=self._environment(folders), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as trainer:  # fmt: skip
            pause, looks = threading.Event(), 0
            while trainer.poll() is None:
                self.seen.look(instance, folders, log)
                looks += killed == "early" or self._has_written(folders)
                if killed and looks > 5:
                    os.killpg(trainer.pid, 9)
                pause.wait(0.03)
        self.seen.look(instance, folders, log)
        return trainer.returncode

    def _has_written(self, folders: Folders) -> bool:
        written = [path.name for path in folders.clone.rglob("*") if path.is_file()]
        return bool(set(written) - set(self._own)) or any(any(place.iterdir()) for place in (
            folders.checkpoints, folders.home))  # fmt: skip

    def move(self, instance: str, successor: str) -> None:
        """The volume goes to the next machine; the home does not."""
        (self._root / successor).mkdir()
        (self._root / instance / "v").rename(self._root / successor / "v")
        shutil.rmtree(self._root / instance)

    def _folders(self, instance: str) -> Folders:
        return Folders.at(self._root / instance, "/v")

    def _environment(self, folders: Folders) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(folders.home), "SPOTHEAL_CHECKPOINT_DIR": str(folders.checkpoints),
                "SPOTHEAL_PROGRESS_FILE": str(folders.progress_file)}  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(survival, "SETTLE_SECONDS", 0.0)


def said_of(lives: Lives) -> list[str]:
    return [*lives.seen.not_resumed(), *map(str, lives.seen.lost())]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_an_innocent_script_that_is_killed_goes_on_and_is_blamed_for_nothing(name: str, tmp_path: Path) -> None:
    lives = Lives(name, tmp_path)
    assert lives.live("i-1", killed="saved") < 0
    lives.move("i-1", "i-2")
    assert lives.live("i-2") == 0
    assert said_of(lives) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", GUILTY)
def test_a_script_that_loses_its_work_is_named_with_the_way_it_does(name: str, tmp_path: Path) -> None:
    lives = Lives(name, tmp_path)
    assert lives.live("i-1", killed="early" if name == "guilty_saves_at_end" else "saved") < 0
    lives.move("i-1", "i-2")
    assert lives.live("i-2") == 0
    assert [GUILTY[name] in line for line in said_of(lives)] == [True]
