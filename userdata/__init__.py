"""The user data: a fixed POSIX shell stub, the bootstrap it carries, the systemd unit."""

from __future__ import annotations

import ast
import base64
import gzip
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

PAYLOADS = ("BOOTSTRAP", "CONFIG", "MANIFEST_SHA256")
_HARMLESS = re.compile(r"[A-Za-z0-9+/=]+")


def stub() -> str:
    """The shell program, with `@NAME@` where each of `PAYLOADS` goes."""
    return _text("stub.sh")


@cache
def bootstrap() -> str:
    """The Python program that the stub unpacks and runs: installs the agent from the store and starts it.

    Without its docstrings: they would take a tenth of the 16 kB that user data may have.
    """
    source = _text("bootstrap.py")
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) and node.body[1:]:
            lines[node.body[0].lineno - 1 : node.body[0].end_lineno] = [""] * _height(node.body[0])
    return "".join(lines)


def unit() -> str:
    """The systemd unit of the agent."""
    return _text("spotheal-agent.service")


def packed(content: str) -> str:
    """Base64 of gzip, the same for the same content (no time stamp)."""
    return base64.b64encode(gzip.compress(content.encode(), 9, mtime=0)).decode()


def fill(payloads: Mapping[str, str]) -> str:
    """The stub with `payloads` in place: one for each of `PAYLOADS`.

    ValueError for a payload with any character that a shell could interpret; nothing else is written into the program.
    """
    if sorted(payloads) != sorted(PAYLOADS):
        raise ValueError(f"payloads must be {', '.join(PAYLOADS)}")
    text = stub()
    for name, value in payloads.items():
        if not _HARMLESS.fullmatch(value):
            raise ValueError(f"{name} must hold only letters, digits, + / =")
        text = text.replace(f"='@{name}@'", f"='{value}'")
    return text


def render(config: str, manifest_sha256: str) -> str:
    """The user data for an instance: `config` is InstanceConfig's JSON. Its size is the caller's to check."""
    return fill({"BOOTSTRAP": packed(bootstrap()), "CONFIG": packed(config), "MANIFEST_SHA256": manifest_sha256})


def _height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
