"""The two AWS interfaces that keep a fleet's capacity, Spot Fleet and EC2 Fleet, behind one interface.

A fleet's id says which it is: `sfr-…` or `fleet-…`. States and events of both have Spot Fleet's names here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import Conflict, NotFound, PermissionDenied
from spotheal.agent.protocol.names import TAG_JOB, TAG_RUN

LIVE_STATES = ("submitted", "active", "modifying")
_OTHER_ENGINE = 'your organisation forbids spot fleets; write `engine = "ec2-fleet"` under [fleet] in job.toml'
_EC2_FLEET_STATES = {
    "deleted": "cancelled",
    "deleted_running": "cancelled_running",
    "deleted_terminating": "cancelled_terminating",
}
_EC2_FLEET_EVENTS = {
    "fleet-change": "fleetRequestChange",
    "instance-change": "instanceChange",
    "service-error": "error",
}


@dataclass(frozen=True)
class Fleet:
    """`state`: submitted, active, modifying, cancelled_running, cancelled_terminating, cancelled or failed."""

    id: str
    state: str
    activity: str  # error, pending_fulfillment, pending_termination, fulfilled; "" if AWS names none
    tags: Mapping[str, str]
    target: int
    on_demand: int
    valid_until: datetime | None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES


@dataclass(frozen=True)
class FleetEvent:
    """`kind`: fleetRequestChange, instanceChange, error or information; `subtype` is AWS's EventSubType."""

    time: datetime
    kind: str
    subtype: str
    description: str
    instance: str


def is_ec2_fleet(fleet: str) -> bool:
    return fleet.startswith("fleet-")


def is_ec2_fleet_request(arguments: Mapping[str, Any]) -> bool:
    """Whether these are CreateFleet's arguments, not RequestSpotFleet's."""
    return "SpotFleetRequestConfig" not in arguments


def send(ec2: Any, arguments: Mapping[str, Any]) -> str:
    """Request the fleet; returns its id. A second call with the same ClientToken returns the same fleet."""
    if is_ec2_fleet_request(arguments):
        with translated("create the EC2 fleet"):
            return str(ec2.create_fleet(**arguments)["FleetId"])
    try:
        with translated("request the spot fleet"):
            return str(ec2.request_spot_fleet(**arguments)["SpotFleetRequestId"])
    except PermissionDenied as error:
        if "service control policy" in error.message:  # Control Tower's CT.EC2.PV.6 is one
            error.next_step = f"{_OTHER_ENGINE}; or {error.next_step}"
        raise


def describe(ec2: Any, fleet: str) -> Fleet | None:
    """One call, by id. None if AWS no longer knows the fleet (48 hours after its end)."""
    try:
        with translated(f"describe {fleet}"):
            if is_ec2_fleet(fleet):
                fleets = ec2.describe_fleets(FleetIds=[fleet]).get("Fleets", [])
                return _of_ec2_fleet(fleets[0]) if fleets else None
            fleets = ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[fleet]).get("SpotFleetRequestConfigs", [])
            return _of_spot_fleet(fleets[0]) if fleets else None
    except NotFound:
        return None


def describe_own(ec2: Any, fleet: str, run: str, job: str) -> Fleet | None:
    """As `describe`, of a fleet that is about to be changed. Conflict if it is live and its tags do not say that it is
    this run's: its id comes from the store, and who may write there could name any fleet of the account."""
    described = describe(ec2, fleet)
    if described is None or not described.is_live:
        return described
    for tag, ours in ((TAG_RUN, run), (TAG_JOB, job)):
        if described.tags.get(tag) != ours:
            command = "describe-fleets --fleet-ids" if is_ec2_fleet(fleet) else (
                "describe-spot-fleet-requests --spot-fleet-request-ids")  # fmt: skip
            raise Conflict(
                f"{fleet} has {tag}={described.tags.get(tag, '')}, not {ours}: it is not this run's and is left alone",
                next_step=f"look at it with `aws ec2 {command} {fleet}`",
            )
    return described


def history(ec2: Any, fleet: str, since: datetime) -> tuple[FleetEvent, ...]:
    """The fleet's events from `since` on, oldest first. AWS keeps them for 48 hours."""
    events: list[FleetEvent] = []
    next_page: dict[str, Any] = {}
    with translated(f"read the history of {fleet}"):
        while True:
            if is_ec2_fleet(fleet):
                answer = ec2.describe_fleet_history(FleetId=fleet, StartTime=since, **next_page)
            else:
                answer = ec2.describe_spot_fleet_request_history(SpotFleetRequestId=fleet, StartTime=since, **next_page)
            events += [_event(record) for record in answer.get("HistoryRecords", [])]
            if not answer.get("NextToken"):
                return tuple(sorted(events, key=lambda event: event.time))
            next_page = {"NextToken": answer["NextToken"]}


def live_of_job(ec2: Any, job: str) -> tuple[Fleet, ...]:
    """The job's live fleets, by their tags. AWS cannot filter fleets by tag, so all fleets of the account are read."""
    fleets: list[Fleet] = []
    with translated("list the fleets of the account"):
        for page in ec2.get_paginator("describe_spot_fleet_requests").paginate():
            fleets += [_of_spot_fleet(description) for description in page.get("SpotFleetRequestConfigs", [])]
        for page in ec2.get_paginator("describe_fleets").paginate():
            fleets += [_of_ec2_fleet(description) for description in page.get("Fleets", [])]
    return tuple(fleet for fleet in fleets if fleet.is_live and fleet.tags.get(TAG_JOB) == job)


def _of_spot_fleet(description: dict[str, Any]) -> Fleet:
    config = description.get("SpotFleetRequestConfig", {})
    return Fleet(
        id=str(description["SpotFleetRequestId"]),
        state=str(description.get("SpotFleetRequestState") or ""),
        activity=str(description.get("ActivityStatus") or ""),
        tags=_tags(description),
        target=int(config.get("TargetCapacity") or 0),
        on_demand=int(config.get("OnDemandTargetCapacity") or 0),
        valid_until=config.get("ValidUntil"),
    )


def _of_ec2_fleet(description: dict[str, Any]) -> Fleet:
    target = description.get("TargetCapacitySpecification", {})
    state = str(description.get("FleetState") or "")
    return Fleet(
        id=str(description["FleetId"]),
        state=_EC2_FLEET_STATES.get(state, state),
        activity=str(description.get("ActivityStatus") or ""),
        tags=_tags(description),
        target=int(target.get("TotalTargetCapacity") or 0),
        on_demand=int(target.get("OnDemandTargetCapacity") or 0),
        valid_until=description.get("ValidUntil"),
    )


def _tags(description: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in description.get("Tags") or []}


def _event(record: dict[str, Any]) -> FleetEvent:
    information = record.get("EventInformation") or {}
    kind = str(record.get("EventType") or "")
    return FleetEvent(
        time=record["Timestamp"],
        kind=_EC2_FLEET_EVENTS.get(kind, kind),
        subtype=str(information.get("EventSubType") or ""),
        description=str(information.get("EventDescription") or ""),
        instance=str(information.get("InstanceId") or ""),
    )
