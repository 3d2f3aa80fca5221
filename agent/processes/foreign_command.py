"""Run a foreign command to its end: as the trainer's user, with a time limit, and until a stop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spotheal.agent.processes.account import Account
from spotheal.agent.processes.group import ForeignProgram
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import Interrupted

_LINES_KEPT = 400
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Finished:
    """`exit_code` is None where a signal ended it; `lines` are the last ones of its output."""

    exit_code: int | None
    lines: tuple[str, ...]
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def tail(self, count: int) -> str:
        return "\n".join(self.lines[-count:])


@dataclass(frozen=True)
class Surroundings:
    """What every foreign command of a boot shares. `stop` cuts any of them short, with `Interrupted`.

    `environment` is given to whatever a user's code runs in, beside the contract's: where the metadata service is.
    """

    account: Account | None
    clock: Clock
    stop: Stop
    environment: Mapping[str, str] = field(default_factory=dict)


def run_command(
    argv: Sequence[str],
    surroundings: Surroundings,
    *,
    directory: Path,
    environment: Mapping[str, str],
    seconds_max: float,
    on_line: Callable[[str], None] = lambda line: None,
) -> Finished:
    """Any exit status is a result. OSError where it cannot be started; what it leaves running is killed."""
    lines: deque[str] = deque(maxlen=_LINES_KEPT)

    def keep(line: str) -> None:
        lines.append(line)
        on_line(line)

    if surroundings.stop.is_set():
        raise Interrupted(f"stopped before {argv[0]}")
    changed = threading.Event()
    until = surroundings.clock.monotonic() + seconds_max
    program = ForeignProgram(
        argv,
        directory=directory,
        environment=environment,
        account=surroundings.account,
        on_line=keep,
        on_end=changed.set,
    )
    timed_out = False
    try:
        while not changed.is_set() and not surroundings.stop.is_set() and not timed_out:
            surroundings.clock.sleep(_LOOK_SECONDS, until=changed)
            timed_out = surroundings.clock.monotonic() > until and not changed.is_set()
        ended = changed.is_set()
    finally:
        program.end_all(surroundings.clock)
    if not ended and not timed_out:
        raise Interrupted(f"stopped during {argv[0]}")
    return Finished(program.exit_code, tuple(lines), timed_out)
