"""User data that any Python of an operator makes is read by any Python of an instance."""

from __future__ import annotations

import base64
import gzip
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pythons_here import pythons

from spotheal.userdata.minified import minified

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("report", "bootstrap", "prepare")
_MAKE = """
import sys
sys.path.insert(0, sys.argv[1])
from spotheal import userdata
sys.stdout.write(userdata.render_prepare("{}") if sys.argv[2] == "prepare" else userdata.render("{}", "0" * 64))
"""
_PARSE = "import sys; compile(sys.stdin.read(), 'program', 'exec')"
NESTED = "f'launches/{instance['instanceId']}.json'\n"  # as Python 3.12 and newer unparse it


@cache
def made_by(version: str, program: str) -> str:
    """The Python program in the user data that the Python `version` makes."""
    argv = [pythons()[version], "-I", "-B", "-c", _MAKE, str(ROOT / ".ci/import_path"), program]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    name = "REPORT" if program == "report" else "BOOTSTRAP"
    payload = re.search(rf"^{name}='([^']+)'$", text, re.MULTILINE)
    assert payload
    return gzip.decompress(base64.b85decode(payload.group(1))).decode()


@cache
def fault_of_parsing(version: str, text: str) -> str:
    """What the Python `version` says of the program `text`; "" if it parses it."""
    argv = [pythons()[version], "-I", "-c", _PARSE]
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("instance", pythons())
@pytest.mark.parametrize("operator", pythons())
def test_what_each_python_makes_is_parsed_by_each(operator: str, instance: str, program: str) -> None:
    fault = fault_of_parsing(instance, made_by(operator, program))
    assert fault == "", f"made by {operator}; Pythons here: {pythons()}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_python_makes_the_same_program(program: str) -> None:
    texts = {made_by(version, program): version for version in pythons()}
    assert list(texts.values()) == [list(pythons())[-1]], f"Pythons here: {pythons()}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_f_string_needs_python_3_12(program: str) -> None:
    """Where this Python is the only one here, too."""
    assert newer_f_strings(made_by(f"3.{sys.version_info[1]}", program)) == []


@pytest.mark.parametrize("newer", [NESTED, "f'{x\n}'\n", "f'{\"\\n\".join(x)}'\n", "f'{f'{x}'}'\n"])
def test_an_f_string_of_python_3_12_is_seen_by_every_python(newer: str) -> None:
    assert newer_f_strings(newer)


@pytest.mark.parametrize("older", ["f'{x[\"a\"]}\\n'\n", "f'''{x['a']}'''\n", "f'{x!r:>{width}}' 'a'\n", "f'{{}}'\n"])
def test_an_f_string_of_python_3_10_is_no_fault(older: str) -> None:
    assert newer_f_strings(older) == []


def newer_f_strings(text: str) -> list[str]:
    """What in f-strings of `text` Python 3.10 and 3.11 do not parse: the quote of the f-string, backslashes and ends of
    lines in a replacement field. Before 3.12 the parser says so, after it the tokens do."""
    if sys.version_info < (3, 12):
        try:
            compile(text, "text", "exec")
        except SyntaxError as error:
            return [str(error)]
        return []
    return list(_newer_f_strings(text))


def _newer_f_strings(text: str) -> Iterator[str]:
    start, middle, end = (getattr(tokenize, f"FSTRING_{part}") for part in ("START", "MIDDLE", "END"))
    quotes: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        in_field = bool(quotes) and token.type not in (middle, end)
        same_quote = token.type in (tokenize.STRING, start) and bool(quotes) and quotes[-1] in token.string
        if in_field and (same_quote or "\\" in token.string or token.type in (tokenize.NL, tokenize.COMMENT)):
            yield f"line {token.start[0]}: {token.line.strip()}"
        if token.type == start:
            quotes.append(token.string.lstrip("fFrR"))
        elif token.type == end:
            quotes.pop()


# ------------------------------------------------------------------------------------------------- the minified source
def test_an_f_string_is_taken_over_as_it_is_written() -> None:
    source = "x = f\"{instance['id']:>{width}}  {a  +  b}\"  # why\n"
    assert minified(source) == "x=f\"{instance['id']:>{width}}  {a  +  b}\"\n"


def test_words_stay_apart_and_everything_else_goes() -> None:
    source = '''"""What it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

def f(a: Mapping[str, Any] | None = None, *rest: int) -> "x":
    """What it does."""
    b: int
    c: list[int] = [  # why

        1 if a else 2,
        *rest,
    ]
    return not c or "a" "b" in f"{a}"


class Empty:
    """A body that is only a docstring."""
'''
    assert minified(source).splitlines() == [
        "from typing import Any,TypeVar",
        'T=TypeVar("T")',
        "def f(a=None,*rest):",
        " c=[1 if a else 2,*rest,]",
        ' return not c or "a" "b" in f"{a}"',
        "class Empty:",
        ' """A body that is only a docstring."""',
    ]


def test_source_that_is_not_ascii_is_refused() -> None:
    with pytest.raises(ValueError, match="ASCII"):
        minified("x = 'é'\n")
