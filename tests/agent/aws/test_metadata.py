"""The metadata client against a real HTTP server that answers in every way a test can think of."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone

import pytest
from imds_server import Imds, Reply, imds

from spotheal.agent.aws.imds import (
    IDENTITY,
    NOTHING,
    REBALANCE,
    SPOT_ACTION,
    UNKNOWN,
    Identity,
    Metadata,
    Rebalance,
    SpotAction,
    default_endpoint,
)
from spotheal.agent.protocol.clock import Stop, SystemClock
from spotheal.agent.protocol.errors import ConfigError, PermissionDenied, Retryable

NOTICE = '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'
WHEN = datetime(2026, 11, 21, 8, 22, tzinfo=timezone.utc)
DOCUMENT = json.dumps({
    "accountId": "123456789012", "architecture": "x86_64", "availabilityZone": "us-west-2b", "billingProducts": None,
    "imageId": "ami-0abc1234def567890", "instanceId": "i-0123456789abcdef0", "instanceType": "p3.2xlarge",
    "privateIp": "10.0.0.7", "region": "us-west-2", "version": "2017-09-30",
})  # fmt: skip
ME = Identity("i-0123456789abcdef0", "us-west-2b", "us-west-2", "p3.2xlarge", "123456789012", "ami-0abc1234def567890",
              address="10.0.0.7")  # fmt: skip


class QuickClock(SystemClock):
    """Sleeps take no time, and are added to what `monotonic` says."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return super().monotonic() + sum(self.slept)

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.slept.append(seconds)
        return until is not None and until.is_set()


@pytest.fixture
def service() -> Iterator[Imds]:
    with imds() as running:
        yield running


@pytest.fixture
def clock() -> QuickClock:
    return QuickClock()


@pytest.fixture
def client(service: Imds, clock: QuickClock) -> Metadata:
    return Metadata(service.endpoint, clock, timeout_seconds=0.25)


# --------------------------------------------------------------------------------------------------------- what is said
def test_the_identity_document_names_the_machine(service: Imds, client: Metadata) -> None:
    service.says(IDENTITY, DOCUMENT)
    assert client.identity() == ME


def test_a_404_is_nothing(client: Metadata) -> None:
    assert (client.spot_action(), client.rebalance()) == (NOTHING, NOTHING)
    assert client.fault == ""


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_a_notice_carries_its_action_and_its_time(service: Imds, client: Metadata, action: str) -> None:
    service.says(SPOT_ACTION, NOTICE.replace("terminate", action))
    assert client.spot_action() == SpotAction(action, WHEN)


def test_a_recommendation_carries_its_time(service: Imds, client: Metadata) -> None:
    service.says(REBALANCE, '{"noticeTime": "2026-11-21T08:22:00Z"}')
    assert client.rebalance() == Rebalance(WHEN)


