"""A foreign program with everything it starts: in a session of its own, told by signal, and ended without a rest.

A process group alone is not enough: torchrun gives each worker a session of its own, and daemons leave theirs. So
orphans are made to come to us (PR_SET_CHILD_SUBREAPER, Linux) and are found by descent, session and environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spotheal.agent.processes.account import Account
from spotheal.agent.processes.launchers import is_launcher, is_shell
from spotheal.agent.processes.output import Pump
from spotheal.agent.processes.refusals import Refusals
from spotheal.agent.processes.sandbox import PROGRAM as LAUNCHER
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import SetupFailed

_PR_SET_CHILD_SUBREAPER = 36
# Tells the agent's own programs (lsblk, mount, …) from orphans that came to us: a trainer never gets this variable.
_AGENT = "SPOTHEAL_AGENT_PID"
_UMASK = 0o022
# The programs that run now: each is a child of ours that no other may take for an orphan of its own. The lock makes
# starting and registering one step for whoever reads the process table.
_RUNNING: set[int] = set()
_RUNNING_LOCK = threading.Lock()
# No process has this user. The killer keeps it as its real and saved user, so that the trainer's processes may not
# signal it: one that waited for it stopped it before it killed, and outlived the cage. Source: kill(2), "NOTES".
_NO_USER = 2**32 - 3
_KILL_ALL = (
    "import os, sys\n"
    "user, no_user = map(int, sys.argv[1:])\n"
    "os.setgroups([])\n"
    "os.setresgid(no_user, no_user, no_user)\n"
    "os.setresuid(no_user, user, no_user)\n"
    "if os.getresuid() == (no_user, user, no_user) and user != 0:\n"
    "    os.kill(-1, 9)\n"
)
_Started = tuple[subprocess.Popen[bytes], int | None]  # and the descriptor where refused calls of a cage are answered
_RESTORED_BY_PYTHON = {int(signal.SIGPIPE), int(signal.SIGXFSZ)}


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int  # ticks since boot: with the pid the identity of a process

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def processes() -> dict[int, Process]:
    """The process table, from /proc; processes that end meanwhile are left out."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_bytes()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold anything
        table[int(entry)] = Process(
            int(entry), int(fields[1]), int(fields[2]), int(fields[3]), fields[0].decode(), int(fields[19])
        )
    return table


def descendants(table: Mapping[int, Process], roots: set[int]) -> set[int]:
    """`roots` and all that descend from them."""
    pids, fresh = set(roots), set(roots)
    while fresh:
        fresh = {process.pid for process in table.values() if process.parent in fresh} - pids
        pids |= fresh
    return pids


