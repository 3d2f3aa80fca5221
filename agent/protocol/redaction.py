"""Secrets taken out of text: the last step of every log and report.

Known values (of `[secrets]`, the repository's credential, the trainer's own role) go in whatever form they are printed:
plain, escaped, in a URL, in base64 also inside something longer, in hex. Unknown ones go by their looks: AWS keys and
session tokens, tokens of GitHub, GitLab, Hugging Face, Slack, OpenAI and Anthropic, private keys, passwords in URLs.
Text without any of it is returned as it is; `bench/redaction.py` tells how fast.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import quote, quote_plus

MARK = "[redacted]"
LENGTH_MIN = 8  # shorter values are taken out only where they stand alone,
SHORT_MIN = 4  # and still shorter ones not at all: they would be found in any text
LENGTH_MAX = 4096  # of a form that may lie across the border of two pieces of a stream

_END = r"(?![A-Za-z0-9])"
_START = r"(?<![A-Za-z0-9])"
# (words of which one is in every text that matches, the pattern, what it is replaced by)
_LOOKS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (
        ("AKIA", "ASIA", "ABIA", "ACCA"),
        re.compile(rf"{_START}(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{{16}}{_END}"),
        MARK,
    ),
    (
        ("ecretAccessKey", "ecret_access_key", "ECRET_ACCESS_KEY", "ecretKey", "ecret_key", "ECRET_KEY", "ecretkey"),
        re.compile(r"(?i)(secret_?(?:access_?)?key[\"']?\s*[=:,]\s*[\"']?)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"),
        rf"\1{MARK}",
    ),
    (
        ("ionToken", "ion_token", "ion-token", "ION_TOKEN", "ityToken", "ity_token", "ity-token", "ITY_TOKEN"),
        re.compile(r"(?i)((?:session|security)[_-]?token[\"']?\s*[=:,]\s*[\"']?)[A-Za-z0-9/+=_-]{16,}"),
        rf"\1{MARK}",
    ),
    (
        ("IQoJ", "FwoG", "FQoG"),
        re.compile(rf"{_START}(?:IQoJ|FwoG|FQoG)[A-Za-z0-9/+=]{{60,}}"),
        MARK,
    ),
    (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
        re.compile(rf"{_START}(?:gh[pousr]_[A-Za-z0-9]{{20,}}|github_pat_[A-Za-z0-9_]{{20,}}|glpat-[A-Za-z0-9_-]{{20,}})"),
        MARK,
    ),
    (("hf_",), re.compile(rf"{_START}hf_[A-Za-z0-9]{{20,}}"), MARK),
    (("xox",), re.compile(rf"{_START}xox[abeoprs]-[A-Za-z0-9-]{{10,}}"), MARK),
    (("sk-",), re.compile(rf"{_START}sk-(?:proj-|ant-|svcacct-)?[A-Za-z0-9_-]{{20,}}"), MARK),
    (
        ("PRIVATE KEY",),
        re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        rf"\1{MARK}\2",
    ),
    # A user's name alone is none over ssh (git@), and a token over http. The pattern begins with its word: it is quick
    # in logs full of addresses.
    (("://",), re.compile(r"://[^/\s@'\":]*:[^/\s'\"]*@"), f"://{MARK}@"),
    (("http://", "https://"), re.compile(r"(https?://)[^/\s@'\"]+@"), rf"\1{MARK}@"),
    (("TTP://", "TTPS://", "Http://", "Https://"), re.compile(r"(?i)(https?://)[^/\s@'\"]+@"), rf"\1{MARK}@"),
)
_LOOKS_LENGTH_MIN = 15  # of what any pattern matches, a URL's password apart
_WORDS = tuple((word, index) for index, (words, _, _) in enumerate(_LOOKS) for word in words)
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_ENDS = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_KEY_LINE = re.compile(r"[\s|>]*(?:[A-Za-z0-9+/=]{1,80}|[A-Za-z-]+: [ -~]*|)\s*")
_KEY_LINES_MAX = 150  # of a key whose end never comes


class Redaction:
    """What is known to be secret; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forms: tuple[str, ...] = ()
        self._known: re.Pattern[str] | None = None
        self._short: re.Pattern[str] | None = None
        self._values: set[str] = set()

    def learn(self, values: Iterable[str]) -> None:
        """Take these out from now on."""
        with self._lock:
            self._values |= {part for value in values for part in _parts(value)}
            forms = {form for value in self._values if len(value) >= LENGTH_MIN for form in _forms(value)}
            ordered = sorted(forms, key=len, reverse=True)  # of two that begin alike the longer
            short = sorted(value for value in self._values if SHORT_MIN <= len(value) < LENGTH_MIN)
            self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None
            self._short = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, short))})(?!\w)") if short else None
            self._forms = tuple(ordered)

    def forget(self) -> None:
        """For tests."""
        with self._lock:
            self._values.clear()
            self._forms, self._known, self._short = (), None, None

    @property
    def overlap(self) -> int:
        """How much of a stream's end must be kept until more of it is there."""
        return min(LENGTH_MAX, max(map(len, self._forms), default=0)) + 256

    def text(self, text: str) -> str:
        """`text` without secrets."""
        forms, values, short = self._forms, self._known, self._short
        for form in forms:  # nearly always none is there, and looking for a word is quicker than any pattern
            if form in text:
                text = values.sub(MARK, text) if values is not None else text
                break
        if short is not None:
            text = short.sub(MARK, text)
        if len(text) < _LOOKS_LENGTH_MIN and "://" not in text:  # most names and values of a document
            return text
        indexes = {index for word, index in _WORDS if word in text}
        for index in sorted(indexes):
            text = _LOOKS[index][1].sub(_LOOKS[index][2], text)
        return text

    def tree(self, value: Any) -> Any:
        """A document of dicts, lists and strings, keys included, without secrets; anything else is left alone."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.tree(key): self.tree(item) for key, item in value.items()}
        return [self.tree(item) for item in value] if isinstance(value, list | tuple) else value

    def stream(self) -> LineRedaction:
        """For the lines of one stream, in order: a private key has many."""
        return LineRedaction(self)


class LineRedaction:
    """Lines of one stream, without secrets that span lines either."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._in_key = 0  # lines of a private key seen, 0 outside of one

    def lines(self, lines: list[str]) -> list[str]:
        """Many at once, which is quicker where there is nothing to take out."""
        if not self._in_key:
            text = "\n".join(lines)
            if self._redaction.text(text) == text:
                return lines
        return [self.line(line) for line in lines]

    def line(self, line: str) -> str:
        if self._in_key:
            if _KEY_ENDS.search(line) or self._in_key > _KEY_LINES_MAX or not _KEY_LINE.fullmatch(line):
                ended = _KEY_ENDS.search(line)
                self._in_key = 0
                return self._redaction.text(line[ended.start() :] if ended else line)
            self._in_key += 1
            return MARK
        if "PRIVATE KEY" in line and _KEY_BEGINS.search(line) and not _KEY_ENDS.search(line):
            self._in_key = 1
        return self._redaction.text(line)


