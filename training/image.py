"""The file image: one page-aligned buffer, touched once and used again for every save and for the load."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from spotheal.training.checksum import as_blocks
from spotheal.training.format import ALIGNMENT, Entry, Layout

_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32",
    "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
# An older torch lacks some of them.
TORCH_DTYPE: Mapping[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _DTYPES.items() if hasattr(torch, torch_name)
}
FORMAT_DTYPE: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPE.items()}


class Image:
    """`size` bytes from a page boundary on, zero; `bytes` is a uint8 tensor over them.

    Touching 300 MB of fresh pages costs 136 ms and copying into touched ones 16: so they are touched here, before it
    matters. `touched` False leaves that to whoever fills them. Where CUDA is in use the pages are pinned, as only then
    a copy from the device runs behind the training's back.
    """

    def __init__(self, size: int, touched: bool = True) -> None:
        self.size = max(size + -size % ALIGNMENT, ALIGNMENT)
        memory = mmap.mmap(-1, self.size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # fewer faults; a kernel without it does as well
                memory.madvise(mmap.MADV_HUGEPAGE)
        owner = _owner(memory, self.size)
        self.address = ctypes.addressof(owner)
        if touched:
            ctypes.memset(self.address, 0, self.size)
            _pin(owner)
        self.bytes = torch.frombuffer(owner, dtype=torch.uint8)
        self.view = memoryview(memory)
        self.blocks = as_blocks(self.bytes)

    def tensors(self, layout: Layout, data_at: int) -> dict[str, torch.Tensor]:
        """Every tensor of `layout` as a view of the image: valid as long as nothing else is written there."""
        return {entry.name: self.tensor(entry, data_at) for entry in layout.entries}

    def tensor(self, entry: Entry, data_at: int) -> torch.Tensor:
        raw, wanted = self.bytes[data_at + entry.begin : data_at + entry.end], TORCH_DTYPE[entry.dtype]
        return (raw if wanted is torch.uint8 else raw.view(wanted)).view(entry.shape)


def _owner(memory: mmap.mmap, size: int) -> Any:
    """Keeps the pages as long as any tensor over them lives; a mapping itself finalizes too late."""
    return type("Pages", (ctypes.c_ubyte * size,), {}).from_buffer(memory)  # type: ignore[attr-defined]


def _pin(memory: Any) -> None:
    """cudaHostRegister, undone when `memory` goes. Where the driver refuses, copies are slower and no less right."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    runtime, address = torch.cuda.cudart(), ctypes.addressof(memory)  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, ctypes.sizeof(memory), 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
