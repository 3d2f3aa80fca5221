"""`fleetctl batch …`: a job, or one for each entry of a list, on AWS Batch."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.agent.protocol.errors import ConfigError, Conflict, ExitCode
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.terminal.console import ask, fail, is_json, open_session, say, say_progress, verb
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
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.batch.following import Followed
    from spotheal.fleet.batch.submitting import Order, Overrides
    from spotheal.fleet.batch.tail import Line
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl batch create, fleetctl batch submit hyperparam_list.yml --wait"
app = group("batch", "Jobs and arrays on AWS Batch: create, image, submit, status, logs, cancel, delete.", EXAMPLE)
pictures = group("image", "The image of the containers: push.", "fleetctl batch image push")
app.add_typer(pictures)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Send nothing; print the exact calls as JSON.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Until the job has ended.")]
Timeout = Annotated[str, typer.Option("--timeout", metavar="TIME", help="Give up waiting after 90s, 20m, 3h …")]


@app.command("create", epilog="Example: fleetctl batch create --dry-run")
@verb
def create(
    job_file: JobFile = None,
    vpc: Annotated[str, typer.Option("--vpc", metavar="ID", help="Where hosts are; else the default VPC.")] = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Make what the job needs at AWS Batch.

    Compute environments (spot first, then on demand), a queue, a job definition, roles, a log group. Nothing of it
    costs anything until a job is submitted. Typed again it changes what job.toml has changed.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.batch import creating, showing
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, job, root, _ = described(region, profile, job_file)
    say_progress("reading the account …", quiet=False)
    plan = creating.make_plan(session, job, root, SystemClock(), vpc)
    if dry_run:
        print(show.as_json(showing.plan_document(plan, is_made=False)), flush=True)
        say(f"{showing.plan_text(plan)}\n\nnothing was sent")
        return
    say(showing.plan_text(plan))
    if plan.steps:
        ask("Go ahead?", yes)
        creating.carry_out(session, plan, SystemClock(), say)
    document = showing.plan_document(plan, is_made=True)
    print(show.as_json(document) if as_json else f"{plan.names.queue}  ready")
    say("next: fleetctl batch submit LIST --wait")


@pictures.command("push", epilog="Example: fleetctl batch image push --print")
@verb
def push(
    base: Annotated[str, typer.Option("--base", metavar="IMAGE", help="What it is built on; else PyTorch's.")] = "",
    print_only: Annotated[bool, typer.Option("--print", help="Print the Dockerfile; build and push nothing.")] = False,
    dry_run: DryRun = False,
    job_file: JobFile = None,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Build the image of the containers and push it to ECR.

    It is PyTorch's public image with git and spotheal's agent. Needs docker or podman on this machine.
    """
    from spotheal.fleet.batch import image
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, _, _, _ = described(region, profile, job_file, needs_job=False)
    target = image.described(session, base or image.BASE)
    document = {"schema_version": 1, "image": target.name, "repository": target.repository, "tag": target.tag,
                "dockerfile": target.dockerfile, "pushed": False}  # fmt: skip
    if print_only or dry_run:
        print(
            show.as_json(document) if as_json or dry_run else target.dockerfile, end="" if not as_json else "\n"
        )
        say(f"nothing was built; the image would be {target.name}")
        return
    image.push(session, target, say)
    print(show.as_json({**document, "pushed": True}) if as_json else target.name)
    say("next: fleetctl batch create, which lets the job definition name it")


