"""`fleetctl logs`: what agent and trainer said, on all instances of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.terminal.console import is_json, open_session, say, verb
from spotheal.fleet.terminal.options import (
    JobArgument,
    JobFile,
    Output,
    Profile,
    Region,
    RunOption,
    SshIdentity,
    SshUser,
    sources,
)

if TYPE_CHECKING:
    from spotheal.fleet.run.runs import Run

EXAMPLE = "fleetctl logs -f resnet50"


@verb
def logs(
    job: JobArgument = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends, across replacements.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Only the instance of this start of the trainer.")
    ] = None,
    instance: Annotated[str, typer.Option("--instance", metavar="ID", help="Only this instance.")] = "",
    source: Annotated[
        str, typer.Option("--source", metavar="agent|trainer", help="Only of this one.", autocompletion=sources)
    ] = "",
    story: Annotated[
        bool, typer.Option("--story", help="What each machine saw and did while it healed the volume.")
    ] = False,
    store: Annotated[bool, typer.Option("--store", help="With -f: only what the store has; no ssh.")] = False,
    user: SshUser = "",
    identity: SshIdentity = None,
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """What agent and trainer said, on all instances of a run.

    Those that are gone included: instances store their logs every minute, and at a notice. With -f the lines of the
    instance that lives come over your own ssh, as they are written.
    """
    import json

    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.foreign_text import printable
    from spotheal.fleet.logs import logs as reading
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    if source not in ("", "agent", "trainer"):
        raise ConfigError(f"--source {source!r} is neither agent nor trainer", next_step="leave it out for both")
    if attempt is not None and instance:
        raise ConfigError("--attempt and --instance exclude each other", next_step="give one of them")
    if story and (follow or source or attempt is not None):
        raise ConfigError("--story takes no -f, --source or --attempt", next_step="only --instance goes with it")
    session, job_run = find(open_session(region, profile), job, job_file, run)
    if story:
        _print_story(job_run, instance, as_json)
        return
    chosen = reading.select(job_run, attempt=attempt, instance=instance)
    reader = reading.Reader(job_run, instance=chosen, source=source)
    live = None
    if follow and not store:
        from spotheal.fleet.logs.follow import OverSsh

        live = OverSsh(session, job_run, reader, SystemClock(), say, instance=chosen, user=user, identity=identity)
    last_instance = ""
    for line in reading.Follower(job_run, reader, SystemClock(), live).lines() if follow else reader.new_lines():
        if as_json:
            print(json.dumps({"schema_version": 1, **vars(line)}), flush=follow)
            continue
        if line.instance != last_instance:
            say(f"== {line.instance}")
            last_instance = line.instance
        print(f"trainer | {printable(line.text)}" if line.source == "trainer" else printable(line.text), flush=follow)
    if not last_instance and not as_json:
        say("no instance has written logs to the store yet (they come every minute, and at a notice)")


def _print_story(run: Run, instance: str, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from spotheal.agent.protocol.foreign_text import printable
    from spotheal.fleet.logs.story import rounds

    last_instance = ""
    for entry in rounds(run, instance):
        if as_json:
            print(json.dumps({"schema_version": 1, **asdict(entry)}))
            continue
        if entry.instance != last_instance:
            say(f"== {entry.instance}")
            last_instance = entry.instance
        for name, value in entry.changes.items():
            print(f"      {printable(name)} = {printable(value)}")
        print(f"{entry.number:4}  {printable(entry.action)}")
