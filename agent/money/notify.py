"""Telling people: a webhook and an SNS topic, at ends, interruptions and limits. It never fails or delays the run much.

Each message has a mark in the store for each channel, put when it was taken, so that replacements and restarts do not
tell it again; where an agent dies between the two it is told twice. What a webhook gets is JSON with `text`, as Slack,
Mattermost and Discord's `/slack` addresses take it, and the same in fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import Fatal, Retryable, SpothealError
from spotheal.agent.protocol.job import NotifyTable
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.protocol.redaction import redacted
from spotheal.agent.protocol.retrying import back_off, until_it_works

SCHEMA_VERSION = 1
SECONDS_MAX = 30.0  # how long an end of the run waits for it, all channels together
TAIL_LINES = 20
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 10.0
_TEXT_MAX = 3500  # characters; Slack cuts at 40,000, a person much earlier
_SUBJECT_MAX = 99  # SNS: fewer than 100, ASCII


@dataclass(frozen=True)
class Message:
    """`event`: done, failed, set-up failed, limit, parked, cancelled, interruption, limit-80. `mark` is its own."""

    event: str
    mark: str
    text: str
    tail: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Messenger:
    """`facts` (job, run, store) stand in every message. `sns`: a boto3 client in the topic's region, or None."""

    notify: NotifyTable
    store: Store
    clock: Clock
    log: Any
    facts: Mapping[str, Any]
    sns: Any = None
    post: Callable[[str, bytes, float], tuple[int, Mapping[str, str]]] | None = None

    @property
    def is_there(self) -> bool:
        """Whether anybody is to be told anything."""
        return bool(self.notify.webhook or self.notify.sns)

    def tell(self, message: Message, seconds_max: float = SECONDS_MAX) -> bool:
        """Tell it to each channel that has not taken it yet; whether all have. Never raises SpothealError."""
        channels: list[tuple[str, Callable[[Message], None]]] = []
        if self.notify.webhook:
            channels.append(("webhook", self._to_webhook))
        if self.notify.sns:
            channels.append(("sns", self._to_sns))
        until = self.clock.monotonic() + seconds_max
        return all([self._tell_one(name, send, message, until) for name, send in channels])

    def _tell_one(self, channel: str, send: Callable[[Message], None], message: Message, until: float) -> bool:
        delivered = False

        def once() -> None:
            nonlocal delivered
            if not delivered and self.store.get_bytes(LAYOUT.told(message.mark, channel)) is not None:
                return
            if not delivered:
                send(message)
                delivered = True
            self.store.put_json(LAYOUT.told(message.mark, channel), {"time": rfc3339(self.clock.now())})
            self.log.info("told", channel=channel, what=message.event)

        try:
            seconds_max = until - self.clock.monotonic()
            until_it_works(once, self.clock, pause=lambda tries: min(back_off(tries), 15.0), seconds_max=seconds_max)
        except SpothealError as error:
            self.log.error(f"the {channel} was not told", what=message.event, error=str(error))
            return False
        return True

    # ----------------------------------------------------------------------------------------------------- the channels
    def _to_webhook(self, message: Message) -> None:
        """Errors name the host alone: the rest of such an address is its password."""
        host = host_of(self.notify.webhook)
        body = json.dumps(self.document(message), default=str).encode()
        status, headers = (self.post or _post)(self.notify.webhook, body, _READ_SECONDS)
        if 200 <= status < 300:
            return
        if status == 429 or status >= 500:
            raise Retryable(f"{host} answered {status}")
        if 300 <= status < 400:
            to = host_of(headers.get("location", "")) or host
            raise Fatal(
                f"{host} answered {status}, a redirect to {to}, which is not followed",
                next_step="write the final address under [notify] webhook",
            )
        raise Fatal(f"{host} answered {status}", next_step="check [notify] webhook; it is not tried again")

    def _to_sns(self, message: Message) -> None:
        subject = f"spotheal {self.facts.get('job')}: {message.event}".encode("ascii", "replace").decode()
        with translated("publish to the SNS topic"):
            self.sns.publish(
                TopicArn=self.notify.sns, Subject=subject[:_SUBJECT_MAX], Message=self.document(message)["text"]
            )

    def document(self, message: Message) -> dict[str, Any]:
        """What a webhook gets, without secrets."""
        tail = [redacted(line) for line in message.tail[-TAIL_LINES:]]
        text = redacted(f"spotheal {self.facts.get('job')}: {message.text}")
        if tail:
            text += "\n```\n" + "\n".join(tail) + "\n```"
        fields = {key: redacted(value) if isinstance(value, str) else value for key, value in message.fields.items()}
        return {
            "text": text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 1] + "…",
            "schema_version": SCHEMA_VERSION,
            "event": message.event,
            "time": rfc3339(self.clock.now()),
            **self.facts,
            **fields,
            "tail": tail,
        }


def _post(url: str, body: bytes, read_seconds: float) -> tuple[int, Mapping[str, str]]:
    """Status and headers. Redirects are answers, never followed: one could lead to the metadata service."""
    import requests

    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "spotheal"}
    timeout = (_CONNECT_SECONDS, read_seconds)
    try:
        with requests.post(
            url, data=body, headers=headers, timeout=timeout, allow_redirects=False, stream=True
        ) as response:
            return response.status_code, {key.lower(): value for key, value in response.headers.items()}
    except ValueError as fault:  # of requests, urllib and idna alike
        raise Fatal(f"[notify] webhook is no address that can be posted to ({type(fault).__name__})") from None
    except (requests.RequestException, OSError) as fault:
        raise Retryable(f"{host_of(url)} does not answer ({type(fault).__name__})") from None


def host_of(url: str) -> str:
    """"" where it names none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def topic_region(arn: str) -> str:
    """The region of a topic: it may be another than the fleet's."""
    parts = arn.split(":")
    return parts[3] if len(parts) > 3 else ""
