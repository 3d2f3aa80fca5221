"""Which faults a rehearsal makes, and when: named lists of events, driven by how far training is seen to be. Pure.

An event waits until a trainer runs on a machine that no earlier event has touched, has something to lose there and is
past `fraction` of the run. Without a save it waits for half of the run; for trainers that write no progress, and for
runs too long to wait for a fraction, the machine's clock decides. A run that ends before its events took place has
proved less than it says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.errors import ConfigError

# AWS gives two minutes. The trainer's deadline is 40 s before the end: with 65 s it has 25 to save in, which a busy
# machine needs, and the hand-over the 40 s that it has at AWS.
LEAD_SECONDS = 65.0
PATIENCE_SECONDS = 60.0
# A fault before the first save proves nothing about the resume: machine 2 begins at 0 as machine 1 did.
UNSAVED_FRACTION = 0.5  # of the run, after which a fault comes all the same
UNSAVED_SECONDS = 60.0  # the same for a trainer that writes no progress: its import of torch is in it


@dataclass(frozen=True)
class Interrupt:
    """Notice at spot/instance-action, the machine is ended `lead_seconds` later; its replacement starts at once."""

    lead_seconds: float = LEAD_SECONDS


@dataclass(frozen=True)
class Kill:
    """The machine is ended without a notice."""


@dataclass(frozen=True)
class Rebalance:
    """A recommendation that never comes true."""


@dataclass(frozen=True)
class NoCapacity:
    """The fleet finds no spot capacity for a while."""

    seconds: float


@dataclass(frozen=True)
class Throttle:
    """EC2 answers RequestLimitExceeded with `probability` for a while, at least until `calls_min` were."""

    seconds: float
    probability: float = 0.5
    calls_min: int = 3


@dataclass(frozen=True)
class NextZone:
    """Where the replacement is placed: in another zone than the machine's, or in the same."""

    other: bool


Fault = Interrupt | Kill | Rebalance | NoCapacity | Throttle | NextZone


@dataclass(frozen=True)
class Event:
    """`faults` are made together, in order, once training is past `fraction` (or after `seconds` on one machine)."""

    fraction: float
    faults: tuple[Fault, ...]
    seconds: float = PATIENCE_SECONDS

    @property
    def ends_machine(self) -> bool:
        return any(isinstance(fault, (Interrupt, Kill)) for fault in self.faults)


@dataclass(frozen=True)
class Scenario:
    name: str
    says: str
    events: tuple[Event, ...]
    ranks: bool = False  # the example trains on several ranks
    module: str = ""  # of fleet.rehearsal, where it is not of one job's one run: its `rehearse` does it all

    @property
    def needs_zones(self) -> int:
        """How many zones the fleet must be allowed in."""
        return 2 if any(NextZone(other=True) in event.faults for event in self.events) else 1

    @property
    def zone_moves(self) -> int:
        return sum(NextZone(other=True) in event.faults for event in self.events)

    @property
    def throttles(self) -> int:
        return sum(isinstance(fault, Throttle) for event in self.events for fault in event.faults)

    @property
    def instances(self) -> int:
        """How many machines it takes at least."""
        return 1 + sum(event.ends_machine for event in self.events)


@dataclass(frozen=True)
class Seen:
    """What a scenario may look at: the trainer that runs now. Steps are None where it writes no progress.

    `touched`: an earlier event ended (or is ending) this machine. `reports`: this trainer is known to write progress.
    `saved`: it has written something on this machine that can be a save.
    """

    instance: str
    touched: bool
    training_seconds: float
    reports: bool = False
    first_step: int | None = None
    step: int | None = None
    steps_total: int | None = None
    saved: bool = False


def due(events: tuple[Event, ...], count: int, view: Seen | None) -> Event | None:
    """The event to make now, None where none is due. `taken` events of `events` were made already."""
    if count >= len(events) or view is None or view.touched:
        return None
    event = events[count]
    if view.step is None or view.first_step is None:
        return event if not view.reports and (view.saved or view.training_seconds >= UNSAVED_SECONDS) else None
    if view.step <= view.first_step:
        return None
    fraction = event.fraction if view.saved else max(event.fraction, UNSAVED_FRACTION)
    if view.steps_total and view.step >= fraction * view.steps_total:
        return event
    return event if view.training_seconds >= event.seconds * (1 if view.saved else 5) else None


def is_saved(progress: Progress, interval: int) -> bool:
    """Whether the save of the last `interval` steps is done, and the next one not due soon.

    A kill then costs what was trained since that save, and never a save that was still being written.
    """
    since = progress.step % interval
    return since <= interval // 2 and progress.saved is not None and progress.saved.step == progress.step - since


