"""`fleetctl results ls|get`: what a run has stored as its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.fleet.terminal.console import ask, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import (
    JobFile,
    Output,
    Profile,
    Region,
    RunOption,
    SshIdentity,
    SshUser,
    Yes,
    group,
)

if TYPE_CHECKING:
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.fleet.files.config import FleetConfig
    from spotheal.fleet.results.results import Result, Source
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl results get resnet50 --to ./results"
Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name; else that of ./job.toml.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="PATTERN", help="Only these, as *.pt or plots/*; may be repeated.")
]

app = group("results", "What a run has stored as its results: list it, fetch it; a file system to keep it on.", EXAMPLE)
SystemName = Annotated[str, typer.Option("--name", metavar="NAME", help="Which of several file systems of yours.")]


def performances() -> list[str]:
    return ["generalPurpose", "maxIO"]


def throughputs() -> list[str]:
    return ["elastic", "bursting", "provisioned"]


From = Annotated[
    Path | None, typer.Option("--from", metavar="DIR", help="Results on EFS: where it is mounted on this machine.")
]


@app.command("ls", epilog="Example: fleetctl results ls resnet50")
@verb
def ls(
    job: Job = "",
    only: Only = None,
    mounted: From = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """List the results. They are stored when the training is done, the metrics while it goes on."""
    from spotheal.fleet.results import results, results_efs
    from spotheal.fleet.run.table import size_of, table
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    with results_efs.opened(session, job_run, mounted, say, reading=False) as source:
        listed, place = results.chosen(source.list(), only or ()), str(source)
    if as_json:
        print(show.as_json({
            "schema_version": 1, "job": job_run.job, "run": job_run.id, "store": place,
            "results": [{"name": result.name, "size": result.size,
                         "modified": result.modified.isoformat() if result.modified else None} for result in listed],
        }))  # fmt: skip
        return
    if not listed:
        hint = "; `fleetctl results get` fetches the files that exist so far" if place.startswith("efs://") else ""
        say(_nothing(job_run, place) + hint)
        return
    rows = [(size_of(result.size), result.modified.strftime("%Y-%m-%d %H:%M") if result.modified else "-", result.name)
            for result in listed]  # fmt: skip
    print(table(("SIZE", "STORED (UTC)", "NAME"), rows))
    size = size_of(sum(result.size for result in listed))
    say(f"{_files(listed)}, {size} in {place}; `fleetctl results get {job_run.job}` fetches them")


@app.command("get", epilog=f"Example: {EXAMPLE}")
@verb
def get(
    job: Job = "",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Into this folder; else ./results/JOB.")
    ] = None,
    only: Only = None,
    mounted: From = None,
    job_file: JobFile = None,
    run: RunOption = "",
    user: SshUser = "",
    identity: SshIdentity = None,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Fetch the results, each checked by size and checksum.

    Those on EFS are copied from where it is mounted (--from), else over ssh through an instance that has it mounted.
    Typed again it goes on where it was, and leaves alone what is here already.
    """
    from spotheal.agent.protocol.errors import NotFound
    from spotheal.fleet.results import results, results_efs
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    session, job_run = find(open_session(region, profile), job, job_file, run)
    with results_efs.opened(session, job_run, mounted, say, user=user, identity=identity) as source:
        listed = results.chosen(source.list(), only or ())
        if not listed:
            raise NotFound(
                _nothing(job_run, str(source)), next_step=f"`fleetctl status {job_run.job}` shows how far it is"
            )
        _fetch(job_run, source, listed, to or Path("results") / job_run.job, as_json)


def _fetch(run: Run, source: Source, listed: tuple[Result, ...], folder: Path, as_json: bool) -> None:
    from spotheal.agent.protocol.errors import SpothealError
    from spotheal.fleet.results import results, results_efs
    from spotheal.fleet.run.table import size_of
    from spotheal.fleet.terminal.bar import bar
    from spotheal.fleet.verbs import show

    fetched: list[results.Fetched] = []
    failed: list[tuple[str, SpothealError]] = []
    parallel = 1 if isinstance(source, results_efs.OverSsh) else results.PARALLEL
    say(f"{len(listed)} results, {size_of(sum(result.size for result in listed))}, into {folder}")
    with bar("fetching", quiet=as_json) as step:
        for result, outcome in results.fetch(source, listed, folder, step, parallel):
            if isinstance(outcome, SpothealError):
                failed.append((result.name, outcome))
            else:
                fetched.append(outcome)
    for _, error in failed:
        say(f"fleetctl: {error}")
    if as_json:
        documents: list[dict[str, Any]] = [{**vars(file), "path": str(file.path)} for file in fetched]
        print(show.as_json({
            "schema_version": 1, "job": run.job, "run": run.id, "folder": str(folder), "results": documents,
            "failed": [{"name": name, "error": str(error)} for name, error in failed],
        }))  # fmt: skip
    else:
        by_size = sum(1 for file in fetched if file.checked == "size")
        size = size_of(sum(file.size for file in fetched))
        print(f"{folder}: {_files(fetched)}, {size}, checked" + (f" ({by_size} by size alone)" if by_size else ""))
    if failed:
        retryable = [error for _, error in failed if not isinstance(error, results.Refused)]
        advice = (
            "the same command again" if retryable else "each is named above; the same command would refuse them again"
        )
        raise type((retryable or [failed[0][1]])[0])(
            f"{len(failed)} of {len(listed)} results were not fetched", next_step=advice
        )


