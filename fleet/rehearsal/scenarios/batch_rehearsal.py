"""An array on AWS Batch rehearsed: three runs on two hosts, one host interrupted, one killed, and a job that waits.

What is asked in the end: each child is done once, with its own parameters, its results are there whole; whose host went
away goes on from its copied checkpoints on another; the job that depends on the array began after it; each line of the
containers was told once; and nothing is left at Batch.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import JobFailed, SpothealError
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.record.ledger import read_events
from spotheal.agent.trainer.progress_files import progress_of
from spotheal.fleet.batch import creating, deleting, submitting
from spotheal.fleet.batch.following import Followed
from spotheal.fleet.batch.names import Names
from spotheal.fleet.batch.tail import Line
from spotheal.fleet.rehearsal.batch.containers import ProcessContainer
from spotheal.fleet.rehearsal.scenarios import job as examples
from spotheal.fleet.rehearsal.scenarios import stage
from spotheal.fleet.rehearsal.scenarios.first_word import FirstWord
from spotheal.fleet.rehearsal.scenarios.keep import copy
from spotheal.fleet.rehearsal.scenarios.progress import Display
from spotheal.fleet.rehearsal.scenarios.scenario import Interrupt, Kill, Scenario
from spotheal.fleet.rehearsal.scenarios.summary import Outcome
from spotheal.fleet.run import batch_jobs

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotheal.agent.protocol.job import JobConfig
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
    from spotheal.fleet.rehearsal.scenarios.run import Options
    from spotheal.fleet.run.session import Session

SAVE_STEPS = 10
_ARTICLE = {"batch_size": 128, "epochs": 10, "dropout_rate": 0.2, "activate_fn": "relu", "optimizer": "rmsprop"}
ENTRIES: tuple[dict[str, Any], ...] = (
    {**_ARTICLE, "hidden_nodes": [10, 20, 30]},
    {**_ARTICLE, "hidden_nodes": [30, 50, 70], "dropout_rate": 0.7, "activate_fn": "tanh"},
    {**_ARTICLE, "hidden_nodes": [64], "optimizer": "adam"},
)
# 12 steps an epoch of at least 0.2 s: 24 s a run, so that there is a middle to be interrupted in.
COMMAND = (
    "python", "-m", "spotheal.training", "--dataset", "digits", "--threads", "1", "--save-every", str(SAVE_STEPS),
    "--step-seconds", "0.2",
)  # fmt: skip
AFTERWARDS = ("python", "-c", "print('the array has ended, and this job begins')")
_HOSTS, _VCPUS = 2, 4
_NOTICE_SECONDS = 55.0  # 40 of them are kept from the trainer; the next attempt begins when the host is gone
_LOOK_SECONDS = 0.5
_EARLY, _LATE = 0.2, 0.85


@dataclass(frozen=True)
class ChildStory:
    """`resumed`: the steps its trainers began at. `lost`: steps that were done again."""

    index: int
    status: str
    attempts: int
    resumed: tuple[int, ...]
    lost: int
    files: tuple[str, ...]
    has_own_parameters: bool


@dataclass(frozen=True)
class BatchOutcome(Outcome):
    run: str
    seconds: float
    status: str
    phase: str
    reason: str
    children: tuple[ChildStory, ...]
    struck: tuple[tuple[int, str], ...]  # child, notice or kill
    dependent: str
    dependent_waited: bool
    lines: int
    lines_lost: int
    lines_repeated: int
    hosts: int
    left: tuple[str, ...]
    refused: tuple[tuple[str, str, str], ...]

    def faults(self) -> Iterator[str]:
        return _broken(self)

    def figures(self) -> dict[str, Any]:
        return {
            "scenario": "batch",
            "run": self.run,
            "status": self.status,
            "phase": self.phase,
            "reason": self.reason,
            "children": [asdict(child) for child in self.children],
            "interruptions": sum(kind == "notice" for _, kind in self.struck),
            "kills": sum(kind == "kill" for _, kind in self.struck),
            "steps_lost": sum(child.lost for child in self.children),
            "dependent_job": self.dependent,
            "lines": self.lines,
            "lines_lost": self.lines_lost,
            "lines_repeated": self.lines_repeated,
            "hosts": self.hosts,
            "left": list(self.left),
            "seconds": round(self.seconds, 1),
        }

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        from spotheal.fleet.rehearsal.scenarios import report

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("child", "state", "attempts", "began at step", "done again", "host"):
            table.add_column(title)
        struck = dict(self.struck)
        for child in self.children:
            table.add_row(str(child.index), child.status, str(child.attempts), ", ".join(map(str, child.resumed)),
                          str(child.lost), struck.get(child.index, ""))  # fmt: skip
        return Group(table, report.figures([
            ("array", f"{self.status}; {self.reason}"),
            ("dependent job", f"{self.dependent}{', after the array' if self.dependent_waited else ''}"),
            ("lines told", f"{self.lines}; {self.lines_lost} lost, {self.lines_repeated} repeated"),
            ("hosts", str(self.hosts)),
            ("left at Batch", ", ".join(self.left) or "nothing"),
            ("seconds", f"{self.seconds:.0f}"),
        ]), report.verdict(self.broken))  # fmt: skip


def _broken(outcome: BatchOutcome) -> Iterator[str]:
    if outcome.status != "SUCCEEDED" or outcome.phase != Phase.DONE.value:
        yield f"the array did not succeed: {outcome.status}, {outcome.phase}: {outcome.reason}"
    struck = dict(outcome.struck)
    for child in outcome.children:
        if not {"model/model.safetensors", "metrics.json"} <= set(child.files):
            yield f"the results of child {child.index} are not whole: {', '.join(child.files) or 'nothing is there'}"
        if not child.has_own_parameters:
            yield f"child {child.index} was trained with other parameters than entry {child.index} has"
        kind = struck.get(child.index)
        if kind and (child.attempts < 2 or not child.resumed or child.resumed[-1] == 0):
            yield f"child {child.index}, whose host went away, did not go on from its checkpoints: " \
                f"began at {child.resumed}"
        if kind == "notice" and child.lost:
            yield f"{child.lost} steps of child {child.index} were lost although its host had a notice"
        if not kind and child.attempts != 1:
            yield f"child {child.index} was tried {child.attempts} times without need"
    if set(struck.values()) != {"notice", "kill"}:
        yield f"not both faults took place before the end: {outcome.struck}"
    if outcome.dependent != "SUCCEEDED" or not outcome.dependent_waited:
        yield f"the job that depends on the array: {outcome.dependent}, waited: {outcome.dependent_waited}"
    if outcome.lines_lost or outcome.lines_repeated or not outcome.lines:
        yield f"of the containers' lines {outcome.lines_lost} were lost and {outcome.lines_repeated} repeated"
    if outcome.left:
        yield f"left at Batch: {', '.join(outcome.left)}"
    if outcome.refused:
        yield f"the job's role did not allow {outcome.refused[0]}"


# ------------------------------------------------------------------------------------------------------------ the whole
def rehearse(options: Options, chosen: Scenario, folder: Path, show: Display, stack: ExitStack) -> BatchOutcome:
    """Rehearse the array; WaitTimedOut after `options.seconds_max`."""
    show.event(0.0, f"scenario {chosen.name}: {chosen.says}")
    rehearsed = examples.example(folder / "job", command=COMMAND)
    cloud = stage.set_up(stack, folder, options.seed)
    from spotheal.fleet.run.session import Session

    work = _Array(cloud, Session(examples.REGION), rehearsed, show)
    try:
        work.run(options.seconds_max)
        return work.outcome()
    finally:
        if options.keep is not None:
            work.keep(options.keep)


def on_batch(job: JobConfig) -> JobConfig:
    """The job in containers of one GPU, two hosts' worth at once."""
    table = replace(job.batch, image="rehearsed/spotheal", vcpus=_VCPUS, memory_gib=1.0, gpus=1, attempts=5,
                    max_vcpus=_HOSTS * _VCPUS, copy_every="10s", instance_types=("g4dn.xlarge",))  # fmt: skip
    return replace(job, batch=table)


