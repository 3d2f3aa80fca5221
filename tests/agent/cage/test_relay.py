"""The relay that a caged trainer has in place of the metadata service, and the rules that lead to it."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from spotheal.agent.aws.imds import NOTHING, REBALANCE, SPOT_ACTION, Metadata, SpotAction
from spotheal.agent.cage import imds_proxy, network
from spotheal.agent.cage.imds_proxy import Relay
from spotheal.agent.cage.network import close_imds, rules
from spotheal.agent.protocol.errors import Fatal, Retryable, SetupFailed

LOG = structlog.get_logger()
NOTICE = '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'
CREDENTIALS = "/latest/meta-data/iam/security-credentials/"


class Service:
    """The real service, as far as the relay asks it."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.down = False
        self.asked: list[str] = []

    def ask(self, path: str) -> str | None:
        self.asked.append(path)
        if self.down:
            raise Retryable("no answer")
        return self.said.get(path)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def served(service: Service) -> Iterator[Relay]:
    found = Relay(service.ask)
    yield found
    found.close()


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def token(url: str, ttl: str = "60") -> str:
    return ask(f"{url}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds=ttl)[1]


# ------------------------------------------------------------------------------------------------------ what it answers
def test_code_that_polls_the_service_polls_the_relay_unchanged(served: Relay, service: Service) -> None:
    polls = Metadata(served.url)
    assert (polls.spot_action(), polls.rebalance()) == (NOTHING, NOTHING)
    service.said[SPOT_ACTION] = NOTICE
    time.sleep(imds_proxy.CACHED_SECONDS)
    seen = polls.spot_action()
    assert isinstance(seen, SpotAction) and seen.action == "terminate"


@pytest.mark.parametrize(
    "path",
    [
        CREDENTIALS,
        CREDENTIALS + "role",
        "/" + CREDENTIALS,
        "/latest/meta-data/iam/info",
        "/latest/user-data",
        "/latest/dynamic/instance-identity/document",
        "/latest/meta-data/identity-credentials/ec2/security-credentials/ec2-instance",
    ],
)
def test_credentials_user_data_and_identity_are_refused_with_the_reason(served: Relay, path: str) -> None:
    status, said = ask(served.url + path, X_aws_ec2_metadata_token=token(served.url))
    assert status == 403
    assert "trainer_policy" in said


@pytest.mark.parametrize(
    "path",
    ["/", "/latest", "/latest/meta-data/", "/latest/meta-data/instance-id", "/2021-03-23/meta-data",
     "/latest/meta-data/../user-data"],
)  # fmt: skip
def test_everything_else_is_not_there_and_the_real_service_is_never_asked_for_it(
    served: Relay, service: Service, path: str
) -> None:
    assert ask(served.url + path, X_aws_ec2_metadata_token=token(served.url))[0] == 404
    assert service.asked == []


@settings(deadline=None)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60))
def test_no_path_makes_the_relay_ask_for_another_than_the_two(path: str) -> None:
    service = Service()
    made = Relay.__new__(Relay)
    made._ask, made._credentials, made._key = service.ask, None, b"k" * 32
    made._seen, made._lock = {}, threading.Lock()
    good = made.put("/latest/api/token", "60", False).body
    made.get("/latest/meta-data/" + path, good)
    made.get("/" + path, good)
    assert set(service.asked) <= {SPOT_ACTION, REBALANCE}


def test_without_a_token_nothing_is_answered(served: Relay) -> None:
    assert ask(served.url + SPOT_ACTION)[0] == 401
    assert ask(served.url + SPOT_ACTION, X_aws_ec2_metadata_token="A" * 56)[0] == 401
    other = Relay(Service().ask)
    try:
        assert ask(served.url + SPOT_ACTION, X_aws_ec2_metadata_token=token(other.url))[0] == 401
    finally:
        other.close()


