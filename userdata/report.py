"""Reports a boot that cannot go on: counts it, and parks the run after too many. Standard library only.

    report.py REASON   for stub.sh, if bootstrap.py itself cannot run

bootstrap.py imports the rest. Everything lies below $SPOTHEAL_ROOT (default /). This must run on any Python that
cloud-init itself may bring (3.7: no `|` of dictionaries, no `match`): an image whose Python is too old for the agent is
such a failure.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

ROOT = os.environ.get("SPOTHEAL_ROOT", "").rstrip("/")
LOG = ROOT + "/var/log/spotheal/user-data.log"
PASSING_SECONDS = 600.0  # how long a network that is down, throttling and AWS's own errors are waited for
REFUSED_SECONDS = 60.0  # how long "not allowed" is: a role made moments ago is not known everywhere yet
CREDENTIALS_SECONDS = 30.0
ANSWER_BYTES_MAX = 64 << 20  # as of the agent (agent/aws/s3.py); botocore's wheel, our largest object, has 15 MB
REPORTED = 3  # exit code of a boot that failed, to stub.sh: there is nothing left to report
ENDS = ("done", "failed", "set-up failed", "limit", "parked", "cancelled")  # as in agent/protocol/names.py
BOOTS_MAX = 5  # launches in a row that gained nothing: the run is parked (agent/life/finish.py has the same figure)
KNOWN = ("interrupted", "ended", "barred", "boot failed")  # EC2 need not be asked for these outcomes (ends.py)
LIVING = ("pending", "running")
SPOT_REASONS = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")  # spot took it (agent/aws/ec2.py)
FILTER_VALUES_MAX = 200
SYSTEM_FOLDERS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin")
T = TypeVar("T")


class Stuck(Exception):
    """This boot cannot go on; the text says why in one line."""


class Passing(Exception):
    """Asking again may help, for so many seconds."""

    def __init__(self, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.seconds = PASSING_SECONDS if seconds is None else seconds


def say(text: str, failed: bool = False) -> None:
    line = f"spotheal: {text}\n"
    targets = [LOG, "/dev/console"] if failed and not ROOT else [LOG]
    sys.stderr.write(line)
    for target in targets:
        try:
            with open(target, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            pass


# ------------------------------------------------------------------------------------------------------------- network
class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A signed request is good for one address only."""

    def redirect_request(self, *_: Any) -> None:
        return None


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)  # metadata never goes by a proxy
PROXIED = urllib.request.build_opener(_NoRedirect)


def http_call(
    opener: urllib.request.OpenerDirector,
    method: str,
    url: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    timeout: float = 20.0,
) -> bytes:
    """The body of the answer. Stuck or Passing where it is none, with what the server said. What is larger than
    anything of ours is cut off: then it is no JSON, and no wheel has its sha256."""
    request = urllib.request.Request(url, data=body, headers=headers or {}, method=method)
    try:
        with opener.open(request, timeout=timeout) as answer:
            return bytes(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode("utf-8", "replace")
        code = (re.findall(r"<Code>([^<]*)</Code>", text) or [""])[0]
        said = f"{error.code} {code or error.reason}"
        # 409, 412: another machine wrote first.
        if error.code >= 500 or error.code in (409, 412, 429) or code in ("RequestTimeout", "RequestTimeTooSkewed"):
            raise Passing(said) from None
        if error.code in (401, 403):
            raise Passing(said, REFUSED_SECONDS) from None
        if error.code == 301:
            region = error.headers.get("x-amz-bucket-region", "which S3 does not name")
            said += f": the store's bucket is in another region, {region}; request the run there, or with another store"
        raise Stuck(said) from None
    except (OSError, http.client.HTTPException) as error:  # URLError, time-outs and half answers are among these
        raise Passing(str(getattr(error, "reason", "") or error or type(error).__name__)) from None


def patiently(task: str, call: Callable[[], T]) -> T:
    """What `call` returns, asked again with growing pauses while that may help."""
    start, pause = time.monotonic(), 0.5
    while True:
        try:
            return call()
        except Stuck as error:
            raise Stuck(f"could not {task}: {error}") from None
        except Passing as error:
            if time.monotonic() - start + pause > error.seconds:
                raise Stuck(f"could not {task} in {error.seconds:.0f} s: {error}") from None
            say(f"could not {task} yet: {error}")
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 15.0)


