"""How every verb of fleetctl prints, asks and fails, and the guard that turns errors into exit codes.

stdout is data, stderr is messages. Only this module and the verbs print, ask or exit.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from spotheal.agent.protocol.errors import ConfigError, ExitCode, SpothealError
from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.terminal.options import wants_json

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

_CONTINUE = ("request", "prepare", "upload")  # a second call of these verbs continues after a Ctrl-C
_READS = ("logs", "ls", "show", "status", "validate")  # `fleetctl logs | head` is complete as far as it was read
Verb = TypeVar("Verb", bound=Callable[..., None])


@dataclass
class Globals:
    """Options given before the verb: `fleetctl --region us-west-2 status`."""

    region: str = ""
    profile: str = ""
    output: str = "table"


GLOBALS = Globals()


def verb(function: Verb) -> Verb:
    """Turn each exception of a verb into a message and the documented exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            _flush()
        except SpothealError as error:
            code = _exit_code(error, str(kwargs.get("profile") or GLOBALS.profile))
            fail(f"fleetctl: {error}", code)
        except (KeyboardInterrupt, EOFError):
            fail(f"fleetctl: interrupted{_advice(function.__name__, kwargs)}", ExitCode.INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if function.__name__ not in _READS:
                _fail_unread(function.__name__)
        except typer.Exit:
            raise
        except OSError as error:
            if not (message := unwritten(error)):
                _unexpected(error)
            fail(message, ExitCode.UNEXPECTED)
        except Exception as error:
            _unexpected(error)

    return guarded  # type: ignore[return-value]


def _flush() -> None:
    """Print the rest; if the reader has gone by now, the work is done all the same."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_unread(name: str) -> None:
    """`fleetctl request 2>&1 | head` ended with 0, and no run was there."""
    with contextlib.suppress(BrokenPipeError):  # standard error may be what was closed
        hint = "; the same command goes on where it was" if name in _CONTINUE else ""
        say(f"fleetctl: stopped before its work was done, because the reader of its output closed it{hint}")
    raise typer.Exit(int(ExitCode.UNEXPECTED))


def _advice(name: str, options: Mapping[str, Any]) -> str:
    """What to type after a Ctrl-C. --new-run, typed again, would ask for one more run."""
    if name not in _CONTINUE:
        return ""
    if options.get("new_run"):
        return "; if `fleetctl status` shows the new run, the same command without --new-run goes on with it"
    return "; the same command goes on where it was"


def _exit_code(error: SpothealError, profile: str) -> ExitCode:
    """The exit code. If the credentials have expired, the next step becomes the command that renews them."""
    if not error.code:
        return error.exit_code
    from spotheal.agent.aws.clients import TO_BE_RENEWED
    from spotheal.fleet.run.session import renewal

    if error.code not in TO_BE_RENEWED:
        return error.exit_code
    error.next_step = renewal(profile)
    return ExitCode.PERMISSION


def open_session(region: str, profile: str) -> Session:
    from spotheal.fleet.run.session import Session

    return Session(region or GLOBALS.region, profile or GLOBALS.profile)


def is_json(output: str) -> bool:
    return wants_json(output or GLOBALS.output)


def ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", next_step="--yes to go ahead")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        say("nothing was done")
        raise typer.Exit(ExitCode.OK)


def say(text: str) -> None:
    """Print to standard error, without control characters: a name from the store must not control the terminal."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def say_progress(text: str, *, quiet: bool) -> None:
    if sys.stderr.isatty() and not quiet:
        say(text)


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether `stream` (standard output) is a terminal that can be drawn on."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def colours(stream: TextIO | None = None) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")  # no-color.org


def width_of(stream: TextIO | None = None) -> int:
    """The terminal's columns; 200 without a terminal, so that lines for other programs are not wrapped."""
    import shutil

    return shutil.get_terminal_size((100, 24)).columns if (stream or sys.stdout).isatty() else 200


def says_ascii(stream: TextIO | None = None) -> bool:
    return "utf" not in str((stream or sys.stdout).encoding or "").lower()


def fail(text: str, code: ExitCode) -> None:
    say(text)
    raise typer.Exit(int(code))


def unwritten(error: OSError) -> str:
    """The message for a full disk (a file, or standard output); "" for any other error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    with contextlib.suppress(OSError, ValueError):  # text that is still in the buffer would be an error at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    target = error.filename or "standard output"
    return f"fleetctl: {target} could not be written: {error.strerror}\n  next: make room there"


def _unexpected(error: Exception) -> None:
    """Print one line that names the file with the traceback, which helps the authors, not the user."""
    import traceback

    if os.environ.get("SPOTHEAL_DEBUG"):
        traceback.print_exc()
        raise typer.Exit(int(ExitCode.UNEXPECTED))
    log = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotheal" / "last-error.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
        hint = f"the details are in {log}"
    except OSError:
        hint = "SPOTHEAL_DEBUG=1 shows the details"
    fail(
        f"fleetctl: unexpected: {type(error).__name__}: {error}\n  next: {hint}; please report it", ExitCode.UNEXPECTED
    )