# The secrets of this process. One for all, as the logging is: whoever writes text for others must not have to be told.
SECRETS = Redaction()


def redacted(text: str) -> str:
    """`text` without the secrets of this process."""
    return SECRETS.text(text)


def looks_secret(text: str) -> bool:
    """Whether something in `text` looks like a token, a key or a password."""
    return Redaction().text(text) != text


# ---------------------------------------------------------------------------------------------------------------- forms
def _parts(value: str) -> set[str]:
    """The value, its lines, and the strings in it where it is a JSON document, as secrets of several fields are."""
    parts = {value.strip()}
    if "\n" in value.strip():
        parts |= {line.strip() for line in value.splitlines() if len(line.strip()) >= LENGTH_MIN}
    if value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            parts |= {text for text in _strings(json.loads(value)) if len(text) >= LENGTH_MIN}
    parts = {part for part in parts if not _KEY_BEGINS.fullmatch(part) and not _KEY_ENDS.fullmatch(part)}
    return {part for part in parts if len(part) >= SHORT_MIN}


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _forms(value: str) -> set[str]:
    raw = value.encode("utf-8", "surrogateescape")
    forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    forms |= {quote(value, safe=""), quote(value), quote_plus(value), raw.hex(), raw.hex().upper()}
    for skipped in range(3):  # in base64 of something longer ("user:TOKEN") it begins at one of three places
        head, tail = b"\0" * skipped + raw, (skipped + len(raw)) % 3
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(head).decode().rstrip("=")
            # Characters at both ends also depend on what stands beside it.
            forms.add(text[(0, 2, 3)[skipped] : len(text) - 1 if tail else len(text)])
    forms.add(base64.b64encode(raw).decode())
    return {form for form in forms if len(form) >= LENGTH_MIN}
