"""The file system for results: planned, made, found again, checked before a request, and removed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_desk import Desk, desk, moto_clients, wheels

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol import clock
from spotheal.agent.protocol.errors import ConfigError, Retryable
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.fleet.account import efs
from spotheal.fleet.results import results, results_efs
from spotheal.fleet.results.results import Fetched
from spotheal.fleet.run.runs import Run

__all__ = ["desk", "moto_clients", "wheels"]


@pytest.fixture(autouse=True)
def by_hand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes where fleetctl sleeps; moto's groups are those of this test alone."""
    if "desk" not in request.fixturenames:
        return
    desk: Desk = request.getfixturevalue("desk")
    monkeypatch.setattr(clock, "SystemClock", lambda: desk.account.clock)
    ec2 = desk.account._others["ec2"]
    for group in ec2.describe_security_groups()["SecurityGroups"]:
        if group["GroupName"].startswith("spotheal"):
            ec2.delete_security_group(GroupId=group["GroupId"])


def with_results(desk: Desk, place: str) -> None:
    text = (desk.folder / "job.toml").read_text()
    (desk.folder / "job.toml").write_text(f'{text}[store]\nresults = "{place}"\n')


# ------------------------------------------------------------------------------------------------------------ the modes
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("generalPurpose", "", None), ("generalPurpose", "elastic", None)),
        (("maxIO", "", None), ("maxIO", "bursting", None)),
        (("generalPurpose", "", 100.0), ("generalPurpose", "provisioned", 100.0)),
        (("maxIO", "provisioned", 1.0), ("maxIO", "provisioned", 1.0)),
    ],
)
def test_modes_that_are_left_out_are_those_that_fit(given: Any, found: Any) -> None:
    assert efs.modes(*given) == efs.Modes(*found)


@pytest.mark.parametrize(
    "given",
    [
        ("maxIO", "elastic", None),
        ("generalPurpose", "provisioned", None),
        ("generalPurpose", "bursting", 10.0),
        ("generalPurpose", "provisioned", 0.5),
        ("generalPurpose", "provisioned", 1e6),
        ("general", "", None),
        ("generalPurpose", "fast", None),
    ],
)
def test_modes_that_aws_does_not_combine_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        efs.modes(*given)


# --------------------------------------------------------------------------------------------------- made and removed
def test_a_file_system_is_made_once_with_a_target_in_each_zone_of_the_fleet_and_a_rule(desk: Desk) -> None:
    before = desk.account.changed
    planned = desk.good("results", "create-efs", "--dry-run")
    assert desk.account.changed == before and planned["file_system"] is None
    made = desk.good("results", "create-efs", "--yes", "--throughput", "provisioned", "--mibps", "64")
    (system,) = desk.account.efs.describe_file_systems()["FileSystems"]
    assert made["line"] == f'results = "efs://{system["FileSystemId"]}"'
    states = (system["Encrypted"], system["ThroughputMode"], system["LifeCycleState"])
    assert states == (True, "provisioned", "available")
    targets = desk.account.efs.describe_mount_targets(FileSystemId=system["FileSystemId"])["MountTargets"]
    assert [(one["AvailabilityZoneName"], one["LifeCycleState"]) for one in targets] == [
        ("us-west-2a", "available"), ("us-west-2b", "available"),
    ]  # fmt: skip
    changed = desk.account.changed
    again = desk.good("results", "create-efs", "--yes")
    assert (again["file_system"], again["planned"], desk.account.changed) == (system["FileSystemId"], [], changed)
    other = desk.run("results", "create-efs", "--yes", "--performance", "maxIO")
    assert other.exit_code == 8 and "is there already, with generalPurpose, provisioned with 64 MiB/s" in other.stderr


