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
def bar(activity: str, *, quiet: bool = False, to: TextIO | None = None) -> Iterator[Step]:
    """`step(bytes_done, total)` shows the progress. If `quiet`, a terminal shows nothing; a file still gets lines."""
    out = to or sys.stderr
    terminal = out.isatty() and not quiet
    start, last_shown = time.monotonic(), [0.0, -1]  # the time of the last output, and its number of bytes

    def step(bytes_done: int, total: int) -> None:
        moment = time.monotonic()
        pause = _DRAW_SECONDS if terminal else LINE_SECONDS
        is_last = bytes_done >= total and last_shown[1] != bytes_done
        if moment - last_shown[0] < pause and not is_last:
            return
        last_shown[:] = [moment, bytes_done]
        text = line(activity, bytes_done, total, moment - start)
        out.write(f"\r{_drawn(bytes_done, total)} {text}\x1b[K" if terminal else f"{text}\n")
        out.flush()

    yield step
    if terminal and last_shown[1] >= 0:
        out.write("\n")
        out.flush()


def line(activity: str, bytes_done: int, total: int, seconds: float) -> str:
    """`uploading 12.0 of 48.0 MB, 25 %, 4.0 MB/s, 9 s left`; in kB if the total is below a megabyte."""
    unit, name = (1e6, "MB") if total >= 1e6 else (1e3, "kB")
    rate = bytes_done / seconds if seconds > 0 else 0.0
    remaining = f", {duration((total - bytes_done) / rate)} left" if rate and bytes_done < total else ""
    share = 100 * bytes_done / total if total else 100.0
    amount = f"{bytes_done / unit:.1f} of {total / unit:.1f} {name}"
    return f"{activity} {amount}, {share:.0f} %, {rate / unit:.1f} {name}/s{remaining}"


def _drawn(bytes_done: int, total: int) -> str:
    full = min(_WIDTH, round(_WIDTH * bytes_done / total)) if total else _WIDTH
    return "[" + "#" * full + "." * (_WIDTH - full) + "]"
