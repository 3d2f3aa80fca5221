"""An instance of a sweep's fleet: takes a run, lives it as any instance lives its job's run, takes the next.

The instance that finds every run over ends the fleet. One that finds all runs taken makes the fleet smaller by itself
and goes, because waiting costs what training costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.interruption.handover import HandoverResult
from spotheal.agent.life.boot import Boot
from spotheal.agent.life.code import Code
from spotheal.agent.life.ending import Ending
from spotheal.agent.life.finish import POWER_OFF_SECONDS, Finishing, end_fleet, record
from spotheal.agent.life.run import run
from spotheal.agent.life.stages import Life
from spotheal.agent.life.storage import Storage, VolumeStorage
from spotheal.agent.life.world import World
from spotheal.agent.money.budget import Budget
from spotheal.agent.money.limits import Limits
from spotheal.agent.protocol.ends import NOT_STORED, End
from spotheal.agent.protocol.errors import (
    ExitCode,
    Fatal,
    Interrupted,
    NoCredentials,
    NotFound,
    SpothealError,
)
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.protocol.retry_budget import Patience
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.agent.record.boot_record import Launch
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.status import Status
from spotheal.agent.sweep import volume
from spotheal.agent.sweep.queue import Queue, Taken, give_back

IDLE_SECONDS_MAX = 300.0  # a run that is interrupted meanwhile is taken at once; after that the machine goes
VOLUME_SECONDS_MAX = 900.0  # in which a zone that is full, or the account's quota, may have room for a volume again
SNAPSHOT_SECONDS_MAX = 120.0  # in which a snapshot that a describe does not show may be seen
_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 5.0


def entry_of(config: InstanceConfig, index: int) -> InstanceConfig:
    """The configuration of one run of the sweep `config`: a run of its own, with its prefix and its volume."""
    return replace(
        config,
        run=f"{config.run}{index:05d}",
        store=config.store.below(LAYOUT.entry(index)),
        entries=0,
        index=index,
        sources=config.store,
    )


class EntryEnding(Ending):
    """The end of one run frees the volume and leaves the machine and the fleet alone."""

    def __init__(self, boot: Boot, storage: Storage) -> None:
        super().__init__(boot)
        self._storage = storage

    def handed_over(self, result: HandoverResult) -> None:
        """What is handed over may go on at once, on a machine that is free, before this one is gone. If the
        interruption does not come true, this machine looks for another run, and does not wait for this one's end."""
        boot, config = self._boot, self._boot.config
        if config.index is None or not (result.snapshot and result.detached):
            return
        store = Store(boot.world.s3, config.sources or config.store)
        try:
            if give_back(store, config.index, boot.here.instance, boot.clock):
                self.code_if_withdrawn = ExitCode.INTERRUPTED  # with 0 the agent would not be started again
        except SpothealError as error:  # then it is taken when this machine is seen to end
            boot.log.warning("the run is not given back", error=error.message)

    def leave(self, work: Finishing, end: End) -> None:
        boot, disk = self._boot, self._boot.config.job.volume
        if boot.world.host.mounted_at(str(boot.world.paths.mount_point(disk.mount))) is not None:
            boot.log.error("the run's volume is still mounted, and so stays attached", volume=work.volume)
            return
        # By what is recorded, which stands: tags may be minutes old, or were never written, and then the volume stayed.
        if end.phase is Phase.DONE and disk.delete_superseded and NOT_STORED not in end.reason:
            left = volume.delete(boot.cloud, boot.config, boot.here.instance, boot.clock)
            if left:
                boot.log.warning("the run's volume stays; `fleetctl clean` removes it", why=left)
        elif work.volume is not None:
            self._hand_back(work.volume)

    def _hand_back(self, held: str) -> None:
        """As at an interruption: this machine lives on with other runs, and who begins this one again (`fleetctl sweep
        retry`) is not to wait for its end."""
        try:
            self._storage.create_handover()
        except SpothealError as error:
            self._boot.log.warning("the run that ended is not handed back; it waits for this machine's end",
                                   error=error.message)  # fmt: skip
        self._boot.cloud.detach(held, self._boot.here.instance)


