"""What a set of shards says of itself: JSON, whose presence in the set's folder is the commit mark.

torch.distributed.checkpoint's own `.metadata` is a pickle, and reading one runs whatever its author wants. Here are the
same facts as numbers and names: which rank's file holds which box of which tensor, and each file's size and checksum.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from spotheal.training.slotfile.format import DIMENSIONS_MAX, ITEM_BYTES, BrokenCheckpoint, Header

VERSION = "1"
BYTES_MAX = 1 << 30
WORLD_MAX = 100_000
_BEGIN = b'{"spotheal_shards":"' + VERSION.encode() + b'","crc32":"'
_NO_CRC = b"00000000"


@dataclass(frozen=True)
class Box:
    """A part of a tensor, in the file of rank `rank`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Sharded:
    """One tensor as a whole: safetensors' dtype, shape, and the boxes that it is made of."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class ShardFile:
    """One rank's file: its size, and `digest` over what its header says (the checksums of all its data with it)."""

    file_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """`state`: the tree's values (see state.py), `info`: for whoever looks. `files[i]` is that of rank i."""

    step: int
    files: tuple[ShardFile, ...]
    tensors: Mapping[str, Sharded]
    state: Any
    info: Any

    def to_bytes(self) -> bytes:
        body = {
            "step": self.step,
            "files": [[file.file_bytes, file.digest] for file in self.files],
            "tensors": {
                name: [tensor.dtype, tensor.shape, [[box.offsets, box.sizes, box.rank] for box in tensor.boxes]]
                for name, tensor in self.tensors.items()
            },
            "state": self.state,
            "info": self.info,
        }
        whole = bytearray(_BEGIN + _NO_CRC + b'",' + json.dumps(body, separators=(",", ":")).encode()[1:])
        whole[len(_BEGIN) : len(_BEGIN) + 8] = b"%08x" % zlib.crc32(whole)
        return bytes(whole)

    @classmethod
    def parse(cls, whole: bytes) -> Manifest:
        """BrokenCheckpoint says what is wrong with it."""
        if not whole.startswith(_BEGIN):
            raise BrokenCheckpoint("its commit mark was not written by spotheal, or is damaged")
        blank = bytearray(whole)
        at = slice(len(_BEGIN), len(_BEGIN) + 8)
        blank[at] = _NO_CRC
        if whole[at] != b"%08x" % zlib.crc32(blank):
            raise BrokenCheckpoint("the checksum of its commit mark does not match")
        try:
            body = json.loads(whole.decode("utf-8"))
            files = tuple(ShardFile(_number(size), _digest(digest)) for size, digest in body["files"])
            if not 0 < len(files) <= WORLD_MAX:
                raise ValueError(f"{len(files)} files")
            tensors = {str(name): _sharded(fields, len(files)) for name, fields in body["tensors"].items()}
            return cls(_number(body["step"]), files, tensors, body["state"], body["info"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
            raise BrokenCheckpoint(f"its commit mark cannot be read: {type(fault).__name__}: {fault}") from fault


def name_in_file(name: str, tensor: Sharded, box: Box) -> str:
    """The tensor's own name where the box is all of it, else with the place: `model/0.weight@4,0`."""
    return name if box.sizes == tensor.shape else f"{name}@{','.join(map(str, box.offsets))}"


def digest_of(header: Header) -> str:
    """8 hex digits: the same for two files exactly where step, layout and all checksums of their data are."""
    text = json.dumps([header.step, header.chunk_bytes, header.checksums]).encode()
    return f"{zlib.crc32(header.layout.json, zlib.crc32(text)):08x}"


def _sharded(fields: Any, world: int) -> Sharded:
    dtype, shape, boxes = fields
    if dtype not in ITEM_BYTES:
        raise ValueError(f"type {dtype!r}")
    if len(shape) > DIMENSIONS_MAX or prod(max(1, _number(length)) for length in shape) >= 2**62:
        raise ValueError("a shape that no tensor has")
    tensor = Sharded(dtype, _numbers(shape), tuple(_box(box, world) for box in boxes))
    for box in tensor.boxes:  # of as many dimensions, by `strict`, before their sizes are multiplied
        ends = [begin + size for begin, size in zip(box.offsets, box.sizes, strict=True)]
        if any(end > length for end, length in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"a box at {box.offsets} leaves its tensor")
    # What is missing would be left as it was at the start. That boxes do not overlap is the writer's own check.
    if sum(prod(box.sizes) for box in tensor.boxes) != prod(tensor.shape):
        raise ValueError("boxes that do not make up their tensor")
    return tensor


def _box(fields: Any, world: int) -> Box:
    offsets, sizes, rank = fields
    if _number(rank) >= world:
        raise ValueError(f"a file of rank {rank} of {world}")
    return Box(_numbers(offsets), _numbers(sizes), rank)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in values)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is no size")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{8}", value):
        raise ValueError(f"{value!r} is no checksum")
    return value
