"""How a save ended; and messages for a failed save or load: what still exists, and the next step."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from spotheal.agent.protocol.errors import SpothealError


class SaveFailed(SpothealError):
    """A save did not become durable; the checkpoints before it are as they were."""


class LoadFailed(SpothealError, OSError):
    """The checkpoints cannot be read by this process, which proves nothing about their content. With `errno`."""


@dataclass(frozen=True)
class Outcome:
    """How one save ended: `path` is durable, or `fault` tells why there is none; both if only the copy as best or as
    milestone failed."""

    step: int
    seconds: float  # from the request until durable
    data_bytes: int
    path: Path | None = None
    fault: SaveFailed | None = None


def not_written(step: int, folder: Path, error: OSError | MemoryError, remainder: str, data_bytes: int) -> SaveFailed:
    """Of the disk, the filesystem, or another process that saves there. `remainder`: what the folder still holds."""
    code = _errno(error)
    if code == errno.EBUSY:
        next_step = "end the other process, or give one of them another folder: see `fuser -v` of it"
    elif code in (errno.EMFILE, errno.ENFILE):
        next_step = f"{remainder}; see `ulimit -n`: this process has too many files open"
    else:
        next_step = (
            f"{remainder}; a save takes {data_bytes / 1e6:.0f} MB: see `df -h`, `dmesg` and the folder's permissions"
        )
    return SaveFailed(f"step {step} could not be saved in {folder}: {_reason(error)}", next_step=next_step)


def not_beside(step: int, path: Path, error: OSError | MemoryError) -> SaveFailed:
    """Of a step that is durable, and was to be kept as the best or as a milestone as well."""
    return SaveFailed(
        f"step {step} is saved as {path}, and could not be kept as the best or as a milestone too: {_reason(error)}",
        next_step="see `df -h`: each of them is a file of its own",
    )


def not_the_newest(step: int, path: Path, newest: int) -> SaveFailed:
    """Of a step that no load would find: it takes the highest."""
    return SaveFailed(
        f"step {step} could not be saved: {path} is newer, and a load would take step {newest}",
        next_step="load() and go on from there, or give a folder of its own, or move what is newer away",
    )


def not_readable(path: Path, error: OSError | MemoryError) -> LoadFailed:
    """Of this process's limits and permissions, or of the filesystem as a whole."""
    code = _errno(error)
    if isinstance(error, MemoryError) or code == errno.ENOMEM:
        next_step = "see `free -h` and `ulimit -v`: a load needs the size of the checkpoint"
    elif code in (errno.EMFILE, errno.ENFILE):
        next_step = "see `ulimit -n`: this process has too many files open"
    else:
        next_step = "see `ls -ld`, `mount` and `dmesg`; nothing was changed"
    fault = LoadFailed(f"{path} cannot be read: {_reason(error)}", next_step=next_step)
    fault.errno = code or errno.ENOMEM
    return fault


def never_still(folder: Path) -> LoadFailed:
    """Of a folder whose files another process moves at every look."""
    fault = LoadFailed(
        f"the checkpoints in {folder} change faster than they can be read",
        next_step="load where no other process saves, or from a copy",
    )
    fault.errno = errno.EAGAIN
    return fault


def _errno(error: OSError | MemoryError) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _reason(error: OSError | MemoryError) -> str:
    """With the name of the file if the system gives one: it may be another file."""
    if not isinstance(error, OSError) or not error.strerror:
        return repr(error)
    return f"{error.strerror}: {error.filename}" if isinstance(error.filename, str) else error.strerror


def not_as_it_was(step: int, error: SpothealError) -> SaveFailed:
    """Of a state whose tensors have changed since the save was requested."""
    return SaveFailed(f"step {step} could not be saved: {error.message}", next_step=error.next_step)


def not_json(step: int, error: ValueError | RecursionError, remainder: str) -> SaveFailed:
    """Of the values of the state that are not tensors."""
    return SaveFailed(
        f"step {step} could not be saved: its state cannot be written as JSON: {error}",
        next_step=f"{remainder}; no int of thousands of digits, no nesting of hundreds",
    )


def no_memory(data_bytes: int, error: OSError | MemoryError) -> SaveFailed:
    """Of the buffer that a save is copied to."""
    return SaveFailed(
        f"no checkpoint can be saved: there is no memory for its buffer of {data_bytes / 1e6:.0f} MB ({error})",
        next_step="see `free -h` and `ulimit -v`; a save needs the size of model and optimizer once more",
    )


def no_thread(error: RuntimeError) -> SaveFailed:
    """Of a thread that cannot be started, or of an executor that takes no work any more."""
    if "shutdown" in str(error):  # the interpreter's: its executors end before the handlers of `atexit`
        next_step = "save before the program ends, not in a handler of `atexit`"
    else:
        next_step = "see `ulimit -u`, the limit of processes of the container, and how many there are"
    return SaveFailed(f"no checkpoint can be saved: there is no thread for it ({error})", next_step=next_step)
