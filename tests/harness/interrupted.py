"""What the tests of the plain loop and of the integrations share: a small task, and a notice at a chosen step."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from spotheal.agent.protocol import contract
from spotheal.training.sampler import ExactLoader, ExactSampler, exact_loader
from spotheal.training.session import Session

torch.set_num_threads(1)  # where cores are shared, threads for so little work only wait for each other
SAMPLES, BATCH, EPOCHS = 44, 8, 2  # six steps an epoch, the last of four samples
STEPS = 12


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=generator))


def loader() -> ExactLoader:
    return exact_loader(dataset(), ExactSampler(SAMPLES, seed=3), BATCH)


def network() -> nn.Sequential:
    """With what is easily forgotten: running statistics, and masks from the global generator."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def environment(folder: Path) -> dict[str, str]:
    return {
        contract.CHECKPOINT_DIR: str(folder / "checkpoints"),
        contract.PROGRESS_FILE: str(folder / "progress.json"),
        contract.NOTICE_FILE: str(folder / "notice.json"),
    }


def options(folder: Path, save_every: str = "1000") -> dict[str, Any]:
    """For Session: nothing of the surroundings, and no saves but those at a notice and at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"environment": environment(folder), "imds": False, "save_every": save_every}


def notice(folder: Path, session: Session) -> None:
    """As the agent gives it, heard at once."""
    deadline = datetime.now(timezone.utc) + timedelta(seconds=80)
    contract.write_atomically(folder / "notice.json", contract.Notice("terminate", deadline).to_json())
    session.watcher.poll()


def gone(folder: Path) -> None:
    """The next instance: no notice there."""
    (folder / "notice.json").unlink(missing_ok=True)


def saved_step(folder: Path) -> int | None:
    """The step that the progress file calls saved; its checkpoint is there."""
    progress = contract.read_progress(folder / "progress.json")
    if progress is None or progress.saved is None:
        return None
    assert Path(progress.saved.path).exists()
    return progress.saved.step
