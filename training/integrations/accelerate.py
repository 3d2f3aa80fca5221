"""Hugging Face Accelerate: the plain loop, with what `prepare` has wrapped.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loop = resume(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        for inputs, targets in loader:            # exact_loader(...): not prepared, its sampler is the rank's already
            with accelerator.accumulate(model):
                ...
            loop.after_step(samples=len(inputs))
        sampler.next_epoch()
    loop.finish()

Limits: replicated models (no FSDP, DeepSpeed). `accelerator.save_state` is not used: it pickles, and it does not fsync.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from spotheal.training.session import Loop, Session


class AcceleratedLoop(Loop):
    """A Loop whose steps are optimizer steps: a batch whose gradients are only accumulated makes no checkpoint."""

    def __init__(self, accelerator: Accelerator, session: Session, parts: dict[str, Any]) -> None:
        self._accelerator, self._samples = accelerator, 0
        super().__init__(session, parts)

    def after_step(self, samples: int = 0, **figures: Any) -> None:
        """Call it after every batch of `samples` of this rank. See Session.after_step."""
        self._samples += samples
        if self._accelerator.sync_gradients:
            samples, self._samples = self._samples, 0
            super().after_step(samples, **figures)


def resume(accelerator: Accelerator, session: Session | None = None, **parts: Any) -> AcceleratedLoop:
    """As session.resume, after `accelerator.prepare`. SpothealError where the checkpoint does not fit the parts."""
    parts = {name: inner(accelerator, part) for name, part in parts.items()}
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    return AcceleratedLoop(accelerator, session or Session(), parts)


def inner(accelerator: Accelerator, part: Any) -> Any:
    """What Accelerate has wrapped: the module, the torch optimizer, the scheduler."""
    if isinstance(part, torch.nn.Module):
        return accelerator.unwrap_model(part)
    if isinstance(part, AcceleratedOptimizer):
        return part.optimizer
    return part.scheduler if isinstance(part, AcceleratedScheduler) else part
