"""Saves that a kill has torn, so that the trainer fails on them at each start.

Only what is surely incomplete counts: an empty file, a zip, safetensors or HDF5 file without its end, a folder that
lacks names which each older sibling has. A good checkpoint that was moved would cost the run, so nothing else is
touched, however new it is. The trainer owns these folders: links in them are never followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import Stop, never
from spotheal.agent.trainer.progress_files import NOT_GROWTH, files_below, shown

# Folders that are one checkpoint: HF writes checkpoint-500/, DeepSpeed global_step500/.
# Not `step3-rlhf/`: that is somebody's code, with every good checkpoint below it.
_KIND = r"(checkpoint|ckpt|global_step|step|epoch|iter)[-_=]?\d+"
_CHECKPOINT_FOLDER = re.compile(rf"{_KIND}([-_]{_KIND})?(\.(ckpt|pt))?", re.IGNORECASE)
# Only these: an empty lock file or an empty __init__.py is as it should be.
_SAVE_SUFFIXES = (
    ".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".h5", ".hdf5", ".keras", ".npz", ".npy", ".pkl", ".pickle",
    ".tar", ".zip", ".msgpack", ".model", ".weights",
)  # fmt: skip
_ZIP, _ZIP_END, _ZIP_END_BYTES_MAX = b"PK\x03\x04", b"PK\x05\x06", 22 + 0xFFFF  # the end with its longest comment
_HDF5 = b"\x89HDF\r\n\x1a\n"
_SAFETENSORS_HEADER_BYTES_MAX = 16 << 20
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class TornSave:
    """A file or a folder that is one checkpoint, and why it is surely incomplete."""

    folder: Path  # the trainer's folder in which it lies
    name: str  # its path below that folder
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.name)} ({shown(self.reason)})"


def torn_saves(folders: Iterable[Path], over: Stop | None = None) -> list[TornSave]:
    """Every torn save below `folders`; a checkpoint folder with a torn file in it is torn as a whole.

    Nothing if `over` is set meanwhile: the look must not stand between a notice and the handover.
    """
    over = over or never()
    saves: dict[tuple[Path, str], TornSave] = {}
    for folder in folders:
        for save in chain(_torn_files(folder), _torn_folders(folder)):
            if over.is_set():
                return []
            saves.setdefault((folder, save.name), save)
    return list(saves.values())


def anything_saved(checkpoints: Path, elsewhere: Path) -> bool:
    """Whether there is something that `resume_command` can resume from.

    In the checkpoint folder any file that is not empty is; `elsewhere` data and logs lie too, so a name must say it.
    """
    if any(file.size for file in files_below(checkpoints)):
        return True
    return any(file.size and has_save_suffix(file.path) for file in files_below(elsewhere))


# --------------------------------------------------------------------------------------------------------------- files
def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str], int]]:
    for below, folders, names, descriptor in untrusted_folders.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_GROWTH]
        yield below, folders, names, descriptor


def _torn_files(folder: Path) -> Iterator[TornSave]:
    for below, _, names, descriptor in _walk(folder):
        for name in names:
            reason = _file_reason(descriptor, name)
            if reason:
                path = Path(below, name)
                unit = _unit(path)
                yield TornSave(folder, str(unit), reason if unit == path else f"{path.relative_to(unit)} {reason}")


def _unit(path: Path) -> Path:
    """The innermost checkpoint folder that holds `path`, or the file itself: half a checkpoint is worse than none."""
    parts = path.parts
    depths = (depth for depth in range(len(parts) - 1, 0, -1) if _CHECKPOINT_FOLDER.fullmatch(parts[depth - 1]))
    return Path(*parts[: next(depths, len(parts))])


def has_save_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _SAVE_SUFFIXES


def _file_reason(folder: int, name: str) -> str:
    """Why the file in the open folder is surely incomplete, or ""."""
    try:
        with untrusted_folders.file(folder, name) as descriptor:
            return _open_file_reason(descriptor, name)
    except OSError:
        return ""


def _open_file_reason(descriptor: int, name: str) -> str:
    length = os.fstat(descriptor).st_size
    if length == 0:
        return "is empty" if has_save_suffix(name) else ""
    head = os.pread(descriptor, 64, 0)
    if head.startswith(_ZIP):
        return "" if _has_zip_end(descriptor, length) else "is a zip file without its end"
    if head.startswith(_HDF5):
        return "is an HDF5 file without its end" if _hdf5_bytes(head) > length else ""
    if name.lower().endswith(".safetensors"):
        size = _safetensors_bytes(descriptor, head)
        return "is a safetensors file without its end" if size > length else ""
    return ""


def _has_zip_end(descriptor: int, size: int) -> bool:
    tail = min(size, _ZIP_END_BYTES_MAX)
    return _ZIP_END in os.pread(descriptor, tail, size - tail)


def _hdf5_bytes(head: bytes) -> int:
    """The length that the superblock names; 0 if it cannot be read.

    Source: HDF5 File Format Specification, "Disk Format: Level 0A - Format Signature and Superblock".
    """
    version = head[8] if len(head) > 8 else 255
    width_at, addresses_at = (13, 24 + 4 * (version == 1)) if version < 2 else (9, 12)
    width = head[width_at] if len(head) > width_at else 0
    end_at = addresses_at + 2 * width  # base address, another address, end-of-file address
    if version > 3 or width not in (2, 4, 8) or len(head) < end_at + width:
        return 0
    end = int.from_bytes(head[end_at : end_at + width], "little")
    return 0 if end == (1 << 8 * width) - 1 else end  # all ones: not defined


def _safetensors_bytes(descriptor: int, head: bytes) -> int:
    """The length that the header names; 0 if it cannot be read. Source: safetensors' README, "Format"."""
    length = int.from_bytes(head[:8].ljust(8, b"\0"), "little")
    if length > _SAFETENSORS_HEADER_BYTES_MAX:
        return 0
    text = os.pread(descriptor, length, 8)
    if len(text) < length:
        return 8 + length
    try:
        header = bounded_json.parse_object(text, bytes_max=_SAFETENSORS_HEADER_BYTES_MAX)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        return 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (ValueError, TypeError, KeyError, IndexError):
        return 0


# ------------------------------------------------------------------------------------------------------------- folders
def _torn_folders(folder: Path) -> Iterator[TornSave]:
    """Checkpoint folders that are empty, or lack names which each older sibling has."""
    for below, folders, _, _ in _walk(folder):
        families: dict[str, list[str]] = {}
        for name in folders:
            if _CHECKPOINT_FOLDER.fullmatch(name):
                families.setdefault(_masked(name), []).append(name)
        for family in families.values():
            family.sort(key=lambda name: [int(digits) for digits in _DIGITS.findall(name)])
            names = {name: _names_below(folder, os.path.join(below, name)) for name in family}
            for name in family:
                reason = "" if names[name] else "is an empty folder"
                older = [other for other in family[:-1] if names[other]]
                if name == family[-1] and names[name] and older:  # one before it was whole when the next was begun
                    missing = frozenset.intersection(*(names[other] for other in older)) - names[name]
                    reason = f"lacks {min(missing)}, which {older[-1]} has" if missing else ""
                if reason:
                    yield TornSave(folder, os.path.join(below, name), reason)


def _names_below(folder: Path, path: str) -> frozenset[str]:
    return frozenset(_masked(name) for name, _ in untrusted_folders.files(folder, NOT_GROWTH, below=path))


def _masked(name: str) -> str:
    """Digits are steps and ranks: `rng_state_0.pth` of one checkpoint is `rng_state_1.pth` of another."""
    return _DIGITS.sub("0", name)
