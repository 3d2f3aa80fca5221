"""EventBridge Scheduler as far as the rescue needs it: one-time schedules whose target is a call of EC2's.

Over HTTP by `answer` (its protocol is REST with JSON), without it by `InMemoryScheduler`. AWS starts a schedule within
the minute after its time, and asks nobody whether the call succeeded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

from spotheal.fleet.rehearsal.ec2 import ec2fleets, fleets
from spotheal.fleet.rehearsal.ec2.rulebook import ApiError, Rulebook
from spotheal.fleet.rehearsal.ec2.world import World

LATE_SECONDS = 30.0
_AT = re.compile(r"at\((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\)")
_TARGET = re.compile(r"arn:aws[a-z-]*:scheduler:::aws-sdk:ec2:([a-z][A-Za-z]+)")
_REQUIRED = ("FlexibleTimeWindow", "ScheduleExpression", "Target")
_CALLS = {"modifySpotFleetRequest": fleets.modify_spot_fleet_request, "modifyFleet": ec2fleets.modify_fleet}


@dataclass
class Schedules:
    """`fired` lists what was called: (name of the schedule, operation, parameters, AWS's error code or "")."""

    rulebook: Rulebook
    fired: list[tuple[str, str, dict[str, Any], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all: dict[str, dict[str, Any]] = {}

    # ------------------------------------------------------------------------------------------------------ the calls
    def create(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if name in self._all:
            raise ApiError("ConflictException", f"Schedule {name} already exists.", 409)
        return self._put(name, parameters)

    def update(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Every value is replaced; what is not given gets its default."""
        self.get(name)
        return self._put(name, parameters)

    def get(self, name: str) -> dict[str, Any]:
        if name not in self._all:
            raise ApiError("ResourceNotFoundException", f"Schedule {name} does not exist.", 404)
        return {**self._all[name], "Name": name, "GroupName": "default", "Arn": self._arn(name)}

    def delete(self, name: str) -> dict[str, Any]:
        self.get(name)
        del self._all[name]
        return {}

    def bring_forward(self) -> int:
        """The time of every schedule has come; how many there were. For a rehearsal, which cannot wait ten minutes."""
        with self.rulebook.inside() as world:
            due = [(name, entry) for name, entry in self._all.items() if entry["State"] == "ENABLED"]
            for name, entry in due:
                world.later(0.0, functools.partial(self._fire, name, entry))
        return len(due)

    def names(self) -> list[str]:
        return list(self._all)

    def _put(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        for key in _REQUIRED:
            if not parameters.get(key):
                raise ApiError("ValidationException", f"{key} must not be null", 400)
        role = str(parameters["Target"].get("RoleArn", ""))
        if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+", role):
            raise ApiError("ValidationException", "Provided role ARN is invalid.", 400)
        target = _TARGET.fullmatch(str(parameters["Target"].get("Arn", "")))
        if not target or target.group(1) not in _CALLS:
            raise ApiError("ValidationException", "Provided Arn is not in correct format.", 400)
        match = _AT.fullmatch(parameters["ScheduleExpression"])
        if not match:
            raise ApiError(
                "ValidationException", f"Invalid Schedule Expression {parameters['ScheduleExpression']}.", 400
            )
        at = datetime.fromisoformat(match.group(1)).replace(tzinfo=timezone.utc)
        settings = {key: value for key, value in parameters.items() if key not in ("ClientToken", "Name", "GroupName")}
        time = self._world.now()
        creation_date = self._all.get(name, {}).get("CreationDate", time)
        self._all[name] = {"State": "ENABLED", "ScheduleExpressionTimezone": "UTC", "ActionAfterCompletion": "NONE",
                           **settings, "CreationDate": creation_date, "LastModificationDate": time}  # fmt: skip
        seconds = (at - self._world.now()).total_seconds() + LATE_SECONDS
        entry = self._all[name]
        with self.rulebook.inside() as world:
            world.later(max(0.0, seconds), lambda: self._fire(name, entry))
        return {"ScheduleArn": self._arn(name)}

    # ----------------------------------------------------------------------------------------------------- its time
    def _fire(self, name: str, entry: dict[str, Any]) -> None:
        if self._all.get(name) is not entry or entry["State"] != "ENABLED":
            return  # changed or deleted since
        if entry.get("ActionAfterCompletion") == "DELETE":
            del self._all[name]
        match = _TARGET.fullmatch(entry["Target"]["Arn"])
        assert match is not None
        parameters, code = json.loads(entry["Target"].get("Input") or "{}"), ""
        try:
            _CALLS[match.group(1)](self._world, parameters, None)
        except ApiError as error:
            code = error.code
        self.fired.append((name, match.group(1), parameters, code))

    @property
    def _world(self) -> World:
        return self.rulebook.world

    def _arn(self, name: str) -> str:
        return f"arn:aws:scheduler:{self.rulebook.region}:{self.rulebook.account}:schedule/default/{name}"

    # -------------------------------------------------------------------------------------------------------- the wire
    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """What AWS answers to an HTTP request, or its error with the `__type` that botocore reads."""
        match = re.fullmatch(r"/schedules/([^/]+)", path)
        calls: dict[str, Callable[[str], dict[str, Any]]] = {
            "POST": lambda name: self.create(name, json.loads(body)),
            "PUT": lambda name: self.update(name, json.loads(body)),
            "GET": self.get,
            "DELETE": self.delete,
        }
        if not match or method not in calls:
            return 400, {"__type": "UnknownOperationException", "message": "not rehearsed"}
        try:
            answer = calls[method](unquote(match.group(1)))
            moments = {key: moment.timestamp() for key, moment in answer.items() if isinstance(moment, datetime)}
            return 200, {**answer, **moments}
        except ApiError as error:
            return error.status, {"__type": error.code, "Message": error.message}


class InMemoryScheduler:
    """boto3's client without HTTP; errors are botocore's."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        calls = {f"{verb}_schedule": verb for verb in ("create", "update", "get", "delete")}
        if name not in calls:
            raise AttributeError(name)
        return functools.partial(self._call, calls[name])

    def _call(self, operation: str, *, Name: str, **parameters: Any) -> dict[str, Any]:
        from spotheal.fleet.rehearsal.services.client import client_error

        takes = (Name, parameters) if operation in ("create", "update") else (Name,)
        try:
            answer: dict[str, Any] = getattr(self._schedules, operation)(*takes)
            return answer
        except ApiError as error:
            raise client_error(f"{operation.title()}Schedule", error.code, error.message, error.status) from error
