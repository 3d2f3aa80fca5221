"""What the report's curves are drawn from, shipped to the store: the trainer's metrics file, and progress by the clock.

The metrics file is cumulative (it lies on the volume and outlives machines), so it is put whole each time; progress is
this instance's own. Both are bounded: of more than that every second line is left out, again and again.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.protocol.redaction import SECRETS

SHIP_SECONDS = 300.0
SAMPLE_SECONDS = 10.0
SAMPLES_MAX = 2000
METRICS_BYTES_MAX = 4 << 20  # of what is shipped
_READ_BYTES_MAX = 64 << 20  # of a larger file only the end is read
_LINES_MAX = 500_000
_EXTRA_MAX = 12  # figures of the trainer's own in a sample


class Curves:
    """Safe to use from any thread. `name`: the instance, whose samples of earlier starts are kept."""

    def __init__(self, store: Store, clock: Clock, name: str, metrics_file: Path) -> None:
        self._store, self._clock, self._name, self._file = store, clock, name, metrics_file
        self._lock = threading.Lock()
        self._samples: list[str] = []
        self._every = SAMPLE_SECONDS
        self._sampled = self._shipped = float("-inf")
        self._saved: int | None = None
        self._mark: tuple[int, int] | None = None  # of the metrics file that the store has
        self._stored = 0  # how many samples it has
        self._read = False

    def note(self, progress: Progress) -> None:
        """A sample, when the last one is long enough ago or a checkpoint has become durable since."""
        moment = self._clock.monotonic()
        saved = progress.saved.step if progress.saved else None
        with self._lock:
            if moment - self._sampled < self._every and saved == self._saved:
                return
            self._sampled, self._saved = moment, saved
            self._samples.append(json.dumps(self._line(progress, saved)))
            if len(self._samples) > SAMPLES_MAX:
                self._samples, self._stored = self._samples[::2], -1
                self._every *= 2

    def _line(self, progress: Progress, saved: int | None) -> dict[str, Any]:
        figures = {"loss": progress.loss, "samples_per_second": progress.samples_per_second}
        extra = dict(list(progress.extra.items())[:_EXTRA_MAX])
        line = {"time": rfc3339(self._clock.now()), "step": progress.step, "saved": saved, **figures, **extra}
        return {key[:64]: value for key, value in line.items() if value is not None}

    def ship_when_due(self) -> None:
        if self._clock.monotonic() - self._shipped >= SHIP_SECONDS:
            self.ship()

    def ship(self) -> bool:
        """Put what is new; False where the store could not be reached (the next call tries again)."""
        return self.put(self.read())

    def read(self) -> list[tuple[str, bytes]]:
        """What would be put, read now: the volume may be gone a moment later."""
        with self._lock:
            self._shipped = self._clock.monotonic()
            files: list[tuple[str, bytes]] = []
            if self._samples and len(self._samples) != self._stored:
                files.append((LAYOUT.progress(self._name), "".join(f"{sample}\n" for sample in self._samples).encode()))
            mark, body = _metrics(self._file, self._mark)
            if body:
                self._mark = mark
                files.append((LAYOUT.metrics, body))
            return files

    def put(self, files: list[tuple[str, bytes]]) -> bool:
        try:
            for key, body in files:
                self._store.put_bytes(key, _without_secrets(self._with_earlier(key, body)), "text/plain; charset=utf-8")
        except SpothealError:
            with self._lock:
                self._mark = None
            return False
        with self._lock:
            for key, body in files:
                if key != LAYOUT.metrics:
                    self._stored = body.count(b"\n")
        return True

    def _with_earlier(self, key: str, body: bytes) -> bytes:
        """Samples of an earlier start of the agent on this instance stay, before ours."""
        if key == LAYOUT.metrics:
            return body
        if not self._read:
            self._before = self._store.get_bytes(key) or b""
            self._read = True
        return thinned(self._before, METRICS_BYTES_MAX) + body

    _before = b""


class Metrics:
    """The trainer's metrics file, read again where it has changed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._mark: tuple[int, int] | None = None

    def read(self) -> bytes:
        """Its lines, thinned to `METRICS_BYTES_MAX` and without secrets; nothing where they are as before."""
        self._mark, body = _metrics(self.file, self._mark)
        return _without_secrets(body)


def _metrics(path: Path, identity: tuple[int, int] | None) -> tuple[tuple[int, int] | None, bytes]:
    """The file's lines, thinned to `METRICS_BYTES_MAX`, and its mark; nothing where it is as `known` or unreadable."""
    try:
        with (
            untrusted_folders.file(path.parent, path.name) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
        ):
            status = os.fstat(descriptor)
            mark = (status.st_size, status.st_mtime_ns)
            if mark == identity or not status.st_size:
                return identity, b""
            if status.st_size > _READ_BYTES_MAX:
                file.seek(-_READ_BYTES_MAX, os.SEEK_END)
                file.readline(_READ_BYTES_MAX)
            # Python takes the memory for all that is asked for, before it reads.
            return mark, thinned(file.read(min(status.st_size, _READ_BYTES_MAX)), METRICS_BYTES_MAX)
    except OSError:
        return identity, b""


def _without_secrets(body: bytes) -> bytes:
    """A trainer may write any text into its metrics."""
    lines = body.decode("utf-8", "surrogateescape").split("\n")
    return "\n".join(SECRETS.stream().lines(lines)).encode("utf-8", "surrogateescape")


def thinned(body: bytes, bytes_max: int) -> bytes:
    """Whole lines only. Too many: every second, and so on; lines that close an epoch are the last to go."""
    body = body[: body.rfind(b"\n") + 1]
    if len(body) <= bytes_max:
        return body
    lines = _few(body)
    closing = [b'"closes"' in line for line in lines]
    sizes = [len(line) for line in lines]
    if sum(sizes) <= bytes_max:
        return b"".join(lines)
    closings = sum(size for size, closes in zip(sizes, closing, strict=True) if closes)
    closings_stay = closings <= bytes_max // 2
    rest, room = (sum(sizes) - closings, bytes_max - closings) if closings_stay else (sum(sizes), bytes_max)
    stride = 2
    while rest > 2 * stride * room and stride <= len(lines):  # not a look at every line for each doubling
        stride *= 2
    while stride <= 2 * len(lines):
        chosen = [line for index, (line, closes) in enumerate(zip(lines, closing, strict=True))
                  if (closes and closings_stay) or index % stride == 0]  # fmt: skip
        if sum(map(len, chosen)) <= bytes_max:
            return b"".join(chosen)
        stride *= 2
    return b""


def _few(body: bytes) -> list[bytes]:
    """Lines with their ends, without empty ones; of very many only the last, about `_LINES_MAX`.

    64 MiB of line ends alone took 92 s and 1.5 GiB at each look.
    """
    body = re.sub(rb"\n\n+", b"\n", body).removeprefix(b"\n")
    count = body.count(b"\n")
    if count > _LINES_MAX:
        body = body[-(len(body) * _LINES_MAX // count) :]
        body = body[body.find(b"\n") + 1 :]
    return [line + b"\n" for line in body.split(b"\n")[:-1]]
