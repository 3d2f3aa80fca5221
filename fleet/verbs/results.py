"""`fleetctl results ls|get`: what a run has stored as its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.fleet.console import is_json, open_session, say, verb
from spotheal.fleet.options import JobFile, Output, Profile, Region, RunOption, group

if TYPE_CHECKING:
    from spotheal.fleet.runs import Run

EXAMPLE = "fleetctl results get resnet50 --to ./results"
Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name; else that of ./job.toml.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="PATTERN", help="Only these, as *.pt or plots/*; may be repeated.")
]

app = group("results", "What a run has stored as its results: list it, fetch it.", EXAMPLE)


@app.command("ls", epilog="Example: fleetctl results ls resnet50")
@verb
def ls(
    job: Job = "",
    only: Only = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """List the results in the store. They are stored when the training is done."""
    from spotheal.fleet import results, show
    from spotheal.fleet.table import size_of, table
    from spotheal.fleet.target import find

    as_json = is_json(output)
    _, found = find(open_session(region, profile), job, job_file, run)
    listed = results.chosen(results.results(found), only or ())
    if as_json:
        print(show.as_json({
            "schema_version": 1, "job": found.job, "run": found.id, "store": f"{found.store.url}/results/",
            "results": [{"name": one.name, "size": one.size, "modified": one.modified.isoformat()} for one in listed],
        }))  # fmt: skip
        return
    if not listed:
        say(_nothing(found))
        return
    rows = [(size_of(one.size), one.modified.strftime("%Y-%m-%d %H:%M"), one.name) for one in listed]
    print(table(("SIZE", "STORED (UTC)", "NAME"), rows))
    size = size_of(sum(one.size for one in listed))
    say(f"{_files(listed)}, {size}; `fleetctl results get {found.job}` fetches them")


@app.command("get", epilog=f"Example: {EXAMPLE}")
@verb
def get(
    job: Job = "",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Into this folder; else ./results/JOB.")
    ] = None,
    only: Only = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Fetch the results, each checked by size and checksum.

    Typed again it goes on where it was, and leaves alone what is here already.
    """
    from spotheal.agent.errors import NotFound, SpothealError
    from spotheal.fleet import results, show
    from spotheal.fleet.bar import bar
    from spotheal.fleet.table import size_of
    from spotheal.fleet.target import find

    as_json = is_json(output)
    _, found = find(open_session(region, profile), job, job_file, run)
    listed = results.chosen(results.results(found), only or ())
    if not listed:
        raise NotFound(_nothing(found), next_step=f"`fleetctl status {found.job}` shows how far it is")
    folder = to or Path("results") / found.job
    fetched: list[results.Fetched] = []
    failed: list[tuple[str, SpothealError]] = []
    with bar("fetching", quiet=as_json) as step:
        for result, came in results.fetch(found, listed, folder, step):
            if isinstance(came, SpothealError):
                failed.append((result.name, came))
            else:
                fetched.append(came)
    for _, error in failed:
        say(f"fleetctl: {error}")
    if as_json:
        documents: list[dict[str, Any]] = [{**vars(one), "path": str(one.path)} for one in fetched]
        print(show.as_json({
            "schema_version": 1, "job": found.job, "run": found.id, "folder": str(folder), "results": documents,
            "failed": [{"name": name, "error": str(error)} for name, error in failed],
        }))  # fmt: skip
    else:
        by_size = sum(1 for one in fetched if one.checked == "size")
        size = size_of(sum(one.size for one in fetched))
        print(f"{folder}: {_files(fetched)}, {size}, checked" + (f" ({by_size} by size alone)" if by_size else ""))
    if failed:
        kind = type(failed[0][1])
        raise kind(f"{len(failed)} of {len(listed)} results were not fetched", next_step="the same command again")


def _files(found: Sequence[object]) -> str:
    return f"{len(found)} file" + ("s" if len(found) != 1 else "")


def _nothing(run: Run) -> str:
    return f"run {run.id} of job {run.job} has no results in the store (yet)"
