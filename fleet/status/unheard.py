"""A machine that runs without its agent: the cause, as its console tells it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import SpothealError
from spotheal.fleet.run.session import Session
from spotheal.fleet.run.table import duration

UNHEARD_SECONDS = 180.0  # a boot takes seconds from the user data to the agent, and some tens before the user data
READ_SECONDS = 60.0
_CANNOT = "this machine cannot start the job: "
_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: .+")


@dataclass(frozen=True)
class Unheard:
    """`says`: the cause in one line, as far as the console shows it; "" if it shows nothing yet."""

    instance: str
    seconds: float
    says: str

    def to_document(self, job: str) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "seconds": self.seconds,
            "says": self.says,
            "next_step": f"`fleetctl cancel {job}` ends it; `aws ec2 get-console-output --latest --output text"
            f" --instance-id {self.instance}` shows all of it",
        }


def in_words(unheard: Mapping[str, Any]) -> str:
    """The fact and its cause, of `Unheard.to_document`."""
    console = f"its console says: {unheard['says']}" if unheard["says"] else "its console shows nothing yet"
    return f"{unheard['instance']} runs for {duration(unheard['seconds'])} and its agent has not started; {console}"


class Consoles:
    """Reads the consoles of instances, of each at most once in `READ_SECONDS`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read: dict[str, tuple[float, str]] = {}

    def find(
        self, session: Session, launches: Iterable[Mapping[str, Any]], instances: Iterable[Instance]
    ) -> Unheard | None:
        """The oldest machine whose agent has not started, with the cause from its console."""
        now = self._clock.now()
        silent = silent_machine(launches, instances, now)
        if silent is None:
            return None
        return Unheard(silent.id, (now - silent.launched).total_seconds(), cause(self._text(session, silent.id)))

    def _text(self, session: Session, instance: str) -> str:
        """The console of `instance`, its latest 64 KB. Nitro machines show it at once, others after minutes.

        https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetConsoleOutput.html
        """
        at, text = self._read.get(instance, (float("-inf"), ""))
        if self._clock.monotonic() - at >= READ_SECONDS:
            text = _console(session, instance)
            self._read[instance] = self._clock.monotonic(), text
        return text


def silent_machine(
    launches: Iterable[Mapping[str, Any]], instances: Iterable[Instance], now: datetime
) -> Instance | None:
    """The oldest machine that runs for `UNHEARD_SECONDS` and whose agent has not counted its start in the store."""
    heard = {
        launch.get("instance") for launch in launches if launch.get("starts") or launch.get("outcome") != "booting"
    }
    silent = [instance for instance in instances if instance.state == "running" and instance.id not in heard]
    oldest = min(silent, key=lambda instance: instance.launched, default=None)
    return oldest if oldest and (now - oldest.launched).total_seconds() >= UNHEARD_SECONDS else None


def _console(session: Session, instance: str) -> str:
    for latest in ({"Latest": True}, {}):
        try:
            with translated(f"read the console of {instance}"):
                answer = session.client("ec2").get_console_output(InstanceId=instance, **latest)
            return str(answer.get("Output") or "")  # botocore has decoded it
        except SpothealError:  # `Latest` is refused for machines without Nitro
            continue
    return ""


def cause(text: str) -> str:
    """The last line in which user data says why it cannot go on, with the error before it; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    indices = [number for number, line in enumerate(lines) if _CANNOT in line]
    if not indices:
        return lines[-1] if lines else ""
    reason = lines[indices[-1]].rpartition(_CANNOT)[2]
    errors = [match.group() for line in lines[: indices[-1]] if (match := _ERROR.search(line)) and _CANNOT not in line]
    return f"{reason} ({errors[-1]})" if errors else reason
