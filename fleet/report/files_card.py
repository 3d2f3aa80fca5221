"""The report's card about files: what interrupted attempts wrote, and what was lost."""

from __future__ import annotations

from spotheal.agent.record.lost_work import FilesWritten
from spotheal.fleet.report.pieces import card, cell, safe_long, stacked
from spotheal.fleet.status.receipt import Receipt

_ATTEMPTS_SHOWN = 50


def files_card(receipt: Receipt) -> str:
    """Empty if no attempt was interrupted after it had written something, and nothing was lost."""
    if not receipt.written and not receipt.lost:
        return ""
    rows = "".join(
        "<tr>"
        + cell("Attempt", "–" if attempt.attempt is None else attempt.attempt)
        + cell("Instance", attempt.instance)
        + f'<td data-name="Files">{_files(attempt)}</td>'
        + "</tr>"
        for attempt in receipt.written[-_ATTEMPTS_SHOWN:]
    )
    lost = "".join(f"<p>Lost: {safe_long(line)}</p>" for line in receipt.lost)
    table = stacked(("Attempt", "Instance", "Files"), rows, 0) if rows else ""
    note = "As the machine after it found them recorded on the volume." if rows else ""
    return card("What interrupted attempts wrote", note, lost + table)


def _files(attempt: FilesWritten) -> str:
    hidden = f" and {attempt.more} more" if attempt.more else ""
    return safe_long(", ".join(attempt.files)) + hidden
