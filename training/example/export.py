"""One safetensors file, put in place whole or not at all: the final weights for any reader, a data set for ours."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from spotheal.training.slotfile.copying import Copy, Plan
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.format import ITEM_BYTES
from spotheal.training.slotfile.image import FORMAT_DTYPE, Image
from spotheal.training.slotfile.packing import refuse_unsavable, to_json
from spotheal.training.slotfile.slots import Payload, write_file

CHUNK_BYTES = 8 << 20
_HEADER_ALIGNMENT = 8  # as the safetensors library pads its header, so that items lie at multiples of their size


def export(
    path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, object], files: Files | None = None
) -> str:
    """Write `tensors` durably to `path`, replacing it; the same content gives the same bytes. Returns their sha256.

    These tensors and no other: what a strict `load_state_dict` takes. Tied ones are written under each of their names,
    which it asks for. Of `info` the values stand as text in the file's metadata. OSError: `path` is as it was.
    """
    files = files or Files()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    digest, at = hashlib.sha256(), 0
    fd = files.create(temporary)
    try:
        files.truncate(fd, 0)  # one that a crash left may be longer
        for piece in _pieces(tensors, info):
            files.write(fd, piece, at)
            digest.update(piece)
            at += len(piece)
        files.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise
    finally:
        files.close(fd)
    files.rename(temporary, path)
    files.sync_folder(path.parent)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> Iterator[memoryview | bytes]:
    """The bytes of the file in its order: large items first, then by name. Source: the safetensors format's README."""
    for name, tensor in tensors.items():
        refuse_unsavable(tensor, name)
    kinds = {name: FORMAT_DTYPE[tensor.dtype] for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[kinds[name]], name))
    # transformers takes a file only where it says that torch's tensors are in it.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **{key: str(info[key]) for key in sorted(info)}}}
    at = 0
    for name in order:
        size = tensors[name].numel() * ITEM_BYTES[kinds[name]]
        header[name] = {"dtype": kinds[name], "shape": list(tensors[name].shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        whole = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        size = whole.numel() * whole.element_size()
        if not size:
            continue
        data = memoryview((ctypes.c_ubyte * size).from_address(whole.data_ptr())).cast("B")
        for begin in range(0, size, CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


def keep(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` durably to `path` as a checkpoint is, with checksums: `slots.read` verifies every byte."""
    names, sources = list(tensors), [tensor.detach() for tensor in tensors.values()]
    plan = Plan(names, sources, CHUNK_BYTES)
    image = Image(plan.layout.data_bytes)
    copy = Copy(plan, image, sources)
    copy.run()
    files = Files()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(files, temporary, Payload(image, plan.layout, CHUNK_BYTES, 0, None, to_json({})), copy.checksum)
    files.rename(temporary, path)
    files.sync_folder(path.parent)
