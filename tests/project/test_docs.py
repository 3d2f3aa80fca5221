"""The documents say what the code does: tables are compared, links and files exist.

`python tests/project/test_docs.py` writes the generated tables anew.
"""

from __future__ import annotations

import json
import re
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import adding_us
import forked
import pytest

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.contract import read_progress
from spotheal.agent.protocol.job_keys import FREE_TABLES, KEYS, REQUIRED
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.rehearsal.scenarios import scenario

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def keys_table() -> str:
    lines = []
    for table in dict.fromkeys(key.table for key in KEYS):
        lines += [f"### [{table}]", "", "| key | default | |", "|---|---|---|"]
        for key in (key for key in KEYS if key.table == table):
            default = "required" if key.default is REQUIRED else f"`{json.dumps(key.default)}`"
            says = key.says.replace("|", "\\|") + ("" if key.ready else " *(not done yet: only the default is taken)*")
            lines.append(f"| `{key.name}` | {default} | {says} |")
        lines.append("")
    for table, says in FREE_TABLES.items():
        lines += [f"### [{table}]", "", says, ""]
    return "\n".join(lines)


def scenarios_table() -> str:
    rows = [f"| `{name}` | {scenario.scenario(name).says} |" for name in scenario.NAMES]
    return "\n".join(["| scenario | faults |", "|---|---|", *rows, ""])


GENERATED = {
    "docs/job-toml.md": ("keys", keys_table),
    "docs/rehearsal.md": ("scenarios", scenarios_table),
    **{str(page.relative_to(ROOT)): ("adding us", adding_us.section) for page in adding_us.PAGES},
}


def block(text: str, name: str) -> str:
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found, f"no block {name}"
    return found.group(1)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_the_codes(name: str) -> None:
    mark, table = GENERATED[name]
    assert block((ROOT / name).read_text(), mark) == table(), "run: python tests/project/test_docs.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(path: Path) -> None:
    for named in re.findall(r"`((?:agent|fleet|training|userdata|iam|docs|tests)/[\w./-]+\.\w+)`", path.read_text()):
        assert (ROOT / named).exists(), named


def test_every_document_named_in_a_message_exists() -> None:
    for package in ("agent", "fleet", "training", "userdata", "iam"):
        for module in (ROOT / package).rglob("*.py"):
            for named in re.findall(r"docs/[\w-]+\.md", module.read_text()):
                assert (ROOT / named).exists(), f"{module.name}: {named}"


def test_every_variable_of_the_contract_is_documented() -> None:
    text = (ROOT / "docs/contract.md").read_text()
    names = {value for value in vars(contract).values() if isinstance(value, str) and value.startswith("SPOTHEAL_")}
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert set(re.findall(r"`(SPOTHEAL_[A-Z]\w*)`", text)) <= names
    assert str(contract.EXIT_SAVED_AND_STOPPED) in text
    assert all(f"`{action}`" in text for action in contract.ACTIONS)


def test_every_end_and_every_part_of_the_store_is_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert [phase.value for phase in Phase if phase.is_end and f"**{phase.value}**" not in text] == []
    parts = [
        value.split("/")[0] for value in vars(type(LAYOUT)).values() if isinstance(value, str) and "." not in value
    ]
    assert [part for part in parts if part and part.isalpha() and part not in text] == []


def test_the_readme_shows_the_two_commands_and_the_way_to_aws() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    for needed in ("make rehearse", "make test", "docs/quick-start.md"):
        assert needed in first_screen
    makefile = (ROOT / "Makefile").read_text()
    assert {"rehearse", "test", "lint"} <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))


BEFORE_THE_SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch
model, total = torch.nn.Linear(1, 1), 40
optimizer = torch.optim.Adam(model.parameters())
def train_one_step(step):
    time.sleep(0.05)
"""


def test_the_script_of_the_contract_saves_at_sigterm_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/contract.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(BEFORE_THE_SCRIPT + script)
    progress = tmp_path / "progress.json"
    folders = {"SPOTHEAL_CHECKPOINT_DIR": str(tmp_path), "SPOTHEAL_PROGRESS_FILE": str(progress)}

    def begin() -> BaseProcess:
        return forked.script(tmp_path / "train.py", folders)

    first = begin()
    while not progress.exists() or read_progress(progress).step < 3:  # type: ignore[union-attr]
        assert first.is_alive()
        time.sleep(0.02)
    first.terminate()
    first.join(30)
    assert contract.EXIT_SAVED_AND_STOPPED == first.exitcode
    stopped = read_progress(progress)
    assert stopped is not None and stopped.saved is not None and stopped.step == stopped.saved.step < 40
    second = begin()
    second.join(60)
    assert 0 == second.exitcode
    done = read_progress(progress)
    assert done is not None and done.saved is not None and (40, 40) == (done.step, done.saved.step)


def write() -> None:
    for name, (mark, table) in GENERATED.items():
        path = ROOT / name
        start, end = f"<!-- {mark} -->\n", "<!-- end -->"
        head, _, rest = path.read_text().partition(start)
        path.write_text(head + start + table() + end + rest.partition(end)[2])


if __name__ == "__main__":
    sys.exit(write())
