"""CloudWatch's log streams of a job's attempts, read so that each line is given once and none is lost.

A stream is read from its first line on, page by page; the token of the last page is kept, and the same token again
means that there is nothing new yet. An empty page does not: CloudWatch gives some on the way to the lines. A stream
appears some seconds after its container has started, and lines come some seconds after they were written, so those of a
job that has ended are looked for a while longer. A token is good for a day: a stream that was silent for longer is read
again from the moment of its last event.
Source: CloudWatch Logs API reference, GetLogEvents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import CredentialsEnded, Fatal, NotFound, Retryable, SpothealError
from spotheal.fleet.run.batch_jobs import Stream
from spotheal.fleet.run.session import Session

CALLS_A_ROUND = 40  # GetLogEvents may be called 25 times a second in an account; other people read logs, too
PAGES_A_VISIT = 20  # of one stream, before the next stream has its turn
QUIET_ROUNDS = 3  # after the end of an attempt, so often without a new line


@dataclass
class _Reading:
    stream: Stream
    token: str = ""
    ended: bool = False
    quiet: int = 0
    moment: int = 0  # of the last event that was given, in milliseconds
    event_count: int = 0  # events of that moment
    skip_count: int = 0  # of them come once more, since the token was forgotten

    @property
    def is_over(self) -> bool:
        return self.ended and self.quiet >= QUIET_ROUNDS

    def place(self) -> dict[str, Any]:
        """The token of the next page."""
        if self.token:
            return {"nextToken": self.token}
        return {"startTime": self.moment} if self.moment else {}

    def start_again(self) -> None:
        """Without its token, at the moment of the last event."""
        self.token, self.skip_count = "", self.event_count

    def is_new(self, event: Mapping[str, Any]) -> bool:
        if self.skip_count and event["timestamp"] == self.moment:
            self.skip_count -= 1
            return False
        self.event_count = self.event_count + 1 if event["timestamp"] == self.moment else 1
        self.moment = int(event["timestamp"])
        return True


@dataclass(frozen=True)
class Line:
    label: str
    text: str


class Tail:
    """All streams of a job in one log group. `see` notes them; `read` gives the new lines of all."""

    def __init__(self, session: Session, group: str) -> None:
        self._session, self._group = session, group
        self._all: dict[str, _Reading] = {}  # whose turn comes first is first
        self._quiet_visits = 0  # in a row, of streams that had nothing new
        self.is_throttled = False  # in the last round

    def see(self, streams: Iterable[Stream], ended: bool) -> None:
        """These streams exist or will; `ended`: nothing writes to them any more."""
        for stream in streams:
            reading = self._all.setdefault(stream.name, _Reading(stream))
            if ended and not reading.ended:
                reading.ended, reading.quiet = True, 0  # it may have been silent for hours before its last words

    def see_attempts(self, streams: list[Stream], ended: bool) -> None:
        """Streams of one job, in order: only its last attempt may still write."""
        self.see(streams[:-1], ended=True)
        self.see(streams[-1:], ended=ended)

    @property
    def is_over(self) -> bool:
        """Whether every stream has ended and been quiet since."""
        return all(reading.is_over for reading in self._all.values())

    @property
    def is_behind(self) -> bool:
        """Whether a stream may have lines by now that were not given: not all have been found empty since the last."""
        return self._quiet_visits < sum(not reading.is_over for reading in self._all.values())

    def last_lines(self, stream: Stream, count: int) -> list[str]:
        """The end of one stream; empty if it cannot be read."""
        try:
            answer = self._get(stream.name, limit=count)
        except SpothealError:
            return []
        return [str(event["message"]) for event in answer["events"]][-count:]

    def read(self) -> Iterator[Line]:
        """A round: new lines, grouped by stream. Lines that are throttled, or too many for a round, come in the next
        round."""
        self.is_throttled, calls = False, 0
        for reading in [stream for stream in self._all.values() if not stream.is_over]:
            pages, is_end = 0, False
            while pages < PAGES_A_VISIT and not is_end:
                if calls >= CALLS_A_ROUND and not pages:
                    return
                calls, pages = calls + 1, pages + 1
                try:
                    lines, is_end = self._page(reading)
                except CredentialsEnded:
                    raise
                except Retryable:
                    self.is_throttled = True
                    return
                self._quiet_visits = 0 if lines else self._quiet_visits
                yield from lines
            self._quiet_visits = self._quiet_visits + 1 if is_end else 0
            self._all[reading.stream.name] = self._all.pop(reading.stream.name)

    def _page(self, reading: _Reading) -> tuple[list[Line], bool]:
        """The next page, and whether there is nothing behind it for now: only the same token again says so."""
        try:
            answer = self._get(reading.stream.name, startFromHead=True, **reading.place())
        except NotFound:
            reading.quiet += 1
            return [], True
        except Fatal as error:
            if error.code != "InvalidParameterException" or not reading.token:
                raise
            reading.start_again()
            return [], False
        before, reading.token = reading.token, str(answer["nextForwardToken"] or reading.token)
        events, is_end = [event for event in answer["events"] if reading.is_new(event)], reading.token == before
        reading.quiet = reading.quiet + 1 if is_end and not events else 0
        return [Line(reading.stream.label, str(event["message"])) for event in events], is_end

    def _get(self, stream: str, **arguments: Any) -> dict[str, Any]:
        with translated(f"read log stream {stream}"):
            answer: dict[str, Any] = self._session.client("logs").get_log_events(
                logGroupName=self._group, logStreamName=stream, **arguments
            )
            return answer