class Metadata:
    """IMDSv2, and nothing older."""

    def __init__(self) -> None:
        self.endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._known: tuple[float, tuple[str, ...]] = (0.0, ())

    def get(self, path: str) -> bytes:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
        token = http_call(DIRECT, "PUT", self.endpoint + "/latest/api/token", headers, timeout=2.0).decode()
        return http_call(DIRECT, "GET", self.endpoint + path, {"X-aws-ec2-metadata-token": token}, timeout=2.0)

    def instance(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/latest/dynamic/instance-identity/document")))

    def credentials(self) -> tuple[str, ...]:
        """(key id, secret, session token) of the environment, else of the instance's role."""
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
            return tuple(os.environ.get(name, "") for name in names)
        if self._known[1] and time.monotonic() - self._known[0] < CREDENTIALS_SECONDS:
            return self._known[1]
        try:
            role = self.get("/latest/meta-data/iam/security-credentials/").decode().split("\n")[0].strip()
            answer = json.loads(self.get("/latest/meta-data/iam/security-credentials/" + role))
            keys = answer["AccessKeyId"], answer["SecretAccessKey"], answer.get("Token", "")
            self._known = time.monotonic(), keys
            return keys
        except (Stuck, KeyError, ValueError) as error:  # a role attached moments ago answers 404 or {"Code": "Failed"}
            raise Passing(f"no role's credentials on this instance ({error})", REFUSED_SECONDS) from None


class Aws:
    """Signed requests (Signature Version 4) to the run's store, and the two calls to EC2 that parking needs."""

    def __init__(self, region: str, store: str, metadata: Metadata) -> None:
        self.region, self.metadata = region, metadata
        self.unchanged: dict[str, dict[str, str]] = {}  # by key, the header of a PUT over what was listed last
        self.bucket, _, self.prefix = store[len("s3://") :].partition("/")
        self.suffix = "amazonaws." + {"cn-": "com.cn", "eus": "eu"}.get(region[:3], "com")

    def store(
        self, method: str, key: str = "", body: bytes = b"", query: Iterable[tuple[str, str]] = (), **headers: str
    ) -> bytes:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        base, path = (endpoint or f"https://s3.{self.region}.{self.suffix}").rstrip("/"), "/" + self.bucket
        if not endpoint and "." not in self.bucket:
            base, path = f"https://{self.bucket}.s3.{self.region}.{self.suffix}", ""
        if not query:
            path += f"/{self.prefix}/{key}"
        return self._signed("s3", method, base, urllib.parse.quote(path or "/", safe="/-_.~"), query, body, **headers)

    def listed(self, prefix: str) -> list[tuple[str, str]]:
        """(key below the run's prefix, time of its last write) of each object whose key begins with `prefix`."""
        keys: list[tuple[str, str]] = []
        query = [("list-type", "2"), ("prefix", f"{self.prefix}/{prefix}")]

        def page() -> str:
            return self.store("GET", query=query).decode()

        while True:
            text = patiently(f"list the store's {prefix}", page)
            for item in re.findall(r"<Contents>.*?</Contents>", text, re.DOTALL):
                key, written, etag = (re.search(f"<{name}>(.*?)</", item) for name in ("Key", "LastModified", "ETag"))
                if key and written and etag:
                    name = key.group(1)[len(self.prefix) + 1 :]
                    keys.append((name, written.group(1)))
                    self.unchanged[name] = {"if-match": etag.group(1).replace("&quot;", '"')}
            token = re.search(r"<NextContinuationToken>(.*?)</", text)
            if not token:
                return keys
            query[2:] = [("continuation-token", token.group(1))]

    def document(self, key: str) -> dict[str, Any]:
        """The JSON object at `key`; {} if there is none, or it is no JSON object.

        A list tells whether it is there: S3 may say 403 of an absent key to a role that may list a part of the bucket
        only, as that of a job, and 403 is also the answer to a role that is too young, which is worth waiting for.
        """
        if key not in dict(self.listed(key)):
            return {}
        try:
            return dict(json.loads(patiently(f"read the store's {key}", lambda: self.store("GET", key))))
        except (ValueError, TypeError, RecursionError):
            return {}

    def ec2(self, action: str, **parameters: str) -> str:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL")
        base = (endpoint or f"https://ec2.{self.region}.{self.suffix}").rstrip("/")
        form = urllib.parse.urlencode({"Action": action, "Version": "2016-11-15", **parameters})
        kind = {"content-type": "application/x-www-form-urlencoded"}
        return self._signed("ec2", "POST", base, "/", (), form.encode(), **kind).decode()

    def _signed(
        self,
        service: str,
        method: str,
        base: str,
        path: str,
        query: Iterable[tuple[str, str]],
        body: bytes,
        **more_headers: str,
    ) -> bytes:
        key_id, secret, token = self.metadata.credentials()
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "content-type": "application/octet-stream",
            "host": urllib.parse.urlsplit(base).netloc,
            "x-amz-content-sha256": digest,
            "x-amz-date": moment,
            **more_headers,
        }
        if token:
            headers["x-amz-security-token"] = token
        names = ";".join(sorted(headers))
        query_text = urllib.parse.urlencode(sorted(query), quote_via=urllib.parse.quote, safe="-_.~")
        lines = [method, path, query_text, *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names, digest]
        scope = f"{moment[:8]}/{self.region}/{service}/aws4_request"
        request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        plain = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{request}"
        key = ("AWS4" + secret).encode()
        for word in scope.split("/"):
            key = hmac.new(key, word.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, plain.encode(), hashlib.sha256).hexdigest()
        claimed = f"Credential={key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
        headers["Authorization"] = "AWS4-HMAC-SHA256 " + claimed
        url = base + path + ("?" + query_text if query_text else "")
        return http_call(PROXIED, method, url, headers, body if method in ("PUT", "POST") else None)


