"""`fleetctl request`: the plan, the question, the fleet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.agent.protocol.errors import ConfigError, Conflict
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.terminal.console import ask, is_json, open_session, say, say_progress, verb
from spotheal.fleet.terminal.options import JobFile, Output, Profile, Region, Yes, seconds_of
from spotheal.fleet.verbs.status import follow, show_status

if TYPE_CHECKING:
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.request.plan import Plan, Resume
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl request spot_fleet_config.json --wait"


@verb
def request(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="AWS's SpotFleetRequestConfig.")
    ] = Path("spot_fleet_config.json"),
    job: JobFile = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; print the exact request as JSON.")] = False,
    render: Annotated[
        Path | None, typer.Option("--render", metavar="FILE", help="Send nothing; write the request for the aws CLI.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the job's last run and its volume.")] = False,
    new_run: Annotated[bool, typer.Option("--new-run", help="Begin another run of a job that has one.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="While it runs: save, cancel, request again with other types or prices.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --wait: give up after 90s, 20m, 3h …")
    ] = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Start a job; one that runs already is shown.

    A fleet replaces interrupted instances until the training has ended. Shows what it will do and what it costs, asks
    once, and can be typed again at any time: an interrupted request goes on. --dry-run and --render need no AWS
    credentials.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.files import config
    from spotheal.fleet.request import gather, plan, submit, wheelhouse
    from spotheal.fleet.run import runs
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    seconds_max = seconds_of("--timeout", timeout)
    sends = not dry_run and render is None
    if resume + new_run + replace > 1:
        raise ConfigError("--resume, --new-run and --replace exclude each other", next_step="give one of them")
    if sends and not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", next_step="--yes to go ahead, or --dry-run to look first")
    job_file = job or config.job_file_beside(file)
    inputs = gather.Wanted(*config.read_request(file, job_file), job_file, file, resume, new_run)
    session, clock = open_session(region, profile), SystemClock()
    gather.settle_region(session, inputs)
    name = inputs.job.job.name
    offline = not sends and not session.has_credentials()
    say_progress("reading the account …", quiet=offline)
    way: plan.Way
    if offline:
        root_url, way = gather.offline_root(session, inputs.job.store.url), plan.Begin()
    else:
        root_url = session.store_root(inputs.job.store.url)
        existing = gather.existing_run(session, root_url, name)
        live = existing is not None and existing.live
        way = plan.decide_run(name, existing, resume=resume or (replace and not live), new_run=new_run)
    replaces = replace and isinstance(way, plan.Show)
    if isinstance(way, plan.Show) and replace:
        way = plan.Resume(way.existing)
    if isinstance(way, plan.Show):
        run = runs.open_run(session.client("s3"), root_url, name, way.existing.run)
        say(f"job {name} is at work already: run {run.id}, {way.existing.fleet}")
        show_status(session, run, as_json)
    else:
        ready = gather.make_plan(session, inputs, way, root_url, wheelhouse.build(), clock, offline=offline)
        if dry_run:
            print(show.as_json(show.plan_document(ready.plan, is_sent=False)), flush=True)
            if replaces and isinstance(way, plan.Resume):
                say(_first(way))
            say(f"{show.plan_text(ready.plan)}\n\nnothing was sent")  # after the JSON: on a terminal it stays in sight
            return
        if render is not None:
            _render(ready.plan, render)
            return
        if replaces and isinstance(way, plan.Resume):
            say(_first(way))
        say(show.plan_text(ready.plan))
        _ask_for_adoption(ready.plan, yes)
        ask("Go ahead?", yes)
        if replaces:
            way = _end_first(session, root_url, name, ready.plan.run)
            ready = gather.make_plan(session, inputs, way, root_url, ready.wheelhouse, clock)
        result = submit.carry_out(session, ready, clock, say)
        document = show.plan_document(ready.plan, is_sent=True, result=result)
        print(show.as_json(document) if as_json else f"{result['fleet_id']}  run {ready.plan.run} of job {name}")
        say(f"next: fleetctl status {name}, fleetctl logs -f {name}, fleetctl cancel {name}")
        run = runs.open_run(session.client("s3"), root_url, name, ready.plan.run)
    if wait:
        _wait(session, run, seconds_max)


def _ask_for_adoption(planned: Plan, yes: bool) -> None:
    """A volume found by its Name tag alone may hold anybody's data: --yes is no answer for it."""
    from spotheal.fleet.account import volumes
    from spotheal.fleet.request import plan

    for step in planned.steps:
        if isinstance(step, plan.AdoptVolume) and not step.is_own:
            if yes:
                raise volumes.not_claimed(step.volume)
            ask(f"{step.volume.id} carries no job's tag. Is it this job's, with all its files?", yes)


def _first(way: Resume) -> str:
    return f"first: {way.existing.fleet} saves a checkpoint and ends; then its run goes on as follows\n"


def _end_first(session: Session, root: StoreUrl, job: str, run: str) -> Resume:
    """The run at work saves and ends, and no instance of it is left; Conflict if it has come to its own end."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.ending import stopping
    from spotheal.fleet.request import gather, plan
    from spotheal.fleet.run import runs

    clock, job_run = SystemClock(), runs.open_run(session.client("s3"), root, job, run)
    ended = stopping.save_and_end(session, job_run, runs.REPLACED, clock, say)
    if ended.has_saved and ended.saved_step is not None:
        say(f"step {ended.saved_step} is saved")
    stopping.await_gone(session, job_run, clock, say)
    way = plan.decide_run(job, gather.existing_run(session, root, job), resume=True, new_run=False)
    if not isinstance(way, plan.Resume):
        raise Conflict(f"run {run} is at work again", next_step=f"`fleetctl status {job}`")
    return way


def _wait(session: Session, run: Run, seconds_max: float | None) -> None:
    document = follow(session, run, seconds_max)
    say(f"done: {printable(document['reason'] or 'the run has ended')}; next: fleetctl results get {run.job}")


def _render(plan: Any, target: Path) -> None:
    from spotheal.fleet.request import request as building

    fleet = plan.request["request_spot_fleet"] or plan.request["create_fleet"]
    built = building.Request(tuple(plan.request["create_launch_template"]), fleet)
    for suffix, text in building.render(built, target.name).items():
        path = target.with_name(target.name + suffix)
        path.write_text(text, encoding="utf-8")
        if suffix == ".commands":
            path.chmod(0o755)
        print(path)
    for note in plan.notes:
        say(f"note: {note}")
    say("nothing was sent. The instances will look for the run's documents, wheels and volume, which only "
         "`fleetctl request` makes; to send it by hand all the same, see the .commands file beside it")  # fmt: skip
