"""The file of the repository that a command runs. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

_RUNNERS = re.compile(r"python[0-9.]*|torchrun|accelerate|deepspeed|bash|sh")
_NOT_A_FILE = {"-m", "--module", "-c"}  # the next word is a module or a program's text


def script_of(command: Sequence[str]) -> str:
    """The script's path in the folder in which the command runs; "" if it is not certain."""
    if not command:
        return ""
    if command[0].startswith("./"):
        return command[0]
    if not _RUNNERS.fullmatch(posixpath.basename(command[0])):
        return ""
    for word in command[1:]:
        if word in _NOT_A_FILE:
            return ""
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            is_inside = not word.startswith(("/", "~")) and ".." not in word.split("/") and "$" not in word
            return word if is_inside else ""
    return ""
