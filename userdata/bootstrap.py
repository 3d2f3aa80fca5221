"""Installs the agent from the run's store and starts it. Standard library only; runs on a bare instance.

    bootstrap.py MANIFEST_SHA256 [STUCK]   install what the store's manifest names, then start the agent;
                                           with STUCK, why this boot cannot go on, only report that
    bootstrap.py keep                      run the agent, again whenever it ends with anything but 0

Everything lies below $SPOTHEAL_ROOT (default /). The launch is counted in the store before anything else can fail, so
that boots that never reach the agent are counted too. Each file must have the sha256 that the user data vouches for.
The agent needs Python 3.10; what reports a failure must run on any that cloud-init itself may bring (3.7: no `|` of
dictionaries, no `match`), since an image that is too old is such a failure.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import hmac
import http.client
import io
import json
import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

ROOT = os.environ.get("SPOTHEAL_ROOT", "").rstrip("/")
HOME = ROOT + "/opt/spotheal"
LOG = ROOT + "/var/log/spotheal/user-data.log"
AGENT = [HOME + "/agent/bin/python", "-I", "-m", "spotheal.agent", "run", "--config", HOME + "/config.json"]
PYTHON_MIN = (3, 10)
ADVICE = "Choose one that has it: Debian 12, Ubuntu 22.04, a PyTorch Deep Learning AMI"
UNITS = "/etc/systemd/system/"
# User data runs at the first boot only. A machine that goes down in the middle of it goes on here at the next one.
INSTALL_UNIT = """[Unit]
Description=spotheal: the installation of the agent that the last boot did not finish
After=network-online.target
Wants=network-online.target
ConditionPathExists=!/etc/systemd/system/multi-user.target.wants/spotheal-agent.service

[Service]
Type=oneshot
ExecStart={python} -I {home}/bootstrap.py {manifest}
StandardOutput=journal+console
StandardError=journal+console

[Install]
WantedBy=multi-user.target
"""
PASSING_SECONDS = 600.0  # how long a network that is down, throttling and AWS's own errors are waited for
REFUSED_SECONDS = 60.0  # how long "not allowed" is: a role made moments ago is not known everywhere yet
RESTART_SECONDS_MAX = 10.0
CREDENTIALS_SECONDS = 30.0
RUNNING_SECONDS = 30.0  # how long systemd is asked whether the agent runs, to say it here
ENDS = ("done", "failed", "set-up failed", "limit", "parked", "cancelled")  # as in agent/names.py
BOOTS_MAX = 5  # launches in a row that gained nothing: the run is parked (agent/finish.py has the same figure)
PASSED_ON = re.compile(r"AWS_ENDPOINT_URL\w*|AWS_EC2_METADATA_SERVICE_ENDPOINT|AWS_CA_BUNDLE|(?i:https?|no)_proxy")
SYSTEM_FOLDERS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin")
CHECK = """
import sys, spotheal.agent.life
from spotheal.agent.instance_config import InstanceConfig
from spotheal.agent.errors import ConfigError
try:
    InstanceConfig.from_json(open(sys.argv[1], encoding="utf-8").read())
except ConfigError as error:
    sys.exit(error.message.replace("\\n", "; "))
"""
SITE = f"/agent/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
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


def since_user_data() -> str:
    """Seconds since the shell that ran the user data began: we are that process, or its child."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat, open("/proc/uptime") as uptime:
            began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return f", {float(uptime.read().split()[0]) - began:.1f} s after the user data began"
    except (OSError, ValueError, IndexError):
        return ""


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
    """The body of the answer. Stuck or Passing where it is none, with what the server said."""
    request = urllib.request.Request(url, data=body, headers=headers or {}, method=method)
    try:
        with opener.open(request, timeout=timeout) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode("utf-8", "replace")
        code = (re.findall(r"<Code>([^<]*)</Code>", text) or [""])[0]
        said = f"{error.code} {code or error.reason}"
        if error.code >= 500 or error.code == 429 or code in ("SlowDown", "RequestTimeout", "RequestTimeTooSkewed"):
            raise Passing(said) from None
        if error.code in (401, 403):
            raise Passing(said, REFUSED_SECONDS) from None
        raise Stuck(said) from None
    except (OSError, http.client.HTTPException) as error:  # URLError, time-outs and half answers are among these
        raise Passing(str(getattr(error, "reason", "") or error or type(error).__name__)) from None


