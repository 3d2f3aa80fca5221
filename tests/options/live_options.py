"""Options of job.toml and of the verbs, each lived once by real machines of the local cloud: `make options`.

A life begins in an empty account with `fleetctl init`, so its machines have the roles that `init` and `request` make.
The job files are data (`jobs/`): tests/project/test_options_lived.py reads from them what is lived here.
"""

from __future__ import annotations

import getpass
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cloud_desk import CloudDesk, cloud_desk, owner, served
from moto.sns.models import sns_backends
from typer.testing import CliRunner

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.cli import app
from spotheal.fleet.logs import follow
from spotheal.fleet.rehearsal.ec2.world import Instance
from spotheal.fleet.rehearsal.scenarios.job import git

__all__ = ["cloud_desk", "served"]  # fixtures
pytestmark = pytest.mark.processes
HERE = Path(__file__).resolve().parent
POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:ListAllMyBuckets", "Resource": "*"}]}
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHV7CLFk6iNkNu8RbUFJzI1Nw5dDF8nGsCGH7bLvrJrP somebody"
LIFE_SECONDS_MAX = 150.0  # three times what one takes on a quiet machine


def until(fact: Callable[[], Any], what: Callable[[], str], seconds: float = LIFE_SECONDS_MAX) -> Any:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := fact():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what()}")


class Life:
    """One run of the job file `name` in a checkout of its own."""

    def __init__(self, desk: CloudDesk, name: str, **words: str) -> None:
        self.desk, self.name, self.cloud = desk, name, desk.cloud
        desk.folder.joinpath("train.py").write_text((HERE / "train.py").read_text())
        git(desk.folder, "add", "train.py")
        git(desk.folder, "commit", "--quiet", "--allow-empty", "--message", "A trainer")
        desk.good("init", "--command", "python train.py", "--gpus", "0", "--name", name, "--volume", "2")
        text = (HERE / "jobs" / f"{name}.toml").read_text()
        for word, value in {"PYTHON": sys.executable, **words}.items():
            text = text.replace(f'"{word}', f'"{value}')
        desk.folder.joinpath("job.toml").write_text(text)

    def request(self, *options: str) -> dict[str, Any]:
        self.desk.good("validate")
        made = self.desk.good("request", "--yes", *options)
        self.store = Store(owner("s3"), StoreUrl.parse(made["store"]))
        return made

    def status(self) -> dict[str, Any]:
        """Read from the store: `fleetctl status` in this process would take the local cloud's time."""
        return self.store.read_status() or {}

    def await_step(self, step: int) -> None:
        def reached() -> bool:
            return int((self.status().get("progress") or {}).get("step") or 0) >= step

        until(reached, lambda: f"step {step}; {self.last_words()}")

    def await_end(self, phase: str) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            found = self.status()
            return found if found.get("phase") in ("done", "failed", "set-up failed", "parked", "limit") else None

        found = until(ended, lambda: f"the end; {self.last_words()}")
        assert phase == found["phase"], f"{found['reason']}\n{self.last_words()}"
        until(lambda: not self.live(), lambda: "the machines are gone")
        return found

    def live(self) -> list[Instance]:
        return [one for one in self.cloud.rules.instances() if one.state in ("pending", "running")]

    def last_words(self) -> str:
        consoles = sorted(self.cloud.folder.glob("instances/*/console.log"))
        said = "\n".join(f"{one}\n" + "\n".join(one.read_text().splitlines()[-15:]) for one in consoles)
        return f"{json.dumps(self.status())}\n{said}\n{self.agent_logs()[-5000:]}"

    def agent_logs(self) -> str:
        return "".join(one.read_text() for one in self.cloud.folder.glob("instances/*/root/var/log/spotheal/agent.log"))

    def results(self, folder: Path) -> list[dict[str, Any]]:
        """What the trainer was given at each of its starts."""
        self.desk.good("results", "get", self.name, "--to", str(folder))
        return [json.loads(path.read_text()) for path in sorted(folder.rglob("given-*.json"), key=_step)]


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on this machine's address in its network (loopback is refused), and what was posted."""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, http.server.ThreadingHTTPServer(
        ("0.0.0.0", 0), Handler
    ) as server:
        route.connect(("198.51.100.1", 9))  # sends nothing: only asks the routes
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{route.getsockname()[0]}:{server.server_port}/", posted
        server.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(cloud_desk: CloudDesk) -> Iterator[None]:
    """A life that failed leaves nothing at work for the next one."""
    yield
    cloud_desk.cloud.rules.no_capacity((), 0.0)
    for fleet in cloud_desk.cloud.rules.fleets():
        if not fleet.state.startswith(("cancelled", "deleted")):
            for name in ("rescue", "everything", "failing", "swept", "login"):
                cloud_desk.run("cancel", name, "--yes")


