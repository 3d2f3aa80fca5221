"""Several machines rehearsed: two to three train together over gloo, one is killed and replaced, one gets a notice.

`elastic` is the example trainer, whose rank 0 saves; `elastic-sharded` is example_fsdp.py in a repository of its own,
each of whose ranks saves its share. What is asked in the end: the world shrank and grew again, and each time loaded
what another number of ranks had saved; no more than an interval was done again, one machine alone recorded the end and
cancelled the fleet, the results are on EFS once, and nothing is left that costs. All machines train in one working
copy, made once, in which `setup` ran once.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.trainer.progress_files import progress_of
from spotheal.fleet.rehearsal.scenarios import job as jobs
from spotheal.fleet.rehearsal.scenarios import stage
from spotheal.fleet.rehearsal.scenarios.progress import Display, View
from spotheal.fleet.rehearsal.scenarios.scenario import Interrupt, Kill, NextZone, NoCapacity, Scenario, is_saved
from spotheal.fleet.rehearsal.scenarios.summary import End, Outcome
from spotheal.fleet.rehearsal.services.elsewhere import make_file_system

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotheal.agent.aws.s3 import Store
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.fleet.rehearsal.machines.machines import Machine
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
    from spotheal.fleet.rehearsal.scenarios.run import Options
    from spotheal.fleet.rehearsal.scenarios.watch import Watch

LEAST, MOST = 2, 3
SAVE_STEPS = 10
COMMAND = (
    "python", "-m", "spotheal.training", "--dataset", "digits", "--epochs", "20", "--save-every", str(SAVE_STEPS),
    "--batch-size", "32", "--threads", "1", "--step-seconds", "0.12", "--device", "cpu", "--scale-lr", "linear",
)  # fmt: skip
SHARDED = "elastic-sharded"
SHARDED_COMMAND = (
    "python", "train_fsdp.py", "--epochs", "20", "--save-every", str(SAVE_STEPS), "--step-seconds", "0.12",
)  # fmt: skip
SET_UP = "set-up.txt"  # in the working copy, a line for each time that `setup` ran
_STORE_SECONDS = 1.0
_KILL_FROM, _NOTICE_FROM = 0.10, 0.35  # of the steps
_FAULTS = 2
_DROUGHT_SECONDS_MAX = 120.0
_WORLD = re.compile(r"ranks: world (\d+) = ")
_RESUMED = re.compile(r"resum(?:ing|ed) at step (\d+)")  # rank 0's words
_RESHARDED = re.compile(r"saved by (\d+) ranks, resumed by (\d+)")


@dataclass(frozen=True)
class Struck:
    """A machine that went away. `hosted`: the others' rendezvous was on it. `lost`: steps done again after it."""

    instance: str
    notice: bool
    hosted: bool
    step: int
    lost: int | None = None


@dataclass(frozen=True)
class ElasticOutcome(Outcome):
    """Everything that was seen; what was not as it should be is `broken`. `worlds`: sizes, in the order they met.

    `resharded`: how many ranks saved and how many loaded it, where these were others. `set_ranks`: how many files of
    ranks the newest set of shards has, None without such sets. `copies`: how many machines made the working copy;
    `setups`: how often `setup` ran.
    """

    scenario: str
    run: str
    end: End
    machines: int
    worlds: tuple[int, ...]
    struck: tuple[Struck, ...]
    steps_total: int | None
    rendezvous: int
    ends: int
    cancels: int
    results: tuple[str, ...]
    resharded: tuple[tuple[int, int], ...]
    copies: int
    setups: int
    set_ranks: int | None = None

    def faults(self) -> Iterator[str]:
        return _broken(self)

    def figures(self) -> dict[str, Any]:
        lost = [strike.lost for strike in self.struck]
        return {
            **{name: value for name, value in asdict(self).items() if name != "end"},
            "interval": SAVE_STEPS,
            "steps_redone": sum(count for count in lost if count is not None) if None not in lost else None,
            **self.end.to_document(),
        }

    def render(self) -> RenderableType:
        from rich.console import Group

        from spotheal.fleet.rehearsal.scenarios import report

        return Group(report.figures([
            ("run", f"{self.run}: {self.end.phase or 'unknown'}, {self.end.reason}"),
            ("machines", f"{self.machines}; worlds of {', '.join(map(str, self.worlds))} ranks"),
            *(("struck", _in_words(strike)) for strike in self.struck),
            ("rendezvous", f"{self.rendezvous}, a new one where its host went"),
            ("loaded", _loads(self)),
            ("working copy", f"made {self.copies} times for {self.machines} machines, `setup` ran {self.setups} times"),
            ("fleet", report.fleet(self.end)),
            ("results", ", ".join(self.results) or "none"),
            ("seconds", f"{self.end.seconds:.0f}"),
        ]), report.verdict(self.broken))  # fmt: skip