def of_entry(boot: Boot) -> Life:
    """The life of one run of a sweep."""
    storage = VolumeStorage(boot)
    return Life(boot, storage, Code(boot, storage.folders), EntryEnding(boot, storage))


class Worker:
    """One instance. `work` returns as `run.run` does."""

    def __init__(self, config: InstanceConfig, world: World, live: Callable[..., ExitCode] = run) -> None:
        self._config, self._world, self._live = config, world, live
        self._clock, self._log = world.clock, world.logs.log
        self._store = Store(world.s3, config.store)
        self._cloud = Ec2(world.ec2, config.job.job.name)
        self._here = world.metadata.identity(progress=lambda why: self._log.warning(why))
        self._queue = Queue(self._store, config.entries, self._here.instance, world.clock)
        self._idle_since: float | None = None
        self._limits = self._limits_of(config)

    def _limits_of(self, config: InstanceConfig) -> Limits:
        """Hours alone: dollars are each run's own."""
        ledger = Ledger(self._store, self._clock, self._here.instance, self._here.zone)
        start = config.requested_at
        budget = Budget(Decimal(0), self._store, ledger, self._here, self._clock, self._log, start)
        return Limits(config.job.limits.hours, 0.0, start, budget, self._clock, self._log, lambda message: None)

    def work(self) -> ExitCode:
        """Until every run is over, or this machine goes away."""
        launch = Launch.count(self._store, self._here, self._clock, self._config.requested_at)
        launch.note(outcome="training", acknowledged=True)  # a machine that comes so far is no failed boot
        while not self._world.asked_to_stop.is_set():
            turn = self._take()
            if turn.entry is not None:
                self._idle_since = None
                code = self._run_entry(turn.entry)
                if not self._queue.has_ended(turn.entry):
                    return code
            elif not turn.left:
                self._end_sweep()
                return ExitCode.OK
            elif self._has_idled() and self._go(turn.left):
                return ExitCode.OK
            else:
                self._clock.sleep(_LOOK_SECONDS, until=self._world.asked_to_stop)
        return ExitCode.INTERRUPTED

    def _take(self) -> Taken:
        """A store or an EC2 that is throttled is no reason to end."""
        try:
            return until_it_works(
                lambda: self._queue.take(self._cloud), self._clock, pause=_RETRY_SECONDS,
                stop=self._world.asked_to_stop, log=self._log, line="looking for a run; trying again",
            )  # fmt: skip
        except Interrupted:
            return Taken(None, self._config.entries)

    # ---------------------------------------------------------------------------------------------------------- a run
    def _run_entry(self, index: int) -> ExitCode:
        config = entry_of(self._config, index)
        store = Store(self._world.s3, config.store)
        self._log.info("taking a run of the sweep", index=index, of=self._config.entries, run=config.run)
        self._world.logs.bind(run=config.run)
        if reason := self._limits.hours_reached():  # no volume and no clone for what ends at once
            self._end_entry(config, store, End(Phase.LIMIT, reason))
            return ExitCode.OK
        try:
            fault = self._make_volume(config, store)
        except Interrupted:
            return ExitCode.INTERRUPTED
        if fault:  # this run ends, the others go on
            self._end_entry(config, store, End(Phase.SETUP_FAILED, fault))
            return ExitCode.OK
        self._hand_parameters(index)
        logs = self._world.logs.anew()
        code = self._live(config, replace(self._world, logs=logs), of_entry)
        status = store.read_status() or {}
        phase = str(status.get("phase") or "")
        if phase in {phase_end.value for phase_end in Phase if phase_end.is_end}:
            self._queue.end(index, Phase(phase), str(status.get("reason") or ""))
        return code

    def _make_volume(self, config: InstanceConfig, store: Store) -> str:
        """"" where the run has its volume, else why it cannot be made. Interrupted where this machine stops."""
        start, patience = self._clock.monotonic(), Patience(self._clock, VOLUME_SECONDS_MAX)

        def seconds_max(error: SpothealError) -> float:
            return SNAPSHOT_SECONDS_MAX if isinstance(error, NotFound) else VOLUME_SECONDS_MAX

        def passes(error: SpothealError) -> bool:
            if isinstance(error, Fatal):
                return patience.bears(error)
            return self._clock.monotonic() - start <= seconds_max(error)

        try:
            until_it_works(
                lambda: volume.make(self._cloud, store, config, self._here.zone), self._clock, pause=_RETRY_SECONDS,
                passes=passes, stop=self._world.asked_to_stop,
                log=self._log, line="the run's volume is not made yet; trying again",
            )  # fmt: skip
        except (Interrupted, NoCredentials):  # which say nothing about the run
            raise
        except Fatal as error:
            return str(error)
        except SpothealError as error:
            return f"its volume could not be made in {seconds_max(error) / 60:.0f} min: {error}"
        return ""

    def _end_entry(self, config: InstanceConfig, store: Store, end: End) -> None:
        """The end of a run that did not come to life here, where its other ends are read, too."""
        assert config.index is not None
        self._log.error("the run ends", index=config.index, phase=end.phase.value, reason=end.reason)
        phase, reason = self._status(store, config.run).end(end.phase, end.reason)
        self._queue.end(config.index, phase, reason)

    def _status(self, store: Store, run: str) -> Status:
        identity = self._here
        return Status(
            store, self._clock, self._log, job=self._config.job.job.name, run=run, instance=identity.instance,
            instance_type=identity.instance_type, zone=identity.zone, revision=self._config.revision,
        )  # fmt: skip

    def _hand_parameters(self, index: int) -> None:
        """The entry's parameters, as JSON, where the contract says that a trainer finds them."""
        document = self._store.get_json(LAYOUT.sweep) or {}
        entries = document.get("entries") or []
        if index >= len(entries):
            raise Fatal(f"the sweep's list has no entry {index}", next_step="`fleetctl sweep run` writes it")
        path = Folders.at(self._world.paths.root, self._config.job.volume.mount).params_file
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, json.dumps(entries[index]))

    # -------------------------------------------------------------------------------------------------------- the end
    def _has_idled(self) -> bool:
        moment = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = moment
        return moment - self._idle_since > IDLE_SECONDS_MAX

    def _go(self, remaining: int) -> bool:
        """Let the fleet keep as many instances as there are runs, then end this one: the fleet does not replace it.

        False where the role may not: this instance stays, for what is interrupted meanwhile.
        """
        fleet = self._cloud.fleet_of(self._here.instance)
        self._log.info("every run is taken: this instance goes", left=remaining, fleet=fleet)
        try:
            if fleet is not None:
                self._cloud.set_capacity(fleet, remaining)
        except SpothealError as error:
            self._log.warning("the fleet cannot be made smaller; this instance waits", error=error.message)
            self._idle_since = None
            return False
        self._world.logs.ship(self._store, self._here.instance)
        self._cloud.terminate(self._here.instance)
        self._clock.sleep(POWER_OFF_SECONDS, until=self._world.asked_to_stop)
        return True

    def _end_sweep(self) -> None:
        """Every run is over: say so, and cancel the fleet, last. Two instances may do it at once: it is the same."""
        entries = self._queue.ends()
        missed = [entry.index for entry in entries if entry.ended != "done"]
        reason = f"{len(entries) - len(missed)} of {len(entries)} runs are done"
        if missed:
            indices = ", ".join(str(index) for index in missed[:10]) + (", …" if len(missed) > 10 else "")
            reason += f"; failed: {indices}"
        end = End(Phase.FAILED if missed else Phase.DONE, reason)
        self._log.info("the sweep is over", phase=end.phase.value, reason=reason)
        identity, status = self._here, self._status(self._store, self._config.run)
        ledger = Ledger(self._store, self._clock, identity.instance, identity.zone)
        work = Finishing(
            store=self._store, cloud=self._cloud, clock=self._clock, ledger=ledger, status=status, log=self._log,
            instance=identity.instance, volume=None, results=None,
        )  # fmt: skip
        record(work, end)
        self._world.logs.ship(self._store, identity.instance)
        end_fleet(work, self._world, self._world.asked_to_stop)


def run_sweep(config: InstanceConfig, world: World) -> ExitCode:
    """The whole way of an instance of a sweep; SpothealError where another start of the agent may help."""
    return Worker(config, world).work()
