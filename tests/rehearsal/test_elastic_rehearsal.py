"""What a rehearsal of several machines asks for in its end, and the repositories that it trains."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spotheal.agent.protocol.names import Phase
from spotheal.fleet.rehearsal.scenarios import elastic_rehearsal
from spotheal.fleet.rehearsal.scenarios.elastic_rehearsal import SHARDED, ElasticOutcome, Struck
from spotheal.fleet.rehearsal.scenarios.scenario import scenario
from spotheal.fleet.rehearsal.scenarios.summary import End

END = End(100.0, Phase.DONE.value, "exit code 0", "cancelled", "i-3", volumes_left=0, snapshots_left=0)
GOOD = ElasticOutcome(
    scenario=SHARDED,
    run="r1",
    end=END,
    machines=5,
    worlds=(3, 2, 3, 2, 3),
    struck=(Struck("i-1", False, False, 43, 3), Struck("i-2", True, True, 120, 0)),
    steps_total=300,
    rendezvous=2,
    ends=1,
    cancels=1,
    results=("metrics.json", "model.safetensors"),
    resharded=((2, 3), (3, 2)),
    copies=1,
    setups=1,
    set_ranks=3,
)


def test_a_world_that_shrank_and_grew_without_a_loss_beyond_an_interval_has_passed() -> None:
    assert GOOD.broken == ()
    found = GOOD.to_document()
    assert (found["outcome"], found["scenario"], found["steps_redone"]) == ("ok", SHARDED, 3)
    assert json.loads(json.dumps(found))["set_ranks"] == 3
    told = Console(file=io.StringIO(), width=120)
    told.print(GOOD.render())
    assert "by 3 what 2 had saved, by 2 what 3 had saved; the last set has 3 shards" in told.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struck": (replace(GOOD.struck[0], lost=11), GOOD.struck[1])}, "11 steps were lost with i-1"),
        ({"struck": (GOOD.struck[0], replace(GOOD.struck[1], lost=1))}, "1 steps were lost with i-2, which got a not"),
        ({"struck": GOOD.struck[:1]}, "only 1 of 2"),
        ({"worlds": (3, 3)}, "never shrank"),
        ({"worlds": (3, 2), "set_ranks": 2}, "no replacement"),
        ({"resharded": ((3, 2),)}, "by more ranks"),
        ({"resharded": ()}, "by fewer ranks"),
        ({"set_ranks": None}, "has no shards"),
        ({"set_ranks": 2}, "has 2 shards"),
        ({"cancels": 2}, "cancelled 2 times"),
        ({"results": ("metrics.json",)}, "not whole"),
        ({"copies": 3}, "the working copy was made 3 times"),
        ({"setups": 0}, "`setup` ran 0 times"),
        ({"end": replace(END, volumes_left=1)}, "1 volumes are left"),
    ],
)
def test_what_did_not_hold_is_named(changed: dict[str, Any], said: str) -> None:
    seen = replace(GOOD, **changed)
    assert not seen.passed
    assert said in "; ".join(seen.broken)


def test_a_trainer_whose_first_rank_saves_needs_no_set_of_shards() -> None:
    assert replace(GOOD, scenario="elastic", set_ranks=None).passed


def test_the_sharded_scenario_trains_the_example_as_a_users_own_repository(tmp_path: Path) -> None:
    assert scenario(SHARDED).module == scenario("elastic").module == "elastic_rehearsal"
    found = elastic_rehearsal.example(SHARDED, tmp_path / "sharded")
    assert found.job.job.command[:2] == ("python", "train_fsdp.py")
    copied = Path(found.job.job.repository) / "train_fsdp.py"
    own = Path(__file__).resolve().parents[2] / "training/example/example_fsdp.py"
    assert copied.read_text() == own.read_text()
    assert elastic_rehearsal.example("elastic", tmp_path / "plain").job.job.command[1:3] == ("-m", "spotheal.training")


def test_a_set_counts_with_all_the_files_that_its_mark_names(tmp_path: Path) -> None:
    assert elastic_rehearsal.set_ranks(tmp_path) is None
    for name, files in (("step-000000010", 3), ("step-000000020", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "commit.json").write_text(json.dumps({"files": [[1, "00000000"]] * files}))
        for rank in range(files):
            (tmp_path / name / f"rank-{rank:05d}.safetensors").touch()
    assert elastic_rehearsal.set_ranks(tmp_path) == 2
    (tmp_path / "step-000000020" / "rank-00001.safetensors").unlink()
    assert elastic_rehearsal.set_ranks(tmp_path) == 0
