"""A digest of what was trained: two runs have the same one exactly where their weights are equal, bit for bit.

    python -m spotheal.fleet.rehearsal.weights VOLUME     prints {"sha256", "of", "files"}

Looked at are the weight files in `results/`; where there are none, those of the newest entry of `checkpoints/`, then of
`keep/`. Files that can be read without running code (safetensors; torch's, with weights_only) count by their tensors:
a time stamp inside does no harm. All others count by their bytes.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".npz", ".npy", ".pkl", ".joblib")
_TORCH = (".pt", ".pth", ".ckpt", ".bin")
_CHUNK = 1 << 20
# What readers of strange files raise; their bytes can still be compared.
_UNREADABLE = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, RuntimeError, ImportError,
    struct.error, pickle.UnpicklingError,
)  # fmt: skip


def digest(volume: Path) -> dict[str, Any]:
    """`sha256` is None where the folder holds no weights; `of` says what was looked at."""
    base, of = volume / "results", "results"
    files = _weights(base)
    for name in ("checkpoints", "keep"):
        if not files:
            base, of = volume / name, "newest checkpoint"
            files = _newest(base)
    total = hashlib.sha256()
    listed = []
    for path in files:
        name = path.relative_to(base).as_posix()
        own = file_digest(path)
        listed.append({"file": name, "sha256": own})
        total.update(f"{name if of == 'results' else path.name} {own}\n".encode())
    return {"sha256": total.hexdigest() if files else None, "of": of if files else None, "files": listed}


def file_digest(path: Path) -> str:
    """Of the tensors where the file can be read safely, else of the bytes."""
    parts: Iterator[bytes]
    try:
        if path.suffix == ".safetensors":
            parts = iter(list(_safetensors(path)))
        elif path.suffix in _TORCH:
            parts = iter(list(_torch(path)))
        else:
            parts = _bytes(path)
    except _UNREADABLE as fault:
        sys.stderr.write(f"{path.name} is compared by its bytes ({type(fault).__name__})\n")
        parts = _bytes(path)
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def _weights(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def _newest(folder: Path) -> list[Path]:
    """The weight files of the newest entry (file or folder) that has any."""
    if not folder.is_dir():
        return []
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.suffix != ".tmp"]
    for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime_ns, reverse=True):
        files = [entry] if entry.is_file() else sorted(path for path in entry.rglob("*") if path.is_file())
        if weights := [path for path in files if path.suffix in SUFFIXES or _is_safetensors(path)]:
            return weights
    return []


def _is_safetensors(path: Path) -> bool:
    try:
        next(_safetensors(path))
    except (OSError, ValueError, struct.error, StopIteration, KeyError, TypeError):
        return False
    return True


def _safetensors(path: Path) -> Iterator[bytes]:
    """Name, type, shape and bytes of each tensor, by name; https://github.com/huggingface/safetensors#format."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError("no safetensors header")
        header = json.loads(file.read(length))
        for name in sorted(header):
            if name == "__metadata__" or name.endswith(".padding"):
                continue
            entry = header[name]
            begin, end = entry["data_offsets"]
            yield f"{name} {entry['dtype']} {entry['shape']}\n".encode()
            file.seek(8 + length + begin)
            yield file.read(end - begin)


def _torch(path: Path) -> Iterator[bytes]:
    import torch

    yield from _walk(torch.load(path, map_location="cpu", weights_only=True), torch)


def _walk(value: Any, torch: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}\n".encode()
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield f"{key!r}:\n".encode()
            yield from _walk(value[key], torch)
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}]\n".encode()
        for item in value:
            yield from _walk(item, torch)
    else:
        yield f"{value!r}\n".encode()


def _bytes(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


if __name__ == "__main__":
    print(json.dumps(digest(Path(sys.argv[1]))))
