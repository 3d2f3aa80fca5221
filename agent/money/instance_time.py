"""What each instance cost, from its launch to its end. Pure; dollars are Decimal.

Instances are charged by the second, at least 60, at the price in effect; AWS charges nothing for a spot instance that
it interrupts before a full hour has passed (Linux; sources: EC2 User Guide "Billing for interrupted Spot Instances",
"How Spot Instances Work").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from spotheal.agent.money.bill_inputs import Event, History, Known, dollars, moment_of, seconds_between, whole

SECONDS_MIN = 60
FREE_SECONDS = 3600
HEARD_SECONDS = 60  # a machine that died without a word lived on for up to a heartbeat after its last one
_INTERRUPTIONS = ("terminate", "stop", "hibernate")
Prices = list[tuple[datetime, Decimal]]  # from when on, dollars an hour


@dataclass(frozen=True)
class Stay:
    """One instance from its launch to its end, by AWS or otherwise.

    `ended_by`: aws, run, shutdown, unknown, or "" while it runs. `dollars` None where no price is known;
    `price_source`: spot, on-demand, at-request, bound (an upper bound) or unknown.
    """

    instance: str
    instance_type: str
    zone: str
    lifecycle: str  # spot or on-demand
    start: datetime
    end: datetime
    ended_by: str
    free: bool
    seconds: int  # that it ran
    dollars: Decimal | None
    price_source: str
    price_now: Decimal | None  # dollars an hour, the last one known
    on_demand: Decimal | None  # what these seconds cost on demand
    root_gib: int | None

    @property
    def runs(self) -> bool:
        return not self.ended_by


def stays(history: History) -> tuple[Stay, ...]:
    """Every instance of the run by its launch, one that was stopped and started again once for each."""
    parts = sorted(_parts(history), key=lambda part: (part.start, part.instance))
    samples = {(part.instance, part.start): _samples(part) for part in parts}
    alike: dict[tuple[str, str, str], list[tuple[datetime, Decimal]]] = {}
    for part in parts:
        alike.setdefault(part.kind, []).extend(samples[part.instance, part.start])
    result = []
    for index, part in enumerate(parts):
        following = next((later.start for later in parts[index + 1 :] if later.start > part.start), None)
        end, ended_by = _end(part, history, following)
        prices, source = _prices(part, samples[part.instance, part.start], alike[part.kind], history)
        result.append(_stay(part, end, ended_by, prices, source, history))
    return tuple(result)


def launch_times(history: History) -> dict[str, datetime]:
    """When each instance was (last) launched."""
    return {part.instance: part.start for part in _parts(history)}


@dataclass(frozen=True)
class _Part:
    """One instance's events between two of its starts."""

    instance: str
    instance_type: str
    zone: str
    lifecycle: str
    start: datetime
    events: tuple[Event, ...]
    last: bool  # nothing later is known of this instance
    interrupted: bool = False  # its launch document says so

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.instance_type, self.zone, self.lifecycle


def _parts(history: History) -> Iterable[_Part]:
    documents = {str(launch.get("instance", "")): launch for launch in history.launches}
    names = dict.fromkeys([str(event.get("instance", "")) for event in history.events] + [*documents, *history.known])
    for name in names:
        if not name.startswith("i-"):
            continue
        events = [event for event in history.events if event.get("instance") == name]
        pieces = _pieces(events) or [[]]
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            part = _part(name, piece, documents.get(name, {}), history.known.get(name, Known()), number == 0, last)
            if part is not None:
                yield part


def _pieces(events: list[Event]) -> list[list[Event]]:
    """Cut where an instance that had been stopped was started again: its boot names another launch."""
    pieces: list[list[Event]] = []
    launched = None
    for event in events:
        named = event.get("launched") if event["event"] == "boot" else None
        if not pieces or (named and launched and named != launched):
            pieces.append([])
        launched = named or launched
        pieces[-1].append(event)
    return pieces


def _part(name: str, events: list[Event], document: Event, instance: Known, first: bool, last: bool) -> _Part | None:
    boot: Event = next((event for event in events if event["event"] == "boot"), {})
    times = [boot.get("launched"), document.get("time") if first else None, *(event.get("time") for event in events)]
    start = next((moment for moment in map(moment_of, times) if moment), None) or instance.launched
    if first and last and instance.launched is not None:
        start = instance.launched
    if start is None:
        return None
    told = next((event["lifecycle"] for event in events if event.get("lifecycle")), None)
    lifecycle = str(told or document.get("lifecycle") or instance.lifecycle or "spot")
    return _Part(
        instance=name,
        instance_type=str(boot.get("instance_type") or document.get("instance_type") or instance.instance_type),
        zone=str(boot.get("zone") or document.get("zone") or instance.zone),
        lifecycle=lifecycle,
        start=start,
        events=tuple(events),
        last=last,
        interrupted=last and (instance.interrupted or document.get("outcome") == "interrupted"),
    )