# ------------------------------------------------------------------------------------------------------- the scenarios
def _standard(_: random.Random) -> tuple[Event, ...]:
    return (
        Event(0.15, (NextZone(other=True), Throttle(10.0), Interrupt())),
        Event(0.40, (NextZone(other=False), Kill())),
        Event(0.65, (NextZone(other=True), Interrupt())),
    )


def _storm(chance: random.Random) -> tuple[Event, ...]:
    events: list[Event] = []
    for fraction in sorted(round(chance.uniform(0.05, 0.9), 3) for _ in range(chance.randint(3, 6))):
        faults: list[Fault] = [NextZone(other=chance.random() < 0.5)]
        if chance.random() < 0.3:
            faults.append(Throttle(chance.uniform(3, 15), chance.uniform(0.2, 0.7)))
        if chance.random() < 0.2:
            faults.append(NoCapacity(chance.uniform(2, 10)))
        kinds: tuple[Fault, ...] = (Interrupt(chance.uniform(44, 60)), Kill(), Rebalance())
        faults.append(chance.choices(kinds, weights=(4, 4, 1))[0])
        if isinstance(faults[-1], Rebalance):
            faults = [fault for fault in faults if not isinstance(fault, (NextZone, NoCapacity))]
        events.append(Event(fraction, tuple(faults)))
    return tuple(events)


def _fixed(*events: Event) -> Callable[[random.Random], tuple[Event, ...]]:
    return lambda _: events


_SCENARIOS: dict[str, tuple[str, Callable[[random.Random], tuple[Event, ...]]]] = {
    "standard": (
        "a notice with a move to another zone under API throttling, a kill without notice, a second notice and move",
        _standard,
    ),
    "quiet": ("no fault", _fixed()),
    "notice": ("one interruption with notice, replaced in the same zone", _fixed(
        Event(0.4, (NextZone(other=False), Interrupt())),
    )),
    "notice-other-zone": ("one interruption with notice under API throttling, replaced in another zone", _fixed(
        Event(0.3, (NextZone(other=True), Throttle(5.0), Interrupt())),
    )),
    "kill": ("one kill without notice, replaced in the same zone", _fixed(
        Event(0.4, (NextZone(other=False), Kill())),
    )),
    "rebalance": ("a rebalance recommendation that never comes true", _fixed(Event(0.4, (Rebalance(),)))),
    "no-capacity": ("a kill, then 15 s without spot capacity", _fixed(
        Event(0.4, (NoCapacity(15.0), NextZone(other=False), Kill())),
    )),
    "throttle": ("a kill, and every second API call throttled for 20 s", _fixed(
        Event(0.4, (Throttle(20.0), NextZone(other=False), Kill())),
    )),
    "other-zone": ("a kill without notice, replaced in another zone", _fixed(
        Event(0.4, (NextZone(other=True), Kill())),
    )),
    "ddp": ("two ranks a machine under torchrun: a notice to one machine, a kill without notice of the next", _fixed(
        Event(0.3, (NextZone(other=True), Interrupt())),
        Event(0.6, (NextZone(other=False), Kill())),
    )),
    "storm": ("3 to 6 random faults, by --seed", _storm),
    "sweep": ("four runs of a sweep on two machines: a notice to one, a kill without notice of another", _fixed()),
    "batch": ("an array of three on AWS Batch: a notice to one host, a kill of another; a job that depends on it",
              _fixed()),
    "elastic": ("two to three machines train together: one is killed and replaced, one gets a notice", _fixed()),
    "elastic-sharded": ("the same with a model that no machine has whole (FSDP2), each saving its share", _fixed()),
}  # fmt: skip
_OF_RANKS = {"ddp"}
_MODULES = {
    "batch": "batch_rehearsal", "sweep": "sweep_rehearsal", "elastic": "elastic_rehearsal",
    "elastic-sharded": "elastic_rehearsal",
}  # fmt: skip
NAMES = tuple(_SCENARIOS)


def scenario(name: str, seed: int = 0) -> Scenario:
    """The scenario `name`; only `storm` looks at the seed. ConfigError names those there are."""
    if name not in _SCENARIOS:
        raise ConfigError(f"there is no scenario {name!r}", next_step=f"--scenario is one of {', '.join(NAMES)}")
    says, make = _SCENARIOS[name]
    return Scenario(name, says, make(random.Random(seed)), name in _OF_RANKS, _MODULES.get(name, ""))


def describe() -> str:
    """One line a scenario, for --help."""
    return "\n".join(f"{name}: {says}" for name, (says, _) in _SCENARIOS.items())
