"""Reads files once before they are needed: a volume that comes from a snapshot fetches each block at its first reading.

A machine's fresh root volume does so too, which makes the first `import torch` take most of a minute; and a volume that
was moved gives its newest checkpoint at 9 to 17 MB/s. Whoever reads first pays; here it is a `cat` at low priority,
beside what the boot waits for anyway. It is bounded in bytes and seconds, and no fault of it is anybody's fault.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import Folders
from spotheal.agent.trainer.interpreter import candidates
from spotheal.agent.volume.read_ahead import EXTENTS

BYTES_MAX = 4 << 30  # torch with CUDA has 2 to 4 GB of libraries
FILES_MAX = 20_000
READERS = 3  # blocks are fetched one by one, so several readers are faster than one
READERS_OF_SMALL_FILES = 8  # each waits for its file's blocks alone
SECONDS_MAX = 180.0
_LIBRARIES = ("torch/lib", "nvidia/*/lib")
_SITES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


class Warmup:
    """What is being read. `end()` before the volume is unmounted: a reader keeps it busy."""

    def __init__(self, log: Any, seconds_max: float = SECONDS_MAX) -> None:
        self._log, self._seconds_max = log, seconds_max
        self._readers: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()  # of what is being read now
        self._starting = threading.Lock()  # after `end` no reader is started

    def libraries_of_torch(self, named: str) -> None:
        """Those of the Python that `python` in job.toml names, else of the first of the image's that has torch."""
        self._ended = ended = threading.Event()
        self._begin("torch's libraries", _within(torch_libraries(pythons(named)), ended), READERS, ended)

    def moved_volume(self, folders: Folders, device: str) -> None:
        """What a trainer reads at its start, by `read_ahead`: the code, the environment of `setup`, the checkpoint."""
        order = {
            "device": device, "extents": str(folders.private / EXTENTS),
            "copy": str(folders.clone), "record": str(folders.private / "working-copy.json"),
            "environments": str(folders.environments), "checkpoints": str(folders.checkpoints),
            "bytes_max": BYTES_MAX, "seconds_max": self._seconds_max,
        }  # fmt: skip
        try:
            # Not at a low priority: the trainer waits for what is not read yet, and this takes a second of one core.
            # Not below `timeout`: the volume is busy until the reader itself has ended.
            reader = _started([sys.executable, "-I", "-m", "spotheal.agent.volume.read_ahead"], subprocess.PIPE)
            self._readers.append(reader)
            assert reader.stdin is not None
            reader.stdin.write(json.dumps(order).encode())
            reader.stdin.close()
        except OSError as fault:
            self._log.warning("the moved volume cannot be read ahead", error=str(fault))
            return
        self._log.info("reading the code, the environment and the newest checkpoint of the moved volume ahead")

    def _begin(self, kind: str, files: list[Path], readers: int, ended: threading.Event) -> None:
        shares = [share for share in (files[n::readers] for n in range(readers)) if share]
        try:
            with self._starting:
                for share in shares if not ended.is_set() else ():
                    self._readers.append(_read(share, self._seconds_max))
        except (OSError, ValueError) as fault:
            self._log.warning(f"{kind} cannot be read ahead", error=str(fault))
            return
        if files and not ended.is_set():
            self._log.info(f"reading {kind} ahead", files=len(files))

    def wait(self, seconds: float) -> None:
        """Until all is read that is being read now; no longer than `seconds` for each reader."""
        for reader in list(self._readers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                reader.wait(seconds)

    def end(self) -> None:
        """No reader is left, and none begins until the next volume is mounted."""
        with self._starting:
            self._ended.set()
        for reader in self._readers:
            if reader.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(reader.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                reader.wait(1.0)  # a read that hangs in the kernel is not waited for
        self._readers.clear()


def _read(files: list[Path], seconds_max: float) -> subprocess.Popen[bytes]:
    limited = ["timeout", "--foreground", "--signal=KILL", f"{seconds_max:.0f}"]
    limited += ["nice", "-n", "19", *(["ionice", "-c", "3"] if shutil.which("ionice") else [])]
    return _started([*limited, "cat", "--", *map(str, files)])


def _started(argv: list[str], orders: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    # A session of its own: the group is ended as one, whichever of these programs is there.
    return subprocess.Popen(argv, cwd="/", stdin=orders, stdout=nothing, stderr=nothing, start_new_session=True)


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
        for site in (path for pattern in _SITES for path in sorted(prefix.glob(pattern))):
            if (site / "torch" / "lib").is_dir():
                return [file for part in _LIBRARIES for file in sorted(site.glob(f"{part}/*.so*"))]
    return []


def _within(files: Iterable[Path], ended: threading.Event) -> list[Path]:
    """As many of the files, in their order, as `BYTES_MAX` has room for; never a link, a pipe or a device."""

    def size_of(file: Path) -> int | None:
        return None if ended.is_set() else _size_of(file)

    chosen, total = [], 0
    listed = list(itertools.takewhile(lambda _: not ended.is_set(), itertools.islice(files, FILES_MAX)))
    with ThreadPoolExecutor(READERS_OF_SMALL_FILES) as pool:  # on a copied volume each look waits for its block
        for file, size in zip(listed, pool.map(size_of, listed), strict=True):
            if size is not None and total + size <= BYTES_MAX:
                chosen.append(file)
                total += size
    return chosen


def _size_of(file: Path) -> int | None:
    """None for what is no regular file."""
    try:
        status = file.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
