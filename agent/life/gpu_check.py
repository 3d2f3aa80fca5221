"""The stage that looks whether this machine's GPUs are enough: before the trainer starts, and beside the healing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.aws.imds import Identity
from spotheal.agent.life.gpus import Bars, Found, Shortfall, Unsuitable, decide_unsuitable, look, shortfall
from spotheal.agent.life.preflight import patiently
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Interrupted, SpothealError
from spotheal.agent.record.boot_record import Launch


class Cloud(Protocol):
    """What of `ec2.Ec2` this needs."""

    def instances(self, instances: set[str]) -> tuple[Instance, ...]: ...


@dataclass(frozen=True)
class GpuCheck:
    """`find_barred` and `judge` return the end of the run, or None; Unsuitable where another machine may do better."""

    bars: Bars
    cloud: Cloud
    launch: Launch
    here: Identity
    clock: Clock
    stop: Stop
    log: Any

    @property
    def is_asked(self) -> bool:
        return self.bars.need.gpus > 0

    def find_barred(self) -> End | None:
        """An earlier machine of this type has found it out: nothing is looked at, and nothing claimed."""
        if not self.is_asked:
            return None
        kind = self.here.instance_type
        reason = patiently(lambda: self.bars.reason(kind), self.clock, self.stop, self.log)
        return self._leave(reason) if reason else None

    def look(self) -> Found:
        """The facts; takes seconds, and minutes where a driver is still loading."""
        return look(self.clock, self.stop, self.bars.need) if self.is_asked else Found()

    def judge(self, found: Found) -> End | None:
        """Raises SetupFailed where the image is at fault."""
        if self.stop.is_set():  # the look was cut short, and says nothing
            raise Interrupted("this machine goes away")
        lacks = shortfall(self.bars.need, found)
        if lacks is None:
            return None
        return self._leave(self._bar(lacks))

    def _bar(self, lacks: Shortfall) -> str:
        kind, instance = self.here.instance_type, self.here.instance
        try:
            return self.bars.add(kind, instance, lacks)
        except SpothealError as error:  # the next machine of this type finds it out again
            self.log.warning("what this type lacks is not stored", error=error.message)
            return f"{kind} {lacks.what}, and the job asks for {self.bars.need}"

    def _leave(self, reason: str) -> End | None:
        end = patiently(lambda: self._end(reason), self.clock, self.stop, self.log)
        if end is None:
            raise Unsuitable(reason)
        return end

    def _end(self, reason: str) -> End | None:
        end = decide_unsuitable(self.launch.others_since_progress(), reason)
        return None if end is None or self._somebody_trains() else end

    def _somebody_trains(self) -> bool:
        """A run is never parked over the head of a living writer."""
        writer = self.bars.store.highest_term()
        if writer is None or writer.instance == self.here.instance:
            return False
        return any(one.state in ("pending", "running") for one in self.cloud.instances({writer.instance}))
