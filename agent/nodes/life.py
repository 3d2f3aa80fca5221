"""One life of the agent on a machine of a run that has several: no volume, what is shared lies on EFS.

The machines are alike. The one that holds the rendezvous' term speaks for the run: status, ledger, limits, the end.
"""

from __future__ import annotations

from spotheal.agent.life.boot import Boot
from spotheal.agent.life.code import Code
from spotheal.agent.life.ending import Ending
from spotheal.agent.life.finish import Finishing
from spotheal.agent.life.stages import Life
from spotheal.agent.nodes.shared_copy import SharedCopy
from spotheal.agent.nodes.storage import EfsStorage
from spotheal.agent.protocol.ends import End
from spotheal.agent.trainer.interpreter import Interpreter
from spotheal.agent.trainer.setup import made_before

END_SECONDS_MAX = 25 * 60.0  # in which another records the end that it has claimed: results may take 15 minutes
FOLLOW_SECONDS = 120.0  # in which a machine goes with the fleet that another has cancelled


class SharedCode(Code):
    """On EFS: made once for all machines, and no other touches it while some train in it."""

    def __init__(self, boot: Boot, storage: EfsStorage) -> None:
        super().__init__(boot, storage.folders)
        self._copy = SharedCopy(
            boot.config, storage.folders, boot.store, boot.cloud, storage.meeting, boot.here.instance, boot.clock,
            boot.stop, boot.log,
        )  # fmt: skip

    def _put_code(self) -> tuple[str, Interpreter]:
        with self._copy.turn(lambda: self._copy.made() is not None, "the working copy") as ours:
            if ours:
                self._copy.wait_until_unused()
                copy, interpreter = super()._put_code()
                self._copy.publish(copy)
                return copy, interpreter
        self._end_fetch()
        self._boot.log.info("the working copy is there already", path=str(self._folders.clone))
        return self._copy.made() or "", self._find_interpreter()

    def _set_up(self, interpreter: Interpreter, copy: str) -> Interpreter:
        where = self.confinement.surroundings()

        def is_made() -> bool:
            return made_before(self._boot.config, self._folders, interpreter, where, copy=copy) is not None

        with self._copy.turn(is_made, "the environment of `setup`"):
            return super()._set_up(interpreter, copy)


class NodeEnding(Ending):
    """One of the machines records the end and cancels the fleet."""

    def __init__(self, boot: Boot, storage: EfsStorage) -> None:
        super().__init__(boot)
        self._meeting = storage.meeting
        self._is_ours = False

    def recorded(self) -> End | None:
        end = self._meeting.recorded_end(END_SECONDS_MAX, self._boot.stop)
        self._is_ours = end is None
        return end

    def leave(self, work: Finishing, end: End) -> None:
        self._meeting.leave()
        asked_to_stop = self._boot.world.asked_to_stop
        if self._is_ours or not self._boot.clock.sleep(FOLLOW_SECONDS, until=asked_to_stop):
            super().leave(work, end)


def of_node(boot: Boot) -> Life:
    """The life of one machine of a run on several."""
    storage = EfsStorage(boot)
    boot.money.budget.others = storage.meeting.known
    code, ending = SharedCode(boot, storage), NodeEnding(boot, storage)
    return Life(boot, storage, code, ending, meeting=lambda: storage.meeting.beat_until(boot.closing))
