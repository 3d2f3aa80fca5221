"""The notice reaches the trainer from IMDS, from the agent's file and by SIGTERM; a rebalance only asks for a save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from imds_server import Imds, Reply, imds

from spotheal.agent.aws.imds import REBALANCE, SPOT_ACTION, Metadata
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.contract import Notice, write_atomically
from spotheal.training.notice import Watcher


@pytest.fixture
def service() -> Iterator[Imds]:
    with imds() as running:
        yield running


def soon(seconds: float = 120) -> datetime:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).replace(microsecond=0)


def eventually(seen: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if seen():
            return True
        time.sleep(0.02)
    return seen()


def action(time: datetime) -> str:
    return f'{{"action": "terminate", "time": "{rfc3339(time)}"}}'


def test_a_notice_in_imds_leaves_the_agent_its_forty_seconds(service: Imds) -> None:
    at = soon()
    with Watcher(metadata=Metadata(service.endpoint)) as watcher:
        assert watcher.notice is None
        assert watcher.seconds_left() == float("inf")
        service.says(SPOT_ACTION, action(at))
        assert eventually(lambda: watcher.notice is not None)
        assert watcher.notice == Notice("terminate", at - timedelta(seconds=40))
        assert watcher.seconds_left() < 80


@pytest.mark.parametrize(
    "reply", [Reply(503), Reply(body=b"<html>"), Reply(body=b"{}"), Reply(401), Reply(body=b'{"action":"x"}')]
)
def test_an_answer_that_makes_no_sense_is_no_notice(reply: Reply, service: Imds) -> None:
    service.says(SPOT_ACTION, reply)
    service.says(REBALANCE, reply)
    watcher = Watcher(metadata=Metadata(service.endpoint))
    watcher.poll()
    assert watcher.notice is None
    assert not watcher.take_save_request()


def test_a_notice_long_past_is_none(service: Imds) -> None:
    service.says(SPOT_ACTION, action(soon(-3600)))
    watcher = Watcher(metadata=Metadata(service.endpoint))
    watcher.poll()
    assert watcher.notice is None


def test_a_rebalance_recommendation_asks_for_one_save(service: Imds) -> None:
    service.says(REBALANCE, f'{{"noticeTime": "{rfc3339(soon(-5))}"}}')
    watcher = Watcher(metadata=Metadata(service.endpoint))
    watcher.poll()
    assert watcher.take_save_request()
    watcher.poll()
    assert not watcher.take_save_request()
    assert watcher.notice is None


def test_the_agents_file_is_seen_while_imds_hangs(service: Imds, tmp_path: Path) -> None:
    service.every = lambda method, path: Reply(delay_seconds=5)
    notice = Notice("stop", soon(60))
    with Watcher(metadata=Metadata(service.endpoint), notice_file=tmp_path / "notice") as watcher:
        write_atomically(tmp_path / "notice", notice.to_json())
        assert eventually(lambda: watcher.notice is not None)
    assert watcher.notice == notice


def test_sigterm_takes_the_deadline_of_the_agents_file_where_there_is_one(tmp_path: Path) -> None:
    notice = Notice("terminate", soon(60))
    with Watcher(notice_file=tmp_path / "notice") as watcher:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watcher.notice is not None
        assert watcher.notice.action == "shutdown"
    (tmp_path / "notice").write_text(notice.to_json())
    with Watcher(notice_file=tmp_path / "notice") as watcher:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watcher.notice == notice


def test_sigusr1_asks_for_a_save_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    with Watcher() as watcher:
        assert not watcher.take_save_request()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watcher.take_save_request()
        assert not watcher.take_save_request()
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == before


def test_it_can_be_used_outside_the_main_thread(tmp_path: Path) -> None:
    heard: list[Notice | None] = []

    def listen() -> None:
        with Watcher(notice_file=tmp_path / "notice") as watcher:
            watcher.poll()
            heard.append(watcher.notice)

    (tmp_path / "notice").write_text(Notice("terminate", soon(60)).to_json())
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard[0] is not None


def test_without_any_source_there_is_never_a_notice() -> None:
    watcher = Watcher.from_environment({}, imds=False)
    watcher.poll()
    assert watcher.notice is None