# ----------------------------------------------------------------------------------------------------------------- EFS
@app.command("create-efs", epilog="Example: fleetctl results create-efs")
@verb
def create_efs(
    performance: Annotated[
        str, typer.Option("--performance", metavar="MODE", help="generalPurpose, or maxIO: for hundreds of machines.",
                          autocompletion=performances)
    ] = "",
    throughput: Annotated[
        str, typer.Option("--throughput", metavar="MODE", help="elastic, bursting or provisioned.",
                          autocompletion=throughputs)
    ] = "",
    mibps: Annotated[
        float | None, typer.Option("--mibps", metavar="N", help="MiB/s, with provisioned.")
    ] = None,
    name: SystemName = "results",
    fleet: Annotated[
        Path | None, typer.Option("--fleet", metavar="FILE", help="Whose subnets; else spot_fleet_config.json here.")
    ] = None,
    vpc: Annotated[str, typer.Option("--vpc", metavar="ID", help="Without a fleet's file; else the default VPC.")] = "",
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and make nothing.")] = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:  # fmt: skip
    """Make a file system for the results of all jobs, or what is missing of it.

    Encrypted, with a mount target in each zone of the fleet and a rule that lets its instances in by NFS (TCP 2049).
    Prints the line for [store] in job.toml. Typed again it goes on where it was.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.account import efs
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    modes = efs.modes(performance or "generalPurpose", throughput, mibps)
    session, described, found_job = _fleet_here(region, profile, fleet)
    net = efs.look_at_network(session, described, vpc)
    plan = efs.plan(session, name, modes, net, chosen=bool(performance or throughput or mibps))
    todo = plan.says()
    for line in todo:
        say(f"  {line}")
    if not plan.file_system:
        say(f"cost: {plan.modes.price()}")
    system = plan.file_system
    if todo and not dry_run:
        ask("Go ahead?", yes)
    if not dry_run:
        system = efs.create(session, plan, SystemClock(), say)
    line = f'results = "efs://{system or "fs-…"}"'
    if as_json:
        print(show.as_json({
            "schema_version": 1, "file_system": system or None, "line": line, "planned": todo, "dry_run": dry_run,
            "zones": list(net.subnets), "vpc": net.vpc,
        }))  # fmt: skip
    else:
        print(line)
    if not dry_run and (found_job is None or found_job.store.results != f"efs://{system}"):
        say(f"{system} is ready; write this line below [store] in job.toml, a folder behind it where you like")


@app.command("delete-efs", epilog="Example: fleetctl results delete-efs")
@verb
def delete_efs(
    system: Annotated[str, typer.Argument(metavar="FILE_SYSTEM", help="fs-…; else the one of --name.")] = "",
    name: SystemName = "results",
    yes: Yes = False,
    region: Region = "",
    profile: Profile = "",
) -> None:
    """Delete a file system that create-efs made, with all results on it.

    Mount targets first, then the file system, then the security group. One of others is left alone.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.errors import NotFound
    from spotheal.fleet.account import efs
    from spotheal.fleet.run.table import size_of

    session, _, job = _fleet_here(region, profile, None)
    file_system = efs.find(session, system or name)
    if file_system is None:
        raise NotFound(f"there is no file system {system or efs.token_of(name)} in {session.region}")
    efs.tags_checked(file_system)
    targets = efs.targets_of(session, str(file_system["FileSystemId"]))
    size = size_of(int((file_system.get("SizeInBytes") or {}).get("Value") or 0))
    say(f"delete {file_system['FileSystemId']} with {size} of results and {len(targets)} mount targets, for good")
    if job is not None and str(file_system["FileSystemId"]) in job.store.results:
        say(f"note: [store] results of {job.job.name} names it: later runs would keep their results on their volumes")
    ask("Delete it?", yes)
    vpc = next((str(target["VpcId"]) for target in targets if target.get("VpcId")), "")
    if leftover := efs.delete(session, str(file_system["FileSystemId"]), vpc, SystemClock(), say):
        say(f"note: {leftover}")
    print(f"{file_system['FileSystemId']} is deleted")


def _fleet_here(
    region: str, profile: str, fleet_file: Path | None
) -> tuple[Session, FleetConfig | None, JobConfig | None]:
    """The fleet's file and the job beside it, where they are."""
    from spotheal.fleet.files import config

    path = fleet_file or Path(config.DEFAULT_FLEET_FILE)
    fleet = config.read_fleet(path) if fleet_file is not None or path.exists() else None
    job_file = path.parent / config.DEFAULT_JOB_FILE
    job = config.read_job(job_file) if job_file.exists() else None
    session = open_session(region, profile)
    session.settle_region(job.job.region if job else "", fleet.region if fleet else "")
    return session, fleet, job


def _files(files: Sequence[object]) -> str:
    return f"{len(files)} file" + ("s" if len(files) != 1 else "")


def _nothing(run: Run, place: str) -> str:
    return f"run {run.id} of job {run.job} has no results in {place} (yet)"
