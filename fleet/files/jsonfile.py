"""JSON written by hand: every fault with its line, column and cure, and the value that was most likely meant.

The standard parser stops at the first fault. Here the text is repaired in memory, fault by fault, so that one run
reports all faults, and the values can be checked as well. A repaired text is never used for a request.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_FAULTS_MAX = 40
_PLACEHOLDER = re.compile(r"<[A-Za-z_][A-Za-z0-9_ -]*>")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class Parsed:
    """`value` is that of the repaired text, None if it could not be repaired; without `faults` nothing was repaired."""

    value: Any
    faults: tuple[str, ...]


@dataclass(frozen=True)
class _Mend:
    """A fault at `position`, and the edit that lets the parser go on: `remove` characters replaced by `insert`."""

    position: int
    says: str
    remove: int = 0
    insert: str = ""
    ends: bool = False


def parse(text: str, source: str) -> Parsed:
    """`text` as JSON; faults read `source:line:column: what and cure`, followed by the line and a caret."""
    mended = text
    origin = list(range(len(text) + 1))  # of each character of `mended`, where it stood in `text`
    faults: list[str] = []
    while len(faults) < _FAULTS_MAX:
        try:
            return Parsed(json.loads(mended, object_pairs_hook=_Pairs(faults, source)), tuple(faults))
        except json.JSONDecodeError as error:
            mend = _diagnose(mended, error)
        except (ValueError, RecursionError):  # digits by the thousand, or brackets
            return Parsed(None, (*faults, f"{source}: holds a number too long, or brackets too deep, to be read"))
        faults.append(_located(text, origin[mend.position], mend.says, source))
        if mend.ends:
            break
        original = origin[mend.position]
        end = mend.position + mend.remove
        mended = mended[: mend.position] + mend.insert + mended[end:]
        origin = origin[: mend.position] + [original] * len(mend.insert) + origin[end:]
    return Parsed(None, tuple(faults))


class _Pairs:
    """Of two equal keys the standard parser silently keeps the last; here that is a fault."""

    def __init__(self, faults: list[str], source: str) -> None:
        self._faults = faults
        self._source = source

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in sorted({name for name in names if names.count(name) > 1}):
            fault = f'{self._source}: "{name}" stands twice in one object; remove one of them'
            if fault not in self._faults:
                self._faults.append(fault)
        return dict(pairs)


def _located(text: str, position: int, says: str, source: str) -> str:
    line = text.count("\n", 0, position) + 1
    start = text.rfind("\n", 0, position) + 1
    column = position - start + 1
    excerpt = text[start:].split("\n", 1)[0].replace("\t", " ").rstrip("\r")
    # A very long line (base64) is shown around the fault only.
    cut = max(0, column - 60)
    return f"{source}:{line}:{column}: {says}\n    {excerpt[cut : cut + 110]}\n    {' ' * (column - 1 - cut)}^"


def _diagnose(text: str, error: json.JSONDecodeError) -> _Mend:
    at = error.pos
    rest = text[at:]
    if placeholder := _PLACEHOLDER.match(rest):
        word = placeholder.group()
        says = f'the placeholder {word} is still there, and without quotes; write the value, such as "…", in its place'
        return _Mend(at, says, len(word), json.dumps(word))
    if not rest.strip():
        return _end_of_text(text)
    if rest[0] == "," and (after := rest[1:].lstrip()) and after[0] in "]}":  # where Python 3.13 points
        return _trailing_comma(at)
    before = text[:at].rstrip()
    if rest[0] in "]}" and before.endswith(","):
        return _trailing_comma(len(before) - 1)
    if error.msg.startswith("Unterminated string"):
        return _Mend(at, 'this text has no closing quote; add " where it ends', ends=True)
    if error.msg.startswith("Invalid control character"):
        return _Mend(at, "a line ends inside quotes; close the quotes, or write \\n", ends=True)
    if error.msg.startswith("Invalid \\"):
        return _Mend(at, "a backslash inside quotes must be doubled: \\\\", 1, "\\\\")
    if comment := re.match(r"//[^\n]*|#[^\n]*|/\*.*?\*/", rest, re.DOTALL):
        return _Mend(at, "JSON has no comments; remove it", len(comment.group()))
    if word_match := re.match(r"(True|False|None)\b", rest):
        word = word_match.group()
        return _Mend(at, f"{word} is Python; JSON writes {_PYTHON_WORDS[word]}", len(word), _PYTHON_WORDS[word])
    if rest[0] in "'‘’“”":
        return _Mend(at, f'{rest[0]} is no quote in JSON; use " on both sides', ends=True)
    if error.msg == "Extra data":
        return _after_the_end(at, rest)
    if rest[0] in "]}" and (expected := _open_brackets(text[:at])) and _CLOSES[text[expected[-1]]] != rest[0]:
        closer = _CLOSES[text[expected[-1]]]
        line = text.count("\n", 0, expected[-1]) + 1
        return _Mend(
            at,
            f"{closer} is missing before this {rest[0]}: it closes the {text[expected[-1]]} of line {line}",
            0,
            closer,
        )
    if error.msg.startswith("Expecting ',' delimiter") and (rest[0] in '"{[-' or rest[0].isalnum()):
        return _Mend(at, "a comma is missing before this", 0, ",")
    if word_match := re.match(r"[A-Za-z_][A-Za-z0-9_./-]*", rest):
        word = word_match.group()
        return _Mend(at, f'text needs quotes: "{word}"', len(word), json.dumps(word))
    return _Mend(at, f"this is not JSON: {error.msg}", ends=True)


def _trailing_comma(at: int) -> _Mend:
    return _Mend(at, "no comma may stand before a closing bracket; remove it", 1)


def _after_the_end(at: int, rest: str) -> _Mend:
    if rest[0] in "]}":
        return _Mend(at, f"one {rest[0]} too many; remove it", 1)
    return _Mend(at, "the file holds something after its end; remove it", len(rest))


def _end_of_text(text: str) -> _Mend:
    content = text.rstrip()
    if not content:
        return _Mend(0, "the file is empty", ends=True)
    brackets = _open_brackets(text)
    if not brackets:
        return _Mend(len(content) - 1, "the file ends too early", ends=True)
    closers = [_CLOSES[text[at]] for at in reversed(brackets)]
    lines = " and ".join(f"{text[at]} of line {text.count(chr(10), 0, at) + 1}" for at in reversed(brackets))
    says = f"the file ends before it is closed; add {' '.join(closers)} at the end (they close {lines})"
    if content.endswith(":"):
        return _Mend(len(content) - 1, says, ends=True)
    comma = 1 if content.endswith(",") else 0
    at = len(content) - comma
    return _Mend(at, says, len(text) - at, "".join(closers))


def _open_brackets(text: str) -> list[int]:
    """Positions of the brackets that `text` opens and does not close; those inside quotes do not count."""
    stack: list[int] = []
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, re.DOTALL):
        symbol = token.group()
        if symbol in _CLOSES:
            stack.append(token.start())
        elif symbol in "]}" and stack:
            stack.pop()
    return stack
