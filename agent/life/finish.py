"""How an end is carried out. Cancelling ends this very instance, so everything that must survive is stored before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from spotheal.agent.aws.s3 import Halt, Store
from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import is_foreign_link
from spotheal.agent.life.world import World
from spotheal.agent.machine.efs import Put
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.ends import (
    NOT_STORED,
    End,
)
from spotheal.agent.protocol.errors import Interrupted, Retryable, SpothealError
from spotheal.agent.protocol.names import LAYOUT, TAG_REASON, TAG_SAVED_STEP, TAG_STATE, Phase, VolumeState
from spotheal.agent.protocol.redaction import redacted
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.results import InStore, Place
from spotheal.agent.record.status import Status
from spotheal.agent.trainer.progress_files import shown

RESULTS_SECONDS_MAX = 15 * 60.0
RECORD_SECONDS_MAX = 5 * 60.0
POWER_OFF_SECONDS = 5 * 60.0
_RETRY_SECONDS = 5.0
_TAG_VALUE_MAX = 256
_SHOWN = 80  # characters of a path


# ------------------------------------------------------------------------------------------------------- carrying out
class Cloud(Protocol):
    """What of `ec2.Ec2` an end needs."""

    def tag(self, resources: Iterable[str], tags: Mapping[str, str]) -> None: ...

    def fleet_of(self, instance: str) -> str | None: ...

    def cancel_fleet(self, fleet: str) -> None: ...


@dataclass(frozen=True)
class Finishing:
    """What an end works on. `results` is None where the volume was never mounted."""

    store: Store
    cloud: Cloud
    clock: Clock
    ledger: Ledger
    status: Status
    log: Any
    instance: str
    volume: str | None
    results: Path | None
    saved_step: int | None = None
    results_to: Place | None = None  # else `results/` of the run's own store
    results_too: Sequence[tuple[str, Path]] = ()  # (name, file) beside what is in the folder
    limit: Callable[[], tuple[str, float]] = lambda: ("", RESULTS_SECONDS_MAX)  # `Limits.look`


def store_results(work: Finishing, stop: Stop) -> str:
    """Copy the results to their place; returns "" or why not all of it is there. Given up after
    `RESULTS_SECONDS_MAX` without a stored file; past them also if a limit of the job is reached.

    A file that cannot be stored at all (its name, its permissions) is named, and keeps no other from its place.
    """
    if work.results is None or not work.results.is_dir():
        return ""
    if is_foreign_link(work.results):  # what it names may be all of the machine
        return f"{work.results} is a link that a trainer made, to {os.readlink(work.results)!r}"
    top, missed = work.results.resolve(), list[str]()
    found = sorted(name for name, _ in untrusted_folders.files(top, missed=missed.append))
    extra_files = [(name, path.parent.resolve() / path.name) for name, path in work.results_too]
    files = [*((name, top / name) for name in found), *extra_files]
    place = work.results_to or InStore(work.store, LAYOUT.results)
    names = {path: name for name, path in files}
    halt, progress_at = _Halt(work, stop), work.clock.monotonic()
    stored: dict[Path, Put] = {}
    hopeless = {path: reason for _, path in files if (reason := _holes(path))}
    while True:
        count = len(stored)
        missing = [(name, path) for name, path in files if path not in stored and path not in hopeless]
        passing = _put(place, missing, stored, hopeless, halt)
        if len(stored) > count:
            progress_at = work.clock.monotonic()
        if not passing:
            passing = _list(work, place, [(names[path], put) for path, put in stored.items()])
        if not passing:
            break
        work.log.warning("results are not stored yet; trying again", error=passing, stored=len(stored), of=len(files))
        late = work.clock.monotonic() - progress_at > RESULTS_SECONDS_MAX
        if late or halt() or work.clock.sleep(_RETRY_SECONDS, until=stop):
            return passing
    work.log.info("stored the results", files=len(stored), to=str(place))
    if missed:
        return f"{shown(missed[0][:_SHOWN])!r} lies too deep, or holds more files than can be listed"
    if not hopeless:
        return ""
    path, reason = next(iter(hopeless.items()))
    rest = f" and {len(hopeless) - 1} more" if len(hopeless) > 1 else ""
    name = names[path].encode("utf-8", "backslashreplace").decode()
    return f"{name}{rest}: {reason}"


class _Halt:
    """Why no further results are copied, or "". A run that ended at its limit has `RESULTS_SECONDS_MAX` for them."""

    def __init__(self, work: Finishing, stop: Stop) -> None:
        self._work, self._stop = work, stop
        self._look_at = work.clock.monotonic() + RESULTS_SECONDS_MAX
        self._reached = ""

    def __call__(self) -> str:
        if self._stop.is_set():
            return "this machine goes away"
        if not self._reached and self._work.clock.monotonic() >= self._look_at:
            self._reached, pause = self._work.limit()
            self._look_at = self._work.clock.monotonic() + pause
        return self._reached


def _holes(path: Path) -> str:
    try:
        return untrusted_folders.holes(os.lstat(path))
    except OSError:
        return ""


def _put(
    place: Place, files: Sequence[tuple[str, Path]], stored: dict[Path, Put], hopeless: dict[Path, str], halt: Halt
) -> str:
    """One round; returns why it is worth another, or ""."""
    for count, put in enumerate(place.put(files, halt), 1):
        if put.again:
            return put.fault
        if put.fault:
            hopeless[put.source] = put.fault
        else:
            stored[put.source] = put
        if count < len(files) and (reason := halt()):
            return reason
    return ""


def _list(work: Finishing, place: Place, stored: Sequence[tuple[str, Put]]) -> str:
    """Results that lie elsewhere are listed in the run's store, which an operator can always read."""
    if not place.is_elsewhere or not stored:
        return ""
    files = [{"name": name, "size": put.size, **({"sha256": put.sha256} if put.sha256 else {})} for name, put in stored]
    try:
        work.store.put_json(LAYOUT.results_listing, {"place": str(place), "files": files})
    except Retryable as error:
        return error.message
    except SpothealError as error:
        work.log.warning("what is stored is not listed in the store", error=error.message)
    return ""