# ------------------------------------------------------------------------------------------------------------- failing
def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def count_launch(aws: Aws, config: dict[str, Any], instance: dict[str, Any], outcome: str, reason: str = "") -> None:
    """launches/<instance>.json; what an agent of this same instance has noted there is kept."""
    key = f"launches/{instance['instanceId']}.json"
    launch = {"time": now(), **aws.document(key)}
    launch.update(
        requested_at=config["run"].get("requested_at", ""),
        instance=instance["instanceId"],
        zone=instance.get("availabilityZone", ""),
        instance_type=instance.get("instanceType", ""),
        outcome=outcome,
        reason=reason,
    )
    patiently("count this launch", lambda: aws.store("PUT", key, json.dumps(launch).encode()))


def launches_without_progress(aws: Aws, config: dict[str, Any], me: str) -> int:
    """Launches in a row, this one included, that acknowledged no new checkpoint; 0 while a writer lives.

    The agent's rule (agent/life/preflight.py); tests/agent/life/test_parking.py holds the two together. EC2 is asked
    only if the answer can matter: the more it says, the fewer launches count.
    """
    requested_at = config["run"].get("requested_at", "")
    launches: list[dict[str, Any]] = []
    for key, _ in sorted(aws.listed("launches/"), key=lambda item: item[1], reverse=True):
        launch = aws.document(key)
        if launch.get("acknowledged"):
            break
        if launch and launch.get("instance") != me and launch.get("requested_at", requested_at) == requested_at:
            launches.insert(0, launch)
    saved_at = last_saved_at(aws.document("status.json"))
    count = 1 + failures(launches, {}, saved_at)
    if count < BOOTS_MAX:
        return count
    terms = [int(key[6:]) for key, _ in aws.listed("terms/") if re.fullmatch(r"terms/\d+", key)]
    writer = str(aws.document(f"terms/{max(terms)}").get("instance", "")) if terms else ""
    ids = {str(launch.get("instance", "")) for launch in launches if launch.get("outcome") not in KNOWN}
    instances = described(aws, ids.union({writer}).difference({"", me}))
    if instances.get(writer, ("", ""))[0] in LIVING:
        return 0
    return 1 + failures(launches, instances, saved_at)


def failures(launches: list[dict[str, Any]], instances: dict[str, tuple[str, str]], saved_at: str) -> int:
    """How many of `others` gained nothing. `instances`: what `described` says of them."""
    count = 0
    for launch in launches:
        state, reason = instances.get(str(launch.get("instance")), ("", ""))
        outcome = launch.get("outcome")
        by_spot = outcome not in KNOWN and reason in SPOT_REASONS
        forgiven = by_spot or outcome in ("interrupted", "barred") or str(launch.get("time", "")) < saved_at
        if state not in LIVING and not forgiven:
            count += 1
    return count


def last_saved_at(status: dict[str, Any]) -> str:
    """When the run last acknowledged a checkpoint, as our documents write it (UTC, seconds); "" for never."""
    try:
        saved = datetime.datetime.fromisoformat(status["progress"]["saved"]["time"].strip().replace("Z", "+00:00"))
        return saved.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") if saved.tzinfo else ""
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        return ""


def described(aws: Aws, instances: set[str]) -> dict[str, tuple[str, str]]:
    """{instance: (state, code of its state's reason)} of those that EC2 shows."""
    form = {f"Filter.1.Value.{number}": name for number, name in enumerate(sorted(instances)[:FILTER_VALUES_MAX], 1)}
    if not form:
        return {}
    form["Filter.1.Name"] = "instance-id"
    states = {}
    text = patiently("describe the launches' instances", lambda: aws.ec2("DescribeInstances", **form))
    for item in text.split("<instanceId>")[1:]:
        state = re.search(r"<instanceState>.*?<name>(.*?)</", item, re.DOTALL)
        reason = re.search(r"<stateReason>\s*<code>(.*?)</", item)
        states[item.split("<")[0]] = (state.group(1) if state else "", reason.group(1) if reason else "")
    return states


def tag(aws: Aws, instance: str, reason: str) -> bool:
    """The reason as a tag of this instance: what is still to be seen where the store is not."""
    try:
        aws.ec2("CreateTags", **{"ResourceId.1": instance, "Tag.1.Key": "spotheal:reason", "Tag.1.Value": reason[:255]})
        return True
    except (Stuck, Passing) as error:
        say(f"the reason is not tagged on {instance}: {error}")
        return False


