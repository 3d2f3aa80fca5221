"""`fleetctl status`: where a job is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.agent.protocol.errors import ConfigError, Conflict, ExitCode
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.terminal.console import colours, is_json, is_terminal, open_session, say, says_ascii, verb, width_of
from spotheal.fleet.terminal.options import JobArgument, JobFile, Output, Profile, Region, RunOption, seconds_of

if TYPE_CHECKING:
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl status resnet50 --watch"


@verb
def status(
    job: JobArgument = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the run to its end; 7 if it fails.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All jobs of the store, those at work first.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --watch: stop looking after 90s, 20m, 3h …")
    ] = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Where a job is: fleet, instances, volumes, progress.

    Past instances and what the run has cost so far too; answers also when nothing runs.
    """
    from spotheal.fleet.verbs.target import find, find_root

    as_json = is_json(output)
    seconds_max = seconds_of("--timeout", timeout)
    if everything:
        if job or run or watch:
            raise ConfigError("--all is about no single job", next_step="leave JOB, --run and --watch out")
        _show_all(*find_root(open_session(region, profile), job_file), as_json)
        return
    session, job_run = find(open_session(region, profile), job, job_file, run)
    if watch:
        if job_run.fleet_document().get("engine") == "batch":
            raise Conflict(f"run {job_run.id} of job {job_run.job} is on AWS Batch",
                           next_step=f"`fleetctl batch logs {job_run.job} -f` follows it")  # fmt: skip
        document = follow(session, job_run, seconds_max)
        if as_json:
            from spotheal.fleet.verbs import show

            print(show.as_json(document))
        return
    show_status(session, job_run, as_json)


def show_status(session: Session, run: Run, as_json: bool) -> None:
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.ends import resume_advice
    from spotheal.agent.protocol.names import Phase
    from spotheal.fleet.status import status as state
    from spotheal.fleet.status.unheard import Consoles

    clock = SystemClock()
    now = clock.now()
    document = state.summarise(state.gather(session, run, Consoles(clock)), now)
    if as_json:
        from spotheal.fleet.verbs import show

        print(show.as_json(document))
    else:
        from spotheal.fleet.status import screen

        print(screen.render(document, now, width=width_of(), colour=colours(), ascii=says_ascii()))
    for note in document["notes"]:
        say(f"note: {printable(note)}")
    if document["ended"]:
        on = f"fleetctl results get {run.job}, fleetctl clean {run.job}"
        if document["phase"] != Phase.DONE.value:
            on = f"fleetctl logs {run.job}; {resume_advice((document['checkpoint'] or {}).get('step'))}"
        say(f"next: {on}")


def follow(session: Session, run: Run, seconds_max: float | None) -> dict[str, Any]:
    """To the run's end, which Ctrl-C here is not. Raises JobFailed, WaitTimedOut."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.status.live import display
    from spotheal.fleet.status.wait import wait

    clock = SystemClock()
    try:
        with display(clock, say, terminal=is_terminal(sys.stderr)) as view:
            return wait(session, run, clock, view, seconds_max)
    except KeyboardInterrupt:
        say(f"\njob {run.job} goes on; `fleetctl status -w {run.job}` looks again, `fleetctl cancel {run.job}` ends it")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None


def _show_all(session: Session, root: Any, as_json: bool) -> None:
    from spotheal.fleet.status import overview
    from spotheal.fleet.verbs import show

    all_jobs = overview.gather(session, root)
    print(show.as_json(overview.document(all_jobs)) if as_json else overview.text(all_jobs))
    if all_jobs.left_out:
        say(f"… and {all_jobs.left_out} jobs that have no instance now; `fleetctl status JOB` shows each")
