"""The on-demand rescue (`[fleet] on_demand_after`): a dead man's switch that lives at AWS, not here.

`request` makes a one-time schedule of EventBridge Scheduler which, when its time comes, asks the run's fleet for an
on-demand instance instead of a spot one. Every instance of the run puts that time off while it lives; where spot has no
capacity nobody does, and the schedule fires. So no controller is needed, and the end of the run removes it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import NotFound, SpothealError
from spotheal.agent.protocol.names import rescue_schedule, schedule_expression

PUT_OFF_SHARE = 8  # the time is put off again after so small a part of it: the rescue comes at most that much early
PUT_OFF_SECONDS_MIN = 60.0
# UpdateSchedule replaces everything, and refuses what GetSchedule adds to it.
_ANSWER_ONLY = ("Arn", "CreationDate", "LastModificationDate", "ResponseMetadata")


class Rescue:
    """The schedule of one run. Without it (no such key, or it has fired) every call does nothing."""

    def __init__(self, scheduler: Any, job: str, run: str, after_seconds: float, clock: Clock, log: Any) -> None:
        """`scheduler`: a boto3 client, or None where the run has no rescue."""
        self._scheduler, self._name, self._after = scheduler, rescue_schedule(job, run), after_seconds
        self._clock, self._log = clock, log
        self._schedule: dict[str, Any] | None = None
        self._gone = scheduler is None
        self._put_off_at = float("-inf")

    def put_off(self) -> None:
        """Tell AWS that an instance of the run lives. Called with each heartbeat; it asks AWS only when due."""
        moment = self._clock.monotonic()
        if self._gone or moment - self._put_off_at < max(PUT_OFF_SECONDS_MIN, self._after / PUT_OFF_SHARE):
            return
        at = self._clock.now() + timedelta(seconds=self._after)
        try:
            with translated("put the on-demand rescue off"):
                schedule = self._schedule or self._scheduler.get_schedule(Name=self._name)
                body = {key: value for key, value in schedule.items() if key not in _ANSWER_ONLY}
                self._scheduler.update_schedule(**{**body, "ScheduleExpression": schedule_expression(at)})
                self._schedule = body
                self._put_off_at = moment
        except NotFound:
            self._gone = True
            self._log.info("the on-demand rescue has fired, or was removed", schedule=self._name)
        except SpothealError as error:  # it would only come early, and this instance is saved by SIGTERM then
            self._log.warning("the on-demand rescue could not be put off", error=error.message)

    def drop(self) -> None:
        """The run is over. One that stays behind finds no fleet, and AWS deletes it after its time."""
        if self._gone:
            return
        try:
            with translated("delete the on-demand rescue"):
                self._scheduler.delete_schedule(Name=self._name)
        except NotFound:
            pass
        except SpothealError as error:
            self._log.warning("the on-demand rescue could not be deleted", error=error.message)
            return
        self._gone = True