# ------------------------------------------------------------------------------------------------------------ the lives
@pytest.mark.parametrize("engine", ["spot-fleet", "ec2-fleet"])
def test_an_on_demand_machine_trains_on_where_spot_has_no_capacity(
    cloud_desk: CloudDesk, tmp_path: Path, engine: str
) -> None:
    key = tmp_path / "key.pub"
    key.write_text(KEY)
    owner("sns").create_topic(Name="spotheal-rescue")
    topic = sns_backends["123456789012"]["us-west-2"].topics["arn:aws:sns:us-west-2:123456789012:spotheal-rescue"]
    with webhook() as (address, posted):
        life = Life(cloud_desk, "rescue", WEBHOOK=address, PUBLIC_KEY=str(key))
        if engine == "ec2-fleet":
            text = cloud_desk.folder.joinpath("job.toml").read_text()
            cloud_desk.folder.joinpath("job.toml").write_text(text.replace("[fleet]", f'[fleet]\nengine = "{engine}"'))
        done = life.request(*(["--new-run"] if engine == "ec2-fleet" else []))
        life.await_step(20)
        (spot,) = life.live()
        assert spot.is_spot
        assert len(cloud_desk.good("cloud", "state")["schedules"]) == 1
        cloud_desk.good("cloud", "no-capacity", "--seconds", "600")
        cloud_desk.good("cloud", "kill", "--instance", spot.id)
        cloud_desk.good("cloud", "schedules")
        rescuer = until(lambda: next((one for one in life.live() if not one.is_spot), None), lambda: "on-demand")
        assert cloud_desk.good("cloud", "state")["schedules"] == []
        life.await_end("done")
    calls = {"spot-fleet": "modifySpotFleetRequest", "ec2-fleet": "modifyFleet"}
    (*_, fired) = life.cloud.endpoint.schedules.fired
    assert (calls[engine], "") == (fired[1], fired[3])
    assert rescuer.role == "spotheal-job-rescue"
    agent = life.cloud.machines.get(rescuer.id)
    assert agent is not None
    said = (agent.root / "var/log/spotheal/agent.log").read_text()
    assert "the on-demand rescue has fired" in said and "could not be" not in said
    assert life.results(tmp_path / engine)[-1]["words"][-1] == "150"
    assert any("done" in one["text"] for one in posted), posted
    assert topic.sent_notifications
    groups = owner("ec2").describe_security_groups(GroupNames=["spotheal-ssh"])
    assert "203.0.113.7/32" in json.dumps(groups)
    assert done["run"] == cloud_desk.good("status", "rescue", "--run", done["run"])["run"]


def test_a_run_that_needs_no_rescue_deletes_its_schedule(cloud_desk: CloudDesk, tmp_path: Path) -> None:
    key = tmp_path / "key.pub"
    key.write_text(KEY)
    owner("sns").create_topic(Name="spotheal-rescue")
    life = Life(cloud_desk, "rescue", WEBHOOK="", PUBLIC_KEY=str(key))
    life.request("--new-run")
    life.await_end("done")
    assert cloud_desk.good("cloud", "state")["schedules"] == []


