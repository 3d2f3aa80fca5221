"""A metadata service on 127.0.0.1 whose every answer a test can set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    delay_seconds: float = 0.0
    drip_seconds: float = 0.0  # between one byte and the next


@dataclass
class Imds:
    """Asks for tokens as IMDSv2 does. `replies[path]` is a list used up one by one, of which the last one stays."""

    endpoint: str = ""
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    every: Callable[[str, str], Reply | None] | None = None  # (method, path): overrides everything else
    token_replies: list[Reply] = field(default_factory=list)  # used up one by one before real tokens are given
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    valid: set[str] = field(default_factory=set)
    given: int = 0

    def says(self, path: str, *replies: Reply | str) -> None:
        self.replies[path] = [Reply(body=r.encode()) if isinstance(r, str) else r for r in replies]

    def forgets(self, path: str) -> None:
        self.replies.pop(path, None)

    def expire_tokens(self) -> None:
        self.valid.clear()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Reply:
        self.requests.append((method, path))
        self.headers.append(headers)
        if self.every is not None and (reply := self.every(method, path)) is not None:
            return reply
        if path == "/latest/api/token":
            if method != "PUT" or not 1 <= int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
                return Reply(400)
            if self.token_replies:
                return self.token_replies.pop(0)
            self.given += 1
            self.valid.add(token := f"token-{self.given}==")
            return Reply(body=token.encode())
        if headers.get("x-aws-ec2-metadata-token") not in self.valid:
            return Reply(401)
        replies = self.replies.get(path)
        if not replies:
            return Reply(404, b"<?xml version='1.0'?><html><body>404 - Not Found</body></html>")
        return replies.pop(0) if len(replies) > 1 else replies[0]


@contextmanager
def imds() -> Iterator[Imds]:
    """A running service; it and its threads are gone at the end."""
    state = Imds()
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            reply = state.answer(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
            over.wait(reply.delay_seconds)
            self.send_response(reply.status)
            for name, value in reply.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if not reply.drip_seconds:
                self.wfile.write(reply.body)
                return
            for byte in reply.body:
                if over.wait(reply.drip_seconds):
                    return
                self.wfile.write(bytes([byte]))

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that gives up is what some tests are about

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def wait_until(condition: Callable[[], bool], seconds_max: float = 5.0) -> bool:
    """Whether `condition` came true in time."""
    until = time.monotonic() + seconds_max
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
