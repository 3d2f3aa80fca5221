"""Where log lines go: plain lines for people, JSON lines for machines, and copies that outlive the instance.

    <root>/var/log/spotheal/agent.log        plain lines, agent and trainer (`tail -f` over SSH)
    <mount>/logs/<instance>.jsonl            JSON lines, on the volume while it is mounted
    the journal                              JSON lines, agent; any other standard error gets plain ones
    the machine's console                    plain lines, agent: what AWS still shows when the machine is gone
    <store>/logs/<instance>/agent.0000.jsonl JSON lines, agent; shipped every minute and at a notice
    <store>/logs/<instance>/trainer.0000.log the trainer's own output, as it wrote it

Every line carries job, run, instance, zone, term and attempt, and none carries a secret (`redaction`). A sink that
fails (disk full, volume gone) loses its lines and never stops the agent. None grows without end: files turn over, and
what the store does not take in time is left out there, which it says.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

import structlog

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.foreign_text import printable, printable_lines
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.protocol.redaction import SECRETS

FIELDS = ("job", "run", "instance", "zone", "term", "attempt")
SEGMENT_BYTES = 4 << 20  # a shipped object is put whole again at each shipment, so it must stay small
SEGMENTS_HELD_MAX = 8  # of each log, in memory: a trainer that printed a gigabyte took the agent's memory to that
FILE_BYTES_MAX = 64 << 20  # then a file begins anew and `.1` is the one before: a full volume takes no checkpoint


class Logs:
    """The process's sinks. `log` is the structlog logger of the agent; `trainer_line` takes the trainer's output."""

    def __init__(self, folder: Path, *, stderr: IO[str] | None = None, console: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._stderr = stderr or sys.stderr
        self._journal = is_journal(self._stderr)
        self._console = console if self._journal else None
        self._plain = _Sink(folder / "agent.log")
        self._agent = _Shipped(folder / "agent.jsonl")
        self._trainer = _Shipped(folder / "trainer.log")
        self._volume: _Sink | None = None
        self._lock = threading.Lock()
        self._shipping = threading.Lock()  # two at once would number the segments anew, one over the other
        self._context: dict[str, Any] = dict.fromkeys(FIELDS)
        structlog.configure(
            processors=[
                self._add_context,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                self._write,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(0),
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        self.log: Any = structlog.get_logger()

    def anew(self) -> Logs:
        """The same sinks for another run on this machine: its copies in the store begin at nothing."""
        logs = Logs(self._folder, stderr=self._stderr, console=self._console)
        logs.bind(**self._context)
        return logs

    def bind(self, **fields: Any) -> None:
        """Set fields that every later line carries, from whichever thread it comes."""
        with self._lock:
            self._context.update(fields)

    def trainer_line(self, line: str) -> None:
        """One line of the trainer's output, without its line end and without secrets (`output.Pump` takes them out)."""
        with self._lock:
            context = dict(self._context)
            plain = printable(line)
            self._trainer.write(plain + "\n")
            self._plain.write(f"trainer | {plain}\n")
            if self._volume is not None:
                self._volume.write(json.dumps({**context, "source": "trainer", "event": line}) + "\n")
            if self._stderr.isatty():
                _say(self._stderr, f"trainer | {plain}\n")

    def use_volume(self, folder: Path, instance: str) -> None:
        """Write JSON lines to `<folder>/<instance>.jsonl` too, from now on."""
        with self._lock:
            self._volume = _Sink(folder / f"{instance}.jsonl")

    def leave_volume(self) -> None:
        """Close the file on the volume, so that it can be unmounted."""
        with self._lock:
            if self._volume is not None:
                self._volume.close()
            self._volume = None

    def ship(self, store: Store, instance: str) -> bool:
        """Copy what is new to the store; False where it could not be reached (the next call tries again)."""
        with self._shipping:
            return self._ship(store, instance)

    def _ship(self, store: Store, instance: str) -> bool:
        with self._lock:
            pieces = [
                (LAYOUT.agent_log, self._agent.unshipped()),
                (LAYOUT.trainer_log, self._trainer.unshipped()),
            ]
        try:
            for name, piece in pieces:
                for number, body in piece:
                    store.put_bytes(name(instance, number), body, "text/plain; charset=utf-8")
        except SpothealError:
            return False
        with self._lock:
            self._agent.mark(pieces[0][1])
            self._trainer.mark(pieces[1][1])
        return True

    # ------------------------------------------------------------------------------------------- structlog processors
    def _add_context(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        with self._lock:
            return {**self._context, **event}

    def _write(self, _: Any, __: str, event: MutableMapping[str, Any]) -> str:
        safe: dict[str, Any] = SECRETS.tree(json.loads(json.dumps(event, default=str)))  # what is written, last of all
        as_json = json.dumps(safe) + "\n"
        as_text = _plain_line(safe) + "\n"
        with self._lock:
            self._plain.write(as_text)
            self._agent.write(as_json)
            if self._volume is not None:
                self._volume.write(as_json)
            _say(self._stderr, as_json if self._journal else as_text)
        if self._console is not None:
            _show(self._console, as_text)
        return ""


def _plain_line(event: Mapping[str, Any]) -> str:
    """`2026-11-21 08:00:00 info  attached the volume  volume=vol-0a device=/dev/sdf`.

    A field's text may be a trainer's: a file name with line ends forged records and the console's host keys.
    """
    hidden = {"timestamp", "level", "event", *FIELDS}
    time = str(event.get("timestamp", ""))[:19].replace("T", " ")
    fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in hidden and value is not None)
    text = f"{time} {event.get('level', '')!s:<7} {event.get('event', '')}"
    return printable_lines(f"{text}  {fields}" if fields else text)


