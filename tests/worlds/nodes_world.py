"""The machines of one run on `nodes`: their store, their cloud, and clocks that are wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import structlog

from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.nodes.meeting import Meeting
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.services.client import InMemoryS3

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


@dataclass
class Clock:
    """Sleeps pass at once, and let the other machines act."""

    seconds: float = 0.0
    at_sleep: list[Callable[[], object]] = field(default_factory=list)

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: Any = None) -> bool:
        self.seconds += seconds
        for act in self.at_sleep:
            act()
        return bool(until is not None and until.is_set())


@dataclass
class Off:
    """The clock of a machine whose wall clock is so many seconds ahead."""

    right: Clock
    ahead: float

    def now(self) -> datetime:
        return self.right.now() + timedelta(seconds=self.ahead)

    def monotonic(self) -> float:
        return self.right.monotonic()

    def sleep(self, seconds: float, until: Any = None) -> bool:
        return self.right.sleep(seconds, until)


@dataclass
class Cloud:
    states: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def instances(self, instances: Iterable[str]) -> tuple[Instance, ...]:
        return tuple(Instance(one, self.states[one], "z", "t", NOW) for one in instances if one in self.states)

    def terminate(self, instance: str) -> None:
        self.ended.append(instance)
        self.states[instance] = "shutting-down"


class Run:
    """A run's store and cloud; `machine()` is one more machine's meeting."""

    def __init__(self) -> None:
        self.s3, self.cloud, self.clock = InMemoryS3("bucket"), Cloud(), Clock()
        self.store = Store(self.s3, StoreUrl("bucket", "j/r"))
        self.stop = threading.Event()
        self.terms: list[int] = []

    def machine(self, name: str, machines: tuple[int, int] = (2, 3), off: float = 0.0) -> Meeting:
        """`off`: seconds that its wall clock is ahead."""
        self.cloud.states[name] = "running"
        here = Identity(name, "us-west-2a", "us-west-2", "g5.xlarge", "1", "ami-1", address="127.0.0.1")
        made = Meeting(
            Store(self.s3, self.store.url), self.cloud, Off(self.clock, off), structlog.get_logger(), here,
            run="r", machines=machines, wait_seconds=900, on_term=self.terms.append,
        )  # fmt: skip
        made.note("preparing")
        return made
