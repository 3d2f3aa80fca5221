"""Run a program of the operating system: an argv list, no shell, a time limit, messages in English."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from spotheal.agent.protocol.errors import Fatal, Retryable

# Debian's package, Amazon Linux's package.
_PACKAGES = {
    "lsblk": ("util-linux", "util-linux"),
    "blkid": ("util-linux", "util-linux"),
    "findmnt": ("util-linux", "util-linux"),
    "fsfreeze": ("util-linux", "util-linux"),
    "mount": ("mount", "util-linux"),
    "umount": ("mount", "util-linux"),
    "mkfs.xfs": ("xfsprogs", "xfsprogs"),
    "mkfs.ext4": ("e2fsprogs", "e2fsprogs"),
    "sync": ("coreutils", "coreutils"),
    "shutdown": ("systemd-sysv", "systemd"),
    "mount.nfs4": ("nfs-common", "nfs-utils"),
    "getent": ("libc-bin", "glibc-common"),
    "git": ("git", "git"),
    "nvidia-smi": ("nvidia-driver", "nvidia-release"),
}
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin")  # the PATH of a service may lack some


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What went wrong, in the program's own last words."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit status {self.code}"


class TimedOut(Retryable):
    """A program that had not ended within its limit; it was killed, but may still hang in the kernel."""


def _path_of(program: str) -> str | None:
    folders = [folder for folder in os.environ.get("PATH", "").split(":") if folder.startswith("/")]
    return shutil.which(program, path=":".join([*folders, *SYSTEM_FOLDERS]))  # never from the working directory


def exists(program: str) -> bool:
    return _path_of(program) is not None


def find(program: str) -> str:
    """The path of `program`; Fatal, naming the packages that have it, where there is none."""
    path = _path_of(program)
    if path is None:
        debian, amazon = _PACKAGES.get(program, (program, program))
        raise Fatal(
            f"the program {program} is not on this machine",
            next_step=f"install it: `apt-get install {debian}` on Debian and Ubuntu, `dnf install {amazon}` on Amazon"
            " Linux; or use an AMI that has it",
        )
    return path


def run(argv: Sequence[str], *, seconds_max: float, **environment: str) -> Result:
    """Run `argv` to its end; any exit status is a result.

    The program stands in `/`, not in our working directory, so that it never holds the volume; it has no standard
    input and a session of its own. Raises TimedOut, and Fatal where there is no such program.
    """
    program = subprocess.Popen(
        [find(argv[0]), *argv[1:]],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"LC_ALL": "C"} | environment,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        out, err = program.communicate(timeout=seconds_max)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):  # its session: mount waits for a helper, which would go on
            os.killpg(program.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.communicate(timeout=0.5)  # one that hangs in the kernel stays, but does not take us with it
        raise TimedOut(f"`{' '.join(argv)}` had not ended after {seconds_max:.0f} s") from None
    return Result(program.returncode, out, err)
