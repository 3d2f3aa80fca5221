"""Hugging Face Accelerate: the plain loop, with the objects that `prepare` has wrapped.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    loop = resume(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for epoch in loop.epochs(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                ...
            loop.after_step()                     # after each batch
    loop.finish()

In the place of the loader a sampler: `exact_loader(...)`, which is not prepared, and `after_step(samples=len(inputs))`.
Limits: replicated models (no FSDP, DeepSpeed). `accelerator.save_state` is not used: it pickles, and it does not fsync.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from spotheal.training.replayed import ReplayedLoader
from spotheal.training.session import Loop, Session

log = logging.getLogger("spotheal.training")


class AcceleratedLoop(Loop):
    """A Loop whose steps are optimizer steps: a batch whose gradients are only accumulated makes no checkpoint."""

    def __init__(self, accelerator: Accelerator, session: Session, parts: dict[str, Any]) -> None:
        self._accelerator, self._samples, self._epoch = accelerator, 0, 0
        super().__init__(session, parts)
        self._loaders = [part for part in self.parts.values() if isinstance(part, ReplayedLoader)]
        for loader in self._loaders:
            loader.looks_ahead = True

    def after_step(self, samples: int = 0, **figures: Any) -> None:
        """Call it after every batch of `samples` of this rank. See Session.after_step."""
        epoch = self.sampler.epoch if self.sampler is not None else 0
        if epoch != self._epoch:
            # A step may take in the last batches of the epoch before: the sampler has those behind it.
            self._samples, self._epoch = 0, epoch
        self._samples += samples
        for loader in self._loaders:
            loader.used += 1
        if self._accelerator.sync_gradients:
            samples, self._samples = self._samples, 0
            super().after_step(samples, **figures)


def resume(
    accelerator: Accelerator, session: Session | str | os.PathLike[str] | None = None, **parts: Any
) -> AcceleratedLoop:
    """As session.resume, after `accelerator.prepare`. `session` may be a folder.

    What was prepared and is none of the parts is named in the log. SpothealError where the checkpoint does not fit.
    """
    parts = {name: inner(accelerator, part) for name, part in parts.items()}
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    _say_left_out(accelerator, parts)
    return AcceleratedLoop(accelerator, session if isinstance(session, Session) else Session(session), parts)


def _say_left_out(accelerator: Accelerator, parts: dict[str, Any]) -> None:
    """A forgotten scheduler begins again at each resume, and nothing fails."""
    part_ids = {id(part) for part in parts.values()}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):  # one that holds what was prepared: compiled since, or the whole of it
            part_ids |= {id(module) for module in part.modules()}
    # Accelerate has no public name for what it prepared; an Accelerator without these lists is not looked through.
    for prepared in ("_models", "_optimizers", "_schedulers"):
        for member in getattr(accelerator, prepared, ()):
            if id(part := inner(accelerator, member)) not in part_ids and accelerator.is_main_process:
                log.warning("%s was prepared and is no part given to resume: it is neither saved nor resumed",
                            type(part).__name__)  # fmt: skip


def inner(accelerator: Accelerator, part: Any) -> Any:
    """The wrapped object: the module, the torch optimizer, the scheduler."""
    if isinstance(part, torch.nn.Module):
        return accelerator.unwrap_model(part)
    if isinstance(part, AcceleratedOptimizer):
        return part.optimizer
    return part.scheduler if isinstance(part, AcceleratedScheduler) else part
