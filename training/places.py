"""Parts of a training that hold the place in its data: loaders and data sets with a state of their own.

torchdata's StatefulDataLoader, mosaicml's StreamingDataLoader and Hugging Face's IterableDataset are such parts, and so
is every other one that can be iterated and has state_dict and load_state_dict.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training import state
from spotheal.training.sampler import ExactLoader, ExactSampler

log = logging.getLogger("spotheal.training")


def places(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `parts` that hold the place in the data, an ExactSampler left out. ConfigError if one cannot do so."""
    by_name = {
        name: part
        for name, part in parts.items()
        if hasattr(part, "__iter__") and not isinstance(part, (torch.nn.Module, ExactSampler))
    }
    for name, part in by_name.items():
        _refuse_hidden_sampler(name, part, parts.get("sampler"))
        _refuse_arguments(name, part)
        _mend_hugging_face(getattr(part, "dataset", part))
    return by_name


def _refuse_hidden_sampler(name: str, part: Any, part_sampler: Any) -> None:
    """A loader counts what its workers have fetched ahead as used, and an ExactSampler what the training has used.

    Seen with a StatefulDataLoader: with workers, or if `resume` does not know the sampler, the epoch began again.
    """
    samplers = (getattr(part, "sampler", None), getattr(getattr(part, "batch_sampler", None), "sampler", None))
    for sampler in samplers:
        has_its_place = isinstance(part, ExactLoader) or not getattr(part, "num_workers", 0)
        if isinstance(sampler, ExactSampler) and not (sampler is part_sampler and has_its_place):
            raise ConfigError(
                f"{name} is a {type(part).__name__} over an ExactSampler: the two count differently, and the resumed"
                " run would begin at another sample",
                next_step=f"resume(sampler=…) with that sampler and without {name}: the sampler alone has the place",
            )


def _refuse_arguments(name: str, part: Any) -> None:
    """mosaicml's StreamingDataset cannot tell its place without being told how many samples were used."""
    try:
        inspect.signature(part.state_dict).bind()
    except TypeError:
        raise ConfigError(
            f"{name} is a {type(part).__name__}, whose state_dict needs arguments",
            next_step="give resume() the loader around it, which counts the samples (mosaicml's StreamingDataLoader)",
        ) from None
    except ValueError:  # a function without a signature, as of a compiled class
        return


def _mend_hugging_face(dataset: Any) -> None:
    """Their IterableDataset tells its beginning between a load and its first sample, and not what was loaded.

    A save before each worker has given a batch again would hold that, and the resume after it begin the data anew
    (datasets 5.2; its #8308 is the same after the first sample).
    """
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "_state_dict"):
        dataset.load_state_dict = functools.partial(_load_and_tell, dataset)


def _load_and_tell(dataset: Any, state_dict: dict[str, Any]) -> None:
    type(dataset).load_state_dict(dataset, state_dict)
    dataset._state_dict = copy.deepcopy(state_dict)


def place_of(part: Any) -> dict[str, Any]:
    """What is saved of a part that holds the place in the data: its state, and its own generator's if it has one."""
    saved = {"state": part.state_dict()}
    if isinstance(part, DataLoader) and isinstance(part.generator, torch.Generator):
        saved["generator"] = part.generator.get_state()
    return saved


def begin_without_draws(loader: Any, generator: torch.Tensor | None = None) -> None:
    """The first iterator of `loader` leaves the generators as they are; does nothing for what is no DataLoader.

    A DataLoader draws the seed of its workers, and a new order, whenever an iterator is made. In the run that is
    resumed that was at the beginning of the epoch, before the state of the generators was saved: torch's own, and
    `generator`, that of the loader.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader, "_get_iterator"):
        return
    make = loader._get_iterator

    def first() -> Any:
        del loader.__dict__["_get_iterator"]
        before = state.rng_state()
        try:
            return make()
        finally:
            state.set_rng_state(before)
            if generator is not None and loader.generator is not None:
                loader.generator.set_state(generator)

    loader.__dict__["_get_iterator"] = first


class Still:
    """Tells of parts whose state is the same at two saves although there were steps between: nobody reads them.

    A data set of which a DataLoader's workers read copies is such a part: its resume would begin the data again.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, str]] = {}

    def look(self, name: str, part: Any, saved: Any, step: int) -> None:
        """`saved`: the state of `part` at `step`, just saved or loaded."""
        mark = state.digest({"state": saved}, ())
        before = self._before.get(name)
        if before is not None and before[1] == mark and step > before[0]:
            log.warning("%s, a %s, has not moved from step %d to %d, and a resume would begin its data there again:"
                        " give resume() what the loop iterates, such as torchdata's StatefulDataLoader around it",
                        name, type(part).__name__, before[0], step)  # fmt: skip
        self._before[name] = (step, mark)


def warn_of_another_epoch(name: str, part: Any, epoch: int) -> None:
    """After `epoch`: its data set was not told of it. Hugging Face's then go on, after a resume, at the resumed place
    in every later epoch, and begin a resumed one anew (huggingface/datasets#7447)."""
    dataset = getattr(part, "dataset", part)
    if hasattr(dataset, "set_epoch") and getattr(dataset, "epoch", epoch) != epoch:
        log.warning("the data set of %s is at epoch %d and the loop at %d: call set_epoch(epoch) on it before each"
                    " epoch, or a resume is not exact", name, dataset.epoch, epoch)  # fmt: skip
