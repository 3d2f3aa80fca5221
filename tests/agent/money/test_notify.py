"""Messages: to a webhook and a topic, once each, tried again where that helps, and never in the run's way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import structlog
from agent_world import AgentWorld
from money_world import Hours, Kept
from moto import mock_aws

from spotheal.agent.money import notify
from spotheal.agent.money.messages import end_message, interruption_message, limit_message
from spotheal.agent.money.notify import Message, Messenger
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import ExitCode, Fatal, Retryable
from spotheal.agent.protocol.job import NotifyTable
from spotheal.agent.protocol.names import Phase

FACTS = {"job": "resnet50", "run": "01KA", "store": "s3://bucket/resnet50/01KA"}
DONE = Message("done", "end-done-1", "done: the trainer exited with 0")


class Receiver:
    """A webhook on 127.0.0.1. `answers` are given in turn, then 200; `posts` is what it got."""

    def __init__(self, *answers: int, location: str = "") -> None:
        self.answers, self.location = list(answers), location
        self.posts: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.posts.append({"path": self.path, "type": self.headers["Content-Type"], **json.loads(body)})
                self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def do_GET(self) -> None:
                receiver.posts.append({"path": self.path})
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/T0/SECRETPART"

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Topic:
    def __init__(self) -> None:
        self.published: list[dict[str, str]] = []

    def publish(self, **call: str) -> None:
        self.published.append(call)


@pytest.fixture
def told() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def messenger(
    webhook: str = "", sns: str = "", store: Kept | None = None, client: Topic | None = None, post: Any = None
) -> Messenger:
    table = NotifyTable(webhook=webhook, sns=sns)
    return Messenger(table, store or Kept(), Hours(), structlog.get_logger(), FACTS, client, post)


def test_a_webhook_gets_text_as_slack_takes_it_and_the_same_in_fields() -> None:
    with Receiver() as hook:
        message = Message("failed", "m", "failed: exit code 1", [f"line {n}" for n in range(30)], {"step": 7})
        assert messenger(hook.url).tell(message)
    (post,) = hook.posts
    assert post["type"].startswith("application/json")
    assert post["text"].startswith("spotheal resnet50: failed: exit code 1\n```\nline 10\n")
    assert ("failed", "resnet50", 7, 20) == (post["event"], post["job"], post["step"], len(post["tail"]))


def test_a_topic_gets_text_and_a_subject_that_sns_takes() -> None:
    topic = Topic()
    arn = "arn:aws:sns:us-west-2:123456789012:spotheal"
    assert messenger(sns=arn, client=topic).tell(Message("done", "m", "fertig: 12 Epochen ✓"))
    (call,) = topic.published
    assert call["Subject"].isascii() and len(call["Subject"]) < 100 and "\n" not in call["Subject"]
    assert "fertig: 12 Epochen ✓" in call["Message"]


def test_boto3_takes_what_is_published_and_a_topic_that_is_not_there_fails_nothing(told: list[Any]) -> None:
    with mock_aws():
        client = boto3.client("sns", region_name="us-west-2")
        arn = client.create_topic(Name="spotheal")["TopicArn"]
        assert messenger(sns=arn, client=client).tell(DONE)
        assert not messenger(sns=f"{arn}-gone", client=client).tell(DONE)
    assert "the sns was not told" in str(told)


def test_what_was_told_is_not_told_again_by_another_instance() -> None:
    store = Kept()
    with Receiver() as hook:
        assert messenger(hook.url, store=store).tell(DONE)
        assert messenger(hook.url, store=store).tell(DONE)
        assert messenger(hook.url, store=store).tell(Message("done", "end-done-2", "after a --resume"))
    assert 2 == len(hook.posts)


def test_a_hook_that_fails_for_a_while_is_tried_again(told: list[Any]) -> None:
    with Receiver(503, 429) as hook:
        assert messenger(hook.url).tell(DONE)
    assert 3 == len(hook.posts)


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_a_hook_that_refuses_is_asked_once_and_named_without_its_secret(status: int, told: list[Any]) -> None:
    with Receiver(status) as hook:
        assert not messenger(hook.url).tell(DONE)
    assert 1 == len(hook.posts)
    assert f"answered {status}" in str(told) and "SECRETPART" not in str(told)


def test_a_redirect_is_not_followed_wherever_it_leads(told: list[Any]) -> None:
    with Receiver() as other, Receiver(307, 302, location=other.url) as hook:
        assert not messenger(hook.url).tell(DONE)
        assert not messenger(hook.url).tell(DONE)
    assert [] == other.posts
    assert "a redirect to 127.0.0.1, which is not followed" in str(told)


def test_a_hook_that_nobody_answers_costs_no_more_than_its_time(told: list[Any]) -> None:
    calls: list[str] = []

    def dead(url: str, body: bytes, seconds: float) -> tuple[int, Mapping[str, str]]:
        calls.append(url)
        raise Retryable("it does not answer")

    one = messenger("https://hooks.example.org/x", post=dead)
    assert not one.tell(DONE, seconds_max=30)
    assert one.clock.monotonic() <= 30 and 4 <= len(calls) <= 8


def test_one_channel_that_fails_keeps_nothing_from_the_other(told: list[Any]) -> None:
    topic, store = Topic(), Kept()
    with Receiver(404, 404) as hook:
        table = NotifyTable(hook.url, "arn:aws:sns:us-west-2:123456789012:x")
        for _ in range(2):
            Messenger(table, store, Hours(), structlog.get_logger(), FACTS, topic).tell(DONE)
    assert (2, 1) == (len(hook.posts), len(topic.published))


def test_a_store_that_is_down_tells_all_the_same_when_it_is_back(told: list[Any]) -> None:
    store = Kept()
    store.down = True
    with Receiver() as hook:
        assert not messenger(hook.url, store=store).tell(DONE, seconds_max=5)
        store.down = False
        assert messenger(hook.url, store=store).tell(DONE)
    assert 1 == len(hook.posts)


def test_an_address_that_cannot_be_posted_to_is_a_fault_not_a_crash(told: list[Any]) -> None:
    for address in ("http://", "https://exa mple.org/", "http://[::1", "http://a..b/"):
        with pytest.raises((Fatal, Retryable)):
            notify._post(address, b"{}", 1.0)


def test_secrets_are_taken_out(told: list[Any]) -> None:
    document = messenger("http://x").document(Message("failed", "m", "no", ["token AKIAIOSFODNN7EXAMPLE here"]))
    assert "AKIAIOSFODNN7EXAMPLE" not in json.dumps(document)


# --------------------------------------------------------------------------------------------------------------- words
def test_an_end_tells_reason_last_lines_and_what_to_do() -> None:
    end = End(Phase.FAILED, "3 failures in a row\n  | Traceback\n  | ValueError: no")
    message = end_message(end, "2026-11-21T08:00:00Z", {"job": "resnet50", "step": 12}, "about $2.74")
    assert message.text.startswith("failed: 3 failures in a row; step 12; about $2.74\nnext: fleetctl logs resnet50")
    assert ["Traceback", "ValueError: no"] == list(message.tail)


def test_a_checkpoint_is_named_by_its_step_and_only_if_there_is_one() -> None:
    def next_step(**facts: int) -> str:
        return end_message(End(Phase.FAILED, "why"), "t", {"job": "j", **facts}).text.partition("\nnext: ")[2]

    assert next_step(step=12, saved_step=10).endswith("goes on from step 10, the last checkpoint")
    assert "checkpoint" not in next_step(step=12) and "--resume" in next_step(step=12)


def test_every_end_has_its_own_mark_and_next_step() -> None:
    messages = [end_message(End(phase, "why"), "t", {"job": "j"}) for phase in Phase if phase.is_end]
    assert len(messages) == len({message.mark for message in messages}) >= 5
    assert all("\nnext: " in message.text for message in messages)


def test_marks_differ_by_what_happened() -> None:
    first = interruption_message("i-0a", "us-west-2a", "terminate", "2026-11-21T08:02:00Z", 7)
    second = interruption_message("i-0a", "us-west-2a", "terminate", "2026-11-21T09:02:00Z", None)
    assert first.mark != second.mark and "step 7" in first.text and "step" not in second.text
    assert limit_message("hours", "t", "x").mark != limit_message("dollars", "t", "x").mark


# ------------------------------------------------------------------------------------------------------ the whole agent
def test_the_end_of_a_run_is_told_before_its_fleet_is_cancelled_and_only_once(tmp_path: Path) -> None:
    script = "import os, sys\nprint('line of the trainer')\nsys.exit(3)"
    with Receiver() as hook:
        world = AgentWorld(tmp_path, script, job={"notify": {"webhook": hook.url}, "limits": {"failures": 1}})
        assert ExitCode.OK == world.live()
        world.asked_to_stop.clear()
        assert ExitCode.OK == world.live()  # a start after the end: the fleet is cancelled again, nobody is told
    (post,) = hook.posts
    assert ("failed", "j", ["line of the trainer"]) == (post["event"], post["job"], post["tail"])
    assert "about $" in post["text"] and "fleetctl logs j" in post["text"]
    assert world.fleet_state().startswith("cancelled")
