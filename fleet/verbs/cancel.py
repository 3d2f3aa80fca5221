"""`fleetctl cancel`: the end of a run by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.fleet.terminal.console import ask, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import JobArgument, JobFile, Output, Profile, Region, RunOption, Yes, seconds_of

if TYPE_CHECKING:
    from spotheal.agent.protocol.errors import SpothealError
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl cancel resnet50 --save"


@verb
def cancel(
    job: JobArgument = "",
    save: Annotated[
        bool, typer.Option("--save", help="Let the trainer save a last checkpoint first, and wait for it.")
    ] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --save: how long it may take; else 10m.")
    ] = "",
    all_stores: Annotated[
        bool, typer.Option("--all-stores", help="If this store has no such run: of any store.")
    ] = False,
    yes: Yes = False,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """End a run: its fleet and instances. The volume with the checkpoints stays, and so does the store.

    Says what remains. `fleetctl request --resume` goes on with the run and its volume.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.errors import Conflict, NotFound
    from spotheal.agent.protocol.names import Phase
    from spotheal.fleet.ending import cancel as cancelling
    from spotheal.fleet.ending import stopping
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    seconds_max = seconds_of("--timeout", timeout) or stopping.SAVE_SECONDS
    opened = open_session(region, profile)
    try:
        session, job_run = find(opened, job, job_file, run)
    except NotFound as missing:
        _end_strays(opened, job, job_file, missing, all_stores, yes, as_json)
        return
    if job_run.fleet_document().get("engine") == "batch":
        raise Conflict(f"run {job_run.id} of job {job_run.job} is on AWS Batch",
                       next_step=f"`fleetctl batch cancel {job_run.job}` ends it")  # fmt: skip
    plan = cancelling.make_plan(session, job_run)
    is_done = (job_run.store.read_status() or {}).get("phase") == Phase.DONE.value
    say(show.cancel_text(plan))
    if plan.pending:
        raise Conflict(
            f"the request of run {job_run.id} was interrupted, and may have reached AWS",
            next_step="`fleetctl request` once more finishes it; then cancel",
        )
    ends = [*([plan.fleet] if plan.fleet else []), *(instance.id for instance in plan.instances)]
    ended = None
    if ends:
        ask(f"End these {len(ends)}?" if len(ends) > 1 else "End it?", yes)
        if save:
            ended = stopping.save_and_end(session, job_run, "cancelled by fleetctl", SystemClock(), say, seconds_max)
        else:
            cancelling.carry_out(session, job_run, plan, SystemClock())
    document = show.cancel_document(plan, cancelled=bool(ends))
    if save:
        document["saved_step"] = ended.saved_step if ended else None
        document["phase"] = ended.phase if ended else None
    message = f"cancelled {', '.join(ends)}" if ends else "nothing to cancel: nothing of this run is live"
    if ended and ended.has_saved and ended.saved_step is not None:
        message += f"; step {ended.saved_step} is saved"
    print(show.as_json(document) if as_json else message)
    remains(job_run.job, [volume.id for volume in plan.volumes], str(job_run.store.url), is_done)


def _end_strays(
    session: Session, job: str, job_file: Path | None, missing: SpothealError, all_stores: bool, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """End the job's fleets and instances that AWS still runs, by their tags; if there are none, raise `missing`."""
    from spotheal.agent.protocol.errors import NotFound, SpothealError
    from spotheal.fleet.ending import cancel as cancelling
    from spotheal.fleet.files import config
    from spotheal.fleet.verbs import show
    from spotheal.fleet.verbs.target import find_root

    name = job or config.read_job(job_file or Path(config.DEFAULT_JOB_FILE)).job.name
    try:
        _, root = find_root(session, job_file)
        strays = cancelling.find_strays(session, name, str(root), all_stores=all_stores)
    except SpothealError:
        raise missing from None
    ends = [*strays.fleets, *strays.instances]
    if not ends and strays.stores:
        places = ", ".join(store or "a store that its tags do not name" for store in strays.stores)
        raise NotFound(
            f"{missing.message}; a job of that name runs with {places}",
            next_step=f"`fleetctl cancel {name} --all-stores` ends it, whosever it is",
        )
    if not ends:
        raise missing
    say(f"the store has no run of job {name}; by their tags these are its own: {', '.join(ends)}")
    ask(f"End these {len(ends)}?" if len(ends) > 1 else "End it?", yes)
    cancelling.end_strays(session, strays)
    document = {"schema_version": 1, "job": name, "run": None, "cancelled": True, "ended": ends}
    print(show.as_json(document) if as_json else f"cancelled {', '.join(ends)}")


def remains(job: str, volumes: list[str], store: str, is_done: bool) -> None:
    if volumes:
        resume = (
            "" if is_done else f"; `fleetctl request --resume` goes on with {'it' if len(volumes) == 1 else 'them'}"
        )
        say(f"{', '.join(volumes)} {'stays and costs' if len(volumes) == 1 else 'stay and cost'}{resume}")
    say(f"{store} stays: status, logs, results. `fleetctl clean {job}` shows what all that costs, and removes it")
