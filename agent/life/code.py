"""The run's code at its commit, and the Python that it runs with: fetched while the storage is made ready."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.folders import Folders
from spotheal.agent.life.boot import Boot
from spotheal.agent.life.confinement import Confinement
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.record.run_state import RunMemory
from spotheal.agent.repository.working_copy import Fetched, changed_by_setup, is_on_volume, make_working_copy
from spotheal.agent.trainer.interpreter import Interpreter, find_interpreter
from spotheal.agent.trainer.setup import prepare as run_setup


class Code:
    """`start`, and `prepare` once the storage is mounted. `confinement`: what it all runs in."""

    def __init__(self, boot: Boot, folders: Folders) -> None:
        self._boot, self._folders = boot, folders
        self.confinement = Confinement(
            boot.config, boot.world.paths, folders, boot.here, boot.world.metadata, boot.clock, boot.stop, boot.log,
            boot.client,
        )  # fmt: skip
        self._sources = Store(boot.world.s3, boot.config.sources or boot.config.store)
        self._secrets: Future[str] = Future()
        self._clone: Future[Fetched] = Future()

    def start(self) -> None:
        self.confinement.enter()
        secrets = self._secrets = self._boot.pool.submit(self.confinement.fetch_secrets)
        self._clone = self._boot.pool.submit(lambda: self.confinement.fetch_code(self._sources, secrets.result()))

    def prepare(self) -> Interpreter:
        """The code with what the trainer wrote next to it, its environment, and the kept paths."""
        self._secrets.result()
        copy, interpreter = self._put_code()
        interpreter = self._set_up(interpreter, copy)
        self.confinement.end_processes()  # what `setup` left running would read the trainer's secrets in /proc
        return interpreter

    def _put_code(self) -> tuple[str, Interpreter]:
        """Which copy it is (another one lacks what `setup` wrote into this), and the Python that `setup` begins with.
        """
        fetched = self._fetched()  # first of all: nothing foreign runs while git has the repository's secret
        config, folders, interpreter = self._boot.config, self._folders, self._find_interpreter()
        has_begun = RunMemory.read(folders, config.run).attempt > 0
        surroundings, log = self.confinement.surroundings(), self._boot.log
        python = interpreter.path
        return make_working_copy(
            config, folders, surroundings, python, log, fetched=fetched, began_earlier=has_begun
        ), interpreter

    def _fetched(self) -> Fetched | None:
        """None: the volume has the working copy, so neither the network nor the repository is needed."""
        if not is_on_volume(self._boot.config, self._folders):
            return self._clone.result()
        self._end_fetch()
        return None

    def _end_fetch(self) -> None:
        self.confinement.end_fetch()
        with suppress(SpothealError):
            self._clone.result()

    def _find_interpreter(self) -> Interpreter:
        surroundings = self.confinement.surroundings()
        self._folders.make(surroundings.account)
        return find_interpreter(self._boot.config, self._folders, surroundings, self._boot.log)

    def _set_up(self, interpreter: Interpreter, copy: str) -> Interpreter:
        surroundings, folders = self.confinement.surroundings(), self._folders
        around = changed_by_setup(folders, surroundings, interpreter.path)
        return run_setup(
            self._boot.config, folders, interpreter, surroundings, self._boot.log, copy=copy, around=around
        )
