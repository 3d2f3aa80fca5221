"""The user data: a fixed POSIX shell stub, the bootstrap it carries, the systemd unit."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from spotheal.userdata.minified import minified

PAYLOADS = ("REPORT", "BOOTSTRAP", "CONFIG", "MANIFEST_SHA256")
_COMMENT = re.compile(r"\s*#(?! spotheal:)")
# The digits of base85: no quote, no backslash, no space, so that within single quotes no shell interprets them.
_HARMLESS = re.compile(r"[A-Za-z0-9!#$%&()*+;<=>?@^_`{|}~-]+")


def stub() -> str:
    """The shell program, with `@NAME@` where each of `PAYLOADS` goes."""
    return _text("stub.sh")


@cache
def program(name: str) -> str:
    """The Python programs that the stub unpacks: `bootstrap` installs the agent from the store and starts it, `report`,
    which it imports, counts a boot that failed."""
    return minified(_text(f"{name}.py")).replace("from spotheal.userdata.report import", "from report import")


def unit() -> str:
    """The systemd unit of the agent."""
    return _text("spotheal-agent.service")


def packed(content: str) -> str:
    """Base85 of gzip, the same for the same content (no time stamp)."""
    return base64.b85encode(gzip.compress(content.encode(), 9, mtime=0)).decode()


def fill(payloads: Mapping[str, str]) -> str:
    """The stub with `payloads` in place: one for each of `PAYLOADS`, and without its lines of comment.

    ValueError for a payload with a character that a shell could interpret; nothing else is written into the program.
    """
    if sorted(payloads) != sorted(PAYLOADS):
        raise ValueError(f"payloads must be {', '.join(PAYLOADS)}")
    lines = (line for line in stub().splitlines(keepends=True) if line.startswith("#!") or not _COMMENT.match(line))
    text = "".join(lines)
    for name, value in payloads.items():
        if not _HARMLESS.fullmatch(value):
            raise ValueError(f"{name} must hold only the digits of base85")
        text = text.replace(f"='@{name}@'", f"='{value}'")
    return text


def render(config: str, manifest_sha256: str) -> str:
    """The user data for an instance: `config` is InstanceConfig's JSON. Its size is the caller's to check."""
    programs = {"REPORT": packed(program("report")), "BOOTSTRAP": packed(program("bootstrap"))}
    return fill({**programs, "CONFIG": packed(config), "MANIFEST_SHA256": manifest_sha256})


def render_prepare(config: str) -> str:
    """The user data of a short-lived instance that fills a volume: `config` is what prepare.py reads (JSON)."""
    programs = {"REPORT": packed(""), "BOOTSTRAP": packed(_text("prepare.py"))}
    return fill({**programs, "CONFIG": packed(config), "MANIFEST_SHA256": "0" * 64})


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
