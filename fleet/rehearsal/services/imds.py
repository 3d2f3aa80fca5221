"""The instance metadata service of one rehearsed instance: version 2 only, on an address of its own.

What it says of interruption comes from the rule book at each request. `fault` makes it ill.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spotheal.agent.protocol.clock import rfc3339
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook
from spotheal.fleet.rehearsal.ec2.world import Instance
from spotheal.fleet.rehearsal.services import web

FAULTS = ("", "down", "slow", "401", "403", "500", "503", "garbage", "html")
_CREDENTIALS_HOURS = 6
_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN = "X-aws-ec2-metadata-token"
ADDRESS = "10.0.0.10"  # of an instance that is alone in its network
# cloud-init asks for the newest of these that it knows. A date that AWS does not have answers 404 there too.
_VERSIONS = re.compile(r"/(?:latest|2009-04-04|2016-09-02|2018-09-24|2021-03-23|2024-04-11)(?=/|$)")
_HTML = "<!DOCTYPE html><html><head><title>Proxy</title></head><body>It works!</body></html>"


def loopback_of(instance: str) -> str:
    """The private address of an instance that is processes of this machine: the others reach it there (Linux)."""
    digest = hashlib.sha256(instance.encode()).digest()
    return f"127.{digest[0] % 254 + 1}.{digest[1]}.{digest[2] % 254 + 1}"


def mac_of(instance: str) -> str:
    """The hardware address of the instance's one network interface."""
    digest = hashlib.sha256(instance.encode()).hexdigest()
    return ":".join(["02", *(digest[at : at + 2] for at in range(0, 10, 2))])


