"""Hugging Face's Trainer: saves at the notice and as often as is cheap, resumes in the middle of an epoch.

    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"))
    spot = SpotCheckpoints(trainer)
    trainer.train(resume_from_checkpoint=spot.newest())

The Trainer's own checkpoint folders are not used: a kill leaves the newest one half-written, and it is the one that is
resumed from. Limits: replicated models (no FSDP, DeepSpeed); a notice at a step with an evaluation skips that one; data
sets that draw random numbers themselves are exact only with `SeededSamples` around them.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from spotheal.training.session import Session, unwrapped
from spotheal.training.state import changed_in_forward, load_parts


class SpotCheckpoints(TrainerCallback):
    """Adds itself to `trainer`; `options` are those of Session. Ends with SavedAndStopped once saved for a notice."""

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer, self.session = trainer, Session(**options)
        self._loaded: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        trainer.add_callback(self)

    def newest(self) -> str | None:
        """A folder for `resume_from_checkpoint`, made of the newest verified checkpoint; None if there is none.

        It holds what the Trainer asks for before it calls back, the weights and its counters; the rest comes after.
        """
        self._loaded = self.session.load()
        if self._loaded is None:
            return None
        self._folder = tempfile.TemporaryDirectory(prefix="spotheal-")
        folder = Path(self._folder.name)
        save_file(self._loaded["parts"]["model"], folder / "model.safetensors", {"format": "pt"})
        (folder / "trainer_state.json").write_text(self._loaded["trainer"], encoding="utf-8")
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._loaded is not None:
            load_parts(self._parts(), self._loaded["parts"])
            self._loaded = None
        if self._folder is not None:
            self._folder.cleanup()
        self.session.changed_in_forward = changed_in_forward(self._parts())
        self.session.listen()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if float(state.epoch or 0).is_integer():  # a whole epoch was done: this one's order is drawn next
            self.session.restore_generators()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.restore_generators()  # behind the skipping of batches, which draws

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        optimizer = self._parts()["optimizer"]
        figures = {"epoch": int(state.epoch or 0), "steps_total": state.max_steps}
        self.session.after_step(state.global_step, self._gather, optimizer=optimizer, **figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.finish(state.global_step, self._gather)

    def _parts(self) -> dict[str, Any]:
        trainer = self.trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside of Accelerate's
        parts = {"model": unwrapped(trainer.model), "optimizer": optimizer, "scheduler": trainer.lr_scheduler}
        scaler = trainer.accelerator.scaler
        return parts if scaler is None else parts | {"scaler": scaler}

    def _gather(self) -> Any:
        callbacks = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        state = dataclasses.asdict(self.trainer.state)
        state["stateful_callbacks"] = {
            type(callback).__name__: callback.state() for callback in callbacks if isinstance(callback, ExportableState)
        }
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {"parts": parts, "trainer": json.dumps(state)}
