"""Logs: plain for people, JSON for machines, shipped to the store, and never the cause of a stop."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import structlog

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.foreign_text import printable
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.record import logs as logs_module
from spotheal.agent.record.logs import Logs
from spotheal.fleet.run.ssh import console_keys


class Kept(Store):
    def __init__(self) -> None:
        super().__init__(None, StoreUrl("bucket", "job/run"))
        self.objects: dict[str, bytes] = {}
        self.down = False

    def put_bytes(self, key: str, body: bytes, content_type: str = "") -> None:
        if self.down:
            raise Retryable("S3 does not answer")
        self.objects[key] = body


@pytest.fixture(autouse=True)
def restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[str]]:
    """A standard error that systemd has connected with its journal."""
    with (tmp_path / "journal").open("w+") as stream:
        seen = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{seen.st_dev}:{seen.st_ino}")
        yield stream


def test_every_json_line_says_where_it_comes_from(tmp_path: Path, journal: IO[str]) -> None:
    logs = Logs(tmp_path, stderr=journal)
    logs.bind(job="j", run="R", instance="i-0a", zone="us-west-2a", term=3, attempt=2)
    logs.log.info("attached the volume", volume="vol-1")
    line = json.loads((tmp_path / "journal").read_text())
    expected = {"job": "j", "run": "R", "instance": "i-0a", "zone": "us-west-2a", "term": 3, "attempt": 2}
    assert expected == {key: line[key] for key in expected}
    assert ("attached the volume", "info", "vol-1") == (line["event"], line["level"], line["volume"])


def test_the_log_for_people_is_plain_and_marks_the_trainer(tmp_path: Path) -> None:
    logs = Logs(tmp_path, stderr=io.StringIO())
    logs.log.info("attached the volume", volume="vol-1")
    logs.trainer_line("epoch 1 loss 0.3")
    first, second = (tmp_path / "agent.log").read_text().splitlines()
    assert first.endswith("info    attached the volume  volume=vol-1")
    assert "trainer | epoch 1 loss 0.3" == second


FORGED = "2026-11-22 23:00:00 info    the run is over"
KEY_BLOCK = "-----BEGIN SSH HOST KEY KEYS-----\nssh-ed25519 AAAAEVIL x\n-----END SSH HOST KEY KEYS-----\n"


def test_no_foreign_text_forges_a_record_or_a_host_key_or_steers_the_terminal(
    tmp_path: Path, journal: IO[str]
) -> None:
    """A trainer names its files as it likes: a folder's name put its own host key on the console."""
    console = tmp_path / "console"
    console.touch()
    logs = Logs(tmp_path, stderr=journal, console=console)
    logs.log.warning(
        "set aside", now=f"a\n{FORGED}\n{KEY_BLOCK}.pt", by="\x1b]0;x\x07\x9b2J\u202e\r" + FORGED,
        exception=f"Traceback\n  File\u2028{FORGED}\n{FORGED}\n",
    )  # fmt: skip
    logs.trainer_line(f"loss\x1b]0;x\x07 \x9b2J\x85{FORGED}\u2028{FORGED}\u202e\n{FORGED}\r{FORGED}")
    for text in (console.read_bytes().decode(), (tmp_path / "agent.log").read_bytes().decode()):
        assert not [c for c in text if not c.isprintable() and c != "\n"]
        records = [line for line in text.splitlines() if not line.startswith(("    ", "trainer | "))]
        assert ["set aside"] == [line[28:].partition("  ")[0] for line in records]
        assert console_keys(text) == []
    assert 1 == len((tmp_path / "trainer.log").read_text().splitlines())


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[32mok\x1b[0m\t1", "ok\t1"), (" 42%|████▏     | 42/100", " 42%|████▏     | 42/100"), ("é 漢 🙂", "é 漢 🙂"),
     ("a\u00a0b", "a b"), ("\ud800", "?")],
)  # fmt: skip
def test_colours_go_and_progress_bars_and_every_script_stay(text: str, shown: str) -> None:
    assert shown == printable(text)


def test_people_read_plain_lines_on_the_console_whatever_the_journal_gets(tmp_path: Path, journal: IO[str]) -> None:
    console = tmp_path / "console"
    console.touch()
    logs = Logs(tmp_path, stderr=journal, console=console)
    logs.log.info("attached the volume", volume="vol-1")
    logs.trainer_line("a line for each step would push the boot's messages off the console")
    assert console.read_text() == (tmp_path / "agent.log").read_text().splitlines(keepends=True)[0]
    assert console.read_text().endswith("info    attached the volume  volume=vol-1\n")


def test_where_there_is_no_journal_standard_error_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")  # of a service that started a shell that started us
    with (tmp_path / "console").open("w") as stderr:
        Logs(tmp_path, stderr=stderr, console=tmp_path / "never").log.info("attached the volume")
    assert (tmp_path / "console").read_text() == (tmp_path / "agent.log").read_text()
    assert not (tmp_path / "never").exists()


