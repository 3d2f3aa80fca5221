"""Hugging Face's Trainer, the real one: saved at the notice, resumed in mid-epoch as if nothing had been."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from torchvision_here import torchvision_here

torch = pytest.importorskip("torch")

import documented
import interrupted
from interrupted import BATCH, EPOCHS, STEPS, gone, options, saved_step

from spotheal.training.checkpoint import Store
from spotheal.training.session import SavedAndStopped

pytestmark = pytest.mark.torch
transformers: Any = None  # imported when a test runs: a worker that runs none of them need not wait for it


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    global transformers
    torchvision_here()
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = interrupted.network()

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        outputs = self.network(x)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


@functools.cache
def callback() -> Any:
    class At(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self, step: int, what: Any) -> None:
            self.step, self.what = step, what

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == self.step:
                self.what()

    return At


def train(folder: Path, notice_at: int = 0, accumulate: int = 1, save_every: str = "1000") -> dict[str, Any]:
    from spotheal.training.integrations.transformers import SpotCheckpoints

    model_options = options(folder, save_every)
    arguments = transformers.TrainingArguments(
        str(folder / "hf"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.05,
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
        logging_strategy="no",
    )
    torch.manual_seed(7)
    model = Model()
    data = [{"x": inputs, "labels": targets} for inputs, targets in interrupted.dataset()]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    spot = SpotCheckpoints(trainer, **model_options)
    trainer.add_callback(callback()(notice_at, lambda: interrupted.notice(folder, spot.session)))
    trainer.train(resume_from_checkpoint=spot.newest())
    return model.state_dict()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("step", "accumulate"), [(1, 1), (4, 1), (6, 1), (9, 1), (4, 2)])
def test_after_a_notice_at_any_step_the_run_is_the_one_never_interrupted(
    step: int, accumulate: int, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", accumulate=accumulate, save_every="2")
    place = tmp_path / "spot"
    with pytest.raises(SavedAndStopped) as stopped:
        train(place, step, accumulate)
    assert (stopped.value.code, saved_step(place)) == (75, step)
    gone(place)
    torch.rand(5)
    assert same(train(place, accumulate=accumulate), whole)
    assert saved_step(place) == STEPS // accumulate
    assert not list((tmp_path / "spot" / "hf").glob("checkpoint-*"))


def test_the_block_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = transformers.TrainingArguments(
        "hf", num_train_epochs=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"x": inputs, "labels": targets} for inputs, targets in interrupted.dataset()]
    names = {"Trainer": transformers.Trainer, "model": Model(), "arguments": arguments, "dataset": data}
    documented.run("Hugging Face Trainer", names)
    assert [step for step, _ in Store("checkpoints").slots.found()] == [6]
