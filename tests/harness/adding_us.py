"""The diffs that add us to a script: made of tests/scripts, shown on three pages.

`python tests/project/test_docs.py` writes them anew.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/scripts"
PAGES = [ROOT / "README.md", ROOT / "docs/contract.md", ROOT / "docs/checkpoints.md"]
KINDS = {
    "plain": "PyTorch",
    "transforms": "PyTorch, with random transforms in workers",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "transformers": "Hugging Face Trainer",
    "keras": "Keras 3",
}


def section() -> str:
    """The first diff open, the others folded, so that the README stays short."""
    first, *others = KINDS
    parts = [block(first)]
    for kind in others:
        parts.append(f"<details><summary>{KINDS[kind]}</summary>\n\n{block(kind)}\n</details>\n")
    return "\n" + "\n".join(parts) + "\n"


def block(kind: str) -> str:
    return f"```diff\n{diff(kind)}```\n"


def diff(kind: str) -> str:
    """As git has it, of a file train.py."""
    names = [f"tests/scripts/train_{kind}.py", f"tests/scripts/resumed/train_{kind}.py"]
    command = ["git", "diff", "--no-index", "--unified=1", "--no-color", "--no-ext-diff", *names]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    hunks = re.sub(r"^(@@ .* @@).*", r"\1", made[made.index("@@") :], flags=re.MULTILINE)
    return f"--- a/train.py\n+++ b/train.py\n{hunks}"


def on_page(page: Path) -> dict[str, str]:
    """Its diffs by kind."""
    return dict(zip(KINDS, re.findall(r"```diff\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), strict=True))
