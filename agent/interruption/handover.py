"""What happens between a notice and the end of the machine: everything is left so that a successor can go on.

The order is the proof: the trainer's group ends, the volume is let go, the handover snapshot is listed, and only then
the volume is detached. Snapshot before detach, because in between a successor in the same zone could mount and write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from spotheal.agent.interruption.watcher import Interruption, Watcher
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import Fatal, PermissionDenied, Retryable, SpothealError
from spotheal.agent.protocol.notice_seconds import (
    BUSY_SECONDS,
    FREEZE_SECONDS,
    HANDOVER_SECONDS,
    KILLED_SECONDS,
    SNAPSHOT_SECONDS,
    STALE_SECONDS,
)

RETRY_SECONDS = 0.5


class MountHost(Protocol):
    """`agent.host.Host`, or a fake."""

    def mounted_at(self, mountpoint: str) -> str | None: ...

    def unmount(self, mountpoint: str, seconds_max: float = ...) -> bool: ...

    def holders(self, mountpoint: str) -> tuple[int, ...]: ...

    def kill(self, pids: Iterable[int]) -> tuple[int, ...]: ...

    def sync(self, mountpoint: str, seconds_max: float = ...) -> None: ...

    def freeze(self, mountpoint: str, seconds_max: float = ...) -> None: ...

    def thaw(self, mountpoint: str, seconds_max: float = ...) -> None: ...


@dataclass(frozen=True)
class Steps:
    """What others do for the handover; each raises SpothealError or OSError where it fails.

    `end_trainer(until)` returns when no process of the trainer's group is left: it asks them at once, kills them at
    `until` (monotonic), never before. `leave_volume()` moves log sinks off the volume and closes the ledger; it speaks
    to no network, for the handover waits for it.
    `create_handover()` returns the snapshot's id when it is listed; `detach()` detaches the unmounted volume; both may
    be called again after they failed. `report(result)` writes status to the store. `create_base()` takes a snapshot
    that nobody adopts.
    """

    end_trainer: Callable[[float], None]
    leave_volume: Callable[[], None]
    create_handover: Callable[[], str]
    detach: Callable[[], None]
    report: Callable[[HandoverResult], None]
    log: Callable[[str], None] = lambda text: None
    create_base: Callable[[], object] = lambda: None


@dataclass
class HandoverResult:
    """What was done. `margin_seconds`: from the first request for the snapshot to AWS's time."""

    interruption: Interruption
    trainer_ended: bool = False
    volume_left: bool = False
    unmounted: bool = False
    frozen: bool = False
    killed: tuple[int, ...] = ()
    snapshot: str = ""
    margin_seconds: float | None = None
    detached: bool = False
    reported: bool = False
    begin_again: bool = False  # the interruption did not come true
    faults: list[str] = field(default_factory=list)


def hand_over(
    interruption: Interruption, mountpoint: str, host: MountHost, steps: Steps, clock: Clock, watcher: Watcher
) -> HandoverResult:
    """Leave the volume to a successor, then wait for the end; returns only where that does not come.

    What fails is recorded, and what is still safe is done all the same. `mountpoint` is "" where nothing was mounted
    yet: then only the status is written. With `begin_again` the caller goes back to healing.
    """
    result = HandoverResult(interruption)
    result.trainer_ended = _try(result, steps, "end the trainer", lambda: steps.end_trainer(interruption.trainer_until))
    result.volume_left = _try(result, steps, "move the logs off the volume", steps.leave_volume)
    if mountpoint:
        _let_go(result, mountpoint, host, steps, clock)
        if not (result.unmounted or result.frozen):
            _let_go_late(result, mountpoint, host, steps, clock, watcher)
        if result.unmounted or result.frozen:
            _snapshot(result, steps, clock, watcher)
        if result.snapshot and result.unmounted:
            result.detached = _try_until_the_end(result, steps, clock, watcher, "detach the volume", steps.detach)
    result.reported = _try(result, steps, "store the status", lambda: steps.report(result))
    result.begin_again = _wait_for_the_end(interruption, clock, watcher)
    if result.begin_again and result.frozen:
        result.frozen = not _try(result, steps, "thaw the volume", lambda: host.thaw(mountpoint))
    return result


