"""A server for `wandb sync`: it keeps the rows that a client appends, by the id of the run, and no more."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rows = dict[str, list[str]]
_PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}


@contextmanager
def serve() -> Iterator[tuple[str, Rows]]:
    """Its URL, and the rows that each run has, as JSON."""
    rows: Rows = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_PUT(self) -> None:
            self._body()
            self._answer({})

        def do_POST(self) -> None:
            body = json.loads(self._body() or b"{}")
            if "file_stream" not in self.path:
                self._answer({"data": answer(body.get("query", ""), body.get("variables", {}), rows)})
                return
            history = (body.get("files") or {}).get("wandb-history.jsonl")
            if history:
                run = rows.setdefault(self.path.split("/")[-2], [])
                run[history["offset"] : history["offset"] + len(history["content"])] = history["content"]
            self._answer({"exitcode": None, "limits": {}})

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _answer(self, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client ends its connections anyhow
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", rows
    finally:
        server.shutdown()
        server.server_close()


def answer(query: str, given: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """To GraphQL: whether the run is there, and how far; a new one is made when it is asked for."""
    if "RunResumeStatus" in query:
        lines = rows.get(given["name"])
        return {"model": {**_PROJECT, "bucket": None if lines is None else _resumable(given["name"], lines)}}
    if "UpsertBucket" in query:
        is_new = given["name"] not in rows
        lines = rows.setdefault(given["name"], [])
        bucket = {**_resumable(given["name"], lines), "description": None, "sweepName": None, "project": _PROJECT}
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
    if "CreateRunFiles" in query:
        return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
    return {}


def _resumable(run: str, lines: list[str]) -> dict[str, Any]:
    tail = json.dumps(lines[-1:])
    counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
    texts = {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}'}
    return {"id": "b", "name": run, "displayName": run, "tags": [], "jobType": None, "group": None, **counts, **texts}
