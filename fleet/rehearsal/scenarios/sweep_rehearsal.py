"""A sweep rehearsed: four runs of the article's network on a fleet of two, one machine interrupted, another killed.

What is asked in the end: each run was done exactly once, with its own parameters, its results are there whole, what was
interrupted went on where it was, and nothing is left that costs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.protocol.clock import SystemClock, rfc3339
from spotheal.agent.protocol.contract import Progress
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.record.ledger import read_events
from spotheal.agent.trainer.progress_files import progress_of
from spotheal.fleet.rehearsal.scenarios import job, stage
from spotheal.fleet.rehearsal.scenarios.progress import Display
from spotheal.fleet.rehearsal.scenarios.scenario import Interrupt, Kill, NextZone, Scenario, is_saved
from spotheal.fleet.rehearsal.scenarios.summary import End, InstanceStory, Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotheal.fleet.rehearsal.machines.machines import Machine
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
    from spotheal.fleet.rehearsal.scenarios.run import Options
    from spotheal.fleet.rehearsal.scenarios.watch import Watch
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session

PARALLEL = 2
SAVE_STEPS = 10
# The article's two entries, and two more; 12 steps an epoch of at least 120 ms: 12 s each at least.
_ARTICLE = {"batch_size": 128, "epochs": 8, "dropout_rate": 0.2, "activate_fn": "relu", "optimizer": "rmsprop"}
ENTRIES: tuple[dict[str, Any], ...] = (
    {**_ARTICLE, "hidden_nodes": [10, 20, 30]},
    {**_ARTICLE, "hidden_nodes": [30, 50, 70], "dropout_rate": 0.7, "activate_fn": "tanh"},
    {**_ARTICLE, "hidden_nodes": [64], "optimizer": "adam"},
    {**_ARTICLE, "hidden_nodes": [64, 32], "optimizer": "sgd"},
)
COMMAND = (
    "python", "-m", "spotheal.training", "--dataset", "digits", "--threads", "1", "--save-every", str(SAVE_STEPS),
    "--step-seconds", "0.12",
)  # fmt: skip
_FAULTS = 2  # a notice, then a kill once a run is done
_STORE_SECONDS = 1.0
_EARLY, _LATE = 0.25, 0.75  # of a run: where something may happen to its machine


@dataclass(frozen=True)
class EntryStory:
    """One run of the sweep. `ends`: how many its ledger has. `resumed`: the steps that its trainers began at."""

    index: int
    state: str
    claims: int
    steps_total: int | None
    ends: int
    resumed: tuple[int, ...]
    files: tuple[str, ...]  # of its results
    has_own_parameters: bool


@dataclass(frozen=True)
class Struck:
    """A machine that went away: `step` is its trainer's last, `next_step` where that run went on (None: nowhere)."""

    instance: str
    index: int
    notice: bool
    time: str  # RFC 3339
    step: int | None = None
    next_step: int | None = None

    @property
    def lost(self) -> int | None:
        return None if self.step is None or self.next_step is None else max(0, self.step - self.next_step)


@dataclass(frozen=True)
class SweepOutcome(Outcome):
    """Everything that was seen; what was not as it should be is `broken`."""

    run: str
    end: End
    entries: tuple[EntryStory, ...]
    struck: tuple[Struck, ...]
    instances: tuple[InstanceStory, ...]

    def faults(self) -> Iterator[str]:
        return _broken(self)

    def figures(self) -> dict[str, Any]:
        lost = {notice: [strike.lost for strike in self.struck if strike.notice is notice] for notice in (True, False)}
        return {
            "scenario": "sweep",
            "run": self.run,
            **self.end.to_document(),
            "runs": len(self.entries),
            "done": sum(entry.state == "done" for entry in self.entries),
            "instances": len(self.instances),
            "interruptions": sum(strike.notice for strike in self.struck),
            "kills": sum(not strike.notice for strike in self.struck),
            "steps_lost_with_notice": _sum(lost[True]),
            "steps_lost_without_notice": _sum(lost[False]),
            "entries": [asdict(entry) for entry in self.entries],
            "struck": [{**asdict(strike), "lost": strike.lost} for strike in self.struck],
        }

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        from spotheal.fleet.rehearsal.scenarios import report

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("run", "state", "instances", "began at step", "steps", "parameters"):
            table.add_column(title)
        for entry in self.entries:
            parameters = ", ".join(
                f"{name}={value}" for name, value in ENTRIES[entry.index].items() if name != "batch_size"
            )
            resumed = ", ".join(map(str, entry.resumed))
            table.add_row(
                str(entry.index), entry.state, str(entry.claims), resumed, str(entry.steps_total or "-"), parameters
            )
        names = {True: "notice", False: "kill"}
        lost = [f"{names[strike.notice]}: run {strike.index}, {strike.lost} steps done again" for strike in self.struck]
        return Group(table, report.figures([
            ("sweep", f"{self.run}: {self.end.phase or 'unknown'}, {self.end.reason}"),
            ("machines", f"{len(self.instances)}; {'; '.join(lost)}"),
            ("fleet", report.fleet(self.end)),
            ("left", f"{self.end.volumes_left} volumes, {self.end.snapshots_left} snapshots"),
            ("seconds", f"{self.end.seconds:.0f}"),
        ]), report.verdict(self.broken))  # fmt: skip


