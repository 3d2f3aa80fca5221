"""A trainer's output: read as fast as it comes, turned into lines, and handed on by another thread.

A trainer that prints must never wait for a log sink (a stalled volume would stop training), so what cannot be handed
on in time is dropped and counted. Secrets are taken out before anybody gets a line.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from spotheal.agent.protocol.foreign_text import printable
from spotheal.agent.protocol.redaction import SECRETS, Redaction

LINE_BYTES_MAX = 8192
WAITING_LINES_MAX = 2000
BAR_SECONDS = 10.0  # a progress bar that only returns the carriage is shown so often

_HELD_BYTES = 36


def readable(line: bytes) -> str:
    """`line` as text for a log."""
    return printable(line.decode("utf-8", "replace"))


class Lines:
    """Splits bytes into lines. Of a line written over and over (`\\r`) the last state counts, as on a terminal."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX, secrets: Redaction = SECRETS) -> None:
        self._max, self._secrets = line_bytes_max, secrets
        self._open = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._open = (self._open + data).split(b"\n")
        lines = [piece for line in whole for piece in self._pieces(_last_state(line))]
        if len(self._open) > self._max:
            self._open = _last_state(self._open, keep_return=True)
        if len(self._open) > self._max + self._secrets.overlap + _HELD_BYTES:
            lines += self._cut()
        return lines

    def _cut(self) -> list[str]:
        """Pieces of an unfinished line that is too long; its end is kept, for it may hold the first half of a secret,
        of a character or of an escape sequence."""
        end = len(self._open) - _HELD_BYTES
        end += min((at for at in (self._open[end:].find(b"\x1b"),) if at >= 0), default=_HELD_BYTES - 4)
        for _ in range(3):  # not between the bytes of a character
            end -= self._open[end] & 0xC0 == 0x80
        text = self._secrets.text(readable(self._open[:end]))
        until = max(0, len(text) - self._secrets.overlap) // self._max * self._max
        self._open = text[until:].encode() + self._open[end:]
        return [text[at : at + self._max] for at in range(0, until, self._max)]

    def bar(self) -> str:
        """The state of a progress bar in the unfinished line, or ""."""
        return readable(_last_state(self._open)) if b"\r" in self._open else ""

    def rest(self) -> list[str]:
        line, self._open = self._open, b""
        return self._pieces(_last_state(line)) if line else []

    def _pieces(self, line: bytes) -> list[str]:
        text = readable(line)
        if len(text) <= self._max:
            return [text]
        text = self._secrets.text(text)  # before it is cut: half a secret cannot be recognised
        return [text[at : at + self._max] for at in range(0, len(text), self._max)]


def _last_state(line: bytes, *, keep_return: bool = False) -> bytes:
    states = [state for state in line.split(b"\r") if state]
    last = states[-1] if states else b""
    return b"\r" + last if keep_return and b"\r" in line else last


class Pump:
    """Owns the reading end of a pipe and hands its lines to `on_line`, in another thread, until the pipe is closed."""

    def __init__(self, descriptor: int, on_line: Callable[[str], None]) -> None:
        self._descriptor, self._on_line = descriptor, on_line
        self._waiting: deque[str] = deque()
        self._secrets = SECRETS.stream()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._at_end = False
        self._reader = threading.Thread(target=self._read, name="trainer-output", daemon=True)
        self._sender = threading.Thread(target=self._send, name="trainer-lines", daemon=True)
        self._reader.start()
        self._sender.start()

    def close(self, seconds: float = 2.0) -> None:
        """Wait until everything is handed on, at most `seconds` for each half; then leave the rest."""
        self._reader.join(seconds)
        self._closing.set()
        self._reader.join(seconds)
        self._sender.join(seconds)

    def _read(self) -> None:
        lines, moment = Lines(), time.monotonic()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        try:
            while True:
                if not poll.poll(1000):
                    if self._closing.is_set():
                        break
                    data = None
                else:
                    data = os.read(self._descriptor, 1 << 16)
                    if not data:
                        break
                pieces = lines.feed(data) if data else []
                if not pieces and time.monotonic() - moment > BAR_SECONDS and lines.bar():
                    pieces = [lines.bar()]
                if pieces:
                    moment = time.monotonic()
                    self._offer(pieces)
        finally:
            os.close(self._descriptor)
            self._offer(lines.rest(), end=True)

    def _offer(self, lines: list[str], *, end: bool = False) -> None:
        with self._changed:
            self._waiting.extend(lines)
            while len(self._waiting) > WAITING_LINES_MAX:
                self._waiting.popleft()
                self._dropped += 1
            self._at_end = self._at_end or end
            self._changed.notify()

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._at_end:
                    self._changed.wait()
                lines, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped = 0
                last = self._at_end
            if dropped:
                self._on_line(f"({dropped} lines came faster than they could be logged and were left out)")
            for line in self._secrets.lines(lines):
                self._on_line(line)
            if last:
                return
