"""Virtual time with many actors: each is a thread, only one runs at a time, and time passes only while all sleep.

The order is fixed by wake-up times and the order of going to sleep, so a history is repeated by its seed.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

BEGIN = datetime(2026, 11, 21, 8, 0, tzinfo=timezone.utc)
FOREVER = float("inf")


class Ended(BaseException):
    """Raised inside an actor whose machine or process is gone: no `except Exception` may stop it."""


class Actor:
    def __init__(self, time: Time, name: str, do: Callable[[], None]) -> None:
        self.name, self.ended, self.fault, self.killed = name, False, None, False
        self._time, self._do = time, do
        self._go = threading.Lock()  # held: it waits for its turn
        self._go.acquire()
        self.wake = 0  # number of the entry in the agenda that counts
        self.machine: Any = None  # whose actor it is
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        try:
            self._do()
        except Ended:
            pass
        except BaseException as fault:  # noqa: BLE001 - it is raised again by the scheduler
            self.fault = fault
        self.ended = True
        self._time.back.release()

    def switch(self) -> None:
        """From the scheduler: let it run until it sleeps or ends."""
        if self._thread is None:
            if self.killed:  # before it ever ran
                self.ended = True
                return
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._time.back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> None:
        """From inside: give control back until woken."""
        self._time.back.release()
        self._go.acquire()
        self.heed()

    def heed(self) -> None:
        if self.killed:
            raise Ended

    def freeze(self) -> None:
        """It hangs: alive, and never woken again."""
        self.wake = -1

    def end(self) -> None:
        """It will not do another thing. From the scheduler or another actor."""
        if not self.ended:
            self.killed = True
            self._time.wake(self, 0.0)


class SimulatedStop:
    """A `threading.Event` in virtual time."""

    def __init__(self, time: Time) -> None:
        self._time, self._set = time, False
        self.waiting: dict[Actor, None] = {}  # in the order of their going to sleep

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for actor in self.waiting:
            if actor.wake >= 0:  # what hangs is not woken
                self._time.wake(actor, 0.0)

    def clear(self) -> None:
        self._set = False

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
    """Scheduler and clock. What the world does is due at `next_of_world()` and done by `world_tick()`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.skew = 0.0  # of the wall clock
        self.back = threading.Lock()  # held: an actor runs, or nobody has given control back yet
        self.back.acquire()
        self.current: Actor | None = None
        self.actors: list[Actor] = []
        self.next_of_world: Callable[[], float | None] = lambda: None
        self.world_tick: Callable[[], None] = lambda: None
        self.after_each: Callable[[], None] = lambda: None
        self._until, self._done = 0.0, lambda: False
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
        actor.heed()
        if until is not None and until.is_set():
            return True
        moment = self.seconds + max(0.0, seconds)
        if until is not None:
            until.waiting[actor] = None
        try:
            if not self._pass_alone(actor, moment, until):
                self.wake(actor, moment - self.seconds)
                actor.pause()
        finally:
            if until is not None:
                until.waiting.pop(actor, None)
        return until is not None and until.is_set()

    def _pass_alone(self, actor: Actor, moment: float, until: SimulatedStop | None) -> bool:
        """Whether the sleep is over with no other actor's turn in it, which spares two switches of threads."""
        self.after_each()
        while not self._done():
            world, mine = self._world_next(), self._mine_next()
            if world <= mine and world <= min(moment, self._until):
                self.seconds = max(self.seconds, world)
                self.world_tick()
                self.after_each()
                actor.heed()
                if until is not None and until.is_set():
                    actor.wake = next(self._number)  # the call that this made is answered
                    return True
            elif mine <= moment or moment > self._until:
                return False
            else:
                self.seconds = max(self.seconds, moment)
                return True
        return False

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
        self._until, self._done = until, done
        while not done():
            world, mine = self._world_next(), self._mine_next()
            if min(world, mine) > until:
                self.seconds = max(self.seconds, until)
                return False
            self.seconds = max(self.seconds, min(world, mine))
            if world <= mine:
                self.world_tick()
            else:
                self._next_turn()
            self.after_each()
        return True

    def _next_turn(self) -> None:
        _, _, actor, do = heapq.heappop(self._agenda)
        if do is not None:
            do()
        if actor is None:
            return
        self.current = actor
        actor.switch()
        self.current = None
        if actor.fault is not None:
            raise actor.fault

    def _world_next(self) -> float:
        moment = self.next_of_world()
        return FOREVER if moment is None else moment

    def _mine_next(self) -> float:
        agenda = self._agenda
        while agenda:
            moment, number, actor, _ = agenda[0]
            if actor is None or not (actor.ended or actor.wake != number):
                return moment
            heapq.heappop(agenda)
        return FOREVER

    def close(self) -> None:
        for actor in self.actors:
            while not actor.ended:
                actor.killed = True
                self.current = actor
                actor.switch()
        self.current = None
