"""How a run's end, and an interruption, leave this machine and its fleet. Here: the end of a job."""

from __future__ import annotations

from spotheal.agent.interruption.handover import HandoverResult
from spotheal.agent.life.boot import Boot
from spotheal.agent.life.finish import Finishing, end_fleet
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import ExitCode


class Ending:
    """The last act is the fleet's end, and with it this machine's."""

    code_if_withdrawn: ExitCode | None = None  # None: if an interruption does not come true, the agent begins again

    def __init__(self, boot: Boot) -> None:
        self._boot = boot

    def recorded(self) -> End | None:
        """The end that another machine of the run has recorded, or records now."""
        return None

    def handed_over(self, result: HandoverResult) -> None:
        """The handover is done, and reported."""

    def leave(self, work: Finishing, end: End) -> None:
        """The end is recorded, and the storage is let go."""
        end_fleet(work, self._boot.world, self._boot.closing)