def test_everything_at_once_and_then_its_data_for_one_that_fails(cloud_desk: CloudDesk, tmp_path: Path) -> None:
    life = everything(cloud_desk, tmp_path)
    volumes = [one for one in life.cloud.rules.volumes() if one.tags.get("Name") == "everything-data"]
    snapshot = life.cloud.rules.call("CreateSnapshot", {"VolumeId": volumes[-1].id})["SnapshotId"]
    until(lambda: life.cloud.rules.snapshots()[-1].state == "completed", lambda: "the snapshot")
    a_failure_stays_up_to_be_looked_at(cloud_desk, snapshot, str(volumes[-1].kms_key))


def everything(cloud_desk: CloudDesk, tmp_path: Path) -> Life:
    folder, part = cloud_desk.folder, tmp_path / "part"
    part.mkdir()
    (part / "in-the-part").touch()
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "A part"]):
        git(part, *words)
    git(folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(part), "part")
    folder.joinpath("inner").mkdir()
    folder.joinpath("inner", "README").touch()
    folder.joinpath("trainer-policy.json").write_text(json.dumps(POLICY))
    git(folder, "add", ".")
    key = owner("kms").create_key()["KeyMetadata"]["Arn"]
    life = Life(cloud_desk, "everything", KMS_KEY=key)
    git(folder, "branch", "trained")
    folder.joinpath("train.py").write_text("raise SystemExit('the newest commit, which nobody asked for')")
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "--message", "Later")
    s3 = owner("s3")
    s3.create_bucket(Bucket="everything-results", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    put(cloud_desk, "FROM_SSM", "a-secret-of-ssm", "ssm")
    put(cloud_desk, "FROM_MANAGER", "a-secret-of-the-manager", "secretsmanager")
    life.cloud.rules.pin_next_zone("us-west-2a")  # not the cheapest zone, where `request` makes the empty volume
    life.request()
    life.await_step(30)
    cloud_desk.good("cloud", "next-zone")
    cloud_desk.good("cloud", "interrupt", "--seconds", "45")
    life.await_end("done")
    first, again = life.results(tmp_path / "results")
    assert ("first", "again") == (first["words"][-1], again["words"][-1])
    for given in (first, again):
        environment = {"WORD": "from the environment", "FROM_SSM": "a-secret-of-ssm",
                       "FROM_MANAGER": "a-secret-of-the-manager", "WORLD_SIZE": ""}  # fmt: skip
        assert environment == given["environment"]
        assert "inner" == given["folder"] and ["in-the-part"] == [x for x in given["submodule"] if x != ".git"]
    assert "setup-was-here" in first["files"] and "setup-was-here" in again["files"], "the working copy is the volume's"
    assert 1 == len(first["starts"]) and 2 == len(again["starts"]), "what is kept outlives the machine"
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket="everything-results")["Contents"]]
    assert any(key.startswith("weights/everything/") and "given-0" in key for key in keys), keys
    assert s3.list_objects_v2(Bucket="everything-store", Prefix="below/everything/")["KeyCount"] > 5
    volumes = [volume for volume in life.cloud.rules.volumes() if volume.tags.get("Name") == "everything-data"]
    volumes.sort(key=lambda volume: volume.created)
    machines = [machine for machine in life.cloud.rules.instances() if machine.tags.get("spotheal:job") == "everything"]
    zones = [machine.zone for machine in sorted(machines, key=lambda machine: machine.launched)]
    # EC2 chooses the zone of the first machine. The empty volume of `request` then moves, as the data do later.
    assert 2 == len(zones) and 3 == len({volumes[0].zone, *zones}), (volumes[0].zone, zones)
    assert [volumes[0].zone, *zones] == [volume.zone for volume in volumes], "the old ones are the operator's to delete"
    assert ["superseded", "superseded", "done"] == [volume.tags["spotheal:state"] for volume in volumes]
    assert {"gp2"} == {volume.type for volume in volumes}
    assert {key} == {one.kms_key for one in volumes}, "the volume of the new zone has the old one's key"
    assert {("GrantKey", key), ("UseKey", key)} <= set(statements_of_role("spotheal-job-everything"))
    base = [one for one in life.cloud.rules.snapshots() if one.tags.get("spotheal:purpose") == "base"]
    assert base or life.cloud.rules.counts()["CreateSnapshot"] > 1
    role = owner("iam").get_role_policy(
        RoleName="spotheal-trainer-everything", PolicyName="spotheal-trainer-policy"
    )
    assert POLICY == role["PolicyDocument"]
    assert all(fleet.id.startswith("fleet-") for fleet in life.cloud.rules.fleets()[-1:])
    return life


