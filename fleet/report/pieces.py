"""The pieces that pages are made of: the document around them, cards, charts for three widths, tables. Pure.

The policy in a page's head allows this very style sheet and nothing else, so that whatever a hostile name brought into
the page could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.report.charts import safe
from spotheal.fleet.report.style import STYLE

NARROW, MIDDLE, WIDE, HALF = 336, 632, 1074, 506  # the insides of a card at the style sheet's three sizes
NUMBER = ' class="number"'
_MARK = '<meta name="generator" content="spotheal">'
_MARK_WITHIN = 4096


def document(title: str, body: str) -> str:
    """The whole document, valid on its own; `.encode()` never fails."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="referrer" content="no-referrer">{_MARK}'
        f"<title>{safe(title)}</title><style>{STYLE}</style></head><body><main>{body}</main>"
        "</body></html>\n"
    )


def write(body: bytes, path: Path) -> None:
    """Replace `path` by a page, whole or not at all. ConfigError if another file has its name, or none
    can be written."""
    try:
        if path.exists() and _MARK.encode() not in path.read_bytes()[:_MARK_WITHIN]:
            raise ConfigError(f"{path} is there already and is no report", next_step="name another file")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(body)
        os.replace(temporary, path)
    except OSError as fault:
        cause = fault.strerror or fault
        raise ConfigError(f"{path} cannot be written: {cause}", next_step="name another file") from fault


def card(title: str, note: str, body: str, tail: str = "") -> str:
    intro = f'<p class="what">{safe_long(note)}{" " + safe(tail) if tail else ""}</p>' if note or tail else ""
    return f'<section class="card"><h2>{safe(title)}</h2>{intro}{body}</section>'


def three(draw: Callable[[int], str], wide: int = WIDE) -> str:
    """The same chart for phones, tablets and desktops: one that is scaled has text too small to read."""
    sizes = (("n", NARROW), ("m", MIDDLE), ("w", wide))
    return "".join(f'<div class="{cls}">{draw(width)}</div>' for cls, width in sizes)


def legend(keys: str) -> str:
    return f'<ul class="legend">{keys}</ul>' if keys else ""


def key(cls: str, name: str, under: str = "") -> str:
    below = f'<rect class="{under}" x="0" y="2" width="12" height="10" rx="3"/>' if under else ""
    return shape(f'{below}<rect class="{cls}" x="0" y="2" width="12" height="10" rx="3"/>', name)


def shape(shape: str, name: str, width: int = 13) -> str:
    return f'<li><svg class="key" aria-hidden="true" width="{width}" height="14">{shape}</svg>{safe(name)}</li>'


def stacked(heads: Sequence[str], rows: str, numbers: int) -> str:
    """A table that becomes a list of blocks on a phone; its last `numbers` columns are figures."""
    first = len(heads) - numbers
    cells = "".join(
        f'<th scope="col"{NUMBER if index >= first else ""}>{safe(head)}</th>' for index, head in enumerate(heads)
    )
    return f'<table class="stacked"><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>'


def cell(name: str, value: object, *, number: bool = False, note: str = "") -> str:
    cls = NUMBER if number else ""
    small = f"<small>{safe(note)}</small>" if note else ""
    return f'<td data-name="{safe(name)}"{cls}>{safe(value)}{small}</td>'


def lines(text: str) -> str:
    return "\n".join(safe_long(line) for line in text.split("\n"))


def safe_long(text: str) -> str:
    """As `safe`, without a limit of length."""
    return html.escape(printable(text))


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
