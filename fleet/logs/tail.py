"""An instance's log over ssh, line by line, and why the stream ended."""

from __future__ import annotations

import subprocess
import threading
from collections import deque

from spotheal.fleet.run.ssh import Connection

# SPOTHEAL_ROOT is set on a rehearsal's machines alone. A log that only root may read is read as root.
_FOLLOW = (
    'f="${SPOTHEAL_ROOT:-}/var/log/spotheal/agent.log"; '
    'if [ -e "$f" ] && [ ! -r "$f" ]; then exec sudo -n tail -n +1 -F "$f"; fi; exec tail -n +1 -F "$f" 2>/dev/null'
)
_WAITING_MAX = 10_000  # a slow reader (a pipe into less) then makes ssh wait, and memory does not fill


class Tail:
    """Follows the log until `close`, or until the instance or the connection is gone."""

    def __init__(self, connection: Connection) -> None:
        self.instance = connection.host.instance
        self._lines: deque[str] = deque()
        self._room = threading.Semaphore(_WAITING_MAX)
        self._messages = deque[str](maxlen=5)
        self.has_spoken = False
        self._process = subprocess.Popen(
            connection.argv([_FOLLOW], ["-T", "-o", "BatchMode=yes"]),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether more lines may come."""
        return self._threads[0].is_alive() or bool(self._lines)

    @property
    def last_words(self) -> str:
        """ssh's last messages, its reason for an end among them."""
        return " ".join(self._messages)

    def lines(self) -> list[str]:
        """The lines since the last call."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
            self._room.release()
        return lines

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for _ in range(_WAITING_MAX):
            self._room.release()
        for thread in self._threads:
            thread.join(5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            if not raw.endswith(b"\n"):
                return  # cut off half-way: it comes whole from the store
            self.has_spoken = True
            self._room.acquire()
            self._lines.append(raw[:-1].decode(errors="replace"))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            self._messages.append(raw.decode(errors="replace").strip())
