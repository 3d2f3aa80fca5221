"""Two ranks under Lightning, Hugging Face's Trainer and Accelerate, the real ones: one hears the notice, all save.

The ranks are forked with the environment that torchrun gives; each library makes, or finds, its own process group.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sharded_world
from interrupted import EPOCHS, SAMPLES, STEPS, options

from spotheal.training.checkpoint import Store

pytestmark = [pytest.mark.torch, pytest.mark.processes]
HALF = 4  # samples of each of two ranks in a step
Train = Callable[[int, int, Path, "int | None"], Any]


def both(train: Train, rank: int, size: int, folder: Path, step: int) -> dict[str, Any]:
    """Without interruption; interrupted in `step`, of which rank 1 alone hears; and resumed."""
    from spotheal.training.session import SavedAndStopped

    whole = train(rank, size, folder / "whole", None)
    code = None
    try:
        train(rank, size, folder / "spot", step)
    except SavedAndStopped as stopped:
        code = [stopped.code, stopped.step]
    saved = [step for step, _ in Store(folder / "spot" / "checkpoints").slots.found()]
    torch.rand(3 + rank)  # the next process begins with other generators
    resumed = train(rank, size, folder / "spot", None)
    return {"code": code, "saved": saved, "whole": sharded_world.whole(whole), "resumed": sharded_world.whole(resumed)}


def heard(session: Any, rank: int) -> None:
    """As the process of this rank hears of it: by a signal to it alone."""
    if rank == 1:
        session.watcher._on_sigterm(15, None)


# ----------------------------------------------------------------------------------------------------------- Lightning
def lightning(rank: int, size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    return both(_lightning, rank, size, folder, 4)


def _lightning(rank: int, size: int, folder: Path, notice_at: int | None) -> Any:
    import interrupted
    from lightning.pytorch import Callback, LightningModule, Trainer

    from spotheal.training.integrations.lightning import SpotCheckpoints
    from spotheal.training.sampler import ExactSampler, exact_loader

    class Task(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.network = interrupted.network()
            torch.manual_seed(7 + rank)

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    class At(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step + 1 == notice_at:
                heard(spot.session, rank)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    task, spot = Task(), SpotCheckpoints(**options(folder))
    newest = spot.newest()
    figures: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=size, strategy="ddp", max_epochs=EPOCHS, use_distributed_sampler=False,
        callbacks=[At(), spot], plugins=[spot.io], enable_model_summary=False, **figures,
    )  # fmt: skip
    loader = exact_loader(interrupted.dataset(), ExactSampler(SAMPLES, seed=3, rank=rank, world_size=size), HALF)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(task, loader, ckpt_path=newest, weights_only=False)
    return task.state_dict()


# -------------------------------------------------------------------------------------------------------- Hugging Face
def transformers(rank: int, size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    return both(_transformers, rank, size, folder, 4)


def _transformers(rank: int, size: int, folder: Path, notice_at: int | None) -> Any:
    import interrupted
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from spotheal.training.integrations.transformers import SpotCheckpoints

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = interrupted.network()

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            outputs = self.network(x)
            return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}

    class At(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == notice_at:
                heard(spot.session, rank)

    arguments = TrainingArguments(
        str(folder / "hf"), num_train_epochs=EPOCHS, per_device_train_batch_size=HALF, learning_rate=0.05,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=7, logging_strategy="no",
        ddp_backend="gloo",
    )  # fmt: skip
    torch.manual_seed(7)
    model = Model()
    data = [{"x": inputs, "labels": targets} for inputs, targets in interrupted.dataset()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    spot = SpotCheckpoints(trainer, **options(folder))
    trainer.add_callback(At())
    trainer.train(resume_from_checkpoint=spot.newest())
    return model.state_dict()


# ---------------------------------------------------------------------------------------------------------- Accelerate
def accelerate(rank: int, size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    return both(_accelerate, rank, size, folder, 4)


def _accelerate(rank: int, size: int, folder: Path, notice_at: int | None) -> Any:
    import interrupted
    from accelerate import Accelerator

    from spotheal.training.integrations.accelerate import resume
    from spotheal.training.sampler import ExactSampler, exact_loader
    from spotheal.training.session import Session

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    model = interrupted.network()
    torch.manual_seed(7 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run_model, run_optimizer = accelerator.prepare(model, optimizer)
    sampler = ExactSampler(SAMPLES, seed=3, rank=rank, world_size=size)
    loader = exact_loader(interrupted.dataset(), sampler, HALF)
    session = Session(**options(folder))
    loop = resume(accelerator, session, model=run_model, optimizer=run_optimizer, sampler=sampler)
    for _ in range(sampler.epoch, EPOCHS):
        for inputs, targets in loader:
            run_optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(run_model(inputs), targets))
            run_optimizer.step()
            if notice_at == loop.step + 1:
                heard(session, rank)
            loop.after_step(samples=len(inputs))
        sampler.next_epoch()
    loop.finish()
    return model.state_dict()


# ----------------------------------------------------------------------------------- a loader of each rank with a state
def stateful(rank: int, size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    return both(_stateful, rank, size, folder, 4)


def _stateful(rank: int, size: int, folder: Path, notice_at: int | None) -> Any:
    """Each rank shuffles its own half, so that its loader's state is no other's."""
    import interrupted
    from torch.utils.data import Subset
    from torchdata.stateful_dataloader import StatefulDataLoader

    from spotheal.training.session import Session, resume

    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(interrupted.network())
    torch.manual_seed(7 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    half = Subset(interrupted.dataset(), range(rank, SAMPLES, size))
    loader = StatefulDataLoader(half, HALF, shuffle=True, generator=torch.Generator().manual_seed(rank))
    session = Session(**options(folder))
    loop = resume(session, model=model, optimizer=optimizer, loader=loader)
    for _ in loop.epochs(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if notice_at == loop.step + 1:
                heard(session, rank)
            loop.after_step()
    loop.finish()
    return model.module.state_dict()


# ------------------------------------------------------------------------------------------------------------ the facts
@pytest.mark.parametrize(
    ("work", "library"),
    [(lightning, "lightning"), (transformers, "transformers"), (accelerate, "accelerate"), (stateful, "torchdata")],
)
def test_one_rank_hears_the_notice_and_the_resumed_run_is_the_one_never_interrupted(
    work: sharded_world.Work, library: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")  # the ranks import it, not this process
    told = sharded_world.run(tmp_path, 2, work, preload=("libraries_here",), uninitialized=True)
    assert [one["code"] for one in told] == [[75, 4]] * 2
    assert told[0]["saved"] == [4]
    assert [one["resumed"] for one in told] == [one["whole"] for one in told]
    assert next(step for step, _ in Store(tmp_path / "spot" / "checkpoints").slots.found()) == STEPS
