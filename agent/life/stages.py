"""The stages of an instance's life, and what runs beside them: heartbeat, interruption watcher, log shipping.

Only wiring and order are here; each stage is a module of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from spotheal.agent.interruption.handover import HandoverResult, Steps, hand_over
from spotheal.agent.interruption.watcher import Interruption, Watcher
from spotheal.agent.life.boot import Boot, RunOver
from spotheal.agent.life.code import Code
from spotheal.agent.life.ending import Ending
from spotheal.agent.life.finish import POWER_OFF_SECONDS, Finishing, record, store_results
from spotheal.agent.life.gpu_check import GpuCheck
from spotheal.agent.life.gpus import Unsuitable
from spotheal.agent.life.on_demand import Rescue
from spotheal.agent.life.preflight import LookBack
from spotheal.agent.life.storage import Storage
from spotheal.agent.life.trainer_stage import Instruments, TrainerStage
from spotheal.agent.money.messages import interruption_message
from spotheal.agent.money.notify import SECONDS_MAX, Message
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.ends import BARRED, End, TrainerEnd
from spotheal.agent.protocol.errors import ExitCode, Interrupted, SpothealError
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import Phase
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.agent.record.results import LiveMetrics, place_of
from spotheal.agent.record.unplaced_results import BYTES_MAX, LISTED, Unplaced
from spotheal.agent.record.watchdog import HEARTBEAT_SECONDS_MAX, WATCH_SECONDS_MAX
from spotheal.agent.trainer.interpreter import Interpreter
from spotheal.agent.volume.warmup import Warmup

SHUTDOWN_SECONDS = 90.0  # what an operating system that goes down leaves us; the unit asks for 110
_NOTICES, _HEARTBEAT = "the watch for notices", "the heartbeat"  # loops that prove the agent's life


class Life:
    """One life of the agent on one instance."""

    def __init__(
        self, boot: Boot, storage: Storage, code: Code, ending: Ending, **beats: Callable[[], object]
    ) -> None:
        """`beats` run beside it, each in a thread of its name."""
        config, world = boot.config, boot.world
        self._boot, self._config, self._world = boot, config, world
        self._log, self._clock, self._stop = boot.log, boot.clock, boot.stop
        self._store, self._cloud, self._here = boot.store, boot.cloud, boot.here
        self._launch, self._ledger, self._money, self._status = boot.launch, boot.ledger, boot.money, boot.status
        after = seconds(config.job.fleet.on_demand_after)
        self._rescue = Rescue(world.scheduler, config.job.job.name, config.run, after, self._clock, self._log)
        self._storage, self._code, self._ending, self._beats = storage, code, ending, beats
        self._folders, self._confinement = storage.folders, code.confinement
        self._warmup = Warmup(self._log)
        self._results = place_of(config, world.s3, boot.efs, lambda: self._confinement.account)
        scratch = self._folders.run_dir / f"metrics.{config.run}.jsonl"
        self._live = LiveMetrics(self._results, self._folders, scratch, self._clock, self._log, storage.meeting)
        self._interpreter: Interpreter | None = None
        self._trainer: TrainerStage | None = None
        self._steps_down = False  # this machine ends itself
        self.gpus = GpuCheck(boot)
        self._liveness = world.liveness
        self._watcher = Watcher(
            world.metadata,
            self._clock,
            on_notice=self._on_notice,
            on_rebalance=self._on_rebalance,
            log=lambda text: self._log.warning(text),
            on_poll=self._liveness.expect(_NOTICES, WATCH_SECONDS_MAX),
        )

    # ------------------------------------------------------------------------------------------- what runs beside it
    def __enter__(self) -> Life:
        self._rescue.put_off()
        self._watcher.start()
        lives = self._liveness.expect(_HEARTBEAT, HEARTBEAT_SECONDS_MAX)
        closing = self._boot.closing
        self._boot.beside("heartbeat", lambda: self._status.beat(closing, lambda: self._beat(lives)))
        self._liveness.start(self._status.in_words)
        self._boot.beside("prices", lambda: self._money.prices.watch(closing))
        self._boot.beside("shutdown", self._watch_shutdown)
        for name, work in self._beats.items():
            self._boot.beside(name, work)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._boot.closing.set()
        self._warmup.end()
        self._watcher.stop()
        for loop in (_NOTICES, _HEARTBEAT):
            self._liveness.release(loop)
        if self._trainer is not None and error is not None:
            self._trainer.stop()
        self._ledger.flush()
        self._world.logs.ship(self._store, self._here.instance)
        self._boot.pool.shutdown(wait=False, cancel_futures=True)
        self._stop.set()  # a clone that goes on would outlive its cage
        self._confinement.leave()

    def _beat(self, lives: Callable[[], None]) -> None:
        lives()
        self._world.logs.ship(self._store, self._here.instance)
        self._ledger.flush()
        self._rescue.put_off()
        trainer = self._trainer  # the stage may end meanwhile, and a heartbeat that fails never beats again
        if trainer is not None:
            trainer.look()
        self._storage.look()
        # Ended by another: we look back, and cancel the fleet.
        ended = self._status.stands is not None and not self._boot.over
        if self._status.fenced.is_set() or ended:
            self._stop.set()
            if trainer is not None:
                trainer.stop()
        self._confinement.keep_closed()

    def _watch_shutdown(self) -> None:
        """SIGTERM is the operating system going down, or a person: either way the trainer saves."""
        while not self._boot.closing.is_set():
            if self._clock.sleep(1.0, until=self._world.asked_to_stop):
                self._watcher.shutdown(self._clock.now() + timedelta(seconds=SHUTDOWN_SECONDS))
                return

    def _on_notice(self, interruption: Interruption) -> None:
        notice = interruption.notice
        self._stop.set()
        if self._boot.over or self._steps_down:
            return  # the end of the run takes the machine with it, or we do: that is no interruption
        if (trainer := self._trainer) is not None:
            trainer.notify(interruption)
        self._launch.note(outcome="interrupted")
        ends = rfc3339(self._clock.now() + timedelta(seconds=interruption.ends_at - self._clock.monotonic()))
        self._ledger.add("notice", action=notice.action, deadline=rfc3339(notice.deadline), ends=ends)
        self._status.notice(notice)
        if notice.action != "shutdown":
            identity = self._here
            self._tell(
                interruption_message(identity.instance, identity.zone, notice.action, ends, self._saved_step_now())
            )

    def _on_rebalance(self) -> None:
        self._ledger.add("rebalance")
        if (trainer := self._trainer) is not None:
            trainer.rebalance(self._stop)

    def _saved_step_now(self) -> int | None:
        trainer = self._trainer
        return self._storage.saved_step if trainer is None else trainer.saved_step

    def _tell(self, message: Message, wait_seconds: float = 0.0) -> None:
        """In a thread of its own: nobody who is told can hold the run up."""
        if not self._money.messenger.is_there:
            return
        is_told = threading.Event()

        def tell() -> None:
            self._money.messenger.tell(message)
            is_told.set()

        self._boot.beside("tell", tell)
        if wait_seconds:
            self._clock.sleep(wait_seconds, until=is_told)

    # ----------------------------------------------------------------------------------------------------- the stages
    def look_back(self) -> None:
        """Is the run over already? An instance that is launched into a run that has ended cancels its fleet again."""
        if self._boot.refused is not None:
            raise self._boot.refused
        instance = self._here.instance
        note_predecessor = self._storage.note_predecessor
        back = LookBack(
            self._store, self._cloud, self._launch, instance, self._clock, self._stop, self._log, note_predecessor
        )
        found = back.find_end()
        if found is not None:
            end, self._boot.over = found
            raise RunOver(end)
        self.gpus.check_type()

    def start(self) -> None:
        """What needs no storage begins while it is mounted: the clone, and reading what `import torch` will read, and
        the look at the GPUs, which a driver answers only after seconds."""
        self.gpus.start(self._boot.pool)
        self._warmup.libraries_of_torch(self._config.job.job.python)
        self._code.start()

    def mount(self) -> None:
        """The storage, with the job's work on it."""
        self._storage.mount(self._confinement.account, self.gpus.check_if_known, self._warmup)

    def prepare(self) -> None:
        self._interpreter = self._code.prepare()

    def run_trainer(self) -> TrainerEnd:
        """The trainer, attempt by attempt, until it is done, has failed, or must go."""
        assert self._interpreter is not None  # the stages before
        around = self._instruments()
        cage, python = self._confinement, self._interpreter.path
        variables = {**cage.trainers, **self._storage.environment()}
        self._trainer = TrainerStage(self._config, self._folders, python, cage.account, around, variables)
        interruption = self._watcher.interruption
        if interruption is not None:  # it came between the last look and here
            self._trainer.notify(interruption)
        elif self._stop.is_set():
            raise Interrupted("this machine goes away")
        self._launch.note(outcome="training")
        self._status.update(phase=Phase.TRAINING)
        trained = threading.Event()
        self._boot.beside("metrics", lambda: self._live.watch(trained))
        self._storage.watch(trained)
        try:
            return self._trainer.run()
        finally:
            trained.set()
            self._storage.saved_step, self._trainer = self._trainer.saved_step, None
            self._storage.measure()

    def _instruments(self) -> Instruments:
        at = self._storage
        return Instruments(
            self._clock, self._world.logs, self._ledger, self._status, self._launch, at.context, at.held,
            self._money.limits(self._tell), self._money.curves(self._folders.metrics_file), at.meeting,
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------- the ways to leave
    def hand_over(self) -> ExitCode | None:
        """Leave the volume to a successor and wait for the end; None if the agent begins again."""
        self._warmup.end()
        if self._status.fenced.is_set():
            self._step_aside()
            raise Interrupted("another instance holds a later term", next_step="nothing: it goes on with the run")
        interruption = self._watcher.interruption
        if interruption is None:
            raise Interrupted("stopped without an interruption")
        at = self._storage
        at.find()
        steps = Steps(
            end_trainer=lambda until: self._confinement.end_processes(),  # the trainer has ended; so does what hid
            leave_volume=self._world.logs.leave_volume,
            create_handover=at.create_handover,
            detach=at.detach,
            create_base=at.create_base,
            report=self._report_handover,
            log=lambda text: self._log.info(text),
        )
        start = self._clock.monotonic()
        self._handed_over_at = start
        result = hand_over(interruption, at.mount_point, self._world.host, steps, self._clock, self._watcher)
        if not result.begin_again:
            # SIGTERM may have been a person's `kill`, and then this machine lives on: with 0 it would never be
            # used again, and cost. A machine that goes down starts no agent again, whatever the code.
            return ExitCode.INTERRUPTED if interruption.notice.action == "shutdown" else ExitCode.OK
        self._log.warning("the interruption did not come true; beginning again")
        self._ledger.add("interruption-withdrawn")
        at.held = None
        self._stop.clear()
        self._watcher.begin_again()
        return self._ending.code_if_withdrawn

    def _report_handover(self, result: HandoverResult) -> None:
        self._storage.handed_over()
        took = round(self._clock.monotonic() - self._handed_over_at, 1)
        steps = {"snapshot": result.snapshot or None, "unmounted": result.unmounted, "detached": result.detached}
        self._log.info("handed over", **steps, seconds=took, faults=result.faults or None)
        details = {"used_gib": self._storage.used_gib, "faults": result.faults}
        self._ledger.add("handover", **steps, saved_step=self._storage.saved_step, seconds=took, **details)
        self._status.update(phase=Phase.INTERRUPTED, reason=f"notice: {result.interruption.notice.action}")
        self._status.leave()
        self._world.logs.ship(self._store, self._here.instance)
        self._ending.handed_over(result)

    def step_down(self, unsuitable: Unsuitable) -> None:
        """Leave to another instance type what this one cannot do; nothing was written to the volume, if we have it."""
        self._log.warning("this machine ends itself", why=unsuitable.message)
        self._steps_down = True
        self._launch.note(outcome=BARRED, reason=unsuitable.message)
        self._ledger.add("barred", instance_type=self._here.instance_type, reason=unsuitable.message)
        self._status.note(reason=unsuitable.message)
        self._status.publish()
        self._step_aside()
        self._status.leave()
        self._world.logs.ship(self._store, self._here.instance)
        try:
            until_it_works(
                lambda: self._cloud.terminate(self._here.instance), self._clock, pause=5.0,
                stop=self._world.asked_to_stop, log=self._log, line="this machine is not ended yet; trying again",
            )  # fmt: skip
        except Interrupted:
            return
        except SpothealError as error:  # a spot instance that switches itself off is ended too
            self._log.error("this machine may not end itself; switching off", error=error.message)
        self._clock.sleep(POWER_OFF_SECONDS, until=self._world.asked_to_stop)
        self._world.power_off()

    def _step_aside(self) -> None:
        self._confinement.end_processes()
        self._storage.step_aside()

    def finish(self, end: End) -> None:
        """Record the end and cancel the fleet, last. Raises Interrupted where the machine goes away before that."""
        if not self._boot.over and (recorded_end := self._ending.recorded()) is not None:
            self._boot.over, end = True, recorded_end
        at = self._storage
        results = self._folders.results if at.has_results else None
        stores = results is not None and not self._boot.over
        unplaced = at.unplaced() if stores and end.phase is Phase.DONE else Unplaced()
        work = Finishing(
            store=self._store,
            cloud=self._cloud,
            clock=self._clock,
            ledger=self._ledger,
            status=self._status,
            log=self._log,
            instance=self._here.instance,
            volume=None if at.held is None else at.held.volume,
            results=results,
            results_to=self._results,
            results_too=[*self._live.last(), *unplaced.listed_in(self._folders.run_dir)] if stores else [],
            saved_step=at.saved_step,
            limit=self._money.limits(self._tell).look,
        )
        was_over = self._boot.over  # an earlier instance has recorded it; only its fleet is still there
        if not was_over:
            missing = store_results(work, self._stop)
            if missing and self._stop.is_set():
                raise Interrupted(missing)
            missing = missing or self._say_unplaced(unplaced)
            end = record(work, end, missing)
            self._boot.over = True
            self._launch.note(outcome="ended", reason="" if end.phase is Phase.DONE else end.reason)
        else:
            self._ledger.add("leaving")
        self._log.info("the run is over", phase=end.phase.value, reason=end.reason)
        if self._money.messenger.is_there:
            self._tell(self._money.end_message(end, self._status.document()), SECONDS_MAX)
        keep = seconds(self._config.job.job.keep_on_failure)
        if end.phase not in (Phase.DONE, Phase.CANCELLED) and keep and not was_over:
            self._log.warning("this instance stays up for debugging", minutes=keep / 60)
            self._clock.sleep(keep, until=self._stop)
            self._ledger.add("leaving")
        self._warmup.end()
        self._confinement.end_processes()
        at.let_go()
        self._world.logs.ship(self._store, self._here.instance)
        self._rescue.drop()
        self._ending.leave(work, end)

    def _say_unplaced(self, unplaced: Unplaced) -> str:
        """Why what the script wrote next to its code is not all stored; "" if only data sets and so on are."""
        if unplaced.files or unplaced.left_out:
            message = "the results folder is empty: stored what the script wrote next to its code"
            self._log.info(message, files=len(unplaced.files), left_out=list(unplaced.left_out[:20]) or None)
        return f"more than {BYTES_MAX >> 30} GiB lie next to the code: see {LISTED}" if unplaced.too_much else ""
