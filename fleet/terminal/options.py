"""Options that several verbs share, and how their values are read. Light: `--help` imports this."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spotheal.agent.protocol.errors import ConfigError


def outputs() -> list[str]:
    return ["table", "json"]


def sources() -> list[str]:
    return ["agent", "trainer"]


Region = Annotated[
    str,
    typer.Option(
        "--region", metavar="NAME", help="AWS region; else AWS_REGION, AWS_DEFAULT_REGION, job.toml, the profile."
    ),
]
Profile = Annotated[str, typer.Option("--profile", metavar="NAME", help="AWS profile; else AWS_PROFILE.")]
Output = Annotated[
    str, typer.Option("--output", metavar="table|json", help="JSON goes to stdout alone.", autocompletion=outputs)
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's name; else that of ./job.toml.")]
JobFile = Annotated[
    Path | None, typer.Option("--job", metavar="FILE", help="The job's file; else job.toml beside the fleet's file.")
]
RunOption = Annotated[str, typer.Option("--run", metavar="ID", help="A run of the job by its id; else the newest.")]
SshUser = Annotated[
    str, typer.Option("--user", metavar="NAME", help="Login on the instance; else what its image is known to have.")
]
SshIdentity = Annotated[
    Path | None, typer.Option("--identity", "-i", metavar="FILE", help="A private key to try, too: your key pair's.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def wants_json(output: str) -> bool:
    if output not in ("table", "json"):
        raise ConfigError(f"--output {output!r} is neither table nor json", next_step="--output json")
    return output == "json"


def seconds_of(option: str, text: str) -> float | None:
    """The seconds that an option gives; None without the option."""
    from spotheal.agent.protocol.job_values import seconds

    try:
        return float(seconds(text)) if text else None
    except ValueError as fault:
        raise ConfigError(f"{option} {text!r} {fault}", next_step="write 90s, 20m, 3h or 2d") from None


class _Group(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each verb's whole first sentence: the default cuts it at the line's end."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(200)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def group(name: str, says: str, example: str) -> typer.Typer:
    """A verb that has verbs of its own, with the root's settings."""
    return typer.Typer(
        name=name,
        cls=_Group,
        help=says,
        epilog=f"Example: {example}",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
