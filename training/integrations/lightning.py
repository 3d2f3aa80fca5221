"""PyTorch Lightning 2: saves at the notice and as often as is cheap, resumes in the middle of an epoch.

    spot = SpotCheckpoints()
    trainer = Trainer(..., callbacks=[spot], plugins=[spot.io], enable_checkpointing=False)
    trainer.fit(model, exact_loader(dataset, ExactSampler(len(dataset)), 64), ckpt_path=spot.newest())

With several devices: under torchrun (or `nproc_per_node` in job.toml), Trainer(use_distributed_sampler=False) and
ExactSampler(rank=…, world_size=…), for Lightning would put a sampler of its own in the place of the exact one. Limits:
replicated strategies (ddp); one training data loader; a notice on the last batch of an epoch skips its validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.distributed import start, world
from spotheal.training.sampler import ExactLoader
from spotheal.training.sampler import ExactSampler as ExactSampler  # for one line of import in a user's script
from spotheal.training.sampler import exact_loader as exact_loader
from spotheal.training.session import DIGEST_SAMPLES, Session
from spotheal.training.slotfile.packing import UnsavableState, pack
from spotheal.training.state import changed_in_forward

# Lightning puts them into its dict, and reads them only where a checkpoint makes the module.
_GIVEN = [part + name for part in ("", "datamodule_") for name in ("hyper_parameters", "hparams_name", "hparams_type")]
NEWEST = "spotheal:newest"  # stands for our newest checkpoint where Lightning wants a path


class StoreIO(TorchCheckpointIO):
    """Lightning's own way of making and loading its dict, with our store below it; other paths go to files as ever."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: Any = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if str(path) == NEWEST:
            self.tree = checkpoint
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        if str(path) != NEWEST:
            return super().load_checkpoint(path, *arguments, **named)
        tree, self.tree = self.tree, None
        return dict(tree)


class SpotCheckpoints(Callback):
    """`options` are those of Session. Ends with SavedAndStopped (exit code 75) once saved for a notice.

    Lightning's handler of SIGTERM is put aside while training: it ends with exit code 0 half-way, saves nothing, and
    with several ranks it waits inside the handler for ranks that got no signal.
    """

    def __init__(self, **options: Any) -> None:
        self.io, self._options, self._step = StoreIO(), options, 0
        self.session: Session | None = None

    def newest(self) -> str | None:
        """The value for `ckpt_path`: None if there is no checkpoint. Under torchrun, call it on every rank: the ranks
        come together here already, as Lightning would let them in `fit`."""
        if not torch.distributed.is_initialized():
            start(world())
        self.session = Session(**self._options)
        self.io.tree = self.session.load()
        return None if self.io.tree is None else NEWEST

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.session = self.session or Session(**self._options)
        if self.session.ranks.size != trainer.world_size:
            raise ConfigError(
                f"Lightning trains on {trainer.world_size} ranks; before `fit` there were {self.session.ranks.size}",
                next_step='start it with torchrun, or with nproc_per_node = "gpu" in job.toml',
            )
        loader = trainer.train_dataloader
        if isinstance(loader, ExactLoader):
            self.session.next_ids = lambda: loader.sampler.next_ids(DIGEST_SAMPLES)
        self.session.changed_in_forward = changed_in_forward({"model": pl_module})
        self._step = trainer.global_step
        self.session.restore_generators()
        self.session.listen()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert self.session is not None
        if isinstance(trainer.train_dataloader, ExactLoader):
            trainer.train_dataloader.advance()
        if trainer.global_step == self._step:
            return  # gradients are only accumulated yet: half an optimizer step has no checkpoint
        self._step = trainer.global_step
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        self.session.after_step(
            trainer.global_step, lambda: self._gather(trainer), optimizer=optimizer, epoch=trainer.current_epoch
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.session is not None
        self.session.finish(trainer.global_step, lambda: self._gather(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.session is not None:
            self.session.close()

    def _gather(self, trainer: Trainer) -> Any:
        trainer.save_checkpoint(NEWEST, weights_only=False)
        tree = self.io.tree  # None on the ranks that Lightning has not write
        return tree and {name: given(value) if name in _GIVEN else value for name, value in tree.items()}


def given(value: Any) -> Any:
    """The savable hyper-parameters (a Path or a class is none): the resumed program gives the others again."""
    if isinstance(value, Mapping):
        return {name: inner for name, member in value.items() if (inner := given(member)) is not None}
    try:
        pack(value)
    except UnsavableState:
        return None
    return value
