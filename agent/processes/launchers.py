"""Programs that stand in front of a trainer: told by their command line, as a person would tell them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

RANKS_MODULE = "spotheal.training.launch"  # our own, in front of torchrun
_LAUNCHERS = {
    "torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "orterun", "prterun", "srun", "fabric",
}  # fmt: skip
_LAUNCHER_MODULES = {
    RANKS_MODULE, "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli", "deepspeed.launcher.launch", "deepspeed.launcher.runner",
    "horovod.runner.launch", "lightning.fabric.cli",
}  # fmt: skip
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
# What runs the command behind its own options: which of the words that is, is not worth knowing exactly.
_PREFIXES = {
    "env", "nice", "nohup", "time", "timeout", "stdbuf", "setsid", "ionice", "taskset", "numactl", "chrt", "unbuffer",
    "uv", "uvx", "poetry", "pipenv", "pdm", "hatch", "conda", "mamba", "micromamba", "pixi", "make", "nsys", "ncu",
}  # fmt: skip
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_WITH_VALUE = {"-X", "-W", "--check-hash-based-pycs"}
_SCRIPT_BYTES_MAX = 1 << 20
_WORD = re.compile(r"[^\s;&|()'\"`$<>]+")
_COUNT = re.compile(r"--?(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|n|np)(?:=(.*))?")


def is_shell(argv: Sequence[str]) -> bool:
    return bool(argv) and os.path.basename(argv[0]).lstrip("-") in _SHELLS


def is_launcher(argv: Sequence[str]) -> bool:
    """Whether `argv` starts workers and watches them: torchrun, accelerate, deepspeed, by program or by `-m`."""
    kind, name = program(argv)
    return name in _LAUNCHER_MODULES if kind == "module" else os.path.basename(name) in _LAUNCHERS


def launches(argv: Sequence[str], directory: Path) -> bool:
    """Whether the ranks are started by the command itself, also behind `env`, `uv run` or in a shell script of its own.

    A shell script is read (in `directory`); one that names a launcher anywhere counts, comments left out. What a Python
    program starts by itself is not seen.
    """
    if is_launcher(argv):
        return True
    if is_shell(argv):
        return any(_names_launcher(text) for text in _shell_texts(argv, directory))
    if argv and os.path.basename(argv[0]) in _PREFIXES:
        rest = argv[1:]
        return any(launches(rest[at:], directory) for at in range(len(rest)) if not rest[at].startswith("-"))
    text = _script(argv[0], directory) if argv else ""
    return text.startswith("#!") and "python" not in text.partition("\n")[0] and _names_launcher(text)


def processes_asked(argv: Sequence[str]) -> str | None:
    """What a launcher's own command says of the processes a machine: "4", "gpu"; None where it says nothing."""
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        match = _COUNT.fullmatch(word)
        if match:
            return match[1] if match[1] is not None else after
    return None


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


def _shell_texts(argv: Sequence[str], directory: Path) -> list[str]:
    """The command after `-c`, or the script: the first word that is no option."""
    for at, word in enumerate(argv[1:], 1):
        if word.startswith("-"):
            if not word.startswith("--") and "c" in word:
                return list(argv[at + 1 : at + 2])
            continue
        return [_script(word, directory)]
    return []


def _script(word: str, directory: Path) -> str:
    """The trainer chooses the path and root reads it: a file of the kernel (/proc/kmsg, trace_pipe) is regular, has no
    size, and would be waited for without end."""
    try:
        descriptor = os.open(directory / word, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and 0 < status.st_size <= _SCRIPT_BYTES_MAX:
                return file.read(_SCRIPT_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return ""


def _names_launcher(text: str) -> bool:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    words = [word for line in lines for word in _WORD.findall(line)]
    return any(os.path.basename(word) in _LAUNCHERS or word in _LAUNCHER_MODULES for word in words)
