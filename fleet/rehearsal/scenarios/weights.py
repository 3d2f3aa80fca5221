"""Digests of what was trained: two runs have the same ones exactly where their weights are equal, bit for bit.

    python -m spotheal.fleet.rehearsal.scenarios.weights VOLUME     prints {"sha256", "of", "files", "generators"}

Looked at are the weight files in `results/`; if there are none, those of the newest entry of `checkpoints/`, then
those next to the newest weight file below `keep/`, then below `working-copy/`: scripts name a new folder at each
start. A weight file is known by its content or by its name. Files that can be read without running code (safetensors;
torch's, with weights_only; archives of arrays) count by their tensors: a time stamp inside does no harm. All others
count by their bytes. States of random generators are no weights: each has a digest of its own.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
import sys
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".npz", ".npy", ".pkl", ".joblib")
_CHUNK = 1 << 20
# How HDF5, NumPy, GGUF and pickles (protocols 2 to 5) begin.
_MAGIC = (b"\x89HDF\r\n\x1a\n", b"\x93NUMPY", b"GGUF", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_ARRAYS = (".npy", ".h5")  # in the archives of numpy.savez and of Keras, beside texts with a time stamp
# What readers of strange files raise; their bytes can still be compared.
_UNREADABLE = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, RuntimeError, ImportError,
    struct.error, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
# Where a Session, a ShardedSession and the example trainer keep the generators of each rank; a DataLoader's place has a
# copy of them as they were when its epoch began.
_OURS = re.compile(
    r"/(?:rank-(\d+)/)?(rngs?|others|places(?=/.+/begin/all/))/(?:(\d+)/)?(?:.+/begin/all/)?(python|numpy|torch|cuda)(?:/|$)"
)
_FOREIGN = re.compile(r"(?:^|[/_.])rng(?:s|_?states?)?(?:[/_.]|$)|random_state")

Leaf = tuple[str, bytes]  # its place in the file, and its content with its type


def digest(volume: Path) -> dict[str, Any]:
    """`sha256` is None if the folder holds no weights; `of` says what was looked at.

    `generators`: by name, those of the newest checkpoint, also if the weights are those of `results/`.
    """
    base, of = volume / "results", "results"
    files = _weights(base)
    for name in ("checkpoints", "keep", "working-copy"):
        if not files:
            base, of = volume / name, "newest checkpoint"
            files = _newest(base) if name == "checkpoints" else _beside_newest(base)
    total = hashlib.sha256()
    generators: dict[str, Any] = defaultdict(hashlib.sha256)
    listed = []
    for path in files:
        name = path.relative_to(base).as_posix()
        digest_of_file = file_digest(path, generators)
        listed.append({"file": name, "sha256": digest_of_file})
        total.update(f"{name if of == 'results' else path.name} {digest_of_file}\n".encode())
    for path in _newest(volume / "checkpoints") if of == "results" else ():
        file_digest(path, generators)
    return {
        "sha256": total.hexdigest() if files else None,
        "of": of if files else None,
        "files": listed,
        "generators": {name: generators[name].hexdigest() for name in sorted(generators)},
    }


def apart(digests: Mapping[str, str], other_digests: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the generators that are not the same in both."""
    return tuple(
        sorted(name for name in digests.keys() | other_digests.keys() if digests.get(name) != other_digests.get(name))
    )


def file_digest(path: Path, generators: dict[str, Any] | None = None) -> str:
    """Of the tensors if the file can be read safely, else of the bytes; generators are added to `generators`."""
    try:
        leaves = list(_leaves(path))
    except _UNREADABLE as fault:
        sys.stderr.write(f"{path.name} is compared by its bytes ({type(fault).__name__})\n")
        leaves = _bytes(path)  # type: ignore[assignment]
    total = hashlib.sha256()
    for place, content in leaves:
        name = _generator(f"{path.name}/{place}")
        if name and generators is not None:
            generators[name].update(content)
        elif not name:
            total.update(f"{place}\n".encode() + content)
    return total.hexdigest()


