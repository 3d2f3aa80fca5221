"""Plain text for terminals and pipes alike: aligned columns, no colour, no frames. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spotheal.agent.protocol.foreign_text import printable


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their longest cell; None is shown as -."""
    cells = [list(heads), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def lines_of(rows: Sequence[tuple[str, str]]) -> str:
    """`name   value`, one a line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {printable(value)}" for name, value in rows)


def cut(text: str, letters: float) -> str:
    return text if len(text) <= letters else text[: max(1, int(letters) - 1)] + "…"


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    if seconds is None:
        return "-"
    whole = int(max(0, seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size_of(size: float) -> str:
    """`512 B`, `3.0 MB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else printable(str(value)).replace("\t", " ")
