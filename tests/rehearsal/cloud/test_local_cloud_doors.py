"""Who gets no answer from the local cloud: web pages, other users of the machine, and instances that play the operator.

Any program of this machine, and any web page, reaches a port of 127.0.0.1: RunInstances with a script was enough.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import boto3
import botocore.loaders
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from cloud_desk import REGION, CloudDesk, cloud_desk, owner, served
from hypothesis import given, settings
from hypothesis import strategies as some

from spotheal.agent.aws import clients
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import ConfigError, ExitCode
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.ec2 import refusals
from spotheal.fleet.rehearsal.ec2.access_keys import AccessKey, write_private
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.programs.init import descendants
from spotheal.fleet.rehearsal.scenarios import serve
from spotheal.fleet.rehearsal.services.authorization import OWNER
from spotheal.fleet.rehearsal.services.client import InMemoryEc2
from spotheal.fleet.run.session import Session

__all__ = ["cloud_desk", "served"]  # fixtures
SCRIPT = {"Action": "RunInstances", "Version": "2016-11-15", "ImageId": EXAMPLE_IMAGE, "InstanceType": "c7i.large",
          "MinCount": "1", "MaxCount": "1",
          "UserData": base64.b64encode(b"#!/bin/sh\ntouch PWNED\n").decode()}  # fmt: skip
LOADER = functools.cache(botocore.loaders.create_loader)  # each client would read its models again
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def ask(url: str, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """The very request, with no header that is not given besides Host and Content-Length."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, url[len(f"http://{parts.netloc}") :] or "/", body or None, named)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


def signed(url: str, key: AccessKey, body: bytes = b"", service: str = "ec2", host: str = "") -> dict[str, str]:
    request = AWSRequest("POST", url, dict(FORM) | ({"Host": host} if host else {}), body)
    SigV4Auth(Credentials(key.id, key.secret, key.token or None), service, REGION).add_auth(request)
    return dict(request.headers)


def post(desk: CloudDesk, key: AccessKey, **more: str) -> tuple[int, bytes]:
    """RunInstances as the red team sent it, with a signature; `more` headers come on top."""
    body = urlencode(SCRIPT).encode()
    return ask(desk.cloud.url, "POST", body, **{**signed(desk.cloud.url, key, body), **more})


@pytest.fixture
def quiet(cloud_desk: CloudDesk) -> Iterator[CloudDesk]:
    """Nothing is launched by a test of this kind."""
    before = len(cloud_desk.cloud.rules.instances())
    yield cloud_desk
    assert len(cloud_desk.cloud.rules.instances()) == before


# ----------------------------------------------------------------------------------------------------------- signatures
def test_a_request_without_a_signature_runs_no_script(quiet: CloudDesk) -> None:
    body = urlencode(SCRIPT).encode()
    assert ask(quiet.cloud.url, "POST", body, **FORM)[0] == 403
    assert ask(f"{quiet.cloud.url}/?{urlencode(SCRIPT)}")[0] == 403
    unsigned = "AWS4-HMAC-SHA256 Credential=AKIAOWNER00000000000/20261122/us-west-2/ec2/aws4_request"
    assert ask(quiet.cloud.url, "POST", body, **FORM, Authorization=unsigned)[0] == 403


