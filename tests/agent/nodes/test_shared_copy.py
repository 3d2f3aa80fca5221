"""What several machines share and one makes: who makes it, who waits, and what becomes of a maker that dies."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from nodes_world import Off
from nodes_world import Run as Meetings
from working_copies import FIRST, PYTHON, SECOND, WHERE, configured, fetched, texts, written

from spotheal.agent.files.folders import Folders
from spotheal.agent.life.boot import RunOver
from spotheal.agent.nodes.shared_copy import TURN_SECONDS_MAX, SharedCopy
from spotheal.agent.protocol.errors import Interrupted, Retryable
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.repository.working_copy import is_on_volume, make_working_copy

pytestmark = pytest.mark.processes
LOG = structlog.get_logger()


class Several(Meetings):
    """`seen_by(name)`: the shared copy as that machine sees it; each has a disk of its own for what git fetches."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def folders(self, name: str) -> Folders:
        found = replace(Folders.at(self.folder, "/efs"), fetched=self.folder / name / "src")
        found.make(None)
        return found

    def seen_by(self, name: str, off: float = 0.0, **config: Any) -> SharedCopy:
        meeting = self.machine(name, off=off)
        return SharedCopy(
            configured(**config), self.folders(name), meeting._store, self.cloud, meeting, name,
            Off(self.clock, off), self.stop, LOG,
        )  # fmt: skip

    def make(self, shared: SharedCopy, name: str, files: dict[str, str], **config: Any) -> bool:
        """As a machine does; whether it was this one."""
        with shared.turn(lambda: shared.made() is not None, "the working copy") as ours:
            if ours:
                shared.wait_until_unused()
                folders, wanted = self.folders(name), configured(**config)
                found = None if is_on_volume(wanted, folders) else fetched(folders, files)
                shared.publish(make_working_copy(wanted, folders, WHERE, PYTHON, LOG, fetched=found))
        return ours


@pytest.fixture
def several(tmp_path: Path) -> Several:
    return Several(tmp_path)


def hold(several: Several, name: str) -> None:
    several.seen_by(name)
    several.store.put_json(LAYOUT.copy_claim, {"instance": name, "held": True})


