"""Any bytes give a value or the documented error, within 1 s of processor time and 64 MiB, from every parser.

`SPOTHEAL_EXAMPLES` (make soak) says how many random documents each parser meets; failures are kept in `KEPT`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parsers
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spotheal.agent.protocol.contract import Progress, Saved

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX, MEMORY_MAX = 1.0, 64 << 20
MANY = 100_000 if "SPOTHEAL_EXAMPLES" in os.environ else 3_000

# What ended an agent or a command once, or might have.
KEPT: dict[str, bytes] = {
    "brackets": b"[" * MANY,
    "brackets in an object": b'{"step":' * (MANY // 2),
    "closed brackets": b"[" * (MANY // 2) + b"]" * (MANY // 2),
    "digits": b"9" * MANY,
    "a step of 400 digits": b'{"step": 1' + b"0" * 400 + b', "steps_total": 5}',
    "a step of 5000 digits": b'{"step": 1' + b"0" * 5000 + b"}",
    "a float beyond floats": b'{"step": 1e999, "loss": -1e999, "time": 1e999, "saves": 1e999}',
    "a float of many digits": b'{"step": 0.' + b"1" * MANY + b"}",
    "no numbers": b'{"step": NaN, "loss": Infinity, "steps_total": -Infinity}',
    "one name twice": b'{"step": 1, "step": [2]}',
    "half a character": b'{"step": 1, "\\ud800": 1, "saved": {"step": 1, "path": "\\udfff", "time": "\\ud800"}}',
    "not UTF-8": b'{"step": 1, "x": "\xff\xfe\xc3"}',
    "a zero byte": b'{"step": 1, "saved": {"step": 1, "path": "a\\u0000b"}}',
    "the year 1": b'"0001-01-01T00:00:00+23:59"',
    "the bare year 1": b"0001-01-01T00:00:00+23:59",
    "the year 9999": b"9999-12-31T23:59:59-23:59",
    "saved in the year 1": b'{"progress": {"saved": {"time": "0001-01-01T00:00:00+23:59"}}}',
    "lists for objects": b'{"progress": [], "saved": [], "phase": [], "instance": {}, "files": [[]], "saves": [[]]}',
    "objects for text": b'{"progress": {"saved": {"time": {}}}, "phase": {}, "files": [{"path": {}, "sha256": 1}]}',
    "text for objects": b'{"progress": "x", "saved": "x", "files": "x", "saves": "x", "blockdevices": "x"}',
    "negative sizes": b'{"files": [{"path": "a", "size": -1}], "blockdevices": [{"name": "a", "size": -1}]}',
    "line ends": b"\n" * (2 * MANY),
    "short lines": b"a\n" * (2 * MANY),
    "quotes": b'"' * MANY,
    "backslashes": b'"' + b"\\" * MANY,
    "commas": b"," * MANY,
    "spaces": b" " * (8 * MANY),
    "zero bytes": b"\0" * (8 * MANY),
    "carriage returns": b"\r" * MANY,
    "escapes of a terminal": b"\x1b[" * (MANY // 2),
    "a long line": b"x" * (8 * MANY),
    "a long key": b'{"step": 1, "' + b"k" * MANY + b'": 1}',
    "many keys": json.dumps({"step": 1, **{f"k{n}": n for n in range(MANY)}}).encode(),
    "a header of all bytes": b"\xff" * 64,
    "a header that is too long": (1 << 62).to_bytes(8, "little") + b"{}",
    "a header of brackets": (MANY // 2).to_bytes(8, "little") + b"[" * (MANY // 2),
    "offsets beyond all files": (64).to_bytes(8, "little") + b'{"w":{"data_offsets":[0,1e999]}}'.ljust(64),
    "a superblock of all bytes": b"\x89HDF\r\n\x1a\n" + b"\xff" * 64,
    "a superblock without addresses": b"\x89HDF\r\n\x1a\n\x00" + b"\0" * 4 + b"\x08\x08",
    "a zip without its end": b"PK\x03\x04" + b"PK\x05" * (MANY // 2),
    "YAML's aliases": b"- &a {x: 1}\n- {y: *a}\n",
    "a date that is none": b"- {x: 2026-13-45}\n",
}


class TookTooLong(BaseException):
    """No `except` of a parser takes it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """The processor's time, not the wall's: others may use this machine."""

    def late(*_: object) -> None:
        raise TookTooLong(f"more than {SECONDS_MAX} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attack(name: str, data: bytes) -> None:
    parser, documented = parsers.PARSERS[name]
    with bounded(), contextlib.suppress(*documented):
        parser(data)


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_what_has_ended_something_once_ends_no_parser(name: str) -> None:
    for data in KEPT.values():
        attack(name, data)


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_no_parser_takes_more_than_64_mib(name: str) -> None:
    parser, documented = parsers.PARSERS[name]
    largest: dict[str, int] = {}
    for what, data in KEPT.items():
        if len(data) < MANY // 2:
            continue
        tracemalloc.start()
        try:
            with contextlib.suppress(*documented):
                parser(data)
            largest[what] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert {what: size for what, size in largest.items() if size > MEMORY_MAX} == {}


_NAMES = st.sampled_from(
    ["step", "epoch", "loss", "steps_total", "saved", "path", "time", "event", "id", "phase", "progress", "files",
     "size", "sha256", "link", "saves", "moved", "folder", "name", "run", "attempt", "action", "blockdevices",
     "noticeTime", "job", "schema_version", "source", "made", "written", "lasting", "instance", "__metadata__",
     "data_offsets", "Statement", "mountpoints", "children", "closes"]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["terminate", "run", "0001-01-01T00:00:00+23:59", 10**400, -(2**63), 2**64]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES | st.text(max_size=5), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip
_DOCUMENTS = st.dictionaries(_NAMES, _VALUES, max_size=8).map(json.dumps).map(str.encode)
_HEADERS = _DOCUMENTS.map(lambda text: len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize("name", parsers.PARSERS)
@settings(
    max_examples=int(os.environ.get("SPOTHEAL_EXAMPLES", "12")), deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.binary(max_size=400) | _DOCUMENTS | _HEADERS)
@example(data=b"")
def test_any_bytes_give_a_value_or_the_documented_error(name: str, data: bytes) -> None:
    attack(name, data)


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+23:59", "yesterday", {}, "9" * 10_000])
def test_what_is_no_time_never_reaches_the_status(time: object) -> None:
    found = Progress.from_json(json.dumps({"step": 1, "saved": {"step": 1, "path": "x", "time": time}}))
    assert found.saved == Saved(1, "x", "")


# ------------------------------------------------------------------------------------------------------------ the table
def calls(path: Path) -> Iterator[str]:
    """`file:function` of each call that parses."""
    tree = ast.parse(path.read_text("utf-8"))
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "spotheal.agent.protocol.bounded_json"
        for alias in node.names
    }
    taken = {name for name in parsers.CALLS if "." in name} | (parsers.CALLS & ours)

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and ast.unparse(child.func) in taken and not _own_text(child):
                yield f"{path.relative_to(ROOT).as_posix()}:{'.'.join(names) or 'the module'}"
            yield from visit(child, (*names, child.name) if is_named else names)  # type: ignore[attr-defined]

    yield from visit(tree, ())


def _own_text(call: ast.Call) -> bool:
    """`json.loads(json.dumps(…))`: a copy."""
    inner: Any = call.args[0] if call.args else None
    return isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("json.dumps", "ready.instance.to_json")


def test_every_parser_is_in_one_of_the_tables() -> None:
    paths = [path for top in ("agent", "fleet", "training", "userdata") for path in (ROOT / top).rglob("*.py")]
    found = {name for path in paths if "rehearsal" not in path.parts for name in calls(path)}
    assert sorted(found - set(parsers.PARSERS) - set(parsers.TRUSTED)) == []


def test_no_entry_of_the_tables_names_a_function_that_is_gone() -> None:
    gone = []
    for entry in (*parsers.PARSERS, *parsers.TRUSTED):
        file, _, function = entry.partition(":")
        *_, last = function.split(".")
        if not (ROOT / file).is_file() or f"def {last}(" not in (ROOT / file).read_text("utf-8"):
            gone.append(entry)
    assert gone == []
