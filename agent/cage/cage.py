"""The trainer's cage, from the agent's side: who foreign code runs as, what it sees of the machine, and its end.

`cage.mode`: "on": a user of its own in a sandbox (`cage_user`, `cage_sandbox`) with a filter of system calls
(`cage_calls`), and the relay in place of the metadata service (`cage_network`, `relay`). "calls": the same without the
filter. "imds": as "on", with the metadata service as it is, the instance's role included. "off": as `cage.user` where
there is such a user, and nothing around it. Where the machine is not ours (a rehearsal, an agent run by hand below
SPOTHEAL_ROOT) there is no user and no sandbox to make; the relay still stands in for the metadata service, by
AWS_EC2_METADATA_SERVICE_ENDPOINT.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spotheal.agent.aws import imds
from spotheal.agent.cage.imds_proxy import Relay
from spotheal.agent.cage.network import close_imds, is_closed, open_imds, watch_rules
from spotheal.agent.cage.user import cage_account
from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.processes import programs
from spotheal.agent.processes.account import Account, trainer_account
from spotheal.agent.processes.group import end_all_of
from spotheal.agent.processes.sandbox import Sandbox
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import Fatal, Retryable, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig

_GPU_SECONDS_MAX = 60.0
# CUDA makes /dev/nvidia-uvm at its first use, by a set-user-id program; in the cage no program becomes root. The second
# takes seconds, and makes them too where the first is missing.
_MAKE_GPU_DEVICES = (["nvidia-modprobe", "-u", "-c=0"], ["nvidia-smi", "-L"])


@dataclass
class Cage:
    """What `enclose` made. `environment` is for foreign programs; `account` None: they run as ourselves."""

    account: Account | None
    log: Any
    environment: Mapping[str, str] = field(default_factory=dict)
    relay: Relay | None = None
    _redirect: Callable[[], None] | None = None  # as long as there are rules
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def keep_closed(self) -> None:
        """The rules anew, in the place of the old ones: a firewall of the machine's that is loaded again, by an update
        of its package for instance, first takes away all that there are."""
        with self._changing:
            try:
                if self._redirect is not None:
                    self._redirect()
            except SetupFailed as error:
                self.log.error("the trainer's way to the metadata service may be open", error=error.message)

    def watch_rules(self) -> None:
        """Put the rules back as soon as they are gone, until the cage ends: a heartbeat would leave the way open for a
        minute, and credentials are had in a millisecond."""

        def look() -> None:
            if not is_closed() and not self._over.is_set():
                self.keep_closed()
                self.log.warning("the firewall was loaded anew; the way to the metadata service is closed again")

        def watch() -> None:
            try:
                watch_rules(look, self._over)
            except OSError as error:
                self.log.warning("changes of the firewall are seen at the next heartbeat only", error=str(error))

        threading.Thread(target=watch, name="firewall", daemon=True).start()

    def end_processes(self, clock: Clock) -> list[int]:
        """No process of the cage is left, whatever it did to hide; those that cannot be killed are returned."""
        survivors = end_all_of(self.account, clock) if self.account is not None else []
        if survivors:
            self.log.error("processes of the cage cannot be killed", processes=survivors)
        return survivors

    def leave(self, clock: Clock) -> None:
        """End it all. The rules stay as long as a process does."""
        survivors = self.end_processes(clock)
        with self._changing:
            if self._redirect is not None and not survivors:
                self._redirect = None
                self._over.set()
                open_imds(self.log)
        if self.relay is not None:
            self.relay.close()
            self.relay = None


def enclose(
    config: InstanceConfig,
    paths: Paths,
    folders: Folders,
    clock: Clock,
    log: Any,
    *,
    ask: Callable[[str], str | None],
    credentials: Callable[[], str] | None = None,
    endpoint: str = "",
) -> Cage:
    """The cage that `config` asks for. Raises SetupFailed, with the cure, where it cannot be had: never left open.

    `ask`, `credentials`: of the relay. `endpoint`: the metadata service the agent asks, "" for AWS's.
    """
    mode, user = config.job.cage.mode, config.job.cage.user
    whole = paths.is_whole_machine and mode != "off"
    if not whole:
        account = trainer_account(user)
    else:
        _refuse_without_root()
        _make_gpu_devices()
        sandbox = Sandbox(
            writable_folders(config, paths, folders),
            paths.root / "var/lib/spotheal/scratch",
            kept=(str(folders.run_dir),),
            limits_calls=mode != "calls",
            tell=partial(_tell_refusal, log),
        )
        account = cage_account(user, folders.home, sandbox)
        ended = end_all_of(account, clock)  # of an agent that was killed: what it left may not see the next secrets
        if ended:
            log.error("processes of an earlier cage cannot be killed", processes=ended)
        with contextlib.suppress(OSError, Retryable):
            untrusted_folders.remove(sandbox.scratch)  # /tmp of an earlier boot, as systemd empties it
    cage = Cage(account, log)
    relayed = mode in ("on", "calls")
    if relayed:
        cage.relay = Relay(ask, credentials)
        cage.environment = {imds.ENDPOINT: cage.relay.url}
        if whole and account is not None:
            cage._redirect = partial(close_imds, account.uid, cage.relay.port, log, endpoint)
            cage._redirect()
            cage.watch_rules()
    if whole:
        relay_state = "the relay answers for the metadata service" if relayed else "the metadata service is open to it"
        log.info(f"the trainer's cage: {relay_state}", user=user, mode=mode)
    return cage


def writable_folders(config: InstanceConfig, paths: Paths, folders: Folders) -> tuple[Path, ...]:
    """Volume (or the run's folder on EFS, and the job's datasets there), clone, home, and the agent's folder for the
    trainer's progress."""
    places = (paths.mount_point(config.job.volume.mount), folders.checkpoints.parent, folders.datasets, folders.results)
    return (*dict.fromkeys(places), folders.clone, folders.home, folders.run_dir / "trainer")


def _tell_refusal(log: Any, program: str, call: str) -> None:
    log.warning(
        "the cage refused a system call; only the first of each kind is told",
        program=program,
        call=call,
        next_step='where the trainer cannot do without it: `[cage] mode = "calls"`',
    )


def _refuse_without_root() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise SetupFailed(
            "the trainer's cage needs Linux and an agent that runs as root",
            next_step='`[cage] mode = "off"` runs the trainer without a cage; SPOTHEAL_ROOT runs the agent by hand',
        )


def _make_gpu_devices() -> None:
    if not Path("/proc/driver/nvidia").exists():
        return
    for argv in _MAKE_GPU_DEVICES:
        try:
            programs.find(argv[0])
            if programs.run(argv, seconds_max=_GPU_SECONDS_MAX).code == 0:
                return
        except (Fatal, Retryable):
            continue
