"""The simulated region with the real watcher and the real handover: a notice is found by polling, as on a machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulated_time import SimulatedStop, Time
from simulated_world import MOUNT, Agent, Machine, Region, SimulatedHost

from spotheal.agent.aws.imds import NOTHING, Answer, Rebalance, SpotAction
from spotheal.agent.interruption.handover import Steps, hand_over
from spotheal.agent.interruption.watcher import Interruption, Watcher
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.heal import Held
from spotheal.agent.volume.release import create_handover, detach

SAVES_AT_ONCE = "saves at once, 3 s"
LAST_SAFE_STEP = "goes on to the last safe step, saves 3 s"
IGNORES = "ignores SIGTERM, killed at the deadline"
BUSY = "ignores SIGTERM, and a shell holds the mount"
TRAINERS = (SAVES_AT_ONCE, LAST_SAFE_STEP, IGNORES, BUSY)
SAVE_SECONDS = 3.0


class Event(SimulatedStop):
    """threading.Event as far as the watcher needs it, in virtual time."""

    def clear(self) -> None:
        self._set = False


class Imds:
    """What the rule book has for this instance."""

    def __init__(self, region: Region, machine: Machine) -> None:
        self._region, self._machine = region, machine

    def spot_action(self) -> SpotAction | Answer:
        found = self._region.rules.instance(self._machine.id)
        if found is None or found.notice is None:
            return NOTHING
        return SpotAction(found.notice.action, found.notice.time)

    def rebalance(self) -> Rebalance | Answer:
        return NOTHING


class BusyHost(SimulatedHost):
    """A host whose mount point may be held by a shell until it is killed."""

    held_by: tuple[int, ...] = ()

    def unmount(self, mountpoint: str, seconds_max: float = 0.0) -> bool:
        if self.held_by:
            self._region.time.sleep(0.1)
            return False
        return super().unmount(mountpoint, seconds_max)

    def holders(self, mountpoint: str) -> tuple[int, ...]:
        return self.held_by

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]:
        killed, self.held_by = tuple(pids), ()
        return killed

    def sync(self, mountpoint: str, seconds_max: float = 0.0) -> None:
        self._region.time.sleep(0.5)

    freeze = thaw = sync


class NoticedRegion(Region):
    """`timed`: each call with its moment; `ended`: when each noticed trainer ended; `booted`: when user data began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.timed: list[tuple[float, str, str]] = []
        self.ended: dict[str, float] = {}
        self.booted: dict[str, float] = {}
        self.trainer = IGNORES

    def gate(self, machine: Machine, name: str, call: Any) -> object:
        answer = super().gate(machine, name, call)
        self.timed.append((self.time.seconds, machine.id, name))
        return answer

    def interrupt(self, machine: Machine, lead: float = 120.0) -> None:
        self.rules.interrupt(machine.id, "terminate", lead)

    def _start_agent(self, machine: Machine, after: float) -> None:
        machine.notice = SimulatedStop(self.time)
        agent = NoticedAgent(self, machine, machine.notice)
        self.booted.setdefault(machine.id, self.time.seconds + after)
        machine.agents.append(self.time.spawn(f"{machine.id}-agent", agent.run, after))
        machine.agents.append(self.time.spawn(f"{machine.id}-watcher", agent.watch, after))


class NoticedAgent(Agent):
    region: NoticedRegion

    def __init__(self, region: NoticedRegion, machine: Machine, notice: SimulatedStop) -> None:
        super().__init__(region, machine, notice)
        self.host: BusyHost = BusyHost(region, machine)
        self.watcher = simulated_watcher(region.time, Imds(region, machine))

    def watch(self) -> None:
        while not self.watcher.notice_event.is_set():
            self.watcher.poll()
            if self.watcher.notice_event.is_set():
                self.notice.set()
            self.region.time.sleep(2.0)

    def _hand_over(self, ctx: Context, held: Held) -> None:
        interruption = self.watcher.interruption
        assert interruption is not None
        saved = self._end_trainer(held, interruption)
        steps = Steps(
            end_trainer=lambda until: None,
            leave_volume=lambda: None,
            create_handover=lambda: create_handover(ctx, held, saved),
            detach=lambda: detach(ctx, held),
            report=lambda result: self.status.leave(),
            log=self.log.info,
        )
        hand_over(interruption, MOUNT, self.host, steps, self.region.time, self.watcher)

    def _end_trainer(self, held: Held, interruption: Interruption) -> int:
        """What the supervisor sees of the trainer; the step that it has saved."""
        region = self.region
        left = interruption.trainer_until - region.time.seconds
        kind = region.trainer
        if kind == SAVES_AT_ONCE:
            region.time.sleep(SAVE_SECONDS)
        elif kind == LAST_SAFE_STEP:
            region.time.sleep(left - 1.5 * SAVE_SECONDS - 5.0 + SAVE_SECONDS)
        else:
            region.time.sleep(left)
        disk = region.disks[held.volume]
        saved = max(disk.steps, default=0)
        if kind in (SAVES_AT_ONCE, LAST_SAFE_STEP):
            saved += 1
            disk.steps = (*disk.steps, saved)
            region.acknowledged = max(region.acknowledged, saved)
        if kind == BUSY:
            self.host.held_by = (4711,)
        region.ended[self.machine.id] = region.time.seconds
        return saved


def simulated_watcher(time: Time, source: Imds) -> Watcher:
    """The real watcher; who waits for its events waits in virtual time."""
    watcher = Watcher(source, time)
    for name in ("notice_event", "withdrawn", "rebalance", "shutting_down"):
        setattr(watcher, name, Event(time))
    return watcher
