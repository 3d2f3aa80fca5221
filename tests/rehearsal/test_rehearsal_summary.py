"""What a rehearsal says it proved: figures and broken expectations, and when its faults are made."""

from __future__ import annotations

import io
import json
import os
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.contract import Progress, Saved
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.record.lost_work import FilesLost
from spotheal.fleet.rehearsal.scenarios import scenario, survival, weights
from spotheal.fleet.rehearsal.scenarios.progress import Lines, MachineView, View
from spotheal.fleet.rehearsal.scenarios.report import report
from spotheal.fleet.rehearsal.scenarios.scenario import Event, Interrupt, Kill, Seen, due
from spotheal.fleet.rehearsal.scenarios.summary import End, InstanceStory, Story, summarise
from spotheal.fleet.rehearsal.scenarios.survival import Survival
from spotheal.fleet.rehearsal.scenarios.watch import in_words
from spotheal.fleet.verbs.rehearse import next_step

ONE = InstanceStory("i-1", "eu-west-1a", "m5.large", 0.0, 2.0, 8.0, 20.0, "interrupted", 0, 10, 10)
TWO = InstanceStory("i-2", "eu-west-1b", "m5.large", 12.0, 14.0, 22.0, 30.0, "killed", 10, 25, 20)
THREE = InstanceStory("i-3", "eu-west-1b", "m5.large", 31.0, 33.0, 40.0, 50.0, "cancelled", 20, 60, 60)
GOOD = Story(
    job="digits", run="R", scenario="standard", seed=0,
    end=End(50.0, "done", "", "cancelled_terminating", "i-3", volumes_left=1, snapshots_left=2),
    instances=(ONE, TWO, THREE),
    events_planned=2, events_taken=2, notices=1, kills=1, zone_moves=1, zone_moves_planned=1, steps_total=60,
    final_sha256="aa", reference_sha256="aa",
)  # fmt: skip


def changed(**changes: Any) -> Story:
    """GOOD with other fields, of its end or its own."""
    ends = {one.name for one in fields(End)} & changes.keys()
    end = replace(GOOD.end, **{name: changes.pop(name) for name in ends})
    return replace(GOOD, end=end, **changes)


def test_a_webhook_that_was_not_told_of_the_end_is_no_success() -> None:
    assert summarise(replace(GOOD, webhook=("interruption", "done"))).passed
    (line,) = summarise(replace(GOOD, webhook=("interruption",))).broken
    assert "was not told that the run is done" in line


def test_a_good_story_passes_and_its_document_holds_every_figure_of_the_interface() -> None:
    summary = summarise(GOOD)
    document = summary.to_document()
    assert summary.passed
    keys = "schema_version job outcome instances zones interruptions zone_moves steps_total steps_redone \
        steps_lost_with_notice final_sha256 reference_sha256 exact fleet_state volumes_left snapshots_left seconds"
    assert [key for key in keys.split() if document.get(key) is None] == []
    expected = {"outcome": "ok", "instances": 3, "zones": 2, "steps_redone": 5, "steps_lost_with_notice": 0}
    assert {key: document[key] for key in expected} == expected
    assert document["steps_lost_without_notice"] == 5
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phase": "failed", "reason": "exit 1"}, "did not finish"),
        ({"events_taken": 1}, "only 1 of 2 events"),
        ({"fleet_state": "active"}, "not cancelled"),
        ({"fleet_cancelled_by": "operator"}, "by operator, not by the agent"),
        ({"fleet_cancelled_by": None}, "by nobody"),
        ({"volumes_left": 2}, "2 volumes are left"),
        ({"snapshots_left": 3}, "3 snapshots"),
        ({"instances": (replace(ONE, last_step=12), TWO, THREE)}, "2 steps were lost although"),
        ({"final_sha256": "bb"}, "differ"),
        ({"final_sha256": None}, "the interrupted one none"),
        ({"reference_sha256": None}, "the uninterrupted one none"),
        ({"reference_sha256": None, "reference_fault": "exit 1"}, "uninterrupted run failed"),
        ({"zone_moves": 0}, "moved to another zone 0 times"),
        ({"throttles_planned": 1, "throttled_calls": 0}, "no call was throttled"),
    ],
)
def test_a_broken_expectation_fails_the_rehearsal_and_is_named(changes: dict[str, Any], said: str) -> None:
    summary = summarise(changed(**changes))
    assert summary.to_document()["outcome"] == "failed"
    assert any(said in line for line in summary.broken)