def carrying(variable: str, value: str) -> set[int]:
    """Processes that were started with `variable=value` in their environment; ourselves left out."""
    pattern = f"{variable}={value}".encode()
    pids = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and pattern in _environment(int(entry)):
            pids.add(int(entry))
    return pids


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for signal `number` (SigCgt); False where it cannot be known."""
    return bool(_signal_sets(pid).get("SigCgt", 0) >> (number - 1) & 1)


def command_line(pid: int) -> tuple[str, ...]:
    try:
        return tuple(os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1])
    except OSError:
        return ()


def adopt_orphans() -> bool:
    """Make orphans below this process its children (Linux); False where the system knows no such thing."""
    os.environ[_AGENT] = str(os.getpid())
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    return prctl is not None and prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def send(pid: int, number: int) -> bool:
    """Send a signal; False where the process is gone. Never to ourselves, nor to all (0, -1)."""
    if pid <= 1 or pid == os.getpid():
        return False
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class ForeignProgram:
    """A program that runs from construction on, as `account`, with its output handed to `on_line`.

    `ended` is set when its main process has ended; that stays a zombie until `end_all`, so that its number cannot
    become another's meanwhile. Raises OSError where it cannot be started. `mark` is a variable of `environment` whose
    value no other program on this machine has: it finds what hides.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        account: Account | None,
        on_line: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
        mark: str = "",
    ) -> None:
        adopt_orphans()
        self._on_end, self._mark = on_end, (mark, environment[mark]) if mark else None
        # All of the account's processes are the trainer's own; a `git` beside others of the same account is not alone.
        self._cage = account if mark and account is not None and account.sandbox is not None else None
        self._before = {(child.pid, child.started) for child in processes().values() if child.parent == os.getpid()}
        self._told: set[tuple[int, int]] = set()
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.ended = threading.Event()
        reading, writing = os.pipe()
        try:
            with _RUNNING_LOCK:
                self._popen, listener = _start(argv, directory, environment, account, writing)
                _RUNNING.add(self._popen.pid)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.pid = self._popen.pid
        self._pump = Pump(reading, on_line)
        self._refusals = _refusals(listener, account)
        threading.Thread(target=self._wait, name="trainer-end", daemon=True).start()

    # ------------------------------------------------------------------------------------------------------- looking
    def family(self) -> list[Process]:
        """All living processes of this program, wherever they went; the main one first."""
        with _RUNNING_LOCK:
            table, other_programs = processes(), _RUNNING - {self.pid}
        roots = {self.pid} | {p.pid for p in table.values() if self.pid in (p.session, p.group)}
        if self._mark is not None or not other_programs:  # beside others, whose an orphan is cannot be told
            session = os.getsid(0)
            roots |= {p.pid for p in table.values() if p.pid not in other_programs and self._is_orphan(p, session)}
        if self._mark is not None:
            roots |= carrying(*self._mark)
        if self._cage is not None:
            roots |= owned_by(self._cage.uid)
        relatives = (table[pid] for pid in descendants(table, roots) if pid in table and pid != os.getpid())
        return sorted((p for p in relatives if p.alive), key=lambda p: p.pid != self.pid)

    def own_group(self) -> list[Process]:
        """Living processes of the main process's own group."""
        return [process for process in processes().values() if process.group == self.pid and process.alive]

    def addressees(self) -> list[int]:
        """Whom a signal is meant for: the main process, or, below a launcher or a shell, what it has started.

        torchrun kills its workers 30 s after it is told, and a shell dies at once and leaves its child untold; so
        these are left alone and their children told. A shell with a trap wants to be told itself.
        """
        table = processes()
        return sorted(self._below(table, self.pid))

    def _below(self, table: Mapping[int, Process], pid: int) -> set[int]:
        line = command_line(pid)
        if not is_launcher(line) and not (is_shell(line) and not handles(pid, signal.SIGTERM)):
            return {pid}
        children = [p.pid for p in table.values() if p.parent == pid and p.alive]
        return set().union(*(self._below(table, child) for child in children)) or {pid}

    def _is_orphan(self, process: Process, own_session: int) -> bool:
        if process.parent != os.getpid() or process.session == own_session:
            return False
        if (process.pid, process.started) in self._before:
            return False
        if command_line(process.pid) in ((), command_line(os.getpid())):
            return False  # a fork of ours that is about to become another program
        return f"{_AGENT}={os.getpid()}".encode() not in _environment(process.pid)

    # ------------------------------------------------------------------------------------------------------- telling
    def tell(self, number: int) -> list[int]:
        """Send a signal to the addressees and return them."""
        addressed = [process for process in self._addressed() if send(process.pid, number)]
        self._told |= {(process.pid, process.started) for process in addressed}
        return [process.pid for process in addressed]

    def tell_handlers(self, number: int) -> list[int]:
        """Send a signal to those addressees that have a handler for it, and return them."""
        return [p.pid for p in self._addressed() if handles(p.pid, number) and send(p.pid, number)]

    def tell_restarted(self, number: int) -> list[int]:
        """Send a signal to workers that a launcher has started since `tell`; never to the launcher itself.

        One without workers is about to end with what they returned.
        """
        if not any(is_launcher(command_line(process.pid)) for process in self.own_group()):
            return []
        fresh = [p for p in self._addressed() if (p.pid, p.started) not in self._told]
        addressed = [p for p in fresh if not is_launcher(command_line(p.pid)) and send(p.pid, number)]
        self._told |= {(process.pid, process.started) for process in addressed}
        return [process.pid for process in addressed]

    def _addressed(self) -> list[Process]:
        table = processes()
        return [table[pid] for pid in self.addressees() if pid in table and table[pid].alive]

    def tell_group(self, number: int) -> list[int]:
        """Send a signal to every living process of the main process's group."""
        return [process.pid for process in self.own_group() if send(process.pid, number)]

    # -------------------------------------------------------------------------------------------------------- ending
    def end_all(self, clock: Clock, seconds: float = 5.0) -> list[int]:
        """Kill all that is left, wait until it is gone, at most `seconds`; returns what cannot be killed (disk sleep).

        Looks again after each round: what forks while it is killed is found the next time.
        """
        until, pause = clock.monotonic() + seconds, 0.01
        killed: set[tuple[int, int]] = set()
        if self._cage is not None:
            killed |= {(process.pid, process.started) for process in self.family()}
            end_all_of(self._cage, clock, seconds)
        while survivors := self.family():
            for process in survivors:
                send(process.pid, signal.SIGKILL)
                killed.add((process.pid, process.started))
            if clock.monotonic() > until:
                break
            clock.sleep(pause)
            pause = min(0.2, pause * 2)
        self._bury(killed)
        if not survivors:
            self.ended.wait(seconds)
            self._popen.poll()
        with _RUNNING_LOCK:
            _RUNNING.discard(self.pid)
        self._pump.close(0.2 if survivors else 2.0)
        refusals, self._refusals = self._refusals, None
        if refusals is not None:
            refusals.close()
        return [process.pid for process in survivors]

    def _bury(self, killed: set[tuple[int, int]]) -> None:
        """Reap those of `killed` that have come to us as orphans; nobody else knows of them."""
        for process in processes().values():
            mine = process.parent == os.getpid() and process.pid != self.pid
            if mine and not process.alive and (process.pid, process.started) in killed:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _wait(self) -> None:
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped by somebody else: the code is lost, the end is not
            end = None
        if end is not None and end.si_code == os.CLD_EXITED:
            self.exit_code = end.si_status
        elif end is not None:
            self.signal = end.si_status
        self.ended.set()
        self._on_end()


