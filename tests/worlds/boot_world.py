"""What a booting instance meets, on 127.0.0.1: the metadata service, a store and an EC2 that check every signature."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import aws_calls
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from imds_server import Imds, imds

INSTANCE = "i-0123456789abcdef0"
REGION = "us-west-2"
ROLE = "spotheal-instance"
CREDENTIALS = Credentials("ASIAEXAMPLE", "secret/with+signs=", "token//of==the+role")
BUCKET, PREFIX = "spotheal-123456789012-us-west-2", "digits/01J0000000000000000000000"
STORE = f"s3://{BUCKET}/{PREFIX}"
FLEET = "sfr-11111111-2222-3333-4444-555555555555"


@dataclass
class Cloud:
    """`objects` by key below the run's prefix. `faults[key]`: statuses (0 = the connection is cut) before an answer."""

    imds: Imds
    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)
    late: dict[str, bytes] = field(default_factory=dict)  # what another machine writes just before our next PUT
    asked: list[tuple[str, str]] = field(default_factory=list)
    ec2: list[dict[str, str]] = field(default_factory=list)
    bad_signatures: list[str] = field(default_factory=list)
    refused_cancels: int = 0
    ec2_refuses: bool = False
    tagged_instances: int = 0  # of the run, with a reason
    bucket_region: str = ""  # another one than the run's
    absent: int = 403  # what S3 answers for an absent key; AWS: 403 or 404, by whether the role may list it
    states: dict[str, tuple[str, str]] = field(default_factory=dict)  # instance -> state and its reason's code
    times: dict[object, float] = field(default_factory=dict)  # monotonic, of the last request of a kind

    def document(self, key: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.objects[key])
        return found

    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.imds.endpoint}

    def page(self, prefix: str, token: str) -> str:
        """S3's list, by key, two objects a page. Objects stand in the dictionary in the order they were written."""
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        written = {key: f"2026-11-21T10:00:{number:02}.000Z" for number, key in enumerate(self.objects)}
        start = int(token or 0)
        rows = "".join(
            f"<Contents><Key>{PREFIX}/{key}</Key><LastModified>{written[key]}</LastModified>"
            f"<ETag>&quot;{etag(self.objects[key])}&quot;</ETag></Contents>"
            for key in keys[start : start + 2]
        )
        more = f"<NextContinuationToken>{start + 2}</NextContinuationToken>" if keys[start + 2 :] else ""
        return f"<ListBucketResult>{more}{rows}</ListBucketResult>"

    def described(self, instances: Iterable[str]) -> str:
        """EC2's answer; an instance that has no state here is not shown."""
        found = []
        for name in instances:
            if name in self.states:
                state, reason = self.states[name]
                why = f"<stateReason><code>{reason}</code><message/></stateReason>" if reason else ""
                fields = f"<instanceId>{name}</instanceId><instanceState><name>{state}</name></instanceState>"
                found.append(f"<item><instancesSet><item>{fields}{why}</item></instancesSet></item>")
        return f"<DescribeInstancesResponse>{''.join(found)}</DescribeInstancesResponse>"

    def put_wheels(self, wheels: Mapping[str, bytes]) -> str:
        """Store `wheels` with their manifest; returns the manifest's sha256."""
        rows = [{"name": n, "sha256": hashlib.sha256(b).hexdigest(), "size": len(b)} for n, b in wheels.items()]
        manifest = json.dumps({"files": rows}).encode()
        self.objects |= {f"agent/wheels/{name}": body for name, body in wheels.items()}
        self.objects["agent/manifest.json"] = manifest
        return hashlib.sha256(manifest).hexdigest()


def etag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


def wheel(files: Mapping[str, str]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return target.getvalue()


@contextmanager
def boot_world() -> Iterator[Cloud]:
    with imds() as metadata:
        cloud = Cloud(metadata)
        metadata.says(
            "/latest/dynamic/instance-identity/document",
            json.dumps({"instanceId": INSTANCE, "availabilityZone": "us-west-2b", "instanceType": "g5.xlarge"}),
        )
        metadata.says("/latest/meta-data/iam/security-credentials/", ROLE)
        frozen = CREDENTIALS.get_frozen_credentials()
        keys = {"AccessKeyId": frozen.access_key, "SecretAccessKey": frozen.secret_key, "Token": frozen.token}
        metadata.says(f"/latest/meta-data/iam/security-credentials/{ROLE}", json.dumps({"Code": "Success", **keys}))
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cloud))
        server.daemon_threads = True
        cloud.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield cloud
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def signature_fault(method: str, url: str, headers: Mapping[str, str], body: bytes) -> str:
    """ "" where botocore, an implementation that is not ours, gives the same signature; else the two."""
    found = re.search(r"/(s3|ec2)/aws4_request, SignedHeaders=([^,]*), Signature=(\w+)", headers["authorization"])
    if not found:
        return f"no signature: {headers['authorization']}"
    service, names, given = found.groups()
    kind = S3SigV4Auth if service == "s3" else SigV4Auth
    request = AWSRequest(method, url, {name: headers[name] for name in names.split(";")}, body)
    request.context["timestamp"] = headers["x-amz-date"]
    signer = kind(CREDENTIALS, service, REGION)
    request.context["payload_signing_enabled"] = True
    expected = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    return "" if expected == given else f"{method} {url}: {given}, botocore says {expected}"


