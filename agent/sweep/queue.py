"""The entries of a sweep as a queue in the store: which one an instance works on next.

`queue/<entry>.<n>` is the n-th claim of an entry, put with `If-None-Match` so that one instance wins it, and
`queue/<entry>.done` or `.failed` says that its run is over, `queue/<entry>.<n>.back` that the n-th claim is given up.
One list call shows all of it. A claim only keeps two workers from starting the same run; what keeps them from writing
to one volume are the terms of that run (`spotheal.agent.volume`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, parse_rfc3339, rfc3339
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import LAYOUT, SILENT_SECONDS, Phase

# An instance that no describe shows is one that AWS has forgotten, or one too young to be seen: only the first counts.
UNSEEN_SECONDS = 900.0
_KEY = re.compile(r"queue/(\d{5})\.(\d{4}|done|failed)(\.back)?")
_GONE = ("shutting-down", "terminated", "stopping", "stopped")


@dataclass(frozen=True)
class Entry:
    """One run of the sweep. `claims`: how often it was taken; `holder` and `since`: of the last claim, whose holder is
    "" where the run was given back: by an instance that handed it over, or an operator (`fleetctl sweep retry`)."""

    index: int
    claims: int = 0
    holder: str = ""
    since: str = ""
    ended: str = ""  # done, or failed for every other end


@dataclass(frozen=True)
class Taken:
    """What an instance is to do: work on `entry`; or nothing, for now (`left` > 0) or for ever (`left` = 0)."""

    entry: int | None
    left: int


def choose(
    entries: Iterable[Entry], instance: str, dead_instances: Collection[str], silent: Collection[int] = ()
) -> list[Entry]:
    """The entries that `here` may take, the best first; pure.

    Its own first (the agent was started again), then those that lost their instance or were given back, so that
    they go on before new ones start, then new ones in the list's order, and last those whose holder lives but has not
    been heard of: healing ends such a holder before it touches the volume.
    """
    free: list[tuple[int, str, Entry]] = []
    for entry in entries:
        if entry.ended:
            continue
        if entry.holder == instance and entry.claims:
            free.append((0, "", entry))
        elif entry.claims and (entry.holder in dead_instances or not entry.holder):
            free.append((1, entry.since, entry))
        elif not entry.claims:
            free.append((2, "", entry))
        elif entry.index in silent:
            free.append((3, entry.since, entry))
    return [entry for _, _, entry in sorted(free, key=lambda each: (each[0], each[1], each[2].index))]


def give_back(store: Store, index: int, instance: str, clock: Clock) -> bool:
    """Leave entry `index`, of the sweep whose prefix `store` is, to whoever looks next; whether it was `here`'s.

    Another may have taken it meanwhile, of an instance that was long silent: its claim stands.
    """
    start = f"{LAYOUT.queue}{index:05d}."
    claims = [key.removeprefix(start) for key in store.keys(start)]
    number = max((int(claim) for claim in claims if claim.isdigit()), default=0)
    if not number or (store.get_json(LAYOUT.queue_claim(index, number)) or {}).get("instance") != instance:
        return False
    store.put_json(LAYOUT.queue_back(index, number), {"time": rfc3339(clock.now())})
    return True


class Queue:
    """The queue of the sweep whose prefix `store` is, as the instance `here` sees it."""

    def __init__(self, store: Store, count: int, instance: str, clock: Clock) -> None:
        """`count`: how many entries the sweep has."""
        self._store, self._count, self._here, self._clock = store, count, instance, clock
        self._holders: dict[tuple[int, int], tuple[str, str]] = {}  # a claim is written once and never changed

    def take(self, cloud: Ec2) -> Taken:
        """The entry that this instance works on now, claimed for it."""
        entries = self.look()
        open_entries = [entry for entry in entries if not entry.ended]
        choices = choose(open_entries, self._here, self._gone(open_entries, cloud))
        if not choices and open_entries:
            choices = choose(open_entries, self._here, (), self._silent(open_entries))
        for entry in choices:
            if (entry.claims and entry.holder == self._here) or self._claim(entry):
                return Taken(entry.index, len(open_entries))
        return Taken(None, len(open_entries))

    def ends(self) -> list[Entry]:
        """As `look`, without who holds those that are not over: no claim is read."""
        return self.look(holders=False)

    def look(self, *, holders: bool = True) -> list[Entry]:
        """All entries, by index. Claims not seen before are read, those of entries that are over never."""
        claims: dict[int, int] = {}
        back: set[tuple[int, int]] = set()
        ended: dict[int, str] = {}
        for key in self._store.keys(LAYOUT.queue):
            match = _KEY.fullmatch(key)
            if match is None:
                continue
            index = int(match.group(1))
            if match.group(3):
                back.add((index, int(match.group(2))))
            elif match.group(2).isdigit():
                claims[index] = max(claims.get(index, 0), int(match.group(2)))
            else:
                ended[index] = match.group(2)
        result = []
        for index in range(self._count):
            number = claims.get(index, 0)
            read = holders and number and index not in ended and (index, number) not in back
            holder, since = self._holder(index, number) if read else ("", "")
            result.append(Entry(index, number, holder, since, ended.get(index, "")))
        return result

    def end(self, index: int, phase: Phase, reason: str) -> None:
        """The run of an entry is over: nobody takes it again."""
        body = {"instance": self._here, "phase": phase.value, "reason": reason, "time": rfc3339(self._clock.now())}
        self._store.put_json(LAYOUT.queue_ended(index, phase is Phase.DONE), body)

    def has_ended(self, index: int) -> bool:
        return any(LAYOUT.queue_ended(index, won) in self._store.keys(f"queue/{index:05d}.") for won in (True, False))

    # ---------------------------------------------------------------------------------------------------------- inside
    def _claim(self, entry: Entry) -> bool:
        number = entry.claims + 1
        ours = {"instance": self._here, "time": rfc3339(self._clock.now())}
        counts = self._store.claim(LAYOUT.queue_claim(entry.index, number), ours, lambda _: False)
        self._holders[entry.index, number] = (str(counts["instance"]), str(counts["time"]))
        return bool(counts["instance"] == self._here)

    def _holder(self, index: int, number: int) -> tuple[str, str]:
        if (index, number) not in self._holders:
            document = self._store.get_json(LAYOUT.queue_claim(index, number))
            if document is None:
                raise Retryable(f"{LAYOUT.queue_claim(index, number)} is listed and cannot be read")
            self._holders[index, number] = (str(document.get("instance")), str(document.get("time")))
        return self._holders[index, number]

    def _gone(self, entries: list[Entry], cloud: Ec2) -> set[str]:
        """Holders that will not go on: ended, ending, or unseen for so long that AWS has forgotten them."""
        holders = {entry.holder: entry.since for entry in entries if entry.holder and entry.holder != self._here}
        states = {instance.id: instance.state for instance in cloud.instances(holders)}
        return {
            holder
            for holder, since in holders.items()
            if states.get(holder, "") in _GONE or (holder not in states and self._age(since) > UNSEEN_SECONDS)
        }

    def _silent(self, entries: list[Entry]) -> set[int]:
        """Entries whose holder has not written its heartbeat: asked for by an instance that has nothing else to do."""
        indices = set()
        for entry in entries:
            if not entry.holder or self._age(entry.since) < SILENT_SECONDS:
                continue
            status = self._store.get_json(f"{LAYOUT.entry(entry.index)}/{LAYOUT.status}") or {}
            if self._age(str(status.get("heartbeat") or entry.since)) > SILENT_SECONDS:
                indices.add(entry.index)
        return indices

    def _age(self, time: str) -> float:
        try:
            return (self._clock.now() - parse_rfc3339(time)).total_seconds()
        except ValueError:
            return 0.0
