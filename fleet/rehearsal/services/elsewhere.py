"""What a job.toml names beside the run: a webhook, a topic, a place for results. A rehearsal has stand-ins for them.

So the file is rehearsed as it is, nobody is told of machines that are not real, and nothing is written to a bucket of
the user's.
"""

from __future__ import annotations

import http.server
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotheal.agent.protocol.bounded_json import parse
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import EfsUrl, StoreUrl

if TYPE_CHECKING:
    from spotheal.fleet.files.config import FleetConfig
    from spotheal.fleet.run.session import Session

_BODY_MAX = 2**20


class Sink:
    """A webhook on this machine, at an address that only the rehearsed job knows. `events`: what was told it, in order
    (`interruption`, `done`, …)."""

    def __init__(self) -> None:
        self.events: list[str] = []
        sink, path = self, f"/{secrets.token_urlsafe(24)}"

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(self._take())
                self.end_headers()

            def _take(self) -> int:
                if not secrets.compare_digest(self.path.encode(), path.encode()):
                    return 404
                try:
                    size = min(int(self.headers["Content-Length"] or 0), _BODY_MAX)
                    sink.events.append(str(parse(self.rfile.read(max(0, size)))["event"]))
                except (ValueError, TypeError, LookupError):
                    return 400
                return 200

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{path}"
        threading.Thread(target=self._server.serve_forever, name="webhook of the rehearsal", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def stand_in(session: Session, fleet: FleetConfig, job: JobConfig, sink: Sink, say: Callable[[str], None]) -> JobConfig:
    """The job with stand-ins, made in the local cloud; each is said."""
    notify, store = job.notify, job.store
    if notify.webhook:
        say("[notify] webhook: yours is not told; a stand-in on this machine takes its messages")
        notify = replace(notify, webhook=sink.url)
    if notify.sns:
        name = notify.sns.rpartition(":")[2]
        say(f"[notify] sns: yours is not told; a topic {name} of the rehearsal takes its messages")
        notify = replace(notify, sns=_owner(session, "sns").create_topic(Name=name)["TopicArn"])
    match store.results_place:
        case StoreUrl(bucket=bucket) if bucket != session.store_root(store.url).bucket:
            say(f"[store] results: a bucket {bucket} of the rehearsal stands for yours")
            _make_bucket(session, bucket)
        case EfsUrl(file_system=theirs, folder=folder):
            ours = make_file_system(session, fleet)
            say(f"[store] results: the rehearsal's file system {ours} stands for {theirs}")
            store = replace(store, results=str(EfsUrl(ours, folder)))
    return replace(job, notify=notify, store=store)


def make_file_system(session: Session, fleet: FleetConfig) -> str:
    """What `fleetctl results create-efs` does; its id."""
    from spotheal.fleet.account import efs

    modes = efs.Modes("generalPurpose", "bursting")
    ready = efs.plan(session, "rehearsal", modes, efs.look_at_network(session, fleet), chosen=False)
    return efs.create(session, ready, SystemClock(), lambda _: None)


def _make_bucket(session: Session, bucket: str) -> None:
    """As its owner made it, long before the job."""
    location = {} if session.region == "us-east-1" else {
        "CreateBucketConfiguration": {"LocationConstraint": session.region}}  # fmt: skip
    s3 = _owner(session, "s3")
    s3.create_bucket(Bucket=bucket, **location)
    s3.get_waiter("bucket_exists").wait(Bucket=bucket, WaiterConfig={"Delay": 1, "MaxAttempts": 10})


def _owner(session: Session, service: str) -> Any:
    """A client of the account's owner: what stands for the user's own things is not the operator's to make."""
    import boto3
    from botocore.config import Config

    maker: Any = boto3.session.Session(profile_name="owner", region_name=session.region)
    return maker.client(service, config=Config(s3={"addressing_style": "path"}))
