"""What healing works with, all of it injected, and what it remembers between two looks.

The memory only saves time and calls: an agent that starts anew without it decides safely, only later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from spotheal.agent.aws.ec2 import Ec2, Snapshot
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.volume.actions import Action
from spotheal.agent.volume.seen import Desired, Observed


class MountHost(Protocol):
    """What of `host.Host` healing needs."""

    def find_device(self, volume: str, attached_as: str = ...) -> str | None: ...

    def filesystem(self, device: str) -> str: ...

    def is_blank(self, device: str) -> bool: ...

    def make_filesystem(self, device: str, fstype: str, again: bool = ...) -> None: ...

    def mount(
        self, device: str, mountpoint: str, fstype: str = ..., volume: str = ..., attached_as: str = ...
    ) -> None: ...

    def mounted_at(self, mountpoint: str) -> str | None: ...

    def unmount(self, mountpoint: str, seconds_max: float = ...) -> bool: ...


class Stopwatch:
    """How long something has been seen without a break, by the monotonic clock: no jump of the wall clock counts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: dict[tuple[str, ...], float] = {}
        self._seen: set[tuple[str, ...]] = set()

    def seconds(self, *key: str) -> float:
        """Seconds since `key` was first asked for in an unbroken row of rounds."""
        self._seen.add(key)
        return self._clock.monotonic() - self._first.setdefault(key, self._clock.monotonic())

    def end_round(self) -> None:
        """Forget what was not seen in this round."""
        self._first = {key: moment for key, moment in self._first.items() if key in self._seen}
        self._seen.clear()


@dataclass
class Memory:
    """`asked`: what was asked of EC2, and when (monotonic). `states`: tags we wrote that describes may not show yet."""

    watch: Stopwatch
    asked: dict[tuple[str, str], float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    claims: dict[int, Claim] = field(default_factory=dict)
    snapshot: str | None = None  # the snapshot asked for, "" where the reply was lost
    copy: str | None = None  # the volume made in this term
    lazy: bool = False  # it was made without the initialization rate
    formatted: set[str] = field(default_factory=set)  # volumes whose mkfs has ended in this term and this life
    unmountable: set[str] = field(default_factory=set)  # volumes that could not be mounted in this term and this life
    bases: set[str] = field(default_factory=set)  # base snapshots of this life, which describes may not show yet
    handover: str = ""  # the snapshot that was asked for at the end of the term
    releasing: bool = False  # the store is being told that the term is released
    rejected: set[str] = field(default_factory=set)  # snapshots
    failed: dict[str, Snapshot] = field(default_factory=dict)  # they count also when they are deleted
    deleted: set[str] = field(default_factory=set)  # volumes, by ourselves
    completed: set[str] = field(default_factory=set)  # snapshots that a describe has shown as completed
    saved: dict[int, int] = field(default_factory=dict)  # term -> the last step its writer said it had saved
    attempt: int = 0
    device_letter: int = 0
    story: list[tuple[Observed, Action]] = field(default_factory=list)  # each look, and what followed from it
    term: int | None = None  # the one that memory is about
    took_over: int | None = None  # the term that this very life of ours has taken a volume over with


@dataclass
class Context:
    """One instance's healing. `on_term` is told each term it claims, before anything else is done with it;
    `on_round` is called in each round of the loop.

    `checkpoint_names(mountpoint)` lists the checkpoint folder of what is mounted there.
    """

    desired: Desired
    ec2: Ec2
    store: Store
    host: MountHost
    clock: Clock
    stop: Stop
    log: Any
    checkpoint_names: Callable[[str], Iterable[str]]
    on_term: Callable[[int], None] = lambda term: None
    on_round: Callable[[], None] = lambda: None
    beside: Callable[[Callable[[], None]], None] = lambda work: work()  # do this without waiting for it
    random: random.Random = field(default_factory=random.Random)
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(Stopwatch(self.clock))

    def recently(self, kind: str, thing: str, seconds: float) -> bool:
        """Whether we asked for `what` of `thing` less than `seconds` ago."""
        moment = self.memory.asked.get((kind, thing))
        return moment is not None and self.clock.monotonic() - moment < seconds

    def ask(self, kind: str, thing: str) -> None:
        self.memory.asked[kind, thing] = self.clock.monotonic()
