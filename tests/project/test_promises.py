"""docs/promises.md says what proves each promise: those tests exist, and no fault is without one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
FAULTS = (*range(1, 12), *range(16, 22), 25, 26)


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named if (ROOT / file).is_file()}
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in texts.get(file, "")]
    assert [] == missing


def test_every_fault_has_a_block_with_a_test() -> None:
    blocks = {int(match[1]): match[0] for match in re.finditer(r"^### (\d+)\. .*\n(?:(?!#).*\n)*", PAGE, re.MULTILINE)}
    assert list(FAULTS) == sorted(blocks)
    assert [] == [number for number, block in blocks.items() if "::test_" not in block]