@app.command("submit", epilog="Example: fleetctl batch submit hyperparam_list.yml --wait")
@verb
def submit(
    file: Annotated[str, typer.Argument(metavar="LIST", help="YAML, a list of mappings: a path or s3://…")] = "",
    array: Annotated[
        int,
        typer.Option(
            "--array", metavar="N", min=0, max=10_000, show_default=False, help="N children without parameters."
        ),
    ] = 0,
    vcpus: Annotated[
        float, typer.Option("--vcpus", metavar="N", min=0, show_default=False, help="Of a container, this time.")
    ] = 0,
    memory: Annotated[
        float, typer.Option("--memory", metavar="GIB", min=0, show_default=False, help="Of a container, this time.")
    ] = 0,
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="N", min=0, show_default=False, help="Of a container, this time.")
    ] = 0,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="For the trainer; more than once.")]
    = None,
    command: Annotated[
        str, typer.Option("--command", metavar="TEXT", help="Instead of the command in job.toml.")
    ] = "",
    depends_on: Annotated[
        list[str] | None,
        typer.Option("--depends-on", metavar="JOB[:N_TO_N]", help="After it (or SEQUENTIAL); more than once."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest run's unfinished entries.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end, with the lines of its containers.")]
    = False,
    timeout: Timeout = "",
    job_file: JobFile = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Submit the job, or an array with a child for each entry of a list.

    The trainer of child i finds i in SPOTHEAL_INDEX and AWS_BATCH_JOB_ARRAY_INDEX, and its entry in the file that
    SPOTHEAL_PARAMS_FILE names. A child whose host is taken goes on from its checkpoints on another.
    """
    as_json, seconds_max = is_json(output), seconds_of("--timeout", timeout)
    if file and array:
        raise ConfigError("a list and --array exclude each other", next_step="give one of them")
    session, job, root, described_in = described(region, profile, job_file)
    entries = _entries(file, array, session, job.job.command)
    overrides = _overrides(vcpus, memory, gpus, env or [], command)
    submit_and_follow(
        session, job, described_in, root, entries=entries, listed_in=file, overrides=overrides,
        depends_on=depends_on or [], resume=resume, wait=wait, seconds_max=seconds_max, yes=yes, dry_run=dry_run,
        as_json=as_json,
    )  # fmt: skip


def submit_and_follow(
    session: Session,
    job: JobConfig,
    job_file: Path,
    root: StoreUrl,
    *,
    entries: list[dict[str, Any]] | None,
    listed_in: str,
    overrides: Overrides | None = None,
    depends_on: list[str],
    resume: bool,
    wait: bool,
    seconds_max: float | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """The common part of `batch submit` and `sweep run --engine batch`."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.batch import submitting
    from spotheal.fleet.verbs import show

    if not dry_run and not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", next_step="--yes to go ahead, or --dry-run to look first")
    clock = SystemClock()
    after = tuple(dependency for text in depends_on for dependency in submitting.dependencies(session, root, text))
    if len(after) > submitting.DEPENDENCIES_MAX:
        raise ConfigError(f"{len(after)} dependencies; AWS takes {submitting.DEPENDENCIES_MAX}")
    order = submitting.prepare(
        session, job, job_file, root, clock, entries=entries, listed_in=listed_in, overrides=overrides,
        depends_on=after, resume=resume, allow_paths=_is_rehearsal(),
    )  # fmt: skip
    if dry_run:
        print(show.as_json(_document(order, "")), flush=True)
        say(f"{order.says()}\n\nnothing was sent")
        return
    say(order.says())
    for warning in order.source.warnings:
        say(f"note: {warning}")
    ask("Go ahead?", yes)
    job_id = submitting.send(session, order, clock, say)
    print(show.as_json(_document(order, job_id)) if as_json else job_id, flush=True)
    name = order.names.job
    say(f"next: fleetctl batch logs {name} -f, fleetctl batch status {name}, fleetctl batch cancel {name}")
    if wait:
        _follow(_followed(session, order.names.job, job_id, as_json), seconds_max, session, name, root, order)


def _document(order: Order, job_id: str) -> dict[str, Any]:
    instance = order.instance
    return {"schema_version": 1, "job": order.names.job, "run": instance.run, "job_id": job_id or None,
            "size": len(order.entries or ()), "store": str(instance.store), "request": order.request()}  # fmt: skip


@app.command("status", epilog="Example: fleetctl batch status digits")
@verb
def status(
    job: JobArgument = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Where the job is at AWS Batch; which children failed, and why."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.batch import status as states
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, job_run = _find(region, profile, job, job_file, run)
    document = states.gather(session, job_run)
    if states.settle(job_run, document, SystemClock()):
        document = states.gather(session, job_run)
    print(show.as_json(document) if as_json else states.render(document))


@app.command("logs", epilog="Example: fleetctl batch logs digits -f")
@verb
def logs(
    job: JobArgument = "",
    follow: Follow = False,
    timeout: Timeout = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
) -> None:
    """What the containers said, of all children and attempts; each line begins with its child's index."""
    from spotheal.fleet.run import batch_jobs

    seconds_max = seconds_of("--timeout", timeout)
    session, job_run = _find(region, profile, job, job_file, run)
    watched = _followed(session, job_run.job, str(batch_jobs.document_of(job_run)["job_id"]), as_json=False)
    if not follow:
        watched.once()
        return
    _follow(watched, seconds_max, session, job_run.job, None, None)


@app.command("cancel", epilog="Example: fleetctl batch cancel digits")
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
    """End the job: waiting children are cancelled, running containers save within 30 seconds and end."""
    from spotheal.agent.aws.clients import translated
    from spotheal.fleet.run import batch_jobs
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, job_run = _find(region, profile, job, job_file, run)
    job_id = str(batch_jobs.document_of(job_run)["job_id"])
    description = batch_jobs.describe(session, [job_id]).get(job_id)
    if description is None or description["status"] in batch_jobs.ENDS:
        say(f"job {job_id} is over" + (f": {description['status']}" if description else ""))
        cancelled = False
    else:
        ask(f"End job {job_run.job}, run {job_run.id}?", yes)
        with translated(f"terminate job {job_id}"):
            session.client("batch").terminate_job(jobId=job_id, reason="cancelled by an operator")
        cancelled = True
        say("its checkpoints stay: fleetctl batch submit --resume goes on")
    document = {"schema_version": 1, "job": job_run.job, "run": job_run.id, "job_id": job_id, "cancelled": cancelled}
    print(show.as_json(document) if as_json else job_id)


@app.command("delete", epilog="Example: fleetctl batch delete digits")
@verb
def delete(
    job: JobArgument = "",
    yes: Yes = False,
    job_file: JobFile = None,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Delete what `create` has made; the store with checkpoints and results stays.

    In the order that AWS demands, waiting for each: queue, environments, job definition, logs, roles. Jobs that are not
    over are only ended with --yes, or a yes of yours.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.batch import deleting
    from spotheal.fleet.batch.names import Names
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    name, session = _named(region, profile, job, job_file)
    names = Names(name)
    inventory = deleting.look(session, names)
    document = {
        "schema_version": 1,
        "job": name,
        "deleted": not inventory.is_nothing,
        "ended_jobs": list(inventory.open_jobs),
    }
    if inventory.is_nothing:
        say(f"there is nothing of job {name} at AWS Batch")
        print(show.as_json(document) if as_json else "nothing to delete")
        return
    say(inventory.says(names))
    if inventory.open_jobs and not yes and not sys.stdin.isatty():
        raise Conflict(f"{len(inventory.open_jobs)} job(s) of queue {names.queue} are not over",
                       next_step="--yes ends them; `fleetctl batch status` shows them")  # fmt: skip
    ask("Delete all of it?", yes)
    deleting.carry_out(session, names, inventory, SystemClock(), say)
    print(show.as_json(document) if as_json else f"{names.queue}  deleted")


# --------------------------------------------------------------------------------------------------------------- inside
def described(
    region: str, profile: str, job_file: Path | None, *, needs_job: bool = True
) -> tuple[Session, Any, Any, Path]:
    """Session, job, the root of all stores, and the job's file."""
    from spotheal.fleet.files import config

    path = job_file or Path(config.DEFAULT_JOB_FILE)
    session = open_session(region, profile)
    if not needs_job and not path.exists():
        session.settle_region()
        return session, None, None, path
    job = config.read_job(path)
    session.settle_region(job.job.region, config.region_beside(path))
    return session, job, session.store_root(job.store.url), path


def _named(region: str, profile: str, job: str, job_file: Path | None) -> tuple[str, Session]:
    from spotheal.fleet.files import config
    from spotheal.fleet.run import runs

    if job:
        session = open_session(region, profile)
        path = job_file or Path(config.DEFAULT_JOB_FILE)
        session.settle_region(config.region_beside(path))
        return runs.check_job_name(job), session
    session, job_config, _, _ = described(region, profile, job_file)
    return str(job_config.job.name), session


def _find(region: str, profile: str, job: str, job_file: Path | None, run: str) -> tuple[Session, Run]:
    from spotheal.fleet.verbs.target import find

    return find(open_session(region, profile), job, job_file, run)


def _entries(file: str, array: int, session: Session, command: tuple[str, ...]) -> list[dict[str, Any]] | None:
    from spotheal.fleet.sweep import entries as listed

    if not file:
        return [{} for _ in range(array)] if array else None
    entries = listed.read(file, session)
    for slip in listed.uneven(entries):
        say(f"note: {slip}")
    listed.refuse_unfit(entries, command, file)
    return entries


def _overrides(vcpus: float, memory: float, gpus: int, env: list[str], command: str) -> Overrides:
    from spotheal.fleet.batch.submitting import Overrides

    pairs = []
    for text in env:
        name, sign, value = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith(("SPOTHEAL_", "AWS_BATCH")):
            raise ConfigError(f"--env {text!r} is no NAME=value, or its name is taken", next_step="write --env K=V")
        pairs.append((name, value))
    try:
        words = tuple(shlex.split(command))
    except ValueError as fault:
        raise ConfigError(f"--command {command!r} cannot be taken apart: {fault}") from None
    return Overrides(vcpus, memory, gpus, tuple(pairs), words)


def _followed(session: Session, job: str, job_id: str, as_json: bool) -> Followed:
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.batch.following import Followed
    from spotheal.fleet.batch.names import Names

    def line(log_line: Line) -> None:
        plain = printable(log_line.text.rstrip("\r").rpartition("\r")[2])  # of a progress bar its last state
        text = f"[{log_line.label}] {plain}" if log_line.label else plain
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    return Followed(session, Names(job), job_id, SystemClock(), say, line)


def _follow(
    watched: Followed, seconds_max: float | None, session: Session, job: str, root: StoreUrl | None, order: Order | None
) -> None:
    from contextlib import suppress

    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.errors import SpothealError
    from spotheal.fleet.batch import status as states
    from spotheal.fleet.run import runs

    try:
        watched.to_the_end(seconds_max)
    except KeyboardInterrupt:
        fail(f"fleetctl: interrupted; the job goes on: {watched.come_back()}", ExitCode.INTERRUPTED)
    finally:
        if root is not None and order is not None:
            job_run = runs.open_run(session.client("s3"), root, job, order.instance.run)
            with suppress(SpothealError):  # how the job ended stands; the next `batch status` records it, too
                states.settle(job_run, states.gather(session, job_run), SystemClock())
    say(f"done: fleetctl results get {job}")


def _is_rehearsal() -> bool:
    """Whether AWS is a local cloud, whose containers can clone a path of this machine."""
    import os
    from urllib.parse import urlsplit

    return urlsplit(os.environ.get("AWS_ENDPOINT_URL", "")).hostname in ("127.0.0.1", "localhost", "::1")