def record(work: Finishing, end: End, missing: str = "") -> End:
    """Write the end to store and tags. `missing`, of `store_results`, says why results are not stored."""
    if missing:
        end = replace(end, reason=f"{end.reason}; {NOT_STORED} ({missing}), they are kept on {work.volume}")
    end = replace(end, reason=redacted(end.reason))  # it goes to people, tags and the store
    work.ledger.add("end", phase=end.phase.value, reason=end.reason, saved_step=work.saved_step)
    end = _store_end(work, end)
    _tag(work, end, results_stored=not missing)
    return end


def _store_end(work: Finishing, end: End) -> End:
    """Tried for `RECORD_SECONDS_MAX`: a store that cannot be written must not keep a fleet alive."""
    try:
        return until_it_works(
            lambda: End(*work.status.end(phase=end.phase, reason=end.reason)), work.clock, passes=SpothealError,
            pause=_RETRY_SECONDS, seconds_max=RECORD_SECONDS_MAX, log=work.log, line="the end is not stored yet",
        )  # fmt: skip
    except SpothealError as error:
        work.log.error("the end is not stored", phase=end.phase.value, reason=end.reason, error=str(error))
        return end


def _tag(work: Finishing, end: End, results_stored: bool) -> None:
    if work.volume is None:
        return
    tags = {TAG_REASON: f"{end.phase.value}: {end.reason}"[:_TAG_VALUE_MAX]}
    if work.saved_step is not None:
        tags[TAG_SAVED_STEP] = str(work.saved_step)
    if end.phase is Phase.DONE and results_stored:
        tags[TAG_STATE] = VolumeState.DONE.value  # every other end leaves the volume as it is, for --resume
    try:
        work.cloud.tag([work.volume], tags)
    except SpothealError as error:  # the store has the reason; a tag must not keep a fleet alive
        work.log.warning("the volume could not be tagged with the reason", error=error.message)


def find_fleet(work: Finishing) -> str | None:
    """The fleet that keeps this instance: AWS's tag on the instance, else what `request` wrote. Never another's."""
    fleet = work.cloud.fleet_of(work.instance)
    if fleet:
        return fleet
    document = work.store.get_json(LAYOUT.fleet_document) or {}
    return str(document["fleet_id"]) if document.get("fleet_id") else None


def end_fleet(work: Finishing, world: World, stop: Stop) -> None:
    """Cancel the fleet, and with it this instance."""
    if cancel(work, stop):
        # The fleet ends this instance. What is still there in five minutes costs money for nothing.
        world.clock.sleep(POWER_OFF_SECONDS, until=world.asked_to_stop)
    world.power_off()


def cancel(work: Finishing, stop: Stop) -> bool:
    """Cancel the fleet, trying until it is done or `stop` is set; False where there is no fleet to cancel."""

    def once() -> bool:
        fleet = find_fleet(work)
        if fleet is None:
            work.log.warning("this instance belongs to no fleet; nothing to cancel")
            return False
        work.log.info("cancelling the fleet", fleet=fleet)
        work.cloud.cancel_fleet(fleet)
        return True

    try:
        # Also if that is not allowed, or AWS does not know the fleet (any more). Trying on costs nothing, giving up may
        # cost the price of a GPU until the fleet's own expiry.
        return until_it_works(
            once, work.clock, pause=_RETRY_SECONDS, passes=SpothealError, stop=stop,
            log=work.log, line="the fleet is not cancelled yet; trying again",
        )  # fmt: skip
    except Interrupted:
        return False
