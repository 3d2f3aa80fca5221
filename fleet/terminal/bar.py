"""Progress of long work: a bar with rate and time left on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from spotheal.fleet.run.table import duration

LINE_SECONDS = 5.0
_DRAW_SECONDS = 0.2
_WIDTH = 24
Step = Callable[[int, int], None]  # bytes done, bytes in all


@contextmanager
def bar(what: str, *, quiet: bool = False, to: TextIO | None = None) -> Iterator[Step]:
    """`step(done, total)` shows how far it is; nothing where `quiet` (unless to a file, by the line)."""
    out = to or sys.stderr
    terminal = out.isatty() and not quiet
    began, told = time.monotonic(), [0.0, -1]  # when something was shown last, and of how many bytes

    def step(done: int, total: int) -> None:
        now = time.monotonic()
        over = done >= total
        if now - told[0] < (_DRAW_SECONDS if terminal else LINE_SECONDS) and not (over and told[1] != done):
            return
        told[:] = [now, done]
        text = line(what, done, total, now - began)
        out.write(f"\r{_drawn(done, total)} {text}\x1b[K" if terminal else f"{text}\n")
        out.flush()

    yield step
    if terminal and told[1] >= 0:
        out.write("\n")
        out.flush()


def line(what: str, done: int, total: int, seconds: float) -> str:
    """`uploading 12.0 of 48.0 MB, 25 %, 4.0 MB/s, 9 s left`; of less than a megabyte in kB."""
    unit, name = (1e6, "MB") if total >= 1e6 else (1e3, "kB")
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
    share = 100 * done / total if total else 100.0
    return f"{what} {done / unit:.1f} of {total / unit:.1f} {name}, {share:.0f} %, {rate / unit:.1f} {name}/s{left}"


def _drawn(done: int, total: int) -> str:
    full = min(_WIDTH, round(_WIDTH * done / total)) if total else _WIDTH
    return "[" + "#" * full + "." * (_WIDTH - full) + "]"