def _sum(lost: Sequence[int | None]) -> int | None:
    counts = [count for count in lost if count is not None]
    return sum(counts) if len(counts) == len(lost) else None


def _broken(outcome: SweepOutcome) -> Iterator[str]:
    yield from outcome.end.faults("the sweep")
    for entry in outcome.entries:
        if entry.state != "done":
            yield f"run {entry.index} is {entry.state}"
        elif entry.ends != 1:
            yield f"run {entry.index} ended {entry.ends} times"
        elif not {"model/model.safetensors", "model/best.safetensors", "metrics.json"} <= set(entry.files):
            yield f"the results of run {entry.index} are not whole: {', '.join(entry.files) or 'nothing is there'}"
        elif not entry.has_own_parameters:
            yield f"run {entry.index} was trained with other parameters than entry {entry.index} has"
    if len(outcome.struck) < _FAULTS:
        yield f"only {len(outcome.struck)} of {_FAULTS} faults took place before the end"
    for fault in outcome.struck:
        if fault.lost is None:
            yield f"where the run of {fault.instance} went on is not known"
        elif fault.notice and fault.lost:
            yield f"{fault.lost} steps were lost although {fault.instance} had a notice"
        elif fault.lost > SAVE_STEPS:
            yield f"{fault.lost} steps were lost with {fault.instance}; a checkpoint is saved every {SAVE_STEPS}"
    if outcome.end.volumes_left or outcome.end.snapshots_left:
        yield f"{outcome.end.volumes_left} volumes and {outcome.end.snapshots_left} snapshots are left, not none"


# ---------------------------------------------------------------------------------------------------------- the whole
def rehearse(options: Options, chosen: Scenario, folder: Path, show: Display, stack: ExitStack) -> SweepOutcome:
    """Rehearse the sweep; WaitTimedOut after `options.seconds_max`."""
    show.event(0.0, f"scenario {chosen.name}: {chosen.says}")
    rehearsed = job.example(folder / "job", command=COMMAND)
    cloud = stage.set_up(stack, folder, options.seed)
    from spotheal.fleet.rehearsal.scenarios.keep import keep
    from spotheal.fleet.rehearsal.scenarios.watch import Watch
    from spotheal.fleet.request import plan
    from spotheal.fleet.run import runs
    from spotheal.fleet.run.session import Session

    session, volume = Session(job.REGION), rehearsed.job.volume
    step = plan.WriteSweep(ENTRIES, "list.yml", PARALLEL, volume.size_gib, volume.type)
    ready, _ = stage.request(session, rehearsed, sweep=step)
    root = session.store_root(rehearsed.job.store.url)
    sweep = runs.open_run(session.client("s3"), root, ready.plan.job, ready.plan.run)
    watch = Watch(cloud, sweep.store, volume.mount, time.monotonic(), reports=True)
    show.event(0.0, f"sweep {sweep.id} requested: {len(ENTRIES)} runs on {PARALLEL} instances")
    work = _Sweep(cloud, session, sweep, watch, show)
    try:
        stage.until_over(cloud, watch, work.look, options.seconds_max)
        return work.outcome()
    finally:
        cloud.end_machines()
        if options.keep is not None:
            keep(options.keep, cloud, sweep.store, watch, None)


