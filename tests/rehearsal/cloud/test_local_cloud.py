"""fleetctl cloud: an empty account on this machine, to point anything at, and orders for what AWS would do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from cloud_desk import CloudDesk, cloud_desk, owner, served

from spotheal.agent.protocol.errors import ExitCode
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.rehearsal.scenarios import serve
from spotheal.fleet.rehearsal.services.client import InMemoryEc2

__all__ = ["cloud_desk", "served"]  # fixtures


def test_it_serves_until_it_is_told_to_end_and_leaves_nothing(tmp_path: Path) -> None:
    lines = tmp_path / "cloud.env"
    program = "from spotheal.fleet.cli import main; main()"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path), "AWS_PROFILE": "somebody"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, "cloud", "--env", str(lines), "--region", "eu-west-1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 120
        while not lines.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        assert lines.exists(), process.communicate(timeout=10)
        show = f'. "{lines}"; printf %s "$AWS_REGION ${{AWS_PROFILE:-none}} $AWS_ENDPOINT_URL"'
        said = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True, env=environment).stdout
        assert said.startswith("eu-west-1 none http://127.0.0.1:")
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert lines.read_text() == out
    assert list(tmp_path.glob("spotheal-cloud-*")) == []


def test_orders_are_refused_where_there_is_no_local_cloud(
    cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cloud_desk.run("cloud", "explode").exit_code == ExitCode.USAGE
    for endpoint in ("", "https://ec2.us-west-2.amazonaws.com"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        result = cloud_desk.run("cloud", "interrupt")
        assert result.exit_code == ExitCode.USAGE and "fleetctl cloud" in result.stderr


def test_orders_reach_the_cloud(cloud_desk: CloudDesk) -> None:
    nobody = cloud_desk.run("cloud", "interrupt")
    assert nobody.exit_code == ExitCode.NOT_FOUND and "no instance is running" in nobody.stderr
    assert "no spot capacity for 5 s" in cloud_desk.good("cloud", "no-capacity", "--seconds", "5")["said"]
    assert cloud_desk.good("cloud", "capacity")["said"] == "capacity everywhere"
    kinds = {"instances", "volumes", "snapshots", "fleets", "templates", "calls"}
    assert set(cloud_desk.good("cloud", "state")) >= kinds


def test_a_role_made_a_moment_ago_cannot_be_used_yet(cloud_desk: CloudDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2 = owner("ec2")
    launch = {"ImageId": "ami-0027dfad6168539c7", "InstanceType": "c7i.large", "MinCount": 1, "MaxCount": 1,
              "IamInstanceProfile": {"Name": "spotheal-instance"}}  # fmt: skip
    monkeypatch.setattr("spotheal.fleet.rehearsal.services.account.IAM_SECONDS", 3600.0)
    for name in ("nobody", "spotheal-instance"):
        with pytest.raises(ClientError, match="Invalid IAM Instance Profile name"):
            ec2.run_instances(**{**launch, "IamInstanceProfile": {"Name": name}})
        cloud_desk.good("iam", "create", "--yes")
    monkeypatch.setattr("spotheal.fleet.rehearsal.services.account.IAM_SECONDS", 0.0)
    instance = ec2.run_instances(**launch)["Instances"][0]["InstanceId"]
    ec2.terminate_instances(InstanceIds=[instance])


@pytest.mark.parametrize(
    ("instance_type", "memory_mib"),
    [("g4dn.xlarge", [15360]), ("g5.12xlarge", [23028] * 4), ("p5.48xlarge", [81559] * 8), ("c7i.large", [])],
)
def test_a_machine_shows_the_gpus_of_its_type(cloud_desk: CloudDesk, instance_type: str, memory_mib: list[int]) -> None:
    """Every launch of a job with `gpus = 1` was barred here: no machine showed a GPU."""
    made = InMemoryEc2(cloud_desk.cloud.rules).run_instances(
        ImageId=EXAMPLE_IMAGE, InstanceType=instance_type, MinCount=1, MaxCount=1, UserData="#!/bin/sh\nsleep 1000\n"
    )["Instances"][0]["InstanceId"]
    machine = cloud_desk.cloud.machines.get(made)
    assert machine is not None
    shown = subprocess.run(
        [str(machine.folder / "bin" / "nvidia-smi"), "--query-gpu=memory.total", "--format=csv,noheader"],
        env=machine.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    owner("ec2").terminate_instances(InstanceIds=[made])
    assert [line for line in shown.stdout.splitlines() if "MiB" in line] == [f"{mib} MiB" for mib in memory_mib]
    assert (shown.returncode == 0) == bool(memory_mib)


def test_what_a_shell_reads_is_quoted() -> None:
    text = serve.shell_lines({"AWS_ENDPOINT_URL": "http://127.0.0.1:1/$(id)"})
    assert "export AWS_ENDPOINT_URL='http://127.0.0.1:1/$(id)'" in text
