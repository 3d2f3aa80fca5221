"""The stage that looks whether this machine's GPUs are enough: before the trainer starts, and beside the healing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.aws.imds import Identity
from spotheal.agent.life.boot import RunOver
from spotheal.agent.life.gpus import Bars, Found, Shortfall, Unsuitable, decide_unsuitable, look, shortfall
from spotheal.agent.life.preflight import patiently
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Interrupted, SpothealError
from spotheal.agent.record.boot_record import Launch


class Cloud(Protocol):
    """What of `ec2.Ec2` this needs."""

    def instances(self, instances: set[str]) -> tuple[Instance, ...]: ...


@dataclass
class GpuCheck:
    """`check_type` and `check` raise RunOver, or Unsuitable if another machine may do better."""

    bars: Bars
    cloud: Cloud
    launch: Launch
    here: Identity
    clock: Clock
    stop: Stop
    log: Any
    _found: Future[Found] = field(default_factory=Future)

    @property
    def is_asked(self) -> bool:
        return self.bars.need.gpus > 0

    def check_type(self) -> None:
        """An earlier machine of this type has found it out: nothing is looked at, and nothing claimed."""
        if not self.is_asked:
            return
        kind = self.here.instance_type
        reason = patiently(lambda: self.bars.reason(kind), self.clock, self.stop, self.log)
        if reason:
            self._leave(reason)

    def start(self, pool: ThreadPoolExecutor) -> None:
        self._found = pool.submit(self.look)

    def look(self) -> Found:
        """The facts; takes seconds, and minutes where a driver is still loading."""
        return look(self.clock, self.stop, self.bars.need) if self.is_asked else Found()

    def check_if_known(self) -> None:
        """A machine whose GPUs are too small need not wait for its turn."""
        if self._found.done():
            self.check()

    def check(self) -> None:
        """Raises SetupFailed too, if the image is at fault."""
        found = self._found.result()
        if self.stop.is_set():  # the look was cut short, and says nothing
            raise Interrupted("this machine goes away")
        if (lacks := shortfall(self.bars.need, found)) is not None:
            self._leave(self._bar(lacks))

    def _bar(self, lacks: Shortfall) -> str:
        kind, instance = self.here.instance_type, self.here.instance
        try:
            return self.bars.add(kind, instance, lacks)
        except SpothealError as error:  # the next machine of this type finds it out again
            self.log.warning("what this type lacks is not stored", error=error.message)
            return f"{kind} {lacks.what}, and the job asks for {self.bars.need}"

    def _leave(self, reason: str) -> NoReturn:
        end = patiently(lambda: self._end(reason), self.clock, self.stop, self.log)
        raise Unsuitable(reason) if end is None else RunOver(end)

    def _end(self, reason: str) -> End | None:
        end = decide_unsuitable(self.launch.others_since_progress(), reason)
        return None if end is None or self._somebody_trains() else end

    def _somebody_trains(self) -> bool:
        """A run is never parked over the head of a living writer."""
        writer = self.bars.store.highest_term()
        if writer is None or writer.instance == self.here.instance:
            return False
        return any(one.state in ("pending", "running") for one in self.cloud.instances({writer.instance}))
