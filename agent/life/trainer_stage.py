"""The stage in which the trainer runs, with what depends on it: acknowledged checkpoints, base snapshots, limits.

The supervisor runs the trainer; this module tells the world how far it is and acts on what its progress means.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import Folders
from spotheal.agent.interruption.watcher import Interruption
from spotheal.agent.life.gpus import likely_cause
from spotheal.agent.life.spending import used_gib
from spotheal.agent.money.limits import Limits
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.environment import base_environment
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.ends import TrainerEnd
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.record.boot_record import Launch
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.logs import Logs
from spotheal.agent.record.metrics_shipping import Curves
from spotheal.agent.record.run_state import RunMemory
from spotheal.agent.record.status import Status
from spotheal.agent.trainer.ranks import Meeting
from spotheal.agent.trainer.saved_files import SavedFiles
from spotheal.agent.trainer.supervisor import Hooks, Supervisor
from spotheal.agent.trainer.written_files import WrittenFiles
from spotheal.agent.volume import extents
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.heal import Held
from spotheal.agent.volume.release import create_base
from spotheal.agent.volume.retention import clean_up

RETENTION_SECONDS = 600.0  # describes are stale for minutes: what one look at the surplus misses, a later one finds
STOP_SECONDS_MIN, STOP_SECONDS_MAX = 30.0, 3600.0  # what a last checkpoint may take, whatever is asked
EXTENTS_SECONDS = (60.0, 600.0)  # byte code is written at imports, and has its place on the device half a minute later
FILES_SECONDS = 30.0  # between two looks at what the trainer writes; a kill leaves what the last but one saw
BASE_AFTER_SAVE_SECONDS = 30.0  # how long a base snapshot waits for the save that a rebalance asks for


@dataclass(frozen=True)
class Instruments:
    """What the stage tells, and the volume it runs on (None where it runs without one: on AWS Batch)."""

    clock: Clock
    logs: Logs
    ledger: Ledger
    status: Status
    launch: Launch
    context: Context | None
    held: Held | None
    limits: Limits
    curves: Curves
    meeting: Meeting | None = None  # with the run's other machines


class TrainerStage:
    """One stay of the trainer on this instance. `notify`, `rebalance`, `look` and `stop` from any thread."""

    def __init__(
        self,
        config: InstanceConfig,
        folders: Folders,
        interpreter: Path,
        account: Account | None,
        around: Instruments,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self._config, self._folders, self._around = config, folders, around
        self._log, self._clock = around.logs.log, around.clock
        self._memory = RunMemory.read(folders, config.run, config.requested_at)
        self.saved_step = self._memory.saved_step
        self._found_step = self.saved_step or 0
        self._over = threading.Event()
        self._looked = threading.Event()  # for the last time: the volume is let go
        self._saved_files = SavedFiles(folders, self._looked)
        self._found_files = self._saved_files.mark()
        home = Path(base_environment({}, account, folders.home)["HOME"])
        self._written = WrittenFiles(folders, home, config.run, around.launch.instance, self._looked)
        self._acknowledged = self._stopping = False
        self._cleaned = float("-inf")
        # Two clean-ups at once delete the same things, and one is refused; a base must not be taken after the last one.
        self._turn = threading.Lock()
        self._supervisor = Supervisor(
            config,
            folders,
            around.clock,
            self._log,
            interpreter=interpreter,
            account=account,
            given=given,
            first_attempt=self._memory.attempt + 1,
            best_step=self._memory.best_step,
            saved_step=self.saved_step,
            failures=self._memory.failures,
            hooks=Hooks(
                on_line=around.logs.trainer_line,
                on_progress=self._on_progress,
                on_attempt=self._on_attempt,
                on_event=self._on_event,
            ),
            meeting=around.meeting,
        )

    def run(self) -> TrainerEnd:
        """The trainer, attempt by attempt, until it is done, has failed, or must go."""
        if self._around.limits.any:
            reason, _ = self._around.limits.look()
            if reason:  # reached before: what the trainer would do now is not paid for
                self._supervisor.stop_for_limit(reason)
        self._start_timers()
        try:
            ended = self._supervisor.run()
        finally:
            self._over.set()
        self._ship_curves(waiting=ended.kind != "interrupted")
        self.saved_step = ended.saved_step
        facts = {"attempt": ended.attempts, "best_step": self._supervisor.best_step, "failures": ended.failures}
        if ended.kind == "interrupted" and ended.saved_step is not None and ended.saved_step == ended.last_step:
            facts["final_saves"] = self._memory.final_saves + 1
        self._remember(ended.kind != "interrupted", **facts)
        if ended.kind == "interrupted":  # the handover waits for no walk over a data set
            self._looked.set()
        self.look()
        self._looked.set()
        if ended.kind == "done" or (self._acknowledged and ended.kind != "interrupted"):
            # What the earlier looks missed would stay, and cost, for ever; a run that is done moves no more.
            self._clean_up(run_ends=True, keep_bases=ended.kind != "done")
        self._log.info("training ended", kind=ended.kind, reason=ended.reason, saved_step=ended.saved_step)
        tail = "".join(f"\n  | {line}" for line in ended.tail) if ended.kind == "failed" else ""
        tail = (likely_cause(ended.tail) if ended.kind == "failed" else "") + tail
        return replace(ended, reason=ended.reason + tail)

    # ------------------------------------------------------------------------------------------- told by other threads
    def notify(self, interruption: Interruption) -> None:
        self._supervisor.notify(interruption.notice, until=interruption.trainer_until)

    def stop(self) -> None:
        """At once: this instance has no right to write any more."""
        self._supervisor.stop(0)

    def rebalance(self, stop: Stop) -> None:
        """Save now, then make the next snapshot small; training goes on, for most of these never come true."""
        before = self.saved_step
        self._supervisor.rebalance()
        until = self._clock.monotonic() + BASE_AFTER_SAVE_SECONDS
        while self.saved_step == before and self._clock.monotonic() < until:
            if self._clock.sleep(1.0, until=stop):
                return
        self.base_snapshot()

    def base_snapshot(self, first: bool = False) -> None:
        context, writer = self._around.context, self._around.held
        if context is None or writer is None:
            return
        try:
            with self._turn:
                snapshot = "" if self._over.is_set() else create_base(context, writer, self.saved_step, first=first)
            if snapshot:
                self._log.info("took a base snapshot", snapshot=snapshot)
                mounted = self._folders.checkpoints.parent
                self._around.ledger.add("snapshot", snapshot=snapshot, used_gib=used_gib(mounted))
        except SpothealError as error:
            self._log.warning("no base snapshot", error=str(error))

    def look(self) -> None:
        """What a heartbeat does: surplus again, and growth of the checkpoint folder where no progress is reported."""
        self._heed_stop()
        self._around.curves.ship_when_due()
        if self._acknowledged:
            if self._clock.monotonic() - self._cleaned >= RETENTION_SECONDS:
                self._cleaned = self._clock.monotonic()
                self._beside("retention", self._clean_up)
        elif self.saved_step is None and self._saved_files.mark() - self._found_files:
            self._acknowledge()

    # ---------------------------------------------------------------------------------------------------------- timers
    def _start_timers(self) -> None:
        if self._around.held is not None:  # on EFS several machines write; on AWS Batch nothing but checkpoints lasts
            if predecessor := self._written.predecessor():
                self._tell_of_predecessor(predecessor)
            self._beside("files", self._watch_files)
            self._beside("extents", self._record_extents)
        if self._around.limits.any:
            self._beside("limit", lambda: self._around.limits.watch(self._over, self._supervisor.stop_for_limit))
        interval = seconds(self._config.job.volume.snapshot_every)
        if interval:
            self._beside("base-snapshots", lambda: self._base_snapshots(interval))

    def _tell_of_predecessor(self, predecessor: Mapping[str, Any]) -> None:
        self._around.ledger.note("predecessor-files", **predecessor)
        if predecessor["missing"]:
            self._log.warning("files that the machine before had are missing", **predecessor)

    def _watch_files(self) -> None:
        while not self._clock.sleep(FILES_SECONDS, until=self._looked):
            try:
                self._written.look(self._memory.attempt)
            except OSError as error:
                self._log.warning("what the trainer writes cannot be recorded", error=str(error))

    def _record_extents(self) -> None:
        for seconds_more in EXTENTS_SECONDS:
            if self._clock.sleep(seconds_more, until=self._looked):
                return
            try:
                extents.record(self._folders, self._looked)
            except OSError as error:
                self._log.warning("what the next machine reads ahead cannot be recorded", error=str(error))

    def _ship_curves(self, waiting: bool) -> None:
        """Read before the volume goes; at an interruption the store must not keep the handover waiting."""
        files = self._around.curves.read()
        if waiting:
            self._around.curves.put(files)
        elif files:
            self._beside("curves", lambda: self._around.curves.put(files))

    def _base_snapshots(self, interval: float) -> None:
        while not self._clock.sleep(interval, until=self._over):
            self.base_snapshot()

    def _beside(self, name: str, work: Callable[[], object]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    # --------------------------------------------------------------------------------------------- told by supervisor
    def _on_attempt(self, attempt: int) -> None:
        self._around.logs.bind(attempt=attempt)
        self._around.status.note(attempt=attempt)
        self._remember(True, attempt=attempt)

    @property
    def _leads(self) -> bool:
        """This machine speaks for the run: what all its machines see is told once."""
        return self._around.meeting is None or self._around.meeting.leads

    def _on_event(self, name: str, **fields: Any) -> None:
        if self._leads:
            self._around.ledger.add(name, **fields)

    def _on_progress(self, progress: Progress) -> None:
        self._around.status.progress(progress)
        if self._leads:
            self._around.curves.note(progress)
        self._heed_stop()
        saved = progress.saved.step if progress.saved else None
        if saved is not None and saved != self.saved_step:
            self.saved_step = saved
            if saved > self._found_step and not self._acknowledged:
                self._acknowledge()

    def _heed_stop(self) -> None:
        """An operator asked for a last checkpoint and the end of the run (`fleetctl cancel --save`)."""
        request = self._around.status.stop_asked
        if request is None or self._stopping:
            return
        self._stopping = True
        seconds_asked = request.get("seconds")
        seconds_max = float(seconds_asked) if isinstance(seconds_asked, int | float) else STOP_SECONDS_MIN
        seconds_max = min(max(seconds_max, STOP_SECONDS_MIN), STOP_SECONDS_MAX)
        reason = str(request.get("reason") or "cancelled by an operator")
        self._log.info("asked to save and to end the run", reason=reason, seconds=seconds_max)
        self._supervisor.cancel(reason, seconds_max)

    def _acknowledge(self) -> None:
        """This launch has gained a durable checkpoint: what its predecessors left is surplus now."""
        self._acknowledged = True
        self._cleaned = self._clock.monotonic()
        self._beside("acknowledged", self._on_acknowledged)  # S3 and EC2 must not keep the supervisor waiting

    def _on_acknowledged(self) -> None:
        self._around.launch.note(acknowledged=True, starts=0)
        self._clean_up()
        # A first snapshot copies the whole volume, hours for a large one: not while the first move waits for it.
        self.base_snapshot(first=True)

    def _clean_up(self, run_ends: bool = False, keep_bases: bool = True) -> None:
        context, writer = self._around.context, self._around.held
        if context is None or writer is None or not self._config.job.volume.delete_superseded:
            return
        try:
            step = self.saved_step if self.saved_step is not None else 0
            with self._turn:
                deleted = clean_up(context, writer, acknowledged_step=step, run_ends=run_ends, keep_bases=keep_bases)
            if deleted.volumes or deleted.snapshots:
                self._log.info("deleted what is superseded", volumes=deleted.volumes, snapshots=deleted.snapshots)
                names = {"volumes": list(deleted.volumes), "snapshots": list(deleted.snapshots)}
                self._around.ledger.add("deleted", **names)
        except SpothealError as error:
            self._log.warning("superseded volumes and snapshots are left", error=str(error))

    def _remember(self, durable: bool, **changes: Any) -> None:
        self._memory = replace(self._memory, saved_step=self.saved_step, **changes)
        if not self._leads:
            return
        try:
            self._memory.write(self._folders, durable=durable)
        except OSError as error:
            self._log.warning("the run's memory on the volume cannot be written", error=str(error))
