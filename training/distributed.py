"""Ranks: what several processes of one training must agree on, with a limit on every wait.

    ranks = Ranks()                                 # after torch.distributed.init_process_group, or of one process
    leave, = ranks.any(watcher.notice is not None)  # at the same step on every rank: all stop there, or none
    ranks.first(value)                              # rank 0's value, everywhere

Only one rank may hear the notice (its machine, its signal). A rank that stopped alone would leave the others in the
next all_reduce for its whole timeout; so every rank asks at every step, in one all_reduce of a few bytes over gloo.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from spotheal.agent.protocol.errors import ConfigError, SpothealError

T = TypeVar("T")
SECONDS_MAX = 300.0
# By how much of the largest value a weight may differ between ranks: other kinds of GPU round otherwise (in bfloat16 by
# 0.004), and nothing corrects that. Ranks that train without each other are beyond it after some hundred steps.
APART_MAX = 0.02
_COLLECTIVE = re.compile(r"gloo|NCCL|TCPStore|c10d|Connection (reset|closed|refused)", re.IGNORECASE)

log = logging.getLogger("spotheal.training")


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, of which each rank has its part (told without the second that importing it takes)."""
    return hasattr(tensor, "device_mesh")


class RankLost(SpothealError):
    """Another rank did not take part in time, or has ended."""


@dataclass(frozen=True)
class World:
    """Of torchrun: `rank` of `size` processes, `local_rank` of `local_size` on this machine, one of `machines` (0: as
    many as there would be with the same number of ranks on each)."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    machines: int = 0

    def describe(self, gpus: bool) -> str:
        """`world 8 = 2 machines x 4 GPUs`."""
        machines = self.machines or max(1, self.size // max(1, self.local_size))
        unit = "GPU" if gpus else "process"
        plural = "s" if gpus else "es"
        processes = f"{self.local_size} {unit}{plural if self.local_size != 1 else ''}"
        of = f"world {self.size} = {machines} machine{'s' if machines != 1 else ''}"
        return f"{of} x {processes}" if machines * self.local_size == self.size else f"{of}, {processes} on this one"


def world(environment: Mapping[str, str] | None = None) -> World:
    """Rank and world size as torchrun names them in the environment; 0 of 1 without it. ConfigError if no number."""
    environment = os.environ if environment is None else environment
    try:
        rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        local_rank, local_size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
        machines = int(environment.get("GROUP_WORLD_SIZE", "0"))
    except ValueError as fault:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK are numbers: {fault}") from fault
    return World(rank, size, local_rank, local_size, machines)


class Ranks:
    """The ranks of the default process group, by a gloo group of our own: of CPU memory, beside NCCL too.

    Make it on all ranks at the same place. Each call waits at most `seconds_max` for the others: more than the
    longest step of any rank, for they meet once a step. ConfigError if WORLD_SIZE says several and no group is
    initialized, or one of another size: each would think itself alone, train the same and write the same files.
    """

    def __init__(self, seconds_max: float = SECONDS_MAX, environment: Mapping[str, str] | None = None) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.seconds_max = 0, 1, seconds_max
        self.group: Any = None  # gloo, of all ranks; None if there is one
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if (started := world(environment).size) > 1 and started != self.size:
                raise ConfigError(
                    f"{started} processes were started, the process group has {self.size}: they do not train together",
                    next_step="call torch.distributed.init_process_group() without rank and world_size of your own",
                )
            if self.size > 1:
                limit = timedelta(seconds=seconds_max)
                self.group = self.met(lambda: dist.new_group(backend="gloo", timeout=limit))
        elif (started := world(environment).size) > 1:
            raise ConfigError(
                f"this is one of {started} processes, and torch.distributed is not initialized",
                next_step="call torch.distributed.init_process_group() before",
            )

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag: whether it holds on any rank. The same answer on all of them. RankLost."""
        if self.size == 1:
            return flags
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(flags, dtype=torch.uint8)
        self.met(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group))
        return tuple(bool(flag) for flag in tensor.tolist())

    def first(self, value: T) -> T:
        """Rank 0's value (what rank 0 did is done when this returns). RankLost."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value if self.rank == 0 else None]
        self.met(lambda: dist.broadcast_object_list(box, src=0, group=self.group))
        return box[0]  # type: ignore[return-value]

    def all(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank. RankLost."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        self.met(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def first_tree(self, tree: Any) -> Any:
        """Rank 0's tree of values and tensors (see state.py): it alone reads checkpoints, as it has the volume."""
        if self.size == 1:
            return tree
        import torch
        import torch.distributed as dist

        from spotheal.training.slotfile.packing import pack, unpack

        tensors, values = pack(tree) if self.rank == 0 else ({}, None)
        shapes = {name: (item.dtype, tuple(item.shape)) for name, item in tensors.items()}
        shapes, values = self.first((shapes, values))
        if self.rank != 0:
            tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        for tensor in tensors.values():
            content = tensor.reshape(-1).view(torch.uint8)
            if len(content):
                self.met(lambda content=content: dist.broadcast(content, src=0, group=self.group))  # type: ignore[misc]
        return tree if self.rank == 0 else unpack(values, tensors)

    def met(self, collective: Callable[[], T]) -> T:
        """What `collective` returns, which may be any of `group`. RankLost where another rank does not take part."""
        try:
            return collective()
        except RuntimeError as fault:  # DistBackendError and gloo's own
            raise self._lost(fault) from fault

    def together(self) -> AbstractContextManager[None]:
        """Around what has collectives inside (DistributedDataParallel's forward and backward): RankLost as of `met`."""
        return nullcontext() if self.size == 1 else self._together()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as fault:
            if not _COLLECTIVE.search(str(fault)):
                raise  # out of memory is one too
            raise self._lost(fault) from fault

    def _lost(self, fault: RuntimeError) -> RankLost:
        return RankLost(
            f"rank {self.rank} waited for the other {self.size - 1} at most {self.seconds_max:.0f} s:"
            f" {str(fault).splitlines()[0][:200]}",
            next_step="see the logs of the other ranks; the newest checkpoint is intact",
        )


