"""An EFS file system on this machine: mounted at one place, found to be that file system, and never waited for long.

NFS mounted `hard` hangs while its server is away, and whoever touches it hangs too. So the agent itself never opens a
path on it: what is done there is done by a program of its own (`efs_files`), which is given up when nothing moves.
Options: EFS User Guide, "Recommended NFS mount options".
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import fspath, killpg, read
from pathlib import Path
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.s3 import Halt, go_on
from spotheal.agent.machine.host import Host
from spotheal.agent.processes import programs
from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import Fatal, NotFound, Retryable, SpothealError
from spotheal.agent.protocol.names import EfsUrl, dns_suffix
from spotheal.agent.protocol.retrying import until_it_works

OPTIONS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport,nosuid,nodev"
MOUNT_POINT = "var/lib/spotheal/shared/efs"  # its parent decides who may pass
MOUNT_SECONDS_MAX = 5 * 60.0  # all tries together
FOLDER_SECONDS_MAX = 60.0
STALLED_SECONDS = 120.0  # a copy of which nothing reached the server for so long is given up
_TRY_SECONDS = 60.0
_PAUSE_SECONDS = 10.0
_MOUNTING = threading.Lock()  # one place on this machine: a second mount would lie over the first
_FILES = Path(__file__).with_name("efs_files.py")


@dataclass(frozen=True)
class Target:
    """A mount target: the file system's address in one zone."""

    id: str
    address: str
    zone: str
    state: str


@dataclass(frozen=True)
class Put:
    """What came of one file. `fault`: why it is not there; `again`: whether another try may help."""

    source: Path
    size: int = 0
    sha256: str = ""
    fault: str = ""
    again: bool = False