def test_the_volume_has_a_copy_until_it_is_left(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "log", stderr=io.StringIO())
    logs.use_volume(tmp_path / "volume", "i-0a")
    logs.log.info("one")
    logs.trainer_line("two")
    logs.leave_volume()
    logs.log.info("three")
    lines = [json.loads(line) for line in (tmp_path / "volume/i-0a.jsonl").read_text().splitlines()]
    assert ["one", "two"] == [line["event"] for line in lines]


def test_what_could_not_be_shipped_is_shipped_later_and_long_logs_in_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "SEGMENT_BYTES", 100)
    store, logs = Kept(), Logs(tmp_path, stderr=io.StringIO())
    store.down = True
    logs.trainer_line("first")
    assert not logs.ship(store, "i-0a")
    store.down = False
    assert logs.ship(store, "i-0a")
    assert b"first\n" == store.objects["logs/i-0a/trainer.0000.log"]
    for number in range(50):
        logs.trainer_line(f"line {number}")
        if number % 7 == 0:
            logs.ship(store, "i-0a")
    logs.ship(store, "i-0a")
    shipped = b"".join(store.objects[key] for key in sorted(store.objects) if "trainer" in key)
    assert ["first"] + [f"line {number}" for number in range(50)] == shipped.decode().splitlines()
    store.objects.clear()
    assert logs.ship(store, "i-0a")
    assert {} == store.objects


def test_two_shipments_at_once_keep_the_segments_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat's and the handover's: the one that saw less used to number the later segments anew."""
    monkeypatch.setattr(logs_module, "SEGMENT_BYTES", 20)
    monkeypatch.setattr(logs_module, "SEGMENTS_HELD_MAX", 100)
    store, logs = Kept(), Logs(tmp_path, stderr=io.StringIO())
    put, second = store.put_bytes, threading.Thread(target=lambda: logs.ship(store, "i-0a"))

    def slow(key: str, body: bytes, content_type: str = "") -> None:
        if "trainer" in key and second.ident is None:
            for number in range(20, 60):
                logs.trainer_line(f"line {number}")
            second.start()
            second.join(0.2)  # which it outlasts: it waits for this very shipment
        put(key, body, content_type)

    monkeypatch.setattr(store, "put_bytes", slow)
    for number in range(20):
        logs.trainer_line(f"line {number}")
    logs.ship(store, "i-0a")
    second.join(5)
    logs.trainer_line("line 60")
    logs.ship(store, "i-0a")
    shipped = b"".join(store.objects[key] for key in sorted(store.objects) if "trainer" in key)
    assert [f"line {number}" for number in range(61)] == shipped.decode().splitlines()


def test_no_log_grows_without_end_and_the_store_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that printed a gigabyte took the agent's memory, the root disk and the volume for it."""
    monkeypatch.setattr(logs_module, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(logs_module, "FILE_BYTES_MAX", 2000)
    store, logs = Kept(), Logs(tmp_path / "log", stderr=io.StringIO())
    logs.use_volume(tmp_path / "volume", "i-0a")
    for number in range(10):
        logs.trainer_line(f"line {number}")
    logs.ship(store, "i-0a")
    for number in range(10, 1000):
        logs.trainer_line(f"line {number}")
    for place in ("log/agent.log", "log/trainer.log", "volume/i-0a.jsonl"):
        for name in (place, f"{place}.1"):
            assert 0 < (tmp_path / name).stat().st_size < 2500
    logs.ship(store, "i-0a")
    logs.trainer_line("the end")
    logs.ship(store, "i-0a")
    keys = [key for key in sorted(store.objects) if "trainer" in key]
    assert logs_module.SEGMENTS_HELD_MAX + 2 >= len(keys)
    shipped = b"".join(store.objects[key] for key in keys).decode().splitlines()
    lines = [line for line in shipped if not line.startswith("(")]
    assert ["line 0", "line 1"] == lines[:2]
    assert ["line 998", "line 999", "the end"] == lines[-3:]
    assert any("bytes are missing" in line for line in shipped)


def test_a_link_or_a_pipe_in_the_place_of_a_log_is_left_alone(tmp_path: Path) -> None:
    """The folder on the volume is shared with the trainer, and the agent is root."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/i-0a.jsonl").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "volume/i-0b.jsonl")
    logs = Logs(tmp_path / "log", stderr=io.StringIO())
    for instance in ("i-0a", "i-0b"):
        logs.use_volume(tmp_path / "volume", instance)
        logs.log.info("went on")
    assert not (tmp_path / "victim").exists()


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "agent.log").mkdir()
    logs = Logs(tmp_path, stderr=io.StringIO())
    logs.use_volume(Path("/proc/nowhere"), "i-0a")
    logs.log.error("went on")
    logs.trainer_line("went on")
