"""docs/checkpoints.md: what it shows works as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import documented  # noqa: E402
import interrupted  # noqa: E402

from spotheal.training.checkpoint import Store  # noqa: E402

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
            "A loop of your own: three lines", "Accelerate"}  # fmt: skip
    assert set(documented.blocks()) == here | {
        "Lightning", "Hugging Face Trainer", "Keras 3", "Sharded models: FSDP2"
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


def test_the_sampler_and_the_loop_of_three_lines(names: dict[str, Any]) -> None:
    after = documented.run("The sampler", names)
    assert after["position"]["position"] == 8
    after["sampler"].load_state_dict({**after["position"], "position": 0})
    assert documented.run("A loop of your own: three lines", names)["loop"].step == 12
    assert [step for step, _ in Store("run").slots.found()][:1] == [12]


def test_accelerates_block(names: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    from spotheal.training.session import Session

    documented.run("The sampler", names)
    after = documented.run("Accelerate", {**names, "Session": Session, "accelerator": accelerate.Accelerator(cpu=True)})
    after["loop"].finish()
    assert [step for step, _ in Store("accelerated").slots.found()] == [0]
