"""Every key of job.toml and every option of every verb is lived once, by real processes or against the local cloud.

`options/lived.toml` says where. A row must be true: the job of a life or of a scenario, or the source of a test,
holds the option. `python tests/project/test_options_lived.py` proposes rows for options that have none.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent / ".ci/import_path"))

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest

from spotheal.agent.protocol.job_keys import FREE_TABLES, KEYS
from spotheal.fleet import cli
from spotheal.fleet.program import verb_command
from spotheal.fleet.rehearsal.scenarios import (
    batch_rehearsal,
    elastic_rehearsal,
    job,
)

OPTIONS = TESTS / "options"
TABLE: dict[str, dict[str, str]] = tomllib.loads((OPTIONS / "lived.toml").read_text())
DEFAULTS = {f"{key.table}.{key.name}": key.default for key in KEYS} | {name: {} for name in FREE_TABLES}
UNLIVED_MAX = 3  # the list only gets shorter


def options() -> Iterator[str]:
    """`verb --option`, of all verbs; options that most verbs have stand once, as `* --option`."""
    for name in cli.VERBS:
        command: Any = verb_command(name)
        for inner, one in (getattr(command, "commands", None) or {"": command}).items():
            for param in one.params:
                if param.param_type_name == "option":
                    yield from (f"{name} {inner}".strip() + f" {option}" for option in _long(param))


def _long(param: Any) -> list[str]:
    """Its long name, or its only one; of a switch that is on anyway, what turns it off."""
    names = [name for name in param.opts if name.startswith("--")] or param.opts
    return [*param.secondary_opts[:1]] if param.secondary_opts and param.default else [names[0]]


COMMON = ("--region", "--profile", "--output", "--job", "--run", "--yes")
VERB_OPTIONS = sorted({f"* {one.rpartition(' ')[2]}" if one.endswith(COMMON) else one for one in options()})


def test_each_key_of_job_toml_has_a_row() -> None:
    assert sorted([*TABLE["keys"], *TABLE["keys-not-lived"]]) == sorted(DEFAULTS)


def test_each_option_of_each_verb_has_a_row() -> None:
    assert sorted([*TABLE["options"], *TABLE["options-not-lived"]]) == VERB_OPTIONS


def test_what_nothing_has_lived_is_short_and_says_why() -> None:
    unlived = {**TABLE["keys-not-lived"], **TABLE["options-not-lived"]}
    assert len(unlived) <= UNLIVED_MAX
    assert [name for name, why in unlived.items() if len(why) < 20] == []


@pytest.mark.parametrize("key", TABLE["keys"])
def test_a_key_is_lived_where_its_row_says(key: str) -> None:
    kind, _, name = TABLE["keys"][key].partition(" ")
    table, _, field = key.partition(".")
    if kind == "life":
        document = tomllib.loads((OPTIONS / "jobs" / f"{name}.toml").read_text())
        found = document[table][field] if field else document[table]
        assert name in set().union(*(_strings(one) for one in _functions(OPTIONS / "live_options.py").values()))
    elif kind == "scenario":
        found = getattr(getattr(SCENARIOS[name](), table), field)
    else:
        path, test = place_of(kind)
        source = "\n".join(ast.unparse(one) for one in reached(path, test))
        found = field if re.search(rf"\b{field}\b", source) else DEFAULTS[key]
    assert found != DEFAULTS[key], "its default is no life"


@pytest.mark.parametrize("option", TABLE["options"])
def test_an_option_is_lived_where_its_row_says(option: str) -> None:
    where = TABLE["options"][option]
    assert uses(where, option), f"{where} does not give {option}"


# ------------------------------------------------------------------------------------------------------------ scenarios
@functools.cache
def _example() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return job.example(Path(folder) / "job").job


SCENARIOS = {
    "elastic": lambda: elastic_rehearsal.on_machines(_example(), "fs-0123456789abcdef0"),
    "batch": lambda: batch_rehearsal.on_batch(_example()),
}


# -------------------------------------------------------------------------------------------------------------- sources
GIVES = ("good", "run", "Popen", "invoke", "request")  # what tests call fleetctl with
REFUSES = re.compile("refused|wrong|senseless|no_sense|hostile|exit_|completes|without_credentials|help|not_name")


def place_of(row: str) -> tuple[Path, str]:
    file, _, name = row.partition("::")
    return TESTS.parent / file, name


def uses(row: str, option: str) -> bool:
    """Whether the test, or a function of its file that it calls, gives the option to the verb in one call. A test whose
    name says that something is refused is no life."""
    verb, _, name = option.rpartition(" ")
    wanted = {name} if verb == "*" else {name, *verb.split()}
    path, test = place_of(row)
    if path.suffix == ".sh":
        lines = re.sub(r"\\\n", " ", path.read_text()).splitlines()
        given = [set(re.findall(r"[\w-]+", line)) for line in lines if "ask " in line or "$fleetctl" in line]
        return any(wanted <= words for words in given)
    return not REFUSES.search(test) and any(wanted <= words for words in _calls_of(path, test))


@functools.cache
def reached(path: Path, test: str) -> tuple[ast.AST, ...]:
    """The test and the functions of its file that it calls; nothing if there is no such test."""
    functions = _functions(path)
    found, todo = {test} & functions.keys(), [test] if test in functions else []
    while todo:
        named = {one.id for one in ast.walk(functions[todo.pop()]) if isinstance(one, ast.Name)} & functions.keys()
        todo += named - found
        found |= named
    return tuple(functions[name] for name in sorted(found))


@functools.cache
def _calls_of(path: Path, test: str) -> tuple[set[str], ...]:
    return tuple(words for node in reached(path, test) for words in _calls(node))


@functools.cache
def _functions(path: Path) -> dict[str, ast.AST]:
    """Functions, classes and constants of the file, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def _calls(node: ast.AST) -> Iterator[set[str]]:
    """The words of each call of fleetctl; those of a list that stands in a variable, too."""
    lists = {target.id: one.value for one in ast.walk(node) if isinstance(one, ast.Assign)
             for target in one.targets if isinstance(target, ast.Name)}  # fmt: skip
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in GIVES:
            words = {word for argument in one.args for word in _strings(argument)}
            for name in (name.id for argument in one.args for name in ast.walk(argument) if isinstance(name, ast.Name)):
                words |= set(_strings(lists[name])) if name in lists else set()
            by = {"request"} if one.func.attr == "request" else set()
            yield words | by | set(ast.unparse(one.func.value).split("_"))  # `batch_desk.run(…)` is of batch


def _strings(node: ast.AST) -> Iterator[str]:
    yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def propose() -> Iterator[str]:
    """A row for each option that has none, from the tests that give it; the local cloud's first."""
    files = sorted(TESTS.glob("**/*.py"), key=lambda path: ("cloud_desk" not in path.read_text(), str(path)))
    rows = ["tests/operators_day.sh"]
    rows += [f"{path.relative_to(TESTS.parent)}::{name}" for path in files for name in _functions(path)
             if name.startswith("test_") and path != Path(__file__).resolve()]  # fmt: skip
    for option in VERB_OPTIONS:
        if option not in TABLE["options"] and option not in TABLE["options-not-lived"]:
            yield f'"{option}" = "{next((row for row in rows if uses(row, option)), "")}"'


if __name__ == "__main__":
    print("\n".join(propose()))
