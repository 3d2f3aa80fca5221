"""Answers the system calls that the cage refuses, and tells the first of each kind.

The kernel hands a refused call to us and the program waits for the errno. The answers are bounded: a program that makes
refused calls without end would keep the agent from its work. After that, and when the agent ends, the kernel itself
answers with ENOSYS.
Source: seccomp_unotify(2); linux/seccomp.h.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from spotheal.agent.processes.output import readable
from spotheal.agent.processes.system_calls import Call, Machine, build, describe, evaluate

ANSWERS_MAX = 1000
TOLD_MAX = 20
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, then struct seccomp_data
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags


class Refusals:
    """Answers at `listener`, which is closed at the end, from a thread of its own. `tell(program, call)`: which program
    made the first call of a kind, in words."""

    def __init__(self, listener: int, machine: Machine, tell: Callable[[str, str], None]) -> None:
        self._listener, self._machine, self._tell = listener, machine, tell
        self._errnos = build(machine)
        self._told: set[str] = set()
        self._ending, self._end = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="cage-refusals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more answers."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ending)

    def _serve(self) -> None:
        looks = select.poll()
        looks.register(self._listener, select.POLLIN)
        looks.register(self._ending, 0)
        try:
            for _ in range(ANSWERS_MAX):
                ready = dict(looks.poll())
                if self._ending in ready or not ready[self._listener] & select.POLLIN:  # no program is left
                    break
                self._answer()
        finally:
            os.close(self._listener)

    def _answer(self) -> None:
        notification = bytearray(_NOTIFICATION.size)
        with contextlib.suppress(OSError):  # it has ended meanwhile, or a signal came and it makes the call again
            fcntl.ioctl(self._listener, _RECEIVE, notification)
            identity, pid, _, number, architecture, _, *arguments = _NOTIFICATION.unpack(notification)
            call = Call(number, architecture, tuple(arguments))
            program, refusal = _name(pid), evaluate(self._errnos, call)
            fcntl.ioctl(self._listener, _SEND, bytearray(_ANSWER.pack(identity, 0, -refusal, 0)))
            self._tell_first(program, describe(self._machine, call))

    def _tell_first(self, program: str, call: str) -> None:
        if call not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(call)
            self._tell(program, call)


def _name(pid: int) -> str:
    """Of the thread; a program chooses it itself."""
    try:
        return readable(Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n"))
    except OSError:
        return "?"
