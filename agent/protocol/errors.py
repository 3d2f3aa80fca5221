"""Errors as every other module sees them: what failed, whether trying again can help, and what to do next.

`ec2`, `store`, `metadata` and `host` translate what they meet into these; above them no AWS code and no errno is
looked at. A message is one sentence of what failed and why; `next_step` is what a person should do about it.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `fleetctl` (and of `spotheal-agent`, which uses a subset)."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    PERMISSION = 3
    NOT_FOUND = 4
    CAPACITY = 5
    WAIT_TIMED_OUT = 6
    JOB_FAILED = 7
    CONFLICT = 8
    INTERRUPTED = 130


class SpothealError(Exception):
    """Base of all our errors.

    `code` is AWS's error code and `request_id` its request, both empty where AWS was not involved.
    """

    exit_code = ExitCode.UNEXPECTED
    _margin = "  | "  # of later lines: a message may hold a trainer's text, and none may look like our own `next:`

    def __init__(self, message: str, *, next_step: str = "", code: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.code = code
        self.request_id = request_id

    def __str__(self) -> str:
        aws = ", ".join(part for part in (self.code, f"request {self.request_id}" if self.request_id else "") if part)
        text = self._with_margin(self.message) + (f" ({aws})" if aws else "")
        return f"{text}\n  next: {self._with_margin(self.next_step)}" if self.next_step else text

    def _with_margin(self, text: str) -> str:
        first, *lines = text.split("\n")
        return "\n".join([first, *(self._margin + line.removeprefix(self._margin) for line in lines)])


class Retryable(SpothealError):
    """Waiting and asking again may help: throttling, a describe that is stale, a network that is down."""


class CredentialsEnded(Retryable):
    """AWS finds the signature too old: credentials that have ended, or a wrong clock. An instance renews its own
    credentials and sets its clock by itself, so there waiting helps; an operator must do it."""

    exit_code = ExitCode.PERMISSION


class MountRefused(Retryable):
    """The kernel did not mount what is on the device: it may be damaged, or a mkfs that was cut short."""


class Fatal(SpothealError):
    """Asking again gives the same answer: permission, configuration, a limit of the account."""


class ConfigError(Fatal):
    """The configuration is wrong; the message lists all its faults, one a line."""

    exit_code = ExitCode.USAGE
    _margin = ""


class PermissionDenied(Fatal):
    """No credentials, or credentials that are not allowed to do this."""

    exit_code = ExitCode.PERMISSION


class NoCredentials(PermissionDenied):
    """None are to be found. On an instance: the metadata service is down, or there is no instance profile. Never an end
    of a run, for whoever has none cannot cancel the fleet either: once that works again, so does the run."""


class SetupFailed(Fatal):
    """The job cannot be started as it is described: credentials, revision, `setup`, `command`. An end of the run."""


class Interrupted(SpothealError):
    """A stop cut the work short; nothing is wrong with it and it may be begun again."""


class NotFound(SpothealError):
    """The named thing is not there (or not yet: whether to wait is the caller's decision)."""

    exit_code = ExitCode.NOT_FOUND


class Conflict(SpothealError):
    """Somebody else got there first, or the thing exists already with other properties."""

    exit_code = ExitCode.CONFLICT


class CapacityError(SpothealError):
    """No spot capacity, price too low, or a quota."""

    exit_code = ExitCode.CAPACITY


class WaitTimedOut(SpothealError):
    exit_code = ExitCode.WAIT_TIMED_OUT


class JobFailed(SpothealError):
    exit_code = ExitCode.JOB_FAILED
