"""The training loop: resume, train, save, validate, hand over. Read it from `train` downwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import SpothealError
from spotheal.training import state
from spotheal.training.checkpoint import Loaded, Store
from spotheal.training.distributed import Ranks
from spotheal.training.example.models import Average
from spotheal.training.notice import Watcher
from spotheal.training.pace import FINAL_SAVE_FACTOR, FINAL_SAVE_SECONDS, Pace, too_slow
from spotheal.training.report import Metrics, Reporter
from spotheal.training.sampler import ExactSampler, SeededSamples
from spotheal.training.slotfile.outcome import Outcome, SaveFailed

DIGEST_SAMPLES = 64
OTHER_FOLDER = f"name another checkpoint folder in {contract.CHECKPOINT_DIR}"
FAILED_SAVES_MAX = 3


class Ended(Enum):
    DONE = "done"
    SAVED_AND_STOPPED = "saved and stopped"


@dataclass
class Counters:
    """Figures that are part of the state: those of the epoch so far, and the best so far."""

    step: int = 0
    epoch_loss: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    epoch_samples: int = 0
    best: float | None = None
    best_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        loss = state_dict["epoch_loss"].to(self.epoch_loss.device)
        vars(self).update({**state_dict, "epoch_loss": loss})


@dataclass
class Run:
    """All parts of one training. `parts()`: the content of a checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: Any  # torch.amp.GradScaler, or None
    average: Average | None
    sampler: ExactSampler
    train_loader: DataLoader[Any]
    valid_loader: DataLoader[Any]
    device: torch.device
    epochs: int
    best: str = ""  # "max:val_acc"
    amp: torch.dtype | None = None
    milestones: int = 0  # every so many epochs one checkpoint is kept for good; 0: none
    last_safe_step: bool = False  # at a notice go on while there is time, instead of saving at once
    step_seconds_min: float = 0.0
    log_every: int = 10  # steps between lines of metrics
    config: dict[str, Any] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    ranks: Ranks = field(default_factory=Ranks)
    forward: nn.Module | None = None  # what is called in training: DistributedDataParallel around `model`

    def parts(self) -> dict[str, state.Stateful]:
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
            "counters": self.counters,
        }
        optional = {"scaler": self.scaler, "average": self.average}
        return parts | {name: part for name, part in optional.items() if part is not None}

    @property
    def epoch_now(self) -> int:
        """From 0; the last one where all are done, whose sampler stands at the beginning of one that never comes."""
        return min(self.sampler.epoch, self.epochs - 1)

    @property
    def steps_planned(self) -> int:
        """Of the whole run, with this number of ranks from its beginning to its end."""
        return self.epochs * self._steps(self.sampler.share)

    @property
    def steps_total(self) -> int:
        """The last step of the run: other ranks may have done the first ones, and done fewer or more an epoch."""
        later = max(0, self.epochs - self.sampler.epoch - 1) * self._steps(self.sampler.share)
        this_epoch = self._steps(len(self.sampler)) if self.sampler.epoch < self.epochs else 0
        return self.counters.step + this_epoch + later

    def _steps(self, samples: int) -> int:
        return -(-samples // int(self.train_loader.batch_size or 1))


def train(run: Run, store: Store | NoStore, pace: Pace, watcher: Watcher, report: Reporter) -> Ended:
    """Train to the last epoch, or until a notice; the state is durable in both cases when this returns.

    SaveFailed where the last save, or three in a row, could not be made durable.
    """
    saver = Saver(run, store, pace, report)
    run.optimizer.register_step_pre_hook(lambda *_: store.wait_copied())
    report.progress(now=True, step=run.counters.step, epoch=run.epoch_now, steps_total=run.steps_total)
    while run.sampler.epoch < run.epochs:
        start, samples_before = time.monotonic(), run.counters.epoch_samples
        for inputs, targets in batches(run):
            step_began = time.monotonic()
            with run.ranks.together():
                loss = one_step(run, inputs, targets)
            if run.step_seconds_min:
                time.sleep(max(0.0, run.step_seconds_min - (time.monotonic() - step_began)))
            record = run.counters.step % run.log_every == 0
            if record or report.due:
                rate = (run.counters.epoch_samples - samples_before) / (time.monotonic() - start)
                tell(run, report, float(loss), rate, record)
            leave = must_leave(run, watcher, saver, time.monotonic() - step_began)
            save_request = watcher.take_save_request()
            leave, save_request, begin = run.ranks.any(leave, save_request, saver.ready(save_request))
            if leave:
                return saver.hand_over()
            saver.after_step(save_request, begin)
        seconds = time.monotonic() - start
        figures = validate(run, watcher)
        if figures is None:
            return saver.hand_over()
        end_epoch(run, saver, report, figures, seconds, run.counters.epoch_samples - samples_before)
    saver.save_now()
    return Ended.DONE


# --------------------------------------------------------------------------------------------------------- the pieces
def batches(run: Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rest of this epoch, on the device. Making the iterator draws nothing from the global generators."""
    run.model.train()
    if isinstance(run.train_loader.dataset, SeededSamples):
        run.train_loader.dataset.set_epoch(run.sampler.epoch)
    if not len(run.sampler):
        return
    for inputs, targets in run.train_loader:
        yield inputs.to(run.device, non_blocking=True), targets.to(run.device, non_blocking=True)


def one_step(run: Run, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Forward, backward, step; the counters move only when the step is complete. Returns the loss."""
    run.optimizer.zero_grad(set_to_none=True)
    with autocast(run):
        loss = nn.functional.cross_entropy((run.forward or run.model)(inputs), targets)
    if run.scaler is not None:
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
    else:
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
    run.scheduler.step()
    if run.average is not None:
        run.average.update()
    counters, samples, loss = run.counters, len(targets), loss.detach()
    counters.step += 1
    counters.epoch_samples += samples
    counters.epoch_loss.add_(loss, alpha=samples)
    run.sampler.advance(samples)
    return loss


def autocast(run: Run) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(run.device.type, run.amp) if run.amp is not None else contextlib.nullcontext()


@torch.no_grad()
def validate(run: Run, watcher: Watcher) -> dict[str, float] | None:
    """Loss and accuracy on the validation set; None if a notice came meanwhile: the resumed run validates again."""
    run.model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    right = torch.zeros((), dtype=torch.int64, device=run.device)
    count = 0
    for inputs, targets in run.valid_loader:
        inputs, targets = inputs.to(run.device), targets.to(run.device)
        with autocast(run):
            outputs = run.model(inputs)
            loss += nn.functional.cross_entropy(outputs, targets, reduction="sum").double()
        right += (outputs.argmax(1) == targets).sum()
        count += len(targets)
        if run.ranks.any(watcher.notice is not None)[0]:
            return None
    # Every rank has looked at every sample; rank 0 decides, for the last bits of the others' statistics may differ.
    return run.ranks.first({"val_loss": loss.item() / count, "val_acc": right.item() / count})


def end_epoch(
    run: Run, saver: Saver, report: Reporter, figures: dict[str, float], seconds: float, samples: int
) -> None:
    """Print, record, keep the best, and go to the next epoch."""
    counters = run.counters
    epoch, rate = run.sampler.epoch, samples / max(seconds, 1e-9)
    figures = {"train_loss": counters.epoch_loss.item() / max(1, counters.epoch_samples), **figures}
    report.metrics.add(step=counters.step, epoch=epoch, closes=True, **figures, lr=run.optimizer.param_groups[0]["lr"])
    better = is_better(run.best, figures, counters.best)
    if better is not None:
        counters.best, counters.best_step = better, counters.step
    best = {} if counters.best is None else {f"best_{run.best.partition(':')[2]}": counters.best}
    # Epochs shorter than a second need no write each: the next step's follows.
    report.progress(now=seconds > 1, step=counters.step, epoch=epoch, loss=figures["train_loss"],
                    samples_per_second=rate, extra={**figures, **best})  # fmt: skip
    report.say(
        f"epoch {epoch + 1}/{run.epochs}  step {counters.step}/{run.steps_total}  {rate:.0f} samples/s"
        + "".join(f"  {name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())
    )
    run.sampler.next_epoch()
    counters.epoch_loss.zero_()
    counters.epoch_samples = 0
    milestone = bool(run.milestones) and run.sampler.epoch % run.milestones == 0
    if better is not None or milestone:
        saver.keep(best=better is not None, milestone=milestone)


def is_better(rule: str, figures: dict[str, float], best: float | None) -> float | None:
    """The value of `rule`'s metric if it beats `best`, else None. ValueError if there is no such metric."""
    if not rule:
        return None
    direction, _, name = rule.partition(":")
    if name not in figures:
        raise ValueError(f"--best {rule}: there is no {name!r}, only {', '.join(figures)}")
    value = figures[name]
    if best is None or (value > best if direction == "max" else value < best):
        return value
    return None


def must_leave(run: Run, watcher: Watcher, saver: Saver, step_seconds: float) -> bool:
    if watcher.notice is None:
        return False
    reserve = FINAL_SAVE_FACTOR * saver.save_seconds + FINAL_SAVE_SECONDS + 2 * step_seconds
    return not run.last_safe_step or watcher.seconds_left() <= reserve


def tell(run: Run, report: Reporter, loss: float, rate: float, record: bool) -> None:
    step, epoch = run.counters.step, run.sampler.epoch
    report.progress(step=step, epoch=epoch, loss=loss, samples_per_second=rate)
    if record:
        report.metrics.add(step=step, epoch=epoch, loss=loss, samples_per_second=rate)


# ---------------------------------------------------------------------------------------------------- resume and save
class NoStore:
    """The store of ranks other than 0, which neither read nor write."""

    folder = Path()
    set_aside: Sequence[tuple[Path, str]] = ()
    busy = False
    taken_seconds = 0.0

    def prepare(self, tree: Any) -> int:
        return 0

    def save(self, step: int, tree: Any, **_: Any) -> bool:
        return False

    def wait_copied(self) -> None:
        return None

    def ended(self) -> Outcome | None:
        return None

    flush = ended

    def load(self) -> Loaded | None:
        return None

    def newest_info(self) -> Any:
        return None

    def close(self) -> None:
        return None


def silent_reporter() -> Reporter:
    """The reporter of ranks other than 0: it prints warnings and writes nothing."""
    return Reporter(None, Metrics(None), silent=True)


class Saver:
    """Saves the run at its pace, and learns the cost of a save. Every rank has one; rank 0's has the store."""

    def __init__(self, run: Run, store: Store | NoStore, pace: Pace, report: Reporter) -> None:
        self.run, self.store, self.pace, self.report = run, store, pace, report
        self.save_seconds = 0.0  # the longest of the last few
        self._is_save_due = False
        self._failed = 0

    def ready(self, save_request: bool) -> bool:
        """Whether to save now: due or asked for. While one save is pending the next waits, the training does not."""
        outcome = self.store.ended()
        if outcome is not None:
            self._learn(outcome)
        self._is_save_due = self._is_save_due or save_request or self.pace.due(self.run.counters.step)
        return self._is_save_due and not self.store.busy and self.run.ranks.rank == 0

    def after_step(self, save_request: bool, begin: bool) -> None:
        """`begin`: rank 0 is ready. `asked`: on any rank."""
        if begin:
            self._begin()
        self._is_save_due = not begin and (self._is_save_due or save_request)

    def keep(self, best: bool, milestone: bool) -> None:
        """Save this very state for good: a pending save is waited for, which happens once an epoch at most."""
        self.store.wait_copied()
        self._learn(self.store.flush())
        self._begin(best=best, milestone=milestone)

    def save_now(self) -> Outcome | None:
        """The state of this step, durable when this returns. SaveFailed if it is not."""
        self.store.wait_copied()
        last = self.store.flush()
        stale = last is None or last.step != self.run.counters.step or last.path is None or self._position_moved
        if self.run.ranks.first(stale):
            self._begin()
            last = self.store.flush()
        failed = self.run.ranks.first(last.fault.message if last is not None and last.fault is not None else None)
        if failed is not None:
            raise last.fault if last is not None and last.fault is not None else SaveFailed(failed)
        return last

    def hand_over(self) -> Ended:
        self.save_now()
        return Ended.SAVED_AND_STOPPED

    def _begin(self, best: bool = False, milestone: bool = False) -> None:
        run = self.run
        start = time.monotonic()
        other_ranks = run.ranks.all(state.rng_state())[1:] if run.ranks.size > 1 else []
        tree = state.gather(run.parts(), other_ranks, config=run.config)
        mark = state.digest(tree["rng"], run.sampler.next_ids(DIGEST_SAMPLES))
        info = {
            "epoch": run.sampler.epoch,
            "digest": mark,
            "best": run.counters.best,
            "save_seconds": self.save_seconds,
            "threads": torch.get_num_threads(),
        }
        later = state.changed_by_step(run.optimizer)
        self.store.save(run.counters.step, tree, info=info, later=later, best=best, milestone=milestone)
        self._saved_epoch = run.sampler.epoch
        self.pace.begun()
        self._begin_seconds = time.monotonic() - start

    _saved_epoch = -1
    _begin_seconds = 0.0  # the call, with gathering the state

    @property
    def _position_moved(self) -> bool:
        """The epoch was closed since the last save, without a step between."""
        return self._saved_epoch != self.run.sampler.epoch

    def _learn(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        self.pace.cost(max(self._begin_seconds, self.store.taken_seconds))
        if outcome.fault is not None:
            self._failed += 1
            self.report.warn(str(outcome.fault))
            if self._failed >= FAILED_SAVES_MAX:
                raise outcome.fault
            return
        self._failed = 0
        self.report.checkpoint(outcome.seconds, max(self._begin_seconds, self.store.taken_seconds))
        first, self.save_seconds = self.save_seconds == 0, max(outcome.seconds, self.save_seconds * 0.7)
        if first:
            warn_if_too_slow(self.save_seconds, outcome.data_bytes, self.report)


def resume(run: Run, store: Store | NoStore, report: Reporter) -> Loaded | None:
    """Load the newest valid checkpoint into `run`, or prepare for the first save; the generators are restored last."""
    loaded = from_first(run.ranks, store.load())
    for path, flaw in store.set_aside:
        report.warn(f"a broken checkpoint was set aside as {path}: {flaw}")
    if loaded is None:
        report.metrics.begin(0, 0)
        store.prepare(state.gather(run.parts(), config=run.config))
        report.say(f"no checkpoint in {store.folder}: beginning at step 0 of {run.steps_total}")
        return None
    if not (isinstance(loaded.tree, dict) and {"parts", "rng", "values"} <= loaded.tree.keys()):
        raise SpothealError(
            f"{loaded.path} was not saved by this trainer",
            next_step=f"use the trainer that wrote it, or {OTHER_FOLDER}",
        )
    different = refuse_another_run(run.config, loaded.tree["values"]["config"])
    rates, saved_by = list(run.scheduler.base_lrs), 1 + len(loaded.tree.get("others", ()))
    state.restore(run.parts(), loaded.tree, run.ranks.rank)
    if different and run.sampler.epoch >= run.epochs:  # nothing is left to train by them; the results would name them
        raise SpothealError(
            f"the run in {store.folder} is finished, at step {loaded.step}, with other options: {different}",
            next_step=f"give the options it was trained with, more --epochs to go on, or {OTHER_FOLDER}",
        )
    if different:
        report.warn(f"options differ from the run that wrote the checkpoint: {different}")
    if saved_by != run.ranks.size:
        go_on_as_another_world(run, rates)
        if run.ranks.rank == 0:
            report.warn(
                f"saved by {saved_by} ranks, resumed by {run.ranks.size}: each sample of the epoch is still seen once,"
                " but batches, masks and so the weights are not those of an uninterrupted run"
            )
    store.prepare(state.gather(run.parts(), config=run.config))
    dropped = report.metrics.begin(loaded.step, run.sampler.epoch)
    mark = state.digest(state.rng_state(), run.sampler.next_ids(DIGEST_SAMPLES))
    report.saved(loaded.step, loaded.path)
    report.say(
        f"resumed at step {loaded.step} of {run.steps_total} (epoch {run.epoch_now + 1}) from {loaded.path.name},"
        f" {loaded.data_bytes / 1e6:.1f} MB verified in {loaded.seconds:.2f} s; digest {mark};"
        f" {dropped} later lines of metrics dropped"
    )
    if mark != loaded.info["digest"] and run.ranks.rank == 0 and saved_by == run.ranks.size:
        report.warn(
            f"the generators or the next samples differ from those saved (digest {loaded.info['digest']}):"
            " this run will not be exactly the one that was interrupted"
        )
    if loaded.info["save_seconds"]:
        warn_if_too_slow(loaded.info["save_seconds"], loaded.data_bytes, report)
    return loaded


def go_on_as_another_world(run: Run, rates: Sequence[Any]) -> None:
    """The schedule at the same share of all samples; `rates`: the highest ones with this number of ranks."""
    scheduler: Any = run.scheduler
    samples = run.sampler.state_dict()["position"] + run.sampler.epoch * run.sampler.length
    scheduler.last_epoch = round(run.steps_planned * samples / (run.epochs * run.sampler.length))
    scheduler.base_lrs = list(rates)
    for group, rate, factor in zip(scheduler.optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def from_first(ranks: Ranks, loaded: Loaded | None) -> Loaded | None:
    """The state that rank 0 has loaded, on every rank."""
    if ranks.size == 1:
        return loaded
    body = ranks.first_tree(None if loaded is None else {**vars(loaded), "path": str(loaded.path)})
    return None if body is None else Loaded(**{**body, "path": Path(body["path"])})


def refuse_another_run(current: dict[str, Any], before: dict[str, Any]) -> str:
    """SpothealError if the checkpoint is of another model or data; else the other options that differ, as text."""
    different: Sequence[str] = [name for name in current if current[name] != before.get(name)]
    listed = ", ".join(f"{name} {before.get(name)!r} -> {current[name]!r}" for name in different)
    if {"dataset", "model", "optimizer", "hidden_nodes", "activate_fn"} & set(different):
        raise SpothealError(
            f"the checkpoint is of another run: {listed}",
            next_step=f"use the options of the run that wrote it, or {OTHER_FOLDER}",
        )
    return listed


def warn_if_too_slow(save_seconds: float, data_bytes: int, report: Reporter) -> None:
    if warning := too_slow(save_seconds, data_bytes):
        report.warn(warning)