def end_leftovers(variable: str, value: str, clock: Clock, seconds: float = 5.0) -> list[int]:
    """Kill what an agent that was killed itself left running: two trainers must never share a checkpoint folder."""
    until, ended = clock.monotonic() + seconds, set[int]()
    while True:
        table = processes()
        survivors = {pid for pid in descendants(table, carrying(variable, value)) if pid in table and table[pid].alive}
        survivors -= {os.getpid()}
        if not survivors or clock.monotonic() > until:
            return sorted(ended)
        ended |= {pid for pid in survivors if send(pid, signal.SIGKILL)}
        clock.sleep(0.05)


def end_all_of(account: Account, clock: Clock, seconds: float = 5.0) -> list[int]:
    """Kill every process of a cage's account, wherever it went; returns what cannot be killed (disk sleep).

    The kernel kills them all at one moment (`kill(-1)` as that user), which no fork can outrun; then we look again.
    """
    if account.sandbox is None or account.uid == 0:  # another account's processes may be a person's
        return []
    until = clock.monotonic() + seconds
    while survivors := owned_by(account.uid):
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _KILL_ALL, str(account.uid), str(_NO_USER)],
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=seconds,
            )
        except (OSError, subprocess.TimeoutExpired):  # a fork bomb leaves no process to be had: then one by one
            for pid in survivors:
                send(pid, signal.SIGKILL)
        if clock.monotonic() > until:
            break
        clock.sleep(0.02)
    return sorted(survivors)


