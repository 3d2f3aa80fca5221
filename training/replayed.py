"""A plain DataLoader, resumed at the very next batch of the order in which its epoch began.

A DataLoader has no state. What decides its order are the generators at the moment when an epoch's iterator is made. So
that is what is saved, with the number of batches that the loop has had. A resume makes the iterator from the same
generators, skips by indices alone (no sample is read), and puts the generators to where they were at the save.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from spotheal.training import state
from spotheal.training.sampler import ExactSampler, SeededSamples

log = logging.getLogger("spotheal.training")


def replayed(part: Any) -> Any:
    """`part`, or a ReplayedLoader of it if it is a DataLoader without a state that can be replayed."""
    inner = getattr(part, "base_dataloader", part)  # of what Accelerate has prepared
    if not isinstance(inner, DataLoader) or hasattr(inner, "state_dict"):
        return part
    if isinstance(inner.dataset, IterableDataset) or isinstance(inner.sampler, ExactSampler):
        return part  # the first has no indices to skip, the second has the place itself
    return ReplayedLoader(inner)


class ReplayedLoader:
    """The place in the data of `loader`: a part for `resume`. Each new iterator of `loader` is the next epoch.

    Exact if the sampler draws its order at the beginning of an epoch, as torch's do; any other is named in the log at
    the resume. Random transforms in workers need SeededSamples around the data set.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # A strong one would make a ring, whose collection ends queues before workers, each of which then takes 5 s.
        self._loader = weakref.ref(loader)
        self.dataset, self._workers = loader.dataset, loader.num_workers
        self._own_generators = _generators(loader, loader.batch_sampler, loader.sampler)
        self.epoch, self.used = -1, 0
        self.looks_ahead = False  # Accelerate asks for a batch before the loop has it: its loop counts itself
        self._resuming = False
        self._begin: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = _Indices(getattr(loader, self._name))
        # DataLoader.__setattr__ refuses both names; Python looks methods with two underscores up at the class.
        loader.__dict__[self._name] = self._indices
        loader.__dict__["_get_iterator"] = self._iterator

    def __iter__(self) -> Any:
        return iter(self._loader() or ())

    def state_dict(self) -> dict[str, Any]:
        mark = self._indices.order.mark(self.used)
        return {"epoch": self.epoch, "used": self.used, "mark": mark, "begin": self._begin, "now": self._own_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.used, self._begin = state_dict["epoch"], state_dict["used"], state_dict["begin"]
        self._loaded, self._resuming = state_dict, self.used > 0

    # ------------------------------------------------------------------------------------------------------- iterators
    def _iterator(self) -> Any:
        loader = self._loader()
        assert loader is not None, "it is the loader that asks"
        return _Counted(self, self.begin(lambda: type(loader)._get_iterator(loader)))

    def begin(self, make: Callable[[], Any], kept: bool = False) -> Any:
        """What `make` gives, an epoch's iterator: of the epoch that was interrupted, or of the next one.

        With `kept` it is the iterator of the epoch before, whose workers stay: that draws no seed for them.
        """
        if self._resuming:
            self._resuming = False
            return self._replay(make)
        self.epoch, self.used = self.epoch + 1, 0
        self._begin = {"all": state.rng_state(), "own": self._own_states(), "kept": kept}
        self._tell_epoch()
        return make()

    def _replay(self, make: Callable[[], Any]) -> Any:
        self._tell_epoch()
        current = state.rng_state()
        self._restore(self._begin["all"], self._begin["own"])
        try:
            with self._indices.skipping(self.used) as order:
                if self._begin["kept"]:
                    order.skip()
                iterator = make()
                order.skip()
        finally:
            self._restore(current, self._loaded["now"])
        if order.mark(self.used) != self._loaded["mark"]:
            log.warning("the order of the data is not that of the interrupted epoch, so the resume is not exact: the"
                        " data set or the options of the loader changed, or its %s draws while it is read; use"
                        " exact_loader and resume(sampler=…) with an ExactSampler", self._sampler_name())  # fmt: skip
        if self._workers and not isinstance(self.dataset, (SeededSamples, TensorDataset)):
            log.warning("the resume is exact if the data set draws no random numbers: workers begin theirs again, and"
                        " random transforms are others in the rest of this epoch; put SeededSamples(dataset) into the"
                        " loader")  # fmt: skip
        return iterator

    def _tell_epoch(self) -> None:
        if isinstance(self.dataset, SeededSamples):
            self.dataset.set_epoch(self.epoch)

    def _sampler_name(self) -> str:
        return type(getattr(self._indices.sampler, "sampler", self._indices.sampler)).__name__

    # ------------------------------------------------------------------------------------------------------ generators
    def _own_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._own_generators]

    def _restore(self, everyone: Any, own_states: list[torch.Tensor]) -> None:
        state.set_rng_state(everyone)
        for generator, saved in zip(self._own_generators, own_states, strict=False):
            generator.set_state(saved)


def _generators(*holders: Any) -> list[torch.Generator]:
    """Those of a loader and of its samplers, each once; they are not among the process's."""
    generators = {
        id(generator): generator for holder in holders if (generator := getattr(holder, "generator", None)) is not None
    }
    return [generator for generator in generators.values() if isinstance(generator, torch.Generator)]


class _Counted:
    """An iterator of the loader that counts what the loop got; of workers, what they have fetched ahead does not."""

    def __init__(self, place: ReplayedLoader, inner: Any) -> None:
        self._place, self._inner = place, inner

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._inner)
        if not self._place.looks_ahead:
            self._place.used += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """The next epoch of persistent workers, which keep their iterator."""
        self._place.begin(lambda: self._inner._reset(loader, first_iter), kept=True)


class _Indices:
    """A loader's (batch) sampler that knows the order it gave last, and can give one whose beginning is skipped."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.order = _Order(iter(()), 0)
        self._skipping = False

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[Any]:
        if not self._skipping:
            self.order = _Order(iter(self.sampler), 0)
        return self.order

    @contextlib.contextmanager
    def skipping(self, batches: int) -> Iterator[_Order]:
        """Whoever asks meanwhile gets one order: with workers an iterator asks twice, and reads the second."""
        self.order, self._skipping = _Order(iter(self.sampler), batches), True
        try:
            yield self.order
        finally:
            self._skipping = False


class _Order:
    """The indices of an epoch, each place marked by a checksum of all before it."""

    def __init__(self, indices: Iterator[Any], skip: int) -> None:
        self._indices, self._skip, self._marks = indices, skip, array("Q", [0])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        return self._draw()

    def skip(self) -> None:
        """A sampler draws its order when it is first read: behind the loader's draw of a seed for workers."""
        count, self._skip = self._skip, 0
        with contextlib.suppress(StopIteration):  # then the mark says that it is another order
            for _ in range(count):
                self._draw()

    def _draw(self) -> Any:
        indices = next(self._indices)
        self._marks.append(zlib.crc32(repr(indices).encode(), self._marks[-1]))
        return indices

    def mark(self, batches: int) -> int:
        return self._marks[batches] if batches < len(self._marks) else -1
