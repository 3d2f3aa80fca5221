"""`fleetctl secret …`: what a trainer needs and nobody may read: tokens, keys, passwords."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.terminal.console import ask, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import JobFile, Output, Profile, Region, Yes, group

if TYPE_CHECKING:
    from pathlib import Path

    from spotheal.agent.protocol.job import JobConfig
    from spotheal.fleet.run.session import Session

EXAMPLE = "fleetctl secret put HF_TOKEN < token.txt"
app = group("secret", "Tokens and keys that only the trainer gets: put, ls, rm.", EXAMPLE)


def stores() -> list[str]:
    return ["ssm", "secretsmanager"]


Name = Annotated[str, typer.Argument(metavar="NAME", help="The environment variable that the trainer reads.")]
Store = Annotated[
    str, typer.Option("--store", metavar="ssm|secretsmanager", help="Where; ssm is free.", autocompletion=stores)
]
Key = Annotated[str, typer.Option("--key", metavar="ID", help="A KMS key of yours; else AWS's own.")]


@app.command("put", epilog=f"Example: {EXAMPLE}")
@verb
def put(
    name: Name,
    store: Store = "ssm",
    key: Key = "",
    job_file: JobFile = None,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Make or replace a secret, from standard input.

    On a terminal it is asked for. Never from the command line, which every user of this machine can read. Prints the
    line for [secrets] in job.toml. A running trainer keeps what it has; its next start on a new instance gets the new.
    """
    from spotheal.fleet.run import secrets

    session, job = _opened(job_file, region, profile)
    reference = secrets.reference(job.job.name, name, store)
    secrets.put(session, reference, _value(name), key)
    line = f'{name} = "{reference}"'
    if is_json(output):
        from spotheal.fleet.verbs import show

        print(show.as_json({"schema_version": 1, "name": name, "reference": str(reference), "line": line}))
    else:
        print(line)
    if job.secrets.get(name) == str(reference) or job.job.repository_secret == str(reference):
        say(f"{name} is put; job.toml names it already")
    else:
        say(
            f'{name} is put; write this line below [secrets] in job.toml, or as [job] repository_secret = "{reference}"'
        )


def _value(name: str) -> str:
    """A line end at the end is from the shell, and is cut off."""
    if sys.stdin.isatty():
        import getpass

        return getpass.getpass(f"{name}: ", sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("the secret is no text (UTF-8)", next_step="encode it, with base64 for instance") from None
    return text.removesuffix("\n").removesuffix("\r")


@app.command("ls", epilog="Example: fleetctl secret ls")
@verb
def ls(job_file: JobFile = None, region: Region = "", profile: Profile = "", output: Output = "") -> None:
    """List the job's secrets; never their values.

    Those below the job's path at AWS, and what job.toml names.
    """
    from spotheal.fleet.run import secrets
    from spotheal.fleet.run.table import table
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, job = _opened(job_file, region, profile)
    stored = secrets.stored(session, job.job.name)
    named = dict(job.secrets) | ({"(repository)": job.job.repository_secret} if job.job.repository_secret else {})
    rows = [
        (secret.name, str(secret.reference), secret.changed, str(secret.reference) in named.values())
        for secret in stored
    ]
    references = {reference for _, reference, _, _ in rows}
    rows += [(name, reference, "", True) for name, reference in named.items() if reference not in references]
    if as_json:
        keys = ("name", "reference", "changed", "in_job_toml")
        print(show.as_json({"schema_version": 1, "secrets": [dict(zip(keys, row, strict=True)) for row in rows]}))
        return
    cells = [(name, address, changed or "not below the job's path", "yes" if used else "no")
             for name, address, changed, used in rows]  # fmt: skip
    print(table(("NAME", "REFERENCE", "CHANGED", "IN JOB.TOML"), cells))
    if not rows:
        say(f"there is none; `{EXAMPLE}` makes one")


@app.command("rm", epilog="Example: fleetctl secret rm HF_TOKEN")
@verb
def rm(
    name: Name,
    store: Store = "ssm",
    yes: Yes = False,
    job_file: JobFile = None,
    region: Region = "",
    profile: Profile = "",
) -> None:
    """Delete a secret of the job at AWS.

    A job that still names it ends as "set-up failed" at its next start.
    """
    from spotheal.fleet.run import secrets

    session, job = _opened(job_file, region, profile)
    reference = secrets.reference(job.job.name, name, store)
    if str(reference) in (*job.secrets.values(), job.job.repository_secret):
        say(f"job.toml names {reference}: remove that line too")
    ask(f"Delete {reference}?", yes)
    secrets.remove(session, reference)
    say(f"deleted {reference}")


def _opened(job_file: Path | None, region: str, profile: str) -> tuple[Session, JobConfig]:
    from pathlib import Path

    from spotheal.fleet.files import config

    path = job_file or Path(config.DEFAULT_JOB_FILE)
    job, session = config.read_job(path), open_session(region, profile)
    session.settle_region(job.job.region, config.region_beside(path))
    return session, job
