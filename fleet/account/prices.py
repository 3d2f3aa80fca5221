"""Current prices of instances: the spot market's history and the price list. A request goes on without either."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import PermissionDenied, SpothealError
from spotheal.fleet.files import values
from spotheal.fleet.run.session import Session

_PRICE_LIST_SECONDS_MAX = 8.0
_SENSELESS = 10  # times the on-demand price; spot never costs more than on demand


def spot_prices(session: Session, types: tuple[str, ...], zones: tuple[str, ...], clock: Clock) -> tuple[Price, ...]:
    """Current spot prices by type and zone, with those on demand. They are shown, and choose the volume's zone; a
    request goes on without them."""
    prices = spot_prices_only(session, types, zones, clock)
    on_demand = on_demand_prices(session, sorted({name for name, _ in prices}))
    return tuple(Price(name, zone, spot, on_demand.get(name)) for (name, zone), spot in sorted(prices.items()))


def spot_prices_only(
    session: Session, types: tuple[str, ...], zones: tuple[str, ...], clock: Clock
) -> dict[tuple[str, str], float]:
    """Dollars an hour by type and zone; {} if EC2 does not answer."""
    if not types:
        return {}
    prices: dict[tuple[str, str], float] = {}
    try:
        with translated("read spot prices"):
            pages = (
                session.client("ec2")
                .get_paginator("describe_spot_price_history")
                .paginate(
                    InstanceTypes=list(types),
                    ProductDescriptions=["Linux/UNIX"],
                    StartTime=clock.now(),
                    Filters=[{"Name": "availability-zone", "Values": list(zones)}],
                )
            )
            for page in pages:
                for item in page.get("SpotPriceHistory", []):
                    prices.setdefault((item["InstanceType"], item["AvailabilityZone"]), float(item["SpotPrice"]))
    except PermissionDenied:
        raise
    except SpothealError:
        return {}
    return {place: price for place, price in prices.items() if place[0] in types and place[1] in zones}


def on_demand_prices(session: Session, types: list[str]) -> dict[str, float]:
    """On-demand prices, as far as the price list answers in time: they are only shown, so they are not waited for."""
    prices: dict[str, float] = {}
    client = session.client("pricing", "us-east-1")  # its API is in few regions

    def ask() -> None:
        for name in types:
            price = _listed_price(client, name, session.region)
            if price is None:
                return
            prices[name] = price

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PRICE_LIST_SECONDS_MAX)
    return dict(prices)


def _listed_price(client: Any, instance_type: str, region: str) -> float | None:
    attributes = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in attributes.items()]
    try:
        with translated("read on-demand prices"):
            answer = client.get_products(ServiceCode="AmazonEC2", MaxResults=1, Filters=filters)
        terms = json.loads(answer["PriceList"][0])["terms"]["OnDemand"]
        dimensions = next(iter(terms.values()))["priceDimensions"]
        return float(next(iter(dimensions.values()))["pricePerUnit"]["USD"])
    except (SpothealError, LookupError, ValueError, StopIteration):
        return None


def price_notes(document: dict[str, Any], prices: tuple[Price, ...]) -> list[str]:
    """Notes on each SpotPrice of the fleet's file that is too low, or senselessly high, at today's prices."""
    notes = []
    lowest = min((price.spot for price in prices), default=None)
    listed = max((price.on_demand for price in prices if price.on_demand), default=None)
    for path, text in values.prices(document):
        limit = values.dollars(text)
        if limit is not None and lowest is not None and limit < lowest:
            notes.append(f"{path} {text} is below the lowest price now (${lowest:.4f}): the fleet will wait")
        elif limit is not None and listed is not None and limit > _SENSELESS * listed:
            notes.append(f"{path} {text} is more than {_SENSELESS} times the price on demand (${listed:.4f})")
    return notes


@dataclass(frozen=True)
class Price:
    """Dollars an hour; None if AWS was not asked or did not say."""

    instance_type: str
    zone: str
    spot: float
    on_demand: float | None
