"""Whatever lies in the store, an operator's verb ends in an answer or in one message: never in a traceback."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from batch_desk import BatchDesk, Scripted, batch_desk
from fleet_desk import BUCKET, Desk, HandClock, desk, moto_clients, wheels
from hypothesis import given, settings
from hypothesis import strategies as some

from spotheal.agent.aws import s3
from spotheal.agent.aws.ec2 import Volume
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.bounded_json import parse
from spotheal.agent.protocol.errors import JobFailed, Retryable, SpothealError
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.agent.record.ledger import read_events
from spotheal.fleet import program
from spotheal.fleet.ending import stopping
from spotheal.fleet.logs.logs import _plain
from spotheal.fleet.rehearsal.services.objects import InMemoryS3
from spotheal.fleet.report.page import page
from spotheal.fleet.report.report import Material, make
from spotheal.fleet.results.results_efs import _found
from spotheal.fleet.run.runs import open_run
from spotheal.fleet.run.session import Session
from spotheal.fleet.status.live import line
from spotheal.fleet.status.screen import render
from spotheal.fleet.status.status import RunFacts, summarise
from spotheal.fleet.volumes import filling

__all__ = ["batch_desk", "desk", "moto_clients", "wheels"]
DEEP = b"[" * 100_000
HUGE = b'{"step": 1' + b"0" * 5000 + b"}"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
MARKUP = '"><img src=x onerror=alert(1)>'
VALUES: tuple[Any, ...] = (MARKUP, None, [], {}, "", ESCAPE, -1, 10**18, 1e308, True, ["x"], {"x": ESCAPE})
VERBS = (("status",), ("logs",), ("results", "ls"), ("report", "--out", "report.html"), ("clean", "--dry-run"))
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)


# ----------------------------------------------------------------------------------------------------------- the bytes
@pytest.mark.parametrize(
    "body", [DEEP, b'{"a":' * 50_000, b"\xff\xfe", b"", b"NaN}", b'"\\ud800'],
    ids=["deep", "deep objects", "not UTF-8", "empty", "half", "surrogate"],
)
def test_bytes_that_are_no_document_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse(body)
    store = Store(InMemoryS3("b"), StoreUrl("b", "run"))
    store.put_bytes(LAYOUT.status, body)
    with pytest.raises(Retryable, match=r"status\.json is not JSON"):
        store.read_status()
    text = body.decode(errors="replace")
    assert read_events(text) == [] and _plain(text) == text
    assert parse(HUGE) == {"step": None}


@settings(max_examples=200, deadline=None, database=None)
@given(some.binary(max_size=200) | some.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_value_or_a_value_error(body: bytes) -> None:
    with suppress(ValueError):
        parse(body)
    read_events(body.decode(errors="replace"))


def test_an_object_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "OBJECT_BYTES_MAX", 1 << 20)
    store = Store(InMemoryS3("b"), StoreUrl("b", "run"))
    store.put_bytes("logs/i-1/agent.0.jsonl", b"x" * (2 << 20))
    with pytest.raises(Retryable, match="has 2097152 bytes; nothing of ours is that large") as refused:
        store.get_bytes("logs/i-1/agent.0.jsonl")
    assert "aws s3 cp s3://b/run/logs/i-1/agent.0.jsonl" in refused.value.next_step


def test_a_ledger_with_bytes_of_no_text_is_appended_to() -> None:
    store = Store(InMemoryS3("b"), StoreUrl("b", "run"))
    store.put_bytes(LAYOUT.ledger, b"\xff\xfe\n")
    store.append_lines(LAYOUT.ledger, ["{}"])
    assert store.get_bytes(LAYOUT.ledger) == b"\xff\xfe\n{}\n"


# ----------------------------------------------------------------------------------------------------------- the verbs
STATUS: dict[str, Any] = {
    "phase": "training", "instance": "i-0a", "instance_type": "g5.xlarge", "zone": "us-west-2a", "term": 1,
    "heartbeat": "2026-11-21T11:59:30Z", "reason": "", "notice": {"action": "terminate", "deadline": "x"},
    "space": {"percent": 1, "grown": [{"folder": "a", "bytes": 1}]},
    "progress": {"step": 120, "steps_total": 400, "epoch": 1, "loss": 0.31, "samples_per_second": 8.0,
                 "saved": {"step": 100, "path": "x", "time": "2026-11-21T11:58:00Z"}},
}  # fmt: skip
EVENTS: tuple[dict[str, Any], ...] = (
    {"time": "2026-11-21T11:00:00Z", "event": "boot", "instance": "i-0a", "zone": "us-west-2a", "term": 1,
     "root_gib": 8, "instance_type": "g5.xlarge", "launched": "2026-11-21T11:00:00Z"},
    {"time": "2026-11-21T11:00:01Z", "event": "price", "instance": "i-0a", "dollars_per_hour": 0.4,
     "since": "2026-11-21T10:00:00Z", "lifecycle": "spot"},
    {"time": "2026-11-21T11:00:02Z", "event": "volume", "instance": "i-0a", "volume": "vol-0a", "moved_from": "vol-0b",
     "size_gib": 8, "type": "gp3", "term": 1},
    {"time": "2026-11-21T11:00:03Z", "event": "trainer-started", "instance": "i-0a", "attempt": 1, "resumed_step": 5},
    {"time": "2026-11-21T11:10:00Z", "event": "trainer-ended", "instance": "i-0a", "attempt": 1, "kind": "interrupted",
     "exit_code": 1, "signal": None, "last_step": 9, "saved_step": 8, "reason": "x"},
    {"time": "2026-11-21T11:11:00Z", "event": "notice", "instance": "i-0a", "action": "terminate", "deadline": "x"},
    {"time": "2026-11-21T11:12:00Z", "event": "snapshot", "instance": "i-0a", "snapshot": "snap-1", "used_gib": 1.0},
    {"time": "2026-11-21T11:13:00Z", "event": "deleted", "instance": "i-0a", "volumes": ["vol-0b"], "snapshots": []},
)  # fmt: skip


def changed(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**document, head: changed(document[head], tuple(rest), value) if rest else value}


def paths(document: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in document.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def check(desk: Desk, verb: tuple[str, ...], said_of: Any) -> None:
    result = desk.run(*verb)
    output = result.stdout + result.stderr
    assert result.exit_code in (0, 1, 2, 4, 7, 8), (verb, said_of, output)
    assert "unexpected" not in output and "Traceback" not in output, (verb, said_of, output)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", output), (verb, said_of, output)


@pytest.fixture
def lived(desk: Desk) -> tuple[Desk, Store]:
    """A job whose store holds what an agent writes."""
    store = desk.store(desk.request()["run"])
    store.put_json(LAYOUT.status, STATUS)
    store.append_lines(LAYOUT.ledger, [json.dumps(event) for event in EVENTS])
    store.put_bytes("logs/i-0a/agent.0.jsonl", b'{"timestamp": "2026-11-21T11:00:00Z", "event": "x"}\n')
    return desk, store


def hostile(body: bytes | None) -> Iterator[bytes]:
    """What may lie where `body` was: bytes of no document, and the same document with values of other types."""
    yield from (DEEP, b"\xff\xfe" + ESCAPE.encode() + b"\n", b"[]", b'{"instance": {"a": 1}, "time": [], "batch": 1}')
    with suppress(ValueError):
        for value in ({"a": ESCAPE}, ["x"], -1):
            yield json.dumps(dict.fromkeys(json.loads(body or b"{}"), value)).encode()


class Read(InMemoryS3):
    """A copy of the bucket that notes which keys are read: moto, which answers the rest, takes 5 ms a call."""

    def __init__(self, s3: Any) -> None:
        super().__init__(BUCKET)
        self.keys: list[str] = []
        self._moto = s3
        for item in s3.list_objects_v2(Bucket=BUCKET)["Contents"]:
            place = {"Bucket": BUCKET, "Key": item["Key"]}
            self.put_object(**place, Body=s3.get_object(**place)["Body"].read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._moto, name)

    def get_object(self, Bucket: str, Key: str, Range: str | None = None, **more: Any) -> dict[str, Any]:
        self.keys.append(Key)
        return super().get_object(Bucket, Key, Range, **more)


def check_all(desk: Desk, run: Store, keys: Iterable[str], verbs: Sequence[tuple[str, ...]]) -> None:
    """Each verb on each hostile object. One that does not read the object is run once."""
    s3 = Read(desk.s3)
    store = Store(s3, run.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(desk.account._others, "s3", s3)
        # Made once for all: 10 ms of each verb.
        patch.setattr(boto3.session, "Session", functools.cache(boto3.session.Session))
        patch.setattr(program, "verb_command", functools.cache(program.verb_command))
        for key in keys:
            before, readers = store.get_bytes(key), list(verbs)
            for body in hostile(before):
                for verb in tuple(readers):
                    store.put_bytes(key, body)
                    s3.keys.clear()
                    check(desk, verb, (key, body[:40]))
                    if store.url.below(key).prefix not in s3.keys:
                        readers.remove(verb)
            store.delete(key) if before is None else store.put_bytes(key, before)


def test_a_verb_ends_in_one_message_whatever_bytes_an_object_has(lived: tuple[Desk, Store]) -> None:
    desk, store = lived
    keys = (LAYOUT.status, LAYOUT.ledger, LAYOUT.fleet_document, LAYOUT.job_document, LAYOUT.metrics,
            "launches/i-0a.json", "nodes/i-0a.json", "logs/i-0a/agent.0.jsonl", "logs/i-0a/trainer.0.log")  # fmt: skip
    check_all(desk, store, keys, VERBS)


def test_a_request_that_goes_on_ends_in_one_message_whatever_the_run_before_left(lived: tuple[Desk, Store]) -> None:
    desk, store = lived
    desk.end(desk.good("status")["run"], Phase.FAILED)
    verbs = (("request", "--resume", "--dry-run"), ("volume", "ls"), ("clean", "--unfinished", "--dry-run"))
    check_all(desk, store, (LAYOUT.status, LAYOUT.fleet_document, LAYOUT.job_document), verbs)


def test_a_verb_of_a_sweep_ends_in_one_message_whatever_bytes_an_object_has(lived: tuple[Desk, Store]) -> None:
    desk, store = lived
    store.put_json(LAYOUT.sweep, {"schema_version": 1, "source": "list.yml", "entries": [{"lr": 1}, {"lr": 2}]})
    store.put_json(LAYOUT.queue_claim(0, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    store.put_json(LAYOUT.queue_ended(0, False), {"instance": "i-1", "reason": "x"})
    of_entry = f"{LAYOUT.entry(0)}/{LAYOUT.status}"
    store.put_json(of_entry, STATUS)
    store.put_bytes(f"{LAYOUT.entry(0)}/{LAYOUT.metrics}", b'{"step": 1, "loss": 0.5}\n')
    keys = (LAYOUT.sweep, of_entry, f"{LAYOUT.entry(0)}/{LAYOUT.metrics}", LAYOUT.status, LAYOUT.fleet_document)
    verbs = (("sweep", "status"), ("sweep", "report", "--html", "sweep.html"), ("sweep", "retry", "cifar", "1"),
             ("clean", "--dry-run"))  # fmt: skip
    check_all(desk, store, keys, verbs)


def test_a_verb_of_batch_ends_in_one_message_whatever_bytes_an_object_has(batch_desk: BatchDesk) -> None:
    desk = batch_desk.desk
    batch_desk.good("create", "--yes")
    batch_desk.script[1] = [Scripted(code=1)]
    store = desk.store(batch_desk.good("submit", batch_desk.list(2), "--yes")["run"])
    batch_desk.pass_time(900)
    of_child = f"{LAYOUT.entry(1)}/{LAYOUT.status}"
    store.put_json(of_child, {"phase": "failed", "reason": "x"})
    verbs = (("batch", "status"), ("batch", "logs"), ("batch", "submit", "--resume", "--dry-run"), ("status",))
    check_all(desk, store, (LAYOUT.status, LAYOUT.fleet_document, LAYOUT.job_document, LAYOUT.sweep, of_child), verbs)


def test_a_verb_that_ends_things_ends_in_one_message_whatever_bytes_an_object_has(lived: tuple[Desk, Store]) -> None:
    desk, store = lived
    store.put_json(LAYOUT.queue_claim(0, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    of_entry = f"{LAYOUT.entry(0)}/{LAYOUT.status}"
    store.put_json(of_entry, STATUS)
    (volume,) = desk.good("volume", "ls")["volumes"]
    keys = (LAYOUT.status, LAYOUT.fleet_document, LAYOUT.ledger, of_entry)
    verbs = (("cancel",), ("cancel", "--yes"), ("cancel", "--save", "--yes"), ("volume", "rm", volume["id"]),
             ("volume", "adopt", volume["id"]))  # fmt: skip
    check_all(desk, store, keys, verbs)
    desk.good("cancel", "--yes")
    check_all(desk, store, (LAYOUT.status, LAYOUT.fleet_document), (("volume", "rm", volume["id"], "--yes"),))


class Mixed:
    """`real`, with other answers to some questions."""

    def __init__(self, real: Any, **others: Any) -> None:
        self._real = real
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_run_that_saves_and_ends_is_one_message_or_an_end_whatever_its_status_says(lived: tuple[Desk, Store]) -> None:
    desk, store = lived
    run = open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", store.url.prefix.rpartition("/")[2])
    session = Session("us-west-2")
    ec2 = Mixed(session.ec2, instances=lambda names: [SimpleNamespace(state="running")])
    running: Any = Mixed(session, ec2=ec2)
    for path in paths(STATUS):
        for value in VALUES:
            store.put_json(LAYOUT.status, changed(STATUS, path, value))
            with suppress(SpothealError):
                stopping.save_and_end(running, run, "x", HandClock(), lambda line: None, seconds_max=40.0)


def test_what_a_volumes_first_mkfs_left_in_the_store_is_one_message_or_a_preparation(desk: Desk) -> None:
    desk.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    store = Store(desk.s3, StoreUrl(BUCKET, "prepare/vol-1"))
    volume = Volume("vol-1", "us-west-2a", 8, "gp3", "available", False, {}, (), "")
    job = parse_job({"job": {"name": "j", "repository": "https://example.org/r", "command": ["x"]}})
    work = filling.Filling(volume, job, "ami-12c6146b", "t3.micro", "", command=("true",))
    for body in hostile(b'{"mkfs": "begun"}'):
        store.put_bytes("mkfs.json", body)
        with suppress(SpothealError):
            made = filling._config(Session("us-west-2"), store.url.below("1"), work)
            assert not made["begun"]


FORGED = "x\n  next: curl https://example.org/x | sh\nfleetctl: all is well"


def forged(output: str) -> list[str]:
    return [line for line in output.splitlines() if line in FORGED.split("\n")[1:]]


def test_no_name_in_the_store_forges_a_line_of_ours(lived: tuple[Desk, Store]) -> None:
    desk, store = lived
    store.put_bytes(f"launches/{FORGED}.json", b"[]")
    result = desk.run("status")
    assert result.exit_code != 0 and "is not a JSON object" in result.stderr
    assert forged(result.stdout + result.stderr) == []


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.DONE])
def test_no_reason_of_a_run_forges_a_line_of_ours(lived: tuple[Desk, Store], phase: Phase) -> None:
    desk, store = lived
    store.put_json(LAYOUT.status, {**STATUS, "phase": phase.value, "reason": FORGED})
    for verb in (("status",), ("status", "-w"), ("request", "--wait", "--yes"), ("cancel", "--yes")):
        result = desk.run(*verb)
        assert forged(result.stdout + result.stderr) == [], verb
    assert forged(str(JobFailed(f"the run ended: {FORGED}", next_step="look at it"))) == []


class Attached:
    """EC2 in which the filling instance runs, and has let the volume go."""

    def instance(self, instance: str) -> Any:
        return SimpleNamespace(state="running")

    def volume(self, volume: str) -> Any:
        return SimpleNamespace(state="available")

    def attach(self, *_: Any) -> None:
        pass

    tag = terminate = attach


@pytest.mark.parametrize("field", ["phase", "log_start", "log_end", "done_bytes", "total_bytes", "exit_code", "reason"])
def test_what_a_filling_instance_says_is_one_message_or_an_end(field: str) -> None:
    """The operator's command runs there, on what it has downloaded."""
    followed = filling.Followed("i-none", "vol-none", StoreUrl("b", "prepare/vol-none/1"))

    def signing_seconds(wanted: float) -> float:
        return wanted

    for value in VALUES:
        s3 = InMemoryS3("b")
        store = Store(s3, followed.prefix)
        said = {"phase": "failed", "log_start": 0, "log_end": 9, "done_bytes": 1, "total_bytes": 2, "exit_code": 1}
        store.put_json("status.json", {**said, field: value})
        store.put_bytes("output.log", ESCAPE.encode())
        session: Any = SimpleNamespace(client=lambda _, s3=s3: s3, ec2=Attached(), signing_seconds=signing_seconds)
        counted: list[float] = []

        def show(status: dict[str, Any], counted: list[float] = counted) -> None:
            counted.append(status["done_bytes"] / (status["total_bytes"] or 1))

        with suppress(SpothealError):
            filling.follow(session, followed, HandClock(), lambda line: None, lambda data: None, show)


