"""What a rehearsed sweep asks of itself, and says. It takes minutes: `fleetctl rehearse --scenario sweep`."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.rehearsal.scenarios.run import Options, rehearse
from spotheal.fleet.rehearsal.scenarios.scenario import scenario
from spotheal.fleet.rehearsal.scenarios.summary import End
from spotheal.fleet.rehearsal.scenarios.sweep_rehearsal import COMMAND, ENTRIES, EntryStory, Struck, SweepOutcome
from spotheal.training.example import hyperparameters

FILES = ("metrics.json", "metrics.jsonl", "model/best.safetensors", "model/model.safetensors")
WHEN = "2026-11-21T19:37:38Z"


def entry(index: int, **changed: Any) -> EntryStory:
    return replace(EntryStory(index, "done", 1, 120, 1, (0,), FILES, has_own_parameters=True), **changed)


def outcome(**changed: Any) -> SweepOutcome:
    end = {key: changed.pop(key) for key in list(changed) if key in {one.name for one in fields(End)}}
    given: dict[str, Any] = {
        "run": "01RUN", "entries": tuple(entry(index) for index in range(4)), "instances": (),
        "struck": (Struck("i-1", 0, True, WHEN, 37, 37), Struck("i-2", 2, False, WHEN, 32, 30)), **changed,
    }  # fmt: skip
    good = End(120.0, "done", "4 of 4 runs are done", "cancelled", "i-3", volumes_left=0, snapshots_left=0)
    return SweepOutcome(**given, end=replace(good, **end))


def test_a_sweep_whose_runs_are_each_done_once_has_passed() -> None:
    found = outcome()
    assert found.broken == ()
    document = found.to_document()
    assert (document["outcome"], document["done"], document["interruptions"], document["kills"]) == ("ok", 4, 1, 1)
    assert (document["steps_lost_with_notice"], document["steps_lost_without_notice"]) == (0, 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"phase": "failed", "reason": "x"}, "the sweep did not finish: failed: x"),
        ({"entries": (entry(0, state="failed"),)}, "run 0 is failed"),
        ({"entries": (entry(1, ends=2),)}, "run 1 ended 2 times"),
        ({"entries": (entry(1, files=FILES[:2]),)}, "the results of run 1 are not whole: metrics.json, metrics.jsonl"),
        ({"entries": (entry(3, has_own_parameters=False),)},
         "run 3 was trained with other parameters than entry 3 has"),
        ({"struck": ()}, "only 0 of 2 faults took place before the end"),
        ({"struck": (Struck("i-1", 0, True, WHEN, 37, 30), Struck("i-2", 2, False, WHEN, 32, 30))},
         "7 steps were lost although i-1 had a notice"),
        ({"struck": (Struck("i-1", 0, True, WHEN, 37, 37), Struck("i-2", 2, False, WHEN, 60, 30))},
         "30 steps were lost with i-2; a checkpoint is saved every 10"),
        ({"struck": (Struck("i-1", 0, True, WHEN, 37, 37), Struck("i-2", 2, False, WHEN, 32))},
         "where the run of i-2 went on is not known"),
        ({"fleet_state": "active"}, "the fleet was not cancelled: its state is active"),
        ({"fleet_cancelled_by": "operator"}, "the fleet was cancelled by operator, not by the agent"),
        ({"refused": ("ec2:CreateTags of arn:1",)}, "the role of the instances does not allow ec2:CreateTags of arn:1"),
        ({"volumes_left": 1}, "1 volumes and 0 snapshots are left, not none"),
    ],
)  # fmt: skip
def test_what_did_not_hold_is_named(changed: dict[str, Any], said: str) -> None:
    found = outcome(**changed)
    assert found.broken == (said,)
    assert not found.passed
    written = io.StringIO()
    Console(file=written, width=200).print(found.render())
    assert f"- {said}" in written.getvalue()


def test_what_is_rehearsed_is_what_the_example_trainer_takes() -> None:
    assert [hyperparameters.faults(one, hyperparameters.command_model(COMMAND) or "") for one in ENTRIES] == [[]] * 4


def test_the_scenario_has_an_example_of_its_own() -> None:
    assert scenario("sweep").module == "sweep_rehearsal"
    with pytest.raises(ConfigError, match="is of an example of its own"):
        rehearse(Options(Path("spot_fleet_config.json"), scenario="sweep"))
