"""The life of one container of AWS Batch: a single job, or one child of an array, for as long as its host lives.

What Batch retries is told by the exit code (`fleet.batch.definition` has the rules): 0 done; 75 the host goes away, or
something outside the job was at fault; anything else is an end of the run, and is not tried again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from spotheal.agent.aws import clients
from spotheal.agent.aws.s3 import Store
from spotheal.agent.batch.copies import Copies
from spotheal.agent.batch.copying import Copying
from spotheal.agent.batch.ends import Counted, NoFleet, end_of_sweep, record_end, without_results
from spotheal.agent.batch.mounted import folders_of, mounted
from spotheal.agent.batch.place import EFS, Place, identity
from spotheal.agent.files.folders import publish
from spotheal.agent.interruption.watcher import Interruption, Watcher
from spotheal.agent.life.confinement import Confinement
from spotheal.agent.life.finish import Finishing, store_results
from spotheal.agent.life.preflight import patiently
from spotheal.agent.life.trainer_stage import Instruments, TrainerStage
from spotheal.agent.life.world import World
from spotheal.agent.machine.efs import Efs
from spotheal.agent.money.budget import Budget
from spotheal.agent.money.limits import Limits
from spotheal.agent.money.messages import end_message
from spotheal.agent.money.notify import Message, Messenger
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.contract import EXIT_SAVED_AND_STOPPED, Notice
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.ends import End, TrainerEnd, decide_end
from spotheal.agent.protocol.errors import ConfigError, Conflict, ExitCode, Fatal, Interrupted, Retryable
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import LAYOUT, EfsUrl, Phase
from spotheal.agent.record.boot_record import Launch
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.metrics_shipping import Curves
from spotheal.agent.record.results import LiveMetrics, place_of
from spotheal.agent.record.status import Status
from spotheal.agent.repository.working_copy import link_kept
from spotheal.agent.sweep.queue import Queue
from spotheal.agent.sweep.worker import entry_of
from spotheal.agent.trainer.interpreter import find_interpreter
from spotheal.agent.trainer.setup import prepare as run_setup

SHUTDOWN_SECONDS = 30.0  # from SIGTERM to SIGKILL: ECS_CONTAINER_STOP_TIMEOUT's default
_TRAINER_SHARE = 0.5  # of that; the rest is for the last copy
_HOST_ENDS_SECONDS = 300.0  # after its time, a host that still lives was not taken
_MARGIN_SECONDS = 3.0
_TERM_TRIES = 20
T = TypeVar("T")


class Child:
    """`config` is the whole list's where there is one; `live` returns the container's exit code."""

    def __init__(self, config: InstanceConfig, world: World, place: Place) -> None:
        self._place, self._world = place, world
        self._log, self._clock = world.logs.log, world.clock
        self._list = Store(world.s3, config.store)
        self._stop = threading.Event()
        self._params = self._parameters(config, place)
        self._config = config = entry_of(config, self._index) if self._index is not None else config
        self._store = Store(world.s3, config.store)
        self._here, self._host = identity(place, world.metadata, config.region)
        world.logs.bind(job=config.job.job.name, run=config.run, instance=self._here.instance, zone=self._here.zone)
        self._efs = mounted(config, os.environ.get(EFS, ""), self._clock, self._log)
        self._folders = folders_of(config, world.paths, self._efs)
        self._closing = threading.Event()
        self._interruption: Interruption | None = None
        self._ledger = Ledger(self._store, self._clock, self._here.instance, self._here.zone)
        self._status = Status(
            self._store, self._clock, self._log, job=config.job.job.name, run=config.run,
            instance=self._here.instance, instance_type=self._here.instance_type or None, zone=self._here.zone or None,
            revision=config.revision, host=self._host or None, batch_job=place.job,
        )  # fmt: skip
        self._confinement = Confinement(
            config, world.paths, self._folders, self._here, world.metadata, self._clock, self._stop, self._log,
            world.client or (lambda service: clients.client(service, config.region)),
        )  # fmt: skip
        self._results = place_of(config, world.s3, self._mounted_efs, lambda: self._confinement.account)
        scratch = self._folders.run_dir / "metrics.jsonl"
        self._live = LiveMetrics(self._results, self._folders, scratch, self._clock, self._log)
        self._launch: Launch | None = None
        self._stage: TrainerStage | None = None
        self._saved_step: int | None = None
        self._copying: Copying | None = None
        self._copies: Copies | None = None
        self._watcher = Watcher(
            world.metadata, self._clock, on_notice=self._on_notice, on_rebalance=self._on_rebalance,
            log=lambda text: self._log.warning(text),
        )  # fmt: skip

    def _mounted_efs(self, url: EfsUrl) -> Efs:
        if self._efs is None:
            raise Fatal(f"{url.file_system} is not mounted in this container",
                        next_step="`fleetctl batch create` writes the job definition that mounts it")  # fmt: skip
        return self._efs

    @property
    def _index(self) -> int | None:
        return self._place.index if self._params is not None else None

    def _parameters(self, config: InstanceConfig, place: Place) -> dict[str, Any] | None:
        """This child's entry of the list; None where the run has none."""
        if not config.entries:
            return None
        entries = self._patiently(lambda: list((self._list.get_json(LAYOUT.sweep) or {}).get("entries") or []))
        index = place.index if place.index is not None else 0
        if place.index is None and len(entries) > 1:
            raise ConfigError(f"the list has {len(entries)} entries, and this container has no index",
                              next_step="submit it as an array: `fleetctl batch submit LIST`")  # fmt: skip
        if index >= len(entries):
            last = len(entries) - 1
            raise ConfigError(f"index {index} is out of range: the list has {len(entries)} entries, 0 to {last}",
                              next_step="`fleetctl batch submit LIST` makes an array of the list's size")  # fmt: skip
        self._place = replace(place, index=index)
        return dict(entries[index])

    # ------------------------------------------------------------------------------------------- what runs beside it
    def __enter__(self) -> Child:
        self._watcher.start()
        self._beside("heartbeat", lambda: self._status.beat(self._closing, self._beat))
        self._beside("shutdown", self._watch_shutdown)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._watcher.stop()
        if self._stage is not None and error is not None:
            self._stage.stop()
        self._ledger.flush()
        self._world.logs.ship(self._store, self._here.instance)
        self._stop.set()
        self._confinement.leave()

    def _beside(self, name: str, work: Callable[[], object]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _beat(self) -> None:
        self._world.logs.ship(self._store, self._here.instance)
        self._ledger.flush()
        if (stage := self._stage) is not None:
            stage.look()
            if self._status.fenced.is_set() or self._status.stands is not None:
                self._stop.set()
                stage.stop()

    def _watch_shutdown(self) -> None:
        """SIGTERM: the host goes down without a notice that was read, or `fleetctl batch cancel`."""
        while not self._closing.is_set():
            if not self._clock.sleep(1.0, until=self._world.asked_to_stop):
                continue
            moment, seconds = self._clock.monotonic(), SHUTDOWN_SECONDS * _TRAINER_SHARE
            notice = Notice("shutdown", self._clock.now() + timedelta(seconds=seconds))
            self._on_notice(Interruption("shutdown", notice, moment + SHUTDOWN_SECONDS, moment + seconds))
            return

    def _on_notice(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._stop.set()
        if (stage := self._stage) is not None:
            stage.notify(interruption)
        if self._launch is not None:
            self._launch.note(outcome="interrupted")
        notice = interruption.notice
        ends = rfc3339(self._clock.now() + timedelta(seconds=interruption.ends_at - self._clock.monotonic()))
        self._ledger.add("notice", action=notice.action, deadline=rfc3339(notice.deadline), ends=ends)
        self._status.notice(notice)

    def _on_rebalance(self) -> None:
        self._ledger.add("rebalance")
        if (stage := self._stage) is not None:
            stage.rebalance(self._stop)

    # ----------------------------------------------------------------------------------------------------- the stages
    def live(self) -> int:
        """Until the run is over (0, or why not), or the host goes away (75)."""
        self._check_submission()
        ended = self._ended_before()
        if ended is not None:
            return ended
        self._begin()
        try:
            end: End | None = self._train()
        except Interrupted as why:
            return self._leave(why.message)
        except Retryable:
            raise
        except Fatal as error:
            end = End(Phase.SETUP_FAILED, str(error))
        if end is None:
            return self._leave("the host goes away")
        return self._finish(end)

    def _check_submission(self) -> None:
        """A job that was submitted twice, its first answer lost, must not train twice, one taking the term of the other
        for ever. Conflict, which Batch does not try again."""
        document = self._patiently(lambda: self._list.get_json(LAYOUT.fleet_document)) or {}
        job_id = (document.get("batch") or {}).get("job_id")
        ours = self._place.job.partition(":")[0]
        if job_id and job_id != ours:
            raise Conflict(f"this run is job {job_id} of AWS Batch, and this container belongs to {ours}",
                           next_step="nothing: that one goes on with the run")  # fmt: skip

    def _ended_before(self) -> int | None:
        """The exit code of a run that is over; None: it is not. A child of an array that is submitted again may be."""
        status = self._patiently(self._store.read_status) or {}
        if str(status.get("phase")) not in {phase.value for phase in Phase if phase.is_end}:
            return None
        self._log.info("this run is over already", phase=status["phase"], reason=status.get("reason"))
        self._record(Phase(status["phase"]), str(status.get("reason") or ""))
        return ExitCode.OK if status["phase"] == Phase.DONE.value else ExitCode.JOB_FAILED

    def _queue(self) -> Queue:
        return Queue(self._list, self._entries_count(), self._here.instance, self._clock)

    def _entries_count(self) -> int:
        return len((self._list.get_json(LAYOUT.sweep) or {}).get("entries") or [])

    def _begin(self) -> None:
        """Count this attempt, and fence those before it: Batch starts one only when the last has ended."""
        self._launch = Launch.count(self._store, self._here, self._clock, self._config.requested_at)
        term = self._patiently(self._claim_term)
        self._ledger.term = term
        self._world.logs.bind(term=term)
        launched = self._here.launched or None
        self._ledger.note("boot", instance_type=self._here.instance_type, launched=launched, host=self._host or None)
        if self._index is not None:
            claim = {"instance": self._here.instance, "time": rfc3339(self._clock.now())}
            mark = LAYOUT.queue_claim(self._index, term)
            self._patiently(lambda: self._list.claim(mark, claim, lambda _: False))
            self._folders.params_file.parent.mkdir(parents=True, exist_ok=True)
            publish(self._folders.params_file, json.dumps(self._params))
        if self._efs is None:
            self._copies = Copies(self._store, self._folders, term, self._clock, self._log)
        self._log.info("this container", job=self._place.job, attempt=self._place.attempt, index=self._index,
                       host=self._host or "hidden")  # fmt: skip
        self._status.update(term=term, launches=self._place.attempt)

    def _claim_term(self) -> int:
        for _ in range(_TERM_TRIES):
            term = self._store.highest_term()
            number = term.number + 1 if term else 1
            if self._store.claim_term(Claim(number, self._here.instance, self._here.zone, rfc3339(self._clock.now()))):
                return number
        raise Retryable("other attempts of this job claim it all the time")

    def _train(self) -> End | None:
        """The end of the run, or None: the host goes first."""
        copy = self._patiently(self._copies.read_back) if self._copies is not None else None
        if copy is not None:
            self._ledger.note("read-back", copy=copy.key, saved_step=copy.saved_step)
        self._go_on()
        self._confinement.enter()
        self._confinement.fetch_code(self._list, self._confinement.fetch_secrets())
        surroundings = self._confinement.surroundings()
        self._folders.make(surroundings.account)
        found = find_interpreter(self._config, self._folders, surroundings, self._log)
        link_kept(self._config.job.job.keep, self._folders, surroundings, found.path)
        interpreter = run_setup(self._config, self._folders, found, surroundings, self._log)
        self._go_on()
        return decide_end(self._run_trainer(interpreter.path))

    def _go_on(self) -> None:
        if self._stop.is_set() or self._watcher.interruption is not None:
            raise Interrupted("the host goes away before the trainer has started")

    def _run_trainer(self, python: Path) -> TrainerEnd:
        around = Instruments(
            self._clock, self._world.logs, self._ledger, self._status, self._require_launch(), None, None,
            self._limits(), Curves(self._store, self._clock, self._here.instance, self._folders.metrics_file),
        )  # fmt: skip
        cage = self._confinement
        stage = TrainerStage(self._config, self._folders, python, cage.account, around, cage.trainers)
        self._stage = stage
        if self._interruption is not None:
            stage.notify(self._interruption)
        if self._copies is not None:
            interval = float(seconds(self._config.job.batch.copy_every))
            self._copying = Copying(
                self._copies, self._folders, interval, lambda: stage.saved_step, self._clock, self._log
            )
            self._copying.start()
        self._require_launch().note(outcome="training")
        self._status.update(phase=Phase.TRAINING)
        trained = threading.Event()
        self._beside("metrics", lambda: self._live.watch(trained))
        try:
            return stage.run()
        finally:
            trained.set()
            self._saved_step, self._stage = stage.saved_step, None

    def _limits(self) -> Limits:
        """Hours since the first attempt began: what a child has waited in the queue for is not its own time. Dollars
        are none: nobody tells a container what its share of the host costs."""
        first = self._patiently(lambda: self._store.term(1))
        start, hours = first.time if first else self._config.requested_at, self._config.job.limits.hours
        budget = Budget(Decimal(0), self._store, self._ledger, self._here, self._clock, self._log, start)
        return Limits(hours, 0.0, start, budget, self._clock, self._log, self._tell)

    def _tell(self, message: Message) -> None:
        config = self._config
        names = {"job": config.job.job.name, "run": config.run, "store": str(config.store)}
        messenger = Messenger(config.job.notify, self._store, self._clock, self._log, names, self._world.sns)
        if messenger.is_there:
            messenger.tell(message)

    def _require_launch(self) -> Launch:
        assert self._launch is not None  # `_begin` comes first
        return self._launch

    # --------------------------------------------------------------------------------------------- the ways to leave
    def _copy_last(self, until: float | None, *, new_results: bool = True) -> bool:
        if self._copying is None:
            return True
        return self._copying.end(until, new_results=new_results)

    def _until(self) -> float | None:
        """When the last copy must stand."""
        interruption = self._interruption or self._watcher.interruption
        return interruption.ends_at - _MARGIN_SECONDS if interruption else None

    def _leave(self, reason: str) -> int:
        """The host goes: copy what the trainer saved, say so, and let Batch begin again elsewhere."""
        if self._status.fenced.is_set():
            self._log.error("another attempt of this job is at work; this one ends")
            return EXIT_SAVED_AND_STOPPED
        interruption = self._interruption or self._watcher.interruption
        copied = self._copy_last(self._until())
        self._log.info("left", why=reason, checkpoints_copied=copied)
        self._ledger.add("handover", copied=copied, saved_step=self._saved_step)
        self._status.update(phase=Phase.INTERRUPTED, reason=reason)
        self._status.leave()
        self._world.logs.ship(self._store, self._here.instance)
        if interruption is not None and interruption.notice.action != "shutdown":
            # Ended now, Batch would start the next attempt on this very host, which has two minutes at most.
            self._log.info("waiting for the end of the host")
            seconds = interruption.ends_at - self._clock.monotonic() + _HOST_ENDS_SECONDS
            self._clock.sleep(max(0.0, seconds), until=self._world.asked_to_stop)
        return EXIT_SAVED_AND_STOPPED

    def _finish(self, end: End) -> int:
        """Store what the run made, then its end. Where the host goes meanwhile there is none: Batch tries again."""
        if not self._copy_last(None, new_results=False):
            self._log.warning("the last checkpoints are not copied to the store")
        place = Counted(self._results)
        missing = store_results(self._finishing(place), self._stop) if end.phase is not Phase.SETUP_FAILED else ""
        if missing:
            self._copy_last(self._until())
            if self._stop.is_set():
                raise Retryable(f"the results are not stored: {missing}")
            end = without_results(end, missing, place.taken)
        self._ledger.add("end", phase=end.phase.value, reason=end.reason)
        phase, reason = self._patiently(lambda: self._status.end(phase=end.phase, reason=end.reason))
        self._record(phase, reason)
        self._require_launch().note(outcome="ended", reason="" if phase is Phase.DONE else reason)
        facts = {"job": self._config.job.job.name, "step": self._saved_step, "saved_step": self._saved_step}
        self._tell(end_message(End(phase, reason), self._config.requested_at, facts))
        log = self._log.info if phase is Phase.DONE else self._log.error
        log("the run is over", phase=phase.value, reason=reason)
        return ExitCode.OK if phase is Phase.DONE else ExitCode.JOB_FAILED

    def _finishing(self, place: Counted) -> Finishing:
        metrics = self._live.copy()
        return Finishing(
            store=self._store, cloud=NoFleet(), clock=self._clock, ledger=self._ledger, status=self._status,
            log=self._log, instance=self._here.instance, volume=None, results=self._folders.results,
            results_to=place, results_too=[metrics] if metrics else [], limit=self._limits().look,
        )  # fmt: skip

    def _record(self, phase: Phase, reason: str) -> None:
        """The end of a child; the last one that ends ends the list."""
        if (index := self._index) is None:
            return
        queue = self._patiently(self._queue)
        self._patiently(lambda: record_end(queue, index, phase, reason))
        entries = self._patiently(queue.ends)
        if all(entry.ended for entry in entries):
            self._patiently(
                lambda: end_of_sweep(self._list, entries, self._clock, self._log, self._config, self._here)
            )

    def _patiently(self, ask: Callable[[], T]) -> T:
        """A store that is down for some minutes costs none of the ten attempts that AWS gives a job."""
        return patiently(ask, self._clock, self._stop, self._log)
