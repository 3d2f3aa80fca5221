"""fleetctl: the program, and its table of verbs.

Everything heavy (boto3, botocore's models, rich) is imported inside the verb that needs it: `fleetctl --help` must
answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from spotheal.agent.errors import ExitCode
from spotheal.fleet.console import GLOBALS, say
from spotheal.fleet.options import Output, Profile, Region
from spotheal.fleet.verbs import cancel, cloud, logs, rehearse, request, status, validate

app = typer.Typer(
    name="fleetctl",
    help="Trains on EC2 spot instances, goes on after interruptions, and ends its fleet when the training is done.",
    epilog="Example: fleetctl rehearse; then docs/real-aws.md leads to fleetctl request",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes longer to import than the help to print
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    region: Region = "",
    profile: Profile = "",
    output: Output = "table",
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    GLOBALS.region, GLOBALS.profile, GLOBALS.output = region, profile, output
    if version:
        from importlib.metadata import version as installed

        print(f"fleetctl {installed('spotheal')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


VERBS: tuple[tuple[Callable[..., None], str], ...] = (  # in the order of the help
    (request.request, request.EXAMPLE),
    (status.status, status.EXAMPLE),
    (logs.logs, logs.EXAMPLE),
    (cancel.cancel, cancel.EXAMPLE),
    (validate.validate, validate.EXAMPLE),
    (rehearse.rehearse, rehearse.EXAMPLE),
    (cloud.cloud, cloud.EXAMPLE),
)
for _verb, _example in VERBS:
    app.command(epilog=f"Example: {_example}")(_verb)


def main() -> None:
    """The console script `fleetctl`."""
    try:
        app(prog_name="fleetctl")
    except KeyboardInterrupt:
        say("fleetctl: interrupted")
        sys.exit(int(ExitCode.INTERRUPTED))


if __name__ == "__main__":
    main()