CODES = {  # service: a call, the code for an unknown key, the code for a wrong secret
    "ec2": ("describe_volumes", "AuthFailure", "SignatureDoesNotMatch"),
    "s3": ("list_buckets", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    "sts": ("get_caller_identity", "InvalidClientTokenId", "SignatureDoesNotMatch"),
    "iam": ("list_roles", "InvalidClientTokenId", "SignatureDoesNotMatch"),
    "ssm": ("describe_parameters", "UnrecognizedClientException", "InvalidSignatureException"),
    "batch": ("describe_job_queues", "UnrecognizedClientException", "InvalidSignatureException"),
    "ecr": ("describe_repositories", "UnrecognizedClientException", "InvalidSignatureException"),
    "efs": ("describe_file_systems", "UnrecognizedClientException", "InvalidSignatureException"),
    "scheduler": ("list_schedules", "UnrecognizedClientException", "InvalidSignatureException"),
    "logs": ("describe_log_groups", "UnrecognizedClientException", "InvalidSignatureException"),
}


@pytest.mark.parametrize("service", CODES)
def test_another_key_and_another_secret_are_refused_with_awss_codes(
    quiet: CloudDesk, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    monkeypatch.setattr(botocore.loaders, "create_loader", LOADER)
    call, unknown, wrong = CODES[service]
    owners = quiet.cloud.endpoint.key_of_person(OWNER)
    config = Config(retries={"total_max_attempts": 1})
    for key, secret, token, code in ((owners.id, "x" * 40, None, wrong), ("AKIANOBODY0000000000", "x", None, unknown),
                                     (owners.id, owners.secret, "token", unknown)):  # fmt: skip
        maker: Any = boto3.session.Session(key, secret, token, region_name=REGION)
        with pytest.raises(ClientError) as refused:
            getattr(maker.client(service, config=config), call)()
        assert refused.value.response["Error"]["Code"] == code


def test_a_wrong_key_ends_a_verb_in_one_message(quiet: CloudDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    for secret, key in (("x" * 40, OWNER), ("x", "AKIANOBODY0000000000")):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        result = quiet.run("volume", "ls")
        assert (result.exit_code, "Traceback" in result.output) == (ExitCode.PERMISSION, False), result.output


def test_a_signature_holds_for_one_request_alone(quiet: CloudDesk) -> None:
    """Another body, path, query, method, header or time is another request."""
    key, url = quiet.cloud.endpoint.key_of_person(OWNER), quiet.cloud.url
    harmless = urlencode({"Action": "DescribeVolumes", "Version": "2016-11-15"}).encode()
    headers = signed(url, key, harmless)
    assert ask(url, "POST", harmless, **headers)[0] == 200
    evil = urlencode(SCRIPT).encode()
    for changed in (
        ask(url, "POST", evil, **headers), ask(f"{url}/x", "POST", harmless, **headers),
        ask(f"{url}/?{urlencode(SCRIPT)}", "POST", harmless, **headers), ask(url, "PUT", harmless, **headers),
        ask(url, "POST", harmless, **{**headers, "Content-Type": "text/plain"}),
        ask(url, "POST", harmless, **{**headers, "X-Amz-Date": "20260101T000000Z"}),
        ask(url, "POST", harmless, **signed(url, key, harmless, host="evil.example")),
    ):  # fmt: skip
        assert changed[0] in (403, 404) and b"volumeSet" not in changed[1]


def test_a_signature_of_yesterday_is_refused(quiet: CloudDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    body = urlencode({"Action": "DescribeVolumes", "Version": "2016-11-15"}).encode()
    headers = signed(quiet.cloud.url, quiet.cloud.endpoint.key_of_person(OWNER), body)
    clock = "spotheal.fleet.rehearsal.services.signatures.time.time"
    monkeypatch.setattr(clock, lambda: __import__("time").monotonic() + 4e9)
    status, said = ask(quiet.cloud.url, "POST", body, **headers)
    assert status == 400 and b"RequestExpired" in said


@settings(max_examples=60, deadline=None, database=None)
@given(some.dictionaries(some.sampled_from(["Authorization", "X-Amz-Date", "X-Amz-Security-Token", "Content-Length"]),
                         some.text(some.characters(min_codepoint=32, max_codepoint=126), max_size=60)),
       some.text(some.characters(min_codepoint=33, max_codepoint=126), max_size=60))  # fmt: skip
def test_whatever_a_signature_says_it_is_read_or_refused(headers: dict[str, str], query: str) -> None:
    from io import BytesIO

    from spotheal.fleet.rehearsal.services import signatures

    scope = "Credential=A/20261122/r/ec2/aws4_request, SignedHeaders=host, Signature="
    environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    environ |= {"REQUEST_METHOD": "POST", "QUERY_STRING": query, "REQUEST_URI": f"/?{query}",
                "wsgi.input": BytesIO(b"x"), "HTTP_X_AMZ_DATE": "20261122T000000Z",
                "CONTENT_LENGTH": headers.get("Content-Length", "")}  # fmt: skip
    for authorization in (headers.get("Authorization", ""), f"AWS4-HMAC-SHA256 {scope}{headers.get('Authorization')}"):
        environ["HTTP_AUTHORIZATION"] = authorization
        found = signatures.read(environ)
        assert found is None or signatures.check(environ, found, AccessKey("A", "s")) is not None


# ------------------------------------------------------------------------------------------------------------------- S3
def test_an_object_is_taken_with_the_signed_content_alone(quiet: CloudDesk) -> None:
    s3, url = owner("s3"), f"{quiet.cloud.url}/signed-content/key"
    s3.create_bucket(Bucket="signed-content", CreateBucketConfiguration={"LocationConstraint": REGION})
    key = quiet.cloud.endpoint.key_of_person(OWNER)
    assert ask(url, "PUT", b"x")[0] == 403 and ask(url)[0] == 403
    request = AWSRequest("PUT", url, {"X-Amz-Content-SHA256": hashlib.sha256(b"good").hexdigest()}, b"good")
    from botocore.auth import S3SigV4Auth

    S3SigV4Auth(Credentials(key.id, key.secret), "s3", REGION).add_auth(request)
    status, said = ask(url, "PUT", b"evil", **dict(request.headers))
    assert status == 400 and b"XAmzContentSHA256Mismatch" in said
    assert ask(url, "PUT", b"good", **dict(request.headers))[0] == 200
    name = "träger/a b+c=d&e%2F~.txt"
    s3.put_object(Bucket="signed-content", Key=name, Body=b"1", Metadata={"a_b": "two  spaces"})
    assert s3.get_object(Bucket="signed-content", Key=name)["Body"].read() == b"1"
    listed = s3.list_objects_v2(Bucket="signed-content", Prefix="träger/a b+")["Contents"]
    assert [one["Key"] for one in listed] == [name]


def test_a_signed_address_is_good_for_its_method_key_and_time(
    quiet: CloudDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = owner("s3")
    s3.create_bucket(Bucket="signed-address", CreateBucketConfiguration={"LocationConstraint": REGION})
    s3.put_object(Bucket="signed-address", Key="a b", Body=b"content")
    url = Session(REGION).signed_url("GET", StoreUrl("signed-address", "a b"), 60)
    assert ask(url) == (200, b"content")
    assert ask(url, "PUT", b"x")[0] == 403
    assert ask(url.replace("a%20b", "other"))[0] == 403
    assert ask(url.replace("X-Amz-Expires=60", "X-Amz-Expires=604800"))[0] == 403
    assert ask(url[:-1] + ("0" if url[-1] != "0" else "1"))[0] == 403
    now = SystemClock().now().timestamp()
    monkeypatch.setattr("spotheal.fleet.rehearsal.services.signatures.time.time", lambda: now + 61)
    status, said = ask(url)
    assert status == 403 and b"Request has expired" in said


# ---------------------------------------------------------------------------------------------------------- a web page
@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Referer": "https://evil.example/"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example"},
     {"Host": "evil.example:80"}, {"Host": ""}],
    ids=str,
)  # fmt: skip
def test_a_web_page_is_refused_whatever_it_has_signed(quiet: CloudDesk, headers: dict[str, str]) -> None:
    status, said = post(quiet, quiet.cloud.endpoint.key_of_person(OWNER), **headers)
    assert status == 403 and b"instancesSet" not in said
    instance = instance_of(quiet, launch=False)
    metadata = f"{quiet.cloud.endpoint.metadata_url(instance)}/latest/api/token"
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    assert ask(metadata, "PUT", **ttl)[0] == 200 and ask(metadata, "PUT", **ttl, **headers)[0] == 403


# -------------------------------------------------------------------------------------------------- orders and machines
def instance_of(desk: CloudDesk, *, launch: bool = True) -> str:
    """An instance of the rule book, which nobody has booted."""
    if not launch:
        return "i-00000000000000000"
    made = InMemoryEc2(desk.cloud.rules).run_instances(
        ImageId=EXAMPLE_IMAGE, InstanceType="c7i.large", MinCount=1, MaxCount=1,
        Placement={"AvailabilityZone": f"{REGION}a"}, UserData="#!/bin/sh\nexec sleep 1000\n",
    )  # fmt: skip
    return str(made["Instances"][0]["InstanceId"])


def test_orders_are_taken_from_people_and_from_no_one_else(
    cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instance_of(cloud_desk)
    world = cloud_desk.cloud.rules.world
    url = f"{cloud_desk.cloud.url}/_cloud/state"
    assert ask(url, "POST")[0] == 403 and ask(url)[0] == 403
    for key, status in ((world.keys.of(cloud_desk.cloud.rules.key_of(instance)), 403), (world.keys.of(OWNER), 200),
                        (cloud_desk.cloud.endpoint.key_of_person("user/operator"), 200)):  # fmt: skip
        assert ask(url, "POST", **signed(url, key, service="spotheal-cloud"))[0] == status
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 40)
    refused = cloud_desk.run("cloud", "state")
    assert refused.exit_code == ExitCode.PERMISSION and "take over the lines" in refused.stderr
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "operator")
    assert cloud_desk.good("cloud", "state")["instances"]
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.delenv("AWS_PROFILE")
    assert cloud_desk.run("cloud", "state").exit_code == ExitCode.PERMISSION
    cloud_desk.cloud.rules.kill(instance)


def test_the_metadata_service_tells_its_instance_alone(cloud_desk: CloudDesk) -> None:
    instance = instance_of(cloud_desk)
    url = cloud_desk.cloud.endpoint.metadata_url(instance)
    port = f"http://{urlsplit(url).netloc}"
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    other = cloud_desk.cloud.endpoint.metadata_url("i-0ther")
    for address in (port, f"{port}/x", f"{port}/{urlsplit(other).path[1:]}"):
        assert ask(f"{address}/latest/api/token", "PUT", **ttl)[0] == 403
    assert ask(f"{url}/latest/api/token", "PUT", **ttl)[0] == 200
    cloud_desk.cloud.rules.kill(instance)


def test_containers_and_nfs_are_asked_with_a_word_that_nobody_can_guess(cloud_desk: CloudDesk) -> None:
    endpoint = cloud_desk.cloud.endpoint
    address = endpoint.container_credentials("job-1-1", "role")
    assert "job-1-1" not in address
    status, said = ask(address)
    key = json.loads(said)
    assert status == 200 and len(key["SecretAccessKey"]) == 40
    for path in ("/_role/job-1-1", "/_role/", "/_role/x", "/_cloud/nfs?host=fs-1.efs.&instance=i-1"):
        assert ask(cloud_desk.cloud.url + path)[0] == 403
    machine = endpoint.metadata_url("i-1").rpartition("/")[2]
    assert ask(f"{cloud_desk.cloud.url}/_cloud/nfs?host=x&instance=i-1", X_Machine_Key=machine)[0] == 200


def test_every_cloud_has_other_secrets() -> None:
    from spotheal.fleet.rehearsal.ec2.access_keys import AccessKeys

    words = [keys.of(name).secret for keys in (AccessKeys(), AccessKeys()) for name in (OWNER, "ASIA1", "ASIA2")]
    assert len(set(words)) == 6 and all(len(word) == 40 for word in words)


# ------------------------------------------------------------------------------------------------ what others could see
def listening(pids: list[int]) -> set[str]:
    """Local addresses, as the kernel writes them, on which these processes listen."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(entry))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                found.add(row[1].partition(":")[0])
    return found


def test_nothing_listens_beyond_loopback(cloud_desk: CloudDesk) -> None:
    instance = instance_of(cloud_desk)
    cloud_desk.cloud.endpoint.metadata_url(instance)
    addresses = listening([os.getpid(), *descendants(os.getpid())])
    assert addresses and all(len(one) == 8 and one.endswith("7F") for one in addresses)  # 127.x.y.z, little-endian
    cloud_desk.cloud.rules.kill(instance)


def test_keys_lie_in_a_folder_and_files_of_this_user_alone(cloud_desk: CloudDesk, tmp_path: Path) -> None:
    cloud = cloud_desk.cloud
    assert (cloud.folder.stat().st_mode & 0o777, cloud.credentials.stat().st_mode & 0o777) == (0o700, 0o600)
    os.umask(umask := os.umask(0))
    write_private(tmp_path / "file", "x")
    assert ((tmp_path / "file").stat().st_mode & 0o777, umask) == (0o600, umask)
    secrets = {cloud.endpoint.key_of_person(name).secret for name in ("", "user/operator", OWNER)}
    secrets |= {server.key for server in cloud.endpoint._metadata.values()}
    for pid in [os.getpid(), *descendants(os.getpid())]:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        assert not [secret for secret in secrets if secret in arguments]
    printed = serve.shell_lines(serve.environment(cloud.endpoint, REGION, None, cloud.credentials))
    assert not [secret for secret in secrets if secret in printed]


def test_a_folder_that_others_look_into_is_not_made_the_clouds(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    serve._keep_private(shared)
    assert shared.stat().st_mode & 0o777 == 0o700
    (shared / "file").touch()
    shared.chmod(0o755)
    with pytest.raises(ConfigError, match="other users of this machine"):
        serve._keep_private(shared)
    assert shared.stat().st_mode & 0o777 == 0o755


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_this_machine_gets_nothing(quiet: CloudDesk) -> None:
    """The red team's request, sent by nobody's own process."""
    script = f"""
import os, urllib.error, urllib.request
def ask():
    try:
        urllib.request.urlopen({quiet.cloud.url!r}, {urlencode(SCRIPT).encode()!r}, timeout=10)
        print("answered")
    except urllib.error.HTTPError as refused:
        print(refused.code)
ask()  # and so every module is imported: root's Python may be root's alone
os.setgid(65534); os.setuid(65534)
for path in {[str(quiet.cloud.credentials), str(quiet.cloud.folder), f"/proc/{os.getpid()}/environ"]!r}:
    try:
        os.listdir(path) if path.endswith("{quiet.cloud.folder.name}") else open(path)
        print("read", path)
    except PermissionError:
        pass
ask()
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["403", "403"]


def test_a_wrong_region_at_the_local_cloud_is_a_fault_of_usage_with_the_option() -> None:
    refusal = refusals.of_ec2("DescribeVolumes", {}, "eu-west-1", "us-west-2", is_owned=True)
    assert refusal is not None
    answer: Any = {"Error": {"Code": refusal.code, "Message": refusal.message}}
    error = clients.from_client_error("list the volumes", ClientError(answer, "DescribeVolumes"))
    assert (error.exit_code, error.next_step[:8]) == (ExitCode.USAGE, "--region")
    assert "us-west-2" in error.message and "eu-west-1" in error.message
