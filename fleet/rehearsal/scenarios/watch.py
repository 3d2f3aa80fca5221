"""What is seen of a rehearsal while it runs and after: from the machines' files, the rule book and the run's store."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import LAYOUT, TAG_STATE, TAG_TERM, Phase, VolumeState
from spotheal.agent.record.ledger import read_events
from spotheal.agent.trainer.progress_files import progress_of
from spotheal.fleet.rehearsal.machines.machines import Machine
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
from spotheal.fleet.rehearsal.scenarios.progress import MachineView, View
from spotheal.fleet.rehearsal.scenarios.scenario import Seen
from spotheal.fleet.rehearsal.scenarios.summary import End, InstanceStory
from spotheal.fleet.rehearsal.scenarios.survival import Survival

_STORE_SECONDS = 1.0
_CANCELLED_BY = ("CancelSpotFleetRequests", "DeleteFleets")


@dataclass
class _Seen:
    """One machine's trainer, as it was seen: when it began, and its first and last progress."""

    first: Progress | None = None
    last: Progress | None = None
    training_since: float | None = None


def in_words(event: dict[str, Any]) -> str:
    """An event of the ledger as a line of the display; "" for those that the display shows anyway."""
    instance, saved = event.get("instance"), event.get("saved_step")
    match event["event"]:
        case "volume":
            copied = "copied to its zone, " if event.get("moved_from") else ""
            return f"{instance} {event.get('zone')}: volume {copied}mounted"
        case "trainer-started" if event.get("resumed_step"):
            return f"{instance} goes on from step {event['resumed_step']}"
        case "handover":
            step = f"saved step {saved} and " if isinstance(saved, int) else ""
            return f"{instance} has {step}handed its volume over"
    return ""