@pytest.mark.parametrize("ttl", ["", "0", "21601", "-1", "1e3", "٣"])
def test_a_token_is_given_for_the_times_that_aws_gives_one_for(served: Relay, ttl: str) -> None:
    if ttl.isascii():
        assert ask(f"{served.url}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds=ttl)[0] == 400
    assert served.put("/latest/api/token", ttl, False).status == 400


def test_a_token_ends_and_a_forwarded_request_gets_none(served: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    short = token(served.url, "1")
    assert ask(served.url + SPOT_ACTION, X_aws_ec2_metadata_token=short)[0] == 404
    later = time.monotonic() + 2
    monkeypatch.setattr(imds_proxy.time, "monotonic", lambda: later)
    assert served.get(SPOT_ACTION, short).status == 401
    assert served.put("/latest/api/token", "60", True).status == 403


@pytest.mark.parametrize("method", ["POST", "DELETE", "CONNECT"])
def test_other_methods_do_nothing(served: Relay, service: Service, method: str) -> None:
    assert ask(served.url + SPOT_ACTION, method)[0] == 501
    assert service.asked == []


def test_a_service_that_does_not_answer_is_not_taken_for_no_notice(served: Relay, service: Service) -> None:
    service.down = True
    assert ask(served.url + SPOT_ACTION, X_aws_ec2_metadata_token=token(served.url))[0] == 503


def test_however_often_it_is_asked_the_service_is_asked_once_a_second(served: Relay, service: Service) -> None:
    good, began = token(served.url), time.monotonic()
    for _ in range(50):
        served.get(SPOT_ACTION, good)
    assert len(service.asked) <= 1 + (time.monotonic() - began) / imds_proxy.CACHED_SECONDS


def test_the_trainers_own_role_is_served_where_it_has_one() -> None:
    found = Relay(Service().ask, lambda: '{"Code": "Success"}')
    try:
        good = token(found.url)
        assert ask(found.url + CREDENTIALS, X_aws_ec2_metadata_token=good) == (200, "trainer")
        assert ask(found.url + CREDENTIALS + "trainer", X_aws_ec2_metadata_token=good) == (200, '{"Code": "Success"}')
        assert ask(found.url + CREDENTIALS + "spotheal-instance", X_aws_ec2_metadata_token=good)[0] == 403
    finally:
        found.close()


# ------------------------------------------------------------------------------------------------------------- bounded
def test_connections_beyond_the_limit_are_closed_and_slow_ones_cut_off(
    served: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imds_proxy._Handler, "timeout", 0.5)
    held = [socket.create_connection(("127.0.0.1", served.port), 10) for _ in range(imds_proxy.CONNECTIONS_MAX + 4)]
    for connection in held:
        connection.settimeout(10)
        try:
            connection.sendall(b"GET /latest")
        except OSError:
            continue
    closed = 0
    for connection in held:
        try:
            closed += connection.recv(1000) == b""
        except ConnectionError:
            closed += 1
        connection.close()
    assert closed == len(held)  # after half a second of silence, or at once
    assert ask(served.url + SPOT_ACTION)[0] == 401


def test_a_client_that_drips_bytes_is_cut_off(served: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imds_proxy, "REQUEST_SECONDS_MAX", 0.3)
    monkeypatch.setattr(imds_proxy, "IDLE_SECONDS_MAX", 0.3)
    with socket.create_connection(("127.0.0.1", served.port), 10) as connection, pytest.raises(OSError):
        for _ in range(100):  # five seconds; the end is a reset or a broken pipe
            connection.sendall(b"x")
            time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------------ the rules
def test_without_nft_the_set_up_fails_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(program: str) -> str:
        raise Fatal(f"the program {program} is not on this machine")

    monkeypatch.setattr(network.programs, "find", missing)
    with pytest.raises(SetupFailed, match="nft is not on this machine") as caught:
        close_imds(12345, 1, LOG)
    assert "dnf install nftables" in caught.value.next_step and '"imds"' in caught.value.next_step


def test_rules_that_nft_refuses_fail_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.programs, "find", lambda program: "/bin/false")
    with pytest.raises(SetupFailed, match="nft refused the rules"):
        close_imds(12345, 1, LOG)


def test_an_nfs_client_of_the_trainers_own_reaches_no_file_system() -> None:
    assert "meta skuid 7 tcp dport 2049 reject" in rules(7, 99)


def test_another_metadata_service_that_the_agent_asks_is_closed_too() -> None:
    assert "ip daddr 10.1.2.3 tcp dport 1338 redirect to :99" in rules(1, 99, "http://10.1.2.3:1338")
    assert rules(1, 99, "http://169.254.169.254") == rules(1, 99) == rules(1, 99, "http://localhost:8")


USER = "spotheal-test-r"
_SERVER = """
import http.server, socket, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"REAL SERVICE: AKIAROLECREDENTIALS"
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    do_PUT = do_GET
    def log_message(self, *a): pass
class S(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
port = int(sys.argv[2]) if len(sys.argv) > 2 else 80
s = S((sys.argv[1], port), H); print("ready", flush=True); s.serve_forever()
"""
_INSIDE = """
import sys
sys.path.insert(0, sys.argv[1])
from spotheal.agent.cage import network
from spotheal.agent.cage.imds_proxy import Relay
import structlog
relay = Relay(lambda path: '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}' if "spot" in path else None)
for _ in range(2):
    network.close_imds(int(sys.argv[2]), relay.port, structlog.get_logger())
print("ready", flush=True)
sys.stdin.readline()
network.open_imds(structlog.get_logger())
print("open", flush=True)
sys.stdin.readline()
"""
# A foreign program with an address of its own in it, and a child of its own; it knows nothing of us.
_TRAINER = """
import os, subprocess, sys, urllib.request, urllib.error
def ask(url, method="GET", **headers):
    request = urllib.request.Request(url, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code}"
    except OSError as error:
        return type(error).__name__ if not isinstance(error, urllib.error.URLError) else type(error.reason).__name__
if sys.argv[1:] == ["child"]:
    base = "http://169.254.169.254"
    if os.fork() == 0:
        os.setsid()
        print("grandchild", ask(base + "/latest/meta-data/iam/security-credentials/"), flush=True)
        os._exit(0)
    os.wait()
    sys.exit()
for base in ("http://169.254.169.254", "http://[fd00:ec2::254]"):
    token = ask(base + "/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60").partition(" ")[2]
    for path in ("/latest/meta-data/iam/security-credentials/", "/latest/user-data",
                 "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"):
        print(base[7:12], path[8:], ask(base + path, X_aws_ec2_metadata_token=token), flush=True)
    print(base[7:12], "v1", ask(base + "/latest/meta-data/iam/security-credentials/"), flush=True)
for address in ("169.254.170.2", "169.254.170.23"):
    print(address, ask(f"http://{address}/"), flush=True)
print("nfs", ask("http://127.0.0.9:2049/"), flush=True)
subprocess.run([sys.executable, "-I", "-c", SOURCE, "child"])
"""


@pytest.mark.root
@pytest.mark.processes
@pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in ("ip", "nft", "useradd")),
    reason="needs root, ip, nft and useradd: a network namespace with a metadata service of its own",
)
def test_from_the_cages_user_no_credentials_are_to_be_had_by_any_address_and_polling_works() -> None:
    space = f"spotheal-{os.getpid()}"
    subprocess.run(["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", USER], check=True)
    account = pwd.getpwnam(USER)
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    inside = ["ip", "netns", "exec", space]
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [*inside, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(program)
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        return program

    def trainer(user: str) -> str:
        source = _TRAINER.replace("SOURCE", repr(_TRAINER.replace("SOURCE", "''")))
        become = ["setpriv", f"--reuid={user}", f"--regid={account.pw_gid}", "--clear-groups"]
        done = subprocess.run(
            [*inside, *become, python, "-I", "-c", source], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stderr == ""
        return done.stdout

    try:
        subprocess.run(["ip", "netns", "add", space], check=True)
        addresses = ("169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "fd00:ec2::254/128")
        for command in ("link set lo up", *(f"addr add {address} dev lo" for address in addresses)):
            subprocess.run([*inside, "ip", *command.split()], check=True)
        for address in addresses:
            start(python, "-I", "-c", _SERVER, address.partition("/")[0])
        start(python, "-I", "-c", _SERVER, "127.0.0.9", "2049")
        ours = start(sys.executable, "-c", _INSIDE, _import_path(), str(account.pw_uid))
        said = trainer(str(account.pw_uid))
        assert "REAL SERVICE" not in said
        for base in ("169.2", "[fd00"):
            lines = [line.removeprefix(base + " ") for line in said.splitlines() if line.startswith(base + " ")]
            assert lines == [
                "meta-data/iam/security-credentials/ 403",
                "user-data 403",
                f"meta-data/spot/instance-action 200 {NOTICE}",
                "meta-data/events/recommendations/rebalance 404",
                "v1 401",
            ]
        assert "169.254.170.2 ConnectionRefusedError" in said and "169.254.170.23 ConnectionRefusedError" in said
        assert "grandchild 401" in said
        assert "nfs ConnectionRefusedError" in said
        assert trainer("0").count("REAL SERVICE") >= 5  # the agent itself still asks the real ones
        assert ours.stdin is not None and ours.stdout is not None
        ours.stdin.write("\n")
        ours.stdin.flush()
        assert ours.stdout.readline() == "open\n"
        assert subprocess.run([*inside, "nft", "list", "tables"], capture_output=True, text=True).stdout == ""
    finally:
        for program in started:
            program.kill()
            program.wait()
            for stream in (program.stdin, program.stdout):
                assert stream is not None
                stream.close()
        subprocess.run(["ip", "netns", "del", space], check=False)
        subprocess.run(["userdel", USER], capture_output=True, check=False)


def _import_path() -> str:
    return str(Path(__file__).resolve().parents[3] / ".ci/import_path")
