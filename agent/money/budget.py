"""What this instance costs an hour, and what the run has spent of `limits.dollars`.

The price is noted in the ledger, so that the receipt and every later instance count with it. The budget counts all that
the receipt counts, since the run was requested (a --resume has the whole of it again). A price that nobody knows is
taken for the fleet's maximum, else on-demand, else `ASSUMED_DOLLARS_PER_HOUR`: a limit never waits for knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol

from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.money.bill_inputs import Disk, History, Known, Listed, moment_of
from spotheal.agent.money.billing import Bill, bill
from spotheal.agent.protocol.clock import Clock, Stop, rfc3339
from spotheal.agent.protocol.errors import PermissionDenied, SpothealError
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.record.ledger import Ledger

PRICE_SECONDS = 3600.0  # how often the price is looked at again
PRICE_RETRY_SECONDS = 300.0
WARN_SHARE = Decimal("0.8")
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 10.0, 900.0
ASSUMED_DOLLARS_PER_HOUR = Decimal(100)  # more than any instance but the largest costs


class Cloud(Protocol):
    """What of `ec2.Ec2` a price needs."""

    def spot_prices(self, instance_type: str, zone: str, since: datetime) -> list[tuple[datetime, str]]: ...


class Source(Protocol):
    """What of `metadata.Metadata` a price needs."""

    def lifecycle(self) -> str: ...


@dataclass
class Prices:
    """Notes what this instance costs an hour in the ledger, whenever that changes."""

    cloud: Cloud
    metadata: Source
    store: Store
    ledger: Ledger
    here: Identity
    clock: Clock
    log: Any
    _lifecycle: str = ""
    _since: datetime | None = None  # up to where the history is known
    _last: str = ""
    _said: str = ""

    def watch(self, stop: Stop) -> None:
        """The thread: until `stop`."""
        while True:
            pause = PRICE_SECONDS if self.look() else PRICE_RETRY_SECONDS
            if self.clock.sleep(pause, until=stop):
                return

    def look(self) -> bool:
        """Ask once; whether the price is known now."""
        time = self.clock.now()
        self._lifecycle = self._lifecycle or self.metadata.lifecycle()
        try:
            if self._lifecycle == "on-demand":
                return self._note_on_demand()
            prices = self.cloud.spot_prices(
                self.here.instance_type, self.here.zone, self._since or self._launched(time)
            )
        except SpothealError as error:
            self._say(f"the price of this instance is not known: {error.message}", error)
            return False
        for since, price in prices:
            if price != self._last and (self._since is None or since > self._since or not self._last):
                self._note(price, since)
        if prices:
            self._since = time
        return bool(self._last)

    def _note_on_demand(self) -> bool:
        if not self._last:
            listed = Listed.of(self.store.get_json(LAYOUT.fleet_document) or {})
            price = listed.on_demand.get(self.here.instance_type)
            if price is None:
                text = "this on-demand instance's list price was not known when the run was requested"
                if self._said != text:
                    self.ledger.note("price", dollars_per_hour=None, lifecycle=self._lifecycle)
                self._say(text)
                return False
            self._note(str(price), self._launched(self.clock.now()))
        return True

    def _note(self, price: str, since: datetime) -> None:
        self._last = price
        self.ledger.note("price", dollars_per_hour=price, since=rfc3339(since), lifecycle=self._lifecycle or None)
        self.log.info("this instance costs", dollars_per_hour=price, lifecycle=self._lifecycle or "unknown")

    def _launched(self, time: datetime) -> datetime:
        return moment_of(self.here.launched) or time

    def _say(self, text: str, error: SpothealError | None = None) -> None:
        """Once for each cause: it is asked again every few minutes."""
        if text == self._said:
            return
        self._said = text
        denied = isinstance(error, PermissionDenied)
        cure = "allow ec2:DescribeSpotPriceHistory (docs/permissions.md)" if denied else None
        self.log.warning(text, next=cure)


@dataclass
class Budget:
    """Counts what the run has spent since `requested_at`; `limit` in dollars."""

    limit: Decimal
    store: Store
    ledger: Ledger
    here: Identity
    clock: Clock
    log: Any
    requested_at: str
    disk: Disk = field(default_factory=lambda: Disk(0, "gp3"))
    others: Callable[[], Mapping[str, Known]] = dict  # machines of the run that live beside this one, or have gone
    _listed: Listed | None = None
    _told: str = ""

    def spent(self) -> tuple[Decimal, Decimal]:
        """Dollars so far, and dollars an hour now. Raises SpothealError where the store cannot be read."""
        if self._listed is None:
            self._listed = Listed.of(self.store.get_json(LAYOUT.fleet_document) or {})
        listed = self._listed
        time = self.clock.now()
        # A price that was read when the run was requested is no bound, so it is left out here.
        history = History(
            events=self.ledger.events(),
            now=time,
            requested_at=moment_of(self.requested_at),
            listed=listed.on_demand,
            maximum=listed.maximum,
            known={**self.others(), self.here.instance: self._own(time)},
            disk=self.disk,
        )
        total = bill(history, since=moment_of(self.requested_at))
        self._tell_source(total)
        assumed = [stay for stay in total.stays if stay.dollars is None]
        hours = sum((Decimal(stay.seconds) for stay in assumed), Decimal(0)) / 3600
        living = sum(1 for stay in assumed if stay.runs)
        rate = total.rate + ASSUMED_DOLLARS_PER_HOUR * living
        return sum(total.exact.values(), hours * ASSUMED_DOLLARS_PER_HOUR), rate

    def _own(self, time: datetime) -> Known:
        launched = moment_of(self.here.launched)
        return Known(launched, alive=True, instance_type=self.here.instance_type, zone=self.here.zone)

    def _tell_source(self, bill: Bill) -> None:
        stay_here = next((stay for stay in reversed(bill.stays) if stay.instance == self.here.instance), None)
        if stay_here is None or stay_here.price_source == self._told:
            return
        self._told = stay_here.price_source
        price = stay_here.price_now or ASSUMED_DOLLARS_PER_HOUR
        text = {
            "spot": "its spot price",
            "on-demand": "its list price",
            "bound": "an upper bound, for its price is not known: the fleet's maximum, or on-demand",
        }.get(stay_here.price_source, "assumed, for neither its price nor any bound of it is known")
        log = self.log.info if stay_here.price_source in ("spot", "on-demand") else self.log.warning
        log("limits.dollars counts this instance at", dollars_per_hour=str(price), why=text, limit=str(self.limit))

    def reason(self, spent: Decimal) -> str:
        return f"limits.dollars = {self.limit:f} is reached: about ${spent:.2f} since the request"

    def pause(self, spent: Decimal, rate: Decimal) -> float:
        """Seconds until the next threshold can be reached at this rate, within bounds."""
        marks = [mark for mark in (self.limit * WARN_SHARE, self.limit) if mark > spent]
        if not marks or rate <= 0:
            return LOOK_SECONDS_MIN if not marks else LOOK_SECONDS_MAX
        return min(LOOK_SECONDS_MAX, max(LOOK_SECONDS_MIN, float((marks[0] - spent) / rate * 3600)))

