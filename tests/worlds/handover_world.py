"""A clock that a test owns, and a machine with a volume that behaves: slow, stuck, failing, and keeping a history."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from spotheal.agent.aws.imds import NOTHING, Answer, Rebalance, SpotAction
from spotheal.agent.interruption.handover import HandoverResult, Steps
from spotheal.agent.interruption.watcher import Watcher
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.errors import Fatal, PermissionDenied, Retryable

BEGIN = datetime(2026, 11, 21, 8, 0, tzinfo=timezone.utc)
MOUNT = "/dltraining"


class FakeClock:
    """Time passes only in `sleep` and `pass_time`; `at` plans what happens on the way. `skew` moves the wall clock."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.skew = 0.0
        self._plans: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self.elapsed + self.skew)

    def monotonic(self) -> float:
        return 1000.0 + self.elapsed

    def at(self, elapsed: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._plans, (elapsed, next(self._number), do))

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        end = self.elapsed + max(0.0, seconds)
        while not (until is not None and until.is_set()):
            if not self._plans or self._plans[0][0] > end:
                self.elapsed = end
                break
            moment, _, do = heapq.heappop(self._plans)
            self.elapsed = max(self.elapsed, moment)
            do()
        return until is not None and until.is_set()


@dataclass
class FakeImds:
    """Says `action` and `recommendation`; a list is used up one by one, of which the last one stays."""

    action: list[SpotAction | Answer] = field(default_factory=lambda: [NOTHING])
    recommendation: list[Rebalance | Answer] = field(default_factory=lambda: [NOTHING])
    fault: str = "HTML"

    def spot_action(self) -> SpotAction | Answer:
        return self.action.pop(0) if len(self.action) > 1 else self.action[0]

    def rebalance(self) -> Rebalance | Answer:
        return self.recommendation.pop(0) if len(self.recommendation) > 1 else self.recommendation[0]


@dataclass
class Machine:
    """A host, a trainer and an EC2 as `hand_over` sees them. `history` has (elapsed, what) of all that happened."""

    clock: FakeClock
    trainer_stops_after: float | None = 3.0  # None: ignores SIGTERM
    logs_fault: Exception | None = None
    busy_until: float = 0.0  # elapsed
    holders_pids: tuple[int, ...] = ()
    kill_frees: bool = True
    unmount_seconds: float = 0.1
    unmount_faults: int = 0
    freeze_fault: Exception | None = None
    snapshot_id: str = "snap-1"
    snapshot_seconds: float = 1.0
    snapshot_faults: int = 0
    snapshot_fatal: bool = False
    denied_until: float = 0.0  # elapsed: without rights so long
    detach_faults: int = 0
    report_fault: Exception | None = None
    mounted: bool = True
    attached: bool = True
    frozen: bool = False
    trainer_lives: bool = True
    watcher: Watcher | None = None
    history: list[tuple[float, str]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.history.append((self.clock.elapsed, what))

    def when(self, what: str) -> list[float]:
        return [moment for moment, happened in self.history if happened == what]

    def withdraw(self) -> None:
        assert self.watcher is not None
        self.note("withdrawn")
        self.watcher.withdrawn.set()

    def shut_down(self) -> None:
        assert self.watcher is not None
        self.watcher.shutting_down.set()

    # ------------------------------------------------------------------------------------------------------- the steps
    def steps(self) -> Steps:
        return Steps(
            self.end_trainer, self.leave_volume, self.create_handover, self.detach, self.report,
            create_base=lambda: self.note("base asked"),
        )  # fmt: skip

    def end_trainer(self, until: float) -> None:
        left = max(0.0, until - self.clock.monotonic())
        if self.trainer_stops_after is None or self.trainer_stops_after > left:
            self.clock.sleep(left)
            self.note("trainer killed")
        else:
            self.clock.sleep(self.trainer_stops_after)
        self.trainer_lives = False
        self.note("trainer ended")

    def leave_volume(self) -> None:
        self.note("logs left")
        if self.logs_fault:
            raise self.logs_fault

    def create_handover(self) -> str:
        self.note("snapshot asked")
        self.clock.sleep(self.snapshot_seconds)
        if self.snapshot_fatal:
            raise Fatal("could not create: InvalidParameterValue")
        if self.clock.elapsed < self.denied_until:
            raise PermissionDenied("could not create: AuthFailure")
        if self.snapshot_faults > 0:
            self.snapshot_faults -= 1
            raise Retryable("could not create: RequestLimitExceeded")
        self.note("snapshot listed" if self.snapshot_id else "no snapshot")
        return self.snapshot_id

    def detach(self) -> None:
        self.note("detached while mounted" if self.mounted else "detached")
        if self.detach_faults > 0:
            self.detach_faults -= 1
            raise Retryable("throttled")
        self.attached = False

    def report(self, result: HandoverResult) -> None:
        self.note("reported")
        if self.report_fault:
            raise self.report_fault

    # -------------------------------------------------------------------------------------------------------- the host
    def mounted_at(self, mountpoint: str) -> str | None:
        return "/dev/nvme1n1" if self.mounted else None

    def unmount(self, mountpoint: str, seconds_max: float = 300.0) -> bool:
        if not self.mounted:
            return True
        if self.unmount_faults > 0:
            self.unmount_faults -= 1
            raise Retryable("umount: input/output error")
        if self.unmount_seconds > seconds_max:
            self.clock.sleep(seconds_max)
            self.unmount_seconds -= seconds_max  # the kernel goes on writing
            raise Retryable("`umount` had not ended")
        self.clock.sleep(self.unmount_seconds)
        if self.clock.elapsed < self.busy_until or self.trainer_lives:
            return False
        self.mounted = False
        self.note("unmounted")
        return True

    def holders(self, mountpoint: str) -> tuple[int, ...]:
        return self.holders_pids

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]:
        self.note("killed holders")
        if self.kill_frees:
            self.busy_until = 0.0
        return tuple(pids)

    def sync(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        self.note("synced")

    def freeze(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        if self.freeze_fault:
            raise self.freeze_fault
        self.frozen = True
        self.note("frozen")

    def thaw(self, mountpoint: str, seconds_max: float = 60.0) -> None:
        self.frozen = False
        self.note("thawed")
