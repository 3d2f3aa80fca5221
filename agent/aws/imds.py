"""The instance metadata service, version 2 only: who this machine is, and whether AWS is about to take it away.

An answer that cannot be understood is `UNKNOWN`, which is neither a notice nor its absence. `requests` is imported at
the first call, so that a trainer can import this module for nothing.
Source: EC2 User Guide, "Use the Instance Metadata Service" and "Spot Instance interruption notices".
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from spotheal.agent.protocol.clock import Clock, SystemClock, parse_rfc3339, rfc3339
from spotheal.agent.protocol.errors import ConfigError, PermissionDenied, Retryable, SpothealError
from spotheal.agent.protocol.names import REGION

if TYPE_CHECKING:
    import requests

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # botocore's name, so that both ask the same service
ENDPOINT_MODE = "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
TOKEN_SECONDS = 21600
TOKEN_EARLY_SECONDS = 15.0
TRIES = 3
BODY_BYTES_MAX = 16 * 1024

IDENTITY = "/latest/dynamic/instance-identity/document"
LIFECYCLE = "/latest/meta-data/instance-life-cycle"
SPOT_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Answer(Enum):
    """What IMDS said where it named no event."""

    NOTHING = "nothing"  # 404: there is no such thing
    UNKNOWN = "unknown"  # no answer, or one that makes no sense: says nothing in either direction


NOTHING = Answer.NOTHING
UNKNOWN = Answer.UNKNOWN


@dataclass(frozen=True)
class Identity:
    """This instance, as its signed identity document names it."""

    instance: str
    zone: str
    region: str
    instance_type: str
    account: str
    image: str
    launched: str = ""  # RFC 3339; "" where the document does not say it
    address: str = ""  # private, IPv4; "" where the document names none


@dataclass(frozen=True)
class SpotAction:
    """The interruption notice: `action` is terminate, stop or hibernate; `time` is AWS's, and may lie in the past."""

    action: str
    time: datetime


@dataclass(frozen=True)
class Rebalance:
    """A recommendation; it may never come true. `time` is when it was given."""

    time: datetime


Event = TypeVar("Event", SpotAction, Rebalance)