class _Array:
    """The rehearsal as it goes on. The operator's side is `Followed`, in a thread, as `batch submit --wait` has it."""

    def __init__(self, cloud: Cloud, session: Session, rehearsed: examples.Rehearsed, show: Display) -> None:
        self._cloud, self._session, self._show = cloud, session, show
        self._clock, self._began = SystemClock(), time.monotonic()
        self._job, self._job_file = on_batch(rehearsed.job), rehearsed.job_file
        self._names = Names(self._job.job.name)
        self._root = session.store_root("")
        self._struck: dict[int, str] = {}
        self._lines: Counter[tuple[str, str]] = Counter()
        self._failure = ""
        self._left: tuple[str, ...] = ()
        self._streams: Counter[tuple[str, str]] = Counter()

    def run(self, seconds_max: float) -> None:
        plan = creating.make_plan(self._session, self._job, self._root, self._clock)
        creating.carry_out(self._session, plan, self._clock, lambda text: None)
        self._say(f"made at Batch: {len(plan.steps)} things")
        self._array, order = self._submit(ENTRIES, ())
        self._run, self._store = order.instance.run, Store(self._session.client("s3"), order.instance.store)
        self._dependent, _ = self._submit(None, ({"jobId": self._array},))
        self._say(f"an array of {len(ENTRIES)} is submitted, and a job that depends on it")
        followers = [threading.Thread(target=self._follow, args=(job,)) for job in (self._array, self._dependent)]
        for follower in followers:
            follower.daemon = True
            follower.start()
        first_word = FirstWord(self._cloud, [self._entry(index) for index in range(len(ENTRIES))])
        while any(follower.is_alive() for follower in followers):
            stage.check_time(time.monotonic() - self._began, seconds_max)
            first_word.check()
            self._strike()
            time.sleep(_LOOK_SECONDS)
        self._note_end()
        self._delete()

    def _submit(
        self, entries: tuple[dict[str, Any], ...] | None, after: tuple[dict[str, str], ...]
    ) -> tuple[str, submitting.Order]:
        overrides = None if entries else submitting.Overrides(command=AFTERWARDS)
        order = submitting.prepare(
            self._session, self._job, self._job_file, self._root, self._clock,
            entries=None if entries is None else list(entries), listed_in="list.yml", overrides=overrides,
            depends_on=after, allow_paths=True,
        )  # fmt: skip
        return submitting.send(self._session, order, self._clock, lambda text: None), order

    def _follow(self, job_id: str) -> None:
        def line(log_line: Line) -> None:
            self._lines[f"{job_id[:8]} {log_line.label}", log_line.text] += 1

        try:
            Followed(self._session, self._names, job_id, self._clock, self._say, line).to_the_end()
        except JobFailed as error:
            self._failure = error.message

    # ----------------------------------------------------------------------------------------------------- what happens
    def _strike(self) -> None:
        """A notice to the first child's host in the middle of its run, and a kill of the next one's after a copy."""
        kinds = [kind for kind in ("notice", "kill") if kind not in self._struck.values()]
        if not kinds:
            return
        for index in range(len(ENTRIES)):
            if index in self._struck or not self._is_in_the_middle(index, kinds[0]):
                continue
            host = self._host(index)
            if host:
                fault = Interrupt(_NOTICE_SECONDS) if kinds[0] == "notice" else Kill()
                self._struck[index] = kinds[0]
                self._say(f"child {index}: {self._cloud.make(fault, host)}")
                return

    def _is_in_the_middle(self, index: int, kind: str) -> bool:
        store = self._entry(index)
        container = self._cloud.batch.jobs.containers.get(f"{self._array}:{index}")
        if not isinstance(container, ProcessContainer):
            return False
        progress = progress_of(Folders.at(container.machine.root, "/").progress_file)
        if (
            progress is None
            or not progress[0].steps_total
            or not _EARLY <= progress[0].step / progress[0].steps_total <= _LATE
        ):
            return False
        try:
            return kind == "notice" or any(key.endswith(".json") for key in store.keys(LAYOUT.checkpoints))
        except SpothealError:
            return False

    def _entry(self, index: int) -> Store:
        """The part of the store that is the child's."""
        return Store(self._store.client, self._store.url.below(LAYOUT.entry(index)))

    def _host(self, index: int) -> str:
        with self._cloud.rules.inside():
            child = self._cloud.batch.jobs.all.get(f"{self._array}:{index}")
            running = child.running if child is not None else None
            return running.host if running is not None and child is not None and child.status == "RUNNING" else ""

    # -------------------------------------------------------------------------------------------------------- the end
    def _note_end(self) -> None:
        """What CloudWatch has, and what Batch says, before both are deleted."""
        children = [f"{self._array}:{index}" for index in range(len(ENTRIES))]
        self._described = batch_jobs.describe(self._session, [self._array, self._dependent, *children])
        labels = {}
        for job_id, job in self._described.items():
            for stream in batch_jobs.streams_of(job) if not batch_jobs.size_of(job) else []:
                labels[stream.name] = f"{job_id[:8]} {stream.label}"
        group = self._cloud.batch.logs.groups[self._names.log_group]
        for name, events in group.streams.items():
            for _, text in events:
                self._streams[labels.get(name, name), text] += 1

    def _delete(self) -> None:
        resources = deleting.look(self._session, self._names)
        deleting.carry_out(self._session, self._names, resources, self._clock, lambda text: None)
        batch = self._cloud.batch
        leftovers = [*batch.environments, *batch.queues]
        leftovers += [definition.arn for definition in batch.definitions if definition.status == "ACTIVE"]
        leftovers += [role for role in deleting.look(self._session, self._names).roles]
        self._left = (*leftovers, *(name for name in batch.logs.groups))
        self._say("everything at Batch is deleted")

    def outcome(self) -> BatchOutcome:
        array, dependent = self._described[self._array], self._described[self._dependent]
        status = self._store.read_status() or {}
        waited = int(dependent.get("startedAt") or 0) >= int(array.get("stoppedAt") or 0) > 0
        lines, streams = self._lines, self._streams
        hosts = [instance for instance in self._cloud.rules.instances() if self._cloud.batch.owns(instance)]
        return BatchOutcome(
            run=self._run, seconds=time.monotonic() - self._began, status=str(array["status"]),
            phase=str(status.get("phase")), reason=self._failure or str(status.get("reason") or ""),
            children=tuple(self._child(index) for index in range(len(ENTRIES))),
            struck=tuple(sorted(self._struck.items())), dependent=str(dependent["status"]), dependent_waited=waited,
            lines=sum(lines.values()), lines_lost=(streams - lines).total(), lines_repeated=(lines - streams).total(),
            hosts=len(hosts), left=self._left, refused=tuple(self._cloud.endpoint.authorization.refused),
        )  # fmt: skip

    def _child(self, index: int) -> ChildStory:
        job = self._described[f"{self._array}:{index}"]
        store = self._entry(index)
        events = read_events((store.get_bytes(LAYOUT.ledger) or b"").decode(errors="replace"))
        started = [one.get("resumed_step") for one in events if one["event"] == "trainer-started"]
        # On a machine so busy that a trainer's first progress takes half a minute, its start is told without a step.
        copies = [0, *(int(one.get("saved_step") or 0) for one in events if one["event"] == "read-back")]
        resumed = copies if None in started else [int(one) for one in started if one is not None]
        lost, furthest = 0, self._furthest(store)
        for step, last in zip(resumed[1:], furthest, strict=False):
            lost += max(0, last - step)
        prefix = f"{LAYOUT.results}{index}/"
        files = tuple(key.removeprefix(prefix) for key in self._store.keys(prefix))
        config = (self._store.get_json(f"{prefix}metrics.json") or {}).get("config") or {}
        return ChildStory(index, str(job["status"]), len(job["attempts"]), tuple(resumed), lost, files,
                          {name: config.get(name) for name in ENTRIES[index]} == ENTRIES[index])  # fmt: skip

    def _furthest(self, store: Store) -> list[int]:
        """How far each attempt but the last was: told by its progress, or by the end of its trainer."""
        furthest = []
        for launch in store.launches()[:-1]:
            text = (store.get_bytes(LAYOUT.progress(str(launch["instance"]))) or b"").decode()
            events = read_events((store.get_bytes(LAYOUT.ledger) or b"").decode())
            ended = [event for event in events
                     if event["event"] == "trainer-ended" and event["instance"] == launch["instance"]]  # fmt: skip
            ends = [int(event["last_step"]) for event in ended if isinstance(event.get("last_step"), int)]
            steps = [int(json.loads(line)["step"]) for line in text.splitlines()]
            furthest.append(max([*ends, *steps], default=0))
        return furthest

    def keep(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for place in sorted((self._cloud.folder / "containers").glob("*")):
            copy(place / "root/var/log/spotheal", folder / "instances" / place.name / "logs")
            copy(place / "console.log", folder / "instances" / place.name / "console.log")

    def _say(self, text: str) -> None:
        self._show.event(time.monotonic() - self._began, text)
