"""A machine whose NFS is a folder: what `agent.efs` asks of a host and of the EFS API, answered as by real ones."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aws_calls
from botocore.exceptions import ClientError

from spotheal.agent.machine.efs import Efs
from spotheal.agent.machine.host import Host
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import EfsUrl

FS = "fs-0123456789abcdef0"
NAME = f"{FS}.efs.us-west-2.amazonaws.com"


@dataclass
class NfsHost(Host):
    """`faults` are mount's next words; `export` is what the server has. A mount is a link to it."""

    export: Path
    resolving: bool = True
    faults: list[Retryable] = field(default_factory=list)
    source: str = ""  # what is mounted
    mounts: list[str] = field(default_factory=list)
    client_missing: bool = False

    def resolves(self, name: str) -> bool:
        return self.resolving and name == NAME

    def install_nfs_client(self) -> None:
        self.client_missing = False

    def mount_nfs(self, source: str, mountpoint: str, options: str, seconds_max: float) -> None:
        self.mounts.append(f"{options} {source}")
        if self.client_missing:
            raise Retryable("mounting failed: bad option; you might need a /sbin/mount.<type> helper program")
        if self.faults:
            raise self.faults.pop(0)
        Path(mountpoint).parent.mkdir(parents=True, exist_ok=True)
        Path(mountpoint).symlink_to(self.export)
        self.source = source

    def nfs_source(self, mountpoint: str) -> str:
        return self.source

    def unmount(self, mountpoint: str, seconds_max: float = 1) -> bool:
        Path(mountpoint).unlink()
        self.source = ""
        return True


class EfsApi:
    """DescribeMountTargets of one file system, `targets` as (zone, address)."""

    def __init__(self, *targets: tuple[str, str], missing: bool = False) -> None:
        self.targets, self.missing = targets, missing

    def describe_mount_targets(self, FileSystemId: str) -> dict[str, Any]:
        aws_calls.note_call("efs", "DescribeMountTargets")
        if self.missing or FileSystemId != FS:
            error = {"Code": "FileSystemNotFound", "Message": f"File system '{FileSystemId}' does not exist."}
            raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": 404}}, "DescribeMountTargets")  # type: ignore[typeddict-item]
        return {
            "MountTargets": [
                {
                    "MountTargetId": f"fsmt-{number}",
                    "IpAddress": address,
                    "AvailabilityZoneName": zone,
                    "LifeCycleState": "available",
                }
                for number, (zone, address) in enumerate(self.targets)
            ]
        }


class QuickClock(SystemClock):
    """Pauses pass at once, and count."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.passed

    def sleep(self, seconds: float, until: threading.Event | None = None) -> bool:
        self.passed += seconds
        return until is not None and until.is_set()


class _Log:
    """structlog's manner over logging, so that caplog sees it."""

    def __getattr__(self, level: str) -> Any:
        return lambda text, **fields: getattr(logging.getLogger("efs"), level)("%s %s", text, fields)


def efs(
    root: Path,
    host: Host,
    api: EfsApi,
    folder: str = "",
    stop: threading.Event | None = None,
    for_trainer: bool = False,
) -> Efs:
    return Efs(
        EfsUrl(FS, folder),
        region="us-west-2",
        zone="us-west-2b",
        root=root,
        host=host,
        client=lambda: api,
        clock=QuickClock(),
        stop=stop or threading.Event(),
        log=_Log(),
        for_trainer=for_trainer,
    )
