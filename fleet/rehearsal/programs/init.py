"""The first process of a rehearsed machine: runs the user data, adopts every orphan, and ends them all.

    init.py FOLDER < PIPE

FOLDER holds user-data.sh; console.log, user-data.exit and init.pid are written there. The machine's power is the pipe:
`stop` on it asks the agent to end (as an operating system's shutdown does), end of file cuts the power, so that no
process outlives the rehearsal, however that ends. Linux only (PR_SET_CHILD_SUBREAPER, /proc).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    folder = sys.argv[1]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.stderr.write("init: this kernel lets no process adopt orphans\n")
        return 1
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # Ctrl-C is the rehearsal's, which cuts the power
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPWR, lambda *_: None)
    with open(os.path.join(folder, "init.pid"), "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    first = spawn(os.path.join(folder, "user-data.sh"), os.path.join(folder, "console.log"))
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable and signal.SIGPWR in os.read(woken, 4096):
            break
        reap(first, folder)
        if 0 in readable:
            order = os.read(0, 4096)
            if not order:
                break
            if b"stop" in order:
                stop_agents()
    end_all(first, folder)
    return 0


def spawn(program: str, console: str) -> int:
    """The user data, as cloud-init runs it: executed, both outputs on the console, nothing to read."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for reset in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(reset, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        out = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.closerange(3, 256)
        os.execv(program, [program])
    except OSError as error:
        os.write(2, f"user data could not be run: {error}\n".encode())
    os._exit(127)


def reap(first: int, folder: str) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == first:
            with open(os.path.join(folder, "user-data.exit"), "w", encoding="ascii") as file:
                file.write(str(os.waitstatus_to_exitcode(status)))


def stop_agents() -> None:
    """SIGTERM to the agent's keeper alone, as a service manager with KillMode=mixed does: the rest is its to end."""
    pids = descendants(os.getpid())
    for pid in [pid for pid in pids if keeps_agent(pid)] or pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def keeps_agent(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.path.basename(word) for word in file.read().split(b"\0")]
    except OSError:
        return False
    return b"bootstrap.py" in words and b"keep" in words


def end_all(first: int, folder: str) -> None:
    """No process of the machine is left afterwards: each round's orphans come back here and are ended in the next."""
    while True:
        pids = descendants(os.getpid())
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap(first, folder)
        if not pids:
            return
        select.select([], [], [], 0.01)


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    pids: list[int] = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), []):
            pids.append(child)
            queue.append(child)
    return pids


if __name__ == "__main__":
    sys.exit(main())