def patiently(what: str, call: Callable[[], T]) -> T:
    """What `call` returns, asked again with growing pauses while that may help."""
    start, pause = time.monotonic(), 0.5
    while True:
        try:
            return call()
        except Stuck as error:
            raise Stuck(f"could not {what}: {error}") from None
        except Passing as error:
            if time.monotonic() - start + pause > error.seconds:
                raise Stuck(f"could not {what} in {error.seconds:.0f} s: {error}") from None
            say(f"could not {what} yet: {error}")
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
            found = json.loads(self.get("/latest/meta-data/iam/security-credentials/" + role))
            keys = found["AccessKeyId"], found["SecretAccessKey"], found.get("Token", "")
            self._known = time.monotonic(), keys
            return keys
        except (Stuck, KeyError, ValueError) as error:  # a role attached moments ago answers 404 or {"Code": "Failed"}
            raise Passing(f"no role's credentials on this instance ({error})", REFUSED_SECONDS) from None


class Aws:
    """Signed requests (Signature Version 4) to the run's store, and the two calls to EC2 that parking needs."""

    def __init__(self, region: str, store: str, metadata: Metadata) -> None:
        self.region, self.metadata = region, metadata
        self.bucket, _, self.prefix = store[len("s3://") :].partition("/")
        self.suffix = "amazonaws." + {"cn-": "com.cn", "eus": "eu"}.get(region[:3], "com")

    def store(self, method: str, key: str = "", body: bytes = b"", query: Iterable[tuple[str, str]] = ()) -> bytes:
        own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        base, path = (own or f"https://s3.{self.region}.{self.suffix}").rstrip("/"), "/" + self.bucket
        if not own and "." not in self.bucket:
            base, path = f"https://{self.bucket}.s3.{self.region}.{self.suffix}", ""
        if not query:
            path += f"/{self.prefix}/{key}"
        return self._signed("s3", method, base, urllib.parse.quote(path or "/", safe="/-_.~"), query, body)

    def ec2(self, action: str, **parameters: str) -> str:
        own = os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL")
        base = (own or f"https://ec2.{self.region}.{self.suffix}").rstrip("/")
        form = urllib.parse.urlencode({"Action": action, "Version": "2016-11-15", **parameters})
        return self._signed("ec2", "POST", base, "/", (), form.encode(), "application/x-www-form-urlencoded").decode()

    def _signed(
        self,
        service: str,
        method: str,
        base: str,
        path: str,
        query: Iterable[tuple[str, str]],
        body: bytes,
        content_type: str = "application/octet-stream",
    ) -> bytes:
        key_id, secret, token = self.metadata.credentials()
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest = hashlib.sha256(body).hexdigest()
        headers = {"content-type": content_type, "host": urllib.parse.urlsplit(base).netloc}
        headers.update({"x-amz-content-sha256": digest, "x-amz-date": now})
        if token:
            headers["x-amz-security-token"] = token
        names = ";".join(sorted(headers))
        asked = urllib.parse.urlencode(sorted(query), quote_via=urllib.parse.quote, safe="-_.~")
        lines = [method, path, asked, *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names, digest]
        scope = f"{now[:8]}/{self.region}/{service}/aws4_request"
        plain = "AWS4-HMAC-SHA256\n{}\n{}\n{}".format(now, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest())
        key = ("AWS4" + secret).encode()
        for word in scope.split("/"):
            key = hmac.new(key, word.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, plain.encode(), hashlib.sha256).hexdigest()
        claimed = f"Credential={key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
        headers["Authorization"] = "AWS4-HMAC-SHA256 " + claimed
        url = base + path + ("?" + asked if asked else "")
        return http_call(PROXIED, method, url, headers, body if method in ("PUT", "POST") else None)


# -------------------------------------------------------------------------------------------------------- installation
def fetch(aws: Aws, manifest_sha256: str) -> dict[str, bytes]:
    """{file name: content} of the wheels, each with the sha256 that the manifest gives, the manifest with ours."""
    manifest = patiently("read the store's agent/manifest.json", lambda: aws.store("GET", "agent/manifest.json"))
    if hashlib.sha256(manifest).hexdigest() != manifest_sha256:
        raise Stuck("the store's agent/manifest.json is not the one of this user data; `fleetctl request` it again")
    wheels = json.loads(manifest)["files"]
    for wheel in wheels:
        if not re.fullmatch(r"[A-Za-z0-9_.+!]+(-[A-Za-z0-9_.+!]+)*-none-any\.whl", wheel["name"]):
            raise Stuck("{!r} in the manifest is no wheel that suits every machine".format(wheel["name"]))

    def one(wheel: dict[str, Any]) -> tuple[str, bytes]:
        name = wheel["name"]
        body = patiently("read the store's wheel " + name, lambda: aws.store("GET", "agent/wheels/" + name))
        if hashlib.sha256(body).hexdigest() != wheel["sha256"]:
            raise Stuck(f"the store's wheel {name} is not the one in the manifest (sha256 differs)")
        return name, body

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, wheels))