SENSELESS = [
    "", "null", "[]", "terminate", "{}", "<html><body>404 - Not Found</body></html>", '{"action": "terminate"}',
    '{"action": "reboot", "time": "2026-11-21T08:22:00Z"}', '{"action": "terminate", "time": "soon"}',
    '{"action": "terminate", "time": "2026-11-21T08:22:00"}', '{"action": "terminate", "time": null}',
    '{"action": ["terminate"], "time": "2026-11-21T08:22:00Z"}', '{"action": "terminate", "time": 1795249320}',
    '{"action": "terminate", "time": "0001-01-01T00:00:00Z"}',
    '{"action": "terminate", "time": "9999-12-31T23:59:59Z"}',
    '{"action": "terminate", "time": "0001-01-01T00:00:00+14:00"}', NOTICE[:-4], "\ufeff" + NOTICE, "[" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("body", SENSELESS)
def test_what_makes_no_sense_is_unknown(service: Imds, client: Metadata, body: str) -> None:
    service.says(SPOT_ACTION, body)
    service.says(REBALANCE, body)
    assert (client.spot_action(), client.rebalance()) == (UNKNOWN, UNKNOWN)
    assert client.fault


@pytest.mark.parametrize("reply", [
    Reply(500), Reply(503, b"Slow down"), Reply(429), Reply(200, b"\xff\xfe\x00"), Reply(400), Reply(204),
    Reply(302, headers=(("Location", "/latest/meta-data/elsewhere"),)),
    Reply(200, NOTICE.encode(), headers=(("Content-Encoding", "gzip"),)),
])  # fmt: skip
def test_an_answer_that_is_none_is_unknown(service: Imds, client: Metadata, reply: Reply) -> None:
    service.says("/latest/meta-data/elsewhere", NOTICE)
    service.says(SPOT_ACTION, reply)
    assert client.spot_action() is UNKNOWN
    assert ("GET", "/latest/meta-data/elsewhere") not in service.requests


def test_a_service_that_is_down_is_unknown(clock: QuickClock) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        client = Metadata(f"http://127.0.0.1:{unused.getsockname()[1]}", clock)
        assert client.spot_action() is UNKNOWN


def test_a_service_that_accepts_and_says_nothing_is_unknown(clock: QuickClock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = Metadata(f"http://127.0.0.1:{mute.getsockname()[1]}", clock, timeout_seconds=0.1)
        assert client.spot_action() is UNKNOWN


def test_a_slow_answer_is_unknown_and_the_next_quick_one_counts(service: Imds, client: Metadata) -> None:
    slow = Reply(body=NOTICE.encode(), delay_seconds=5)
    service.says(SPOT_ACTION, slow, slow, slow, NOTICE)
    assert (client.spot_action(), client.spot_action()) == (UNKNOWN, SpotAction("terminate", WHEN))


def test_an_answer_that_comes_in_drips_is_given_up(service: Imds, client: Metadata) -> None:
    service.says(SPOT_ACTION, Reply(body=b" " * 10_000 + NOTICE.encode(), drip_seconds=0.05))
    assert client.spot_action() is UNKNOWN
    assert "too long" in client.fault


def test_an_answer_without_end_is_given_up(service: Imds, client: Metadata) -> None:
    service.says(SPOT_ACTION, Reply(body=b" " * 1_000_000 + NOTICE.encode()))
    assert client.spot_action() is UNKNOWN
    assert "no end" in client.fault


def test_random_bytes_in_place_of_http_are_unknown_and_raise_nothing(clock: QuickClock) -> None:
    """300 answers: whole, cut and flipped ones, with senseless heads and lengths."""
    rng = random.Random(7)
    notice = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(NOTICE) + NOTICE.encode()
    heads = [b"HTTP/1.1 200 OK\r\n", b"HTTP/9.9 abc\r\n", b"HTTP/1.1 -1\r\n", b"\x16\x03\x01", b"", b"\r\n\r\n"]
    fields = [b"Transfer-Encoding: chunked\r\n", b"Content-Length: -5\r\n", b"Content-Length: 10, 20\r\n", b": \r\n",
              b"Content-Encoding: deflate\r\n", b"Set-Cookie: \xff=\x00\r\n", b"Content-Length: 99\r\n", b"A" * 70_000]
    answers = [rng.choice(heads) + b"".join(rng.choices(fields, k=rng.randrange(4))) + b"\r\n" + rng.randbytes(40)
               for _ in range(200)]  # fmt: skip
    answers += [notice[: rng.randrange(len(notice))] for _ in range(60)]
    answers += [b"HTTP/1.1 200 OK\r\n\r\n" + rng.randbytes(60) for _ in range(40)]
    with raw_server(answers) as endpoint:
        client = Metadata(endpoint, clock, timeout_seconds=0.3)
        while answers:
            assert (client.spot_action(), client.rebalance()) == (UNKNOWN, UNKNOWN)


@contextmanager
def raw_server(answers: list[bytes]) -> Iterator[str]:
    """Gives a good token, then one of `answers` to each question, as it stands."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                asked = connection.recv(65536)
                token = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc"
                connection.sendall(token if asked.startswith(b"PUT") else answers.pop() if answers else b"")
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1)
                while connection.recv(65536):
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


# --------------------------------------------------------------------------------------------------------------- tokens
def test_one_token_serves_many_questions(service: Imds, client: Metadata) -> None:
    for _ in range(5):
        client.spot_action()
    assert service.requests.count(("PUT", "/latest/api/token")) == 1


def test_a_token_is_renewed_before_it_expires(service: Imds, client: Metadata, clock: QuickClock) -> None:
    client.spot_action()
    clock.slept.append(21600 - 16)
    client.spot_action()
    assert service.given == 1
    clock.slept.append(2)
    client.spot_action()
    assert service.given == 2


def test_a_401_is_answered_with_a_new_token(service: Imds, client: Metadata) -> None:
    client.spot_action()
    service.expire_tokens()
    service.says(SPOT_ACTION, NOTICE)
    assert client.spot_action() == SpotAction("terminate", WHEN)
    assert service.given == 2


def test_401_for_ever_is_unknown_and_asks_a_bounded_number_of_times(service: Imds, client: Metadata) -> None:
    service.every = lambda method, path: Reply(401) if method == "GET" else None
    assert client.spot_action() is UNKNOWN
    assert len(service.requests) <= 12


@pytest.mark.parametrize("token", [b"", b"<html>login</html>", b"two words", b"line\r\nX: 1", b"x" * 2000, b"\xc3\xa9"])
def test_a_token_that_is_none_is_never_sent(service: Imds, client: Metadata, token: bytes) -> None:
    service.every = lambda method, path: Reply(200, token) if method == "PUT" else None
    assert client.spot_action() is UNKNOWN
    assert all(method == "PUT" for method, _ in service.requests)


@pytest.mark.parametrize("status", [400, 403, 404, 405, 500])
def test_without_a_token_nothing_is_asked(service: Imds, client: Metadata, status: int) -> None:
    """No silent fallback to version 1."""
    service.every = lambda method, path: Reply(status) if method == "PUT" else Reply(200, NOTICE.encode())
    assert client.spot_action() is UNKNOWN
    assert not any(method == "GET" for method, _ in service.requests)


def test_no_proxy_is_used(service: Imds, clock: QuickClock, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    service.says(SPOT_ACTION, NOTICE)
    assert Metadata(service.endpoint, clock).spot_action() == SpotAction("terminate", WHEN)


# -------------------------------------------------------------------------------------------------------------- at boot
def test_boot_waits_for_a_service_that_comes_up_late(service: Imds, client: Metadata) -> None:
    service.token_replies = [Reply(503)] * 5
    service.says(IDENTITY, Reply(404), "not yet", DOCUMENT)
    said: list[str] = []
    assert client.identity(progress=said.append) == ME
    assert said and all("waiting for IMDS" in line for line in said)


def test_boot_gives_up_in_time_and_says_what_to_check(service: Imds, client: Metadata, clock: QuickClock) -> None:
    service.every = lambda method, path: Reply(500)
    with pytest.raises(Retryable) as caught:
        client.identity(wait_seconds_max=600)
    assert 500 < sum(clock.slept) <= 600
    assert "firewall" in caught.value.next_step and service.endpoint in caught.value.message


def test_a_service_that_is_switched_off_is_said_at_once(service: Imds, client: Metadata, clock: QuickClock) -> None:
    service.every = lambda method, path: Reply(403)
    with pytest.raises(PermissionDenied) as caught:
        client.identity()
    assert "modify-instance-metadata-options" in caught.value.next_step
    assert sum(clock.slept) < 1


@pytest.mark.parametrize("key", ["instanceId", "availabilityZone", "region", "instanceType", "accountId", "imageId"])
@pytest.mark.parametrize("value", [None, 7, "", "../../etc", "i-0; reboot", "i-0\n"])
def test_an_identity_with_a_wrong_field_is_not_believed(
    service: Imds, client: Metadata, key: str, value: object
) -> None:
    service.says(IDENTITY, json.dumps(json.loads(DOCUMENT) | {key: value}))
    with pytest.raises(Retryable, match=key):
        client.identity(wait_seconds_max=0)


# --------------------------------------------------------------------------------------------------------- the endpoint
def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", raising=False)
    assert default_endpoint() == "http://169.254.169.254"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "IPv6")
    assert default_endpoint() == "http://[fd00:ec2::254]"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1234/")
    assert Metadata().endpoint == "http://127.0.0.1:1234"


@pytest.mark.parametrize("endpoint", ["169.254.169.254", "file:///etc/passwd", "http://"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        Metadata(endpoint)


def test_importing_the_client_costs_a_trainer_nothing() -> None:
    code = "import sys, spotheal.agent.aws.imds; print('requests' in sys.modules, 'boto3' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "False False"