def test_machines_that_come_at_once_make_one_copy(several: Several) -> None:
    views = {name: several.seen_by(name) for name in ("i-1", "i-2", "i-3", "i-4")}
    made: list[str] = []
    several.clock.at_sleep.append(lambda: threading.Event().wait(0.01))

    def make(name: str) -> None:
        if several.make(views[name], name, FIRST):
            made.append(name)

    threads = [threading.Thread(target=make, args=(name,)) for name in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1
    assert texts(several.folders("i-1").clone) == FIRST
    assert len({view.made() for view in views.values()}) == 1
    assert not [path for path in (several.folder / "efs").rglob(".look-*")]


@pytest.mark.parametrize(("state", "takes"), [
    ("running", False), ("shutting-down", False), ("stopping", False), ("terminated", True), ("stopped", True),
])  # fmt: skip
def test_a_claim_passes_on_only_once_no_process_of_its_machine_runs(several: Several, state: str, takes: bool) -> None:
    """A machine that shuts down may still copy: two that write into one copy would mix two commits."""
    hold(several, "i-1")
    several.cloud.states["i-1"] = state
    second = several.seen_by("i-2")
    several.clock.at_sleep.append(lambda: several.stop.set() if several.clock.seconds > 60 else None)
    if takes:
        assert several.make(second, "i-2", FIRST)
        assert several.clock.seconds == 0
    else:
        with pytest.raises(Interrupted):
            several.make(second, "i-2", FIRST)


def test_a_maker_that_ec2_does_not_show_and_that_says_nothing_is_replaced(several: Several) -> None:
    hold(several, "i-1")
    del several.cloud.states["i-1"]
    assert several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert 100 < several.clock.seconds < 200, "describes are stale for a while"


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_a_maker_whose_clock_is_off_is_not_taken_for_dead(several: Several, off: float) -> None:
    several.seen_by("i-1", off=off)
    first = several.machine("i-1", off=off)
    several.store.put_json(LAYOUT.copy_claim, {"instance": "i-1", "held": True})
    several.clock.at_sleep += [first.beat, lambda: several.stop.set() if several.clock.seconds > 1500 else None]
    with pytest.raises(Interrupted):
        several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert several.cloud.ended == []


def test_a_maker_that_hangs_is_ended_and_replaced(several: Several) -> None:
    hold(several, "i-1")
    several.clock.seconds += 3000

    def end(instance: str) -> None:
        several.cloud.ended.append(instance)
        several.cloud.states[instance] = "terminated"

    several.cloud.terminate = end  # type: ignore[method-assign]
    assert several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert several.cloud.ended == ["i-1"]


def test_a_maker_that_fails_gives_its_claim_back_at_once(several: Several) -> None:
    first = several.seen_by("i-1")
    with pytest.raises(Retryable, match="no route"), first.turn(lambda: False, "the working copy"):
        raise Retryable("no route to the repository")
    assert several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert several.clock.seconds == 0


def test_a_maker_whose_agent_is_started_again_goes_on(several: Several) -> None:
    hold(several, "i-1")
    assert several.make(several.seen_by("i-1"), "i-1", FIRST)


def test_a_run_that_another_ended_is_not_waited_for(several: Several) -> None:
    """The maker's `setup` failed."""
    hold(several, "i-1")
    several.store.write_status({"phase": "set-up failed", "reason": "no such module"})
    with pytest.raises(RunOver) as over:
        several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert over.value.end.phase is Phase.SETUP_FAILED


def test_the_wait_is_bounded_and_its_end_names_the_machine(several: Several) -> None:
    hold(several, "i-1")
    several.clock.at_sleep.append(several.machine("i-1").beat)
    with pytest.raises(RunOver) as over:
        several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert over.value.end.phase is Phase.PARKED
    assert "the working copy is not complete: i-1 has not made it in 120 min" in over.value.end.reason
    assert TURN_SECONDS_MAX < several.clock.seconds < TURN_SECONDS_MAX + 60


def test_another_commit_waits_until_no_machine_trains_in_the_one_before(several: Several) -> None:
    assert several.make(several.seen_by("i-1"), "i-1", FIRST)
    written(several.folders("i-1").clone, {"last.pt": "step 7"})
    trains = several.machine("i-1")
    trains._say(term=1, leads=True)

    def leaves() -> None:
        assert texts(several.folders("i-1").clone) == {**FIRST, "last.pt": "step 7"}, "not while it is used"
        trains.leave() if several.clock.seconds > 30 else trains.beat()

    several.clock.at_sleep.append(leaves)
    revision = "2" * 40
    assert several.make(several.seen_by("i-2", revision=revision), "i-2", SECOND, revision=revision)
    assert texts(several.folders("i-2").clone) == {**SECOND, "last.pt": "step 7"}
    assert 30 < several.clock.seconds < 60


def test_a_copy_that_was_taken_away_is_made_again(several: Several) -> None:
    first = several.seen_by("i-1")
    several.make(first, "i-1", FIRST)
    several.folders("i-1").clone.rename(several.folder / "elsewhere")
    assert first.made() is None
    assert several.make(several.seen_by("i-2"), "i-2", FIRST)
    assert texts(several.folders("i-2").clone) == FIRST


def test_a_machine_that_joins_changes_nothing_in_the_copy(several: Several) -> None:
    """The others train in it: a kept path whose link a save has just replaced is theirs."""
    keep = ["out"]
    several.make(several.seen_by("i-1", keep=keep), "i-1", FIRST, keep=keep)
    clone = several.folders("i-1").clone
    (clone / "out").unlink()
    written(clone, {"out/last.pt": "just saved"})
    before = {path: path.lstat().st_mtime_ns for path in (clone, *clone.rglob("*"))}
    assert not several.make(several.seen_by("i-2", keep=keep), "i-2", FIRST, keep=keep)
    assert {path: path.lstat().st_mtime_ns for path in (clone, *clone.rglob("*"))} == before




def test_a_maker_that_dies_before_it_calls_the_copy_complete_is_followed_by_another(several: Several) -> None:
    hold(several, "i-1")
    folders = several.folders("i-1")
    first = fetched(folders, FIRST)
    make_working_copy(configured(), folders, WHERE, PYTHON, LOG, fetched=first)
    several.cloud.states["i-1"] = "terminated"
    second = several.seen_by("i-2")
    assert second.made() is None
    assert several.make(second, "i-2", FIRST)
    assert second.made() is not None and not several.folders("i-2").fetched.exists(), "it needed no repository"
