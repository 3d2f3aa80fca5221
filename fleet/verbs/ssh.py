"""`fleetctl ssh`: a shell on the job's instance, whichever it is now."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError, JobFailed, NotFound, WaitTimedOut
from spotheal.fleet.terminal.console import is_json, open_session, say, verb
from spotheal.fleet.terminal.options import (
    JobFile,
    Output,
    Profile,
    Region,
    RunOption,
    SshIdentity,
    SshUser,
    seconds_of,
)

if TYPE_CHECKING:
    from spotheal.fleet.run.runs import Run
    from spotheal.fleet.run.session import Session
    from spotheal.fleet.run.ssh import Host

EXAMPLE = "fleetctl ssh resnet50 -L 6006:localhost:6006 -- nvidia-smi"


@verb
def ssh(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name; else (or as .) that of ./job.toml.")] = "",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND …", help="Run this there instead of a shell.")
    ] = None,
    forward: Annotated[
        list[str] | None,
        typer.Option("-L", metavar="[ADDRESS:]PORT:HOST:PORT", help="Forward a port to the instance, as ssh -L does."),
    ] = None,
    instance: Annotated[
        str, typer.Option("--instance", metavar="ID", help="This one, of a run on several; else the one that leads.")
    ] = "",
    user: SshUser = "",
    identity: SshIdentity = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for an instance if none is up.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --wait: give up after 90s, 20m, 3h …")
    ] = "",
    job_file: JobFile = None,
    run: RunOption = "",
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """A shell on the job's instance, whichever it is now.

    Your own ssh, with a key that EC2 Instance Connect takes for a minute; your ~/.ssh/config holds (a bastion, another
    user). Ends with the exit code of the command there. --output json tells where it would go, and goes nowhere.
    """
    import subprocess

    from spotheal.fleet.run import ssh as connecting
    from spotheal.fleet.verbs.target import find

    as_json = is_json(output)
    seconds_max = seconds_of("--timeout", timeout)
    remote_command = command or []
    if "--" in sys.argv and job and sys.argv[sys.argv.index("--") + 1 :][:1] == [job]:
        remote_command, job = [job, *remote_command], ""  # `fleetctl ssh -- nvidia-smi`
    session, job_run = find(open_session(region, profile), "" if job == "." else job, job_file, run)
    host = connecting.writer(session, job_run, instance)
    if host is None and wait:
        host = _await_host(session, job_run, seconds_max)
    if host is None:
        next_step = f"`fleetctl status {job_run.job}` says why; --wait waits for one"
        raise NotFound(f"no instance of job {job_run.job} is up", next_step=next_step)
    for port in forward or []:
        if port.startswith("-") or not port.strip():
            raise ConfigError(f"-L {port!r} is no forwarding", next_step="-L 6006:localhost:6006")
    with connecting.Connection(session, host, say, user=user, identity=identity) as connection:
        if as_json:
            from spotheal.fleet.verbs import show

            print(show.as_json({
                "schema_version": 1, "job": job_run.job, "run": job_run.id, "instance": host.instance,
                "zone": host.zone, "address": host.address, "user": connection.user, "image": host.image,
            }))  # fmt: skip
            return
        say(f"{host.instance} in {host.zone}, as {connection.user}")
        options = [word for port in forward or [] for word in ("-L", port)]
        code = subprocess.run(connection.argv(remote_command, options)).returncode
        if code == 255:
            raise connection.refusal()
        connection.remember()
    raise typer.Exit(code)


def _await_host(session: Session, run: Run, seconds_max: float | None) -> Host:
    """The next instance that is up, showing why it is not up yet; JobFailed if the run has ended."""
    from spotheal.agent.protocol.clock import SystemClock, Timeout
    from spotheal.fleet.run import ssh as connecting
    from spotheal.fleet.status.live import Lines, Look

    clock = SystemClock()
    look, lines, timeout = Look(session, run, clock), Lines(say, clock), Timeout(clock, seconds_max)
    while True:
        host = connecting.writer(session, run)
        if host is not None:
            return host
        document = look()
        if document is not None:
            lines.show(document, clock.now())
            if document["ended"] or document["fleet"]["live"] is False:
                raise JobFailed(
                    f"the run has ended ({document['phase']}): no instance will come",
                    next_step=f"`fleetctl logs {run.job}`; `fleetctl request --resume`",
                )
        if timeout.is_over:
            raise WaitTimedOut(f"no instance was up within {seconds_max:.0f} s", next_step="`fleetctl status`")
        timeout.sleep(5.0)
