"""The two AWS interfaces that keep a fleet's capacity, Spot Fleet and EC2 Fleet, behind one seam.

A fleet's id says which it is: `sfr-…` or `fleet-…`. States and events have Spot Fleet's names here, whichever it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound, PermissionDenied
from spotheal.agent.protocol.names import TAG_JOB

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
    activity: str  # error, pending_fulfillment, pending_termination, fulfilled; "" where AWS says none
    tags: Mapping[str, str]
    target: int
    on_demand: int
    valid_until: datetime | None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES


@dataclass(frozen=True)
class FleetEvent:
    """`kind`: fleetRequestChange, instanceChange, error or information; `what` is AWS's EventSubType."""

    time: datetime
    kind: str
    what: str
    description: str
    instance: str


def is_ec2_fleet(fleet: str) -> bool:
    return fleet.startswith("fleet-")


def is_ec2_fleet_request(arguments: Mapping[str, Any]) -> bool:
    """Whether these are CreateFleet's arguments, not RequestSpotFleet's."""
    return "SpotFleetRequestConfig" not in arguments


def send(ec2: Any, arguments: Mapping[str, Any]) -> str:
    """Request the fleet; returns its id. Sent again with the same ClientToken it is the same fleet."""
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
    """One call, by id. None where AWS no longer knows the fleet (48 hours after its end)."""
    try:
        with translated(f"describe {fleet}"):
            if is_ec2_fleet(fleet):
                found = ec2.describe_fleets(FleetIds=[fleet]).get("Fleets", [])
                return _of_ec2_fleet(found[0]) if found else None
            found = ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[fleet]).get("SpotFleetRequestConfigs", [])
            return _of_spot_fleet(found[0]) if found else None
    except NotFound:
        return None


def history(ec2: Any, fleet: str, since: datetime) -> tuple[FleetEvent, ...]:
    """What happened to the fleet from `since`, oldest first. AWS keeps 48 hours."""
    events: list[FleetEvent] = []
    more: dict[str, Any] = {}
    with translated(f"read the history of {fleet}"):
        while True:
            if is_ec2_fleet(fleet):
                answer = ec2.describe_fleet_history(FleetId=fleet, StartTime=since, **more)
            else:
                answer = ec2.describe_spot_fleet_request_history(SpotFleetRequestId=fleet, StartTime=since, **more)
            events += [_event(record) for record in answer.get("HistoryRecords", [])]
            if not answer.get("NextToken"):
                return tuple(sorted(events, key=lambda event: event.time))
            more = {"NextToken": answer["NextToken"]}


def live_of_job(ec2: Any, job: str) -> tuple[Fleet, ...]:
    """The job's live fleets by their tags: AWS has no filter for them, so all of the account's are read."""
    found: list[Fleet] = []
    with translated("list the fleets of the account"):
        for page in ec2.get_paginator("describe_spot_fleet_requests").paginate():
            found += [_of_spot_fleet(one) for one in page.get("SpotFleetRequestConfigs", [])]
        for page in ec2.get_paginator("describe_fleets").paginate():
            found += [_of_ec2_fleet(one) for one in page.get("Fleets", [])]
    return tuple(one for one in found if one.is_live and one.tags.get(TAG_JOB) == job)


def _of_spot_fleet(found: dict[str, Any]) -> Fleet:
    config = found.get("SpotFleetRequestConfig", {})
    return Fleet(
        id=str(found["SpotFleetRequestId"]),
        state=str(found.get("SpotFleetRequestState") or ""),
        activity=str(found.get("ActivityStatus") or ""),
        tags=_tags(found),
        target=int(config.get("TargetCapacity") or 0),
        on_demand=int(config.get("OnDemandTargetCapacity") or 0),
        valid_until=config.get("ValidUntil"),
    )


def _of_ec2_fleet(found: dict[str, Any]) -> Fleet:
    wanted = found.get("TargetCapacitySpecification", {})
    state = str(found.get("FleetState") or "")
    return Fleet(
        id=str(found["FleetId"]),
        state=_EC2_FLEET_STATES.get(state, state),
        activity=str(found.get("ActivityStatus") or ""),
        tags=_tags(found),
        target=int(wanted.get("TotalTargetCapacity") or 0),
        on_demand=int(wanted.get("OnDemandTargetCapacity") or 0),
        valid_until=found.get("ValidUntil"),
    )


def _tags(found: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags") or []}


def _event(record: dict[str, Any]) -> FleetEvent:
    what = record.get("EventInformation") or {}
    kind = str(record.get("EventType") or "")
    return FleetEvent(
        time=record["Timestamp"],
        kind=_EC2_FLEET_EVENTS.get(kind, kind),
        what=str(what.get("EventSubType") or ""),
        description=str(what.get("EventDescription") or ""),
        instance=str(what.get("InstanceId") or ""),
    )
