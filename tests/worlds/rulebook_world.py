"""A rule book on a clock that only the test moves, and a client of it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from botocore.exceptions import ClientError

from spotheal.agent.protocol.clock import Stop
from spotheal.fleet.rehearsal.ec2.rulebook import Hooks, Latencies, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2

BEGIN = datetime(2026, 11, 21, 8, 0, tzinfo=timezone.utc)
A, B, C, D = "us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"
ROLE = "arn:aws:iam::123456789012:role/fleet"
SPECIFICATION = {"ImageId": "ami-0abc", "InstanceType": "g4dn.xlarge"}


class VirtualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.seconds += seconds
        return until is not None and until.is_set()


class Region:
    """`told` lists what the hooks were told."""

    def __init__(self, **latencies: Any) -> None:
        self.clock = VirtualClock()
        self.told: list[tuple[Any, ...]] = []
        self.rules = Rulebook(
            self.clock, latencies=Latencies(**{"snapshot": (90.0,), **latencies}), hooks=self._hooks(), seed=1
        )
        self.ec2: Any = InMemoryEc2(self.rules, validate=True)

    def _hooks(self) -> Hooks:
        def tell(name: str) -> Any:
            return lambda *arguments: self.told.append((name, *arguments))

        return Hooks(**{name: tell(name) for name in Hooks.__dataclass_fields__ if name.startswith("on_")})

    def after(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.rules.tick()

    # ------------------------------------------------------------------------------------------------------- short ways
    def a_volume(self, zone: str = A, **more: Any) -> str:
        """An available one."""
        made = self.ec2.create_volume(**{"AvailabilityZone": zone, "Size": 10, "VolumeType": "gp3", **more})
        self.after(5)
        return str(made["VolumeId"])

    def an_instance(self, zone: str = A) -> str:
        """A running one, on demand."""
        made = self.ec2.run_instances(
            ImageId="ami-0abc", InstanceType="m5.large", MinCount=1, MaxCount=1, Placement={"AvailabilityZone": zone}
        )
        self.after(10)
        return str(made["Instances"][0]["InstanceId"])

    def attached(self, volume: str, instance: str, device: str = "/dev/sdf") -> None:
        self.ec2.attach_volume(VolumeId=volume, InstanceId=instance, Device=device)
        self.after(4)

    def a_snapshot(self, volume: str) -> str:
        """A completed one."""
        made = self.ec2.create_snapshot(VolumeId=volume)
        self.after(90)
        return str(made["SnapshotId"])

    def a_fleet(self, zones: str = f"{A}, {B}", **config: Any) -> str:
        specification = {**SPECIFICATION, "Placement": {"AvailabilityZone": zones}}
        whole = {
            "IamFleetRole": ROLE,
            "TargetCapacity": 1,
            "Type": "maintain",
            "LaunchSpecifications": [specification],
            **config,
        }
        whole = {key: value for key, value in whole.items() if value is not None}
        return str(self.ec2.request_spot_fleet(SpotFleetRequestConfig=whole)["SpotFleetRequestId"])

    def a_fleet_that_runs(self, **config: Any) -> tuple[str, str]:
        """The fleet and its first instance, running."""
        fleet = self.a_fleet(**config)
        self.after(20)
        return fleet, self.running(fleet)[0]

    def volume(self, volume: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ec2.describe_volumes(VolumeIds=[volume])["Volumes"][0]
        return found

    def snapshot(self, snapshot: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"][0]
        return found

    def instance(self, instance: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
        return found

    def state_of(self, instance: str) -> str:
        return str(self.instance(instance)["State"]["Name"])

    def running(self, fleet: str) -> list[str]:
        return [one.id for one in self.rules.instances() if one.fleet == fleet and one.state == "running"]

    def fleet(self, fleet: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ec2.describe_spot_fleet_requests(SpotFleetRequestIds=[fleet])[
            "SpotFleetRequestConfigs"
        ][0]
        return found


def refused(call: Any, **params: Any) -> str:
    """The error code of a call that must fail."""
    try:
        call(**params)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    raise AssertionError("the call succeeded")
