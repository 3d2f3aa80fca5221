"""The bytes of a checkpoint file: safetensors, with all other values and the checksums in its metadata.

    8 bytes   length of the header, little endian
    header    JSON, padded with spaces so that the data begins at a multiple of 4096 (O_DIRECT wants that)
    data      tensors back to back, largest item size first (so each is aligned to its own items), and a padding tensor

Any safetensors reader opens it. Reading executes nothing: there is JSON and there are numbers.
Source of the layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.errors import SpothealError

ALIGNMENT = 4096
HEADER_BYTES_MAX = 100_000_000  # the limit of safetensors itself
VERSION = "1"
PADDING = "spotheal.padding"
CHECKSUM = "block-sums-crc32"  # see checksum.py
RESERVED_NAMES = ("__metadata__", PADDING)  # no tensor of a state may be called so
DIMENSIONS_MAX = 64  # of one tensor: numpy's limit
# Containers in containers, in a state. Every level takes its part of the interpreter's stack, at a load too, and that
# may begin deeper in the stack than the save did: what is acknowledged must be loadable there.
NESTING_MAX = 100
JSON_NESTING_MAX = 3 * NESTING_MAX + 1  # the same as JSON: a dict of other keys than texts takes 3, a leaf may take 1

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

# The header begins with these bytes, so the place of its own checksum is known without parsing anything.
_BEGIN = b'{"__metadata__":{"spotheal":"' + VERSION.encode() + b'","header_crc32":"'
_CRC_AT = 8 + len(_BEGIN)
_NO_CRC = b"00000000"


class BrokenCheckpoint(SpothealError):
    """A file that is no checkpoint of ours, or was changed after the write; the message names the fault."""


@dataclass(frozen=True)
class Entry:
    """One tensor: `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The place of every tensor of a state. `data_bytes` includes the padding, a multiple of 4096."""

    entries: tuple[Entry, ...]
    data_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
        """Lay out tensors given as name -> (safetensors dtype, shape)."""
        entries = []
        at = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1][0]], item[0])):
            if name in RESERVED_NAMES:
                raise ValueError(f"{name!r} is a name of the format's own")
            size = _size(shape, dtype)
            entries.append(Entry(name, dtype, shape, at, at + size))
            at += size
        padding = -at % ALIGNMENT
        if padding:
            entries.append(Entry(PADDING, "U8", (padding,), at, at + padding))
        return cls(tuple(entries), at + padding)

    @functools.cached_property
    def json(self) -> bytes:
        """The end of the header: every tensor, the same for all states of this layout."""
        tensors = {
            entry.name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
            for entry in self.entries
        }
        text = json.dumps(tensors, separators=(",", ":"))
        return ("," + text[1:] if tensors else "}").encode()


@dataclass(frozen=True)
class Header:
    """The content of a file's header; `data_at`: the first byte of its data."""

    layout: Layout
    step: int
    state: Any
    info: Any
    chunk_bytes: int
    checksums: tuple[int, ...]
    data_at: int

    @property
    def file_bytes(self) -> int:
        """Length, header, data with its padding."""
        return self.data_at + self.layout.data_bytes


def header_room(layout: Layout, state_json: str, info_json: str, chunk_bytes: int) -> int:
    """Bytes to set aside for length and header: a multiple of 4096, with a margin for numbers that grow.

    ValueError if no reader would take such a header: what is acknowledged must be loadable.
    """
    sums = [0] * chunk_count(layout.data_bytes, chunk_bytes)
    size = len(_encode(layout, 0, state_json, info_json, chunk_bytes, sums))
    room = _up(8 + size + size // 8 + 512)
    if room - 8 > HEADER_BYTES_MAX:
        raise ValueError(f"it takes {size / 1e6:.0f} MB beside the tensors; long lists of numbers belong into a tensor")
    return room


def header_bytes(
    layout: Layout, step: int, state_json: str, info_json: str, chunk_bytes: int, checksums: Sequence[int], room: int
) -> bytes:
    """Length and header, `room` bytes in all. ValueError if they do not fit."""
    text = _encode(layout, step, state_json, info_json, chunk_bytes, checksums)
    if 8 + len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes does not fit in {room}")
    whole = bytearray(struct.pack("<Q", room - 8) + text.ljust(room - 8))
    whole[_CRC_AT : _CRC_AT + 8] = b"%08x" % zlib.crc32(whole)
    return bytes(whole)


def header_length(first: bytes, file_bytes: int) -> int:
    """Bytes of length and header together, from the first 8 bytes of a file. BrokenCheckpoint if they cannot be."""
    if len(first) < 8 or file_bytes < 8:
        raise BrokenCheckpoint(f"it has {file_bytes} bytes, too few for a header")
    (length,) = struct.unpack("<Q", first[:8])
    if length == 0:
        raise BrokenCheckpoint("its header is empty: it was never committed")
    if length > HEADER_BYTES_MAX or 8 + length > file_bytes:
        raise BrokenCheckpoint(f"its header claims {length} bytes, the file has {file_bytes}")
    return int(8 + length)


def parse_header(whole: bytes, file_bytes: int) -> Header:
    """The header of a file whose first bytes are `whole` (of `header_length`). BrokenCheckpoint names the fault."""
    if not whole[8:].startswith(_BEGIN):
        raise BrokenCheckpoint("it was not written by spotheal, or its beginning is damaged")
    blank = bytearray(whole)
    blank[_CRC_AT : _CRC_AT + 8] = _NO_CRC
    if whole[_CRC_AT : _CRC_AT + 8] != b"%08x" % zlib.crc32(blank):
        raise BrokenCheckpoint("the checksum of its header does not match")
    try:
        body = json.loads(whole[8:].decode("utf-8"), object_pairs_hook=_no_duplicates)
        metadata = body.pop("__metadata__")
        step, chunk_bytes = _number(metadata["step"]), _number(metadata["chunk_bytes"])
        text = metadata["checksums"]
        checksums = tuple(_checksum(text[at : at + 8]) for at in range(0, len(text), 8))
        state, info = _values(metadata["state"]), _values(metadata["info"])
        entries = tuple(_entry(name, fields) for name, fields in body.items())
        algorithm = metadata["checksum"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise BrokenCheckpoint(f"its header cannot be read: {type(fault).__name__}: {str(fault)[:200]}") from fault
    if algorithm != CHECKSUM:
        raise BrokenCheckpoint(f"its checksums are of a kind this version does not know: {str(algorithm)[:80]!r}")
    layout = Layout(entries, _contiguous(entries))
    if len(whole) + layout.data_bytes != file_bytes:
        raise BrokenCheckpoint(f"it has {file_bytes} bytes, its header asks for {len(whole) + layout.data_bytes}")
    if chunk_bytes == 0 or chunk_bytes % ALIGNMENT or layout.data_bytes % ALIGNMENT:
        raise BrokenCheckpoint("its header names an impossible step, chunk or size")
    if len(checksums) != chunk_count(layout.data_bytes, chunk_bytes):
        raise BrokenCheckpoint("it has another number of checksums than of chunks")
    return Header(layout, step, state, info, chunk_bytes, checksums, len(whole))


def chunk_count(data_bytes: int, chunk_bytes: int) -> int:
    """Chunks that have a checksum each; the last one may be shorter."""
    return -(-data_bytes // chunk_bytes)


def _encode(
    layout: Layout, step: int, state_json: str, info_json: str, chunk_bytes: int, checksums: Sequence[int]
) -> bytes:
    metadata = {
        "checksum": CHECKSUM,
        "step": str(step),
        "chunk_bytes": str(chunk_bytes),
        "checksums": "".join(f"{value:08x}" for value in checksums),
        "state": state_json,
        "info": info_json,
    }
    rest = json.dumps(metadata, separators=(",", ":"))[1:-1]
    return _BEGIN + _NO_CRC + b'",' + rest.encode() + b"}" + layout.json


def nested_beyond(values: Any, levels: int) -> bool:
    """Whether lists and dicts lie in one another in more than `levels` levels. It takes no stack to find out."""
    inside = [values]
    for _ in range(levels + 1):
        inside = [value for value in inside if isinstance(value, (dict, list, tuple))]
        if not inside:
            return False
        inside = [item for value in inside for item in (value.values() if isinstance(value, dict) else value)]
    return True


def _number(text: Any) -> int:
    """What `str` made of a number that can be one of a file: JSON's own may be Infinity, true or 1.5."""
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{str(text)[:80]!r} is no number of steps or bytes")
    return int(text)


def _checksum(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{8}", text):
        raise ValueError(f"{str(text)[:80]!r} is no checksum")
    return int(text, 16)


def _values(text: Any) -> Any:
    values = json.loads(text)
    if nested_beyond(values, JSON_NESTING_MAX):
        raise ValueError(f"it is nested in more than {JSON_NESTING_MAX} levels")
    return values


def _size(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor. Of at most DIMENSIONS_MAX numbers, so that their product stays a number to reckon with."""
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"{len(shape)} dimensions, {DIMENSIONS_MAX} are possible")
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def _entry(name: str, fields: Any) -> Entry:
    dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"tensor {name[:80]!r} has an impossible shape")
    numbers = [*shape, begin, end]
    if dtype not in ITEM_BYTES or not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"tensor {name[:80]!r} has an impossible type, shape or place")
    if begin % ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name[:80]!r} lies at {begin}, which is no place for its items")
    if _size(shape, dtype) != end - begin:
        raise ValueError(f"tensor {name[:80]!r} takes {end - begin} bytes, its shape asks for another number")
    return Entry(name, dtype, tuple(shape), begin, end)


def _contiguous(entries: Sequence[Entry]) -> int:
    """Bytes of the data; BrokenCheckpoint if tensors overlap or leave a hole."""
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            raise BrokenCheckpoint(f"tensor {entry.name[:80]!r} begins at {entry.begin}, expected {at}")
        at = entry.end
    return at


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a name occurs twice")
    return body


def _up(size: int) -> int:
    return size + -size % ALIGNMENT
