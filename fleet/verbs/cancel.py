"""`fleetctl cancel`: the end of a run by hand."""

from __future__ import annotations

from spotheal.fleet.console import ask, is_json, open_session, say, verb
from spotheal.fleet.options import JobArgument, JobFile, Output, Profile, Region, RunOption, Yes

EXAMPLE = "fleetctl cancel resnet50 --yes"


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

    as_json = is_json(output)
    session, found = find(open_session(region, profile), job, job_file, run)
    plan = cancelling.make_plan(session, found)
    say(show.cancel_text(plan))
    if plan.pending:
        raise Conflict(
            f"the request of run {found.id} was interrupted, and may have reached AWS",
            next_step="`fleetctl request` once more finishes it; then cancel",
        )
    ends = [*([plan.fleet] if plan.fleet else []), *(one.id for one in plan.instances)]
    if ends:
        ask(f"End these {len(ends)}?" if len(ends) > 1 else "End it?", yes)
        cancelling.carry_out(session, found, plan, SystemClock())
    document = show.cancel_document(plan, cancelled=bool(ends))
    said = f"cancelled {', '.join(ends)}" if ends else "nothing to cancel: nothing of this run is live"
    print(show.as_json(document) if as_json else said)
    if plan.kept:
        kept = ", ".join(one.id for one in plan.kept)
        say(f"{kept} stays and costs; `fleetctl request --resume` goes on with it")
