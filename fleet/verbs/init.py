"""`fleetctl init`: both files of a request, chosen by what the account and the market have."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError, Conflict, PermissionDenied
from spotheal.fleet.terminal.console import is_json, open_session, say, say_progress, verb
from spotheal.fleet.terminal.options import Output, Profile, Region

EXAMPLE = 'fleetctl init --repo . --command "python train.py" --gpus 1 --gpu-memory 20'


@verb
def init(
    command: Annotated[str, typer.Option("--command", metavar="TEXT", help='What trains, such as "python train.py".')],
    repo: Annotated[
        str, typer.Option("--repo", metavar="URL|.", help='https or ssh address; "." carries this checkout\'s commit.')
    ] = ".",
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="N", min=0, max=16, help="GPUs of one instance; 0 = none.")
    ] = 1,
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", metavar="GIB", min=0, show_default=False, help="At least, of each GPU.")
    ] = 0.0,
    vcpus: Annotated[int, typer.Option("--vcpus", metavar="N", min=1, help="With --gpus 0.")] = 4,
    max_price: Annotated[
        float, typer.Option("--max-price", metavar="USD", min=0, show_default=False, help="An hour at most.")
    ] = 0.0,
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="NAME", help="These instance types; may be repeated.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The job's name; else from the repository.")] = "",
    hours: Annotated[float, typer.Option("--hours", metavar="H", min=0, help="Limit of the run; 0 = none.")] = 24.0,
    dollars: Annotated[
        float | None,
        typer.Option("--dollars", metavar="USD", min=0, help="Limit of the run; else proposed from the prices."),
    ] = None,
    volume: Annotated[int, typer.Option("--volume", metavar="GIB", min=1, max=65536, help="Size.")] = 100,
    image: Annotated[str, typer.Option("--image", metavar="AMI", help="Else the newest Deep Learning AMI.")] = "",
    vpc: Annotated[str, typer.Option("--vpc", metavar="ID", help="Else the default one.")] = "",
    ssh_from: Annotated[
        str | None, typer.Option("--ssh-from", metavar="ADDRESS", help='Who may ssh; else this machine; "" nobody.')
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the files go.", file_okay=False)
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no AWS; placeholders are left.")] = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Write spot_fleet_config.json and job.toml for a job, every choice explained.

    Reads the account (quotas, images, instance types, prices, zones) and changes nothing in it; `fleetctl request`
    makes what is missing. Without credentials placeholders are left, which `fleetctl validate` names.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.account import environments, init_files
    from spotheal.fleet.account import init as choosing
    from spotheal.fleet.account.types import Need
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    wishes = choosing.Wishes(
        name=name or choosing.guess_name(repo, directory), repository=repo, command=_words(command),
        need=Need(gpus, gpu_memory, max_price, vcpus), hours=hours, dollars=dollars, volume_gib=volume,
        image=image, types=tuple(dict.fromkeys(types or ())), vpc=vpc, ssh_from=ssh_from,
        environment=environments.propose(directory) if repo == "." else environments.NOTHING,
    )  # fmt: skip
    fleet_file, job_file = directory / "spot_fleet_config.json", directory / "job.toml"
    _refuse_existing([fleet_file, job_file], force)
    _check(wishes)
    session, clock = open_session(region, profile), SystemClock()
    if not offline:
        session.check_profile()
    if offline or not session.has_credentials():
        choice = choosing.offline(wishes, _region_or_none(session))
    else:
        session.settle_region()
        choice = choosing.survey(session, wishes, clock, lambda text: say_progress(text, quiet=as_json))
    texts = {fleet_file: init_files.fleet_text(choice),
             job_file: init_files.job_text(choice, datetime.now().date().isoformat())}  # fmt: skip
    _check_job(texts[job_file], job_file)
    for path, text in texts.items():
        _write(path, text)
    files = [str(path) for path in texts]
    if as_json:
        print(show.as_json(init_files.document(choice, files)))
    else:
        print(init_files.types_table(choice))
        for note in choice.notes:
            say(f"note: {note}")
        if repo == "." and not choosing.is_checkout(directory):
            say('note: this folder is in no git checkout: `git init` and commit, or --repo URL, before you request')
        say(f"wrote {' and '.join(files)}; job.toml says why each choice was made")
    ready = bool(choice.account)
    on = "request" if ready else "validate"
    wants = "" if ready else ", which names what a request wants filled in"
    say(f"next: fleetctl rehearse {fleet_file}, fleetctl {on} {fleet_file}{wants}")


def _words(command: str) -> tuple[str, ...]:
    """The argv list of `--command`. ConfigError for shell syntax: the trainer would get it as text."""
    import re
    import shlex

    from spotheal.agent.protocol.job_values import only_a_shell, shell_sign

    try:
        words = tuple(shlex.split(command))
        tokens = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    except ValueError as fault:
        raise ConfigError(f"--command {command!r}: {fault}", next_step='write --command "python train.py"') from None
    if not words:
        raise ConfigError("--command is empty", next_step='write --command "python train.py"')
    operators = [token for token in tokens if re.fullmatch(r"[();<>|&]+", token)]
    assignments = words[:1] if re.match(r"[A-Za-z_]\w*=", words[0]) else ()
    backticks = ["`" for word in words if "`" in word and not re.search(r"\s", word)]  # a quoted one is a script
    shell = [*operators, *assignments, *backticks, *filter(None, [shell_sign(words)])]
    if shell:
        script = f"sh -c {shlex.quote(command)}"
        # Between double quotes the reader's own shell would act on these.
        quoted = shlex.quote(script) if re.search(r"""['"$`\\!]""", command) else f'"{script}"'
        raise ConfigError(f"--command {only_a_shell(shell[0])}", next_step=f"let a shell run it: --command {quoted}")
    return words


def _refuse_existing(files: list[Path], force: bool) -> None:
    existing = [str(path) for path in files if path.exists()]
    if not existing or force:
        return
    both = len(existing) == len(files)
    kept = "are there already and were kept" if both else "is there already and was kept"
    check = f"`fleetctl validate {existing[0]}` checks them as they are; " if both else ""
    raise Conflict(
        f"{' and '.join(existing)} {kept}; nothing was written",
        next_step=f"{check}`init --force` writes both files again, `--dir NAME` writes them elsewhere",
    )


def _check(wishes: object) -> None:
    """Names and addresses that job.toml would refuse, before anybody is asked."""
    from spotheal.agent.protocol.job import parse_job
    from spotheal.fleet.account.init import Wishes
    from spotheal.fleet.request.repository import check_address

    assert isinstance(wishes, Wishes)
    job = {"name": wishes.name, "repository": wishes.repository, "command": list(wishes.command)}
    parse_job({"job": job}, source="init")
    for note in check_address(wishes.repository):
        say(f"note: {note}")


def _check_job(text: str, path: Path) -> None:
    """Both files must be readable: a fault here is ours."""
    import sys

    from spotheal.agent.protocol.job import parse_job

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    parse_job(tomllib.loads(text), source=str(path))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as fault:
        raise ConfigError(f"{path} cannot be written: {fault}", next_step="--dir names another folder") from None


def _region_or_none(session: object) -> str:
    """Offline the region may be left open."""
    from spotheal.fleet.run.session import Session

    assert isinstance(session, Session)
    try:
        return session.settle_region()
    except (ConfigError, PermissionDenied) as error:
        if "is no AWS region" in str(error):
            raise
        return ""
