"""The stage that looks whether this machine's GPUs are enough: before the trainer starts, and beside the healing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from spotheal.agent.life.boot import Boot, RunOver
from spotheal.agent.life.gpus import Bars, Found, Need, Shortfall, Unsuitable, decide_unsuitable, look, shortfall
from spotheal.agent.life.preflight import patiently
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Interrupted, SpothealError


class GpuCheck:
    """`check_type` and `check` raise RunOver, or Unsuitable if another machine may do better."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._bars = Bars(boot.store, Need.of(boot.config), boot.config.requested_at)
        self._found: Future[Found] = Future()

    @property
    def is_asked(self) -> bool:
        return self._bars.need.gpus > 0

    def check_type(self) -> None:
        """An earlier machine of this type has found it out: nothing is looked at, and nothing claimed."""
        if not self.is_asked:
            return
        kind = self._boot.here.instance_type
        reason = patiently(lambda: self._bars.reason(kind), self._boot.clock, self._boot.stop, self._boot.log)
        if reason:
            self._leave(reason)

    def start(self, pool: ThreadPoolExecutor) -> None:
        self._found = pool.submit(self.look)

    def look(self) -> Found:
        """The facts; takes seconds, and minutes where a driver is still loading."""
        return look(self._boot.clock, self._boot.stop, self._bars.need) if self.is_asked else Found()

    def check_if_known(self) -> None:
        """A machine whose GPUs are too small need not wait for its turn."""
        if self._found.done():
            self.check()

    def check(self) -> None:
        """Raises SetupFailed too, if the image is at fault."""
        gpus = self._found.result()
        if self._boot.stop.is_set():  # the look was cut short, and says nothing
            raise Interrupted("this machine goes away")
        if (lacks := shortfall(self._bars.need, gpus)) is not None:
            self._leave(self._bar(lacks))

    def _bar(self, lacks: Shortfall) -> str:
        kind, instance = self._boot.here.instance_type, self._boot.here.instance
        try:
            return self._bars.add(kind, instance, lacks)
        except SpothealError as error:  # the next machine of this type finds it out again
            self._boot.log.warning("what this type lacks is not stored", error=error.message)
            return f"{kind} {lacks.what}, and the job asks for {self._bars.need}"

    def _leave(self, reason: str) -> NoReturn:
        end = patiently(lambda: self._end(reason), self._boot.clock, self._boot.stop, self._boot.log)
        raise Unsuitable(reason) if end is None else RunOver(end)

    def _end(self, reason: str) -> End | None:
        end = decide_unsuitable(self._boot.launch.others_since_progress(), reason)
        return None if end is None or self._somebody_trains() else end

    def _somebody_trains(self) -> bool:
        """A run is never parked over the head of a living writer."""
        writer = self._bars.store.highest_term()
        if writer is None or writer.instance == self._boot.here.instance:
            return False
        return any(
            instance.state in ("pending", "running") for instance in self._boot.cloud.instances({writer.instance})
        )
