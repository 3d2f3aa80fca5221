"""What one life of the agent does before anything foreign runs: the cage, the secrets, and the code at its commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotheal.agent.aws.imds import Identity, Metadata
from spotheal.agent.cage.cage import Cage, enclose
from spotheal.agent.cage.secrets import REPOSITORY, Vault
from spotheal.agent.cage.trainer_role import TrainerRole
from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.foreign_command import Surroundings
from spotheal.agent.protocol.clock import AnyOf, Clock, Stop
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.repository.checkout import Download, checkout
from spotheal.agent.repository.working_copy import Fetched, files_of


@dataclass
class Confinement:
    """`client(service)` gives a boto3 client. `enter`, then `fetch_secrets` and `fetch_code` in any thread; `leave` at
    the end, again is harmless."""

    config: InstanceConfig
    paths: Paths
    folders: Folders
    here: Identity
    metadata: Metadata
    clock: Clock
    stop: Stop
    log: Any
    client: Callable[[str], Any]
    _cage: Cage | None = None
    _secrets: dict[str, str] = field(default_factory=dict)
    _enough: threading.Event = field(default_factory=threading.Event)  # the code need not be fetched

    def enter(self) -> None:
        """Make the cage, for a fetch that is to come. Raises SetupFailed if it cannot be had."""
        self._enough.clear()  # not in `fetch_code`: that begins in its thread, maybe after `end_fetch`
        if self._cage is not None:
            return
        policy = self.config.job.cage.trainer_policy
        role = None
        if policy:
            identity = self.here
            job = self.config.job.job.name
            role = TrainerRole(
                self.client("sts"), self.clock, identity.account, identity.region, job, identity.instance, policy
            )
            role.check(self.stop)
        # A client of its own: however the relay is kept busy, the watch for notices does not wait for it.
        asks = Metadata(self.metadata.endpoint, self.clock)
        self._cage = enclose(
            self.config,
            self.paths,
            self.folders,
            self.clock,
            self.log,
            ask=asks.get,
            credentials=None if role is None else role.credentials,
            endpoint=self.metadata.endpoint,
        )

    @property
    def account(self) -> Account | None:
        return None if self._cage is None else self._cage.account

    @property
    def environment(self) -> Mapping[str, str]:
        """For whatever runs in the cage."""
        return {} if self._cage is None else self._cage.environment

    @property
    def trainers(self) -> Mapping[str, str]:
        """For the trainer alone: [secrets] too."""
        return {**self.environment, **self._secrets}

    def surroundings(self) -> Surroundings:
        return Surroundings(self.account, self.clock, self.stop, self.environment)

    def fetch_secrets(self) -> str:
        """The trainer's, kept for `trainers`; returns the repository's. Faults as of `Vault.fetch`."""
        job = self.config.job
        references = dict(job.secrets) | ({REPOSITORY: job.job.repository_secret} if job.job.repository_secret else {})
        fetched = Vault(self.client, self.clock, self.stop, self.log).fetch(references)
        secret = fetched.pop(REPOSITORY, "")
        self._secrets = fetched
        return secret

    def fetch_code(self, store: Download, secret: str) -> Fetched:
        """The code at its commit, on the machine's own disk. Faults as of `checkout`; Interrupted at `end_fetch`."""
        code = checkout(
            self.config,
            self.folders.fetched,
            clock=self.clock,
            log=self.log,
            store=store,
            account=self.account,
            stop=AnyOf(self.stop, self._enough),
            secret=secret,
            private=self.folders.run_dir,
        )
        return Fetched(code, files_of(code) if self.folders.has_working_copy else {})

    def end_fetch(self) -> None:
        """What `fetch_code` would bring is there already."""
        self._enough.set()

    def end_processes(self) -> None:
        """Before the volume is let go: nothing foreign is left."""
        if self._cage is not None:
            self._cage.end_processes(self.clock)

    def keep_closed(self) -> None:
        """With each heartbeat."""
        cage = self._cage
        if cage is not None:
            cage.keep_closed()

    def leave(self) -> None:
        cage, self._cage = self._cage, None
        if cage is not None:
            cage.leave(self.clock)