def statements_of_role(role: str) -> list[tuple[str, str]]:
    """Names and resources of the statements of its inline policies."""
    iam = owner("iam")
    names = iam.list_role_policies(RoleName=role)["PolicyNames"]
    documents = [iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"] for name in names]
    return [(one["Sid"], str(one["Resource"])) for document in documents for one in document["Statement"]]


def put(desk: CloudDesk, name: str, value: str, store: str) -> None:
    result = CliRunner().invoke(app, ["secret", "put", name, "--store", store], input=value)
    assert 0 == result.exit_code, result.output


def a_failure_stays_up_to_be_looked_at(cloud_desk: CloudDesk, snapshot: str, key: str) -> None:
    git(cloud_desk.folder, "reset", "--quiet", "--hard", "trained")
    cloud_desk.folder.joinpath("spot_fleet_config.json").unlink()
    cloud_desk.folder.joinpath("job.toml").unlink()
    life = Life(cloud_desk, "failing", SNAPSHOT=snapshot, KMS_KEY=key, USER=getpass.getuser())
    life.request()
    status = life.await_end("failed")
    assert "told to" in json.dumps(status) or status["reason"]
    events = cloud_desk.good("report", "failing", "--out", str(cloud_desk.folder / "report.html"))
    assert events["schema_version"] == 1
    volume = next(one for one in life.cloud.rules.volumes() if one.tags.get("Name") == "failing-data")
    assert 4 == volume.size
    checkpoints = life.cloud.volumes.disk(volume.id).files / "checkpoints"
    assert (checkpoints / "step-150.json").exists(), "the data of the snapshot"
    assert (checkpoints / "hung").exists(), "it hung first, and was started again"
    assert "this instance stays up for debugging" in life.agent_logs()
    cloud_desk.good("cancel", "failing", "--yes")


def test_a_person_logs_in_as_another_user_with_a_key_of_their_own(
    cloud_desk: CloudDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machines' own key pair alone lets in here, and no configuration says who logs in."""
    life, key = login(cloud_desk, tmp_path)
    life.request()
    life.await_step(5)
    (machine,) = life.live()
    lines = life.cloud.shells.config.read_text().splitlines(keepends=True)
    (tmp_path / "ssh_config").write_text("".join(line for line in lines if "User" not in line))
    monkeypatch.setenv("SPOTHEAL_SSH_CONFIG", str(tmp_path / "ssh_config"))
    monkeypatch.setattr(life.cloud.endpoint, "send_key", lambda instance, given: False)
    me, own = getpass.getuser(), str(key)
    assert 0 == cloud_desk.run("ssh", "login", "--user", me, "--identity", own, "--", "true").exit_code
    assert 0 != cloud_desk.run("ssh", "login", "--identity", own, "--", "true").exit_code, "ubuntu is nobody here"
    assert 0 != cloud_desk.run("ssh", "login", "--user", me, "--", "true").exit_code, "no key lets in"
    with webhook() as (address, posted):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            near = free.getsockname()[1]
        target = address.removeprefix("http://").rstrip("/")
        post = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{near}/', b'{{}}')"
        there = ("--instance", machine.id, "--user", me, "--identity", own)
        said = cloud_desk.run("ssh", "login", *there, "-L", f"{near}:{target}", "--", sys.executable, "-c", f'"{post}"')
        assert (0, [{}]) == (said.exit_code, posted), said.output
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0.1)
    threading.Timer(20.0, lambda: CliRunner().invoke(app, ["cancel", "login", "--yes"])).start()
    shown = cloud_desk.run("logs", "login", "--follow", "--source", "agent", "--user", me, "--identity", own)
    assert "no ssh to" not in shown.stderr and machine.id in shown.stderr, shown.output


def login(cloud_desk: CloudDesk, tmp_path: Path) -> tuple[Life, Path]:
    """The life, with results on EFS, and the private key of its machines' key pair."""
    home, key = tmp_path / "home" / ".ssh", tmp_path / "key"
    home.mkdir(parents=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (home / "id_ed25519.pub").write_text(key.with_suffix(".pub").read_text())
    owner("ec2").delete_key_pair(KeyName="spotheal")
    life = Life(cloud_desk, "login", PUBLIC_KEY=str(key.with_suffix(".pub")))
    made = cloud_desk.good("results", "create-efs", "--yes")
    file = cloud_desk.folder / "job.toml"
    file.write_text(file.read_text().replace("fs-00000000", made["file_system"]))
    return life, key


def test_ranks_find_the_gpus_that_they_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from spotheal.fleet.rehearsal.scenarios import job

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    checkout.joinpath("train.py").write_text((HERE / "train.py").read_text())
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "A trainer"]):
        git(checkout, *words)
    checkout.joinpath("job.toml").write_text((HERE / "jobs" / "gpus.toml").read_text())
    checkout.joinpath("spot_fleet_config.json").write_text(json.dumps(job.example_fleet("gpus")))
    kept, page = tmp_path / "kept", tmp_path / "page.html"
    monkeypatch.chdir(checkout)
    files = ["spot_fleet_config.json", "--job", "job.toml"]
    asked = ["--scenario", "quiet", "--seed", "3", "--no-reference", "--keep", str(kept), "--report", str(page)]
    result = CliRunner().invoke(app, ["rehearse", *files, *asked, "--output", "json"])
    assert 0 == result.exit_code, result.output
    assert 3 == json.loads(result.stdout)["seed"] and page.is_file()
    (given,) = (json.loads(path.read_text()) for path in kept.rglob("store/results/given-0.json"))
    assert "2" == given["environment"]["WORLD_SIZE"]


