"""The pages of the verbs are what `--help` prints, and docs/troubleshooting.md's messages are the code's.

`python tests/project/test_docs_verbs.py` writes those pages anew.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / ".ci/import_path"))

from typer.testing import CliRunner

from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet import cli, program
from spotheal.fleet.program import verb_command

DOCS = ROOT / "docs"
TROUBLE = DOCS / "troubleshooting.md"
MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.UNEXPECTED: "something unexpected, or AWS not reached or busy",
    ExitCode.USAGE: "usage or configuration",
    ExitCode.PERMISSION: "no credentials, or not allowed",
    ExitCode.NOT_FOUND: "not there",
    ExitCode.CAPACITY: "no capacity, or a quota",
    ExitCode.WAIT_TIMED_OUT: "a wait timed out; the run goes on",
    ExitCode.JOB_FAILED: "the job failed",
    ExitCode.CONFLICT: "somebody was first, or it exists otherwise",
    ExitCode.INTERRUPTED: "Ctrl-C",
}


def helps(name: str) -> Iterator[tuple[str, str]]:
    """The words of the verb and of each of its own verbs, and their help at 100 columns."""
    yield name, _help(name)
    command: Any = verb_command(name)
    for inner in sorted(getattr(command, "commands", {})):
        yield f"{name} {inner}", _help(name, inner)


@functools.cache
def _help(*words: str) -> str:
    width = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    result = CliRunner().invoke(cli.app, [*words, "--help"], prog_name="fleetctl", env=width)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def pages() -> dict[str, str]:
    """Every page below docs/, by its name."""
    codes = [f"| {int(code)} | {says} |" for code, says in MEANINGS.items()]
    verbs = [f"| [{name}](verbs/{name}.md) | {line} |" for name, line in cli.VERBS.items()]
    made = "Made from `--help` (`python tests/project/test_docs_verbs.py`), a page a verb. What messages mean:"
    lines = ["# fleetctl", "", made, "[troubleshooting](troubleshooting.md).", ""]
    lines += ["| verb | |", "|---|---|", *verbs, ""]
    lines += ["## Exit codes", "", "| code | |", "|---|---|", *codes, ""]
    lines += ["## Help", "", "```", cli.help_text(), "```", ""]
    found = {"fleetctl.md": "\n".join(lines)}
    for name in cli.VERBS:
        parts = [f"# fleetctl {name}", "", "Made from `--help`; the exit codes are in [fleetctl](../fleetctl.md).", ""]
        for words, text in helps(name):
            parts += [*([f"## {words}", ""] if " " in words else []), "```", text, "```", ""]
        found[f"verbs/{name}.md"] = "\n".join(parts)
    return found


@pytest.mark.parametrize("name", ["fleetctl.md", *(f"verbs/{verb}.md" for verb in cli.VERBS)])
def test_the_pages_of_the_verbs_are_what_help_prints(name: str) -> None:
    assert pages()[name] == (DOCS / name).read_text(), "run: python tests/project/test_docs_verbs.py"


def test_there_is_no_page_of_a_verb_that_is_gone() -> None:
    assert sorted(cli.VERBS) == sorted(path.stem for path in (DOCS / "verbs").iterdir())


def test_every_exit_code_is_on_the_page() -> None:
    assert set(ExitCode) == set(MEANINGS)


def messages() -> list[str]:
    return re.findall(r"^### `(.+)`$", TROUBLE.read_text(), re.MULTILINE)


def constants() -> str:
    """All text of the code, as it is written; what is put in at run time is …"""
    found = []
    for package in ("agent", "fleet", "userdata"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = re.sub(r"\"\n\s*f?\"", "", path.read_text(encoding="utf-8"))  # a string over several lines
            found.append(re.sub(r"\{[^{}\n]*\}", "…", text).replace("\\'", "'"))
    return "\n".join(found)


CODE = constants()


@pytest.mark.parametrize("message", messages())
def test_every_message_of_troubleshooting_is_the_codes(message: str) -> None:
    missing = [part for part in message.split("…") if part.strip() and part.strip() not in CODE]
    assert missing == [], f"no such message any more: {message}"


def test_troubleshooting_has_the_messages_that_people_meet_first() -> None:
    assert len(messages()) >= 25


def shown_commands(page: Path) -> list[str]:
    """The indented lines of a page that begin with `fleetctl`, without what explains them."""
    lines = re.findall(r"^    (fleetctl .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    parts = [part.strip() for line in lines if "►" not in line  # a drawing
             for part in re.split(r"[;&]", re.split(r" #|  +|\s<\s", line)[0])]  # fmt: skip
    return [part for part in parts if part.startswith("fleetctl ") and "…" not in part]


def named_commands(page: Path) -> list[str]:
    """Those in the midst of a sentence, which may leave words out."""
    found = re.findall(r"`(fleetctl [a-z][^`]*)`", page.read_text(encoding="utf-8"))
    return [" ".join(words.split()) for words in found if "…" not in words]


USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that typer brings


@functools.cache
def refusal(line: str) -> str:
    """Why fleetctl does not take this line; "" if it does."""
    try:
        parse(shlex.split(line)[1:])
    except USAGE_ERROR as error:
        return str(error.message)
    return ""


def parse(words: list[str]) -> None:
    """As fleetctl does before it begins; USAGE_ERROR if it does not take them."""
    command: Any = typer.main.get_command(program.app)
    name, context = "fleetctl", None
    while command is not None:
        context = command.make_context(name, words, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return
        name, command, words = command.resolve_command(context, rest)


PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.glob("*.md") if path.name != "fleetctl.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_fleetctl_takes_every_command_of_a_page(page: Path) -> None:
    shown, named = shown_commands(page), named_commands(page)
    assert [f"{line}: {why}" for line in shown if (why := refusal(line))] == []
    assert [line for line in named if re.match("No such|Got unexpected", refusal(line))] == []


if __name__ == "__main__":
    os.environ.pop("FORCE_COLOR", None)
    (DOCS / "verbs").mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