class Metadata:
    """A client of IMDSv2. Calls may come from several threads; none lasts longer than a few timeouts.

    `fault` says why the last answer was `UNKNOWN`; empty after an answer that made sense.
    """

    def __init__(self, endpoint: str = "", clock: Clock | None = None, timeout_seconds: float = 2.0) -> None:
        self.endpoint = (endpoint or default_endpoint()).rstrip("/")
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).hostname:
            raise ConfigError(
                f"{self.endpoint!r} is no address of a metadata service", next_step=f"correct or unset {ENDPOINT}"
            )
        self.fault = ""
        self._clock = clock or SystemClock()
        self._timeout = timeout_seconds
        # Its own generator: a trainer runs this too, and its `random` must draw the numbers that it draws without us.
        self._random = random.Random()
        self._lock = threading.Lock()  # one request at a time: the session and the token are shared
        self._session: requests.Session | None = None
        self._token = ""
        self._token_until = 0.0

    # ------------------------------------------------------------------------------------------------------ questions
    def identity(self, wait_seconds_max: float = 600.0, progress: Callable[[str], None] | None = None) -> Identity:
        """Who this machine is; waits while IMDS comes up, up to `wait_seconds_max`, then raises with what to check.

        Raises PermissionDenied at once where IMDS is switched off.
        """
        start = self._clock.monotonic()
        pause = 1.0
        while True:
            try:
                text = self.get(IDENTITY)
                return _identity(text if text is not None else "(404)")
            except Retryable as fault:
                waited = self._clock.monotonic() - start
                if waited + pause > wait_seconds_max:
                    raise Retryable(
                        f"no usable answer from the metadata service at {self.endpoint} in {waited:.0f} s: "
                        + fault.message,
                        next_step="this program runs on an EC2 instance; there, check that no firewall rule or proxy"
                        f" stands before {self.endpoint} and that the instance's metadata options enable IMDSv2",
                    ) from fault
                if progress is not None:
                    progress(f"waiting for IMDS ({waited:.0f} s of at most {wait_seconds_max:.0f} s): {fault.message}")
                self._clock.sleep(pause)
                pause = min(pause * 2, 15.0)

    def lifecycle(self) -> str:
        """`spot` or `on-demand`; "" where the service does not say. Never raises."""
        try:
            answer = (self.get(LIFECYCLE) or "").strip()
        except SpothealError:
            return ""
        return "on-demand" if answer == "normal" else answer if answer in ("spot", "on-demand") else ""

    def spot_action(self) -> SpotAction | Answer:
        """The interruption notice. Never raises."""
        return self._event(SPOT_ACTION, _spot_action)

    def rebalance(self) -> Rebalance | Answer:
        """The rebalance recommendation. Never raises."""
        return self._event(REBALANCE, _rebalance)

    def get(self, path: str) -> str | None:
        """The text at `path`, None where there is none (404).

        Raises Retryable where no sensible answer came in three tries, PermissionDenied where IMDS is switched off.
        """
        fault = Retryable("not asked")
        for attempt in range(TRIES):
            if attempt:
                self._clock.sleep(0.1 * 2**attempt * self._random.uniform(0.5, 1.5))
            try:
                return self._get_once(path)
            except Retryable as error:
                fault = error
        raise fault

    def _event(self, path: str, parse: Callable[[str], Event]) -> Event | Answer:
        answer: Event | Answer
        try:
            text = self.get(path)
            answer = NOTHING if text is None else parse(text)
        except SpothealError as fault:
            self.fault = fault.message
            return UNKNOWN
        self.fault = ""
        return answer

    # ------------------------------------------------------------------------------------------------------- requests
    def _get_once(self, path: str) -> str | None:
        with self._lock:
            for fresh in (False, True):
                status, text = self._send("GET", path, {"X-aws-ec2-metadata-token": self._valid_token(fresh)})
                if status != 401:
                    break
            if status == 404:
                return None
            if status == 200:
                return text
            raise self._refused(status, path)

    def _valid_token(self, fresh: bool) -> str:
        moment = self._clock.monotonic()
        if fresh or not self._token or moment >= self._token_until:
            self._token = ""
            status, text = self._send(
                "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            )
            if status != 200:
                raise self._refused(status, "/latest/api/token")
            if not re.fullmatch(r"[!-~]{1,1024}", text.strip()) or "<" in text:
                raise Retryable(f"what the metadata service sent as a token is none: {text[:60]!r}")
            self._token, self._token_until = text.strip(), moment + TOKEN_SECONDS - TOKEN_EARLY_SECONDS
        return self._token

    def _refused(self, status: int, path: str) -> SpothealError:
        if status == 403:
            return PermissionDenied(
                f"the metadata service refuses {path} (403): it is switched off for this instance or this process",
                next_step="`aws ec2 modify-instance-metadata-options --http-endpoint enabled --instance-id …`",
            )
        return Retryable(f"the metadata service answered {status} to {path}")

    def _send(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and body. A redirect is an answer, not a way: a token must never travel to another host."""
        import requests

        if self._session is None:
            self._session = requests.Session()
            self._session.headers["Accept-Encoding"] = "identity"
            self._session.trust_env = False  # no proxy, no .netrc: 169.254.169.254 is this very machine's
        until = self._clock.monotonic() + 2 * self._timeout
        try:
            with self._session.request(
                method, self.endpoint + path, headers=headers, timeout=self._timeout, allow_redirects=False, stream=True
            ) as response:
                body = bytearray()
                for piece in response.iter_content(1):  # larger pieces would let a dripping server hold us for minutes
                    body += piece
                    if len(body) > BODY_BYTES_MAX:
                        raise Retryable(f"the metadata service's answer to {path} has no end")
                    if self._clock.monotonic() > until:
                        raise Retryable(f"the metadata service's answer to {path} takes too long")
                return response.status_code, body.decode("utf-8", errors="replace")
        except (requests.RequestException, OSError) as error:
            raise Retryable(f"the metadata service does not answer {path}: {type(error).__name__}") from error


def default_endpoint() -> str:
    """The address in the environment, else AWS's link-local one."""
    if endpoint := os.environ.get(ENDPOINT, ""):
        return endpoint
    ipv6 = os.environ.get(ENDPOINT_MODE, "").lower() == "ipv6"
    return "http://[fd00:ec2::254]" if ipv6 else "http://169.254.169.254"


# -------------------------------------------------------------------------------------------------------- what was said
_IDENTITY_FIELDS = {
    "instance": ("instanceId", r"i-[0-9a-z]{1,40}"),
    "zone": ("availabilityZone", r"[a-z]{2}[a-z0-9-]{3,40}"),
    "region": ("region", REGION),
    "instance_type": ("instanceType", r"[a-z0-9.-]{2,40}"),
    "account": ("accountId", r"\d{12}"),
    "image": ("imageId", r"ami-[0-9a-z]{1,40}"),
}


def _identity(text: str) -> Identity:
    body = _object(text, "identity document")
    values = {}
    for name, (key, pattern) in _IDENTITY_FIELDS.items():
        value = body.get(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise Retryable(f"the identity document's {key} is {value!r}")
        values[name] = value
    try:
        launched = rfc3339(parse_rfc3339(str(body.get("pendingTime"))))
    except (ValueError, OverflowError):
        launched = ""
    address = body.get("privateIp")
    match = isinstance(address, str) and re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", address)
    return Identity(**values, launched=launched, address=str(address) if match else "")


def _spot_action(text: str) -> SpotAction:
    body = _object(text, "instance-action")
    if body.get("action") not in ("terminate", "stop", "hibernate"):
        raise Retryable(f"instance-action names no action we know: {text[:80]!r}")
    return SpotAction(body["action"], _time(body.get("time"), text))


def _rebalance(text: str) -> Rebalance:
    return Rebalance(_time(_object(text, "rebalance recommendation").get("noticeTime"), text))


def _object(text: str, label: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Retryable(f"the {label} is no JSON object: {text[:80]!r}")
    return body


def _time(value: object, text: str) -> datetime:
    try:
        moment = parse_rfc3339(str(value))
    except (ValueError, OverflowError):
        raise Retryable(f"a time that cannot be read: {text[:80]!r}") from None
    if not 2000 <= moment.year <= 2100:  # arithmetic on 0001 and 9999 overflows
        raise Retryable(f"a time that cannot be meant: {text[:80]!r}")
    return moment