def _generator(place: str) -> str:
    """The name of the generator whose state lies there, "" for anything else."""
    if (ours := _OURS.search(place)) is not None:
        prefix, folder, number, kind = ours.groups()
        rank = int(prefix or number or 0) + (folder == "others")
        return f"{kind} of rank {rank}" if rank else kind
    foreign = _FOREIGN.search(place)
    return place[: foreign.end()].rstrip("/_.") if foreign is not None else ""


# -------------------------------------------------------------------------------------------------------- which files
def _weights(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*") if path.is_file() and _is_weights(path))


def _newest(folder: Path) -> list[Path]:
    """The weight files of the newest entry (file or folder) that has any."""
    if not folder.is_dir():
        return []
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.suffix != ".tmp"]
    for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime_ns, reverse=True):
        if weights := [entry] if entry.is_file() and _is_weights(entry) else _weights(entry):
            return weights
    return []


def _beside_newest(folder: Path) -> list[Path]:
    """The weight files in the folder of the newest one."""
    weights = _weights(folder)
    newest = max(weights, key=lambda path: path.stat().st_mtime_ns, default=None)
    return [path for path in weights if newest is not None and path.parent == newest.parent]


def _is_weights(path: Path) -> bool:
    """By its name, or by how it begins: `checkpoint.pth.tar` is torch's archive, and others have no suffix at all."""
    if path.suffix in SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            head = file.read(8)
        return head.startswith(_MAGIC) or bool(_members(path)) or bool(next(_safetensors(path)))
    except (*_UNREADABLE, StopIteration):
        return False


def _members(path: Path) -> list[str]:
    """Those of an archive that hold weights: torch's pickle, or arrays."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return sorted(name for name in archive.namelist() if name.endswith(("/data.pkl", *_ARRAYS)))


# ----------------------------------------------------------------------------------------------------- what is in them
def _leaves(path: Path) -> Iterator[Leaf]:
    with path.open("rb") as file:
        head = file.read(8)
    members = _members(path)
    if any(name.endswith("/data.pkl") for name in members) or head[:1] == b"\x80":
        yield from _torch(path)
    elif members:
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in members)
    elif path.suffix == ".safetensors" or head[6:] == b"\0\0":  # the length of its header, in 8 bytes
        yield from _safetensors(path)
    else:
        yield from _bytes(path)


def _safetensors(path: Path) -> Iterator[Leaf]:
    """Name, type, shape and bytes of each tensor, by name; https://github.com/huggingface/safetensors#format.

    Of our own files also the numbers of the generators that are no tensors: NumPy's position is one.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError("no safetensors header")
        header = json.loads(file.read(length))
        yield from _numbers(header.get("__metadata__", {}).get("state"))
        for name in sorted(header):
            if name == "__metadata__" or name.endswith(".padding"):
                continue
            entry = header[name]
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            yield name, f"{entry['dtype']} {entry['shape']}\n".encode() + file.read(end - begin)


def _numbers(state: str | None) -> Iterator[Leaf]:
    tree = json.loads(state or "{}")
    for folder in ("rngs", "others"):
        for rank, states in enumerate(tree.get(folder, ())):
            yield from ((f"{folder}/{rank}/{kind}", json.dumps(value).encode()) for kind, value in states.items())
    yield from ((f"rng/{kind}", json.dumps(value).encode()) for kind, value in tree.get("rng", {}).items())


def _torch(path: Path) -> Iterator[Leaf]:
    import torch

    yield from _walk(torch.load(path, map_location="cpu", weights_only=True), "", torch)


def _walk(value: Any, place: str, torch: Any) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield place, f"{value.dtype} {tuple(value.shape)}\n".encode() + content
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _walk(value[key], f"{place}/{key}" if place else str(key), torch)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(item, f"{place}/{index}", torch)
    else:
        yield place, f"{value!r}\n".encode()


def _bytes(path: Path) -> Iterator[Leaf]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield "", chunk


if __name__ == "__main__":
    print(json.dumps(digest(Path(sys.argv[1]))))
