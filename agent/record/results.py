"""Where a run's results go: the run's store, another bucket or EFS. Each file appears there whole or not at all.

    <place>/<job>/<run>/model/…, metrics.jsonl            of a job; in the run's own store below `results/`
    <place>/<job>/<run>/<index>/model/…, metrics.jsonl    of the runs of a sweep: all beside each other

The trainer writes to the volume and never waits for the place. Its results are copied when the run ends; its metrics
are there within half a minute, and again as they grow.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from spotheal.agent.aws.s3 import Halt, Store, go_on
from spotheal.agent.files.folders import Folders
from spotheal.agent.machine.efs import Efs, Put
from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import Retryable, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT, EfsUrl, StoreUrl
from spotheal.agent.record.metrics_shipping import Metrics
from spotheal.agent.trainer.ranks import Meeting

LIVE_SECONDS = 30.0
_AGAIN_SECONDS_MAX = 600.0  # of a place that does not take them


class Place(Protocol):
    """`str()` of it names it for people. `is_elsewhere`: `store.results` names it, it is no part of the run's store."""

    is_elsewhere: bool

    def prepare(self) -> None:
        """What can be found wrong before there are results. SpothealError where it is."""
        ...

    def put(self, files: Sequence[tuple[str, Path]], halt: Halt = go_on) -> Iterator[Put]:
        """Copy (name, file) each; ends early, with a `Put` that has `again`, where the place takes none for now, or
        `halt` says why, which is asked while a large file is copied."""
        ...


class InStore:
    """Objects below a prefix of S3: one PUT, or parts that become an object with the last one."""

    def __init__(self, store: Store, prefix: str, is_elsewhere: bool = False) -> None:
        self._store, self._prefix, self.is_elsewhere = store, prefix, is_elsewhere

    def __str__(self) -> str:
        return f"{self._store.url}/{self._prefix}"

    def prepare(self) -> None:
        return None

    def put(self, files: Sequence[tuple[str, Path]], halt: Halt = go_on) -> Iterator[Put]:
        for name, path in files:
            try:
                self._store.put_file(self._prefix + name, path, halt)
                yield Put(path, path.stat().st_size)
            except Retryable as error:
                yield Put(path, fault=error.message, again=True)
                return
            except (SpothealError, OSError) as error:
                yield Put(path, fault=getattr(error, "message", "") or str(error))


class OnEfs:
    """Files in the run's folder on EFS: written beside their place, written out, renamed."""

    is_elsewhere = True

    def __init__(self, efs: Efs, parts: Sequence[str], below: str, account: Callable[[], Account | None]) -> None:
        self._efs, self._parts, self._below, self._account = efs, tuple(parts), below, account

    def __str__(self) -> str:
        return "/".join([str(self._efs.place), *self._parts, self._below]).rstrip("/") + "/"

    def prepare(self) -> None:
        self._folder()

    def put(self, files: Sequence[tuple[str, Path]], halt: Halt = go_on) -> Iterator[Put]:
        if not files:
            return
        try:
            self._folder()
            yield from self._efs.put([*self._parts, self._below], files, halt)
        except Retryable as error:
            yield Put(files[0][1], fault=error.message, again=True)
        except SpothealError as error:
            yield from (Put(path, fault=error.message) for _, path in files)

    def _folder(self) -> None:
        self._efs.folder(*self._parts, account=self._account())


def place_of(
    config: InstanceConfig, s3: Any, efs: Callable[[EfsUrl], Efs], account: Callable[[], Account | None]
) -> Place:
    """Where the results of this run go. `account`: whose the run's folder on EFS is."""
    run = config.sources if config.index is not None and config.sources else config.store
    below = "" if config.index is None else f"{config.index}/"
    place = config.job.store.results_place
    parts = run.prefix.split("/")[-2:]  # job and run
    match place:
        case EfsUrl():
            return OnEfs(efs(place), parts, below, account)
        case StoreUrl():
            return InStore(Store(s3, place.below(*parts)), below, is_elsewhere=True)
    return InStore(Store(s3, run), LAYOUT.results + below)


# ------------------------------------------------------------------------------------------------------- while it runs
class LiveMetrics:
    """The metrics at the place, soon after the trainer wrote them. `scratch`: a file of the agent's own, for the copy
    without secrets that is put there. `meeting`: the machine that leads it speaks for the others."""

    def __init__(
        self, place: Place, folders: Folders, scratch: Path, clock: Clock, log: Any, meeting: Meeting | None = None
    ) -> None:
        self._place, self._folders, self._scratch = place, folders, scratch
        self._clock, self._log, self._meeting = clock, log, meeting
        self._metrics: Metrics | None = None
        self._copying = threading.Lock()
        self._said = ""

    def watch(self, stop: Stop) -> None:
        """Until `stop`. A place that cannot be reached is told once, tried on, and keeps nothing from going on."""
        pause = 0.0
        while not self._clock.sleep(pause, until=stop):
            fault = self._once(stop)
            if fault and fault != self._said:
                self._log.warning("results do not reach their place; they stay on the volume, trying on", error=fault)
            elif self._said and not fault:
                self._log.info("results reach their place again", to=str(self._place))
            self._said = fault
            pause = min(max(pause, LIVE_SECONDS) * 2, _AGAIN_SECONDS_MAX) if fault else LIVE_SECONDS

    def _once(self, stop: Stop) -> str:
        if self._meeting is not None and not self._meeting.leads:
            return ""
        try:
            self._place.prepare()
            if stop.is_set():  # that took long: what lies on the volume may be another run's by now
                return ""
            copy = self.copy()
            for put in list(self._place.put([copy] if copy else [])):
                if put.fault:
                    self._metrics = None
                    return put.fault
        except SpothealError as error:
            return str(error)
        return ""

    def copy(self) -> tuple[str, Path] | None:
        """(name, file) of the metrics as they are now; None where nothing is new."""
        with self._copying:
            return self._copy()

    def _copy(self) -> tuple[str, Path] | None:
        own = self._folders.results / LAYOUT.live_metrics
        source = own if _is_file(own) else self._folders.metrics_file
        if self._metrics is None or self._metrics.file != source:
            self._metrics = Metrics(source)
        if not (body := self._metrics.read()):
            return None
        new_file = self._scratch.with_name(f"{self._scratch.name}.new")  # whoever reads the one before reads on
        try:
            new_file.write_bytes(body)
            os.replace(new_file, self._scratch)
        except OSError as error:
            self._log.warning("the metrics cannot be copied", error=str(error))
            return None
        return LAYOUT.live_metrics, self._scratch

    def last(self) -> list[tuple[str, Path]]:
        """The metrics as they are in the end, for what is stored then; none where the trainer's results have a file of
        that name."""
        self._metrics = None
        copy = None if _is_file(self._folders.results / LAYOUT.live_metrics) else self.copy()
        return [copy] if copy else []


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
