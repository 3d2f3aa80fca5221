"""docs/threat-model.md names tests that exist, one in each row, and readers find it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = (ROOT / "docs/threat-model.md").read_text("utf-8")
ROWS = [line for line in MODEL.splitlines() if line.startswith("|")][2:]


def test_every_test_that_the_threat_model_names_exists() -> None:
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", MODEL)
    assert [name for name in named if f"def {name}(" not in code] == []


def test_each_row_of_the_threat_model_names_a_test() -> None:
    assert [row for row in ROWS if "`test_" not in row.split("|")[-2]] == []
    assert len(ROWS) >= 10


def test_the_threat_model_is_found_from_the_readme_the_safety_page_and_the_security_policy() -> None:
    for page in ("README.md", "docs/safety.md", "SECURITY.md"):
        assert "threat-model.md" in (ROOT / page).read_text("utf-8"), page