def test_a_trainer_without_weight_files_can_pass_and_is_told_that_nothing_was_compared() -> None:
    summary = summarise(replace(GOOD, final_sha256=None, reference_sha256=None))
    assert summary.passed and summary.compares_nothing and summary.to_document()["exact"] is None
    told = Console(file=io.StringIO(), width=200)
    told.print(report(summary))
    assert "nothing to compare" in told.file.getvalue()  # type: ignore[attr-defined]
    assert not summarise(replace(GOOD, reference_made=False, reference_sha256=None)).compares_nothing


def test_generators_that_differ_are_named_and_are_no_fault_of_equal_weights() -> None:
    summary = summarise(replace(GOOD, generators_apart=("numpy", "python")))
    assert summary.passed and summary.to_document()["generators_apart"] == ["numpy", "python"]
    told = Console(file=io.StringIO(), width=200)
    told.print(report(summary))
    assert "numpy, python not as in an uninterrupted run" in told.file.getvalue()  # type: ignore[attr-defined]
    (line,) = summarise(replace(summary.story, final_sha256="bb")).broken
    assert "the final weights differ" in line and "these random generators differ too: numpy, python" in line


def test_a_trainer_without_progress_has_null_steps_and_can_pass() -> None:
    silent = tuple(replace(i, resumed_step=None, last_step=None, saved_step=None) for i in GOOD.instances)
    summary = summarise(replace(GOOD, instances=silent, steps_total=None))
    assert summary.passed
    assert (summary.steps_redone, summary.steps_lost_with_notice) == (None, None)


def test_a_start_from_nothing_after_steps_were_gained_fails() -> None:
    again = replace(TWO, resumed_step=0)
    (line,) = summarise(changed(instances=(ONE, again, THREE), notices=0, events_planned=2)).broken[:1]
    assert line.startswith("i-2 began at step 0, although i-1 had come to 10; load the newest checkpoint")
    unsaved = replace(ONE, saved_step=None)
    assert "save more often" in summarise(changed(instances=(unsaved, again, THREE))).broken[0]


def test_files_that_the_next_machine_had_not_fail_with_the_line_to_write() -> None:
    lost = FilesLost("i-1", "i-2", ("home/last.pt", "home/model.pt", "home/z.csv", "working-copy/x.pt"))
    (line,) = summarise(changed(files_lost=(lost,))).broken
    assert "home/last.pt, home/model.pt, home/z.csv and 1 more: written on i-1, missing" in line
    assert line.endswith("write below $SPOTHEAL_CHECKPOINT_DIR")


def test_a_users_script_that_ends_early_is_not_blamed_for_the_scenario() -> None:
    """operator.md 13: `the volume moved to another zone 1 times, not 2` said nothing about the script."""
    early = changed(example=False, events_planned=3, events_taken=2, zone_moves_planned=2)
    assert summarise(early).passed and "2 of the scenario's 3 events" in summarise(early).notes[0]
    untouched = summarise(changed(example=False, events_planned=3, events_taken=0))
    assert "ended before it could be interrupted" in untouched.broken[0] and not untouched.notes


def test_a_script_that_ended_as_its_notice_came_is_told_that_nothing_was_tried() -> None:
    """csv_rows.py on a busy machine: its volume "moved to another zone 0 times, not 1"."""
    last = changed(example=False, instances=(ONE,), zone_moves=0, notices=1, kills=0)
    (line,) = summarise(last).broken
    assert "ended before it could be interrupted" in line
    unmoved = summarise(changed(example=False, zone_moves=0))
    assert unmoved.passed and "moved to another zone 0 of 1 times" in unmoved.notes[0]
    assert summarise(changed(example=False, instances=(ONE,), zone_moves_planned=0, notices=0, kills=0)).passed


def test_a_machine_that_ended_before_its_first_step_lost_none() -> None:
    early = replace(TWO, resumed_step=None, last_step=None)
    assert summarise(replace(GOOD, instances=(ONE, early, replace(THREE, resumed_step=10)))).steps_redone == 0


def test_the_report_is_readable_without_colour() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(summarise(changed(volumes_left=2))))
    text = console.export_text()
    assert "i-2" in text and "2 volumes are left, not 1" in text and "done again 5: 0 after notices" in text


