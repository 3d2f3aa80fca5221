"""A rehearsal from beginning to end: the same request library, user data, agent and trainer as on AWS, in a cloud here.

`rehearse(options, show)` is all that `fleetctl rehearse` calls. The ground that it stands on is `stage`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.account import roles
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.programs import GPUS
from spotheal.fleet.rehearsal.scenarios import job as jobs
from spotheal.fleet.rehearsal.scenarios import stage
from spotheal.fleet.rehearsal.scenarios.progress import Display, Silent
from spotheal.fleet.rehearsal.scenarios.scenario import Event, Scenario, due, scenario
from spotheal.fleet.rehearsal.scenarios.summary import Outcome, Story, Summary, summarise
from spotheal.fleet.rehearsal.scenarios.weights import apart
from spotheal.fleet.rehearsal.services.elsewhere import Sink, stand_in
from spotheal.iam import job_roles

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
    from spotheal.fleet.rehearsal.scenarios.reference import Reference
    from spotheal.fleet.rehearsal.scenarios.watch import Watch
    from spotheal.fleet.request.gather import Ready

_REFERENCE_SECONDS_MAX = 3600.0


@dataclass(frozen=True)
class Options:
    """Neither file: the example job. `job_file` alone: that job on stand-in machines.

    `keep`: a folder for the volume's files and all logs, made here.
    """

    fleet_file: Path | None = None
    job_file: Path | None = None
    scenario: str = "standard"
    seed: int = 0
    keep: Path | None = None
    reference: bool = True
    report: Path | None = None  # where `fleetctl report`'s page of it goes
    seconds_max: float = 6 * 3600.0

    @property
    def example(self) -> bool:
        return self.fleet_file is None and self.job_file is None


def rehearse(options: Options, show: Display | None = None) -> Summary | Outcome:
    """Rehearse a job; returns what came of it. ConfigError where it cannot begin, WaitTimedOut after `seconds_max`."""
    chosen = scenario(options.scenario, options.seed)
    check_machine()
    check_extras(example=options.example)
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        raise ConfigError(f"{options.keep} is not empty", next_step="name a new folder with --keep DIR")
    with ExitStack() as stack:
        stack.enter_context(stage.ended_by_sigterm())
        stack.enter_context(redirect_stdout(sys.stderr))  # moto prints; standard output is the caller's data
        folder = Path(tempfile.mkdtemp(prefix="spotheal-rehearsal-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if chosen.module:
            if not options.example:
                raise ConfigError(f"scenario {chosen.name} is of an example of its own",
                                  next_step="leave out the files, or choose another scenario")  # fmt: skip
            module = importlib.import_module(f"spotheal.fleet.rehearsal.scenarios.{chosen.module}")
            return module.rehearse(options, chosen, folder, show or Silent(), stack)  # type: ignore[no-any-return]
        if options.example:
            rehearsed = jobs.example(folder / "job", ranks=chosen.ranks)
        else:
            rehearsed = jobs.users(options.fleet_file, options.job_file)
        check_ranks(chosen, rehearsed)
        check_zones(chosen, rehearsed)
        return _Rehearsal(options, chosen, rehearsed, folder, show or Silent()).run(stack)


# ---------------------------------------------------------------------------------------------------- before it begins
def check_machine() -> None:
    if sys.platform != "linux":
        raise ConfigError(
            "a rehearsal needs Linux: its instances are process groups that only /proc can show",
            next_step="run it in a Linux container or virtual machine",
        )


def check_extras(*, example: bool) -> None:
    """ConfigError that names the extra to install."""
    wanted = {"moto": "rehearsal"} | ({"torch": "training", "sklearn": "training"} if example else {})
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({wanted[name] for name in missing}))
        raise ConfigError(
            f"a rehearsal needs {', '.join(missing)}, which cannot be imported here",
            next_step=f'in the checkout of spotheal: pip install ".[{extras}]"',
        )


def check_ranks(chosen: Scenario, rehearsed: jobs.Rehearsed) -> None:
    if rehearsed.job.on_machines:
        raise ConfigError(
            f"{rehearsed.job_file} asks for several machines: a rehearsal of your own job is of one",
            next_step='--scenario elastic without a file shows several; `nodes = "1"` rehearses the job on one',
        )
    if chosen.ranks and rehearsed.job.job.nproc_per_node == 1:
        raise ConfigError(
            f"scenario {chosen.name} is of several ranks, and {rehearsed.job_file} asks for one",
            next_step='write nproc_per_node = "gpu" (the rehearsal shows 2 GPUs) or choose another scenario',
        )


def check_zones(chosen: Scenario, rehearsed: jobs.Rehearsed) -> None:
    zones = rehearsed.fleet.zones or rehearsed.fleet.subnets
    if zones and len(zones) < chosen.needs_zones:
        raise ConfigError(
            f"scenario {chosen.name} moves across zones, and {rehearsed.fleet.source} names one zone only",
            next_step="name a second zone (a volume alone in one zone waits as long as it has no spot capacity),"
            " or choose --scenario notice",
        )


# ---------------------------------------------------------------------------------------------------------- the whole
class _Rehearsal:
    def __init__(
        self, options: Options, chosen: Scenario, rehearsed: jobs.Rehearsed, folder: Path, show: Display
    ) -> None:
        self._options, self._scenario, self._rehearsed = options, chosen, rehearsed
        self._folder, self._show = folder, show
        gpus = jobs.gpus_of(rehearsed.job)
        self._gpus = {GPUS: str(gpus)} if gpus else {}
        self._began, self._requested = time.monotonic(), False  # what is said before the request is said at 0
        self._taken = 0
        self._touched: set[str] = set()
        self._notices = 0

    def run(self, stack: ExitStack) -> Summary:
        self._say(f"scenario {self._scenario.name}: {self._scenario.says}")
        for note in self._rehearsed.notes:
            self._say(note)
        region = self._rehearsed.fleet.region or self._rehearsed.job.job.region or jobs.REGION
        cloud = stage.set_up(stack, self._folder, self._options.seed, region=region, zones=self._rehearsed.fleet.zones,
                             environment=self._gpus)  # fmt: skip
        from spotheal.agent.aws.s3 import Store
        from spotheal.fleet.rehearsal.scenarios.keep import keep
        from spotheal.fleet.rehearsal.scenarios.watch import Watch

        stage.pass_roles(cloud, self._rehearsed.fleet.document, self._say)
        sink = Sink()
        stack.callback(sink.close)
        session, ready = self._request(region, sink)
        reference = self._reference(stack, ready) if self._options.reference else None
        store = Store(session.client("s3"), ready.plan.store)
        example = self._options.example
        watch = Watch(cloud, store, self._rehearsed.job.volume.mount, self._began, reports=example)
        try:
            stage.until_over(cloud, watch, lambda: self._look(cloud, watch), self._options.seconds_max)
            fault = self._await(reference) if reference is not None else ""
            self._say("comparing the weights" if reference is not None else "reading the weights")
            notifications = tuple(sink.events) if self._rehearsed.job.notify.webhook else None
            summary = summarise(replace(self._story(cloud, watch, ready, reference, fault), webhook=notifications))
            if self._options.report is not None:
                self._report(session, ready, self._options.report)
        finally:
            cloud.end_machines()
            if reference is not None:
                reference.close()
            if self._options.keep is not None:
                place = self._rehearsed.job.store.results_place
                elsewhere = place.below(ready.plan.job, ready.plan.run) if isinstance(place, StoreUrl) else None
                keep(self._options.keep, cloud, store, watch, reference,
                     Store(session.client("s3"), elsewhere) if elsewhere else None)  # fmt: skip
        return summary

    def _say(self, text: str) -> None:
        self._show.event(time.monotonic() - self._began if self._requested else 0.0, text)

    # ---------------------------------------------------------------------------------------------------- the request
    def _request(self, region: str, sink: Sink) -> tuple[Any, Ready]:
        from spotheal.fleet.run.session import Session

        session = Session(region)
        fleet, notes = self._localised(session)
        for note in notes:
            self._say(note)
        job = stand_in(session, fleet, self._rehearsed.job, sink, self._say)
        ready, answer = stage.request(session, replace(self._rehearsed, fleet=fleet, job=job), planned=self._begin)
        self._say(f"run {ready.plan.run} requested, volume {answer['volume_id']}")
        return session, ready

    def _begin(self) -> None:
        self._began, self._requested = time.monotonic(), True

    def _localised(self, session: Any) -> tuple[Any, list[str]]:
        fleet = self._rehearsed.fleet
        if not fleet.subnets and not fleet.template_configs:
            return jobs.localise(fleet, {}, "")
        ec2 = session.client("ec2")
        subnets = {s["AvailabilityZone"]: s["SubnetId"] for s in ec2.describe_subnets()["Subnets"]}
        name = "rehearsal-in-place-of-yours"
        if fleet.template_configs:
            role = job_roles.job_role(self._rehearsed.job.job.name)
            missing = roles.missing_instance_role(session, role, session.store_root(self._rehearsed.job.store.url))
            assert missing is not None  # the account is empty
            roles.create_instance_role(session, missing)
            profile = {"Arn": roles.profile_arn(session, role)}
            data = {"ImageId": EXAMPLE_IMAGE, "InstanceType": "g5.xlarge", "IamInstanceProfile": profile}
            ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        return jobs.localise(fleet, subnets, name)

    def _reference(self, stack: ExitStack, ready: Ready) -> Reference:
        from spotheal.fleet.rehearsal.scenarios.reference import Reference

        repository = str(ready.source.bundle or self._rehearsed.job.job.repository)
        reference = Reference(self._folder, ready.instance, repository, stage.passed_on() | self._gpus)
        stack.callback(reference.close)
        return reference

    def _report(self, session: Any, ready: Ready, path: Path) -> None:
        from spotheal.agent.aws.s3 import Store
        from spotheal.fleet.report import report
        from spotheal.fleet.report.page import page
        from spotheal.fleet.report.pieces import write
        from spotheal.fleet.run import runs

        run = runs.Run(ready.plan.job, ready.plan.run, Store(session.client("s3"), ready.plan.store))
        made = report.make(report.gather(session, run), SystemClock().now(), banner=report.REHEARSED)
        write(page(made).encode(), path)

    # ---------------------------------------------------------------------------------------------------- while it runs
    def _look(self, cloud: Cloud, watch: Watch) -> None:
        view = watch.trainer(self._touched)
        event = due(self._scenario.events, self._taken, view)
        if event is not None and view is not None:
            self._make(cloud, event, view.instance)
        for news in watch.news():
            self._say(news)
        self._show.show(watch.view())

    def _make(self, cloud: Cloud, event: Event, instance: str) -> None:
        self._taken += 1
        if event.ends_machine:
            self._touched.add(instance)
        for fault in event.faults:
            self._say(cloud.make(fault, instance))

    def _await(self, reference: Reference) -> str:
        """Wait for the uninterrupted run; "" or why it failed."""
        limit = time.monotonic() + _REFERENCE_SECONDS_MAX
        if reference.exit_code is None:
            self._say("waiting for the run that is not interrupted, to compare with")
        while reference.exit_code is None and time.monotonic() < limit:
            time.sleep(stage.LOOK_SECONDS)
        if reference.exit_code is None:
            return f"it had not ended {_REFERENCE_SECONDS_MAX:.0f} s after the rehearsal"
        return "" if reference.exit_code == 0 else reference.last_words()

    # -------------------------------------------------------------------------------------------------------- the end
    def _story(
        self, cloud: Cloud, watch: Watch, ready: Ready, reference: Reference | None, reference_fault: str
    ) -> Story:
        stories = watch.stories()
        final = _digest(watch.final_volume())
        compared = _digest(reference.volume) if reference and not reference_fault else {}
        return Story(
            job=ready.plan.job,
            run=ready.plan.run,
            scenario=self._scenario.name,
            seed=self._options.seed,
            end=watch.end(),
            instances=stories,
            events_planned=len(self._scenario.events),
            events_taken=self._taken,
            notices=sum(story.end == "interrupted" for story in stories),
            kills=sum(story.end == "killed" for story in stories),
            zone_moves=watch.zone_moves(),
            zone_moves_planned=self._scenario.zone_moves,
            steps_total=watch.steps_total(),
            final_sha256=final.get("sha256"),
            reference_sha256=compared.get("sha256"),
            generators_apart=apart(final["generators"], compared["generators"]) if final and compared else (),
            reference_made=reference is not None,
            reference_fault=reference_fault,
            throttles_planned=self._scenario.throttles,
            throttled_calls=cloud.throttled_calls(),
            files_lost=tuple(watch.survival.lost()),
            not_resumed=tuple(watch.survival.not_resumed()),
            sees_reads=watch.survival.sees_reads,
            example=self._options.example,
        )


def _digest(volume: Path | None) -> dict[str, Any]:
    """As `weights.digest`, made by a process of its own: what reads strange files must not be this one."""
    import json
    import subprocess

    if volume is None:
        return {}
    process = subprocess.run(
        [sys.executable, "-m", "spotheal.fleet.rehearsal.scenarios.weights", str(volume)],
        capture_output=True,
        text=True,
        check=False,
    )
    with suppress(ValueError):
        return json.loads(process.stdout)  # type: ignore[no-any-return]
    return {}