class Efs:
    """`client` gives a boto3 client of `efs`; `stop` ends every wait. Again is harmless, also after a restart.

    `for_trainer`: its checkpoints lie there too. Else it gets no way there: it may be a mount that came after its
    sandbox was made, and all trainers of the account have one uid and so each other's results.
    """

    def __init__(
        self,
        place: EfsUrl,
        *,
        region: str,
        zone: str,
        root: Path,
        host: Host,
        client: Callable[[], Any],
        clock: Clock,
        stop: Stop,
        log: Any,
        for_trainer: bool = False,
    ) -> None:
        self.place, self.mount_point = place, root / MOUNT_POINT
        self._parent_mode = 0o755 if for_trainer else 0o700
        self._name = f"{place.file_system}.efs.{region}.{dns_suffix(region)}"
        self._zone, self._host, self._client = zone, host, client
        self._clock, self._stop, self._log = clock, stop, log
        self._writing = threading.Lock()  # live metrics and the results meet here

    # ---------------------------------------------------------------------------------------------------------- mount
    def mount(self, seconds_max: float = MOUNT_SECONDS_MAX) -> Path:
        """The mount point, with this file system there. Tried for `seconds_max`.

        Raises Fatal where trying on cannot help, Retryable after the last try, Interrupted where `stop` is set.
        """
        until = self._clock.monotonic() + seconds_max

        def once() -> Path:
            seconds = until - self._clock.monotonic()
            with _MOUNTING:
                if not self._is_there():
                    self._host.install_nfs_client()
                    self._mount_once(max(5.0, min(_TRY_SECONDS, seconds)))
            return self.mount_point

        return until_it_works(
            once, self._clock, pause=_PAUSE_SECONDS, seconds_max=seconds_max, stop=self._stop,
            log=self._log, line="EFS is not mounted yet; trying on",
        )  # fmt: skip

    def _mount_once(self, seconds_max: float) -> None:
        source, target = self._source()
        self._make_parent()
        try:
            self._host.mount_nfs(source, fspath(self.mount_point), OPTIONS, seconds_max)
        except Retryable as error:
            raise self._refusal(error, source, target) from error
        if not self._is_there():
            raise Retryable(f"{source} was mounted, but something else is at {self.mount_point}")
        self._log.info("mounted EFS", source=source, at=fspath(self.mount_point))

    def _make_parent(self) -> None:
        parent = self.mount_point.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            parent.chmod(self._parent_mode)
        except OSError as fault:
            raise Fatal(f"the mount point's folder {parent} cannot be made: {fault.strerror}") from fault

    def _is_there(self) -> bool:
        """Whether this very file system is mounted; what else is there is taken away, for the place is ours alone."""
        for _ in range(4):
            source = self._host.nfs_source(fspath(self.mount_point))
            if not source:
                return False
            if source in (f"{self._name}:/", *(f"{target.address}:/" for target in self._targets_if_needed(source))):
                return True
            self._log.warning("another file system is at EFS's place; unmounting it", source=source)
            if not self._host.unmount(fspath(self.mount_point), seconds_max=30.0):
                raise Fatal(
                    f"{source} is mounted at {self.mount_point} and busy, not {self.place.file_system}",
                    next_step=f"`umount {self.mount_point}`",
                )
        return False

    def _targets_if_needed(self, source: str) -> tuple[Target, ...]:
        return self._targets() if re.match(r"[\d.]+:/", source) else ()

    def _source(self) -> tuple[str, Target | None]:
        """By its name, which gives the address in this zone; without it (no DNS in the VPC, no target in the zone) by
        the address of a mount target."""
        if self._host.resolves(self._name):
            return f"{self._name}:/", None
        available = [target for target in self._targets() if target.state == "available" and target.address]
        if not available:
            raise Retryable(
                f"{self.place.file_system} has no mount target yet",
                next_step="`fleetctl results create-efs` makes one in each zone of the fleet",
            )
        near = [target for target in available if target.zone == self._zone]
        if not near:
            self._log.warning("EFS has no mount target in this zone; its traffic between zones costs", zone=self._zone)
        target = (near or available)[0]
        return f"{target.address}:/", target

    def _targets(self) -> tuple[Target, ...]:
        name = self.place.file_system
        try:
            with translated(f"describe the mount targets of {name}"):
                answer = self._client().describe_mount_targets(FileSystemId=name)
        except NotFound as error:
            raise Fatal(
                f"there is no file system {name} in this region",
                next_step="`fleetctl results create-efs` makes one; correct `[store] results` in job.toml",
                code=error.code,
            ) from error
        return tuple(
            Target(
                str(item["MountTargetId"]),
                str(item.get("IpAddress") or ""),
                str(item.get("AvailabilityZoneName") or ""),
                str(item["LifeCycleState"]),
            )
            for item in answer.get("MountTargets", [])
        )

    def _refusal(self, error: Retryable, source: str, target: Target | None) -> SpothealError:
        """What mount's words mean here."""
        message, name = error.message, self.place.file_system
        if isinstance(error, programs.TimedOut) or re.search("timed out|refused|No route|unreachable", message):
            by = f" (mount target {target.id})" if target else ""
            return Retryable(
                f"{name} does not answer on port 2049 at {source.partition(':')[0]}{by}: its security group most likely"
                " lets this machine's not in",
                next_step="`fleetctl results create-efs` adds the rule; by hand: `aws ec2"
                " authorize-security-group-ingress --group-id GROUP_OF_THE_MOUNT_TARGET --protocol tcp --port 2049"
                " --source-group GROUP_OF_THE_INSTANCES`",
            )
        if re.search("access denied|not permitted|Permission denied", message, re.IGNORECASE):
            return Fatal(
                f"{name} refuses the mount: {message}",
                next_step="its file system policy must allow ClientMount and ClientWrite without TLS and IAM",
            )
        if re.search("No such device|unknown filesystem type", message):
            return Fatal(f"this machine's kernel has no NFS: {message}", next_step="use an AMI that has it")
        return error

    # ---------------------------------------------------------------------------------------------------------- files
    def folder(self, *parts: str, account: Account | None = None, mode: int = 0o770) -> Path:
        """The folder `<mount>/<the place's folder>/<parts>`, made for the account where it is not there.

        Mounts first where that is not done. Faults as of `mount`; Retryable where the server does not answer.
        """
        top, below = self.mount(), self._below(parts)
        path = top.joinpath(*below)
        owner = (str(account.uid), str(account.gid)) if account is not None else ("-1", "-1")
        argv = [sys.executable, "-I", "-S", fspath(_FILES), "folder", fspath(top), *owner, f"{mode:o}", *below]
        process = programs.run(argv, seconds_max=FOLDER_SECONDS_MAX)
        if process.code != 0:
            text = json.loads(process.out)["text"] if process.out.startswith("{") else process.said
            denied = "denied" in text or "not permitted" in text
            kind: type[SpothealError] = Fatal if denied else Retryable
            raise kind(
                f"the folder {path} on {self.place.file_system} cannot be made: {text}",
                next_step="the file system's policy must allow ClientRootAccess" if denied else "",
            )
        return path

    def _below(self, parts: Sequence[str]) -> list[str]:
        return [word for part in (self.place.folder, *parts) for word in part.split("/") if word]

    def put(
        self, parts: Sequence[str], files: Sequence[tuple[str, Path]], halt: Halt = go_on
    ) -> Iterator[Put]:
        """Copy each (name, file) into the folder `parts`, below which names may have folders of their own. A file
        appears whole or not at all, and no link is followed. Yields as they end.

        Ends before the last with a `Put` that has `again` where the server fills up. Retryable if it falls silent, or
        with what `halt` says, which is asked whenever something reached the server.
        """
        sources = [[fspath(source), name] for name, source in files]
        order = json.dumps({"top": fspath(self.mount()), "folder": self._below(parts), "files": sources})
        argv = [sys.executable, "-I", "-S", fspath(_FILES), "put"]
        with self._writing, contextlib.closing(_spoken(argv, order, STALLED_SECONDS)) as spoken:
            for line in spoken:
                if "done" in line:
                    yield Put(Path(line["done"]), int(line["size"]), str(line["sha256"]))
                elif "failed" in line:
                    yield Put(Path(line["failed"]), fault=str(line["text"]), again=bool(line.get("server")))
                elif reason := halt():
                    raise Retryable(reason)


def _spoken(argv: Sequence[str], order: str, silent_seconds_max: float) -> Generator[Mapping[str, Any], None, None]:
    """The JSON lines of a program that reads `order`; Retryable where it falls silent: then it is killed."""
    program = subprocess.Popen(
        argv, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            program.stdin.write(order.encode())
            program.stdin.close()
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(program.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(silent_seconds_max):
                    raise Retryable(f"EFS has taken nothing for {silent_seconds_max:.0f} s")
                if not (chunk := read(program.stdout.fileno(), 1 << 16)):
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines)
        if program.wait(silent_seconds_max) != 0:
            raise Retryable(f"writing to EFS ended with {program.returncode}: {program.stderr.read()[-200:]!r}")
    finally:
        with contextlib.suppress(OSError):
            killpg(program.pid, signal.SIGKILL)
        for pipe in (program.stdin, program.stdout, program.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(0.5)  # one that hangs in the kernel stays, and does not take us with it
