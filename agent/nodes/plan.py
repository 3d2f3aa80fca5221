"""Where the machines of a run meet next (pure): join the rendezvous that there is, claim the next one, or wait.

A rendezvous is a term (`terms/<n>`, one claim wins): its holder hosts torchrun's store, writes status.json and ends the
run. No other begins before every machine of the one before has left it or is known to be gone, so that two worlds never
write into one checkpoint folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.names import SILENT_SECONDS

BEAT_SECONDS = 15.0  # between two of a machine's documents
FRESH_SECONDS = 90.0  # a machine that was heard of so long ago is counted as here
ABSENT_SECONDS = 120.0  # one that EC2 does not know (any more) and that says nothing is gone
PREPARING_SECONDS = 120.0  # from a claim to the place; a holder that takes longer has been started again
_GONE = ("shutting-down", "terminated", "stopping", "stopped")


@dataclass(frozen=True)
class Machine:
    """`nodes/<instance>.json` as it is seen. `term`: of the rendezvous its ranks are in, None: of none.

    `age`: seconds since it was heard of. `state`: EC2's, "" where a describe does not show it, None: not asked.
    """

    instance: str
    term: int | None
    leaving: bool
    age: float
    state: str | None = None

    @property
    def is_gone(self) -> bool:
        return self.state in _GONE or (self.state == "" and self.age > ABSENT_SECONDS)

    @property
    def has_ended(self) -> bool:
        """No process of it runs any more: one that shuts down may write for minutes."""
        return self.state in ("terminated", "stopped") or (self.state == "" and self.age > ABSENT_SECONDS)

    @property
    def is_here(self) -> bool:
        return not self.leaving and not self.is_gone and self.age <= FRESH_SECONDS


@dataclass(frozen=True)
class Place:
    """`rendezvous/<term>.json`: where the holder of the term serves torchrun's store."""

    term: int
    instance: str
    address: str
    port: int


@dataclass(frozen=True)
class Seen:
    """`term`, `holder` and `claim_age` (seconds) of the newest claim, 0 and "" where there is none."""

    me: str
    machines: tuple[Machine, ...]  # me among them
    least: int
    term: int = 0
    holder: str = ""
    claim_age: float = 0.0
    place: Place | None = None


@dataclass(frozen=True)
class Join:
    place: Place


@dataclass(frozen=True)
class ClaimTerm:
    term: int


@dataclass(frozen=True)
class End:
    """It says nothing for long and still runs: only its end makes sure that it does not write."""

    instance: str


@dataclass(frozen=True)
class Wait:
    """`few`: for more machines, which may never come."""

    why: str
    few: bool = False


Action = Join | ClaimTerm | End | Wait


def decide(observed: Seen) -> Action:
    """What this machine, which is in no rendezvous, does next."""
    peers = [machine for machine in observed.machines if machine.instance != observed.me]
    holder = next((machine for machine in peers if machine.instance == observed.holder), None)
    if holder is not None and not holder.is_gone and not holder.leaving:
        if observed.place is not None and holder.term == observed.term:
            if holder.age <= FRESH_SECONDS:
                return Join(observed.place)
        elif observed.place is None and observed.claim_age <= PREPARING_SECONDS:
            return Wait(f"{holder.instance} prepares rendezvous {observed.term}")
    if (action := still_in_one(peers)) is not None:
        return action
    arrivals = 1 + sum(machine.is_here for machine in peers)
    if arrivals < observed.least:
        return Wait(f"{arrivals} of at least {observed.least} machines here", few=True)
    return ClaimTerm(observed.term + 1)


def still_in_one(machines: Iterable[Machine]) -> End | Wait | None:
    """What is done about the first of `machines` that has not left its rendezvous; None if all have."""
    for machine in machines:
        if machine.term is not None and not machine.is_gone:
            if machine.age > SILENT_SECONDS and machine.state == "running":
                return End(machine.instance)
            return Wait(f"{machine.instance} has not left rendezvous {machine.term} yet")
    return None


def machine_of(document: Mapping[str, Any], age: float, state: str | None = None) -> Machine:
    """A machine's document as it was stored; what it lacks counts as the careful answer."""
    term = document.get("term")
    if not isinstance(term, int) or isinstance(term, bool):
        term = None
    return Machine(str(document.get("instance", "")), term, bool(document.get("leaving")), age, state)


def place_of(document: Mapping[str, Any] | None, term: int) -> Place | None:
    if document is None:
        return None
    return Place(term, str(document["instance"]), str(document["address"]), int(document["port"]))
