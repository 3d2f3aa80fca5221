"""The reports of the training: the progress file, the metrics file, and lines on standard output."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from spotheal.agent.protocol.clock import SystemClock, rfc3339
from spotheal.agent.protocol.contract import Progress, Saved, write_atomically

PROGRESS_SECONDS = 0.5

log = logging.getLogger("spotheal.training")


class Metrics:
    """The metrics file: JSON lines, appended; lines after a step are dropped when training resumes there.

    A line with `closes` true ends its epoch; it may have the same step as the checkpoint from before that end.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd: int | None = None

    def begin(self, step: int, epoch: int) -> int:
        """Open the file; drop lines after `step`, closings from `epoch` on, a torn last line; how many were dropped."""
        if self._path is None:
            return 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        kept_lines = [line for line in lines if _belongs(line, step, epoch)]
        if len(kept_lines) != len(lines):
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            with open(temporary, "wb") as file:
                file.writelines(kept_lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return len(lines) - len(kept_lines)

    def add(self, **values: float | int) -> None:
        """One line in one write, so that no reader sees half of it. NaN and infinity become null."""
        if self._fd is None:
            return
        body = {key: value if math.isfinite(value) else None for key, value in values.items()}
        with _survived("the metrics file"):
            os.write(self._fd, (json.dumps(body) + "\n").encode())

    def sync(self) -> None:
        """Make the lines durable: called before a checkpoint is acknowledged, so none before its step can be lost."""
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Reporter:
    """Writes SPOTHEAL_PROGRESS_FILE twice a second, and at once when a checkpoint has become durable.

    `saved` may be called from another thread. A file that cannot be written never stops the training.
    """

    def __init__(self, progress_file: Path | None, metrics: Metrics, *, silent: bool = False) -> None:
        self.metrics, self._silent = metrics, silent
        self._file = progress_file
        self._lock = threading.Lock()
        self._progress = Progress(step=0)
        self._saved: Saved | None = None
        self._checkpoint: dict[str, float] = {}
        self._written = -math.inf

    def progress(self, now: bool = False, **fields: object) -> None:
        """The newest figures (the names of `Progress`); written when the last time is long enough ago, or `now`."""
        with self._lock:
            figures = {**vars(self._progress), **fields, "saved": self._saved}
            self._progress = Progress(**{**figures, "extra": {**figures["extra"], **self._checkpoint}})
            if now or self.monotonic() - self._written >= PROGRESS_SECONDS:
                self._write()

    @property
    def due(self) -> bool:
        """Whether `progress` would write: the figures may cost a wait for the device."""
        return self._file is not None and self.monotonic() - self._written >= PROGRESS_SECONDS

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def checkpoint(self, save_seconds: float, stall_seconds: float) -> None:
        """The seconds of the last save, and of the training's pause for it; reported with the next progress."""
        with self._lock:
            self._checkpoint = {"save_seconds": round(save_seconds, 3), "stall_seconds": round(stall_seconds, 4)}

    def saved(self, step: int, path: Path) -> None:
        with self._lock:
            self._saved = Saved(step, str(path), rfc3339(SystemClock().now()))
            # A checkpoint proves its step, even if the figures of the last half second are still missing.
            fields = {**vars(self._progress), "saved": self._saved, "step": max(step, self._progress.step)}
            self._progress = Progress(**fields)
            self._write()

    def say(self, text: str) -> None:
        if not self._silent:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        self._written = self.monotonic()
        if self._file is not None:
            with _survived("the progress file"):
                write_atomically(self._file, self._progress.to_json())


@contextlib.contextmanager
def _survived(target: str) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        log.warning("%s cannot be written: %s", target, fault)


def _belongs(line: bytes, step: int, epoch: int) -> bool:
    """Whether a line was written before the state of `step`, in the midst of `epoch`, was saved."""
    try:
        body = json.loads(line)
        whole = isinstance(body, Mapping) and line.endswith(b"\n")
        return whole and body["step"] <= step and not (body.get("closes") and body["epoch"] >= epoch)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
