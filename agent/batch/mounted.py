"""EFS in a container: the job definition has mounted it, and everything that must outlive the host lies on it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import PRIVATE, Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.machine.efs import MOUNT_SECONDS_MAX, Efs
from spotheal.agent.machine.host import Host
from spotheal.agent.protocol.clock import Clock, never
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import EfsUrl


class MountedEfs(Efs):
    """Nothing is mounted here; the mount point is Docker's."""

    def mount(self, seconds_max: float = MOUNT_SECONDS_MAX) -> Path:
        return self.mount_point


def mounted(config: InstanceConfig, at: str, clock: Clock, log: Any) -> Efs | None:
    """The file system at `at`; None where the job uses none. SetupFailed where it should be there and is not."""
    url = config.job.store.results_place
    if not isinstance(url, EfsUrl):
        return None
    if not at or not os.path.isdir(at):
        raise SetupFailed(
            f"{url.file_system} is not mounted in this container",
            next_step="`fleetctl batch create` writes the job definition that mounts it",
        )

    def no_client() -> Any:
        raise SetupFailed("a container mounts nothing")

    efs = MountedEfs(
        url, region=config.region, zone="", root=Path(at), host=Host(), client=no_client, clock=clock, stop=never(),
        log=log,
    )  # fmt: skip
    efs.mount_point = Path(at)
    return efs


def folders_of(config: InstanceConfig, paths: Paths, efs: Efs | None) -> Folders:
    """As on an instance, but the trainer runs in the clone itself. On EFS lie checkpoints, kept paths, metrics and the
    run's memory, beside each other's runs."""
    folders = Folders.at(paths.root, config.job.volume.mount)
    folders = replace(folders, clone=folders.fetched)
    if efs is None:
        return folders
    run = config.sources if config.index is not None and config.sources else config.store
    parts = [*run.prefix.split("/")[-2:], "state", *([] if config.index is None else [str(config.index)])]
    top = efs.mount().joinpath(efs.place.folder, *parts)
    return replace(
        folders, checkpoints=top / "checkpoints", keep=top / "keep", results=top / "results", logs=top / "logs",
        environments=top / PRIVATE,
    )  # fmt: skip
