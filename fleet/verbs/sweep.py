"""`fleetctl sweep …`: many runs of a job, one for each entry of a list of parameters."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.agent.protocol.errors import ConfigError, Conflict, ExitCode
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.terminal.console import ask, fail, is_json, open_session, say, say_progress, verb, width_of
from spotheal.fleet.terminal.options import (
    JobArgument,
    JobFile,
    Output,
    Profile,
    Region,
    RunOption,
    Yes,
    group,
    seconds_of,
)

if TYPE_CHECKING:
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.report.series import Series
    from spotheal.fleet.request.gather import Wanted
    from spotheal.fleet.request.plan import Begin, Continue, Resume
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl sweep run hyperparam_list.yml --parallel 4"
app = group("sweep", "Many runs of a job, one for each entry of a list: run, status, report, retry, scale.", EXAMPLE)
Metric = Annotated[str, typer.Option("--metric", metavar="NAME", help="Sort by it; else by the best score, or loss.")]
Smallest = Annotated[
    bool | None, typer.Option("--smallest/--largest", help="Which end of the metric is best; else by its name.")
]


@app.command("run", epilog=f"Example: {EXAMPLE}")
@verb
def run(
    file: Annotated[str, typer.Argument(metavar="LIST", help="YAML, a list of mappings; a path or s3://…")],
    parallel: Annotated[
        int, typer.Option("--parallel", "-p", metavar="N", min=1, max=1000, help="Instances at once.")
    ] = 1,
    fleet: Annotated[
        Path, typer.Option("--fleet", metavar="FILE", help="AWS's SpotFleetRequestConfig.")
    ] = Path("spot_fleet_config.json"),
    engine: Annotated[
        str, typer.Option("--engine", metavar="fleet|batch", help="A spot fleet, or an array of AWS Batch.")
    ] = "fleet",
    job: JobFile = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; print the exact request as JSON.")] = False,
    new_run: Annotated[bool, typer.Option("--new-run", help="Begin another sweep of a job that has one.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that are not over.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="--resume, and begin the runs that failed again, too.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the sweep to its end.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --wait: give up after 90s, 20m, 3h …")
    ] = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Train once for each entry of the list, on one fleet.

    The trainer of entry i finds i in SPOTHEAL_INDEX and AWS_BATCH_JOB_ARRAY_INDEX, and the entry as JSON in the file
    that SPOTHEAL_PARAMS_FILE names. Interrupted runs go on before new ones start; the last one ends the fleet.
    """
    from spotheal.fleet.files import config
    from spotheal.fleet.request import gather, plan
    from spotheal.fleet.run import runs
    from spotheal.fleet.sweep import entries as listed

    as_json, seconds_max = is_json(output), seconds_of("--timeout", timeout)
    resume = resume or retry_failed
    if resume and new_run:
        raise ConfigError("--resume and --new-run exclude each other", next_step="give one of them")
    if engine == "batch":
        _on_batch(file, job or config.job_file_beside(fleet), _Batch(resume, wait, seconds_max, yes, dry_run, as_json),
                  region, profile)  # fmt: skip
        return
    if engine != "fleet":
        raise ConfigError(f"--engine {engine!r} is neither fleet nor batch", next_step="write --engine batch")
    if not dry_run and not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", next_step="--yes to go ahead, or --dry-run to look first")
    job_file = job or config.job_file_beside(fleet)
    inputs = gather.Wanted(*config.read_request(fleet, job_file), job_file, fleet, resume, new_run, (Path(file),))
    if inputs.job.fleet.on_demand_after != "0m":
        raise ConfigError("[fleet] on_demand_after is for a job with one instance",
                          next_step=f"take it out of {job_file} for a sweep")  # fmt: skip
    session = open_session(region, profile)
    gather.settle_region(session, inputs)
    entries = listed.read(file, session)
    for slip in listed.uneven(entries):
        say(f"note: {slip}")
    listed.refuse_unfit(entries, inputs.job.job.command, file)
    name = inputs.job.job.name
    say_progress("reading the account …", quiet=False)
    root = session.store_root(inputs.job.store.url)
    way = plan.decide_run(name, gather.existing_run(session, root, name), resume=resume, new_run=new_run)
    if isinstance(way, plan.Show):
        at_work = runs.open_run(session.client("s3"), root, name, way.existing.run)
        cure = f"`fleetctl sweep status {name}` shows it; a sweep of another list needs a job with another name"
        _check_list(at_work, entries, file, cure)
        say(f"job {name} is at work already: run {at_work.id}, {way.existing.fleet}")
        if retry_failed and not dry_run:
            _retry(session, at_work, ())
        _show(session, at_work, as_json)
    else:
        order = _Order(file, entries, parallel, retry_failed, yes, dry_run, as_json)
        job_run = _begin(session, inputs, way, root, order)
        if job_run is None:
            return
        at_work = job_run
    if wait:
        _follow(session, at_work, seconds_max)


