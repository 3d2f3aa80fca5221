"""Save at the notice and resume exactly, for models of which no rank has the whole (FSDP2's `fully_shard`, DTensor).

    fully_shard(model)
    loop = resume(ShardedSession(), model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)

The rest is as with `Session`: `loop.after_step(...)`, `loop.finish()`. Another number of ranks may resume. What every
rank has whole (scheduler, sampler, buffers) is saved as rank 0 has it; generators of each rank. Limits: one model and
its optimizers; FSDP2 and DTensor, not FSDP1's flat parameters; every rank sees the folder (one machine, or EFS).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training import state
from spotheal.training.distributed import is_sharded
from spotheal.training.session import SavedAndStopped, Session, plain, unwrapped
from spotheal.training.sharded import ShardedStore

log = logging.getLogger("spotheal.training")


class ShardedSession(Session):
    """A Session whose ranks all write: each its part of a set (sharded.py). Options as those of Session."""

    _model: Any = None

    def _open_store(self, slots: int) -> ShardedStore:
        return ShardedStore(self.folder, slots, ranks=self.ranks, on_end=self._ended)

    def load(self, like: Callable[[], Any] | None = None) -> Any | None:
        """As Session.load; into the DTensors of `like()`, a tree as `gather` gives it."""
        loaded = self.store.load(lambda: like() if like is not None else None)
        if loaded is None:
            return None
        if self.ranks.rank == 0:
            self.report.saved(loaded.step, loaded.path)
            log.info("resuming at step %d from %s, digest %s", loaded.step, loaded.path, loaded.info["digest"])
        is_same_world = self._is_world_of(loaded.world)
        if is_same_world and self._model is not None:
            loaded.tree["parts"]["model"].update(loaded.own["buffers"])
        self._rng = loaded.own["rng"] if loaded.own is not None else None
        self._mark = loaded.info["digest"] if is_same_world else None
        return loaded.tree

    def adapt(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        if "model" not in parts:
            raise ConfigError("a sharded session needs its parts' `model`: the optimizer's state is named by it")
        model = self._model = unwrapped(parts["model"])
        return {
            name: ShardedOptimizer(model, part) if isinstance(part, torch.optim.Optimizer) else unwrapped(part)
            for name, part in parts.items()
        }

    def check_sampler(self, sampler: Any) -> None:
        """Ranks that share the layers of one replica (tensor parallel) take the same samples on purpose."""
        if self.ranks.size > 1 and getattr(sampler, "world_size", None) == 1 and self.ranks.rank == 0:
            log.warning("the sampler is of one rank: each of the %d takes the same samples", self.ranks.size)

    def after_step(
        self,
        step: int,
        gather: Callable[[], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        **figures: Any,
    ) -> None:
        """As Session.after_step. The state of a pending save travels in the one collective of a few bytes a step."""
        self.listen()
        if self.report.due:
            self.report.progress(step=step, **{name: plain(value) for name, value in figures.items()})
        self._is_save_due = self._is_save_due or (self.ranks.rank == 0 and self._pace.due(step))
        begin = self._is_save_due and not self.store.busy
        leave, save_request, begin, working = self.ranks.any(
            self.watcher.notice is not None, self.watcher.take_save_request(), begin, self.store.working
        )
        if leave:
            self.save(step, gather)
            self.close()
            raise SavedAndStopped(step)
        if self.store.busy and not working and (outcome := self.store.advance()) is not None:
            self._learn(outcome)
        if begin:
            self._is_save_due = False
            self._begin(step, gather, optimizer)
        self._is_save_due = self._is_save_due or save_request

    def save(self, step: int, gather: Callable[[], Any]) -> None:
        self.store.wait_copied()
        self.store.flush()
        self._begin(step, gather, None)
        outcome = self.store.flush()
        if outcome is not None and outcome.fault is not None:
            raise outcome.fault

    def _begin(self, step: int, gather: Callable[[], Any], optimizer: torch.optim.Optimizer | None) -> None:
        start = time.monotonic()
        own_state = {"rng": state.rng_state(), "buffers": {}}
        if self._model is not None:  # BatchNorm's statistics are those of the rank's own samples
            named = self._model.state_dict().items()
            own_state["buffers"] = {name: tensor for name, tensor in named if not is_sharded(tensor)}
        mark = state.digest(own_state["rng"], self.next_ids())
        later = self._later(optimizer)
        self.store.save(step, gather(), own=own_state, info={"digest": mark}, later=later)
        if self.ranks.rank == 0:
            log.info("saving step %d, digest %s", step, mark)
        self._pace.begun()
        self._begin_seconds = time.monotonic() - start


class ShardedOptimizer:
    """An optimizer whose state is named by the model's parameters, so that it can be loaded before the first step."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)
