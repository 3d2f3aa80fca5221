"""Virtual time for the second witness: tasks are threads of which one runs at a time, handed on at every sleep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone


class Killed(BaseException):
    """The process that runs this task is gone; no handler of the agent's may catch it."""


class Flag:
    """An event of virtual time."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        raise AssertionError("sleep by the clock")


@dataclass
class Process:
    """What tasks belong to: they die with it, and stand still while it hangs."""

    name: str
    dead: bool = False
    hangs_until: float = 0.0


@dataclass
class Task:
    process: Process
    work: Callable[[], None]
    wakes: float
    until: Flag | None = None
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    over: bool = False


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self._number = 0
        self._tasks: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._main = threading.Semaphore(0)
        self._running: Task | None = None
        self.fault: BaseException | None = None

    # --------------------------------------------------------------------------------------------- called by the tasks
    @property
    def process(self) -> Process | None:
        return None if self._running is None else self._running.process

    def sleep(self, seconds: float, until: Flag | None = None) -> bool:
        task = self._running
        assert task is not None, "only a task sleeps"
        if not (until is not None and until.is_set()):
            task.wakes, task.until = self.now + max(0.0, seconds), until
            self._main.release()
            task.gate.acquire()
        if task.process.dead:
            raise Killed
        return until is not None and until.is_set()

    # ----------------------------------------------------------------------------------------------- called by anybody
    def spawn(self, process: Process, work: Callable[[], None], after: float = 0.0) -> None:
        task = Task(process, work, self.now + after)
        threading.Thread(target=self._live, args=(task,), daemon=True).start()
        self._tasks.append(task)

    def at(self, moment: float, do: Callable[[], None]) -> None:
        self._number += 1
        self._events.append((moment, self._number, do))
        self._events.sort(key=lambda event: event[:2], reverse=True)

    def run(self, until: Callable[[], bool], seconds_max: float) -> bool:
        """Whether `until` came true in time. Raises what a task raised."""
        while not until():
            task = min((t for t in self._tasks if not t.over), key=self._due, default=None)
            due = float("inf") if task is None else self._due(task)
            if self._events and self._events[-1][0] <= due:
                moment, _, do = self._events.pop()
                self.now = max(self.now, moment)
                do()
            elif task is None or due > seconds_max:
                return False
            else:
                self.now = max(self.now, due)
                self._hand_to(task)
            if self.now > seconds_max:
                return False
        return True

    def end(self) -> None:
        """Let every task die."""
        for task in self._tasks:
            task.process.dead = True
        for task in list(self._tasks):
            while not task.over:
                self._hand_to(task)

    def _due(self, task: Task) -> float:
        set_now = task.process.dead or (task.until is not None and task.until.is_set())
        due = self.now if set_now else task.wakes
        return due if task.process.dead else max(due, task.process.hangs_until)

    def _hand_to(self, task: Task) -> None:
        self._running = task
        task.gate.release()
        self._main.acquire()
        self._running = None
        if task.over:
            self._tasks.remove(task)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def _live(self, task: Task) -> None:
        task.gate.acquire()
        try:
            if not task.process.dead:
                task.work()
        except Killed:
            pass
        except BaseException as fault:  # noqa: BLE001 - told by `run`, in the thread of the test
            self.fault = fault
        task.over = True
        self._main.release()


EPOCH = datetime(2026, 11, 21, 8, 0, 0, tzinfo=timezone.utc)


@dataclass
class MachineClock:
    """A machine's clock; its wall clock may be wrong by `skew` seconds, its monotonic one starts anywhere."""

    time: Time
    skew: float = 0.0
    booted: float = 0.0

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self.time.now + self.skew)

    def monotonic(self) -> float:
        return self.time.now - self.booted

    def sleep(self, seconds: float, until: Flag | None = None) -> bool:
        return self.time.sleep(seconds, until)
