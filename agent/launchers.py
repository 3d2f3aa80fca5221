"""Programs that stand in front of a trainer: told by their command line, as a person would tell them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_LAUNCHERS = {"torchrun", "accelerate", "deepspeed"}
_LAUNCHER_MODULES = {
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli", "deepspeed.launcher.launch", "deepspeed.launcher.runner",
}  # fmt: skip
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_WITH_VALUE = {"-X", "-W", "--check-hash-based-pycs"}


def is_shell(argv: Sequence[str]) -> bool:
    return bool(argv) and os.path.basename(argv[0]).lstrip("-") in _SHELLS


def is_launcher(argv: Sequence[str]) -> bool:
    """Whether `argv` starts workers and watches them: torchrun, accelerate, deepspeed, by program or by `-m`."""
    kind, name = program(argv)
    return name in _LAUNCHER_MODULES if kind == "module" else os.path.basename(name) in _LAUNCHERS


def program(argv: Sequence[str]) -> tuple[str, str]:
    """What really runs: ("module", name), ("script", path) or ("program", path)."""
    if not argv:
        return "program", ""
    if not _PYTHON.fullmatch(os.path.basename(argv[0])):
        return "program", argv[0]
    words = iter(argv[1:])
    for word in words:
        if word == "-m":
            return "module", next(words, "")
        if word == "-c":
            break
        if word in _WITH_VALUE:
            next(words, "")
        elif not word.startswith("-"):
            return "script", word
    return "program", argv[0]
