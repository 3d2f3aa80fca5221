"""What an attempt's end means (pure): done, interrupted, start again, or give up."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from spotheal.agent.protocol.contract import EXIT_DONE, EXIT_RANKS_LOST, EXIT_SAVED_AND_STOPPED
from spotheal.agent.protocol.retrying import back_off

UNASKED_STOPS_MAX = 3
RANKS_LOST_MAX = 10  # in a row with no step gained: from then on each counts as a failure
# A trainer without a progress file is believed to gain where its checkpoints change; one that writes its first
# checkpoint at each start and then dies would be believed for ever.
FAILURES_WITHOUT_PROGRESS_FILE_FACTOR = 10


@dataclass(frozen=True)
class AttemptEnd:
    """How the main process ended. `asked`: after we had asked it to stop (or the machine is going away)."""

    exit_code: int | None  # None where a signal ended it
    signal: int | None
    asked: bool
    gained: bool  # a step beyond the best so far; without a progress file, a changed checkpoint
    reports: bool  # whether it writes a progress file
    hung: str = ""  # `limits.silent`, where we ended it for that

    def __str__(self) -> str:
        if self.hung:
            return f"was ended after {self.hung} without a step, a line of output or a checkpoint (limits.silent)"
        if self.signal is None:
            return f"exited with {self.exit_code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        hint = " (out of memory?)" if self.signal == signal.SIGKILL and not self.asked else ""
        return f"was ended by {name}{hint}"


@dataclass(frozen=True)
class Tally:
    """What is counted from attempt to attempt."""

    failures: int = 0  # in a row, with no step gained between them
    unasked_stops: int = 0  # exits with 75 in a row, with no step gained between them
    failures_at_all: int = 0  # since the last step that a progress file proved
    ranks_lost: int = 0  # ends in a row, with no step gained between them, because other machines went


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Stopped:
    pass


@dataclass(frozen=True)
class StartAgain:
    after_seconds: float
    tally: Tally
    why: str


@dataclass(frozen=True)
class GiveUp:
    tally: Tally
    why: str


def decide(end: AttemptEnd, tally: Tally, failures_max: int) -> Done | Stopped | StartAgain | GiveUp:
    """What follows `end`. Only a step gained forgets failures: neither time nor a clean exit does."""
    if end.asked:
        return Stopped()
    code = None if end.hung else end.exit_code  # what it says when it is ended by us counts for nothing
    if code == EXIT_DONE:
        return Done()
    if end.gained:
        tally = Tally(failures_at_all=0 if end.reports else tally.failures_at_all)
    if code == EXIT_RANKS_LOST:
        tally = replace(tally, ranks_lost=tally.ranks_lost + 1)
        if tally.ranks_lost <= RANKS_LOST_MAX:
            pause = back_off(tally.ranks_lost - 1)
            return StartAgain(pause, tally, "the other machines of this world are gone")
    if code == EXIT_SAVED_AND_STOPPED:
        tally = replace(tally, unasked_stops=tally.unasked_stops + 1)
        if tally.unasked_stops < UNASKED_STOPS_MAX:
            return StartAgain(0.0, tally, "saved and stopped for an interruption that did not come")
        tally = replace(tally, unasked_stops=0)
    tally = replace(tally, failures=tally.failures + 1, failures_at_all=tally.failures_at_all + 1)
    if tally.failures >= failures_max:
        times = "once" if tally.failures == 1 else f"{tally.failures} times with no step gained in between"
        return GiveUp(tally, f"the trainer failed {times}; the last time it {end}")
    if tally.failures_at_all >= FAILURES_WITHOUT_PROGRESS_FILE_FACTOR * failures_max:
        return GiveUp(tally, f"the trainer failed {tally.failures_at_all} times and reports no steps; it {end}")
    return StartAgain(back_off(tally.failures), tally, f"the trainer {end}")
