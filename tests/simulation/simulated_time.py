"""Virtual time with many actors: each is a thread, only one runs at a time, and time passes only while all sleep.

The order is fixed by wake-up times and the order of going to sleep, so a history is repeated by its seed.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

BEGIN = datetime(2026, 11, 21, 8, 0, tzinfo=timezone.utc)


class Ended(BaseException):
    """Raised inside an actor whose machine or process is gone: no `except Exception` may stop it."""


class Actor:
    def __init__(self, time: Time, name: str, do: Callable[[], None]) -> None:
        self.name, self.ended, self.fault = name, False, None
        self._time, self._do = time, do
        self._go = threading.Semaphore(0)
        self._kill: type[BaseException] | None = None
        self.wake = 0  # number of the entry in the agenda that counts
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self._kill is None:
                self._do()
        except Ended:
            pass
        except BaseException as fault:  # noqa: BLE001 - it is raised again by the scheduler
            self.fault = fault
        self.ended = True
        self._time.back.release()

    def switch(self) -> None:
        """From the scheduler: let it run until it sleeps or ends."""
        self._go.release()
        self._time.back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> None:
        """From inside: give control back until woken."""
        self._time.back.release()
        self._go.acquire()
        if self._kill is not None:
            raise self._kill()

    def freeze(self) -> None:
        """It hangs: alive, and never woken again."""
        self.wake = -1

    def end(self) -> None:
        """It will not do another thing. From the scheduler or another actor."""
        if not self.ended:
            self._kill = Ended
            self._time.wake(self, 0.0)


class SimulatedStop:
    def __init__(self, time: Time) -> None:
        self._time, self._set = time, False
        self.waiting: set[Actor] = set()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for actor in sorted(self.waiting, key=lambda actor: actor.name):
            self._time.wake(actor, 0.0)

    def wait(self, timeout: float | None = None) -> bool:
        return self._time.sleep(1e9 if timeout is None else timeout, until=self)


class SimulatedLock:
    """A re-entrant lock that passes virtual time while it waits."""

    def __init__(self, time: Time) -> None:
        self._time, self._owner, self._depth = time, None, 0

    def __enter__(self) -> None:
        me = self._time.current
        while self._owner not in (None, me) and not self._owner.ended:
            self._time.sleep(0.05)
        if self._owner is not me:
            self._depth = 0
        self._owner, self._depth = me, self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None


class Time:
    """Scheduler and clock. `between(moment)` is called before time goes on: what the world does by then."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.skew = 0.0  # of the wall clock
        self.back = threading.Semaphore(0)
        self.current: Actor | None = None
        self.actors: list[Actor] = []
        self.next_of_world: Callable[[], float | None] = lambda: None
        self.world_tick: Callable[[], None] = lambda: None
        self.after_each: Callable[[], None] = lambda: None
        self._agenda: list[tuple[float, int, Actor | None, Callable[[], None] | None]] = []
        self._number = itertools.count(1)

    # ---------------------------------------------------------------------------------------------- agent.clock.Clock
    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self.seconds + self.skew)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: SimulatedStop | None = None) -> bool:
        actor = self.current
        assert actor is not None, "only actors sleep"
        if until is not None and until.is_set():
            return True
        self.wake(actor, max(0.0, seconds))
        if until is not None:
            until.waiting.add(actor)
        try:
            actor.pause()
        finally:
            if until is not None:
                until.waiting.discard(actor)
        return until is not None and until.is_set()

    # --------------------------------------------------------------------------------------------------------- agenda
    def spawn(self, name: str, do: Callable[[], None], after: float = 0.0) -> Actor:
        actor = Actor(self, name, do)
        self.actors.append(actor)
        self.wake(actor, after)
        return actor

    def wake(self, actor: Actor, after: float) -> None:
        actor.wake = next(self._number)
        heapq.heappush(self._agenda, (self.seconds + after, actor.wake, actor, None))

    def at(self, after: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.seconds + after, next(self._number), None, do))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until `done` or the moment `until`; returns whether it is done."""
        while not done():
            while self._agenda and self._agenda[0][2] is not None and self._stale(self._agenda[0]):
                heapq.heappop(self._agenda)
            of_world = self.next_of_world()
            mine = self._agenda[0][0] if self._agenda else None
            moments = [moment for moment in (of_world, mine) if moment is not None]
            if not moments or min(moments) > until:
                return False
            self.seconds = max(self.seconds, min(moments))
            if of_world is not None and of_world <= self.seconds:
                self.world_tick()
            else:
                _, _, actor, do = heapq.heappop(self._agenda)
                if actor is not None:
                    self.current = actor
                    actor.switch()
                    self.current = None
                    if actor.fault is not None:
                        raise actor.fault
                elif do is not None:
                    do()
            self.after_each()
        return True

    def _stale(self, entry: tuple[float, int, Actor | None, Callable[[], None] | None]) -> bool:
        actor = entry[2]
        return actor is not None and (actor.ended or actor.wake != entry[1])

    def close(self) -> None:
        for actor in self.actors:
            while not actor.ended:
                actor._kill = Ended
                self.current = actor
                actor.switch()
        self.current = None
