"""The metadata service as a caged trainer has it: whether the machine is about to be taken away, and nothing else.

    PUT /latest/api/token                                       a token, as IMDSv2 gives one
    GET /latest/meta-data/spot/instance-action                  404, or the notice
    GET /latest/meta-data/events/recommendations/rebalance      404, or the recommendation
    GET /latest/meta-data/iam/security-credentials/[trainer]    403, or the trainer's own role (`cage.trainer_policy`)

Code that polls works unchanged, by the hard-coded address too (`cage_network`). What is asked is foreign: requests are
short, connections few, a slow client is cut off, and the machine's own service, which throttles, is asked at most once
a second however often a trainer asks here.
"""

from __future__ import annotations

import base64
import errno
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from spotheal.agent.aws.imds import REBALANCE, SPOT_ACTION
from spotheal.agent.protocol.errors import SetupFailed, SpothealError

CONNECTIONS_MAX = 32
IDLE_SECONDS_MAX = 5.0  # between two requests of a connection, and between two bytes of one
REQUEST_SECONDS_MAX = 10.0  # from a request's first byte to its last
CACHED_SECONDS = 1.0
ROLE = "trainer"  # the name that the credentials are listed under
_PORT_TRIES = 20
_TOKEN_PATH = "/latest/api/token"
_CREDENTIALS = "/latest/meta-data/iam/security-credentials"
_REFUSED = ("/latest/meta-data/iam", "/latest/meta-data/identity-credentials", "/latest/user-data", "/latest/dynamic")
_TTL, _TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
_WHY = (
    "The trainer's cage has no way to the instance's role. [cage] trainer_policy in job.toml gives the trainer a role"
    " of its own.\n"
)


@dataclass(frozen=True)
class _Answer:
    status: int
    body: str = ""


class Relay:
    """Serves 127.0.0.1 (and ::1 where there is one) at `port` until `close`.

    `ask(path)` gives the text at a path of the real service, None for 404; SpothealError where there is no answer.
    `credentials()` gives the document of the trainer's role, and None means it has none.
    """

    def __init__(
        self, ask: Callable[[str], str | None], credentials: Callable[[], str] | None = None, port: int = 0
    ) -> None:
        self._ask, self._credentials = ask, credentials
        self._key = secrets.token_bytes(32)
        self._seen: dict[str, tuple[float, _Answer]] = {}
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._servers = self._bound(port)
        self.port: int = self._servers[0].server_address[1]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.5,), name="relay", daemon=True).start()

    def _bound(self, port: int) -> list[_Server]:
        """On both loopback addresses at one port: what is turned to the other must not come to a stranger."""
        for _ in range(_PORT_TRIES):
            servers = [_Server(("127.0.0.1", port), self, socket.AF_INET)]
            try:
                servers.append(_Server(("::1", servers[0].server_address[1]), self, socket.AF_INET6))
                return servers
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return servers  # a machine without IPv6 has no IPv6 metadata service either
                servers[0].server_close()
        raise SetupFailed("no port is free for the metadata relay", next_step="restart the instance")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    # ---------------------------------------------------------------------------------------------------------- answers
    def put(self, path: str, ttl: str, forwarded: bool) -> _Answer:
        if path != _TOKEN_PATH:
            return _Answer(404)
        if forwarded:  # as AWS: a proxy that is open to the world must not lend itself
            return _Answer(403)
        if not (ttl.isascii() and ttl.isdigit() and len(ttl) <= 5 and 1 <= int(ttl) <= 21600):
            return _Answer(400)
        return _Answer(200, self._token(int(time.monotonic()) + int(ttl)))

    def get(self, path: str, token: str) -> _Answer:
        if not self._is_valid(token):
            return _Answer(401)
        path = path.partition("?")[0].rstrip("/")
        if path in (SPOT_ACTION, REBALANCE):
            return self._cached(path)
        if self._credentials is not None and path == _CREDENTIALS:
            return _Answer(200, ROLE)
        if self._credentials is not None and path == f"{_CREDENTIALS}/{ROLE}":
            try:
                return _Answer(200, self._credentials())
            except SpothealError as error:
                return _Answer(503, f"{error.message}\n")
        refused = any(path == start or path.startswith(start + "/") for start in _REFUSED)
        return _Answer(403, _WHY) if refused else _Answer(404)

    def _cached(self, path: str) -> _Answer:
        with self._lock:  # one question at a time; who waits takes its answer
            moment, answer = self._seen.get(path, (float("-inf"), _Answer(503)))
            if time.monotonic() - moment >= CACHED_SECONDS:
                try:
                    text = self._ask(path)
                    answer = _Answer(404) if text is None else _Answer(200, text)
                except SpothealError:
                    answer = _Answer(503)  # no answer is no "nothing": whoever polls must not take it for one
                self._seen[path] = time.monotonic(), answer
            return answer

    def _token(self, until: int) -> str:
        """Its own proof, so that none is kept: a trainer may ask for as many as it likes."""
        body = struct.pack(">Q", until) + secrets.token_bytes(8)
        return base64.urlsafe_b64encode(body + self._proof(body)).decode()

    def _is_valid(self, token: str) -> bool:
        try:
            raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        except ValueError:
            return False
        body, proof = raw[:16], raw[16:]
        good = len(raw) == 40 and hmac.compare_digest(proof, self._proof(body))
        return good and struct.unpack(">Q", body[:8])[0] > time.monotonic()

    def _proof(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, "sha256").digest()[:24]

    # ------------------------------------------------------------------------------------------------------ connections
    def take_slot(self) -> bool:
        return self._slots.acquire(blocking=False)

    def give_slot(self) -> None:
        self._slots.release()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "EC2ws", ""
    timeout = IDLE_SECONDS_MAX
    server: _Server

    def handle_one_request(self) -> None:
        """A client that sends a byte now and then is cut off too."""
        limit = threading.Timer(REQUEST_SECONDS_MAX + IDLE_SECONDS_MAX, self._cut)
        limit.daemon = True
        limit.start()
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True
        finally:
            limit.cancel()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._send(self.server.relay.get(self.path, self.headers.get(_TOKEN, "")))

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a token's request has no body, and none is read
        ttl, forwarded = self.headers.get(_TTL, ""), "X-Forwarded-For" in self.headers
        self._send(self.server.relay.put(self.path, ttl, forwarded), {_TTL: ttl})

    def _send(self, answer: _Answer, headers: dict[str, str] | None = None) -> None:
        content = answer.body.encode()
        self.send_response(answer.status)
        for name, value in (headers or {}).items() if answer.status == 200 else ():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        return


class _Server(HTTPServer):
    """A thread a connection, at most `CONNECTIONS_MAX`; more are closed at once."""

    request_queue_size = 64

    def __init__(self, address: tuple[str, int], relay: Relay, family: socket.AddressFamily) -> None:
        self.address_family = family
        self.relay = relay
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of our own name, which may ask a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "relay", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.relay.take_slot():
            self.shutdown_request(request)
            return
        threading.Thread(target=self._serve, args=(request, client_address), name="relay", daemon=True).start()

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except (OSError, ValueError):  # a client that went, a request line that is none
            pass
        finally:
            self.shutdown_request(request)
            self.relay.give_slot()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return
