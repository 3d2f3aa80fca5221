"""One life of the agent on a machine of a run that has several: no volume, what is shared lies on EFS.

The machines are alike. The one that holds the rendezvous' term speaks for the run: status, ledger, limits, the end.
"""

from __future__ import annotations

from concurrent.futures import Future

from spotheal.agent.life.boot import Boot
from spotheal.agent.life.finish import Finishing
from spotheal.agent.life.stages import Life
from spotheal.agent.nodes.shared_copy import SharedCopy
from spotheal.agent.nodes.storage import EfsStorage
from spotheal.agent.protocol.ends import End
from spotheal.agent.repository.working_copy import Fetched
from spotheal.agent.trainer.interpreter import Interpreter
from spotheal.agent.trainer.setup import made_before

END_SECONDS_MAX = 25 * 60.0  # in which another records the end that it has claimed: results may take 15 minutes
FOLLOW_SECONDS = 120.0  # in which a machine goes with the fleet that another has cancelled


class NodeLife(Life):
    """`meeting` is what its trainer's launcher asks where to meet the others."""

    def __init__(self, boot: Boot) -> None:
        storage = EfsStorage(boot)
        super().__init__(boot, storage)
        self._meeting = storage.meeting
        self._money.budget.others = self._meeting.known
        self._copy = SharedCopy(
            boot.config, self._folders, self._store, self._cloud, self._meeting, self._here.instance, self._clock,
            self._stop, self._log,
        )  # fmt: skip
        self._ended_by_us = False

    def __enter__(self) -> NodeLife:
        super().__enter__()
        self._boot.beside("meeting", lambda: self._meeting.beat_until(self._closing))
        return self

    # ------------------------------------------------------------------------------------------------------- the stages
    def _put_code(self, clone: Future[Fetched]) -> tuple[str, Interpreter]:
        """The working copy that all machines share: made by one, and no other touches it while some train in it."""
        with self._copy.turn(lambda: self._copy.made() is not None, "the working copy") as ours:
            if ours:
                self._copy.wait_until_unused()
                copy, interpreter = super()._put_code(clone)
                self._copy.publish(copy)
                return copy, interpreter
        self._end_fetch(clone)
        self._log.info("the working copy is there already", path=str(self._folders.clone))
        return self._copy.made() or "", self._find_interpreter()

    def _set_up(self, interpreter: Interpreter, copy: str) -> Interpreter:
        """Once for all machines: what the commands write into the copy and into the environment is on EFS."""
        where = self._confinement.surroundings()

        def is_made() -> bool:
            return made_before(self._config, self._folders, interpreter, where, copy=copy) is not None

        with self._copy.turn(is_made, "the environment of `setup`"):
            return super()._set_up(interpreter, copy)

    # ------------------------------------------------------------------------------------------------ the ways to leave
    def finish(self, end: End) -> None:
        """One of the machines records the end and cancels the fleet."""
        if not self._boot.over:
            known = self._meeting.recorded_end(END_SECONDS_MAX, self._stop)
            self._boot.over = known is not None
            end = known or end
        self._ended_by_us = not self._boot.over
        super().finish(end)

    def _leave_machine(self, work: Finishing, end: End) -> None:
        self._meeting.leave()
        if not self._ended_by_us and self._clock.sleep(FOLLOW_SECONDS, until=self._world.asked_to_stop):
            return
        super()._leave_machine(work, end)
