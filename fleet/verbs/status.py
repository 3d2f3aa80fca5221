"""`fleetctl status`: where a job is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotheal.fleet.console import is_json, open_session, say, verb
from spotheal.fleet.options import JobArgument, JobFile, Output, Profile, Region, RunOption

if TYPE_CHECKING:
    from spotheal.fleet.runs import Run
    from spotheal.fleet.session import Session

EXAMPLE = "fleetctl status resnet50 --output json"


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

    as_json = is_json(output)
    session, found = find(open_session(region, profile), job, job_file, run)
    show_status(session, found, as_json)


def show_status(session: Session, run: Run, as_json: bool) -> None:
    from spotheal.agent.clock import SystemClock
    from spotheal.fleet import show
    from spotheal.fleet import status as state

    now = SystemClock().now()
    document = state.summarise(state.gather(session, run), now)
    print(show.as_json(document) if as_json else state.render(document, now))
    for note in document["notes"]:
        say(f"note: {note}")
