"""Loaders and data sets with a state of their own, as parts of `resume(...)`: the run is the one never interrupted.

The libraries are real ones, offline. mosaicml-streaming needs older releases of numpy and transformers than the other
tests do, so its tests are skipped in `.venv` and run in a virtual environment of their own:

    python3 -m venv .venv-mosaic && .venv-mosaic/bin/python -m pip install torch==2.13.0 torchvision==0.28.0
    .venv-mosaic/bin/python -m pip install --editable '.[mosaic,rehearsal,test]'
    .venv-mosaic/bin/python -m pytest tests/training/test_streaming_loaders.py
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import interrupted
from interrupted import BATCH, EPOCHS, SAMPLES, STEPS, gone, options
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.sampler import ExactSampler, exact_loader
from spotheal.training.session import SavedAndStopped, Session, resume

pytestmark = pytest.mark.torch
STOPS = (1, 2, 3, 5, 6, 7, 8, 10, 11)  # 6 is the last step of an epoch, and each but the first is a further resume
HISTORIES: tuple[tuple[int, ...], ...] = (STOPS,)
if os.environ.get("SPOTHEAL_STOPS"):  # `make soak`: each stop as the first one of its run, and a second one after it
    HISTORIES += tuple((stop, *(stop + 2,) * (stop + 2 < STEPS)) for stop in STOPS)


def needs(library: str, extra: str = "streaming") -> Any:
    return pytest.importorskip(library, reason=f"{library} is not here: the extra `{extra}` has it (see this file)")


class OwnStream(IterableDataset[Any]):
    """A stream of a user's own, whose workers take every n-th sample."""

    def __init__(self) -> None:
        self.start = self.used = 0

    def __iter__(self) -> Any:
        self.used, self.start = self.start, 0
        return self._samples()

    def _samples(self) -> Any:
        worker, samples = get_worker_info(), interrupted.dataset()
        first, every = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        while (index := self.used * every + first) < SAMPLES:
            self.used += 1
            yield samples[index]

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["used"]


def stateful(dataset: Any, workers: int, **more: Any) -> Any:
    loader = needs("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(dataset, BATCH, num_workers=workers, **more)


def hugging_face() -> Any:
    inputs, targets = interrupted.dataset().tensors
    columns = {"inputs": inputs.tolist(), "targets": targets.tolist()}
    return needs("datasets").Dataset.from_dict(columns).to_iterable_dataset(num_shards=4).with_format("torch")


def mosaic(workers: int, folder: Path) -> Any:
    pytest.importorskip("torchvision_here").torchvision_here()
    streaming = needs("streaming", "mosaic")
    if not folder.exists():
        inputs, targets = interrupted.dataset().tensors
        columns = {"inputs": "ndarray:float32:5", "targets": "ndarray:float32:1"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=400) as writer:
            for one, other in zip(inputs.numpy(), targets.numpy(), strict=True):
                writer.write({"inputs": one, "targets": other})
    gc.collect()  # the loader of the life before: its shared memory goes with it
    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=3, batch_size=BATCH)
    return streaming.StreamingDataLoader(data, BATCH, num_workers=workers)


