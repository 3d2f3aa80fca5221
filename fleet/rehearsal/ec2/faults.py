"""What goes wrong in the rehearsal's AWS, drawn from one seed and switchable while it runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

_MUTATING = ("Create", "Attach", "Detach", "Delete", "Request", "Cancel", "Modify", "Run", "Terminate", "Stop", "Put")


class ReplyLost(Exception):
    """The call had its effect, and its reply never arrived."""


@dataclass
class Planned:
    """An answer laid down for the next calls of one operation; `code` empty means that the reply is lost."""

    operation: str
    times: int = 1
    code: str = ""
    message: str = ""
    status: int = 400
    after_effect: bool = False


@dataclass
class Faults:
    """Probabilities hold for each call; counters for the next so many things. All of it off by default."""

    seed: int = 0
    stale_seconds_max: float = 0.0  # describes show the state of up to so long ago
    throttle: float = 0.0  # probability of RequestLimitExceeded
    throttled_operations: tuple[str, ...] = ()  # empty: all
    lose_reply: float = 0.0  # probability that the reply of a call with an effect is lost
    attaches_stuck: int = 0
    detaches_stuck: int = 0
    snapshot_seconds: float | None = None  # instead of the latency
    snapshots_fail: int = 0
    volumes_fail: int = 0
    volumes_vanish: int = 0  # as those whose key may not be used: KMS is asked only afterwards, and nothing says so
    cancels_unsuccessful: int = 0
    planned: list[Planned] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"faults {self.seed}")

    def lag(self, describes: bool) -> float:
        """How far in the past the next call looks, in seconds."""
        if not self.stale_seconds_max:
            return 0.0
        lag = self._random.uniform(0.0, self.stale_seconds_max)
        return lag if describes or self._random.random() < 0.5 else 0.0

    def throttled(self, operation: str) -> bool:
        if not self.throttle or (self.throttled_operations and operation not in self.throttled_operations):
            return False
        return self._random.random() < self.throttle

    def reply_is_lost(self, operation: str) -> bool:
        return bool(self.lose_reply and operation.startswith(_MUTATING) and self._random.random() < self.lose_reply)

    def take(self, counter: str) -> bool:
        """Use up one of a counter; False where it stands at zero."""
        count = int(getattr(self, counter))
        if count > 0:
            setattr(self, counter, count - 1)
        return count > 0

    def plan(
        self,
        operation: str,
        code: str = "",
        message: str = "",
        *,
        times: int = 1,
        status: int = 400,
        after_effect: bool = False,
    ) -> None:
        """The next `times` calls of `operation` are answered so; without a code their replies are lost."""
        planned = Planned(operation, times, code, message or code, status, after_effect or not code)
        self.planned.append(planned)

    def planned_for(self, operation: str, after_effect: bool) -> Planned | None:
        for planned in self.planned:
            if planned.operation == operation and planned.after_effect == after_effect and planned.times > 0:
                planned.times -= 1
                return planned
        return None

    def clear(self) -> None:
        """From now on nothing goes wrong."""
        fresh = Faults(self.seed)
        for name in Faults.__dataclass_fields__:
            if name != "seed":
                setattr(self, name, getattr(fresh, name))
