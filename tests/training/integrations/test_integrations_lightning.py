"""Lightning 2, the real one: saved at the notice, resumed in mid-epoch as if nothing had been."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from torchvision_here import torchvision_here

torch = pytest.importorskip("torch")

import documented
import interrupted
from interrupted import EPOCHS, STEPS, gone, options, saved_step

from spotheal.training.checkpoint import Store
from spotheal.training.sampler import ExactSampler, exact_loader
from spotheal.training.session import SavedAndStopped, Session

pytestmark = pytest.mark.torch
lightning: Any = None  # imported when a test runs: a worker that runs none of them need not wait for it


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    global lightning
    torchvision_here()
    lightning = pytest.importorskip("lightning.pytorch")


@functools.cache
def task_class() -> Any:
    class Task(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, folder: Path | None = None, rate: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()  # a Path among them, which no checkpoint of ours holds
            torch.manual_seed(7)
            self.network = interrupted.network()

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Task


@functools.cache
def callback() -> Any:
    class At(lightning.Callback):  # type: ignore[misc]
        """Does something in the midst of batch `number` of this process, counted from 1."""

        def __init__(self, number: int, what: Any) -> None:
            self.number, self.what = number, what

        def on_train_batch_start(self, *_: Any) -> None:
            self.number -= 1
            if self.number == 0:
                self.what()

    return At


def train(folder: Path, at: int = 0, what: Any = None, accumulate: int = 1, save_every: str = "1000") -> dict[str, Any]:
    from spotheal.training.integrations.lightning import SpotCheckpoints

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    task, spot = task_class()(folder), SpotCheckpoints(**options(folder, save_every))
    newest = spot.newest()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[callback()(at, lambda: what(spot.session)), spot],
        plugins=[spot.io],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(task, interrupted.loader(), ckpt_path=newest, weights_only=False)
    return task.state_dict()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("step", [1, 4, 6, 9])
def test_after_a_notice_at_any_step_the_run_is_the_one_never_interrupted(
    step: int, tmp_path: Path, whole: dict[str, Any]
) -> None:
    with pytest.raises(SavedAndStopped) as stopped:
        train(tmp_path, step, lambda session: interrupted.notice(tmp_path, session))
    assert (stopped.value.code, saved_step(tmp_path)) == (75, step)
    gone(tmp_path)
    torch.rand(5)
    assert same(train(tmp_path), whole)
    assert saved_step(tmp_path) == STEPS


def test_sigterm_saves_and_ends_with_75_where_lightning_alone_ends_with_0(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (stopped.value.code, saved_step(tmp_path)) == (75, 3)
    assert same(train(tmp_path), whole)


def test_accumulated_gradients_are_never_cut_in_two(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", accumulate=2, save_every="1")
    place = tmp_path / "spot"
    with pytest.raises(SavedAndStopped):
        train(place, 3, lambda session: interrupted.notice(place, session), accumulate=2)
    gone(place)
    assert saved_step(place) == 2  # batches 3 and 4 are one step
    assert same(train(place, accumulate=2), whole)


def test_the_block_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        "Trainer": lightning.Trainer,
        "task": task_class()(),
        "dataset": interrupted.dataset(),
        "exact_loader": exact_loader,
        "ExactSampler": ExactSampler,
    }
    documented.run("Lightning", names)
    assert [step for step, _ in Store("checkpoints").slots.found()] == [6]


@functools.cache
def data_class() -> Any:
    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return interrupted.loader()

    return Data


# With a logger each start has a new folder. Without one the next machine meets the config.yaml of the first.
@pytest.mark.parametrize("logger", ["false", "{class_path: CSVLogger, init_args: {save_dir: logs}}"])
def test_the_lines_for_the_command_line_of_lightning_go_on_exactly(
    logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it: pip install '.[integrations]'")
    from lightning.pytorch.cli import LightningCLI

    from spotheal.training.integrations.lightning import SpotCheckpoints

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    argv = [f"--trainer.max_epochs={EPOCHS}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false", f"--trainer.logger={logger}"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    after_step = Session.after_step

    def life(folder: Path, stop_at: int = 0) -> dict[str, Any]:
        def hears(self: Session, step: int, *arguments: Any, **named: Any) -> None:
            if step == stop_at:
                interrupted.notice(folder, self)
            after_step(self, step, *arguments, **named)

        folder.mkdir(exist_ok=True)
        gone(folder)
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(Session, "after_step", hears)
            for name, value in interrupted.environment(folder).items():
                patch.setenv(name, value)
            names = {"Task": task_class(), "Data": data_class(), "LightningCLI": LightningCLI,
                     "SpotCheckpoints": SpotCheckpoints}  # fmt: skip
            return dict(documented.run("Adding us to a script", names)["cli"].model.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (4, 9):
            with pytest.raises(SavedAndStopped):
                life(tmp_path / "spot", step)
            assert saved_step(tmp_path / "spot") == step
        assert same(life(tmp_path / "spot"), life(tmp_path / "whole"))