def unzip(name: str, content: bytes, folder: str, only: tuple[str, ...] = ("",)) -> None:
    """The wheel's files below `folder`; only those whose path begins with one of `only`."""
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        for item in wheel.infolist():
            parts = item.filename.split("/")
            if item.filename.startswith("/") or ".." in parts or "\\" in item.filename:
                raise Stuck(f"the wheel {name} has a path out of its folder: {item.filename!r}")
            if item.filename.startswith(only) and not parts[0].endswith(".data"):
                wheel.extract(item, folder)


def install(aws: Aws, manifest_sha256: str) -> None:
    """The agent's own environment and the trainer's copy of our packages, each whole or not at all."""
    marks = [HOME + "/agent/.manifest", HOME + "/trainer/.manifest"]
    if all(read(mark) == manifest_sha256 for mark in marks) and os.access(AGENT[0], os.X_OK):
        return say("the agent is installed already")
    start = time.monotonic()
    wheels = fetch(aws, manifest_sha256)
    new = f"{HOME}/.new-{os.getpid()}"
    try:
        # A virtual environment by hand (PEP 405): images without the venv module's parts do, and it takes no time.
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        site = new + SITE
        for folder in (new + "/agent/bin", site, new + "/trainer"):
            os.makedirs(folder)
        os.symlink(python, new + "/agent/bin/python")
        with open(new + "/agent/pyvenv.cfg", "w", encoding="utf-8") as file:
            file.write(f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n")
        for name, content in wheels.items():
            unzip(name, content, site)
            if name.startswith("spotheal-"):
                unzip(name, content, new + "/trainer", ("spotheal/agent/", "spotheal/training/"))
        for part in ("agent", "trainer"):
            with open(f"{new}/{part}/.manifest", "w", encoding="utf-8") as file:
                file.write(manifest_sha256)
            if os.path.lexists(HOME + "/" + part):
                os.rename(HOME + "/" + part, f"{new}/old-{part}")
            os.rename(new + "/" + part, HOME + "/" + part)
    except (OSError, zipfile.BadZipFile) as error:
        raise Stuck(f"the agent cannot be unpacked below {HOME}: {error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    say(f"the agent is installed, {len(wheels)} wheels in {time.monotonic() - start:.1f} s")


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def check() -> None:
    """An agent that cannot be imported here, or refuses its configuration, would be started again for ever."""
    done = subprocess.run([AGENT[0], "-I", "-c", CHECK, HOME + "/config.json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise Stuck("the agent cannot run here: " + (done.stderr.strip() or str(done.returncode)).split("\n")[-1])


def make_user(cage: dict[str, str]) -> None:
    """The trainer's user: no login, no rights. Only where the whole machine is ours."""
    if ROOT or os.getuid() != 0 or cage["mode"] == "off":
        return
    try:
        pwd.getpwnam(cage["user"])
    except KeyError:
        argv = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        argv += ["--shell", "/usr/sbin/nologin", cage["user"]]
        try:
            subprocess.run(argv, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip()
            raise Stuck("the trainer's user {} cannot be made: {}".format(cage["user"], why)) from None


# --------------------------------------------------------------------------------------------------------------- start
def has_systemd() -> bool:
    """Whether systemd runs here and the machine is ours."""
    return not ROOT and os.getuid() == 0 and os.path.isdir("/run/systemd/system")


def systemctl(*argv: str) -> str:
    done = subprocess.run(["systemctl", *argv], capture_output=True, text=True)
    if done.returncode != 0:
        raise Stuck(f"systemctl {argv[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def go_on_after_reboot(manifest_sha256: str) -> None:
    """Before anything is waited for. Without it this boot goes on all the same."""
    if not has_systemd():
        return
    try:
        with open(UNITS + "spotheal-install.service", "w", encoding="utf-8") as file:
            file.write(INSTALL_UNIT.format(home=HOME, python=sys.executable, manifest=manifest_sha256))
        systemctl("enable", "spotheal-install.service")
    except (Stuck, OSError) as error:
        say(f"a reboot before the agent is installed would end it: {error}")


def mount_unit(path: str) -> str:
    """systemd's name of the unit of what is mounted at `path` (systemd-escape --path --suffix=mount)."""
    joined = "/".join(part for part in path.split("/") if part not in ("", "."))
    plain = "".join(c if c.isalnum() or c in ":_./" else f"\\x{ord(c):02x}" for c in joined)
    return ("\\x2e" + plain[1:] if plain.startswith(".") else plain).replace("/", "-") + ".mount"


def start(config: dict[str, Any]) -> None:
    """Under systemd where it runs and the machine is ours, else as a process of its own that is started again."""
    if not has_systemd():
        argv = [sys.executable, "-I", HOME + "/bootstrap.py", "keep"]
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, cwd=ROOT or "/")
        return say("the agent is started" + since_user_data())
    shutil.copyfile(HOME + SITE + "/spotheal/userdata/spotheal-agent.service", UNITS + "spotheal-agent.service")
    # At shutdown systemd unmounts all it sees mounted. Between two saves it would find the volume idle, and the last
    # checkpoint would go to the folder below: the mount has to wait for the agent.
    os.makedirs(UNITS + "spotheal-agent.service.d", exist_ok=True)
    with open(UNITS + "spotheal-agent.service.d/volume.conf", "w", encoding="utf-8") as file:
        file.write("[Unit]\nAfter={}\n".format(mount_unit(config["volume"]["mount"])))
    lines = [f'{name}="{value}"\n' for name, value in os.environ.items() if PASSED_ON.fullmatch(name)]
    with open(HOME + "/environment", "w", encoding="utf-8") as file:
        file.writelines(lines)
    systemctl("daemon-reload")
    systemctl("enable", "--now", "--no-block", "spotheal-agent.service")
    limit, state = time.monotonic() + RUNNING_SECONDS, ""
    while time.monotonic() < limit and state != "active":
        time.sleep(0.05)
        state = systemctl("show", "--property=ActiveState", "--value", "spotheal-agent.service")
    if state == "active":
        return say("the agent runs" + since_user_data())
    say(f"the agent is not up after {RUNNING_SECONDS:.0f} s ({state}): `systemctl status spotheal-agent`", failed=True)


def keep() -> int:
    """Run the agent until it ends with 0 or we are asked to end; one keeper a machine."""
    os.makedirs(ROOT + "/run/spotheal", exist_ok=True)
    lock = open(ROOT + "/run/spotheal/keeper.lock", "w", encoding="ascii")  # noqa: SIM115 (held for life)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("the agent runs already")
        return 0
    agent: subprocess.Popen[bytes] | None = None
    asked = False

    def end(*_: object) -> None:
        nonlocal asked
        asked = True
        if agent is None or agent.poll() is not None:
            sys.exit(0)
        agent.terminate()

    signal.signal(signal.SIGTERM, end)
    pause = 0.5
    while True:
        began = time.monotonic()
        agent = subprocess.Popen(AGENT, stdin=subprocess.DEVNULL)
        if asked:
            agent.terminate()
        code = agent.wait()
        if code == 0 or asked:
            return 0
        pause = 1.0 if time.monotonic() - began > 60.0 else min(2 * pause, RESTART_SECONDS_MAX)
        say(f"the agent ended with {code}; it is started again in {pause:.0f} s")
        time.sleep(pause)


# ------------------------------------------------------------------------------------------------------------- failing
def now(later: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + later))


def count_launch(aws: Aws, config: dict[str, Any], instance: dict[str, Any], outcome: str, reason: str = "") -> None:
    """launches/<instance>.json; what an agent of this same instance has noted there is kept."""
    key = f"launches/{instance['instanceId']}.json"
    try:
        launch = dict(json.loads(patiently("read this launch", lambda: aws.store("GET", key))))
    except (Stuck, ValueError):
        launch = {"time": now()}
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
    """Launches in a row, this one included, that acknowledged no new checkpoint, counted as agent/finish.py does.
    Others that boot now may come up: a sweep's twenty machines boot at once, and one that fails must not end it."""
    query = [("list-type", "2"), ("prefix", aws.prefix + "/launches/")]
    listing = patiently("list the launches", lambda: aws.store("GET", query=query)).decode()

    def one(key: str) -> dict[str, Any]:
        return dict(json.loads(patiently("read a launch", lambda: aws.store("GET", key[len(aws.prefix) + 1 :]))))

    requested_at = config["run"].get("requested_at", "")
    count = 0
    for launch in sorted(map(one, re.findall("<Key>([^<]*)</Key>", listing)), key=lambda one: str(one.get("time", ""))):
        outcome = launch.get("outcome")
        boots = outcome == "booting" and launch.get("instance") != me and now(-900) < launch.get("time", "") < now(300)
        if launch.get("acknowledged") or launch.get("requested_at", requested_at) != requested_at:
            count = 0
        elif not boots and outcome not in ("interrupted", "barred"):
            count += 1
    return count


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
    asked = [("tag:spotheal:run", run), ("tag-key", "spotheal:reason")]
    form: dict[str, str] = {}
    for number, (name, value) in enumerate(asked, 1):
        form.update({f"Filter.{number}.Name": name, f"Filter.{number}.Value.1": value})
    return patiently("count the launches", lambda: aws.ec2("DescribeInstances", **form)).count("<instanceId>")


def park(aws: Aws, config: dict[str, Any], instance: str, reason: str) -> None:
    """An end of the run: the reason to the store, then cancel the fleet, which ends this machine too."""
    found = patiently("find the fleet", lambda: aws.ec2("DescribeInstances", **{"InstanceId.1": instance}))
    tagged = re.search(r"<key>aws:ec2(?:spot:fleet-request|:fleet)-id</key>\s*<value>([^<]+)</value>", found)
    fleet = tagged.group(1) if tagged else ""
    status = {"schema_version": 1, "job": config["job"]["name"], "run": config["run"]["id"]}
    try:
        status.update(json.loads(patiently("read the status", lambda: aws.store("GET", "status.json"))))
    except (Stuck, ValueError):
        say("the run has no status yet")
    ended = status.get("phase") in ENDS  # it stands; only the fleet is still there
    status.update({"phase": "parked", "reason": reason, "heartbeat": now(), "instance": instance})
    status.update({"fleet": fleet or None})
    try:
        if not ended:
            patiently("store the reason", lambda: aws.store("PUT", "status.json", json.dumps(status).encode()))
    except Stuck as error:  # the store may be what failed; the fleet must end all the same
        say(str(error))
    say(f"{reason}; cancelling {fleet or 'no fleet: this instance has none'}", failed=True)

    def cancel() -> None:
        if fleet.startswith("sfr-"):
            said = aws.ec2("CancelSpotFleetRequests", **{"SpotFleetRequestId.1": fleet, "TerminateInstances": "true"})
        else:
            said = aws.ec2("DeleteFleets", **{"FleetId.1": fleet, "TerminateInstances": "true"})
        refused = re.search(r"<unsuccessfulFleet\w+Set>\s*<item>.*?<code>([^<]*)</code>", said, re.DOTALL)
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
            why = f"{count} launches in a row acknowledged no new checkpoint; the last one said: {reason}"
            park(aws, config, me, why)
    except (Stuck, KeyError, ValueError) as error:
        # The machine that would take this one's place would fail uncounted too, and so on without end.
        return say(f"the machine stays up, since its failure could not be recorded: {error}", failed=True)
    shutdown = shutil.which("shutdown")
    if shutdown and (not ROOT or os.path.dirname(shutdown) not in SYSTEM_FOLDERS):  # else it is somebody's desk
        say("switching off", failed=True)
        subprocess.run([shutdown, "-h", "now"])


def stay_up(duration: str) -> None:
    found = re.match(r"(\d+)\s*([smhd])", duration)
    seconds = int(found.group(1)) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found.group(2)] if found else 0
    if seconds:
        say(f"this machine stays up for {duration} to be looked at (keep_on_failure)", failed=True)
        time.sleep(seconds)


def main() -> int:
    if sys.argv[1:] == ["keep"]:
        return keep()
    os.umask(0o022)
    version = sys.version.split()[0]
    say(f"user data, Python {version}, {sys.executable}")
    config = json.loads(read(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.json")))
    if not any(sys.argv[2:]):
        go_on_after_reboot(sys.argv[1])
    metadata = Metadata()
    aws = Aws(config["run"]["region"], config["run"]["store"], metadata)
    instance: dict[str, Any] = {}
    try:
        instance = patiently("read who this instance is", metadata.instance)
        count_launch(aws, config, instance, "booting")
        if any(sys.argv[2:]):
            raise Stuck(sys.argv[2])
        if sys.version_info < PYTHON_MIN:
            raise Stuck(f"no Python 3.10 or newer on this image: the best is {sys.executable}, {version}. {ADVICE}")
        install(aws, sys.argv[1])
        check()
        make_user(config["cage"])
        start(config)
        return 0
    except (Stuck, KeyError, ValueError, OSError) as error:
        reason = str(error) if isinstance(error, Stuck) else f"{type(error).__name__}: {error}"
    say(f"this machine cannot start the job: {reason}", failed=True)
    if instance:
        record_failure(aws, config, instance, reason)
    return 1


if __name__ == "__main__":
    sys.exit(main())