@dataclass(frozen=True)
class _Batch:
    resume: bool
    wait: bool
    seconds_max: float | None
    yes: bool
    dry_run: bool
    as_json: bool


def _on_batch(file: str, job_file: Path, order: _Batch, region: str, profile: str) -> None:
    """The same list as an array of AWS Batch, made with `fleetctl batch create`."""
    from spotheal.fleet.sweep import entries as listed
    from spotheal.fleet.verbs import batch

    session, described, root, _ = batch.described(region, profile, job_file)
    entries = listed.read(file, session)
    for slip in listed.uneven(entries):
        say(f"note: {slip}")
    listed.refuse_unfit(entries, described.job.command, file)
    batch.submit_and_follow(
        session, described, job_file, root, entries=entries, listed_in=file, depends_on=[], resume=order.resume,
        wait=order.wait, seconds_max=order.seconds_max, yes=order.yes, dry_run=order.dry_run, as_json=order.as_json,
    )  # fmt: skip


@dataclass(frozen=True)
class _Order:
    source: str
    entries: list[dict[str, Any]]
    parallel: int
    retry_failed: bool
    yes: bool
    dry_run: bool
    as_json: bool


def _begin(
    session: Session, inputs: Wanted, way: Begin | Continue | Resume, root: StoreUrl, order: _Order
) -> Run | None:
    """Plan, question, fleet; None of a dry run."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.request import gather, plan, submit, wheelhouse
    from spotheal.fleet.run import runs
    from spotheal.fleet.verbs import show

    name, disk, clock, s3 = inputs.job.job.name, inputs.job.volume, SystemClock(), session.client("s3")
    job_run = runs.open_run(s3, root, name, way.existing.run) if isinstance(way, plan.Resume) else None
    remaining, failed = (len(order.entries), 0) if job_run is None else _count_remaining(session, job_run, order)
    step = plan.WriteSweep(tuple(order.entries), order.source, min(order.parallel, remaining), disk.size_gib, disk.type)
    ready = gather.make_plan(session, inputs, way, root, wheelhouse.build(), clock, sweep=step)
    if order.dry_run:
        print(show.as_json(show.plan_document(ready.plan, is_sent=False)), flush=True)
        say(f"{show.plan_text(ready.plan)}\n\nnothing was sent")
        return None
    say(show.plan_text(ready.plan))
    ask(f"Begin {failed} that failed again, and go ahead?" if failed else "Go ahead?", order.yes)
    if failed and job_run is not None:
        _retry(session, job_run, ())
    result = submit.carry_out(session, ready, clock, say)
    document = show.plan_document(ready.plan, is_sent=True, result=result)
    print(show.as_json(document) if order.as_json else f"{result['fleet_id']}  sweep {ready.plan.run} of job {name}")
    say(f"next: fleetctl sweep status {name}, fleetctl sweep report {name}, fleetctl cancel {name}")
    return runs.open_run(s3, root, name, ready.plan.run)


def _count_remaining(session: Session, sweep: Run, order: _Order) -> tuple[int, int]:
    """How many runs a resumed sweep has to do, and how many of them failed before.

    Conflict if there is none, or if it began with another list: an index means the same entry for its whole life.
    """
    from spotheal.fleet.sweep import progress

    if not _check_list(sweep, order.entries, order.source, "--new-run begins a sweep with this list"):
        return len(order.entries), 0  # cut off before it was stored
    count = progress.summarise(progress.gather(session, sweep))["runs"]
    failed = count["failed"] if order.retry_failed else 0
    remaining = count["running"] + count["waiting"] + failed
    if not remaining:
        raise Conflict(f"every run of sweep {sweep.id} is over: {count['done']} done, {count['failed']} failed",
                       next_step="--retry-failed begins those that failed again" if count["failed"]
                       else "--new-run begins another sweep")  # fmt: skip
    return remaining, failed


def _check_list(sweep: Run, entries: list[dict[str, Any]], source: str, cure: str) -> bool:
    """Whether the sweep has a list; Conflict if it began with another list than `entries`."""
    from spotheal.agent.protocol.names import LAYOUT

    stored = list((sweep.store.get_json(LAYOUT.sweep) or {}).get("entries") or [])
    if stored and stored != entries:
        raise Conflict(f"{source} is not the list that run {sweep.id} began with ({len(stored)} entries)",
                       next_step=cure)  # fmt: skip
    return bool(stored)


@app.command("status", epilog="Example: fleetctl sweep status digits")
@verb
def status(
    job: JobArgument = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow the sweep to its end; 7 if a run fails.")
    ] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --watch: stop looking after 90s, 20m, 3h …")
    ] = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Where a sweep is: its runs, done, running, waiting and failed."""
    from spotheal.fleet.verbs.target import find

    as_json, seconds_max = is_json(output), seconds_of("--timeout", timeout)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    if watch:
        _follow(session, job_run, seconds_max)
    _show(session, job_run, as_json)