def owned_by(uid: int) -> set[int]:
    """Living processes whose real or effective user is `uid`; by `status`, as /proc/PID itself may seem root's."""
    pids = set()
    for process in processes().values():
        if process.alive:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text(errors="replace")
            except OSError:
                continue
            users = next((row.split()[1:3] for row in status.splitlines() if row.startswith("Uid:")), [])
            if str(uid) in users:
                pids.add(process.pid)
    return pids


def _start(
    argv: Sequence[str], directory: Path, environment: Mapping[str, str], account: Account | None, output: int
) -> _Started:
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the child inherits this thread's
    try:
        if _ignored() or account is not None:
            return _start_by_launcher(argv, directory, environment, account, output)
        return _popen(argv, directory, environment, output), None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _popen(
    argv: Sequence[str], directory: Path, environment: Mapping[str, str], output: int, **options: Any
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv),
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        restore_signals=True,
        umask=_UMASK,
        **options,
    )


def _start_by_launcher(
    argv: Sequence[str], directory: Path, environment: Mapping[str, str], account: Account | None, output: int
) -> _Started:
    """By way of `cage_exec`: ignored signals stay ignored over exec (SIGINT and SIGQUIT of a background job, SIGHUP
    under nohup), and a trainer with an ignored SIGINT is not the trainer its author tried out. Only the process itself
    can undo that, and only it can enter a sandbox; code between fork and exec (preexec_fn) is not safe beside threads.
    """
    sandbox = account.sandbox if account is not None else None
    orders = {
        "user": account.as_user() if account is not None else None,
        "environment": dict(environment),
        "directory": str(directory),
        "sandbox": sandbox.to_orders() if sandbox is not None else None,
    }
    channel, to_us = socket.socketpair()
    with channel, _in_memory() as description:
        with to_us:
            json.dump(orders, description)
            description.seek(0)
            command = [sys.executable, "-I", "-S", str(LAUNCHER), str(description.fileno()), str(to_us.fileno()), *argv]
            popen = _popen(command, Path("/"), {}, output, pass_fds=[description.fileno(), to_us.fileno()])
        message, listener = _heard(channel)
    if not message:
        return popen, listener
    if listener is not None:
        os.close(listener)
    popen.wait()
    fault = json.loads(message)
    if fault["errno"]:
        raise OSError(fault["errno"], fault["text"], argv[0])
    raise SetupFailed(
        f"the trainer's cage could not be made on this machine: {fault['text']}",
        next_step='report it with the image\'s name; `[cage] mode = "off"` runs the trainer without a cage',
    )


def _heard(channel: socket.socket) -> tuple[bytes, int | None]:
    """Until the exec, which closes the other end: why there was none, and where refused calls are answered."""
    message, listener = b"", None
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 4096, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        if descriptors:
            (listener,) = descriptors
        if not data:
            return message.strip(), listener
        message += data


def _refusals(listener: int | None, account: Account | None) -> Refusals | None:
    sandbox = account.sandbox if account is not None else None
    if listener is None or sandbox is None or sandbox.machine is None:
        return None
    return Refusals(listener, sandbox.machine, sandbox.tell)


def _in_memory() -> IO[str]:
    """A file that never touches a disk, for it holds secrets."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("spotheal"), "w+", encoding="utf-8")
    return tempfile.TemporaryFile("w+", encoding="utf-8")


def _ignored() -> set[int]:
    """The signals this process ignores and a program started by it would ignore too."""
    ignored = _signal_sets(os.getpid()).get("SigIgn", 0)
    return {int(n) for n in signal.valid_signals() if ignored >> (n - 1) & 1} - _RESTORED_BY_PYTHON


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _signal_sets(pid: int) -> dict[str, int]:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    rows = (row.partition(":") for row in status.splitlines())
    return {name: int(value, 16) for name, _, value in rows if name in ("SigCgt", "SigIgn", "SigBlk")}
