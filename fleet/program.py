"""The typer application: the root command, and the verbs as they are asked for."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet import cli
from spotheal.fleet.terminal.console import GLOBALS, say, unwritten
from spotheal.fleet.terminal.options import Output, Profile, Region

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Verbs(TyperGroup):
    """Imports the module of the verb that is asked for, and no other."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(cli.VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return verb_command(cmd_name) if cmd_name in cli.VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """`help VERB` too; a verb that is mistyped is guessed."""
        if args[0] == "help" and not ctx.resilient_parsing:
            if not args[1:]:
                print(cli.help_text())
                ctx.exit()
            args = [*args[1:], "--help"]
        if args[0] not in cli.VERBS and not ctx.resilient_parsing:
            near = get_close_matches(args[0], cli.VERBS, 1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        return cli.help_text()


def verb_command(name: str) -> Any:
    """The command of a verb; the root's settings hold for it."""
    module = importlib.import_module(f"spotheal.fleet.verbs.{name}")
    if hasattr(module, "app"):
        app: typer.Typer = module.app
    else:
        app = _plain()
        app.command(name, epilog=f"Example: {module.EXAMPLE}", context_settings=_SETTINGS)(getattr(module, name))
    command = typer.main.get_command(app)
    command.name = name
    return command


def _plain(**settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # rich takes longer to import than the help to print
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
        **settings,
    )


app = typer.Typer(
    name="fleetctl",
    cls=Verbs,
    help=cli.SUMMARY,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
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


def run() -> None:
    try:
        app(prog_name="fleetctl")
    except KeyboardInterrupt:
        say("fleetctl: interrupted")
        sys.exit(int(ExitCode.INTERRUPTED))
    except OSError as error:  # while help is printed; what verbs meet is seen to by their guard
        if not (explanation := unwritten(error)):
            raise
        say(explanation)
        sys.exit(int(ExitCode.UNEXPECTED))


