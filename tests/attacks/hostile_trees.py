"""Trees that a trainer can leave in its folders: what no backup tool, and no program of root's, likes to meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def chain(top: Path, depth: int, name: str = "d") -> None:
    """`depth` folders in each other, with a file in the innermost."""
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("model.pt", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)


def _names(top: Path) -> None:
    for name in ("line\nend", "\x1b[2J", "n" * 255, os.fsdecode(b"\xff\xfe.pt"), "é" * 127, " ", "-rf", "~"):
        (top / name).write_bytes(b"x" * 2048)


def _kinds(top: Path) -> None:
    os.mkfifo(top / "pipe.pt")
    (top / "to-nowhere.pt").symlink_to("/nowhere")
    (top / "loop").symlink_to("loop")
    (top / "to-root").symlink_to("/")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
        listening.bind(f"/proc/self/fd/{here}/socket.pt")
        os.close(here)
    if os.geteuid() == 0:
        os.mknod(top / "null.pt", 0o020666, os.makedev(1, 3))
        os.mknod(top / "tape.safetensors", 0o020666, os.makedev(9, 0))


def _sparse(top: Path) -> None:
    for name in ("model.pt", "model.safetensors", "model.h5", "metrics.jsonl"):
        with open(top / name, "wb") as file:
            file.truncate(1 << 43)


def _times(top: Path) -> None:
    for number, seconds in enumerate((-(1 << 31), 0, 1 << 33)):
        (top / f"checkpoint-{number}").mkdir()
        (top / f"checkpoint-{number}/model.pt").write_bytes(b"")
        os.utime(top / f"checkpoint-{number}/model.pt", (seconds, seconds))


def _many(top: Path) -> None:
    for number in range(1000):
        (top / f"{number}.pt").touch()


def _digits(top: Path) -> None:
    """Numbers that no int() takes: CPython refuses more than 4300 digits, and a name holds 255."""
    for name in ("checkpoint-" + "9" * 240, "step-" + "1" * 245, "step-²", "checkpoint-٣"):
        (top / name).mkdir()
    (top / "step-²" / "x.pt").touch()


TREES: dict[str, Callable[[Path], None]] = {
    "names": _names,
    "kinds": _kinds,
    "sparse files": _sparse,
    "times": _times,
    "many": _many,
    "digits": _digits,
    "1100 folders deep": lambda top: chain(top, 1100),  # CPython's recursion ends at 1000
    "longer than PATH_MAX": lambda top: chain(top, 60, "n" * 120),
}