LOADERS: dict[str, Callable[[int, Path], Any]] = {
    "torchdata": lambda workers, folder: stateful(
        interrupted.dataset(), workers, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "hugging face": lambda workers, folder: stateful(hugging_face(), workers),
    "mosaic": mosaic,
}


def train(folder: Path, make: Callable[[], Any], stop: int = 0, **parts: Any) -> tuple[list[Any], dict[str, Any]]:
    """The first input of each batch until the end or a notice at `stop`, and the weights. `parts`: None leaves out."""
    torch.manual_seed(7)
    model, loader, batches = interrupted.network(), make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    session = Session(**options(folder))
    given = {"model": model, "optimizer": optimizer, "loader": loader} | parts
    loop = resume(session, **{name: part for name, part in given.items() if part is not None})
    try:
        for epoch in loop.epochs(EPOCHS):
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(epoch)
            for batch in loader:
                inputs, targets = batch.values() if isinstance(batch, dict) else batch
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                batches.append((loop.step, inputs[0].tolist()))
                if stop == loop.step + 1:
                    interrupted.notice(folder, session)
                loop.after_step(samples=len(inputs))
        loop.finish()
    except SavedAndStopped as stopped:
        assert stopped.step == stop
        gone(folder)
    return batches, model.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_that_is_stopped_nine_times_is_the_one_never_interrupted(
    kind: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make = functools.partial(LOADERS[kind], workers, tmp_path / "data")
    whole, weights = train(tmp_path / "whole", make)
    assert [step for step, _ in whole] == list(range(STEPS))
    for number, history in enumerate(HISTORIES):
        joined: list[Any] = []
        for stop in (*history, 0):
            torch.rand(5)  # the next process begins with other generators
            batches, last = train(tmp_path / str(number), make, stop)
            joined += batches
        assert joined == whole, history
        assert all(torch.equal(last[name], weights[name]) for name in weights), history
    assert "resumed at step 11; the data goes on where it was by the state of loader (St" in caplog.text
    for warning in ("without a sampler", "has not moved", "set_epoch", "differ"):
        assert warning not in caplog.text


# ------------------------------------------------------------------------------------------- what would not be exact
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exact_sampler_inside_a_stateful_loader_is_right_or_refused(workers: int, tmp_path: Path) -> None:
    """With workers it began the epoch again in silence, and without the sampler as a part it did so always."""

    def life(stop: int = 0, **parts: Any) -> list[Any]:
        sampler = ExactSampler(SAMPLES, seed=3)
        loader = stateful(interrupted.dataset(), workers, sampler=sampler)
        return train(tmp_path / "run", lambda: loader, stop, **{"sampler": sampler} | parts)[0]

    with pytest.raises(ConfigError, match=r"StatefulDataLoader over an ExactSampler[\s\S]*resume\(sampler="):
        life(sampler=None)
    if workers:
        with pytest.raises(ConfigError, match="over an ExactSampler"):
            life()
    joined = [batch for stop in (1, 3, 6, 8, 0) for batch in life(stop, **({"loader": None} if workers else {}))]
    sampler = ExactSampler(SAMPLES, seed=3)
    loader = exact_loader(interrupted.dataset(), sampler, BATCH)
    assert joined == train(tmp_path / "whole", lambda: loader, sampler=sampler)[0]


def test_an_exact_loader_without_its_sampler_as_a_part_is_refused(tmp_path: Path) -> None:
    """Nobody would tell the sampler what was used, and each resume would begin the epoch again."""
    with pytest.raises(ConfigError, match="loader is a ExactLoader over an ExactSampler"):
        resume(Session(**options(tmp_path)), model=torch.nn.Linear(5, 1), loader=interrupted.loader())


class Told:
    """A data set whose place depends on what it is told, as mosaicml's StreamingDataset's does."""

    def __iter__(self) -> Any: ...

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_a_data_set_that_cannot_tell_its_place_is_refused_with_what_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a Told, whose state_dict needs arguments[\s\S]*StreamingDataLoader"):
        resume(Session(**options(tmp_path)), model=torch.nn.Linear(5, 1), data=Told())


def test_a_data_set_that_only_workers_read_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copy in the training's process stays at its beginning, and a resume begins the data again."""
    for stop in (2, 4):
        assert "has not moved" not in caplog.text
        stream = OwnStream()
        train(tmp_path, lambda: DataLoader(stream, BATCH, num_workers=1), stop, loader=stream)  # noqa: B023
    assert "loader, a OwnStream, has not moved from step 2 to 4" in caplog.text
    assert "StatefulDataLoader around it" in caplog.text


def test_a_data_set_that_is_not_told_of_its_epoch_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Epochs(OwnStream):
        epoch, set_epoch = 0, None

    loader = stateful(Epochs(), 0)
    loop = resume(Session(**options(tmp_path)), model=torch.nn.Linear(5, 1), loader=loader)
    assert [sum(1 for _ in loader) for _ in loop.epochs(2)] == [6, 6]
    loop.finish()
    assert "the data set of loader is at epoch 0 and the loop at 1: call set_epoch(epoch)" in caplog.text


def test_the_epochs_of_a_loop_go_on_where_they_were_with_a_sampler_too(tmp_path: Path) -> None:
    def life(stop: int) -> list[tuple[int, int]]:
        loader, seen = interrupted.loader(), []
        session = Session(**options(tmp_path))
        loop = resume(session, model=torch.nn.Linear(5, 1), sampler=loader.sampler)
        try:
            for epoch in loop.epochs(EPOCHS):
                for inputs, _ in loader:
                    seen.append((epoch, loop.step))
                    if stop == loop.step + 1:
                        interrupted.notice(tmp_path, session)
                    loop.after_step(samples=len(inputs))
            loop.finish()
        except SavedAndStopped:
            gone(tmp_path)
        return seen

    seen: Sequence[tuple[int, int]] = [one for stop in (6, 8, 0) for one in life(stop)]
    assert seen == [(step // 6, step) for step in range(STEPS)]
