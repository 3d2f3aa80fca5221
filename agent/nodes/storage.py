"""Where the work of a run on several machines lies: EFS, mounted, with the job's and the run's folders on it."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace

from spotheal.agent.files.folders import PRIVATE, Folders
from spotheal.agent.life.boot import Boot, RunOver
from spotheal.agent.life.storage import Storage
from spotheal.agent.machine.efs import MOUNT_POINT
from spotheal.agent.nodes.meeting import Meeting
from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Retryable, SetupFailed
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import EfsUrl, Phase
from spotheal.agent.volume.warmup import Warmup

EFS_SECONDS_MAX = 10 * 60.0
_SIOCGIFADDR = 0x8915
_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_EFS = 'fleetctl results create-efs makes a file system; [store] results = "efs://fs-…/folder" in job.toml'


class EfsStorage(Storage):
    """`meeting` is what the trainer's launcher asks where to meet the others. Raises SetupFailed."""

    meeting: Meeting

    def __init__(self, boot: Boot) -> None:
        place = boot.config.job.store.results_place
        if not isinstance(place, EfsUrl):  # refused by `config`, which a newer job.json may not have gone through
            raise SetupFailed("a run on several machines keeps its checkpoints on EFS", next_step=_EFS)
        self._place = place
        super().__init__(boot, _folders(boot, place))
        job = boot.config.job
        self.meeting = Meeting(
            boot.store, boot.cloud, boot.clock, boot.log, boot.here,
            run=boot.config.run, machines=job.machines, wait_seconds=seconds(job.job.nodes_wait),
            on_term=self._on_term,
        )  # fmt: skip

    def _on_term(self, term: int) -> None:
        self._boot.on_term(term)
        self._boot.status.update(phase=Phase.TRAINING, reason="")

    def mount(self, account: Account | None, on_round: Callable[[], None], warmup: Warmup) -> None:
        boot = self._boot
        if not boot.here.address:
            raise SetupFailed("the instance's identity document names no private IPv4 address: the machines of a run"
                              " cannot meet", next_step="launch into a subnet with IPv4 addresses")  # fmt: skip
        boot.status.note(phase=Phase.HEALING)
        self.meeting.note("mounting EFS")
        beats = boot.world.liveness.expect("healing", EFS_SECONDS_MAX)
        try:
            self._make_folders(account)
        finally:
            boot.world.liveness.release("healing")
        beats()

    def _make_folders(self, account: Account | None) -> None:
        efs, name, run = self._boot.efs(self._place), self._boot.config.job.job.name, self._boot.config.run
        try:
            if account is not None:
                self.meeting.note("mounting EFS", uid=account.uid)
                self.meeting.check_user(account.uid)
            efs.folder(name, "datasets", account=account)
            efs.folder(name, run, mode=0o755)  # root's: else a trainer puts links where its folders and our memory are
            for below in ("checkpoints", "keep", "logs", "progress", "working/results"):
                efs.folder(name, run, *below.split("/"), account=account)
            efs.folder(name, run, PRIVATE)
        except Retryable as error:  # tried for minutes: a run that cannot save must not go on, nor cost
            raise RunOver(End(Phase.SETUP_FAILED, str(error))) from error

    def environment(self) -> dict[str, str]:
        """By which network device ranks meet: gloo takes what the host's name resolves to, on Debian the loopback."""
        device = device_of(self._boot.here.address)
        chosen = self._boot.config.job.environment
        return {name: device for name in _NETWORK if device and name not in chosen}

    def watch(self, trained: object) -> None:
        self.meeting.note("preparing")

    def handed_over(self) -> None:
        self.meeting.leave()

    step_aside = handed_over


def _folders(boot: Boot, place: EfsUrl) -> Folders:
    """datasets are the job's, all else the run's."""
    root, config = boot.world.paths.root, boot.config
    of_job = root / MOUNT_POINT / place.folder / config.job.job.name
    run = of_job / config.run
    logs = run / "logs"
    return replace(
        Folders.at(root, config.job.volume.mount),
        clone=run / "working-copy",
        datasets=of_job / "datasets",
        checkpoints=run / "checkpoints",
        results=run / "working" / "results",
        logs=logs,
        keep=run / "keep",
        environments=run / PRIVATE,
        progress=run / "progress" / "progress.json",
        ranks=logs / "ranks" / boot.here.instance,
    )


def device_of(address: str) -> str:
    """The network device that has the IPv4 address, "" where none is known to (not on Linux)."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", os.fsencode(name)[:15]))
            try:
                fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request, True)
            except OSError:
                continue
            if socket.inet_ntoa(request.tobytes()[20:24]) == address:
                return name
    return ""
