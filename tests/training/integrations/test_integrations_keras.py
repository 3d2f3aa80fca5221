"""Keras 3 on torch, the real one: saved at the notice, resumed in mid-epoch as if nothing had been."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import documented
import interrupted
from interrupted import EPOCHS, STEPS, gone, options, saved_step

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.checkpoint import Store
from spotheal.training.sampler import ExactSampler, exact_loader
from spotheal.training.session import SavedAndStopped

pytestmark = pytest.mark.torch
keras: Any = None  # imported when a test runs: a worker that runs none of them need not wait for it


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    global keras
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KERAS_BACKEND", "torch")  # read when keras is imported
        keras = pytest.importorskip("keras")


def compiled(width: int = 8) -> Any:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(0.05, STEPS)
    model.compile(optimizer=keras.optimizers.AdamW(schedule), loss="mse", metrics=["mae"])
    return model


@functools.cache
def callback() -> Any:
    class At(keras.callbacks.Callback):  # type: ignore[misc]
        """In the midst of batch `number` of this process, counted from 1."""

        def __init__(self, number: int, what: Any) -> None:
            super().__init__()
            self.number, self.what = number, what

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.number -= 1
            if self.number == 0:
                self.what()

    return At


def train(folder: Path, notice_at: int = 0, save_every: str = "1000", width: int = 8) -> tuple[Any, dict[str, Any]]:
    """The final weights, and what the last epoch's metrics were."""
    from spotheal.training.integrations.keras import SpotCheckpoints

    model, loader = compiled(width), interrupted.loader()
    spot = SpotCheckpoints(loader, **options(folder, save_every))
    at = callback()(notice_at, lambda: interrupted.notice(folder, spot.session))
    history = model.fit(loader, epochs=EPOCHS, verbose=0, callbacks=[at, spot])
    return [value.detach().clone() for value in (v.value for v in model.variables)], history.history


@pytest.mark.parametrize("step", [1, 4, 6, 9])
def test_after_a_notice_at_any_step_the_run_is_the_one_never_interrupted(step: int, tmp_path: Path) -> None:
    whole, figures = train(tmp_path / "whole", save_every="2")
    place = tmp_path / "spot"
    with pytest.raises(SavedAndStopped) as stopped:
        train(place, step)
    assert (stopped.value.code, saved_step(place)) == (75, step)
    gone(place)
    torch.rand(5)
    weights, figures_after = train(place)
    assert all(torch.equal(one, other) for one, other in zip(weights, whole, strict=True))
    assert {name: values[-1] for name, values in figures_after.items()} == {
        name: values[-1] for name, values in figures.items()
    }
    assert saved_step(place) == STEPS


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(SpothealError, match="another model"):
        train(tmp_path, width=9)


def test_the_block_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"dataset": interrupted.dataset(), "exact_loader": exact_loader, "ExactSampler": ExactSampler}
    documented.run("Keras 3", {**names, "model": compiled()})
    assert [step for step, _ in Store("checkpoints").slots.found()] == [6]
