"""How the end of a child of an array, and of the whole list, is recorded: as a fleet's sweep does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Halt, Store, go_on
from spotheal.agent.machine.efs import Put
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import Phase
from spotheal.agent.record.results import Place
from spotheal.agent.record.status import Status
from spotheal.agent.sweep.queue import Entry, Queue


class NoFleet:
    """What an end asks of the cloud where there is no fleet and no volume."""

    def tag(self, resources: Iterable[str], tags: Mapping[str, str]) -> None:
        return None

    def fleet_of(self, instance: str) -> str | None:
        return None

    def cancel_fleet(self, fleet: str) -> None:
        return None


class Counted:
    """A place of results that knows how many files it has taken."""

    def __init__(self, place: Place) -> None:
        self._place, self.is_elsewhere, self.taken = place, place.is_elsewhere, 0

    def __str__(self) -> str:
        return str(self._place)

    def prepare(self) -> None:
        self._place.prepare()

    def put(self, files: Sequence[tuple[str, Path]], halt: Halt = go_on) -> Iterator[Put]:
        for file in self._place.put(files, halt):
            self.taken += not (file.fault or file.again)
            yield file


def without_results(end: End, missing: str, attempts: int) -> End:
    """The end of a run of whose results `missing` says why they do not all lie in their place: again and again another
    host would not do better. Where the place has taken none, a --resume has them from the copies in the store."""
    reason = f"{end.reason}; results not stored ({missing})"
    if attempts or end.phase is not Phase.DONE:
        return End(end.phase, reason)
    return End(Phase.FAILED, f"{reason}; `fleetctl batch submit --resume` stores them once that is mended")


def record_end(queue: Queue, index: int, phase: Phase, reason: str) -> None:
    if not queue.has_ended(index):
        queue.end(index, phase, reason)


def end_of_sweep(
    store: Store, entries: list[Entry], clock: Clock, log: Any, config: InstanceConfig, identity: Identity
) -> None:
    """Every run is over. Two children may do it at once: the first end stands, and they are the same."""
    missed = [entry.index for entry in entries if entry.ended != "done"]
    reason = f"{len(entries) - len(missed)} of {len(entries)} runs are done"
    if missed:
        indices = ", ".join(str(index) for index in missed[:10]) + (", …" if len(missed) > 10 else "")
        reason += f"; failed: {indices}"
    status = Status(
        store, clock, log, job=config.job.job.name, run=store.url.prefix.rpartition("/")[2], instance=identity.instance,
        instance_type=identity.instance_type or None, zone=identity.zone or None, revision=config.revision,
    )  # fmt: skip
    phase, reason = status.end(Phase.FAILED if missed else Phase.DONE, reason)
    log.info("the list is over", phase=phase.value, reason=reason)
