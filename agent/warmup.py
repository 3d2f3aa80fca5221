"""Reads files once before they are needed: a volume that comes from a snapshot fetches each block at its first reading.

A machine's fresh root volume does so too, which makes the first `import torch` take most of a minute; and a volume that
was moved gives its newest checkpoint at 9 to 17 MB/s. Whoever reads first pays; here it is a `cat` at low priority,
beside what the boot waits for anyway. It is bounded in bytes and seconds, and no fault of it is anybody's fault.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spotheal.agent.interpreter import candidates

BYTES_MAX = 4 << 30  # torch with CUDA has 2 to 4 GB of libraries
READERS = 3  # blocks are fetched one by one, so several readers are faster than one
SECONDS_MAX = 180.0
_LIBRARIES = ("torch/lib", "nvidia/*/lib")
_SITES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


class Warmup:
    """What is being read. `end()` before the volume is unmounted: a reader keeps it busy."""

    def __init__(self, log: Any, seconds_max: float = SECONDS_MAX) -> None:
        self._log, self._seconds_max = log, seconds_max
        self._readers: list[subprocess.Popen[bytes]] = []

    def libraries_of_torch(self, named: str) -> None:
        """Those of the Python that `python` in job.toml names, else of the first of the image's that has torch."""
        self._begin("torch's libraries", _within(torch_libraries(pythons(named))), READERS)

    def newest_checkpoint(self, folder: Path) -> None:
        """The newest entry of the checkpoint folder: the file, or all files of one that is a folder."""
        self._begin("the newest checkpoint", _within(newest_files(folder)), 1)

    def _begin(self, what: str, files: list[Path], readers: int) -> None:
        shares = [share for share in (files[n::readers] for n in range(readers)) if share]
        try:
            for share in shares:
                self._readers.append(_read(share, self._seconds_max))
        except (OSError, ValueError) as fault:
            self._log.warning(f"{what} are not read ahead", error=str(fault))
            return
        if files:
            self._log.info(f"reading {what} ahead", files=len(files))

    def wait(self, seconds: float) -> None:
        """For tests: until all is read."""
        for reader in self._readers:
            reader.wait(seconds)

    def end(self) -> None:
        """No reader is left."""
        for reader in self._readers:
            if reader.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(reader.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                reader.wait(1.0)  # a read that hangs in the kernel is not waited for
        self._readers.clear()


def _read(files: list[Path], seconds_max: float) -> subprocess.Popen[bytes]:
    argv = ["timeout", "--foreground", "--signal=KILL", f"{seconds_max:.0f}", "nice", "-n", "19"]
    argv += ["ionice", "-c", "3"] if shutil.which("ionice") else []
    argv += ["cat", "--", *map(str, files)]
    nothing = subprocess.DEVNULL
    # A session of its own: the group is ended as one, whichever of these programs is there.
    return subprocess.Popen(argv, cwd="/", stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def pythons(named: str) -> Iterator[Path]:
    """The Pythons that may become the trainer's, without starting any."""
    if named:
        path = named if os.path.isabs(named) else shutil.which(named)
        yield from [Path(path)] if path else []
        return
    yield from candidates()


def torch_libraries(interpreters: Iterable[Path]) -> list[Path]:
    """The shared libraries that `import torch` opens, of the first of these that has torch; [] where none has."""
    for python in interpreters:
        prefix = python.parent.parent  # not resolved: a virtual environment's packages lie beside its link
        for site in (found for pattern in _SITES for found in sorted(prefix.glob(pattern))):
            if (site / "torch" / "lib").is_dir():
                return [file for part in _LIBRARIES for file in sorted(site.glob(f"{part}/*.so*"))]
    return []


def newest_files(folder: Path) -> list[Path]:
    """By the time of the last change; the trainer writes there, so nothing but regular files is taken."""
    try:
        entries = [path for path in folder.iterdir() if not path.is_symlink() and not path.name.startswith(".")]
        newest = max(entries, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None or not newest.is_dir():
            return [] if newest is None else [newest]
        return sorted(path for path in newest.iterdir())
    except OSError:
        return []


def _within(files: list[Path]) -> list[Path]:
    """As many of the files, in their order, as `BYTES_MAX` has room for; never a link, a pipe or a device."""
    chosen, total = [], 0
    for file in files:
        try:
            seen = file.lstat()
        except OSError:
            continue
        if stat.S_ISREG(seen.st_mode) and total + seen.st_size <= BYTES_MAX:
            chosen.append(file)
            total += seen.st_size
    return chosen
