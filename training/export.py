"""The final weights: one safetensors file that any reader opens, put in place whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from spotheal.training.copying import Copy, Plan
from spotheal.training.files import Files
from spotheal.training.image import Image
from spotheal.training.slots import Payload, write_file
from spotheal.training.state import to_json

CHUNK_BYTES = 8 << 20


def export(path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, object]) -> str:
    """Write `tensors` durably to `path`, replacing it; the same content gives the same bytes. Returns their sha256."""
    names, sources = list(tensors), [tensor.detach() for tensor in tensors.values()]
    plan = Plan(names, sources, CHUNK_BYTES)
    image = Image(plan.layout.data_bytes)
    copy = Copy(plan, image, sources)
    copy.run()
    files = Files()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(files, temporary, Payload(image, plan.layout, CHUNK_BYTES, 0, None, to_json(dict(info))), copy.checksum)
    files.rename(temporary, path)
    files.sync_folder(path.parent)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
