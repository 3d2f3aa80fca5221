"""`logs -f` over ssh: the log of the job's current instance, line by line.

If ssh fails, one message per instance says so; its lines then come from the store, up to a minute late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import Retryable, SpothealError
from spotheal.fleet.logs.logs import Line, Reader
from spotheal.fleet.logs.tail import Tail
from spotheal.fleet.run import runs, ssh
from spotheal.fleet.run.session import Session

TRIES_MAX = 4
RETRY_SECONDS, SELDOM_SECONDS = 10.0, 60.0  # at first it may be booting; later the operator may open a group


class OverSsh:
    """`logs.Live` by the user's ssh. `instance`: the only one to follow; "" for the job's current instance."""

    def __init__(
        self, session: Session, run: runs.Run, reader: Reader, clock: Clock, say: Callable[[str], None], *,
        instance: str = "", user: str = "", identity: Path | None = None,
    ) -> None:  # fmt: skip
        self._session, self._run, self._reader, self._clock, self._say = session, run, reader, clock, say
        self._chosen, self._user, self._identity = instance, user, identity
        self._tail: Tail | None = None
        self._connection: ssh.Connection | None = None
        self._tries: Counter[str] = Counter()
        self._again_at = float("-inf")

    def look(self) -> None:
        up = [host for host in ssh.hosts(self._session, self._run) if host.state == "running" and host.address]
        if self._chosen:
            up = [host for host in up if host.instance == self._chosen]
        if self._tail is not None and self._tail.instance not in {host.instance for host in up}:
            self.close()  # replaced; its last lines were stored at its notice
        if self._tail is not None and not self._tail.is_open:
            self._lost(self._tail)
        if self._tail is not None or not up or self._clock.monotonic() < self._again_at:
            return
        host = up[0]
        self._open(host)

    def instance(self) -> str:
        return self._tail.instance if self._tail is not None and self._tail.is_open and self._tail.has_spoken else ""

    def take(self) -> Iterator[Line]:
        if self._tail is not None:
            for text in self._tail.lines():
                line = self._reader.of_stream(self._tail.instance, text)
                if line is not None:
                    yield line

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
        if self._connection is not None:
            self._connection.__exit__(None, None, None)
        self._tail = self._connection = None

    def _open(self, host: ssh.Host) -> None:
        self._tries[host.instance] += 1
        pause = RETRY_SECONDS if self._tries[host.instance] < TRIES_MAX else SELDOM_SECONDS
        self._again_at = self._clock.monotonic() + pause
        first = self._tries[host.instance] == 1
        connection = ssh.Connection(
            self._session, host, self._say if first else _say_nothing, user=self._user, identity=self._identity
        )
        try:
            self._connection = connection.__enter__()
            self._reader.stream(host.instance)
            self._tail = Tail(connection)
        except (SpothealError, OSError) as error:
            self._tries[host.instance] = TRIES_MAX + 1
            reason = getattr(error, "message", error)
            self._say(f"note: no ssh to {host.instance}: {reason}; its lines come from the store, up to a minute late")
            self.close()

    def _lost(self, tail: Tail) -> None:
        """The stream ended by itself: the machine is gone, or ssh could not log in."""
        assert self._connection is not None
        if tail.has_spoken:
            self._tries[tail.instance] = 0
            self._connection.remember()
        elif self._tries[tail.instance] == TRIES_MAX:
            refusal = self._connection.refusal(tail.last_words)
            self._say(f"note: {refusal.message}; its lines come from the store, up to a minute late")
            if not isinstance(refusal, Retryable) and refusal.next_step:
                self._say(f"  next: {refusal.next_step}")
        self.close()


def _say_nothing(_: str) -> None:
    return None
