"""A sweep in the simulated region: the real workers, queue and lives of every run, on a fleet that AWS takes from."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from simulated_life import CONFIG, LifeRegion, Machine, SimulatedCode, SimulatedTrainer, SimulatedVolume
from simulated_world import RUN, STEP_SECONDS, TAGS, Broken

from spotheal.agent.life import trainer_stage
from spotheal.agent.life.world import World
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.contract import Progress, Saved
from spotheal.agent.protocol.ends import TrainerEnd
from spotheal.agent.protocol.names import LAYOUT, TAG_RUN
from spotheal.agent.sweep import worker

STEPS = 5  # of each run


class SweepRegion(LifeRegion):
    """`request_sweep` starts `entries` runs on a fleet of `parallel`. `failing`: runs whose trainer fails."""

    def __init__(self, *, entries: int, failing: frozenset[int] = frozenset(), **options: Any) -> None:
        super().__init__(**options)
        self.entries, self.failing = entries, failing
        self.config = replace(CONFIG, entries=entries)
        self.steps_of: dict[str, int] = {}  # run -> the newest acknowledged step
        self.finished: dict[str, int] = {}  # run -> how often its trainer said that it is done
        self.begun: list[tuple[float, int]] = []  # (time, entry) of each start of a trainer

    def __enter__(self) -> SweepRegion:
        super().__enter__()
        self._patch(worker, "Code", SimulatedCode)
        self._patch(worker, "VolumeStorage", SimulatedVolume)
        self._patch(worker.Worker, "_hand_parameters", lambda self, index: None)
        self._patch(trainer_stage, "Supervisor", lambda *a, **k: EntryTrainer(self, *a, **k))
        return self

    def request_sweep(self, parallel: int) -> None:
        with self._faultless():
            self.fleet = self._request_fleet(TAGS, parallel)
        document = json.dumps({"fleet_id": self.fleet}).encode()
        self.s3.put_object(Bucket="bucket", Key=f"digits/{RUN}/{LAYOUT.fleet_document}", Body=document)

    def live(self, world: World) -> int:
        return int(worker.run_sweep(self.config, world))

    # ----------------------------------------------------------------------------------------------------- what is seen
    def run_of(self, volume: str) -> str:
        found = self.rules.world.volumes.get(volume)
        return "" if found is None else str(found.tags.get(TAG_RUN, ""))

    def ended(self) -> dict[int, str]:
        """Entry -> done or failed, as the queue in the store says."""
        start = f"digits/{RUN}/{LAYOUT.queue}"
        marks = [key[len(start) :].split(".", 1) for key, _ in self.bodies(start)]
        return {int(index): what for index, what in marks if what in ("done", "failed")}

    def status_of_sweep(self) -> dict[str, Any]:
        key = f"digits/{RUN}/{LAYOUT.status}"
        return next((json.loads(body) for found, body in self.bodies(key) if found == key), {})

    def status_of(self, index: int) -> dict[str, Any]:
        """Of one run."""
        key = f"digits/{RUN}/{LAYOUT.entry(index)}/{LAYOUT.status}"
        return next((json.loads(body) for found, body in self.bodies(key) if found == key), {})

    def instances_left(self) -> int:
        states = [one.state for one in self.rules.world.instances.all() if one.fleet == self.fleet]
        return sum(state not in ("terminated", "shutting-down") for state in states)

    def volumes_left(self) -> list[str]:
        return [one.id for one in self.rules.world.volumes.all() if one.state not in ("deleting", "deleted")]

    def is_over(self) -> bool:
        return self.fleet_state(self.fleet) == "cancelled" and not self.instances_left()

    # ------------------------------------------------------------------------------------------------------ invariants
    def status_written(self) -> None:
        """There are as many of them as runs, and one of the sweep."""

    def check(self) -> None:
        world = self.rules.world
        state = (world.volumes.changes, world.snapshots.changes, self.mounts, sum(self.steps_of.values()))
        if state == self._checked:
            return
        self._checked = state
        mounted = [machine.mounted for machine in self.writers()]
        runs = [self.run_of(str(volume)) for volume in mounted]
        if len(set(runs)) < len(runs):
            raise Broken(f"one run is mounted twice: {runs}")
        over = {f"{RUN}{index:05d}" for index, what in self.ended().items() if what == "done"}
        for run, step in self.steps_of.items():
            if run not in over and run not in self.finished and self._best_copy(run) < step:
                raise Broken(f"no intact copy of {run} holds step {step}")

    def _best_copy(self, run: str) -> int:
        world = self.rules.world
        disks = [self.disks[one.id] for one in world.volumes.all() if one.tags.get(TAG_RUN) == run]
        disks += [self.copies[one.id] for one in world.snapshots.all() if one.tags.get(TAG_RUN) == run]
        return max((max(disk.steps, default=0) for disk in disks), default=0)


class EntryTrainer(SimulatedTrainer):
    """Trains one run: `STEPS` steps, then done, or failed where the region says so."""

    def __init__(self, region: SweepRegion, config: Any, *rest: Any, **more: Any) -> None:
        super().__init__(region, config, *rest, **more)
        self._run, self._index = config.run, config.index
        self._sweep = region

    def run(self) -> Any:
        region, machine = self._sweep, self._machine
        if machine.mounted is None:
            raise Broken(f"{machine.id} trains with nothing mounted")
        if region.run_of(machine.mounted) != self._run:
            raise Broken(f"{machine.id} trains {self._run} on a volume of {region.run_of(machine.mounted)}")
        disk = region.disks[machine.mounted]
        begin = max(disk.steps, default=0)
        if begin < region.steps_of.get(self._run, 0):
            raise Broken(f"{self._run} resumed at {begin}, acknowledged was {region.steps_of[self._run]}")
        region.begun.append((region.time.seconds, self._index))
        region.tell(f"{machine.id} trains {self._run} from step {begin}")
        self._hooks.on_attempt(self._attempt)
        self._hooks.on_event("trainer-started", attempt=self._attempt, resumed_step=begin)
        kind = self._train(disk, begin)
        saved = max(disk.steps, default=None)
        self._tell(partial(self._hooks.on_event, "trainer-ended", attempt=self._attempt, kind=kind, saved_step=saved))
        return TrainerEnd(kind, f"the trainer is {kind}", saved, saved, 0, None, self._attempt, 0)  # type: ignore[arg-type]

    def _train(self, disk: Any, step: int) -> str:
        region = self._sweep
        while step < STEPS:
            if self._index in region.failing and step == 2:
                return "failed"
            if region.time.sleep(STEP_SECONDS, until=self._asked):
                return self._kind
            step += 1
            disk.steps = (*disk.steps[-1:], step)
            region.steps_of[self._run] = step
            saved = Saved(step, f"checkpoints/step-{step}", rfc3339(region.time.now()))
            self._tell(partial(self._hooks.on_progress, Progress(step, saved=saved)))
        region.finished[self._run] = region.finished.get(self._run, 0) + 1
        return "done"


def some_machine(region: SweepRegion, dice: Any) -> Machine | None:
    living = [machine for machine in region.machines.values() if machine.alive and not machine.hung]
    return dice.choice(living) if living else None
