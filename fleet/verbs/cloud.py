"""`fleetctl cloud`: the rehearsal's cloud by itself, to try the other verbs on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.terminal.console import GLOBALS, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import Output, Region

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

EXAMPLE = "fleetctl cloud --env cloud.env & until [ -f cloud.env ]; do sleep 1; done; . ./cloud.env"


@verb
def cloud(
    order: Annotated[
        str,
        typer.Argument(
            metavar="ORDER",
            help="To a cloud that runs: state, interrupt, kill, rebalance, no-capacity, capacity, throttle, next-zone, "
            "quota, schedules (their time has come). Without: start one.",
        ),
    ] = "",
    instance: Annotated[str, typer.Option("--instance", metavar="ID", help="Which one; else the newest.")] = "",
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="N", help="Lead of a notice; how long capacity is away or EC2 throttles."),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", help="With quota: so many instances; else no limit.")
    ] = None,
    env: Annotated[
        Path | None, typer.Option("--env", metavar="FILE", help="Write the shell lines here once it answers.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Machines and volumes lie here, and stay.")
    ] = None,
    credentials_seconds: Annotated[
        float | None,
        typer.Option("--credentials-seconds", metavar="N", min=1, help="The lines have temporary credentials, which "
                     "end after so long."),
    ] = None,
    region: Region = "",
    output: Output = "",
) -> None:
    """Serve an empty AWS account on this machine; calls no AWS.

    Prints shell lines that point fleetctl (and the aws CLI) at it and serves until Ctrl-C. Instances are processes that
    really run; what AWS would do to them is ordered with `fleetctl cloud ORDER` in another shell. Linux only.
    """
    from spotheal.fleet.rehearsal.ec2.access_keys import write_private
    from spotheal.fleet.rehearsal.scenarios import run, serve
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    if order:
        if order not in serve.ORDERS:
            raise ConfigError(f"{order!r} is no order", next_step=f"one of {', '.join(serve.ORDERS)}")
        arguments = {"instance": instance, "seconds": "" if seconds is None else str(seconds),
                 "instances": "" if count is None else str(count)}  # fmt: skip
        answer = serve.send(order, {name: value for name, value in arguments.items() if value})
        print(show.as_json({"schema_version": 1, **answer}) if as_json or "said" not in answer else answer["said"])
        return
    run.check_machine()
    run.check_extras(example=False)
    home_region = open_session(region or GLOBALS.region or "us-west-2", "").settle_region()
    out = sys.stdout

    def ready(up: Cloud) -> None:
        lent = up.endpoint.lend(credentials_seconds) if credentials_seconds else {}
        variables = serve.environment(up.endpoint, home_region, up.shells.config, up.credentials)
        lines = serve.shell_lines(variables | lent)
        if env is not None:
            write_private(env, lines)
        print(lines, end="", file=out, flush=True)
        say("serving until Ctrl-C; `fleetctl cloud interrupt` in a shell with these lines sends a notice")

    serve.serve(home_region, keep, ready)