def test_what_is_missing_is_made_where_an_earlier_command_was_cut_off(desk: Desk) -> None:
    ours = {"Key": "spotheal:purpose", "Value": "results"}
    desk.account.efs.create_file_system(CreationToken="spotheal-results", ThroughputMode="elastic", Tags=[ours])
    made = desk.good("results", "create-efs", "--yes")
    assert not any("file system" in line for line in made["planned"])
    assert len(desk.account.efs.describe_mount_targets(FileSystemId=made["file_system"])["MountTargets"]) == 2


def test_deleting_takes_targets_file_system_and_group_and_nothing_of_others(desk: Desk) -> None:
    theirs = desk.account.efs.create_file_system(CreationToken="theirs", Tags=[{"Key": "Name", "Value": "home"}])
    refused = desk.run("results", "delete-efs", theirs["FileSystemId"], "--yes")
    assert refused.exit_code == 8 and "(home) was not made by fleetctl" in refused.stderr
    made = desk.good("results", "create-efs", "--yes")
    assert desk.run("results", "delete-efs").exit_code == 2  # it asks, and there is no terminal
    assert desk.run("results", "delete-efs", "--yes").stdout == f"{made['file_system']} is deleted\n"
    left = desk.account.efs.describe_file_systems()["FileSystems"]
    assert [one["FileSystemId"] for one in left] == [theirs["FileSystemId"]]
    groups = desk.account._others["ec2"].describe_security_groups()["SecurityGroups"]
    assert efs.GROUP not in {one["GroupName"] for one in groups}
    assert desk.run("results", "delete-efs", "--yes").exit_code == 4