def _handler(cloud: Cloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            fault = signature_fault(self.command, cloud.endpoint + self.path, headers, body)
            if fault:
                cloud.bad_signatures.append(fault)
                return self._answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
            if urlsplit(self.path).path == "/":
                return self._ec2({name: values[0] for name, values in parse_qs(body.decode()).items()})
            self._store(body)

        do_PUT = do_POST = do_GET

        def _store(self, body: bytes) -> None:
            split = urlsplit(self.path)
            asked = "ListBucket" if split.query else {"PUT": "PutObject", "GET": "GetObject"}[self.command]
            aws_calls.notes.add(("instance", f"s3:{asked}"))
            query = {name: values[0] for name, values in parse_qs(split.query).items()}
            key = query.get("prefix", "").removeprefix(f"{PREFIX}/") or unquote(split.path).removeprefix(
                f"/{BUCKET}/{PREFIX}/"
            )
            command = "LIST" if query else self.command
            cloud.asked.append((command, key))
            cloud.times[command, key] = time.monotonic()
            if cloud.faults.get(key):
                status = cloud.faults[key].pop(0)
                if status == 0:
                    return self.connection.close()
                return self._answer(status, b"<Error><Code>SlowDown</Code></Error>" if status == 503 else b"")
            if cloud.bucket_region:
                return self._answer(301, b"<Error><Code>PermanentRedirect</Code></Error>")
            if query:
                return self._answer(200, cloud.page(key, query.get("continuation-token", "")).encode())
            if self.command == "PUT":
                if key in cloud.late:
                    cloud.objects[key] = cloud.late.pop(key)
                there = cloud.objects.get(key)
                if_match, if_none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
                if if_match is not None and there is None:
                    return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                if (if_none and there is not None) or (if_match and there and if_match != f'"{etag(there)}"'):
                    return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                cloud.objects.pop(key, None)
                cloud.objects[key] = body
                return self._answer(200, b"")
            if key not in cloud.objects:
                code = "AccessDenied" if cloud.absent == 403 else "NoSuchKey"
                return self._answer(cloud.absent, f"<Error><Code>{code}</Code></Error>".encode())
            self._answer(200, cloud.objects[key])

        def _ec2(self, form: dict[str, str]) -> None:
            cloud.ec2.append(form)
            aws_calls.notes.add(("instance", f"ec2:{form['Action']}"))
            cloud.times[form["Action"]] = time.monotonic()
            if cloud.ec2_refuses:
                return self._answer(403, b"<Errors><Error><Code>UnauthorizedOperation</Code></Error></Errors>")
            if form.get("Filter.1.Name") == "instance-id":
                asked = (value for name, value in form.items() if name.startswith("Filter.1.Value."))
                return self._answer(200, cloud.described(asked).encode())
            if "Filter.1.Name" in form:
                found = "<item><instanceId>i-1</instanceId></item>" * cloud.tagged_instances
                return self._answer(200, f"<DescribeInstancesResponse>{found}</DescribeInstancesResponse>".encode())
            if form["Action"] == "DescribeInstances":
                tag = f"<item><key>aws:ec2spot:fleet-request-id</key>\n <value>{FLEET}</value></item>"
                return self._answer(200, f"<DescribeInstancesResponse>{tag}</DescribeInstancesResponse>".encode())
            if form["Action"].startswith(("Cancel", "Delete")) and cloud.refused_cancels > 0:
                cloud.refused_cancels -= 1
                fault = "<error><code>unexpectedError</code></error>"
                said = f"<unsuccessfulFleetRequestSet><item>{fault}</item></unsuccessfulFleetRequestSet>"
                return self._answer(200, said.encode())
            self._answer(200, b"<R><unsuccessfulFleetRequestSet/></R>")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 301:
                self.send_header("x-amz-bucket-region", cloud.bucket_region)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
