"""Save at the notice and as often as is cheap, resume exactly: what the plain loop and every integration are made of.

    session = Session()                            # folder, pace and files as the agent says, where it says so
    tree = session.load()                          # None at the first start
    session.after_step(step, gather, loss=loss)    # after each optimizer step; at a notice: SavedAndStopped
    session.finish(step, gather)

For a loop of one's own (`resume`):

    loop = resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)     # before the epochs
    for epoch in loop.epochs(20):
        loop.after_step(loss=loss)                                                          # after optimizer.step()
    loop.finish()                                                                           # behind the epochs
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import ConfigError, SpothealError
from spotheal.training import state
from spotheal.training.checkpoint import Loaded, Store
from spotheal.training.distributed import Ranks, apart, is_sharded, sample
from spotheal.training.notice import Watcher
from spotheal.training.pace import Every, Pace, interruption_seconds, too_slow
from spotheal.training.places import Still, begin_without_draws, place_of, places, warn_of_another_epoch
from spotheal.training.replayed import replayed
from spotheal.training.report import Metrics, Reporter
from spotheal.training.sampler import ExactSampler
from spotheal.training.sampler import SeededSamples as SeededSamples  # for one line of import in a user's script
from spotheal.training.slotfile.files import refuse_unwritable
from spotheal.training.slotfile.outcome import Outcome, SaveFailed

DIGEST_SAMPLES = 64
FAILED_SAVES_MAX = 3

log = logging.getLogger("spotheal.training")


class SavedAndStopped(SystemExit):
    """The state of this step is durable and the machine is going away: ends the process with exit code 75."""

    def __init__(self, step: int) -> None:
        super().__init__(contract.EXIT_SAVED_AND_STOPPED)
        self.step = step


class Session:
    """One training's checkpoints, notice and progress file, on all its ranks; rank 0 writes.

    `folder`: default SPOTHEAL_CHECKPOINT_DIR, else ./checkpoints. `save_every`: "100" (steps), "30s", "5m", or "auto":
    the interval that loses least (Young/Daly) with `interruption_hours` between interruptions, by default as the agent
    counts them, without one 2; at most 1 % of the time.
    State must be replicated: rank 0's model and optimizer are those of all. Generators are saved for each rank.
    Make it after init_process_group, in the main thread: SIGTERM and SIGUSR1 are listened to from `listen` on.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        save_every: str = "auto",
        slots: int = 3,
        interruption_hours: float | None = None,
        imds: bool = True,
        ranks: Ranks | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = os.environ if environment is None else environment
        try:
            interval = Every.parse(save_every)
        except ValueError as fault:
            raise ConfigError(f"save_every: {fault}", next_step='Session(save_every="100"), "30s" or "auto"') from fault
        self.ranks = ranks or Ranks(environment=environment)
        self.folder = Path(folder or environment.get(contract.CHECKPOINT_DIR) or "checkpoints")
        if self.ranks.rank == 0:
            _warn_beside_the_volume(self.folder, environment.get(contract.CHECKPOINT_DIR))
        progress = environment.get(contract.PROGRESS_FILE) if self.ranks.rank == 0 else None
        self.report = Reporter(Path(progress) if progress else None, Metrics(None))
        self.store: Any = self._open_store(slots)
        self.watcher = Watcher.from_environment(environment, imds=imds)
        self.next_ids: Callable[[], list[int]] = list  # ids of the next samples, for the digest
        self.replicated: list[torch.Tensor] = []  # parameters that are to be the same on every rank
        self.changed_in_forward: list[torch.Tensor] = []  # parameters that are to be copied at once: see state.py
        self._pace = Pace(interval, interruption_seconds(environment, interruption_hours))
        self._rng: Mapping[str, Any] | None = None
        self._mark: str | None = None
        self._is_save_due, self._failed, self._listening = False, 0, False
        self._begin_seconds = self._save_seconds = 0.0
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._closed = False

    def _open_store(self, slots: int) -> Any:
        if self.ranks.rank != 0:
            return None
        refuse_unwritable(self.folder, "no checkpoint can be saved")
        return Store(self.folder, slots, on_end=self._ended)

    # ---------------------------------------------------------------------------------------------------------- resume
    def load(self, like: Callable[[], Any] | None = None) -> Any | None:
        """The newest valid state, the same on every rank (what `gather` gave), or None if there is none.

        A broken file is set aside and named, the one before is used. OSError, SpothealError: the folder is unreadable.
        """
        body: Any = None
        if self.store is not None:
            try:
                loaded = self.store.load()
                if loaded is not None:
                    _refuse_foreign(loaded)
            except BaseException:
                self.ranks.first(None)  # the others raise as well, instead of waiting for the limit
                raise
            if loaded is not None:
                body = {"step": loaded.step, "tree": loaded.tree, "mark": loaded.info["digest"]}
                self.report.saved(loaded.step, loaded.path)
                log.info("resuming at step %d from %s, digest %s", loaded.step, loaded.path, loaded.info["digest"])
                if warning := too_slow(loaded.info.get("save_seconds", 0.0), loaded.data_bytes):
                    log.warning("%s", warning)
        if self.ranks.first(True) is None:
            raise SaveFailed("rank 0 could not read the checkpoints")
        body = self.ranks.first_tree(body)
        if body is None:
            return None
        rngs = body["tree"]["rngs"]
        self._rng = rngs[self.ranks.rank] if self.ranks.rank < len(rngs) else None
        self._mark = body["mark"] if self._is_world_of(len(rngs)) else None
        return body["tree"]["state"]

    def _is_world_of(self, saved_by: int) -> bool:
        """Whether as many ranks resume as have saved; said by rank 0 where they are others."""
        if saved_by != self.ranks.size and self.ranks.rank == 0:
            log.warning("saved by %d ranks, resumed by %d: generators and order differ", saved_by, self.ranks.size)
        return saved_by == self.ranks.size

    def adapt(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """`parts` as their states are saved. ConfigError if a rank has only its share of one."""
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module) and any(is_sharded(tensor) for tensor in part.parameters()):
                raise ConfigError(
                    f"{name} is sharded: rank 0, which writes here, has only its part of it",
                    next_step="use ShardedSession of spotheal.training.sharded_session in the place of Session",
                )
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise ConfigError(
                    f"{name} is a {type(part).__name__}, which has no state_dict and load_state_dict",
                    next_step="give resume() what has a state to be saved, and leave out what has none"
                    + ("; a stream has one in torchdata's StatefulDataLoader" if isinstance(part, DataLoader) else ""),
                )
        return {name: unwrapped(part) for name, part in parts.items()}

    def restore_generators(self) -> None:
        """Put python's, numpy's, torch's and CUDA's generators to where they were: last, right before the first step.

        Does nothing without a loaded state, and nothing the second time.
        """
        if self._rng is not None:
            state.set_rng_state(self._rng)
            mark = state.digest(state.rng_state(), self.next_ids())
            if self.ranks.rank == 0 and self._mark is not None and mark != self._mark:
                log.warning("generators or next samples differ from those saved: digest %s, now %s", self._mark, mark)
        self._rng = None

    def listen(self) -> None:
        """Watch for the notice from now on; SIGTERM's handler is ours until `close`. A second call does nothing."""
        if not self._listening:
            self._listening = True
            self.watcher.__enter__()
            atexit.register(self._left_open)

    def _left_open(self) -> None:
        log.warning("the process ends without `finish`: what was trained after the last checkpoint is not saved")

    def check_sampler(self, sampler: Any) -> None:
        """ConfigError if every rank would train on the same samples: as many machines for no step less."""
        if isinstance(sampler, ExactSampler) and sampler.world_size != self.ranks.size:
            raise ConfigError(
                f"the sampler is of {sampler.world_size} ranks, and {self.ranks.size} train: each would not have its"
                " own share of the samples",
                next_step=f"ExactSampler(…, rank={self.ranks.rank}, world_size={self.ranks.size}): those of `Ranks()`",
            )

    # ------------------------------------------------------------------------------------------------------------ save
    def after_step(
        self,
        step: int,
        gather: Callable[[], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        **figures: Any,
    ) -> None:
        """Global step `step` is complete on this rank: save where it is due; SavedAndStopped once saved for a notice.

        `gather` gives the tree to save (state.py says of what); it is called on all ranks, or on none. With `optimizer`
        its tensors and the parameters are copied in the background: then nothing but optimizer.step may change them.
        `figures`: `epoch`, `loss`, `samples_per_second`, `steps_total` for the progress file. SaveFailed: three failed.
        """
        self.listen()
        if self.store is not None and (outcome := self.store.ended()) is not None:
            self._learn(outcome)
        if self.report.due:
            self.report.progress(step=step, **{name: plain(value) for name, value in figures.items()})
        self._is_save_due = self._is_save_due or (self.ranks.rank == 0 and self._pace.due(step))
        begin = self._is_save_due and self.store is not None and not self.store.busy
        leave, save_request, begin = self.ranks.any(
            self.watcher.notice is not None, self.watcher.take_save_request(), begin
        )
        if leave:
            self.save(step, gather)
            if self.ranks.rank == 0:
                log.warning("step %d is saved in %s; leaving for the notice with exit code %d", step, self.folder,
                            contract.EXIT_SAVED_AND_STOPPED)  # fmt: skip
            self.close()
            raise SavedAndStopped(step)
        if begin:
            self._is_save_due = False
            self._begin(step, gather, optimizer)
        self._is_save_due = self._is_save_due or save_request

    def save(self, step: int, gather: Callable[[], Any]) -> None:
        """The state of `step` is durable when this returns, on whatever rank. SaveFailed on all where it is not."""
        if self.store is not None:
            self.store.wait_copied()
            self.store.flush()
        self._begin(step, gather, None)
        outcome = self.store.flush() if self.store is not None else None
        failed = self.ranks.first(str(outcome.fault) if outcome is not None and outcome.fault is not None else None)
        if failed is not None:
            raise outcome.fault if outcome is not None and outcome.fault is not None else SaveFailed(failed)

    def finish(self, step: int, gather: Callable[[], Any]) -> None:
        """The training is done: save the last state durably and end. A second time does nothing."""
        if self._closed:
            return
        self.report.progress(now=True, step=step)
        self.save(step, gather)
        self.close()

    def close(self) -> None:
        """End the threads and give the signals back; a pending save is finished."""
        self._closed = True
        if self.store is not None:
            self.store.close()
        if self._listening:
            self._listening = False
            atexit.unregister(self._left_open)
            self.watcher.__exit__(None, None, None)

    def _begin(self, step: int, gather: Callable[[], Any], optimizer: torch.optim.Optimizer | None) -> None:
        start = time.monotonic()
        tree = {"state": gather(), "rngs": self._of_all_ranks(is_last=optimizer is None)}
        if self.store is None:
            return
        mark = state.digest(tree["rngs"][0], self.next_ids())
        later = self._later(optimizer)
        self.store.save(step, tree, info={"digest": mark, "save_seconds": self._save_seconds}, later=later)
        log.info("saving step %d, digest %s", step, mark)
        self._pace.begun()
        self._begin_seconds = time.monotonic() - start

    def _later(self, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        """What may be copied behind the training, whose optimizer waits for that from now on."""
        if optimizer is None:
            return []
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            store = self.store
            optimizer.register_step_pre_hook(lambda *_: store.wait_copied())
        return state.changed_by_step(optimizer, self.changed_in_forward)

    def _of_all_ranks(self, is_last: bool) -> list[Any]:
        """Each rank's generators. ConfigError if what is to be one model is not: rank 0's alone would be saved.

        With `is_last` that is only said: at a notice and at the end something is better than nothing.
        """
        states = self.ranks.all((state.rng_state(), sample(self.replicated) if self.ranks.size > 1 else []))
        if (rank := apart([weights for _, weights in states])) is not None:
            fault = ConfigError(
                f"rank {rank}'s weights are not those of rank 0: the ranks do not train together",
                next_step="wrap the model in torch.nn.parallel.DistributedDataParallel, and call that in training",
            )
            if not is_last:
                raise fault
            log.warning("%s", fault)
        return [generators for generators, _ in states]

    def _learn(self, outcome: Outcome) -> None:
        if self.store is not None:
            self._pace.cost(max(self._begin_seconds, self.store.taken_seconds))
        self._failed = self._failed + 1 if outcome.fault is not None else 0
        if outcome.fault is not None:
            log.warning("%s", outcome.fault)
            if self._failed >= FAILED_SAVES_MAX:
                raise outcome.fault
        elif self.store is not None:
            self.report.checkpoint(outcome.seconds, max(self._begin_seconds, self.store.taken_seconds))
            is_first, self._save_seconds = not self._save_seconds, max(outcome.seconds, self._save_seconds * 0.7)
            if is_first and (warning := too_slow(outcome.seconds, outcome.data_bytes)):
                log.warning("%s", warning)

    def _ended(self, outcome: Outcome) -> None:
        if outcome.path is not None:  # durable: only now may the progress file say so
            self.report.saved(outcome.step, outcome.path)


def _warn_beside_the_volume(folder: Path, volume: str | None) -> None:
    """The agent carries one folder from machine to machine; what is saved elsewhere ends with this one."""
    if volume and not folder.resolve().is_relative_to(Path(volume).resolve()):
        log.warning("checkpoints are saved in %s, which ends with this machine, and not below %s=%s: give no folder, or"
                    " one in it", folder, contract.CHECKPOINT_DIR, volume)  # fmt: skip


def _refuse_foreign(loaded: Loaded) -> None:
    """SpothealError where the newest checkpoint is a Store's of another making, such as the example trainer's."""
    tree, info = loaded.tree, loaded.info
    has_tree = isinstance(tree, dict) and {"state", "rngs"} <= tree.keys()
    if not (has_tree and isinstance(info, dict) and "digest" in info):
        raise SpothealError(
            f"{loaded.path} was not saved by a Session",
            next_step="use the trainer that wrote it, or another checkpoint folder",
        )


# ---------------------------------------------------------------------------------------------------------- plain loop
class Loop:
    """A loop of one's own: its parts are as the newest checkpoint has them, `step` is the global step of that."""

    def __init__(self, session: Session, parts: Mapping[str, Any]) -> None:
        self.session, self.step = session, 0
        parts = {name: replayed(part) for name, part in parts.items()}
        self.parts = session.adapt(parts)
        self._optimizer: torch.optim.Optimizer | None = parts.get("optimizer")
        self.sampler: Any = self.parts.get("sampler")
        if self.sampler is not None:
            session.check_sampler(self.sampler)
            session.next_ids = lambda: list(self.sampler.next_ids(DIGEST_SAMPLES))
        self._places, self._still = places(self.parts), Still()
        self._epochs_done: int | None = None  # None without `epochs`
        session.changed_in_forward = state.changed_in_forward(self.parts)
        if isinstance(model := self.parts.get("model"), torch.nn.Module):
            session.replicated = [parameter for parameter in model.parameters() if parameter.requires_grad]
        tree = session.load(self._gather)
        if tree is not None:
            own_places = self._own_places(tree.get("places", ()))
            saved = tree["parts"] | {name: place["state"] for name, place in own_places.items()}
            state.load_parts(self.parts, saved)
            self.step, self._epochs_done = int(tree["step"]), tree.get("epochs_done")
            session.restore_generators()
            for name, part in self._places.items():
                begin_without_draws(part, own_places.get(name, {}).get("generator"))
                self._still.look(name, part, saved[name], self.step)
            self._say_where()
        session.listen()

    def _own_places(self, saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What this rank has saved of the parts that hold the place in the data; of rank 0, if there were others."""
        ranks = self.session.ranks
        if len(saved) == ranks.size:
            return saved[ranks.rank]
        if self._places and ranks.rank == 0 and max(1, len(saved)) != ranks.size:
            log.warning("%s: saved by %d ranks, resumed by %d, each where rank 0 was: samples are left out or come"
                        " twice", ", ".join(self._places), max(1, len(saved)), ranks.size)  # fmt: skip
        return saved[0] if saved else {}

    def _say_where(self) -> None:
        """What has the place in the data of the step that is resumed."""
        if self.session.ranks.rank != 0 or self.sampler is not None:
            return
        if self._places:
            named = ", ".join(f"{name} ({type(part).__name__})" for name, part in self._places.items())
            log.info("resumed at step %d; the data goes on where it was by the state of %s", self.step, named)
            return
        log.warning("resumed at step %d without a sampler: where in the data that was is not known, the loop's epochs"
                    " begin anew; give resume(loader=…) the loader, or resume(sampler=…) an ExactSampler",
                    self.step)  # fmt: skip

    @property
    def epoch(self) -> int:
        """From 0: the sampler's, or the one of `epochs`."""
        return int(self.sampler.epoch) if self.sampler is not None else self._epochs_done or 0

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, the first of them in its midst after a resume."""
        self._epochs_done = self.epoch
        while self.epoch < count:
            yield self.epoch
            for name, part in self._places.items():
                warn_of_another_epoch(name, part, self.epoch)
            if self.sampler is not None:
                self.sampler.next_epoch()
            self._epochs_done += 1

    def after_step(self, samples: int = 0, **figures: Any) -> None:
        """One optimizer step is complete, with `samples` of this rank. See Session.after_step.

        ConfigError if there is a sampler, and the samples are not those it gave: the run would resume elsewhere.
        """
        if self.sampler is not None:
            self._refuse_other_samples(samples)
        self.step += 1
        if self.sampler is not None:
            self.sampler.advance(samples)
        if self.sampler is not None or self._epochs_done is not None:
            figures.setdefault("epoch", self.epoch)
        self.session.after_step(self.step, self._gather, optimizer=self._optimizer, **figures)

    def _refuse_other_samples(self, samples: int) -> None:
        remaining = len(self.sampler) if isinstance(self.sampler, ExactSampler) else samples
        if samples <= 0 or samples > remaining:
            claim = f"{samples} samples of a step, where {remaining} are left of the epoch"
            raise ConfigError(
                f"after_step was told of {claim}",
                next_step="after_step(samples=len(batch)) once a step, sampler.next_epoch() behind each epoch",
            )

    def finish(self) -> None:
        """Training is done: the last state is durable when this returns."""
        self.session.finish(self.step, self._gather)

    def _gather(self) -> Any:
        named = self.parts.items()
        tree = {
            "parts": {name: state.part_state(part) for name, part in named if name not in self._places},
            "step": self.step,
            "epochs_done": self._epochs_done,
        }
        if self._places:  # each rank's loader has a place of its own
            places = {name: place_of(part) for name, part in self._places.items()}
            for name, part in self._places.items():
                self._still.look(name, part, places[name]["state"], self.step)
            tree["places"] = self.session.ranks.all(places)
        return tree


def resume(session: Session | str | os.PathLike[str] | None = None, **parts: Any) -> Loop:
    """Bring `parts` (anything with state_dict and load_state_dict) to the newest checkpoint, or begin at step 0.

    The names `model`, `optimizer` and `sampler` (an ExactSampler) are known; all others are saved and restored as they
    are. A DataLoader without a state is replayed (replayed.py), so give it or a sampler. Call it when everything is
    built. `session` may be a folder. SpothealError where the checkpoint does not fit the parts.
    """
    return Loop(session if isinstance(session, Session) else Session(session), parts)


def unwrapped(part: Any) -> Any:
    """A module without DistributedDataParallel and torch.compile around it: neither changes its state but the names,
    so that another world size can load it, and a run that is not compiled."""
    while True:
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            part = part.module
        elif isinstance(part, torch.nn.Module) and isinstance(getattr(part, "_orig_mod", None), torch.nn.Module):
            part = part._orig_mod
        else:
            return part


def plain(value: Any) -> Any:
    """A tensor of one element as the number in it; anything else as it is. RuntimeError for a tensor of more."""
    return value.item() if isinstance(value, torch.Tensor) else value
