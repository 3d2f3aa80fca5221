"""A loop of the user's own, and Accelerate's: saved at the notice, resumed as if nothing had been."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import interrupted
from interrupted import EPOCHS, STEPS, gone, options, saved_step

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.checkpoint import SaveFailed, Store
from spotheal.training.sampler import ExactSampler, exact_loader
from spotheal.training.session import SavedAndStopped, Session, resume

pytestmark = pytest.mark.torch


def train(folder: Path, notice_at: int = 0, accelerated: bool = False, save_every: str = "1000") -> dict[str, Any]:
    """The final weights; SavedAndStopped where a notice came in step `notice_at`."""
    torch.manual_seed(7)
    model, loader = interrupted.network(), interrupted.loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    session, sampler = Session(**options(folder, save_every)), loader.sampler
    wrapped: Any = (model, optimizer, scheduler)
    if accelerated:
        accelerate = pytest.importorskip("accelerate")
        from spotheal.training.integrations import accelerate as ours

        accelerator = accelerate.Accelerator(cpu=True)
        wrapped = accelerator.prepare(*wrapped)
        parts = dict(zip(("model", "optimizer", "scheduler"), wrapped, strict=True))
        loop: Any = ours.resume(accelerator, session, **parts, sampler=sampler)
    else:
        loop = resume(session, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    run_model, run_optimizer, run_scheduler = wrapped
    for _ in range(sampler.epoch, EPOCHS):
        for inputs, targets in loader:
            run_optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(run_model(inputs), targets)
            accelerator.backward(loss) if accelerated else loss.backward()
            run_optimizer.step()
            run_scheduler.step()
            if notice_at == loop.step + 1:
                interrupted.notice(folder, session)
            loop.after_step(samples=len(inputs), loss=loss)
        sampler.next_epoch()
    loop.finish()
    return model.state_dict()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accelerated", [False, True], ids=["plain", "accelerate"])
@pytest.mark.parametrize("step", [1, 4, 6, 11])
def test_after_a_notice_at_any_step_the_run_is_the_one_never_interrupted(
    step: int, accelerated: bool, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole")
    place = tmp_path / "spot"
    with pytest.raises(SavedAndStopped) as stopped:
        train(place, notice_at=step, accelerated=accelerated)
    assert (stopped.value.code, stopped.value.step, saved_step(place)) == (75, step, step)
    gone(place)
    torch.rand(5)  # the next process begins with other generators
    assert same(train(place, accelerated=accelerated), whole)
    assert saved_step(place) == STEPS


def test_accelerates_resume_takes_a_folder_and_names_what_it_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerate = pytest.importorskip("accelerate")
    from spotheal.training.integrations import accelerate as ours

    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loop = ours.resume(accelerator, tmp_path / "checkpoints", model=model, optimizer=optimizer)
    loop.finish()
    whole = torch.nn.Sequential(accelerator.unwrap_model(model))  # holds what was prepared, as torch.compile's does
    parts = {"model": whole, "optimizer": optimizer, "scheduler": scheduler}
    ours.resume(accelerator, tmp_path / "others", **parts).finish()
    assert [line.message for line in caplog.records] == [
        "StepLR was prepared and is no part given to resume: it is neither saved nor resumed"
    ]
    assert [step for step, _ in Store(tmp_path / "checkpoints").slots.found()] == [0]


def test_a_step_over_the_end_of_an_epoch_counts_no_sample_of_the_next_one(tmp_path: Path) -> None:
    """10 batches an epoch, a step each 4: the third begins in one epoch and ends in the next."""
    accelerate = pytest.importorskip("accelerate")
    from spotheal.training.integrations import accelerate as ours

    def train(folder: Path, stop_at: int = 0) -> tuple[Any, list[tuple[int, list[int]]]]:
        torch.manual_seed(3)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler = ExactSampler(20)
        loader = exact_loader(torch.utils.data.TensorDataset(torch.arange(20.0)[:, None]), sampler, 2)
        wrapped_model, wrapped = accelerator.prepare(model, optimizer)
        session, used = Session(**options(folder)), []
        loop = ours.resume(accelerator, session, model=wrapped_model, optimizer=wrapped, sampler=sampler)
        for epoch in range(sampler.epoch, 3):
            for (inputs,) in loader:
                used.append((epoch, inputs.flatten().int().tolist()))
                with accelerator.accumulate(wrapped_model):
                    accelerator.backward(wrapped_model(inputs).sum())
                    wrapped.step()
                    wrapped.zero_grad()
                if stop_at and accelerator.sync_gradients and loop.step + 1 == stop_at:
                    interrupted.notice(folder, session)
                loop.after_step(samples=len(inputs))
            sampler.next_epoch()
        loop.finish()
        return model.state_dict(), used

    whole, batches = train(tmp_path / "whole")
    place = tmp_path / "spot"
    with pytest.raises(SavedAndStopped):
        train(place, stop_at=3)
    gone(place)
    weights, rest = train(place)
    assert rest == batches[12:]
    assert same(weights, whole)


def test_a_compiled_model_is_saved_by_the_names_of_the_one_it_was_made_of(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    resume(Session(**options(tmp_path)), model=torch.compile(model, backend="eager")).finish()
    plain = torch.nn.Linear(2, 1)
    resume(Session(**options(tmp_path)), model=plain).finish()
    assert same(plain.state_dict(), model.state_dict())


def test_a_resume_without_a_sampler_says_that_the_epochs_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = resume(Session(**options(tmp_path)), model=torch.nn.Linear(2, 1))
    loop.after_step()
    loop.finish()
    assert not caplog.records
    resume(Session(**options(tmp_path)), model=torch.nn.Linear(2, 1)).finish()
    assert "resumed at step 1 without a sampler" in caplog.text


def test_saves_between_change_nothing_and_are_there(tmp_path: Path) -> None:
    assert same(train(tmp_path / "saving", save_every="1"), train(tmp_path / "whole"))
    assert len(Store(tmp_path / "saving" / "checkpoints").slots.found()) > 1


def test_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    whole = train(tmp_path / "run")
    assert same(train(tmp_path / "run", notice_at=1), whole)


def test_sigterm_is_a_notice_and_its_handler_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    session = Session(**options(tmp_path))
    session.listen()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SavedAndStopped):
        session.after_step(1, lambda: {"x": torch.ones(2)})
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_the_agent_it_works_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session(environment={}, imds=False)
    assert session.load() is None
    session.finish(3, lambda: {"x": torch.ones(2)})
    assert [step for step, _ in Store("checkpoints").slots.found()] == [3]


def test_a_last_save_that_fails_is_never_called_saved(tmp_path: Path) -> None:
    session = Session(**options(tmp_path))
    assert session.store is not None
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(SaveFailed):
        session.finish(3, lambda: {"x": torch.ones(2)})
    assert saved_step(tmp_path) is None
    session.close()


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    resume(Session(**options(tmp_path)), model=model).finish()
    with pytest.raises(SpothealError, match="does not fit"):
        resume(Session(**options(tmp_path)), model=torch.nn.Linear(3, 2))


def test_a_final_save_that_does_not_fit_in_a_notice_is_warned_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"state": {"x": 1}, "rngs": [{}]}
    store = Store(tmp_path / "checkpoints")
    store.save_now(7, tree, info={"digest": "0" * 12, "save_seconds": 100.0})
    store.close()
    session = Session(**options(tmp_path))
    assert session.load() == {"x": 1}
    assert "takes 100 s here" in caplog.text and "does not fit in the 60 s" in caplog.text
    session.close()


def test_a_checkpoint_of_another_making_is_refused_with_its_name_and_is_left_as_it_is(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    path = store.save_now(7, {"model": {"x": torch.ones(2)}}).path
    store.close()
    session = Session(**options(tmp_path))
    with pytest.raises(SpothealError, match=r"step-000000007.* was not saved by a Session"):
        session.load()
    assert path is not None and path.exists()
    session.close()
