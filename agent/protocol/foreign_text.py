"""Text that others wrote (a trainer, the store, tags), safe for a terminal and for a log of lines."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def printable(text: str) -> str:
    """`text` as one line that cannot steer a terminal or look like several lines of a log.

    Colours are removed, line ends become spaces, and every other control character, direction mark or half character
    becomes `?`. Tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in _ESCAPES.sub("", text))


def printable_lines(text: str) -> str:
    """The same of a text of several lines: every line after the first is indented, so that none looks like a record."""
    return "\n    ".join(printable(line) for line in text.rstrip("\n").split("\n"))


def _shown(character: str) -> str:
    if character.isprintable() or character == "\t":
        return character
    return " " if character in "\r\n\u00a0" else "?"