def test_the_report_of_a_trainer_without_progress_says_what_would_tell_its_steps_in_80_columns() -> None:
    silent = tuple(replace(i, resumed_step=None, last_step=None, saved_step=None) for i in GOOD.instances)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(summarise(replace(GOOD, instances=silent, steps_total=None))))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert "steps     unknown: the trainer writes no progress file (docs/contract.md)" in lines
    assert "done" == lines[3].split()[-1]  # the machine that ended the run
    assert all(line.split(" ")[0] for line in lines)  # none had to be wrapped


def test_the_ledger_is_told_in_words_that_fit_a_line_of_80_columns() -> None:
    machine = {"instance": "i-067a9c3787c65c1e5", "zone": "us-west-2a"}
    told = [in_words({**machine, **event}) for event in (
        {"event": "boot"},
        {"event": "volume", "volume": "vol-1", "moved_from": "vol-0"},
        {"event": "trainer-started", "resumed_step": None},
        {"event": "trainer-started", "resumed_step": 101},
        {"event": "handover", "saved_step": 192},
    )]  # fmt: skip
    assert told == [
        "",
        "i-067a9c3787c65c1e5 us-west-2a: volume copied to its zone, mounted",
        "",
        "i-067a9c3787c65c1e5 goes on from step 101",
        "i-067a9c3787c65c1e5 has saved step 192 and handed its volume over",
    ]


# ---------------------------------------------------------------------------------------------------------- scenarios
EVENTS = (Event(0.5, (Interrupt(),)), Event(0.6, (Kill(),)))


def test_an_event_waits_for_its_fraction_and_for_a_step_on_that_machine() -> None:
    seen = Seen("i-1", False, 5.0, True, first_step=0, step=49, steps_total=100, saved=True)
    assert due(EVENTS, 0, seen) is None
    assert due(EVENTS, 0, replace(seen, step=50)) == EVENTS[0]
    assert due(EVENTS, 1, replace(seen, first_step=70, step=70)) is None
    assert due(EVENTS, 1, replace(seen, first_step=70, step=71)) == EVENTS[1]
    assert due(EVENTS, 2, replace(seen, step=90)) is None


def test_a_machine_that_is_ending_already_gets_no_further_event() -> None:
    assert due(EVENTS, 1, Seen("i-1", True, 99.0, True, 0, 99, 100)) is None
    assert due(EVENTS, 1, None) is None


def test_a_fault_comes_when_the_script_has_something_to_lose() -> None:
    """foreign.md F10: a machine that was killed before its first save proved nothing about the resume."""
    silent = Seen("i-1", False, 20.0)
    assert due(EVENTS, 0, silent) is None
    assert due(EVENTS, 0, replace(silent, saved=True)) == EVENTS[0]
    assert due(EVENTS, 0, replace(silent, training_seconds=61.0)) == EVENTS[0], "it saves at its end alone"
    assert due(EVENTS, 0, replace(silent, saved=True, reports=True)) is None  # it is slow to start
    early = (Event(0.15, (Kill(),)),)
    unsaved = Seen("i-1", False, 5.0, True, first_step=0, step=20, steps_total=100)
    assert due(early, 0, unsaved) is None
    assert due(early, 0, replace(unsaved, saved=True)) == early[0]
    assert due(early, 0, replace(unsaved, step=50)) == early[0]


def test_a_long_run_is_waited_for_by_the_clock() -> None:
    long = Seen("i-1", False, 61.0, True, first_step=0, step=5, steps_total=10**6)
    assert due(EVENTS, 0, replace(long, saved=True)) == EVENTS[0]
    assert due(EVENTS, 0, long) is None
    assert due(EVENTS, 0, replace(long, training_seconds=301.0)) == EVENTS[0]


def test_the_standard_scenario_takes_four_machines_two_zones_and_throttles() -> None:
    standard = scenario.scenario("standard")
    faults = [type(fault).__name__ for event in standard.events for fault in event.faults]
    assert (standard.instances, standard.needs_zones) == (4, 2)
    assert {"Interrupt", "Kill", "Throttle", "NextZone"} <= set(faults)


