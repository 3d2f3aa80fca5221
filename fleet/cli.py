"""fleetctl: the program's front door, and its table of verbs.

Only the standard library is imported here: the overall help is printed from the table below, without typer and without
any verb; `program` makes the rest, and each verb's module is imported when it is asked for.

A verb `NAME` is the function `NAME` of `fleet/verbs/NAME.py`, or `app` there where it has verbs of its own; a test
holds each line here equal to the first line of its docstring.
"""

from __future__ import annotations

import os
import sys
from typing import Any

SUMMARY = "Trains on EC2 spot instances, goes on after interruptions, and ends its fleet when the training is done."
EXAMPLE = 'fleetctl init --command "python train.py", fleetctl request --wait; docs/quick-start.md has the whole day'
SECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Start", (
        ("init", "Write spot_fleet_config.json and job.toml for a job, every choice explained."),
        ("validate", "Check both files of a request; calls no AWS."),
        ("request", "Start a job; one that runs already is shown."),
        ("volume", "The volumes of jobs: list, create, adopt, fill, remove."),
        ("iam", "The policies and roles: show, create, delete."),
        ("secret", "Tokens and keys that only the trainer gets: put, ls, rm."),
        ("batch", "Jobs and arrays on AWS Batch: create, image, submit, status, logs, cancel, delete."),
        ("sweep", "Many runs of a job, one for each entry of a list: run, status, report, retry, scale."),
    )),
    ("Look", (
        ("status", "Where a job is: fleet, instances, volumes, progress."),
        ("logs", "What agent and trainer said, on all instances of a run."),
        ("ssh", "A shell on the job's instance, whichever it is now."),
        ("results", "What a run has stored as its results: list it, fetch it; a file system to keep it on."),
        ("report", "Write a page about a run: machines, curves, cost."),
    )),
    ("End", (
        ("cancel", "End a run: its fleet and instances. The volume with the checkpoints stays, and so does the store."),
        ("clean", "Delete what finished jobs have left, on one yes."),
    )),
    ("On this machine", (
        ("rehearse", "Run a job on this machine, interrupted; calls no AWS."),
        ("cloud", "Serve an empty AWS account on this machine; calls no AWS."),
    )),
)  # fmt: skip
VERBS: dict[str, str] = {name: line for _, verbs in SECTIONS for name, line in verbs}
OPTIONS = (
    ("--region NAME", "AWS region; else AWS_REGION, AWS_DEFAULT_REGION, job.toml, the profile."),
    ("--profile NAME", "AWS profile; else AWS_PROFILE."),
    ("--output table|json", "JSON goes to stdout alone."),
    ("--version", "Print the version."),
    ("--install-completion", "Install completion for the current shell."),
    ("--show-completion", "Show completion for the current shell, to copy it or customize the installation."),
    ("-h, --help", "Show this message and exit."),
)


def main() -> None:
    """The console script `fleetctl`."""
    if "_FLEETCTL_COMPLETE" not in os.environ and sys.argv[1:] in ([], ["--help"], ["-h"]):
        try:
            print(help_text(), flush=True)
        except OSError as error:  # `fleetctl | head -1`, a full disk
            os._exit(0 if isinstance(error, BrokenPipeError) else 1)  # else its end writes once more, and says so
        return
    if sys.stdout is None:  # `fleetctl … >&-`: nowhere to print is no reason to fail
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        from spotheal.fleet.program import run
    except KeyboardInterrupt:  # while typer is imported; behind it `run` sees to it
        print("fleetctl: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


def help_text() -> str:
    """The overall help: what `fleetctl`, `fleetctl -h` and `fleetctl --help` print."""
    width = max(len(name) for name in VERBS) + 2
    lines = ["Usage: fleetctl [OPTIONS] COMMAND [ARGS]...", "", f"  {SUMMARY}"]
    for section, verbs in SECTIONS:
        lines += ["", f"{section}:", *(f"  {name.ljust(width)}{line}" for name, line in verbs)]
    wide = max(len(option) for option, _ in OPTIONS) + 2
    lines += ["", "Options:", *(f"  {option.ljust(wide)}{says}" for option, says in OPTIONS)]
    lines += ["", "`fleetctl COMMAND --help` shows a command's options and an example.", f"Example: {EXAMPLE}"]
    return "\n".join(lines)


def __getattr__(name: str) -> Any:
    """`app`, the typer application, made when it is first asked for."""
    if name == "app":
        from spotheal.fleet.program import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
