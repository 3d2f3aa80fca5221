"""A plain DataLoader as a part of `resume`: the epoch goes on with the very next batch, and nothing is read twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import interrupted
from interrupted import options
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.sampler import SeededSamples
from spotheal.training.session import SavedAndStopped, Session, resume

pytestmark = pytest.mark.torch
EPOCHS, BATCHES = 3, 5


class Numbers(Dataset[int]):
    """Remembers what was read in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


Make = Callable[[Numbers], DataLoader[Any]]


def batches(folder: Path, make: Make, stop_at: int = 0, extra: int = 0) -> list[tuple[int, list[int], float]]:
    """Epoch, batch and a draw of the process's generator, of each step; ends at a notice in step `stop_at`."""
    torch.manual_seed(5)
    random.seed(5)
    torch.rand(extra)  # the process that resumes has drawn something else
    session, seen = Session(**options(folder)), []
    loader = make(Numbers())
    loop = resume(session, loader=loader)
    try:
        for epoch in loop.epochs(EPOCHS):
            for batch in loader:
                seen.append((epoch, batch.tolist(), float(torch.rand(()))))
                if loop.step + 1 == stop_at:
                    interrupted.notice(folder, session)
                loop.after_step()
        loop.finish()
    except SavedAndStopped:
        interrupted.gone(folder)
    return seen


class Lazy(RandomSampler):
    """Draws its order while it is read, from the process's generator: as nothing of torch does."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield int(torch.randint(20, ()))


def _shifted(indices: list[int]) -> Any:
    return torch.tensor(indices) + 100 * torch.randint(9, ())


LOADERS: dict[str, Make] = {
    "shuffle": lambda data: DataLoader(data, 4, shuffle=True),
    "workers": lambda data: DataLoader(data, 4, shuffle=True, num_workers=2),
    "persistent": lambda data: DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True),
    "own generator": lambda data: DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda data: DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 20, 20)),
    "generator of the sampler": lambda data: DataLoader(
        data, 4, sampler=RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(3))
    ),
    "random transform": lambda data: DataLoader(data, 4, shuffle=True, collate_fn=_shifted),
    "in order": lambda data: DataLoader(data, 4),
    "no batches": lambda data: DataLoader(data, None, sampler=RandomSampler(data, num_samples=5)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_three_resumes_give_the_batches_and_draws_of_one_run(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make: Make = LOADERS[kind]
    if kind == "no batches":
        make = lambda data: _of_tensors(LOADERS[kind](data))  # noqa: E731
    whole = batches(tmp_path / "whole", make)
    assert len(whole) == EPOCHS * BATCHES
    first = batches(tmp_path / "spot", make, stop_at=3)
    second = batches(tmp_path / "spot", make, stop_at=8, extra=1)
    third = batches(tmp_path / "spot", make, stop_at=10, extra=2)  # the last step of an epoch
    fourth = batches(tmp_path / "spot", make, extra=3)
    assert [len(first), len(second), len(third)] == [3, 5, 2]
    assert first + second + third + fourth == whole
    named = [line.message for line in caplog.records if "exact" in line.message]
    assert all("SeededSamples(dataset)" in line for line in named)
    assert len(named) == (3 if kind in ("workers", "persistent") else 0), "once a resume"


def _of_tensors(loader: DataLoader[Any]) -> DataLoader[Any]:
    loader.collate_fn = torch.tensor
    return loader


def test_what_was_used_is_not_read_again(tmp_path: Path) -> None:
    batches(tmp_path, LOADERS["shuffle"], stop_at=3)
    data = Numbers()
    batches(tmp_path, lambda _: LOADERS["shuffle"](data), stop_at=5)
    assert len(data.read) == 2 * 4


def test_an_order_that_is_drawn_while_it_is_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(data: Numbers) -> DataLoader[Any]:
        return DataLoader(data, 4, sampler=Lazy(data))

    batches(tmp_path, make, stop_at=3)
    batches(tmp_path, make)
    assert "not exact" in caplog.text and "Lazy" in caplog.text and "ExactSampler" in caplog.text


def test_a_stream_is_refused_with_the_loader_that_has_a_state(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(20))

    with pytest.raises(ConfigError, match="no state_dict") as refused:
        resume(Session(**options(tmp_path)), loader=DataLoader(Stream(), 4))
    assert "StatefulDataLoader" in refused.value.next_step


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(())


def test_accelerate_reads_ahead_and_seeded_samples_stay_exact(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from spotheal.training.integrations.accelerate import resume as accelerated

    def train(folder: Path, stop_at: int = 0) -> list[list[float]]:
        torch.manual_seed(5)
        accelerator, session, seen = accelerate.Accelerator(cpu=True), Session(**options(folder)), []
        loader = accelerator.prepare(DataLoader(SeededSamples(Noisy()), 4, shuffle=True))
        loop = accelerated(accelerator, session, loader=loader)
        try:
            for _ in loop.epochs(EPOCHS):
                for batch in loader:
                    seen.append(batch.tolist())
                    if loop.step + 1 == stop_at:
                        interrupted.notice(folder, session)
                    loop.after_step()
            loop.finish()
        except SavedAndStopped:
            interrupted.gone(folder)
        return seen

    whole = train(tmp_path / "whole")
    parts = [train(tmp_path / "spot", stop_at) for stop_at in (3, 5, 9, 0)]
    assert [len(part) for part in parts] == [3, 2, 4, 6]
    assert [batch for part in parts for batch in part] == whole