def test_a_run_of_a_sweep_that_failed_is_begun_again_under_a_new_fleet(cloud_desk: CloudDesk) -> None:
    Life(cloud_desk, "swept")
    (cloud_desk.folder / "list.yml").write_text("- {rate: 2, fails_once: false}\n- {rate: 1, fails_once: true}\n")
    cut = cloud_desk.run("sweep", "run", "list.yml", "--parallel", "2", "--yes", "--wait", "--timeout", "1s")
    assert ExitCode.WAIT_TIMED_OUT == cut.exit_code, cut.output
    begun = cloud_desk.good("sweep", "status")["run"]
    cut = cloud_desk.run("sweep", "status", "--watch", "--timeout", "1s")
    assert ExitCode.WAIT_TIMED_OUT == cut.exit_code, cut.output
    failed = cloud_desk.run("sweep", "status", "--watch")
    assert ExitCode.JOB_FAILED == failed.exit_code and "failed: 1" in failed.output, failed.output
    done = cloud_desk.run("sweep", "run", "list.yml", "--yes", "--retry-failed", "--wait")
    assert ExitCode.OK == done.exit_code, done.output
    highest = cloud_desk.good("sweep", "report", "--metric", "rate")
    lowest = cloud_desk.good("sweep", "report", "--metric", "rate", "--smallest")
    assert begun == highest["run"]
    assert [[0, 1], [1, 0]] == [[one["index"] for one in shown["entries"]] for shown in (highest, lowest)]
    assert begun != cloud_desk.good("sweep", "run", "list.yml", "--yes", "--new-run")["run"]
    cloud_desk.good("cancel", "swept", "--yes")


def test_an_order_to_nothing_is_no_success(cloud_desk: CloudDesk) -> None:
    assert cloud_desk.run("cloud", "interrupt", "--instance", "i-0").exit_code == ExitCode.NOT_FOUND
