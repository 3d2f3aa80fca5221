"""fleetctl: one function a verb. The only place of the operator's side that prints, asks or exits.

stdout is data, stderr is messages. Everything heavy (boto3, botocore's models) is imported inside the verb that needs
it: `fleetctl --help` must answer at once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from spotheal.agent.errors import ConfigError, ExitCode, JobFailed, SpothealError
from spotheal.fleet.options import (
    JobArgument,
    JobFile,
    Output,
    Profile,
    Region,
    RunOption,
    Yes,
    scenarios,
    seconds_of,
    sources,
    wants_json,
)

if TYPE_CHECKING:
    from spotheal.fleet.runs import Run
    from spotheal.fleet.session import Session

app = typer.Typer(
    name="fleetctl",
    help="Trains on EC2 spot instances, goes on after interruptions, and ends its fleet when the training is done.",
    epilog="Example: fleetctl rehearse; then docs/real-aws.md leads to fleetctl request",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes longer to import than the help to print
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
Verb = TypeVar("Verb", bound=Callable[..., None])


@dataclass
class Globals:
    region: str = ""
    profile: str = ""
    output: str = "table"


_globals = Globals()


def verb(function: Verb) -> Verb:
    """Turn whatever a verb raises into a message and the documented exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except SpothealError as error:
            _fail(f"fleetctl: {error}", error.exit_code)
        except (KeyboardInterrupt, EOFError):
            goes_on = "; the same command goes on where it was" if function.__name__ == "request" else ""
            _fail(f"fleetctl: interrupted{goes_on}", ExitCode.INTERRUPTED)
        except BrokenPipeError:  # `fleetctl logs | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except typer.Exit:
            raise
        except Exception as error:
            _unexpected(error)

    return guarded  # type: ignore[return-value]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    region: Region = "",
    profile: Profile = "",
    output: Output = "table",
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    _globals.region, _globals.profile, _globals.output = region, profile, output
    if version:
        from importlib.metadata import version as installed

        print(f"fleetctl {installed('spotheal')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


# -------------------------------------------------------------------------------------------------------------- request
@app.command(epilog="Example: fleetctl request spot_fleet_config.json --wait")
@verb
def request(
    file: Annotated[Path, typer.Argument(help="AWS's SpotFleetRequestConfig.")] = Path("spot_fleet_config.json"),
    job: JobFile = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; print the exact request as JSON.")] = False,
    render: Annotated[
        Path | None, typer.Option("--render", metavar="FILE", help="Send nothing; write the request for the aws CLI.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the job's last run and its volume.")] = False,
    new_run: Annotated[bool, typer.Option("--new-run", help="Begin another run of a job that has one.")] = False,
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
    from spotheal.agent.clock import SystemClock
    from spotheal.fleet import config, gather, plan, runs, show, submit, wheelhouse

    as_json = _as_json(output)
    seconds_max = seconds_of("--timeout", timeout)
    sends = not dry_run and render is None
    if resume and new_run:
        raise ConfigError("--resume and --new-run exclude each other", next_step="give one of them")
    if sends and not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", next_step="--yes to go ahead, or --dry-run to look first")
    job_file = job or config.job_file_beside(file)
    wanted = gather.Wanted(*config.read_request(file, job_file), job_file, file, resume, new_run)
    session, clock = _session(region, profile), SystemClock()
    gather.settle_region(session, wanted)
    name = wanted.job.job.name
    offline = not sends and not session.has_credentials()
    _say_progress("reading the account …", quiet=offline)
    way: plan.Way
    if offline:
        root_url, way = gather.offline_root(session, wanted.job.store.url), plan.Begin()
    else:
        root_url = session.store_root(wanted.job.store.url)
        existing = gather.existing_run(session, root_url, name)
        way = plan.decide_run(name, existing, resume=resume, new_run=new_run)
    if isinstance(way, plan.Show):
        run = runs.open_run(session.client("s3"), root_url, name, way.existing.run)
        _say(f"job {name} is at work already: run {run.id}, {way.existing.fleet}")
        _show_status(session, run, as_json)
    else:
        ready = gather.make_plan(session, wanted, way, root_url, wheelhouse.build(), clock, offline=offline)
        if dry_run:
            print(show.as_json(show.plan_document(ready.plan, sent=False)), flush=True)
            _say(f"{show.plan_text(ready.plan)}\n\nnothing was sent")  # after the JSON: on a terminal it stays in sight
            return
        if render is not None:
            _render(ready.plan, render)
            return
        _say(show.plan_text(ready.plan))
        _ask("Go ahead?", yes)
        done = submit.carry_out(session, ready, clock, _say)
        document = show.plan_document(ready.plan, sent=True, result=done)
        print(show.as_json(document) if as_json else f"{done['fleet_id']}  run {ready.plan.run} of job {name}")
        _say(f"next: fleetctl status {name}, fleetctl logs -f {name}, fleetctl cancel {name}")
        run = runs.open_run(session.client("s3"), root_url, name, ready.plan.run)
    if wait:
        _wait(session, run, seconds_max)


def _wait(session: Session, run: Run, seconds_max: float | None) -> None:
    from spotheal.agent.clock import SystemClock
    from spotheal.fleet.wait import wait as follow

    status = follow(session, run, SystemClock(), _say, seconds_max)
    _say(f"done: {status.get('reason') or 'the run has ended'}; results in {run.store.url}/results/")


def _render(plan: Any, target: Path) -> None:
    from spotheal.fleet import request as building

    built = building.Request(tuple(plan.request["create_launch_template"]), plan.request["request_spot_fleet"])
    for suffix, text in building.render(built, target.name).items():
        path = target.with_name(target.name + suffix)
        path.write_text(text, encoding="utf-8")
        if suffix == ".commands":
            path.chmod(0o755)
        print(path)
    for note in plan.notes:
        _say(f"note: {note}")
    _say("nothing was sent. The instances will look for the run's documents, wheels and volume, which only "
         "`fleetctl request` makes; to send it by hand all the same, see the .commands file beside it")  # fmt: skip


# ------------------------------------------------------------------------------------------------- status, logs, cancel
@app.command(epilog="Example: fleetctl status resnet50 --output json")
@verb
def status(
    job: JobArgument = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Where a job is: fleet, instances, volumes, progress.

    Past instances too; answers also when nothing runs.
    """
    from spotheal.fleet.target import find

    as_json = _as_json(output)
    session, found = find(_session(region, profile), job, job_file, run)
    _show_status(session, found, as_json)


def _show_status(session: Session, run: Run, as_json: bool) -> None:
    from spotheal.agent.clock import SystemClock
    from spotheal.fleet import show
    from spotheal.fleet import status as state

    now = SystemClock().now()
    document = state.summarise(state.gather(session, run), now)
    print(show.as_json(document) if as_json else state.render(document, now))
    for note in document["notes"]:
        _say(f"note: {note}")


@app.command(epilog="Example: fleetctl logs -f resnet50")
@verb
def logs(
    job: JobArgument = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends, across replacements.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", help="Only the instance of this start of the trainer.")
    ] = None,
    instance: Annotated[str, typer.Option("--instance", help="Only this instance.")] = "",
    source: Annotated[
        str, typer.Option("--source", metavar="agent|trainer", help="Only of this one.", autocompletion=sources)
    ] = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """What agent and trainer said, on all instances of a run.

    Those that are gone included: instances store their logs every minute, and at a notice.
    """
    import json

    from spotheal.agent.clock import SystemClock
    from spotheal.fleet import logs as reading
    from spotheal.fleet.table import printable
    from spotheal.fleet.target import find

    as_json = _as_json(output)
    if source not in ("", "agent", "trainer"):
        raise ConfigError(f"--source {source!r} is neither agent nor trainer", next_step="leave it out for both")
    if attempt is not None and instance:
        raise ConfigError("--attempt and --instance exclude each other", next_step="give one of them")
    _, found = find(_session(region, profile), job, job_file, run)
    reader = reading.Reader(found, instance=reading.select(found, attempt=attempt, instance=instance), source=source)
    shown = ""
    for line in reader.follow(SystemClock()) if follow else reader.new_lines():
        if as_json:
            print(json.dumps({"schema_version": 1, **vars(line)}), flush=follow)
            continue
        if line.instance != shown:
            _say(f"== {line.instance}")
            shown = line.instance
        print(f"trainer | {printable(line.text)}" if line.source == "trainer" else printable(line.text), flush=follow)
    if not shown and not as_json:
        _say("no instance has written logs to the store yet (they come every minute, and at a notice)")


@app.command(epilog="Example: fleetctl cancel resnet50 --yes")
@verb
def cancel(
    job: JobArgument = "",
    yes: Yes = False,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """End a run: its fleet and instances. The volume with the checkpoints stays, and so does the store."""
    from spotheal.agent.clock import SystemClock
    from spotheal.agent.errors import Conflict
    from spotheal.fleet import cancel as cancelling
    from spotheal.fleet import show
    from spotheal.fleet.target import find

    as_json = _as_json(output)
    session, found = find(_session(region, profile), job, job_file, run)
    plan = cancelling.make_plan(session, found)
    _say(show.cancel_text(plan))
    if plan.pending:
        raise Conflict(
            f"the request of run {found.id} was interrupted, and may have reached AWS",
            next_step="`fleetctl request` once more finishes it; then cancel",
        )
    ends = [*([plan.fleet] if plan.fleet else []), *(one.id for one in plan.instances)]
    if ends:
        _ask(f"End these {len(ends)}?" if len(ends) > 1 else "End it?", yes)
        cancelling.carry_out(session, found, plan, SystemClock())
    document = show.cancel_document(plan, cancelled=bool(ends))
    said = f"cancelled {', '.join(ends)}" if ends else "nothing to cancel: nothing of this run is live"
    print(show.as_json(document) if as_json else said)
    if plan.kept:
        kept = ", ".join(one.id for one in plan.kept)
        _say(f"{kept} stays and costs; `fleetctl request --resume` goes on with it")


# --------------------------------------------------------------------------------------------------- validate, rehearse
@app.command(epilog="Example: fleetctl validate spot_fleet_config.json")
@verb
def validate(
    file: Annotated[Path, typer.Argument(help="AWS's SpotFleetRequestConfig.")] = Path("spot_fleet_config.json"),
    job: JobFile = None,
    output: Output = "",
) -> None:
    """Check both files of a request; calls no AWS.

    All faults are told at once, each with its place and its cure.
    """
    from spotheal.fleet import config, repository, show, userdata

    as_json = _as_json(output)
    job_file = job or config.job_file_beside(file)
    try:
        fleet, described = config.read_request(file, job_file)
        userdata.check_size(described)
        warnings = [*fleet.warnings, *repository.check_address(described.job.repository)]
    except ConfigError as error:
        if as_json:
            print(show.as_json({"schema_version": 1, "valid": False, "faults": error.message, "warnings": []}))
        raise
    for warning in warnings:
        _say(f"note: {warning}")
    document = {"schema_version": 1, "valid": True, "faults": "", "warnings": warnings}
    print(show.as_json(document) if as_json else f"{file} and {job_file} are good")
    if not as_json:
        _say(f"next: fleetctl rehearse {file}, fleetctl request {file} --dry-run")


@app.command(epilog="Example: fleetctl rehearse spot_fleet_config.json --job job.toml --keep ./rehearsed")
@verb
def rehearse(
    file: Annotated[Path | None, typer.Argument(help="The fleet's file; without this and --job an example.")] = None,
    job: JobFile = None,
    scenario: Annotated[
        str,
        typer.Option(
            "--scenario",
            metavar="NAME",
            help="Which faults: quiet, notice, kill, storm … (docs/rehearsal.md has all).",
            autocompletion=scenarios,
        ),
    ] = "standard",
    seed: Annotated[int, typer.Option("--seed", help="For scenario storm.")] = 0,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Leave the volume's files and all logs here.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="Also train without interruption, and compare the weights.")] = True,
    output: Output = "",
) -> None:
    """Run a job on this machine, interrupted; calls no AWS.

    The same request, agent and trainer as on AWS, as real processes against a local cloud; some minutes. The trainer
    runs with the Python that fleetctl runs with, unless `python` in job.toml names another.
    """
    from spotheal.fleet.rehearsal.run import Options, rehearse

    as_json = _as_json(output)
    yours = Path("spot_fleet_config.json")
    if file is None and job is not None:
        file = job.with_name(yours.name)
    if file is None and yours.exists():
        _say(f"note: this is the example job; yours: fleetctl rehearse {yours}")
    options = Options(file, job, scenario, seed, keep, reference)

    from rich.console import Console

    from spotheal.fleet import show
    from spotheal.fleet.rehearsal.progress import display
    from spotheal.fleet.rehearsal.report import report

    with display(Console(stderr=True)) as shown:
        summary = rehearse(options, shown)
    if as_json:
        print(show.as_json(summary.to_document()))
    else:
        Console().print(report(summary))
    if not summary.passed:
        cure = f"read {keep}/instances/*/logs/" if keep else "the same with --keep DIR leaves all logs in DIR"
        if "No module named" in summary.story.reason:
            cure = f"`setup` in job.toml, or install it for {sys.executable} (or what `python` in job.toml names)"
        raise JobFailed(
            f"the rehearsal did not pass: {'; '.join(summary.broken)}" if as_json else "the rehearsal did not pass",
            next_step=cure,
        )
    if keep:
        _say(f"{keep} has the volume's files, the store and all logs")
    if not as_json:
        _say("next: a job of your own, docs/real-aws.md" if file is None else f"next: fleetctl request {file}")


# --------------------------------------------------------------------------------------------------------------- inside
def _session(region: str, profile: str) -> Session:
    from spotheal.fleet.session import Session

    return Session(region or _globals.region, profile or _globals.profile)


def _as_json(output: str) -> bool:
    return wants_json(output or _globals.output)


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", next_step="--yes to go ahead")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        _say("nothing was done")
        raise typer.Exit(ExitCode.OK)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_progress(text: str, *, quiet: bool) -> None:
    if sys.stderr.isatty() and not quiet:
        _say(text)


def _fail(text: str, code: ExitCode) -> None:
    _say(text)
    raise typer.Exit(int(code))


def _unexpected(error: Exception) -> None:
    """One line and where the rest is: a traceback helps the authors, not the user."""
    import traceback

    if os.environ.get("SPOTHEAL_DEBUG"):
        traceback.print_exc()
        raise typer.Exit(int(ExitCode.UNEXPECTED))
    log = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotheal" / "last-error.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
        where = f"the details are in {log}"
    except OSError:
        where = "SPOTHEAL_DEBUG=1 shows the details"
    _fail(
        f"fleetctl: unexpected: {type(error).__name__}: {error}\n  next: {where}; please report it", ExitCode.UNEXPECTED
    )


def main() -> None:
    """The console script `fleetctl`."""
    try:
        app(prog_name="fleetctl")
    except KeyboardInterrupt:
        _say("fleetctl: interrupted")
        sys.exit(int(ExitCode.INTERRUPTED))


if __name__ == "__main__":
    main()