@app.command("report", epilog="Example: fleetctl sweep report digits --metric val_accuracy --html digits.html")
@verb
def report(
    job: JobArgument = "",
    metric: Metric = "",
    smallest: Smallest = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots, in one file.")
    ] = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """The runs of a sweep by a metric, the best first, with their parameters.

    The page (--html) has the learning curves of all runs and the metric beside each parameter.
    """
    from spotheal.fleet.sweep import progress
    from spotheal.fleet.sweep import report as content
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    document = progress.summarise(progress.gather(session, job_run))
    indices = [int(row["index"]) for row in document["entries"] if row["instances"]]
    is_complete = all(row["metrics"] or row["loss"] is not None for row in document["entries"] if row["instances"])
    curves = content.gather(job_run, indices) if html is not None or not is_complete else {}
    content.fill_in(document["entries"], curves)
    metric = metric or next(iter(content.metrics_of(document["entries"])), "loss")
    ascending = content.is_lower_better(metric) if smallest is None else smallest
    rows = progress.by_metric(document["entries"], metric, smallest=ascending)
    _print({**document, "metric": metric, "smallest": ascending, "entries": rows}, as_json, metric)
    if html is not None:
        _write_page(document, curves, metric, ascending, html)


def _write_page(
    document: dict[str, Any], curves: dict[int, dict[str, Series]], metric: str, smallest: bool, path: Path
) -> None:
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.report.pieces import write
    from spotheal.fleet.sweep import report as content
    from spotheal.fleet.sweep.report_page import page

    sweep_report = content.make(document, curves, metric, smallest, SystemClock().now())
    body = page(sweep_report).encode()
    write(body, path)
    say(f"{path}: {len(body) / 1000:.0f} kB, open it in a browser")