# ------------------------------------------------------------------------------------------------- before a request
def test_a_request_is_refused_where_its_results_could_not_be_stored(desk: Desk) -> None:
    with_results(desk, "efs://fs-0123456789abcdef0")
    gone = desk.run("request", "--yes")
    assert gone.exit_code == 4 and "`fleetctl results create-efs` makes one" in gone.stderr
    made = desk.account.efs.create_file_system(CreationToken="mine")["FileSystemId"]
    desk.account.clock.seconds += 60
    job = desk.folder / "job.toml"
    job.write_text(job.read_text().replace("fs-0123456789abcdef0", made))
    bare = desk.run("request", "--yes")
    assert bare.exit_code == 8 and "has no mount target" in bare.stderr
    ec2 = desk.account._others["ec2"]
    (subnet,) = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-west-2a"]}])["Subnets"]
    group = ec2.create_security_group(GroupName="spotheal-closed", Description="x", VpcId=subnet["VpcId"])["GroupId"]
    desk.account.efs.create_mount_target(FileSystemId=made, SubnetId=subnet["SubnetId"], SecurityGroups=[group])
    closed = desk.run("request", "--yes")
    assert closed.exit_code == 8 and "--protocol tcp --port 2049" in closed.stderr
    rule = {"IpProtocol": "tcp", "FromPort": 2049, "ToPort": 2049, "IpRanges": [{"CidrIp": "172.31.0.0/16"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    done = desk.run("request", "--yes")
    assert done.exit_code == 0, done.stderr
    assert "no mount target in us-west-2b" in done.stderr


def test_a_bucket_for_results_must_be_there_and_gets_the_runs_folder_and_the_permission(desk: Desk) -> None:
    with_results(desk, "s3://spotheal-elsewhere/models")
    gone = desk.run("request", "--yes")
    assert gone.exit_code == 4 and "`aws s3 mb s3://spotheal-elsewhere`" in gone.stderr
    desk.s3.create_bucket(
        Bucket="spotheal-elsewhere", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )  # fmt: skip
    fleet = desk.folder / "spot_fleet_config.json"
    fleet.write_text(fleet.read_text().replace("instance-profile/agent", "instance-profile/spotheal-instance"))
    run = desk.request()["run"]
    (key,) = [one["Key"] for one in desk.s3.list_objects_v2(Bucket="spotheal-elsewhere")["Contents"]]
    assert key == f"models/cifar/{run}/"
    iam = desk.account._others["iam"]
    names = iam.list_role_policies(RoleName="spotheal-instance")["PolicyNames"]
    (added,) = [name for name in names if "+results-" in name]
    policy = iam.get_role_policy(RoleName="spotheal-instance", PolicyName=added)["PolicyDocument"]
    assert policy["Statement"][0]["Resource"] == "arn:aws:s3:::spotheal-elsewhere/models/*"


# ------------------------------------------------------------------------------------------------------------- fetching
def stored_elsewhere(desk: Desk, place: str, names: dict[str, bytes], run: str, entries: int = 0) -> Run:
    """A run whose agent has stored files at `place`: what it leaves in the store."""
    store = Store(desk.s3, StoreUrl("spotheal-123456789012-us-west-2", f"cifar/{run}"))
    store.put_json(LAYOUT.job_document, {"store": {"results": place}, "run": {"entries": entries}})
    for index in range(entries or 1):
        files = [{"name": name, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
                 for name, body in names.items()]  # fmt: skip
        below = f"{LAYOUT.entry(index)}/" if entries else ""
        store.put_json(below + LAYOUT.results_listing, {"place": place, "files": files})
    return Run("cifar", run, store)


@pytest.fixture
def bucket(desk: Desk) -> None:
    desk.s3.create_bucket(
        Bucket="spotheal-123456789012-us-west-2", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )  # fmt: skip


RUN = "01M7ZT548WWVQ1F80J8MACFQK0"
PLACE = "efs://fs-0123456789abcdef0/team"


@pytest.mark.usefixtures("bucket")
def test_what_lies_on_efs_is_listed_without_it_and_fetched_from_where_it_is_mounted(desk: Desk, tmp_path: Path) -> None:
    stored_elsewhere(desk, PLACE, {"model/model.bin": b"weights", "metrics.jsonl": b"{}\n"}, RUN)
    listed = desk.good("results", "ls")
    assert [(one["name"], one["size"]) for one in listed["results"]] == [("model/model.bin", 7), ("metrics.jsonl", 3)]
    assert listed["store"] == f"{PLACE}/cifar/{RUN}/"
    folder = tmp_path / "efs/team/cifar" / RUN
    (folder / "model").mkdir(parents=True)
    (folder / "model/model.bin").write_bytes(b"weights")
    (folder / ".metrics.jsonl.7.partial").write_bytes(b"half")
    there = desk.good("results", "ls", "--from", str(tmp_path / "efs"))
    assert [one["name"] for one in there["results"]] == ["model/model.bin"], "what is there, not what the store says"
    for mounted in (tmp_path / "efs", tmp_path / "efs/team", folder):
        came = desk.good("results", "get", "--from", str(mounted), "--to", str(tmp_path / "out"))
        assert [(one["name"], one["checked"]) for one in came["results"]] == [("model/model.bin", "sha256")]
    assert (tmp_path / "out/model/model.bin").read_bytes() == b"weights"
    (folder / "model/model.bin").write_bytes(b"wEights")
    spoiled = desk.run("results", "get", "--from", str(tmp_path / "efs"), "--to", str(tmp_path / "other"))
    assert spoiled.exit_code == 1 and "came damaged" in spoiled.stderr
    assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == []
    elsewhere = desk.run("results", "get", "--from", str(tmp_path / "out"))
    assert elsewhere.exit_code == 4 and "--from where fs-0123456789abcdef0 is mounted" in elsewhere.stderr
    alone = desk.run("results", "get")
    assert alone.exit_code == 4 and "`fleetctl results get cifar --from DIR`" in alone.stderr


@pytest.mark.usefixtures("bucket")
def test_the_runs_of_a_sweep_are_listed_beside_each_other(desk: Desk) -> None:
    stored_elsewhere(desk, PLACE, {"model/model.bin": b"weights"}, RUN, entries=3)
    names = [one["name"] for one in desk.good("results", "ls")["results"]]
    assert names == ["0/model/model.bin", "1/model/model.bin", "2/model/model.bin"]


@pytest.mark.usefixtures("bucket")
def test_what_lies_in_another_bucket_is_fetched_from_there(desk: Desk, tmp_path: Path) -> None:
    stored_elsewhere(desk, "s3://spotheal-123456789012-us-west-2/else", {}, RUN)
    desk.s3.put_object(Bucket="spotheal-123456789012-us-west-2", Key=f"else/cifar/{RUN}/model", Body=b"weights")
    came = desk.good("results", "get", "--to", str(tmp_path))
    assert [(one["name"], one["checked"]) for one in came["results"]] == [("model", "crc32")]


def test_checkpoints_that_lie_beside_results_are_not_fetched_as_results(tmp_path: Path) -> None:
    for name in ("state/0/checkpoints/last.pt", "0/model.bin", "0/state/kept.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"weights")
    own = results.Result("state/told.bin", 7, None, "")
    (tmp_path / "state/told.bin").write_bytes(b"weights")
    names = [one.name for one in results_efs.Mounted(tmp_path, (own,), {"state"}).list()]
    assert names == ["0/model.bin", "0/state/kept.bin", "state/told.bin"]


def over_ssh(folder: Path, *known: results.Result, work: tuple[str, ...] = ()) -> results_efs.OverSsh:
    """Through an instance whose shell is this machine's."""
    connection: Any = SimpleNamespace(argv=lambda words, _: ["sh", "-c", *words], host=SimpleNamespace(instance="i-1"))
    return results_efs.OverSsh(connection, str(folder), known, work)


def test_what_is_replaced_while_it_is_fetched_comes_whole_as_it_is_then(tmp_path: Path) -> None:
    """The metrics of a run that is at work are, twice a minute."""
    there = tmp_path / "efs"
    there.mkdir()
    for name, source in (("mounted", results_efs.Mounted(there, ())), ("ssh", over_ssh(there))):
        (there / "metrics.jsonl").write_text("one\n")
        (listed,) = source.list()
        (there / "new").write_text("one\ntwo\n")
        (there / "new").replace(there / "metrics.jsonl")
        came = source.fetch(listed, tmp_path / name, lambda _: None)
        assert (tmp_path / name).read_text() == "one\ntwo\n" and came.size == 8


def test_over_ssh_the_runs_of_a_sweep_that_are_at_work_are_seen_beside_those_that_are_over(tmp_path: Path) -> None:
    for name in ("0/model.bin", "1/metrics.jsonl", "1/.metrics.jsonl.partial", "state/1/checkpoints/last.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    over = results.Result("0/model.bin", 7, None, digest)
    gone = results.Result("0/gone.bin", 7, None, digest)
    found = over_ssh(tmp_path, over, gone, work=("state",)).list()
    assert [(one.name, bool(one.sha256)) for one in found] == [
        ("0/gone.bin", True), ("0/model.bin", True), ("1/metrics.jsonl", False),
    ]  # fmt: skip


def test_a_file_that_is_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    body = bytes(range(256)) * 40
    one = results.Result("model.bin", len(body), None, hashlib.sha256(body).hexdigest())
    target, skipped = tmp_path / "model.bin", list[int]()
    with pytest.raises(Retryable, match="continues where it stopped"):
        results_efs._copy(one, target, iter([body[:1000], b""]).__next__, skipped.append, lambda _: None)
    assert not target.exists()
    came = results_efs._copy(one, target, iter([body[1000:], b""]).__next__, skipped.append, lambda _: None)
    assert isinstance(came, Fetched) and target.read_bytes() == body
    assert skipped == [0, 1000]


@pytest.mark.usefixtures("bucket")
def test_refused_names_are_not_told_to_be_tried_again(desk: Desk, tmp_path: Path) -> None:
    stored_elsewhere(desk, "", {}, RUN)
    for name in ("../escape", "good"):
        desk.s3.put_object(Bucket="spotheal-123456789012-us-west-2", Key=f"cifar/{RUN}/results/{name}", Body=b"x")
    result = desk.run("results", "get", "--to", str(tmp_path))
    assert result.exit_code == 1 and "would refuse them again" in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["good"]