def tagged_failures(aws: Aws, run: str) -> int:
    """The run's instances that ended with such a tag, this one included; EC2 shows them for an hour."""
    filters = [("tag:spotheal:run", run), ("tag-key", "spotheal:reason")]
    form: dict[str, str] = {}
    for number, (name, value) in enumerate(filters, 1):
        form.update({f"Filter.{number}.Name": name, f"Filter.{number}.Value.1": value})
    return patiently("count the launches", lambda: aws.ec2("DescribeInstances", **form)).count("<instanceId>")


def park(aws: Aws, config: dict[str, Any], instance: str, reason: str) -> None:
    """An end of the run: the reason to the store, then cancel the fleet, which ends this machine too."""
    answer = patiently("find the fleet", lambda: aws.ec2("DescribeInstances", **{"InstanceId.1": instance}))
    tagged = re.search(r"<key>aws:ec2(?:spot:fleet-request|:fleet)-id</key>\s*<value>([^<]+)</value>", answer)
    fleet = tagged.group(1) if tagged else ""

    def record() -> None:
        status = {"schema_version": 1, "job": config["job"]["name"], "run": config["run"]["id"]}
        status.update(aws.document("status.json"))
        if status.get("phase") in ENDS:
            return  # it stands; only the fleet is still there
        status.update(phase="parked", reason=reason, heartbeat=now(), ended=now())
        status.update(instance=instance, fleet=fleet or None)
        unchanged = aws.unchanged.get("status.json", {"if-none-match": "*"})
        aws.store("PUT", "status.json", json.dumps(status).encode(), (), **unchanged)

    try:
        patiently("store the reason", record)
    except Stuck as error:  # the store may be what failed; the fleet must end all the same
        say(str(error))
    say(f"{reason}; cancelling {fleet or 'no fleet: this instance has none'}", failed=True)

    def cancel() -> None:
        if fleet.startswith("sfr-"):
            answer = aws.ec2("CancelSpotFleetRequests", **{"SpotFleetRequestId.1": fleet, "TerminateInstances": "true"})
        else:
            answer = aws.ec2("DeleteFleets", **{"FleetId.1": fleet, "TerminateInstances": "true"})
        refused = re.search(r"<unsuccessfulFleet\w+Set>\s*<item>.*?<code>([^<]*)</code>", answer, re.DOTALL)
        if refused and not refused.group(1).endswith(("NotInCancellableState", "NotInDeletableState")):
            raise Passing(refused.group(1))  # AWS refuses inside a successful answer

    if fleet:
        patiently(f"cancel {fleet}", cancel)


def record_failure(aws: Aws, config: dict[str, Any], instance: dict[str, Any], reason: str) -> None:
    """The reason to the store and a tag, the run parked after too many of them, no money spent on an idle machine."""
    me = instance["instanceId"]
    tagged = tag(aws, me, reason)
    try:
        try:
            count_launch(aws, config, instance, "boot failed", reason)
            count = launches_without_progress(aws, config, me)
        except Stuck as error:
            if not tagged:
                raise
            say(f"{error}; counting the tags of instances instead")
            count = tagged_failures(aws, config["run"]["id"])
        stay_up(str(config["job"].get("keep_on_failure", "0m")))
        if count >= BOOTS_MAX:
            text = f"{count} launches in a row acknowledged no new checkpoint; the last one said: {reason}"
            park(aws, config, me, text)
    except (Stuck, KeyError, ValueError) as error:
        # The machine that would take this one's place would fail uncounted too, and so on without end.
        return say(f"the machine stays up, since its failure could not be recorded: {error}", failed=True)
    shutdown = shutil.which("shutdown")
    if shutdown and (not ROOT or os.path.dirname(shutdown) not in SYSTEM_FOLDERS):  # else it is somebody's desk
        say("switching off", failed=True)
        subprocess.run([shutdown, "-h", "now"])


def stay_up(duration: str) -> None:
    match = re.match(r"(\d+)\s*([smhd])", duration)
    seconds = int(match.group(1)) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match.group(2)] if match else 0
    if seconds:
        say(f"this machine stays up for {duration} to be looked at (keep_on_failure)", failed=True)
        time.sleep(seconds)


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def configuration() -> dict[str, Any]:
    """What the user data carries, beside this program."""
    return dict(json.loads(read(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.json"))))


def main() -> int:
    config = configuration()
    metadata = Metadata()
    aws = Aws(config["run"]["region"], config["run"]["store"], metadata)
    record_failure(aws, config, patiently("read who this instance is", metadata.instance), sys.argv[1])
    return REPORTED


if __name__ == "__main__":
    sys.exit(main())