def _end(part: _Part, history: History, following: datetime | None) -> tuple[datetime, str]:
    """When it ended, and by whom; now and "" where it runs."""
    time, instance = history.now, history.known.get(part.instance, Known())
    closing = [moment_of(event.get("time")) for event in part.events if event["event"] in ("end", "leaving")]
    if closing and closing[-1] is not None and not (part.last and instance.alive):
        return min(closing[-1], time), "run"
    notice = _last_notice(part.events)
    if notice is not None:
        action, ends = notice
        if ends > time and instance.alive is not False:
            return time, ""
        if not (part.last and instance.alive):
            return min(ends, time), "aws" if action in _INTERRUPTIONS else "shutdown"
    if part.last and instance.alive:
        return time, ""
    heard = [moment_of(e.get("heard")) for e in history.events if e.get("predecessor") == part.instance]
    times = [moment_of(event.get("time")) for event in part.events]
    signs = [moment for moment in (*heard, *times, history.heard.get(part.instance)) if moment] or [part.start]
    alive_until = max(signs) + timedelta(seconds=HEARD_SECONDS)
    if part.last and instance.alive is None and following is None and alive_until >= time:
        return time, ""
    if following is None and instance.alive is None and history.ended is None and not part.interrupted:
        return time, ""  # silent, and nothing has taken its place: charged for as long as nobody knows better
    # Without a heartbeat after it only the next launch tells that it was gone.
    until = alive_until if heard or part.instance in history.heard else max(alive_until, following or alive_until)
    return max(part.start, min(until, time)), "aws" if part.interrupted else "unknown"


def _last_notice(events: Iterable[Event]) -> tuple[str, datetime] | None:
    """The action and AWS's moment of a notice that was not withdrawn."""
    notice = None
    for event in events:
        if event["event"] == "notice":
            ends = moment_of(event.get("ends")) or moment_of(event.get("deadline")) or moment_of(event.get("time"))
            notice = None if ends is None else (str(event.get("action", "")), ends)
        elif event["event"] == "interruption-withdrawn":
            notice = None
    return notice


def _samples(part: _Part) -> Prices:
    samples: Prices = []
    for event in part.events:
        if event["event"] == "price":
            moment, price = moment_of(event.get("since") or event.get("time")), dollars(event.get("dollars_per_hour"))
            if moment is not None and price is not None:
                samples.append((max(moment, part.start), price))
    return sorted(samples)


def _prices(part: _Part, own_prices: Prices, alike: Prices, history: History) -> tuple[Prices, str]:
    """The best that is known: its own prices, another's of its kind, the request's, the list's, an upper bound."""
    if part.lifecycle != "spot":
        listed = history.listed.get(part.instance_type)
        if own_prices or listed is not None:
            return own_prices or [(part.start, listed or Decimal(0))], "on-demand"
    elif own_prices:
        return own_prices, "spot"
    elif alike:
        nearest = min(alike, key=lambda sample: abs(sample[0] - part.start))
        return [(part.start, nearest[1])], "spot"
    elif (part.instance_type, part.zone) in history.spot_then:
        return [(part.start, history.spot_then[part.instance_type, part.zone])], "at-request"
    bound = history.maximum or history.listed.get(part.instance_type)
    return ([], "unknown") if bound is None else ([(part.start, bound)], "bound")


def _stay(
    part: _Part, end: datetime, ended_by: str, prices: Prices, source: str, history: History
) -> Stay:
    seconds = seconds_between(part.start, end)
    free = part.lifecycle == "spot" and ended_by == "aws" and seconds < FREE_SECONDS
    charged = 0 if free else max(seconds, SECONDS_MIN)
    listed = history.listed.get(part.instance_type)
    boot: Event = next((event for event in part.events if event["event"] == "boot"), {})
    return Stay(
        instance=part.instance,
        instance_type=part.instance_type,
        zone=part.zone,
        lifecycle=part.lifecycle,
        start=part.start,
        end=end,
        ended_by=ended_by,
        free=free,
        seconds=seconds,
        dollars=Decimal(0) if free else charge(prices, part.start, charged) if prices else None,
        price_source=source,
        price_now=prices[-1][1] if prices else None,
        on_demand=None if listed is None else listed * max(seconds, SECONDS_MIN) / 3600,
        root_gib=whole(boot.get("root_gib")),
    )


def charge(prices: Prices, start: datetime, seconds: int) -> Decimal:
    """Dollars of `seconds` from `start`: each second at the price in effect; before the first one known, at that."""
    total = Decimal(0)
    for number, (since, price) in enumerate(prices):
        begins = 0 if number == 0 else min(seconds, max(0, int((since - start).total_seconds())))
        later = prices[number + 1][0] if number + 1 < len(prices) else None
        ends = seconds if later is None else min(seconds, max(0, int((later - start).total_seconds())))
        total += price * max(0, ends - begins) / 3600
    return total
