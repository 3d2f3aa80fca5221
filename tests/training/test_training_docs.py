"""docs/checkpoints.md: what it shows works as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import documented
import interrupted

from spotheal.training.checkpoint import Store

pytestmark = pytest.mark.torch


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a user has already."""
    for name in list(interrupted.environment(tmp_path)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    model = interrupted.network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return {"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler,
            "dataset": interrupted.dataset()}  # fmt: skip


def test_every_block_of_the_page_has_a_test() -> None:
    here = {"The store", "The store, copying behind the training", "The sampler", "The notice",
            "A loop of your own: three lines", "Streaming data", "Accelerate"}  # fmt: skip
    assert set(documented.blocks()) == here | {
        "Adding us to a script", "Lightning", "Hugging Face Trainer", "Keras 3", "Sharded models: FSDP2"
    }  # fmt: skip


def test_the_store_alone_twice(names: dict[str, Any]) -> None:
    assert documented.run("The store", dict(names))["loaded"] is None
    after = documented.run("The store", names)
    assert after["loaded"].step == 0
    assert after["outcome"].path.exists()


def test_the_store_that_copies_behind_the_training_twice(names: dict[str, Any]) -> None:
    heading = "The store, copying behind the training"
    first = documented.run(heading, dict(names))
    assert first["loaded"] is None and first["store"].last.fault is None
    assert documented.run(heading, dict(names))["loaded"].step == first["store"].last.step


def test_the_notice_alone(names: dict[str, Any]) -> None:
    assert documented.run("The notice", names)["watcher"].notice is None


@pytest.mark.parametrize("pasted", [["A loop of your own: three lines"],
                                    ["The sampler", "A loop of your own: three lines"]])  # fmt: skip
def test_the_loop_of_three_lines_alone_and_behind_the_samplers_block(pasted: list[str], names: dict[str, Any]) -> None:
    for heading in pasted:
        documented.run(heading, names)
    assert names["loop"].step == 12, "all of two epochs"
    assert [step for step, _ in Store("checkpoints").slots.found()][:1] == [12]


def test_the_samplers_block_stands_behind_its_first_batch(names: dict[str, Any]) -> None:
    assert documented.run("The sampler", names)["position"]["position"] == 8


def test_the_block_for_streaming_data(names: dict[str, Any]) -> None:
    for library in ("torchdata", "datasets"):
        pytest.importorskip(library, reason=f"needs {library}: pip install '.[streaming]'")
    from test_streaming_loaders import hugging_face

    documented.run("Streaming data", {**names, "stream": hugging_face()})
    assert [step for step, _ in Store("checkpoints").slots.found()] == [12]


def test_a_user_who_pastes_a_block_below_the_agent_saves_onto_the_volume(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTHEAL_CHECKPOINT_DIR", str(tmp_path / "volume"))
    documented.run("A loop of your own: three lines", names)
    assert [step for step, _ in Store(tmp_path / "volume").slots.found()][:1] == [12]
    for heading, code in documented.blocks().items():
        assert "imds" not in code, heading
        assert heading.startswith("The store") or "Session(" not in code or "Session()" in code, heading


def test_lines_of_the_page_are_not_too_wide() -> None:
    lines = documented.PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 135] == []


def test_accelerates_block(names: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    after = documented.run("Accelerate", {**names, "accelerator": accelerate.Accelerator(cpu=True)})
    after["loop"].finish()
    assert [step for step, _ in Store("checkpoints").slots.found()] == [0]