def _let_go(result: HandoverResult, mountpoint: str, host: MountHost, steps: Steps, clock: Clock) -> None:
    """Unmount; if it stays busy kill the holders; if it is busy even then, freeze it and stay attached."""
    moment = clock.monotonic()
    # A late notice shortens the patience, never the order.
    latest = result.interruption.ends_at - HANDOVER_SECONDS
    busy_until = max(moment, min(moment + BUSY_SECONDS, latest))
    result.unmounted = _unmount(result, mountpoint, host, steps, clock, busy_until)
    if not result.unmounted:
        holders: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            holders = host.holders(mountpoint)
        result.killed = host.kill(holders)
        steps.log(f"{mountpoint} was busy; killed {result.killed or 'nobody'} of its holders {holders}")
        until = max(clock.monotonic(), busy_until) + KILLED_SECONDS
        result.unmounted = _unmount(result, mountpoint, host, steps, clock, until)
    if not result.unmounted:
        _try(result, steps, "sync the volume", lambda: host.sync(mountpoint, FREEZE_SECONDS))
        if result.volume_left:  # else our own next log line would hang on the frozen volume, and we with it
            result.frozen = _try(result, steps, "freeze the volume", lambda: host.freeze(mountpoint, FREEZE_SECONDS))


def _let_go_late(
    result: HandoverResult, mountpoint: str, host: MountHost, steps: Steps, clock: Clock, watcher: Watcher
) -> None:
    """Go on unmounting while there is time for a handover. A snapshot taken before all is on the device (the kernel may
    be writing gigabytes out, for a trainer that synced nothing) lacks what was saved last, and as a handover it would
    be believed. At last it is taken as a base, which only makes the next one small (not before: EC2 takes one snapshot
    of a volume in 15 s): without a handover the successor takes its own, once this machine is gone."""
    until = result.interruption.ends_at - SNAPSHOT_SECONDS - 1.0
    while not result.unmounted and clock.monotonic() < until and not watcher.withdrawn.is_set():
        patience = min(until, clock.monotonic() + BUSY_SECONDS)
        result.unmounted = _unmount(result, mountpoint, host, steps, clock, patience)
    if not result.unmounted and not watcher.withdrawn.is_set():
        _record(result, steps, "take a handover", Retryable("the volume is neither unmounted nor frozen"))
        _try(result, steps, "take a base snapshot", steps.create_base)


def _unmount(
    result: HandoverResult, mountpoint: str, host: MountHost, steps: Steps, clock: Clock, until: float
) -> bool:
    """Whether the volume is off; tried until then, at least once."""
    while True:
        seconds = max(0.5, until - clock.monotonic())
        try:
            if host.unmount(mountpoint, seconds):
                return True
        except (SpothealError, OSError) as fault:
            _record(result, steps, "unmount the volume", fault)
        if clock.monotonic() + RETRY_SECONDS > until:
            return False
        clock.sleep(RETRY_SECONDS)


def _snapshot(result: HandoverResult, steps: Steps, clock: Clock, watcher: Watcher) -> None:
    """Request the handover and see it listed; without it nothing may be detached."""
    result.margin_seconds = result.interruption.ends_at - clock.monotonic()

    def create() -> None:
        result.snapshot = steps.create_handover()
        if not result.snapshot:
            raise Retryable("no snapshot was made")

    _try_until_the_end(result, steps, clock, watcher, "create the handover snapshot", create)


def _try_until_the_end(
    result: HandoverResult, steps: Steps, clock: Clock, watcher: Watcher, task: str, do: Callable[[], object]
) -> bool:
    """Whether `do` succeeded; tried again until AWS's time, unless trying again cannot help.

    Credentials are without right for a while where they are new, or not to be had: that is borne as long as the status
    still finds its time.
    """
    while True:
        try:
            do()
            return True
        except (SpothealError, OSError) as fault:
            _record(result, steps, task, fault)
            denied = isinstance(fault, PermissionDenied)
            until = result.interruption.ends_at - (SNAPSHOT_SECONDS if denied else 0.0)
            hopeless = isinstance(fault, Fatal) and not denied
            if hopeless or clock.monotonic() + RETRY_SECONDS > until or watcher.withdrawn.is_set():
                return False
            clock.sleep(RETRY_SECONDS)


def _wait_for_the_end(interruption: Interruption, clock: Clock, watcher: Watcher) -> bool:
    """Whether the end does not come: withdrawn, or alive five minutes after its time. Leaving by ourselves would cost
    the first hour that AWS gives free when it interrupts."""
    if interruption.notice.action == "shutdown":
        return False
    while clock.monotonic() < interruption.ends_at + STALE_SECONDS:
        if watcher.shutting_down.is_set():
            return False
        if clock.sleep(1.0, until=watcher.withdrawn):
            break
    return not watcher.shutting_down.is_set()


def _try(result: HandoverResult, steps: Steps, task: str, do: Callable[[], object]) -> bool:
    try:
        do()
    except (SpothealError, OSError) as fault:
        _record(result, steps, task, fault)
        return False
    return True


def _record(result: HandoverResult, steps: Steps, task: str, fault: Exception) -> None:
    text = f"could not {task}: {getattr(fault, 'message', fault)}"
    if text not in result.faults:
        result.faults.append(text)
        steps.log(text)
