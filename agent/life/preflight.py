"""Whether the run is over before this instance does anything for it: ended by an earlier one, or to be parked now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, Stop, parse_rfc3339, rfc3339
from spotheal.agent.protocol.ends import RECORDED_OUTCOMES, End, decide_parked
from spotheal.agent.protocol.names import Phase
from spotheal.agent.protocol.retry_budget import Patience
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.agent.record.boot_record import Launch

PATIENCE_SECONDS = 30 * 60.0
_RETRY_SECONDS = 2.0
T = TypeVar("T")


class Cloud(Protocol):
    """What of `ec2.Ec2` this needs."""

    def instances(self, instances: set[str]) -> tuple[Instance, ...]: ...


GUESS_SECONDS = 7200.0  # between interruptions, of a run that has met none
SAVED_FACTOR_MAX = 20.0  # simulated on six traces of spot interruptions: more gains nothing


@dataclass(frozen=True)
class LookBack:
    """`find_end` raises Interrupted where `stop` is set, Retryable where the store fails for half an hour."""

    store: Store
    cloud: Cloud
    launch: Launch
    instance: str
    clock: Clock
    stop: Stop
    log: Any
    on_status: Callable[[Mapping[str, Any]], None] = lambda status: None

    def find_end(self) -> tuple[End, bool] | None:
        """The end of the run, and whether it is recorded already; None where the run goes on."""
        status = patiently(self.store.read_status, self.clock, self.stop, self.log) or {}
        self.on_status(status)
        phase = str(status.get("phase", ""))
        if phase in {end.value for end in Phase if end.is_end}:
            return End(Phase(phase), str(status.get("reason", ""))), True
        parked = patiently(lambda: self._parked(last_saved_at(status)), self.clock, self.stop, self.log)
        return None if parked is None else (parked, False)

    def _parked(self, saved_at: str) -> End | None:
        """Never over the head of a living writer, and launches that live are no failures."""
        launches, starts = self.launch.others_since_progress(), self.launch.starts
        writer = self.store.highest_term() if decide_parked(launches, starts, saved_at) is not None else None
        names = {
            str(launch.get("instance", "")) for launch in launches if launch.get("outcome") not in RECORDED_OUTCOMES
        }
        instances = self.cloud.instances((names | ({writer.instance} if writer else set())) - {self.instance})
        launches = self._with_interruptions(launches, instances)
        living = {instance.id for instance in instances if instance.state in ("pending", "running")}
        if writer is not None and writer.instance in living:
            return None
        return decide_parked([launch for launch in launches if launch.get("instance") not in living], starts, saved_at)

    def _with_interruptions(
        self, launches: list[dict[str, Any]], instances: Iterable[Instance]
    ) -> list[dict[str, Any]]:
        """`others`, with what AWS says of those that could not say it: a machine that hung when its notice came, or got
        none, was interrupted all the same. It is stored, because AWS forgets an instance an hour after its end.

        Who ended by a user's call counts as before: the agent itself ends a machine that hangs so.
        """
        interrupted = {instance.id: instance.state for instance in instances if instance.was_interrupted}
        result = []
        for launch in launches:
            name = str(launch.get("instance", ""))
            if name in interrupted and launch.get("outcome") not in RECORDED_OUTCOMES:
                launch = {**launch, "outcome": "interrupted"}
                if interrupted[name] in ("terminated", "stopped"):  # its own agent writes no more
                    self.store.count_launch(name, launch)
            result.append(launch)
        return result


def between_interruptions(run_seconds: float, machines_lost: int, saved_at_the_end: int = 0) -> float:
    """Seconds between two that cost steps, as a run of `run_seconds` has met them, and one in two hours before.

    A machine whose trainer saved its last step at the notice (`saved_at_the_end`) cost none. They lengthen the time at
    most twentyfold: the next one may come without a notice. With the guess counted as one interruption, a first one
    after a minute does not make the rate sixty an hour.
    """
    seconds, lost = GUESS_SECONDS + max(0.0, run_seconds), max(0, machines_lost)
    missed = max(0, lost - max(0, saved_at_the_end))
    return min(seconds / (1 + missed), seconds / (1 + lost) * SAVED_FACTOR_MAX)


def patiently(ask: Callable[[], T], clock: Clock, stop: Stop, log: Any) -> T:
    """A store that is throttled is no fault of this start: ended by it, ten starts within a minute parked a run.

    Raises Interrupted where `stop` is set, Retryable where it goes on for `PATIENCE_SECONDS`, and PermissionDenied
    where rights are refused for as long as healing bears it.
    """
    passes = Patience(clock, PATIENCE_SECONDS).bears
    line = "looking back; trying again"
    return until_it_works(ask, clock, pause=_RETRY_SECONDS, passes=passes, stop=stop, log=log, line=line)


def last_saved_at(status: Mapping[str, Any]) -> str:
    """When the last checkpoint that status.json knows of was acknowledged, as our documents write it; "" for never."""
    progress = status.get("progress")
    saved = progress.get("saved") if isinstance(progress, dict) else None
    try:
        return rfc3339(parse_rfc3339(str(saved["time"]) if isinstance(saved, dict) else ""))
    except (ValueError, KeyError):
        return ""