class Watch:
    """Look at everything again with `look`; all else answers from what was seen. `began`: monotonic."""

    def __init__(self, cloud: Cloud, store: Store, mount: str, start: float, *, reports: bool = False) -> None:
        self._cloud, self.store, self._mount, self.began = cloud, store, mount, start
        self.reports = reports  # whether the trainer is known to write progress
        self._saves_at_notice = reports  # the example's trainers always have something to lose
        self.survival = Survival(cloud.folder / "links")
        self._machines: dict[str, _Seen] = {}
        self._store_looked = float("-inf")
        self.status: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self._told = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def news(self) -> list[str]:
        """What the run's ledger says since the last call, in words."""
        new = self.events[self._told :]
        self._told = len(self.events)
        return [text for text in map(in_words, new) if text]

    def look(self, *, store_too: bool = False) -> None:
        for machine in self._cloud.machines.all():
            self._look_at(machine)
        if store_too or time.monotonic() - self._store_looked >= _STORE_SECONDS:
            self._store_looked = time.monotonic()
            self._look_into_store()

    def _look_at(self, machine: Machine) -> None:
        sighting = self._machines.setdefault(machine.launch.instance, _Seen())
        if machine.running:
            log = Paths(machine.root).logs / "agent.log"
            self.survival.look(machine.launch.instance, self.folders(machine), log)
        found = progress_of(self.folders(machine).progress_file)  # as the agent reads it: a pipe would hold us up
        progress = None if found is None else found[0]
        if progress is None:
            return
        self.reports = True
        sighting.first = sighting.first or progress
        sighting.last = progress
        sighting.training_since = sighting.training_since or time.monotonic()

    def _look_into_store(self) -> None:
        try:
            self.status = self.store.read_status() or self.status
            self.events = read_events((self.store.get_bytes(LAYOUT.ledger) or b"").decode())
        except SpothealError:
            return
        instance = self.status.get("instance")
        if self.status.get("phase") == Phase.TRAINING.value and instance:
            sighting = self._machines.setdefault(str(instance), _Seen())
            sighting.training_since = sighting.training_since or time.monotonic()

    def folders(self, machine: Machine) -> Folders:
        return Folders.at(machine.root, self._mount)

    # ------------------------------------------------------------------------------------------------- while it runs
    def trainer(self, touched: set[str]) -> Seen | None:
        """The trainer that runs now, on the machine launched last that has one."""
        for machine in reversed(self._cloud.machines.all()):
            sighting = self._machines.get(machine.launch.instance)
            if machine.running and sighting is not None and sighting.training_since is not None:
                instance = machine.launch.instance
                record = self._cloud.rules.instance(instance)
                if record is None or record.state != "running":
                    continue
                return Seen(
                    instance=instance,
                    touched=instance in touched or record.notice is not None,
                    training_seconds=time.monotonic() - sighting.training_since,
                    reports=self.reports,
                    first_step=sighting.first.step if sighting.first else None,
                    step=sighting.last.step if sighting.last else None,
                    steps_total=sighting.last.steps_total if sighting.last else None,
                    saved=self._saves_at_notice
                    or self.survival.has_saved(instance)
                    or bool(sighting.last and sighting.last.saved),
                )
        return None

    def view(self) -> View:
        machines = tuple(self._machine_view(machine) for machine in self._cloud.machines.all())
        last = next((s.last for s in reversed(list(self._machines.values())) if s.last is not None), None)
        if last is None:
            return View(self.seconds, machines)
        saved = last.saved.step if last.saved else None
        return View(self.seconds, machines, last.step, last.steps_total, saved, last.loss, last.samples_per_second)

    def _machine_view(self, machine: Machine) -> MachineView:
        launch = machine.launch
        sighting = self._machines.get(launch.instance, _Seen())
        record = self._cloud.rules.instance(launch.instance)
        ended = machine.ended_at
        if ended is not None:
            state = "ended"
        elif record is not None and record.notice is not None:
            state = "under notice"
        elif sighting.training_since is not None:
            state = "training"
        else:
            state = "booting" if not (self.folders(machine).run_dir.exists()) else "healing"
        seconds = (ended or time.monotonic()) - self._cloud.launched_at.get(launch.instance, self.began)
        step = sighting.last.step if sighting.last else None
        return MachineView(launch.instance, launch.zone, launch.instance_type, state, seconds, step)

    def is_over(self) -> bool:
        """Whether the fleet is cancelled and no machine of it is left."""
        fleets = self._cloud.rules.fleets()
        cancelled = bool(fleets) and all(fleet.state.startswith(("cancelled", "deleted")) for fleet in fleets)
        return cancelled and all(machine.ended_at is not None for machine in self._cloud.machines.all())

    # ----------------------------------------------------------------------------------------------------- afterwards
    def end(self) -> End:
        rules, fleets = self._cloud.rules, self._cloud.rules.fleets()
        return End(
            seconds=self.seconds,
            phase=self.phase,
            reason=str(self.status.get("reason") or ""),
            fleet_state=fleets[-1].state if fleets else None,
            fleet_cancelled_by=self.cancelled_by(),
            volumes_left=sum(volume.state not in ("deleting", "deleted") for volume in rules.volumes()),
            snapshots_left=len(rules.snapshots()),
            api_calls=len(rules.calls),
            refused=self._refused(),
        )

    def _refused(self) -> tuple[str, ...]:
        """Calls of instances, not of sessions that a trainer has of its own role: what those may is the operator's."""
        refused = self._cloud.endpoint.authorization.refused
        return tuple(f"{action} of {resource}" for caller, action, resource in refused if caller.startswith("i-"))

    def stories(self) -> tuple[InstanceStory, ...]:
        return tuple(self._story(machine) for machine in self._cloud.machines.all())

    def _story(self, machine: Machine) -> InstanceStory:
        launch = machine.launch
        sighting = self._machines.get(launch.instance, _Seen())
        last = sighting.last
        return InstanceStory(
            instance=launch.instance,
            zone=launch.zone,
            instance_type=launch.instance_type,
            launched=self._since(self._cloud.launched_at.get(launch.instance)) or 0.0,
            booted=self._since(machine.started_at),
            trained=self._since(sighting.training_since),
            ended=self._since(machine.ended_at),
            end=self._end(machine),
            resumed_step=self._resumed_step(launch.instance, sighting),
            last_step=last.step if last else None,
            saved_step=last.saved.step if last and last.saved else None,
        )

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.began

    def _resumed_step(self, instance: str, sighting: _Seen) -> int | None:
        """What the agent wrote into the ledger, else the first progress that was seen on that machine."""
        started = [e for e in self.events if e["event"] == "trainer-started" and e.get("instance") == instance]
        step = started[0].get("resumed_step") if started else None
        if isinstance(step, int):
            return step
        return sighting.first.step if sighting.first else None

    def _end(self, machine: Machine) -> str:
        if machine.ended_at is None:
            return "running"
        instance = machine.launch.instance
        record = self._cloud.rules.instance(instance)
        if instance in self._cloud.killed:
            return "killed"
        if record is not None and record.notice is not None:
            return "interrupted"
        if machine.powered_off:
            return "powered off"
        return "cancelled" if self.is_over() else "ended"

    def zone_moves(self) -> int:
        """How often the volume was copied into another zone."""
        return self._cloud.rules.zone_moves()

    def cancelled_by(self) -> str | None:
        """Who cancelled the fleet, of those whose call succeeded: the last."""
        calls = [c for c in list(self._cloud.rules.calls) if c.operation in _CANCELLED_BY and c.outcome == "ok"]
        return None if not calls else calls[0].caller or "operator"

    def steps_total(self) -> int | None:
        last = next((s.last for s in reversed(list(self._machines.values())) if s.last is not None), None)
        return None if last is None else last.steps_total or (last.step if self.phase == Phase.DONE.value else None)

    @property
    def phase(self) -> str | None:
        phase = self.status.get("phase")
        return None if phase is None else str(phase)

    def final_volume(self) -> Path | None:
        """The files of the job's volume: of those left that are no superseded ones the one with the highest term."""
        volumes = [v for v in self._cloud.rules.volumes() if v.state not in ("deleting", "deleted")]
        current = [v for v in volumes if v.tags.get(TAG_STATE) != VolumeState.SUPERSEDED.value] or volumes
        if not current:
            return None
        best = max(current, key=lambda volume: int(volume.tags.get(TAG_TERM, "0") or 0))
        return self._cloud.volumes.disk(best.id).files
