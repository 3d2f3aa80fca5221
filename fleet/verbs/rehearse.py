"""`fleetctl rehearse`: the job on this machine against a local cloud that takes machines away."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spotheal.agent.protocol.errors import JobFailed
from spotheal.fleet.terminal.console import is_json, say, verb
from spotheal.fleet.terminal.options import JobFile, Output

EXAMPLE = "fleetctl rehearse spot_fleet_config.json --job job.toml --keep ./rehearsed"


def scenarios() -> list[str]:
    """Imported only when a shell asks to complete."""
    from spotheal.fleet.rehearsal.scenarios.scenario import NAMES

    return list(NAMES)


@verb
def rehearse(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The fleet's file; --job alone has stand-in machines, neither an example."),
    ] = None,
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
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="For scenario storm.")] = 0,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Leave the volume's files and all logs here.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the page of `fleetctl report` about it here.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="Also train without interruption, and compare the weights.")] = True,
    output: Output = "",
) -> None:
    """Run a job on this machine, interrupted; calls no AWS.

    The same request, agent and trainer as on AWS, as real processes against a local cloud; some minutes. The trainer
    runs with the Python that fleetctl runs with, unless `python` in job.toml names another.
    """
    from spotheal.fleet.rehearsal.scenarios.run import Options, rehearse

    as_json = is_json(output)
    yours = Path("spot_fleet_config.json")
    if file is None and job is not None:
        sibling = job.with_name(yours.name)
        file = sibling if sibling.exists() else None
    if file is None and job is None and yours.exists():
        say(f"note: this is the example job; yours: fleetctl rehearse {yours}")
    options = Options(file, job, scenario, seed, keep, reference, report_file)

    from rich.console import Console

    from spotheal.fleet.rehearsal.scenarios.progress import display
    from spotheal.fleet.rehearsal.scenarios.report import report
    from spotheal.fleet.rehearsal.scenarios.summary import Summary
    from spotheal.fleet.verbs import show

    with display(Console(stderr=True)) as view:
        summary = rehearse(options, view)
    if as_json:
        print(show.as_json(summary.to_document()))
    else:
        Console().print(report(summary) if isinstance(summary, Summary) else summary.render())
    if not summary.passed:
        survived = isinstance(summary, Summary) and summary.survived
        verdict = (
            "the job survived every fault, but the comparison of its weights did not pass"
            if survived
            else "the rehearsal did not pass"
        )
        raise JobFailed(
            f"{verdict}: {'; '.join(summary.broken)}" if as_json else verdict,
            next_step=next_step(summary.broken, keep, survived=survived),
        )
    if keep:
        say(f"{keep} has the volume's files, the store and all logs")
    if report_file:
        say(f"{report_file} is the page about it; open it in a browser")
    if not as_json:
        say(f"next: {_next_step(file, job)}")


def _next_step(file: Path | None, job: Path | None) -> str:
    if file is not None:
        return f"fleetctl request {file}" + (f" --job {job}" if job and job != file.with_name("job.toml") else "")
    if job is not None:
        return 'fleetctl init --dir NEW_FOLDER --command "…" writes a fleet\'s file, which a request needs'
    return "a job of your own, docs/quick-start.md"


def next_step(broken: Sequence[str], keep: Path | None, *, survived: bool) -> str:
    """The next step after a rehearsal that did not pass; `survived`: only the comparison of weights failed."""
    if "No module named" in "\n".join(broken):
        return (
            f"`setup` in job.toml, or install it for {sys.executable} (or what `python` in job.toml names); a folder"
            ' of your repository is found with PYTHONPATH = "." below [environment]'
        )
    if survived:
        return (
            "save and restore the random state too (docs/checkpoints.md has the lines), or rehearse with"
            " --no-reference, which compares the weights with nothing"
        )
    return f"read {keep}/instances/*/logs/" if keep else "the same with --keep DIR leaves all logs in DIR"
