"""The report's card about files: what interrupted attempts wrote, and what was lost."""

from __future__ import annotations

from spotheal.fleet.report.pieces import card, cell, safe_long, stacked
from spotheal.fleet.status.receipt import Receipt

_ATTEMPTS_SHOWN = 50


def files_card(receipt: Receipt) -> str:
    """Empty if no attempt was interrupted after it had written something, and nothing was lost."""
    if not receipt.written and not receipt.lost:
        return ""
    rows = "".join(
        "<tr>"
        + cell("Attempt", "–" if one.attempt is None else one.attempt)
        + cell("Instance", one.instance)
        + f'<td data-name="Files">{safe_long(", ".join(one.files))}{f" and {one.more} more" if one.more else ""}</td>'
        + "</tr>"
        for one in receipt.written[-_ATTEMPTS_SHOWN:]
    )
    lost = "".join(f"<p>Lost: {safe_long(line)}</p>" for line in receipt.lost)
    table = stacked(("Attempt", "Instance", "Files"), rows, 0) if rows else ""
    what = "As the machine after it found them recorded on the volume." if rows else ""
    return card("What interrupted attempts wrote", what, lost + table)