def sample(parameters: Sequence[Any], count: int = 8, values: int = 64) -> list[Any]:
    """Some values of some of the parameters, from all over them, as float32 on the CPU."""
    chosen = [parameter.detach().reshape(-1) for parameter in parameters[:: max(1, len(parameters) // count)][:count]]
    return [flat[:: max(1, len(flat) // values)][:values].float().cpu() for flat in chosen]


def apart(samples: Sequence[Sequence[Any]]) -> int | None:
    """The first rank whose `sample` of the model is not that of rank 0: it has a model of its own. None: all agree."""
    for rank, theirs in enumerate(samples):
        if [len(tensor) for tensor in theirs] != [len(first) for first in samples[0]]:
            return rank
        for first, counterpart in zip(samples[0], theirs, strict=True):
            if len(first) and bool((first - counterpart).abs().max() > APART_MAX * first.abs().max()):
                return rank
    return None


def on_gpus(device: str = "auto") -> bool:
    """Whether `start` gives each rank a GPU: there are some, and `device` (the trainer's option) is not the CPU."""
    import torch

    return bool(torch.cuda.is_available()) and device != "cpu"


def start(world: World, device: str = "auto") -> None:
    """Join the ranks that torchrun has started; nothing for a single process. RankLost where they do not come.

    `device` as the trainer's option; on CUDA each rank takes the device of its local rank. ConfigError if the
    environment is not torchrun's.
    """
    if world.size == 1:
        return
    import torch
    import torch.distributed as dist

    cuda = on_gpus(device)
    if cuda:
        if world.local_rank >= (gpu_count := torch.cuda.device_count()):
            raise ConfigError(
                f"{world.local_size} processes were started on this machine, and torch sees {gpu_count} GPUs",
                next_step="start one process a GPU (`nproc_per_node` in job.toml, --nproc-per-node of torchrun)",
            )
        if world.local_rank == 0 and world.local_size < gpu_count:
            log.warning("%d of %d GPUs stay idle", gpu_count - world.local_size, gpu_count)
        torch.cuda.set_device(world.local_rank)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=SECONDS_MAX))
    except ValueError as fault:
        raise ConfigError(
            f"WORLD_SIZE is {world.size}, but {str(fault).splitlines()[0][:200]}",
            next_step="start it with torchrun, or without WORLD_SIZE in the environment",
        ) from fault
    except RuntimeError as fault:
        raise RankLost(f"the {world.size} ranks did not come together: {str(fault).splitlines()[0][:200]}") from fault
