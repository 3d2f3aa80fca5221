"""torch.distributed.checkpoint with our files below it: it plans who writes and reads which part, and reshards.

Its FileSystemWriter pickles metadata and its FileSystemReader unpickles it; here metadata is a Manifest (JSON), and a
rank's parts are one safetensors file with a checksum per chunk. Nothing is written by `ShardWriter` itself: it stages
what DCP plans for this rank, so that the disk is waited for behind the training's back.

Source: the planner and storage interfaces of torch.distributed.checkpoint (`StorageWriter`, `StorageReader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from spotheal.training.shards.sharded_manifest import Box, Manifest, Sharded, digest_of, name_in_file
from spotheal.training.shards.sharded_sets import Sets
from spotheal.training.slotfile.format import BrokenCheckpoint
from spotheal.training.slotfile.image import FORMAT_DTYPE, TORCH_DTYPE
from spotheal.training.slotfile.slots import read


def save_planner() -> DefaultSavePlanner:
    """What all ranks have alike is rank 0's to write, so that a rank that loads has two files to read and not all."""
    return DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)


def load_planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False)


# ---------------------------------------------------------------------------------------------------------------- save
@dataclass(frozen=True)
class Part:
    """What one rank has to write of one tensor; `name` is that in its file."""

    name: str
    tensor: str
    box: Box


class ShardWriter(StorageWriter):
    """One save's storage, for `torch.distributed.checkpoint.save`. `prepare` is called on rank 0, before any stages.

    Afterwards `folder` is what it returned, on every rank, and `parts` holds this rank's tensors by their names in the
    file; on rank 0 `tensors` says where all are.
    """

    def __init__(self, rank: int, prepare: Callable[[], str]) -> None:
        self.rank, self._prepare = rank, prepare
        self.folder = ""
        self.parts: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, Sharded] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        self.parts, self.tensors = {}, {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folder = self._prepare()
        return [replace(plan, storage_data=folder) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.folder = plan.storage_data
        results = []
        for item in plan.items:
            part = _part(item, self.rank)
            data: Any = planner.resolve_data(item)
            self.parts[part.name] = data.detach()
            results.append(WriteResult(item.index, 0, part))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        boxes: dict[str, list[Box]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for of_rank in results for result in of_rank):
            boxes[result.storage_data.tensor].append(result.storage_data.box)
        self.tensors = {name: _sharded(stored, boxes[name]) for name, stored in metadata.state_dict_metadata.items()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _part(item: WriteItem, rank: int) -> Part:
    data = item.tensor_data
    if data is None:  # the state was packed before: only tensors are given to DCP
        raise TypeError(f"{item.index.fqn} is no tensor")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes), rank)
    whole = Sharded(FORMAT_DTYPE[data.properties.dtype], tuple(data.size), (box,))
    return Part(name_in_file(item.index.fqn, whole, box), item.index.fqn, box)


def _sharded(stored: Any, boxes: list[Box]) -> Sharded:
    return Sharded(FORMAT_DTYPE[stored.properties.dtype], tuple(stored.size), tuple(boxes))


# ---------------------------------------------------------------------------------------------------------------- load
class ShardReader(StorageReader):
    """One load's storage, for `torch.distributed.checkpoint.load`: the set at `folder`, whose manifest is known.

    Every file that this rank needs is read whole and verified before any tensor is touched; `broken` says of which one
    what is wrong. Needs memory for these files: two where the world is the one that saved.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int) -> None:
        self._folder, self._manifest, self._rank = folder, manifest, rank
        self._files: dict[int, Mapping[str, torch.Tensor]] = {}
        self.broken = ""
        self.own: Any = None  # values that only this rank saved

    def reset(self, checkpoint_id: Any = None) -> None:
        self._files = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored: dict[str, Any] = {}
        places: dict[MetadataIndex, Part] = {}
        for name, tensor in self._manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes]
            properties = TensorProperties(dtype=TORCH_DTYPE[tensor.dtype])
            stored[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for box in tensor.boxes:
                index = MetadataIndex(name, box.offsets)
                places[index] = Part(name_in_file(name, tensor, box), name, box)
        return Metadata(stored, storage_data=places, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places: dict[MetadataIndex, Part] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        ranks = {self._places[item.storage_index].box.rank for item in plan.items}
        for rank in sorted(ranks | ({self._rank} if self._rank < len(self._manifest.files) else set())):
            try:
                self._files[rank] = self._verified(rank)
            except (BrokenCheckpoint, OSError) as fault:
                flaw = fault.message if isinstance(fault, BrokenCheckpoint) else fault.strerror or fault
                self.broken = f"{Sets.file(rank)}: {flaw}"
                raise RuntimeError(self.broken) from None  # travels to the other ranks
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise TypeError(f"{item.storage_index.fqn} is no tensor")
            part = self._places[item.storage_index]
            source = self._files[part.box.rank][part.name]
            for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        self._files = {}
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _verified(self, rank: int) -> Mapping[str, torch.Tensor]:
        """The tensors of that rank's file, every byte of it verified, and seen to be the one that was committed."""
        record = self._manifest.files[rank]
        header, image = read(self._folder / Sets.file(rank))
        if (header.file_bytes, digest_of(header)) != (record.file_bytes, record.digest):
            raise BrokenCheckpoint("it is not the file that was committed with this set")
        if rank == self._rank:
            self.own = header.state
        tensors = image.tensors(header.layout, header.data_at)
        for name, shape in _expected(self._manifest, rank):
            if name not in tensors or tuple(tensors[name].shape) != shape:
                raise BrokenCheckpoint(f"it does not hold {name[:200]!r} as the commit mark says")
        return tensors


def _expected(manifest: Manifest, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            if box.rank == rank:
                yield name_in_file(name, tensor, box), box.sizes