def _in_words(strike: Struck) -> str:
    manner = "got a notice" if strike.notice else "was killed"
    host = ", and with it the rendezvous" if strike.hosted else ""
    return f"{strike.instance} {manner} at step {strike.step}{host}: {strike.lost} steps done again"


def _loads(outcome: ElasticOutcome) -> str:
    by_others = (
        ", ".join(f"by {after} what {before} had saved" for before, after in outcome.resharded) or "by no other world"
    )
    return by_others + (f"; the last set has {outcome.set_ranks} shards" if outcome.set_ranks is not None else "")


def _broken(outcome: ElasticOutcome) -> Iterator[str]:
    yield from outcome.end.faults()
    if len(outcome.struck) < _FAULTS:
        yield f"only {len(outcome.struck)} of {_FAULTS} machines were taken before the end"
    for strike in outcome.struck:
        if strike.lost is None:
            yield f"whether steps were lost with {strike.instance} is not known"
        elif strike.lost > (0 if strike.notice else SAVE_STEPS):
            manner = "got a notice" if strike.notice else "was killed"
            yield f"{strike.lost} steps were lost with {strike.instance}, which {manner}"
    sizes = outcome.worlds
    shrank = next((at for at, (a, b) in enumerate(pairwise(sizes)) if b < a), None)
    if shrank is None:
        yield f"the world never shrank: {sizes}"
    elif all(b <= a for a, b in pairwise(sizes[shrank:])):
        yield f"no replacement joined the world: {sizes}"
    if not any(before > after for before, after in outcome.resharded):
        yield "no checkpoint was loaded by fewer ranks than had saved it"
    if not any(before < after for before, after in outcome.resharded):
        yield "no checkpoint was loaded by more ranks than had saved it"
    if outcome.scenario == SHARDED and (outcome.set_ranks,) != sizes[-1:]:
        yield f"the last set has {outcome.set_ranks or 'no'} shards, and the worlds had {sizes} ranks"
    if outcome.ends != 1 or outcome.cancels != 1:
        yield f"the end was recorded {outcome.ends} times and the fleet cancelled {outcome.cancels} times, not once"
    if not {"model.safetensors", "metrics.json"} <= set(outcome.results):
        yield f"the results on EFS are not whole: {', '.join(outcome.results) or 'nothing is there'}"
    if (outcome.copies, outcome.setups) != (1, 1):
        yield f"the working copy was made {outcome.copies} times and `setup` ran {outcome.setups} times, not once"
    if outcome.end.volumes_left:
        yield f"{outcome.end.volumes_left} volumes are left; these machines need none"


# ---------------------------------------------------------------------------------------------------------- the whole
def rehearse(options: Options, chosen: Scenario, folder: Path, show: Display, stack: ExitStack) -> ElasticOutcome:
    """Rehearse it; WaitTimedOut after `options.seconds_max`."""
    show.event(0.0, f"scenario {chosen.name}: {chosen.says}")
    cloud = stage.set_up(stack, folder, options.seed)
    from spotheal.agent.aws.s3 import Store
    from spotheal.fleet.rehearsal.scenarios.keep import keep
    from spotheal.fleet.rehearsal.scenarios.watch import Watch
    from spotheal.fleet.run.session import Session

    session = Session(jobs.REGION)
    rehearsed = example(chosen.name, folder / "job")
    file_system = make_file_system(session, rehearsed.fleet)
    job = on_machines(rehearsed.job, file_system)
    ready, _ = stage.request(session, replace(rehearsed, job=job))
    run, store = ready.plan.run, Store(session.client("s3"), ready.plan.store)
    show.event(0.0, f"run {run} requested: {LEAST} to {MOST} machines, checkpoints on {job.store.results}")
    watch = Watch(cloud, store, job.volume.mount, time.monotonic(), reports=True)
    work = _Elastic(cloud, store, watch, show, Path("training", job.job.name, run), run, chosen.name)
    try:
        stage.until_over(cloud, watch, work.look, options.seconds_max)
        return work.outcome()
    finally:
        cloud.end_machines()
        if options.keep is not None:
            keep(options.keep, cloud, store, watch, None)


