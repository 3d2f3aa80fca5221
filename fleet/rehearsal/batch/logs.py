"""CloudWatch Logs as far as containers of Batch need it: groups, streams that appear late, pages by tokens.

Source: CloudWatch Logs API reference, GetLogEvents: a token that comes back unchanged says that the end is reached, for
now; a stream is there when its first event has come. A page "might be only partially full, or even empty".
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotheal.fleet.rehearsal.ec2.world import ApiError

JsonAnswer = tuple[int, dict[str, Any]]
PAGE = 100  # events; 10,000 at AWS
_LIMIT_MAX = 10_000
_GROUP = re.compile(r"[.\-_/#A-Za-z0-9]{1,512}")


@dataclass
class Group:
    tags: dict[str, str] = field(default_factory=dict)
    days: int | None = None
    streams: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # milliseconds, text


class CloudWatchLogs:
    """`later(seconds, do)` delays what is written; `throttled` makes calls fail. Safe to use from any thread."""

    def __init__(self, arn: str, throttled: Callable[[str], bool] = lambda operation: False) -> None:
        self._arn, self._throttled = arn, throttled
        self.groups: dict[str, Group] = {}
        self.empty_pages = 0  # so many come before each page that is not
        self.tokens = 1  # counted up, it makes CloudWatch forget the tokens that it has given, as it does after a day
        self._lock = threading.Lock()

    def write(self, group: str, stream: str, moment: int, lines: list[str]) -> None:
        """As a log driver does; a group that is not there takes nothing."""
        with self._lock:
            if group in self.groups and lines:
                self.groups[group].streams.setdefault(stream, []).extend((moment, line) for line in lines)

    def call(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        calls: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "CreateLogGroup": self._create, "DeleteLogGroup": self._delete, "PutRetentionPolicy": self._retain,
            "DescribeLogGroups": self._describe, "GetLogEvents": self._events,
        }  # fmt: skip
        if operation not in calls:
            raise ApiError("UnknownOperationException", "not rehearsed")
        if self._throttled(operation):
            raise ApiError("ThrottlingException", "Rate exceeded")
        with self._lock:
            return calls[operation](params)

    def _create(self, params: Mapping[str, Any]) -> dict[str, Any]:
        name = params["logGroupName"]
        if not _GROUP.fullmatch(name):
            raise ApiError("InvalidParameterException", "1 validation error detected: logGroupName")
        if name in self.groups:
            raise ApiError("ResourceAlreadyExistsException", "The specified log group already exists")
        self.groups[name] = Group(dict(params.get("tags") or {}))
        return {}

    def _delete(self, params: Mapping[str, Any]) -> dict[str, Any]:
        self._group(params)
        del self.groups[params["logGroupName"]]
        return {}

    def _retain(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if params["retentionInDays"] not in (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1827, 3653):
            raise ApiError("InvalidParameterException", "retentionInDays is none of the allowed values")
        self._group(params).days = int(params["retentionInDays"])
        return {}

    def _describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        names = sorted(name for name in self.groups if name.startswith(params.get("logGroupNamePrefix", "")))
        return {"logGroups": [{"logGroupName": name, "arn": f"{self._arn}:{name}:*"} for name in names]}

    def _events(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if int(params.get("limit") or 1) > _LIMIT_MAX:
            raise ApiError("InvalidParameterException", f"limit must be at most {_LIMIT_MAX}")
        stream = self._group(params).streams.get(params["logStreamName"])
        if stream is None:
            raise ApiError("ResourceNotFoundException", "The specified log stream does not exist.")
        token = params.get("nextToken", "")
        if token and token.split("/")[0][1:] != str(self.tokens):
            raise ApiError("InvalidParameterException", "The specified nextToken is invalid.")
        if not token and not params.get("startFromHead"):
            start = max(0, len(stream) - PAGE)
        else:
            since = int(params.get("startTime") or 0)
            start = int(token.split("/")[1]) if token else sum(moment < since for moment, _ in stream)
        empty = int((token.split("/") + ["0"] * 3)[2])
        if self.empty_pages and empty < self.empty_pages:
            return {"events": [], "nextForwardToken": f"f{self.tokens}/{start}/{empty + 1}",
                    "nextBackwardToken": f"b{self.tokens}/{start}"}
        end = min(len(stream), start + min(int(params.get("limit") or PAGE), PAGE))
        return {"events": [{"timestamp": moment, "message": text, "ingestionTime": moment}
                           for moment, text in stream[start:end]],
                "nextForwardToken": token if token and end == start else f"f{self.tokens}/{end}",
                "nextBackwardToken": f"b{self.tokens}/{start}"}  # fmt: skip

    def _group(self, params: Mapping[str, Any]) -> Group:
        if params["logGroupName"] not in self.groups:
            raise ApiError("ResourceNotFoundException", "The specified log group does not exist.")
        return self.groups[params["logGroupName"]]