def test_a_storm_is_made_by_its_seed() -> None:
    assert scenario.scenario("storm", 7) == scenario.scenario("storm", 7)
    assert len({scenario.scenario("storm", seed).events for seed in range(20)}) > 15
    with pytest.raises(ConfigError, match="no scenario 'none'"):
        scenario.scenario("none")


# ------------------------------------------------------------------------------------------------------------ weights
@pytest.mark.torch
def test_weights_are_compared_by_tensors_and_not_by_what_else_a_file_says(tmp_path: Path) -> None:
    import torch

    digests = []
    for name, text, value in (("a", "monday", 1.0), ("b", "tuesday", 1.0), ("c", "monday", 2.0)):
        results = tmp_path / name / "results"
        results.mkdir(parents=True)
        header = {"__metadata__": {"saved": text}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        body = json.dumps(header).encode()
        raw = torch.tensor([value]).numpy().tobytes()
        (results / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + raw)
        torch.save({"model": {"w": torch.tensor([value])}}, results / "model.pt")
        (results / "report.json").write_text(text)
        digests.append(weights.digest(tmp_path / name)["sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_a_sessions_generators_are_no_weights_and_are_compared_by_name(tmp_path: Path) -> None:
    """Every integration failed its rehearsal: `random` had another state, and the weights were equal."""
    torch = pytest.importorskip("torch")
    from spotheal.training.session import Session, resume

    def left(name: str, *seeds: int, weight: float = 1.0) -> dict[str, Any]:
        random.seed(seeds[0])
        numpy.random.seed(seeds[1])
        if seeds[2:]:
            numpy.random.rand(seeds[2])  # the same key at another position
        torch.manual_seed(7)
        model = torch.nn.Linear(2, 1)
        model.weight.data.fill_(weight)
        resume(Session(tmp_path / name / "checkpoints", imds=False, environment={}), model=model).finish()
        return weights.digest(tmp_path / name)

    numpy = pytest.importorskip("numpy")
    one = left("one", 1, 1)
    assert sorted(one["generators"]) == ["numpy", "python", "torch"]
    for other, named in ((left("same", 1, 1), ()), (left("python", 2, 1), ("python",)),
                         (left("drawn", 1, 1, 3), ("numpy",)), (left("both", 2, 2), ("numpy", "python"))):  # fmt: skip
        assert other["sha256"] == one["sha256"]
        assert weights.apart(one["generators"], other["generators"]) == named
    assert left("other weights", 1, 1, weight=2.0)["sha256"] != one["sha256"]
    results = tmp_path / "one" / "results"
    results.mkdir()
    torch.save({"w": torch.ones(1)}, results / "model.pt")
    assert weights.digest(tmp_path / "one")["generators"] == one["generators"], "those of the checkpoint still count"


def test_generators_in_a_checkpoint_of_ones_own_are_no_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for number in range(2):
        (tmp_path / str(number) / "results").mkdir(parents=True)
        rng = torch.Generator().manual_seed(number).get_state()
        for name, saved in {"last.pt": {"model": torch.ones(2), "rng_state": rng}, "rng_state.pth": rng}.items():
            torch.save(saved, tmp_path / str(number) / "results" / name)
    one, other = (weights.digest(tmp_path / str(number)) for number in range(2))
    assert one["sha256"] == other["sha256"]
    assert weights.apart(one["generators"], other["generators"]) == ("last.pt/rng_state", "rng_state")


def test_a_weight_file_is_known_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    """`checkpoint.pth.tar`, as the ImageNet example calls it, was none for the rehearsal, and nothing was compared."""
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    import pickle

    def left(name: str, value: float) -> dict[str, Any]:
        folder = tmp_path / name / "results"
        folder.mkdir(parents=True)
        model = {"state_dict": {"w": torch.tensor([value])}, "epoch": 3}
        torch.save(model, folder / "checkpoint.pth.tar")
        torch.save(model, folder / "model_best")
        torch.save(model, folder / "old.tar", _use_new_zipfile_serialization=False)
        with open(folder / "arrays", "wb") as file:
            numpy.savez(file, w=[value])
        (folder / "trees").write_bytes(pickle.dumps([value]))
        (folder / "report.txt").write_text(name)
        (folder / "cut.short").write_bytes((folder / "model_best").read_bytes()[:80])
        return weights.digest(tmp_path / name)

    one = left("a", 1.0)
    assert {item["file"] for item in one["files"]} == {"checkpoint.pth.tar", "model_best", "old.tar", "arrays", "trees"}
    assert left("b", 1.0)["sha256"] == one["sha256"] != left("c", 2.0)["sha256"]


def test_without_results_the_newest_checkpoint_counts_and_without_both_nothing_does(tmp_path: Path) -> None:
    assert weights.digest(tmp_path)["sha256"] is None
    folder = tmp_path / "checkpoints" / "step-5"
    folder.mkdir(parents=True)
    (folder / "w.npy").write_bytes(b"weights")
    found = weights.digest(tmp_path)
    assert (found["of"], [item["file"] for item in found["files"]]) == ("newest checkpoint", ["step-5/w.npy"])


def test_a_hostile_checkpoint_is_compared_by_its_bytes_and_never_executed(tmp_path: Path) -> None:
    import pickle

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    (tmp_path / "results").mkdir()
    for name in ("model.pt", "model.pth.tar", "model"):
        (tmp_path / "results" / name).write_bytes(pickle.dumps(Hostile()))
    assert weights.digest(tmp_path)["sha256"] is not None
    assert not (tmp_path / "executed").exists()


def test_plain_lines_come_for_events_at_once_and_for_progress_every_few_seconds() -> None:
    lines: list[str] = []
    shown = Lines(lines.append)
    view = View(1.0, (MachineView("i-1", "a", "t", "training", 1.0, 3),), step=3, steps_total=9)
    shown.show(view)
    shown.show(view)
    shown.event(2.0, "i-1 gets a notice")
    assert lines == ["   1.0 s  step 3 of 9; i-1 a training", "   2.0 s  i-1 gets a notice"]


@pytest.mark.parametrize(
    ("step", "saved", "is_so"),
    [(20, 20, True), (25, 20, True), (26, 20, False), (21, 10, False), (3, None, False), (30, 20, False)],
)
def test_a_kill_waits_until_the_last_save_is_done(step: int, saved: int | None, is_so: bool) -> None:
    done = None if saved is None else Saved(saved, "x", "")
    assert scenario.is_saved(Progress(step, saved=done), 10) is is_so


# ------------------------------------------------------------------------------------------------------ what survives
class Machines:
    """Two machines below a temporary folder, looked at as often as a test likes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(survival, "LIST_SECONDS", 0.0)
        monkeypatch.setattr(survival, "SETTLE_SECONDS", 0.0)
        self.root, self.seen = root, Survival(root / "links")

    def write(self, machine: str, name: str, size: int = 2000) -> None:
        path = self.root / machine / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)

    def move(self, machine: str, successor: str) -> None:
        (self.root / successor).mkdir()
        (self.root / machine / "v").rename(self.root / successor / "v")

    def look(self, machine: str, times: int = 2, started: bool = True) -> None:
        (self.root / machine).mkdir(exist_ok=True)
        (self.root / machine / "agent.log").write_text("10:00 starting the trainer attempt=1\n" if started else "")
        for _ in range(times):
            self.seen.look(machine, Folders.at(self.root / machine, "/v"), self.root / machine / "agent.log")


COPY = "v/working-copy/"


def test_what_a_trainer_wrote_and_the_next_one_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(tmp_path, monkeypatch)
    machines.write("i-1", f"{COPY}train.py")
    machines.look("i-1")
    assert not machines.seen.has_saved("i-1")
    for name in ("checkpoints/step-10.pt", "wandb/run.pt", "train.log", "model.pt.tmp", ".cache/x.bin", "tmp/x.bin"):
        machines.write("i-1", COPY + name)
    machines.write("i-1", "v/checkpoints/step-10.pt")
    machines.look("i-1")
    assert machines.seen.has_saved("i-1")
    machines.write("i-2", f"{COPY}train.py")
    machines.write("i-2", "v/checkpoints/step-20.pt")
    machines.look("i-2", 1)
    assert machines.seen.lost() == [FilesLost("i-1", "i-2", ("working-copy/checkpoints/step-10.pt",))]


def test_a_file_of_a_moment_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1")
    machines.write("i-1", f"{COPY}half")
    machines.look("i-1", 1)
    machines.look("i-2")
    assert machines.seen.lost() == []


@pytest.mark.parametrize(("loads", "anew"), [(True, False), (False, True)])
def test_a_script_that_writes_its_save_again_without_having_read_any_began_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool, anew: bool
) -> None:
    """The ImageNet example without `--resume`: it trained all again, and the rehearsal passed."""
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1", 1)
    machines.write("i-1", f"{COPY}checkpoint.pth.tar")
    machines.look("i-1")
    machines.move("i-1", "i-2")
    machines.look("i-2", 1, started=False)
    if loads:
        (tmp_path / "i-2" / COPY / "checkpoint.pth.tar").read_bytes()
    machines.look("i-2", 1)
    machines.write("i-2", f"{COPY}checkpoint.pth.tar", 2001)
    machines.look("i-2", 1)
    said = machines.seen.not_resumed()
    expected = "i-2 began from nothing: its trainer wrote working-copy/checkpoint.pth.tar again and had read no file"
    assert [line[: len(expected)] for line in said] == [expected] * anew


def test_a_save_that_replaces_another_by_rename_was_read_if_the_one_before_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1", 1)
    machines.write("i-1", f"{COPY}last.pt")
    machines.look("i-1")
    machines.move("i-1", "i-2")
    machines.look("i-2", 1, started=False)
    path = tmp_path / "i-2" / COPY / "last.pt"
    path.read_bytes()
    machines.write("i-2", f"{COPY}other", 2001)
    path.with_name("other").replace(path)
    machines.look("i-2")
    assert machines.seen.not_resumed() == []


def test_a_save_that_may_have_been_read_before_the_first_look_is_no_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the mount, the trainer's start and its read came between two looks: an innocent was blamed."""
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1", 1)
    machines.write("i-1", f"{COPY}version_0/last.ckpt")
    machines.look("i-1")
    machines.move("i-1", "i-2")
    (tmp_path / "i-2" / COPY / "version_0/last.ckpt").read_bytes()
    assert machines.seen.sees_reads
    machines.look("i-2", 1)
    machines.write("i-2", f"{COPY}version_1/last.ckpt")
    machines.look("i-2")
    assert machines.seen.not_resumed() == []
    assert not machines.seen.sees_reads


def test_a_read_of_a_save_that_no_look_saw_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that keeps its newest save alone, twice a second: the last one came after the last look."""
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1", 1)
    machines.write("i-1", f"{COPY}version_0/epoch=10.ckpt")
    machines.write("i-1", f"{COPY}version_0/best.ckpt")
    machines.look("i-1")
    folder = tmp_path / "i-1" / COPY / "version_0"
    (folder / "epoch=10.ckpt").unlink()
    machines.write("i-1", f"{COPY}version_0/epoch=11.ckpt")
    machines.move("i-1", "i-2")
    machines.look("i-2", 1, started=False)
    (tmp_path / "i-2" / COPY / "version_0/epoch=11.ckpt").read_bytes()
    machines.look("i-2", 1)
    machines.write("i-2", f"{COPY}version_1/epoch=12.ckpt")
    machines.look("i-2")
    assert machines.seen.not_resumed() == []


def test_a_machine_that_had_written_nothing_is_named_and_one_that_saved_at_its_notice_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path, monkeypatch)
    machines.write("i-1", f"{COPY}train.py")
    machines.look("i-1")
    machines.move("i-1", "i-2")
    machines.look("i-2")
    (line,) = machines.seen.not_resumed()
    assert line.startswith("i-2 began from nothing: the trainer on i-1 had saved nothing when it went")
    machines.move("i-2", "i-3")
    machines.write("i-3", "v/checkpoints/last.pt")  # by i-2, between the last look and its end
    machines.look("i-3")
    assert machines.seen.not_resumed() == [line]


def test_options_and_pictures_are_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's autoencoder example was killed before its first checkpoint, and the rehearsal passed."""
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1", 1)
    machines.write("i-1", f"{COPY}lightning_logs/version_0/config.yaml")
    machines.write("i-1", f"{COPY}grid_generated_0.png")
    machines.look("i-1")
    assert not machines.seen.has_saved("i-1")
    machines.move("i-1", "i-2")
    machines.look("i-2")
    (line,) = machines.seen.not_resumed()
    assert line.startswith("i-2 began from nothing: the trainer on i-1 had saved nothing when it went")


@pytest.mark.parametrize(
    ("earlier", "later", "is_new_start"),
    [
        ("lightning_logs/version_0/checkpoints/a.ckpt", "lightning_logs/version_1/checkpoints/a.ckpt", True),
        ("outputs/2026-11-22/21-49-38/last.pt", "outputs/2026-11-23/01-02-03/last.pt", True),
        ("runs/dqn__1__1795395398/model.pt", "runs/dqn__1__1795395473/model.pt", True),
        ("fold_0/model.pt", "fold_1/model.pt", False),
        ("out/step-10.pt", "out/step-20.pt", False),
        ("out/version_0/a.csv", "out/version_1/a.csv", False),
    ],
)
def test_saves_in_a_new_folder_with_its_own_time_or_version_are_a_new_start_if_none_was_read(
    earlier: str, later: str, is_new_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path, monkeypatch)
    machines.look("i-1", 1)
    machines.write("i-1", COPY + earlier)
    machines.look("i-1")
    machines.move("i-1", "i-2")
    machines.look("i-2", 1, started=False)
    machines.look("i-2", 1)
    machines.write("i-2", COPY + later)
    machines.look("i-2")
    expected = f"i-2 began from nothing: its trainer wrote working-copy/{later} into a new folder and had read no file"
    assert [line[: len(expected)] for line in machines.seen.not_resumed()] == [expected] * is_new_start


def test_what_a_trainer_did_not_resume_fails_a_rehearsal_only_if_it_reports_no_steps() -> None:
    silent = tuple(replace(i, resumed_step=None, last_step=None, saved_step=None) for i in GOOD.instances)
    line = "i-2 began from nothing: …"
    users = changed(not_resumed=(line,), instances=silent, example=False)
    assert summarise(users).broken == (line,)
    assert summarise(changed(not_resumed=(line,), example=False)).passed


def test_a_file_system_without_times_of_access_is_told_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survival, "tells_reads", lambda folder: False)
    seen = Survival(tmp_path / "links")
    silent = tuple(replace(i, resumed_step=None, last_step=None, saved_step=None) for i in GOOD.instances)
    story = changed(instances=silent, example=False, sees_reads=seen.sees_reads)
    (note,) = summarise(story).notes
    assert "whether your script loads what it saved is unknown" in note and "TMPDIR" in note
    assert summarise(replace(story, sees_reads=True)).notes == ()
    assert summarise(replace(story, instances=GOOD.instances)).notes == ()


def test_the_cure_for_a_missing_module_names_setup_and_the_folder_of_a_repository(tmp_path: Path) -> None:
    """CleanRL's scripts lie in one folder of the repository and import another."""
    missing = "the trainer failed 3 times\n  | ModuleNotFoundError: No module named 'cleanrl_utils'"
    cure = next_step([missing], tmp_path, survived=False)
    assert "`setup` in job.toml" in cure and 'PYTHONPATH = "." below [environment]' in cure
    assert next_step(["another"], tmp_path, survived=False) == f"read {tmp_path}/instances/*/logs/"


def test_weights_that_differ_are_another_verdict_than_a_job_that_did_not_survive() -> None:
    """A user whose script cannot be exact read `did not pass` and took it for lost work."""
    console = Console(width=120, record=True, file=io.StringIO())
    differ = summarise(changed(final_sha256="bb"))
    console.print(report(differ))
    assert "The job survived every fault. Only the comparison of its weights" in console.export_text()
    assert (differ.to_document()["outcome"], differ.to_document()["survived"]) == ("failed", True)
    lost = summarise(changed(final_sha256="bb", phase="failed", reason="exit 1"))
    assert not lost.to_document()["survived"]
    assert not summarise(changed(final_sha256="bb", volumes_left=2)).survived


def test_scripts_that_name_a_folder_at_each_start_are_compared_by_their_newest_weights(tmp_path: Path) -> None:
    """Lightning's version_1 beside version_0: two folders there, one in the uninterrupted run, and equal weights."""
    for run, folders in (("interrupted", ("version_0", "version_1")), ("quiet", ("version_0",))):
        for number, folder in enumerate(folders, 3 - len(folders)):
            path = tmp_path / run / "working-copy" / "lightning_logs" / folder / "last.ckpt"
            path.parent.mkdir(parents=True)
            path.write_bytes(b"weights %d" % number)
            os.utime(path, (number, number))
    one, other = (weights.digest(tmp_path / run) for run in ("interrupted", "quiet"))
    assert one["sha256"] is not None and one["sha256"] == other["sha256"]
