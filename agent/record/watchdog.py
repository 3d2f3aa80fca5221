"""Whether the agent lives: its loops move on, each within its own time. The service manager is told only while all do.

A thread that says "alive" by itself proves nothing: it goes on in an agent whose every loop hangs. So each loop beats,
and the thread here only passes on that none of them is late. An agent that is stuck before it has claimed a term is
missed by no other instance: a fleet of one has no other. The manager ends it and starts it again, and the eleventh
start that gained nothing parks the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from spotheal.agent.machine.systemd_notify import Notifier
from spotheal.agent.protocol.clock import Clock, Stop

# Polls come every two seconds and their requests end within some more: silence is a process that gets no time, or a
# thread that waits for a lock which nobody gives back.
WATCH_SECONDS_MAX = 120.0
# Five tries of a call that hangs take two minutes; a round of healing makes about ten, and may replay a journal.
HEALING_SECONDS_MAX = 20 * 60.0
HEARTBEAT_SECONDS_MAX = 20 * 60.0  # ships logs and status, with the same tries
_TELL_SECONDS_MAX = 15.0


class Liveness:
    """The loops that are expected to move on, and when each did last; safe to call from any thread.

    One for the whole process: between two lives of a sweep nothing is expected, and the manager still hears of us.
    """

    def __init__(self, clock: Clock, notifier: Notifier) -> None:
        self._clock, self._notifier = clock, notifier
        self._lock = threading.Lock()
        self._started = False
        self._status: Callable[[], str] = lambda: ""
        self._loops: dict[str, tuple[float, float]] = {}  # name -> seconds it may take, moment of its last beat

    def expect(self, loop: str, seconds_max: float) -> Callable[[], None]:
        """From now on `loop` beats, by calling what is returned, at least so often; until `release`."""
        with self._lock:
            self._loops[loop] = (seconds_max, self._clock.monotonic())
        return lambda: self._beat(loop)

    def release(self, loop: str) -> None:
        """The loop has ended, or waits for what may take any time: a user's setup commands, the end of the machine."""
        with self._lock:
            self._loops.pop(loop, None)

    def _beat(self, loop: str) -> None:
        with self._lock:
            if loop in self._loops:
                self._loops[loop] = (self._loops[loop][0], self._clock.monotonic())

    def late(self) -> dict[str, float]:
        """The loops that are late, and for how many seconds each has not moved."""
        moment = self._clock.monotonic()
        with self._lock:
            silent = {loop: (moment - beat, limit) for loop, (limit, beat) in self._loops.items()}
        return {loop: seconds for loop, (seconds, limit) in silent.items() if seconds > limit}

    def tell(self, status: str = "") -> bool:
        """Tell the manager that the agent lives, unless a loop is late: then which. Returns whether it lives."""
        late = self.late()
        if late:
            loops = ", ".join(f"{loop} for {seconds:.0f} s" for loop, seconds in sorted(late.items()))
            self._notifier.status(f"hangs: nothing has come from {loops}")
            return False
        self._notifier.alive()
        if status:
            self._notifier.status(status)
        return True

    def start(self, status: Callable[[], str]) -> None:
        """The agent is up: tell the manager from now on, in a thread of its own, until the process ends."""
        self._status = status
        if self._notifier.is_there and not self._started:
            self._started = True
            forever = threading.Event()
            work = threading.Thread(target=lambda: self.watch(forever, lambda: self._status()), daemon=True)
            work.name = "liveness"
            work.start()

    def watch(self, stop: Stop, status: Callable[[], str] = lambda: "") -> None:
        """A thread's work: tell the manager, several times in each span that it watches. Ends where none does."""
        span = self._notifier.watchdog_seconds
        self._notifier.ready(status())
        if span is None:
            return
        while not self._clock.sleep(min(_TELL_SECONDS_MAX, span / 4), until=stop):
            self.tell(status())