class Imds:
    """Serves until `close`: on 127.0.0.1, or on `listener`, a socket that listens already (in another network).

    `fault` is one of FAULTS; `requests` lists the paths that were asked.
    """

    def __init__(self, rulebook: Rulebook, instance: str, listener: socket.socket | None = None) -> None:
        self.rulebook = rulebook
        self.instance = instance
        self.address = ADDRESS if listener is not None else loopback_of(instance)
        self.fault = ""
        self.slow_seconds = 3.0
        self.requests: list[str] = []
        # Any process of this machine reaches 127.0.0.1; an instance's own network is reached by the instance alone.
        self.key = "" if listener is not None else rulebook.world.keys.word("metadata", instance)
        self.tokens: dict[str, float] = {}  # token -> monotonic time of its end
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_GET(self) -> None:
                if service._is_for_us(self):
                    service._get(self)

            def do_PUT(self) -> None:
                if service._is_for_us(self):
                    service._put(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=listener is None)
        if listener is not None:
            self._server.socket.close()
            self._server.socket = listener
            self._server.server_address = listener.getsockname()
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name=f"imds of {instance}", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """With the key as its path: it names the instance's credentials to whoever asks."""
        return f"http://127.0.0.1:{self._server.server_port}" + (f"/{self.key}" if self.key else "")

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()

    # --------------------------------------------------------------------------------------------------------- requests
    def _is_for_us(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether the request comes from the instance; takes the key from its path."""
        if not self.key:
            return True
        key, _, path = request.path[1:].partition("/")
        hosts = [f"{name}:{self._server.server_port}" for name in web.LOOPBACK]
        is_known = hmac.compare_digest(key.encode(), self.key.encode())
        if not is_known or web.refusal(lambda name: request.headers.get(name, ""), hosts):
            _send(request, 403, "")
            request.close_connection = True  # a body may follow
            return False
        request.path = f"/{path}"
        return True

    def _put(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append(request.path)
        if self._is_ill(request):
            return
        ttl = request.headers.get(_TTL, "")
        if request.path != "/latest/api/token":
            _send(request, 404, "")
        elif request.headers.get("X-Forwarded-For"):
            _send(request, 403, "")
        elif not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            _send(request, 400, "")
        else:
            token = secrets.token_urlsafe(40)
            self.tokens[token] = time.monotonic() + int(ttl)
            _send(request, 200, token, {_TTL: ttl})

    def _get(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        if self._is_ill(request):
            return
        if self.tokens.get(request.headers.get(_TOKEN, ""), 0.0) <= time.monotonic():
            _send(request, 401, "")
            return
        instance = self.rulebook.instance(self.instance)
        if instance is None or instance.state == "terminated":
            _hang_up(request)
            return
        value = self._value(instance, request.path.partition("?")[0].rstrip("/"))
        if value is None:
            _send(request, 404, _HTML.replace("It works!", "404 - Not Found"))
        else:
            _send(request, 200, value)

    def _is_ill(self, request: BaseHTTPRequestHandler) -> bool:
        fault = self.fault
        instance = self.rulebook.instance(self.instance)
        options = dict((instance.spec.get("MetadataOptions") or {}) if instance else {})
        if options.get("HttpEndpoint") == "disabled":
            fault = "403"
        if fault == "slow":
            time.sleep(self.slow_seconds)
        elif fault == "down":
            _hang_up(request)
        elif fault.isdigit():
            _send(request, int(fault), "")
        elif fault == "garbage":
            _send(request, 200, '\x00\xff{"action": \x01 ')
        elif fault == "html":
            _send(request, 200, _HTML)
        return fault not in ("", "slow")

    # ---------------------------------------------------------------------------------------------------------- answers
    def _value(self, instance: Instance, path: str) -> str | bytes | None:
        version = _VERSIONS.match(path)
        if version is None:
            return None
        path = path[version.end() :]
        if path == "/user-data":
            return instance.user_data or None
        if path == "/dynamic/instance-identity":
            return "document"
        if path == "/dynamic/instance-identity/document":
            return json.dumps(self._identity(instance), indent=2)
        if path != "/meta-data" and not path.startswith("/meta-data/"):
            return None
        tree = self._meta_data(instance)
        name = path.removeprefix("/meta-data").strip("/")
        if name in tree:
            return tree[name]
        start = len(name) + 1 if name else 0
        below = {key[start:].partition("/") for key in tree if not name or key.startswith(name + "/")}
        return "\n".join(sorted({first + slash for first, slash, _ in below})) or None

    def _meta_data(self, instance: Instance) -> dict[str, str]:
        """All leaves below /latest/meta-data/."""
        address, mac = self.address, mac_of(instance.id)
        card = f"network/interfaces/macs/{mac}"
        tree = {
            "ami-id": instance.image,
            "instance-id": instance.id,
            "instance-type": instance.type,
            "instance-life-cycle": "spot" if instance.is_spot else "on-demand",
            "local-ipv4": address,
            "local-hostname": f"ip-{address.replace('.', '-')}.{self.rulebook.region}.compute.internal",
            "mac": mac,
            f"{card}/device-number": "0",
            f"{card}/interface-id": f"eni-{instance.id.removeprefix('i-')}",
            f"{card}/local-ipv4s": address,
            f"{card}/mac": mac,
            f"{card}/subnet-ipv4-cidr-block": "10.0.0.0/24" if address == ADDRESS else "127.0.0.0/8",
            "reservation-id": instance.reservation,
            "placement/availability-zone": instance.zone,
            "placement/region": self.rulebook.region,
            "services/domain": "amazonaws.com",
            "services/partition": "aws",
        }
        if instance.role:
            tree["iam/info"] = json.dumps(self._profile(instance))
            tree[f"iam/security-credentials/{instance.role}"] = json.dumps(self._credentials(instance))
        notice = instance.notice
        if notice is not None:
            tree["spot/instance-action"] = json.dumps({"action": notice.action, "time": rfc3339(notice.time)})
            if notice.action == "terminate":
                tree["spot/termination-time"] = rfc3339(notice.time)
        if instance.rebalance is not None:
            tree["events/recommendations/rebalance"] = json.dumps({"noticeTime": rfc3339(instance.rebalance)})
        if (instance.spec.get("MetadataOptions") or {}).get("InstanceMetadataTags") == "enabled":
            tree |= {
                f"tags/instance/{key}": value for key, value in instance.tags.items() if not key.startswith("aws:")
            }
        return tree

    def _identity(self, instance: Instance) -> dict[str, Any]:
        return {
            "accountId": self.rulebook.account,
            "architecture": "x86_64",
            "availabilityZone": instance.zone,
            "imageId": instance.image,
            "instanceId": instance.id,
            "instanceType": instance.type,
            "pendingTime": rfc3339(instance.launched),
            "privateIp": self.address,
            "region": self.rulebook.region,
            "version": "2017-09-30",
        }

    def _profile(self, instance: Instance) -> dict[str, str]:
        arn = f"arn:aws:iam::{self.rulebook.account}:instance-profile/{instance.role}"
        updated = rfc3339(self.rulebook.world.clock.now())
        return {
            "Code": "Success",
            "LastUpdated": updated,
            "InstanceProfileArn": arn,
            "InstanceProfileId": "AIPAREHEARSAL",
        }

    def _credentials(self, instance: Instance) -> dict[str, str]:
        time = self.rulebook.world.clock.now()
        key = self.rulebook.world.keys.of(self.rulebook.key_of(instance.id))
        return {
            "Code": "Success",
            "LastUpdated": rfc3339(time),
            "Type": "AWS-HMAC",
            "AccessKeyId": key.id,
            "SecretAccessKey": key.secret,
            "Token": key.token,
            "Expiration": rfc3339(time + timedelta(hours=_CREDENTIALS_HOURS)),
        }


def _send(
    request: BaseHTTPRequestHandler, status: int, body: str | bytes, headers: dict[str, str] | None = None
) -> None:
    content = body.encode("utf-8", errors="surrogateescape") if isinstance(body, str) else body
    with suppress(OSError):  # the client gave up waiting
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Type", "text/plain")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


def _hang_up(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    with suppress(OSError):
        request.connection.shutdown(socket.SHUT_RDWR)
