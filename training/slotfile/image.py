"""The file image: one page-aligned buffer, touched once and used again for every save; a load has one of its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from spotheal.training.slotfile.checksum import as_blocks
from spotheal.training.slotfile.format import ALIGNMENT, Entry, Layout

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


# Of linux/mman.h, since 4.14; Python's mmap does not name them.
_WIPE_ON_FORK, _KEEP_ON_FORK = (18, 19) if sys.platform == "linux" else (None, None)


class Image:
    """`size` bytes from a page boundary on, zero; `bytes` is a uint8 tensor over them.

    Private memory in pages of 2 MiB, where the kernel has them: 300 MB are touched in 44 ms (shared, in pages of 4 KiB:
    313), and a direct write of them takes a sixth of the processor time, for the kernel pins 150 pages and not 77,000.
    They are touched here, before it matters; `touched` False leaves that to whoever fills them. Where CUDA is in use
    the pages are pinned, as only then a copy from the device runs behind the training's back.

    A process forked meanwhile (DataLoader's workers) finds zeros: else the parent's next write to every page would
    copy it, and a direct read that is under way could end in the child's copy (open(2), O_DIRECT). `keep_on_fork`
    ends that for an image that is given away.
    """

    def __init__(self, size: int, touched: bool = True) -> None:
        self.size = max(size + -size % ALIGNMENT, ALIGNMENT)
        memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(memory, getattr(mmap, "MADV_HUGEPAGE", None))
        _advise(memory, _WIPE_ON_FORK)
        owner = _owner(memory, self.size)
        self.address = ctypes.addressof(owner)
        if touched:
            ctypes.memset(self.address, 0, self.size)
            _pin(owner)
        self._memory = memory
        self.bytes = torch.frombuffer(owner, dtype=torch.uint8)
        self.view = memoryview(memory)
        self.blocks = as_blocks(self.bytes)

    def keep_on_fork(self) -> None:
        """From now on a forked process has the content too, as with any other memory."""
        _advise(self._memory, _KEEP_ON_FORK)

    def tensors(self, layout: Layout, data_at: int) -> dict[str, torch.Tensor]:
        """Every tensor of `layout` as a view of the image: valid as long as nothing else is written there."""
        return {entry.name: self.tensor(entry, data_at) for entry in layout.entries}

    def tensor(self, entry: Entry, data_at: int) -> torch.Tensor:
        raw, dtype = self.bytes[data_at + entry.begin : data_at + entry.end], TORCH_DTYPE[entry.dtype]
        return (raw if dtype is torch.uint8 else raw.view(dtype)).view(entry.shape)


def _advise(memory: mmap.mmap, advice: int | None) -> None:
    """A kernel or a system that does not know `advice` does as well, only slower."""
    if advice is not None and hasattr(memory, "madvise"):
        with contextlib.suppress(OSError):
            memory.madvise(advice)


def _owner(memory: mmap.mmap, size: int) -> Any:
    """Keeps the pages as long as any tensor over them lives; a mapping itself finalizes too late."""
    return type("Pages", (ctypes.c_ubyte * size,), {}).from_buffer(memory)  # type: ignore[attr-defined]


def _pin(memory: Any) -> None:
    """cudaHostRegister, undone when `memory` goes. If the driver refuses, copies are slower and just as correct."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    runtime, address = torch.cuda.cudart(), ctypes.addressof(memory)  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, ctypes.sizeof(memory), 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