class _Sweep:
    """The rehearsal as it goes on."""

    def __init__(self, cloud: Cloud, session: Session, sweep: Run, watch: Watch, show: Display) -> None:
        self._cloud, self._session, self._sweep, self._watch, self._show = cloud, session, sweep, watch, show
        self._rows: list[dict[str, Any]] = []
        self._struck: list[Struck] = []
        self._looked = float("-inf")

    def look(self) -> None:
        """What is new, what happens to a machine now, and the display."""
        self._look()
        if len(self._struck) < _FAULTS:
            self._strike()
        self._show.show(self._watch.view())

    def _look(self) -> None:
        """What the store says of the runs, and what is new of it."""
        from spotheal.fleet.sweep import progress

        if time.monotonic() - self._looked < _STORE_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            rows = progress.summarise(progress.gather(self._session, self._sweep))["entries"]
        except Retryable:
            return
        before = self._rows or [{"state": "waiting", "instances": 0}] * len(rows)
        for was, row in zip(before, rows, strict=True):
            if row["state"] in ("done", "failed") and row["state"] != was["state"]:
                self._say(f"run {row['index']} is {row['state']}: {row['reason']}".partition("\n")[0])
            elif row["instances"] > was["instances"]:
                self._say(f"run {row['index']} is taken" + (" by another machine" if row["instances"] > 1 else ""))
        self._rows = rows

    def _say(self, text: str) -> None:
        self._show.event(self._watch.seconds, text)

    def _strike(self) -> None:
        """A notice to the first machine in the midst of a run; once a run is done, the end of another such machine."""
        if self._struck and not any(row["state"] == "done" for row in self._rows):
            return
        for machine in self._cloud.machines.all():
            name = machine.launch.instance
            record, progress = self._cloud.rules.instance(name), self._progress(machine)
            rows = (row for row in self._rows if row["instance"] == name and row["phase"] == Phase.TRAINING.value)
            index = next((int(row["index"]) for row in rows), None)
            free = record is not None and record.state == "running" and record.notice is None
            if not free or index is None or progress is None or not progress.steps_total:
                continue
            if not _EARLY < progress.step / progress.steps_total < _LATE:
                continue
            if any(strike.index == index for strike in self._struck):
                continue
            notice = not self._struck
            if not (notice or is_saved(progress, SAVE_STEPS)):
                continue
            self._struck.append(Struck(name, index, notice, rfc3339(SystemClock().now())))
            self._cloud.make(NextZone(other=notice), name)
            self._say(self._cloud.make(Interrupt() if notice else Kill(), name))
            return

    def _progress(self, machine: Machine) -> Progress | None:
        progress = progress_of(self._watch.folders(machine).progress_file)
        return None if progress is None else progress[0]

    # -------------------------------------------------------------------------------------------------------- the end
    def outcome(self) -> SweepOutcome:
        self._looked = float("-inf")
        self._look()
        events = {row["index"]: self._events(row["index"]) for row in self._rows}
        return SweepOutcome(
            run=self._sweep.id,
            end=self._watch.end(),
            entries=tuple(self._entry(row, events[row["index"]]) for row in self._rows),
            struck=tuple(self._followed(strike, events) for strike in self._struck),
            instances=self._watch.stories(),
        )

    def _events(self, index: int) -> list[dict[str, Any]]:
        body = self._sweep.store.get_bytes(f"{LAYOUT.entry(index)}/{LAYOUT.ledger}") or b""
        return list(read_events(body.decode()))

    def _entry(self, row: dict[str, Any], events: list[dict[str, Any]]) -> EntryStory:
        index, prefix = int(row["index"]), f"{LAYOUT.results}{row['index']}/"
        config = (self._sweep.store.get_json(f"{prefix}metrics.json") or {}).get("config") or {}
        started = [event for event in events if event["event"] == "trainer-started"]
        return EntryStory(
            index=index,
            state=str(row["state"]),
            claims=int(row["instances"]),
            steps_total=row["steps_total"],
            ends=sum(event["event"] == "end" for event in events),
            resumed=tuple(self._begun_at(index, event) or 0 for event in started),
            files=tuple(key.removeprefix(prefix) for key in self._sweep.store.keys(prefix)),
            has_own_parameters={name: config.get(name) for name in ENTRIES[index]} == ENTRIES[index],
        )

    def _followed(self, struck: Struck, events: dict[int, list[dict[str, Any]]]) -> Struck:
        """Where the run of a machine that went away was, and where it went on."""
        machine = next(
            candidate for candidate in self._cloud.machines.all() if candidate.launch.instance == struck.instance
        )
        progress = self._progress(machine)
        after = [event for event in events.get(struck.index, []) if event["event"] == "trainer-started"
                 and str(event["time"]) > struck.time and event.get("instance") != struck.instance]  # fmt: skip
        step = None if progress is None else progress.step
        return replace(struck, step=step, next_step=self._begun_at(struck.index, after[0]) if after else None)

    def _begun_at(self, index: int, started: dict[str, Any]) -> int | None:
        """The step at which a trainer began: as the ledger says, else (it was slow to tell) as it wrote in its log."""
        if isinstance(started.get("resumed_step"), int):
            return int(started["resumed_step"])
        key = f"{LAYOUT.entry(index)}/{LAYOUT.trainer_log(str(started.get('instance')))}"
        match = re.search(rb"(?:resumed|beginning) at step (\d+) of", self._sweep.store.get_bytes(key) or b"")
        return int(match.group(1)) if match else None