@app.command("retry", epilog="Example: fleetctl sweep retry digits 3 17")
@verb
def retry(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    indices: Annotated[
        list[int] | None, typer.Argument(metavar="INDEX", min=0, help="Runs that failed; else all of those.")
    ] = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Begin runs that failed again, from their last checkpoints.

    On the sweep's fleet; if that is gone, `sweep run LIST --retry-failed` does it with a new one.
    """
    from spotheal.fleet.run import engine
    from spotheal.fleet.sweep import progress
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    facts = progress.gather(session, job_run)
    state = facts.fleet_state
    if facts.fleet.get("batch"):
        raise Conflict(f"job {job_run.job} is on AWS Batch, and has no fleet to give runs back to",
                       next_step="`fleetctl batch submit --resume` begins the unfinished entries again")  # fmt: skip
    if state not in engine.LIVE_STATES:
        raise Conflict(f"the fleet of job {job_run.job} is {state or 'gone'}",
                       next_step="`fleetctl sweep run LIST --retry-failed` goes on with a new one")  # fmt: skip
    retried = _retry(session, job_run, indices or ())
    document = {"schema_version": 1, "job": job_run.job, "run": job_run.id, "begun_again": retried}
    print(show.as_json(document) if as_json else f"{job_run.id}  begun again: {', '.join(map(str, retried))}")


def _retry(session: Session, sweep: Run, indices: Collection[int]) -> list[int]:
    """Give runs that failed back to the queue, and bring instances back that left for want of work."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.sweep import progress
    from spotheal.fleet.sweep import retry as again

    facts = progress.gather(session, sweep)
    retried = again.chosen(progress.summarise(facts)["entries"], indices)
    for index in retried:
        again.give_back(sweep, index, SystemClock())
        say(f"run {index} begins again from its last checkpoint")
    summary = progress.summarise(progress.gather(session, sweep))
    fleet = str(summary["fleet"]["id"] or "")
    if fleet and (count := again.make_room(session, sweep, fleet, len(retried), summary)) is not None:
        say(f"{fleet} goes to {count} instances")
    return retried


@app.command("scale", epilog="Example: fleetctl sweep scale digits 8")
@verb
def scale(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    instances: Annotated[int, typer.Argument(metavar="N", min=1, max=1000, help="Instances at once from now on.")],
    yes: Yes = False,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Give a sweep more or fewer instances while it runs.

    With fewer AWS ends some: their runs save and go on elsewhere.
    """
    from spotheal.fleet.run import engine
    from spotheal.fleet.sweep import progress
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    summary = progress.summarise(progress.gather(session, job_run))
    fleet = str(summary["fleet"]["id"] or "")
    if summary["batch_job"]:
        raise Conflict(f"job {job_run.job} is on AWS Batch, which sizes its compute environments by itself",
                       next_step="`fleetctl batch create` sets [batch] max_vcpus of job.toml")  # fmt: skip
    if summary["fleet"]["state"] not in engine.LIVE_STATES:
        raise Conflict(f"the fleet of job {job_run.job} is {summary['fleet']['state'] or 'gone'}",
                       next_step="`fleetctl sweep run LIST --resume --parallel N` goes on")  # fmt: skip
    remaining = summary["runs"]["running"] + summary["runs"]["waiting"]
    target = min(instances, max(remaining, 1))
    if target < instances:
        say(f"{remaining} runs are left: {target} instances do")
    before = engine.describe_own(session.client("ec2"), fleet, job_run.id, job_run.job)
    if before is not None and before.target > target:
        ask(f"Go from {before.target} to {target} instances? AWS ends {before.target - target}.", yes)
    session.ec2.set_capacity(fleet, target, end_excess=True)
    document = {"schema_version": 1, "job": job_run.job, "fleet": fleet, "instances": target}
    print(show.as_json(document) if as_json else f"{fleet}  {target} instances")


def _follow(session: Session, sweep: Run, seconds_max: float | None) -> None:
    """To the sweep's end, which Ctrl-C here is not. Raises JobFailed, WaitTimedOut."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.sweep.following import come_back, follow

    if sweep.fleet_document().get("batch"):
        raise Conflict(f"job {sweep.job} is on AWS Batch", next_step=f"`fleetctl batch logs {sweep.job} -f` follows it")
    try:
        reason = printable(follow(session, sweep, SystemClock(), say, seconds_max))
        say(f"done: {reason}; next: fleetctl sweep report {sweep.job}")
    except KeyboardInterrupt:
        fail(f"fleetctl: interrupted; the sweep goes on: {come_back(sweep)}", ExitCode.INTERRUPTED)


def _show(session: Session, sweep: Run, as_json: bool) -> None:
    from spotheal.fleet.sweep import progress

    _print(progress.summarise(progress.gather(session, sweep)), as_json)


def _print(document: dict[str, Any], as_json: bool, metric: str = "") -> None:
    from spotheal.fleet.sweep import progress
    from spotheal.fleet.verbs import show

    print(show.as_json(document) if as_json else progress.render(document, metric, width_of()))