def example(name: str, folder: Path) -> jobs.Rehearsed:
    """The job of the scenario `name`."""
    if name != SHARDED:
        return jobs.example(folder, command=COMMAND)
    trainer = resources.files("spotheal.training.example").joinpath("example_fsdp.py").read_text(encoding="utf-8")
    return jobs.example(folder, command=SHARDED_COMMAND, files={"train_fsdp.py": trainer})


def on_machines(job: JobConfig, file_system: str) -> JobConfig:
    """The job on two to three machines, its results on that file system."""
    setup = (("sh", "-c", f"echo ran >> {SET_UP}"),)
    nodes = replace(job.job, nodes=f"{LEAST}:{MOST}", nodes_wait="10m", setup=setup)
    return replace(job, job=nodes, store=replace(job.store, results=f"efs://{file_system}/training"))


class _Elastic:
    """The rehearsal as it goes on. `folder`: the run's, on the file system."""

    def __init__(
        self, cloud: Cloud, store: Store, watch: Watch, show: Display, folder: Path, run: str, scenario: str
    ) -> None:
        self._cloud, self._store, self._watch, self._show, self._folder = cloud, store, watch, show, folder
        self._run, self._scenario = run, scenario
        self._struck: list[Struck] = []
        self._drought = False  # no spot capacity, from the kill until the world has shrunk
        self._step, self._total, self._is_saved = 0, 0, False
        self._nodes: list[dict[str, Any]] = []
        self._terms: set[int] = set()
        self._looked = float("-inf")
        self._told: set[tuple[str, int]] = set()
        self._resumed: dict[str, int] = {}  # by machine, how often its rank 0 has begun at a checkpoint

    def look(self) -> None:
        """What is new, what happens to a machine now, and the display."""
        self._look()
        self._end_drought()
        if len(self._struck) < _FAULTS:
            self._strike()
        self._show.show(self._view())

    def _say(self, text: str) -> None:
        self._show.event(self._watch.seconds, text)

    # ------------------------------------------------------------------------------------------------- while it runs
    def _look(self) -> None:
        """How far they are, by the progress file that all of them share, and who is in which rendezvous."""
        self._look_where_they_began()
        progress = progress_of(self._path("progress", "progress.json"))
        if progress is not None:
            self._is_saved = is_saved(progress[0], SAVE_STEPS)
            self._step, self._total = progress[0].step, progress[0].steps_total or self._total
        if time.monotonic() - self._looked < _STORE_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            self._nodes = [node for key in self._store.keys(LAYOUT.nodes) if (node := self._store.get_json(key))]
        except SpothealError:
            return
        for node in self._nodes:
            term, name = node.get("term"), str(node.get("instance"))
            if isinstance(term, int) and (name, term) not in self._told:
                self._told.add((name, term))
                self._terms.add(term)
                self._say(f"{name} {'hosts' if node.get('leads') else 'joins'} rendezvous {term}")

    def _view(self) -> View:
        """All that train are shown as such, not the one alone that writes the status."""
        view = self._watch.view()
        training = {str(node.get("instance")) for node in self._nodes if node.get("term") is not None}
        machines = tuple(
            replace(machine, state="training")
            if machine.instance in training and machine.state == "healing"
            else machine
            for machine in view.machines
        )
        return replace(view, machines=machines, step=self._step, steps_total=self._total or None)

    def _path(self, *parts: str) -> Path:
        systems = self._cloud.endpoint.efs.folder
        assert systems is not None
        system = next(iter(sorted(systems.iterdir())))
        return system.joinpath(self._folder, *parts)

    def _look_where_they_began(self) -> None:
        """As ranks say it: on a busy machine the progress file may be past that step again when it is read."""
        for machine in self._cloud.machines.all():
            name, steps = machine.launch.instance, _RESUMED.findall(_log(machine))
            for step in steps[self._resumed.get(name, 0) :]:
                self._went_on(int(step))
            self._resumed[name] = len(steps)

    def _went_on(self, step: int) -> None:
        """Of the newest machine that went away: at which step the others went on."""
        if self._struck and self._struck[-1].lost is None:
            last = self._struck[-1]
            lost = max(0, max(self._step, last.step) - step)
            self._struck[-1] = replace(last, lost=lost)
            self._say(f"training goes on at step {step}; {lost} steps are done again")

    def _strike(self) -> None:
        """Once all train: the end of one that hosts nothing; when it is replaced, a notice to the one that hosts."""
        share = self._step / self._total if self._total else 0.0
        if share < (_NOTICE_FROM if self._struck else _KILL_FROM):
            return
        if self._struck and (self._struck[-1].lost is None or self._step < self._struck[-1].step + SAVE_STEPS):
            return
        alive = [machine for machine in self._cloud.machines.all() if self._is_free(machine)]
        doing = {str(node.get("instance")): node for node in self._nodes}
        candidates = [machine for machine in alive if doing.get(machine.launch.instance, {}).get("term") is not None]
        if len(candidates) < MOST or self._worlds(candidates[0])[-1:] != [MOST]:
            return
        notice = bool(self._struck)
        if not (notice or self._is_saved):
            return
        for machine in candidates:
            name = machine.launch.instance
            if bool(doing[name].get("leads")) is notice:
                self._struck.append(Struck(name, notice, notice, self._step))
                self._cloud.make(NextZone(other=notice), name)
                if not notice:  # on a quiet machine the replacement is there before the others have missed the lost one
                    self._say(self._cloud.make(NoCapacity(_DROUGHT_SECONDS_MAX), name))
                    self._drought = True
                self._say(self._cloud.make(Interrupt() if notice else Kill(), name))
                return

    def _end_drought(self) -> None:
        """There is spot capacity again once the world has shrunk."""
        alive = [machine for machine in self._cloud.machines.all() if machine.running]
        if self._drought and any((self._worlds(machine) or [MOST])[-1] < MOST for machine in alive):
            self._drought = False
            self._cloud.make(NoCapacity(0.0), self._struck[0].instance)
            self._say("spot capacity is there again")

    def _is_free(self, machine: Machine) -> bool:
        record = self._cloud.rules.instance(machine.launch.instance)
        return machine.running and record is not None and record.state == "running" and record.notice is None

    def _worlds(self, machine: Machine) -> list[int]:
        """The sizes of the worlds that the machine was in, as its launcher said them."""
        return [int(size) for size in _WORLD.findall(_log(machine))]

    # -------------------------------------------------------------------------------------------------------- the end
    def outcome(self) -> ElasticOutcome:
        rules, machines = self._cloud.rules, self._cloud.machines.all()
        calls = [call for call in list(rules.calls) if call.operation in ("CancelSpotFleetRequests", "DeleteFleets")]
        resharded_pairs = {pair for machine in machines for pair in _RESHARDED.findall(_log(machine))}
        return ElasticOutcome(
            scenario=self._scenario,
            run=self._run,
            end=self._watch.end(),
            machines=len(machines),
            worlds=self._longest(machines),
            struck=tuple(self._struck),
            steps_total=self._total or None,
            rendezvous=len(self._terms),
            ends=sum(event["event"] == "end" for event in self._watch.events),
            cancels=sum(call.outcome == "ok" for call in calls),
            results=self._results(),
            resharded=tuple(sorted((int(before), int(after)) for before, after in resharded_pairs)),
            copies=sum(_log(machine).count("the working copy is made") for machine in machines),
            setups=self._setups(),
            set_ranks=set_ranks(self._path("checkpoints")),
        )

    def _longest(self, machines: Sequence[Machine]) -> tuple[int, ...]:
        """The worlds of the machine that was in most of them."""
        histories = sorted((self._worlds(machine) for machine in machines), key=len)
        return tuple(histories[-1]) if histories else ()

    def _setups(self) -> int:
        try:
            return len(self._path("working-copy", SET_UP).read_text().splitlines())
        except OSError:
            return 0

    def _results(self) -> tuple[str, ...]:
        folder = self._path()
        ours = ("checkpoints", "working", "logs", "keep", "progress", "working-copy", ".spotheal")
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        return tuple(sorted(path.as_posix() for path in files if path.parts[0] not in ours))


def _log(machine: Machine) -> str:
    """What its agent, its launcher and its ranks said."""
    try:
        return (machine.root / "var/log/spotheal/agent.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def set_ranks(checkpoints: Path) -> int | None:
    """How many files of ranks the newest set of shards there has, by its commit mark; None where there is no set."""
    marks = sorted(checkpoints.glob("step-*/commit.json"))
    if not marks:
        return None
    named = len(json.loads(marks[-1].read_bytes())["files"])
    return named if named == len(list(marks[-1].parent.glob("rank-*.safetensors"))) else 0
