"""Who keeps a mount point busy: processes with a file, folder, program or mapping below it, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

PROC = Path("/proc")


def holders(mountpoint: str, proc: Path = PROC) -> tuple[int, ...]:
    """Process ids, ascending. Processes of other users are seen only as root."""
    real = os.path.realpath(mountpoint)
    below = real.rstrip("/") + "/"
    return tuple(sorted(pid for pid in _pids(proc) if any(f"{path}/".startswith(below) for path in _uses(proc, pid))))


def kill(pids: Iterable[int], proc: Path = PROC) -> tuple[int, ...]:
    """Send SIGKILL; returns who was sent it. Never to process 1, to us, or to those that started us."""
    spared = {0, 1, *_line_of_descent(os.getpid(), proc)}
    killed = []
    for pid in pids:
        if pid not in spared:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return tuple(killed)


def _pids(proc: Path) -> list[int]:
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def _uses(proc: Path, pid: int) -> Iterator[str]:
    base = proc / str(pid)
    links = [base / "cwd", base / "root", base / "exe"]
    with contextlib.suppress(OSError):
        links += [base / "fd" / name for name in os.listdir(base / "fd")]
    for link in links:
        with contextlib.suppress(OSError):  # it may end while we look
            yield os.readlink(link)
    with contextlib.suppress(OSError):
        for line in (base / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split(None, 5)  # address, permissions, offset, device, inode, path
            if len(words) == 6:
                yield words[5]


def _line_of_descent(pid: int, proc: Path) -> set[int]:
    line: set[int] = set()
    while pid > 1 and pid not in line:
        line.add(pid)
        try:
            stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            pid = int(stat.rpartition(")")[2].split()[1])  # a program's name may hold blanks and brackets
        except (OSError, ValueError, IndexError):
            break
    return line
