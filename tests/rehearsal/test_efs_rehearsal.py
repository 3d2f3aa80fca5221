"""The rehearsal's EFS refuses what AWS refuses, takes time where AWS does, and hangs where NFS hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from fleet_desk import HandClock
from moto import mock_aws

from spotheal.fleet.rehearsal.ec2.rulebook import ApiError, Rulebook
from spotheal.fleet.rehearsal.programs import FOLDER, INSTANCE_DIR
from spotheal.fleet.rehearsal.services.efs import FileSystems


@pytest.fixture(scope="module")
def ec2() -> Iterator[Any]:
    with mock_aws():
        yield boto3.client("ec2", region_name="us-west-2")


class Here:
    """A file system's API, the clock by hand, and moto's network."""

    def __init__(self, ec2: Any, folder: Path) -> None:
        self.clock = HandClock()
        self.efs = FileSystems(Rulebook(self.clock), folder)
        self.ec2 = ec2

    def subnet(self, zone: str) -> str:
        found = self.ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": [zone]}])["Subnets"]
        return str(found[0]["SubnetId"])

    def system(self, **asked: Any) -> str:
        made = str(self.efs.create_file_system({"CreationToken": "t", **asked})["FileSystemId"])
        self.clock.seconds += 10
        return made

    def refused(self, call: str, **asked: Any) -> str:
        with pytest.raises(ApiError) as found:
            getattr(self.efs, call)(asked)
        return found.value.code


@pytest.fixture
def here(ec2: Any, tmp_path: Path) -> Here:
    return Here(ec2, tmp_path)


def test_a_token_makes_one_file_system(here: Here) -> None:
    here.system()
    assert here.refused("create_file_system", CreationToken="t") == "FileSystemAlreadyExists"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"ThroughputMode": "elastic", "PerformanceMode": "maxIO"}, "BadRequest"),
        ({"ThroughputMode": "provisioned"}, "BadRequest"),
        ({"ProvisionedThroughputInMibps": 10.0}, "BadRequest"),
        ({"ThroughputMode": "provisioned", "ProvisionedThroughputInMibps": 1e5}, "ThroughputLimitExceeded"),
    ],
)
def test_modes_that_exclude_each_other_are_refused(here: Here, asked: dict[str, Any], code: str) -> None:
    assert here.refused("create_file_system", CreationToken="x", **asked) == code


def test_mount_targets_are_one_a_zone_take_time_and_keep_the_file_system(here: Here) -> None:
    early = here.efs.create_file_system({"CreationToken": "early"})
    assert early["LifeCycleState"] == "creating"
    asked = {"FileSystemId": early["FileSystemId"], "SubnetId": here.subnet("us-west-2a")}
    assert here.refused("create_mount_target", **asked) == "IncorrectFileSystemLifeCycleState"
    here.clock.seconds += 10
    target = here.efs.create_mount_target(asked)
    assert (target["LifeCycleState"], target["AvailabilityZoneName"]) == ("creating", "us-west-2a")
    assert here.refused("create_mount_target", **asked) == "MountTargetConflict"
    assert here.refused("delete_file_system", FileSystemId=early["FileSystemId"]) == "FileSystemInUse"
    here.clock.seconds += 100
    (found,) = here.efs.describe_mount_targets(asked)["MountTargets"]
    assert found["LifeCycleState"] == "available"
    here.efs.delete_mount_target({"MountTargetId": found["MountTargetId"]})
    here.clock.seconds += 30
    here.efs.delete_file_system(asked)
    here.clock.seconds += 30
    assert here.refused("describe_mount_targets", **asked) == "FileSystemNotFound"


def test_a_machine_gets_in_where_a_rule_of_the_mount_target_lets_its_group_in(here: Here) -> None:
    subnet = here.subnet("us-west-2b")
    vpc = here.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"]
    made = here.ec2.create_security_group(GroupName="efs", Description="x", VpcId=vpc)["GroupId"]
    system = here.system()
    target = here.efs.create_mount_target({"FileSystemId": system, "SubnetId": subnet, "SecurityGroups": [made]})
    address = target["IpAddress"]
    assert here.efs.mountable(address, "i-1")["address"] == ""  # it is being created
    here.clock.seconds += 100
    assert here.efs.mountable(address, "i-1") == {
        "address": address, "open": False, "folder": str(here.efs.folder and here.efs.folder / system),
    }  # fmt: skip
    default = here.efs._default_group(vpc)
    rule = {"IpProtocol": "tcp", "FromPort": 2049, "ToPort": 2049, "UserIdGroupPairs": [{"GroupId": default}]}
    here.ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=[rule])
    assert here.efs.mountable(address, "i-1")["open"] is True
    name = f"{system}.efs.us-west-2.amazonaws.com"
    assert here.efs.mountable(name, "i-1")["address"] == ""  # a name gives the target of the machine's own zone


# ------------------------------------------------------------------------------------------------- the stand-in mount
@pytest.fixture
def network() -> Iterator[dict[str, Any]]:
    """What the cloud answers the machines' mount and getent."""
    answer: dict[str, Any] = {"address": "", "open": False, "folder": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    answer["url"] = f"http://127.0.0.1:{server.server_port}"
    yield answer
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_stand_in_mounts_shows_and_unmounts_nfs_and_waits_for_a_closed_port(
    tmp_path: Path, network: dict[str, Any]
) -> None:
    (tmp_path / "devices.json").write_text('{"devices": []}')
    for name in ("export", "efs"):
        (tmp_path / name).mkdir()
    source, target = "fs-1.efs.us-west-2.amazonaws.com:/", str(tmp_path / "efs")
    environment = {**os.environ, INSTANCE_DIR: str(tmp_path), "AWS_ENDPOINT_URL": network["url"]}

    def run(*arguments: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", "-S", str(FOLDER / "stand_in.py"), *arguments]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=seconds)

    unknown = run("mount", "-t", "nfs4", "-o", "nfsvers=4.1", source, target)
    assert unknown.returncode == 32 and "Failed to resolve server" in unknown.stderr
    assert run("getent", "ahostsv4", source[:-2]).returncode == 2
    network |= {"address": "10.0.0.77", "folder": str(tmp_path / "export")}
    with pytest.raises(subprocess.TimeoutExpired):
        run("mount", "-t", "nfs4", "-o", "nfsvers=4.1", source, target, seconds=0.5)
    network["open"] = True
    assert run("mount", "-t", "nfs4", "-o", "nfsvers=4.1", source, target).returncode == 0
    Path(target, "file").write_text("x")
    assert (tmp_path / "export/file").read_text() == "x"
    shown = json.loads(run("findmnt", "--json", "--output", "SOURCE,FSTYPE", "--mountpoint", target).stdout)
    assert shown["filesystems"] == [{"source": source, "fstype": "nfs4"}]
    assert run("umount", target).returncode == 0 and os.listdir(target) == []
