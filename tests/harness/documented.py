"""The code blocks of docs/checkpoints.md and of other pages, to be run by the tests."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def blocks(page: Path = PAGE) -> dict[str, str]:
    """By heading: at most one a heading."""
    parts = re.split(r"^## (.*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = zip(parts[1::2], parts[2::2], strict=True)
    found = {heading: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for heading, text in texts}
    assert all(len(code) <= 1 for code in found.values())
    return {heading: code[0] for heading, code in found.items() if code}


def run(heading: str, names: dict[str, Any], page: Path = PAGE) -> dict[str, Any]:
    """Run that block with `names` at hand; all names afterwards."""
    # A user leaves imds=False out, as the page does: here nothing answers, and no network is asked.
    with mock.patch.dict(os.environ, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}):
        exec(compile(blocks(page)[heading], f"{page.name}: {heading}", "exec"), names)  # noqa: S102
    return names
