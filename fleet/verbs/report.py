"""`fleetctl report`: a run as one page to keep or to show: what it did, what befell it, what it cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.terminal.console import is_json, open_session, say, verb
from spotheal.fleet.terminal.options import JobArgument, JobFile, Output, Profile, Region, RunOption

if TYPE_CHECKING:
    from spotheal.fleet.report.report import Report

EXAMPLE = "fleetctl report resnet50 --out resnet50.html"


@verb
def report(
    job: JobArgument = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: JOB-report.html here; - for stdout.")
    ] = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Write a page about a run: machines, curves, cost.

    One HTML file that loads nothing from elsewhere, for a browser, a mail or a printer; also while the run goes on.
    With --output json the same figures go to stdout, and a page is written only if --out names a file.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.report import report as content
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    material = content.gather(session, job_run)
    run_report = content.make(material, SystemClock().now())
    if as_json:
        print(show.as_json(run_report.to_document()))
    if out is not None or not as_json:
        write_page(run_report, out if out is not None else Path(f"{job_run.job}-report.html"), quiet=as_json)
    for note in material.facts.notes:
        say(f"note: {printable(note)}")


def write_page(run_report: Report, path: Path, *, quiet: bool = False) -> None:
    """Write the page to `path` (`-`: stdout); a file that is no report of ours is not replaced."""
    from spotheal.agent.money.billing import about
    from spotheal.fleet.report.page import page
    from spotheal.fleet.report.pieces import write

    body = page(run_report).encode()
    if str(path) == "-":
        if quiet:
            raise ConfigError("JSON and the page cannot both go to stdout", next_step="--out FILE")
        sys.stdout.flush()
        sys.stdout.buffer.write(body)
        return
    write(body, path)
    if not quiet:
        print(path)
    cost = "under $0.01" if run_report.receipt.is_under_a_cent else about(run_report.receipt.total)
    say(f"{cost}; {len(body) / 1000:.0f} kB, open it in a browser")
