"""Keras 3 on torch: saves at the notice and as often as is cheap, resumes in the middle of an epoch.

    loader = exact_loader(dataset, ExactSampler(len(dataset)), 64)
    model.fit(loader, epochs=20, callbacks=[SpotCheckpoints(loader)])

The model must be compiled and built from the same code, in the same order: variables are known by their place. Limits:
KERAS_BACKEND=torch; a notice on the last batch of an epoch skips that epoch's validation; what other callbacks remember
(EarlyStopping's patience) begins anew, as with Keras's own BackupAndRestore. Put it last in the list.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.sampler import ExactLoader
from spotheal.training.sampler import ExactSampler as ExactSampler  # for one line of import in a user's script
from spotheal.training.sampler import exact_loader as exact_loader
from spotheal.training.session import DIGEST_SAMPLES, Session


class SpotCheckpoints(keras.callbacks.Callback):  # type: ignore[misc]
    """`options` are those of Session. Ends with SavedAndStopped (exit code 75) once saved for a notice."""

    def __init__(self, loader: ExactLoader, **options: Any) -> None:
        super().__init__()
        self.loader, self.session, self.step = loader, Session(**options), 0
        self.session.next_ids = lambda: loader.sampler.next_ids(DIGEST_SAMPLES)
        self._metrics: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        tree = self.session.load()
        if tree is not None:
            assign(self._variables(), tree["variables"])
            self.loader.load_state_dict(tree["loader"])
            self.step, self._metrics = tree["step"], tree["metrics"]
            self.model._initial_epoch = self.loader.sampler.epoch  # as Keras's own BackupAndRestore says it
            self.session.restore_generators()
        self.session.listen()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._metrics is not None and self.loader.sampler.position:  # Keras has just reset them for this epoch
            assign(self.model.metrics_variables, self._metrics)
            # The rest of an epoch is shorter than `len(loader)`, which is what Keras counts by.
            warnings.filterwarnings("ignore", message="Your input ran out of data", category=UserWarning)
        self._metrics = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        epoch = self.loader.sampler.epoch
        self.loader.advance()
        self.session.after_step(self.step, self._gather, epoch=epoch, loss=(logs or {}).get("loss"))

    def on_train_end(self, logs: Any = None) -> None:
        self.session.finish(self.step, self._gather)

    def _variables(self) -> list[Any]:
        """Weights, BatchNorm's statistics, seeds of random layers and the optimizer's state, each once."""
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return list({id(variable): variable for variable in variables}.values())

    def _gather(self) -> Any:
        values = [variable.value.detach() for variable in self._variables()]
        metrics = [variable.value.detach() for variable in self.model.metrics_variables]
        return {"variables": values, "metrics": metrics, "loader": self.loader.state_dict(), "step": self.step}


def assign(variables: list[Any], values: list[Any]) -> None:
    """SpothealError if their number or their shapes differ."""
    if [tuple(variable.shape) for variable in variables] != [tuple(value.shape) for value in values]:
        raise SpothealError("the checkpoint is of another model or optimizer: its variables have other shapes")
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