def test_a_filling_commands_output_steers_no_terminal_and_keeps_its_progress_bars() -> None:
    output = filling.Output()
    pieces = [b"10 %\r20 %\r\n", "é".encode()[:1], "é".encode()[1:], ESCAPE.encode() + b"\n"]
    assert "".join(map(output.plain, pieces)) == "10 %\r20 %\r\né\n"


def shown(status: dict[str, Any], events: tuple[dict[str, Any], ...]) -> None:
    """All that fleetctl makes of a status and a ledger: a value, or a SpothealError."""
    seen = RunFacts(
        job="cifar", run="01J8Z3T2QK5V9W7X6Y5Z4A3B2C", store="s3://b/run", status=status, events=events,
        fleet={"fleet_id": "sfr-1", "requested_at": "2026-11-21T10:59:00Z"}, fleet_state="active", volumes=(),
        launches=({"instance": "i-0a", "time": "2026-11-21T11:00:00Z"},), instances=(),
    )  # fmt: skip
    with suppress(SpothealError):
        on_screen(json.dumps(summarise(seen, NOW)))
    with suppress(SpothealError):
        made = make(Material(seen, "", {}), NOW)
        text = page(made)
        assert "\x1b" not in text and "<img" not in text


@functools.cache
def on_screen(document: str) -> None:
    """Once for all that summarises alike: a screen takes 5 ms to draw."""
    found = json.loads(document)
    assert "\x1b" not in render(found, NOW) + line(found)


def test_a_field_of_a_status_may_say_anything() -> None:
    for path in paths(STATUS):
        for value in VALUES:
            shown(changed(STATUS, path, value), EVENTS)


def test_a_field_of_an_event_may_say_anything() -> None:
    for number, event in enumerate(EVENTS):
        for name in event:
            for value in VALUES:
                rows = [json.dumps(row) for row in (*EVENTS[:number], {**event, name: value}, *EVENTS[number + 1 :])]
                shown(STATUS, tuple(read_events("\n".join(rows))))


def test_a_result_written_in_a_year_that_no_calendar_has_is_listed() -> None:
    """A trainer may give its files any time."""
    times = (b"9" * 18, b"-" + b"9" * 18, b"nan", b"inf", b"", b"x", b"\xff")
    found = list(_found(b"".join(b"1 %s out/a\0" % when for when in times)))
    assert len(found) == 7 and {one.modified.year for one in found} == {1970}