def is_journal(stream: IO[str]) -> bool:
    """Whether systemd has connected `stream` with its journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _show(console: Path, text: str) -> None:
    """A serial line takes 10 kB a second, and nobody may read it: what it does not take at once is lost there."""
    try:
        descriptor = os.open(console, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)
    except OSError:
        return


def _say(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return  # a console that is gone must not end a training run


def _own_file(path: Path) -> int:
    """The folder on the volume is the trainer's too: a link of its is not followed, a pipe not waited for. OSError if
    the file has a second name, which may be one of root's."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), str(path))
    return descriptor


class _Sink:
    """A file opened for appending that forgives a full or vanished disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._size = 0
        self._open()

    def write(self, text: str) -> None:
        if self._file is None:
            return
        _say(self._file, text)
        self._size += len(text)
        if self._size > FILE_BYTES_MAX:
            self._turn_over()

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _own_file(self._path)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="replace", buffering=1)
            self._size = os.fstat(descriptor).st_size
        except OSError as error:
            _say(sys.stderr, f"spotheal: log file {self._path} cannot be opened: {error}\n")

    def _turn_over(self) -> None:
        self._size = 0  # where it fails, not tried at each line
        try:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        except OSError:
            return
        self.close()
        self._open()

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                return  # what was buffered is lost with the disk; there is no one to tell
            finally:
                self._file = None


class _Shipped(_Sink):
    """A sink of which the store gets a copy, in segments of `SEGMENT_BYTES`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._segments: list[bytearray] = [bytearray()]
        self._first = 0  # number of the oldest segment still held
        self._shipped = -1  # length of that segment in the store

    def write(self, text: str) -> None:
        super().write(text)
        if len(self._segments[-1]) >= SEGMENT_BYTES:
            self._segments.append(bytearray())
            if len(self._segments) > SEGMENTS_HELD_MAX:
                self._leave_out_oldest()
        self._segments[-1] += text.encode("utf-8", "replace")

    def _leave_out_oldest(self) -> None:
        missing = len(self._segments.pop(0)) - max(0, self._shipped)
        message = (
            f"({missing} bytes are missing some segments before this: they came faster than the store took them)\n"
        )
        self._segments[-1] += message.encode()
        self._first, self._shipped = self._first + 1, -1

    def unshipped(self) -> list[tuple[int, bytes]]:
        """(segment number, content) of everything that is not in the store."""
        if len(self._segments) == 1 and len(self._segments[0]) == self._shipped:
            return []
        return [(self._first + offset, bytes(body)) for offset, body in enumerate(self._segments)]

    def mark(self, shipped: list[tuple[int, bytes]]) -> None:
        """These are in the store now: only the newest segment is still held."""
        if not shipped:
            return
        number, body = shipped[-1]
        if number < self._first:
            return  # left out meanwhile
        del self._segments[: number - self._first]
        self._first, self._shipped = number, len(body)
