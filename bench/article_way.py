"""The user data script of the article on the simulated region: its commands one by one, over the same rules.

What the AWS CLI does is done here too: its waiters ask every 15 s and give up after 40 times, and as the script has no
`set -e`, it goes on after a command that failed, with an empty variable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import botocore.loaders
from botocore.exceptions import ClientError
from simulated_time import SimulatedStop
from simulated_world import BOOT_SECONDS, STEP_SECONDS, Machine, Region

from spotheal.fleet.rehearsal.services.client import InMemoryEc2

NAME = "DL-datasets-checkpoints"
SLEEP_AFTER_ATTACH_SECONDS = 10.0
NOTICED_SLEEP_SECONDS = 150.0  # its Keras callback at a notice: so long no batch begins
SAVE_SECONDS_BETWEEN = STEP_SECONDS  # as often as the trainer it is compared with


def waiters() -> dict[str, dict[str, Any]]:
    """Delay and attempts of the CLI's waiters: they are botocore's."""
    found: dict[str, Any] = botocore.loaders.Loader().load_data("ec2/2016-11-15/waiters-2")
    return dict(found["waiters"])


@dataclass
class Outcome:
    """What came of one boot by the script."""

    user_data_at: float = 0.0
    trainer_at: float | None = None
    resumed_step: int | None = None  # None: it trains on the root disk, from nothing
    failed: list[str] = field(default_factory=list)
    calls: int = 0


class ArticleRegion(Region):
    """The same region, disks and clock; its instances run the article's script."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.outcomes: dict[str, Outcome] = {}

    def check(self) -> None:
        """None of the invariants is promised here; what is lost is reported instead."""

    def _start_agent(self, machine: Machine, after: float) -> None:
        machine.notice = SimulatedStop(self.time)
        boot = Boot(self, machine)
        self.outcomes[machine.id] = boot.outcome
        machine.agents.append(self.time.spawn(machine.id, boot.run, max(after, BOOT_SECONDS)))


class Boot:
    """One run of the script on one machine."""

    def __init__(self, region: ArticleRegion, machine: Machine) -> None:
        self.region, self.machine, self.outcome = region, machine, Outcome()
        self._client = InMemoryEc2(region.rules, machine.id)

    def run(self) -> None:
        self.outcome.user_data_at = self.region.time.seconds
        volume = self._find("VolumeId")
        if self._find("AvailabilityZone") != self.machine.zone:
            volume = self._move(volume)
        self._aws("attach_volume", VolumeId=volume, InstanceId=self.machine.id, Device="/dev/sdf")
        self.region.time.sleep(SLEEP_AFTER_ATTACH_SECONDS)
        if volume in self.machine.disks and self.region.disks[volume].filesystem:
            self.machine.mounted = volume
        else:
            self.outcome.failed.append("mount")
        self._train()

    def _find(self, what: str) -> str:
        """`aws ec2 describe-volumes --filter Name=tag:Name --query Volumes[].<what> --output text`"""
        answer = self._aws("describe_volumes", Filters=[{"Name": "tag:Name", "Values": [NAME]}])
        return "\t".join(str(volume[what]) for volume in answer.get("Volumes", []))

    def _move(self, volume: str) -> str:
        snapshot = self._aws(
            "create_snapshot", VolumeId=volume, TagSpecifications=_named("snapshot", f"{NAME}-snapshot")
        )
        snapshot_id = snapshot.get("SnapshotId", "")
        self._wait(
            "SnapshotCompleted",
            lambda: self._aws("describe_snapshots", SnapshotIds=[snapshot_id])["Snapshots"][0]["State"] == "completed",
        )
        self._aws("delete_volume", VolumeId=volume)
        made = self._aws(
            "create_volume",
            AvailabilityZone=self.machine.zone,
            SnapshotId=snapshot_id,
            VolumeType="gp2",
            TagSpecifications=_named("volume", NAME),
        ).get("VolumeId", "")
        self._wait(
            "VolumeAvailable",
            lambda: self._aws("describe_volumes", VolumeIds=[made])["Volumes"][0]["State"] == "available",
        )
        return str(made)

    def _wait(self, waiter: str, reached: Callable[[], bool]) -> None:
        settings = waiters()[waiter]
        for attempt in range(settings["maxAttempts"]):
            if attempt:
                self.region.time.sleep(settings["delay"])
            try:
                if reached():
                    return
            except (KeyError, IndexError):  # the describe failed: so does the waiter, at once
                break
        self.outcome.failed.append(f"wait {waiter}")

    def _aws(self, operation: str, **params: Any) -> dict[str, Any]:
        self.outcome.calls += 1
        try:
            answer = self.region.gate(self.machine, operation, lambda: getattr(self._client, operation)(**params))
        except ClientError as error:
            self.outcome.failed.append(f"{operation}: {error.response['Error']['Code']}")
            self.region.story.append(
                f"{self.region.time.seconds:9.1f} {operation} {json.dumps(params)} failed: {error}"
            )
            return {}
        assert isinstance(answer, dict)
        return answer

    def _train(self) -> None:
        region, mounted = self.region, self.machine.mounted
        disk = region.disks[mounted] if mounted else None
        self.outcome.trainer_at = region.time.seconds
        self.outcome.resumed_step = max(disk.steps, default=0) if disk else None
        self.machine.trained_from.append(self.outcome.resumed_step or 0)
        notice = self.machine.notice
        while disk is not None:
            if region.time.sleep(SAVE_SECONDS_BETWEEN, until=notice):
                region.time.sleep(NOTICED_SLEEP_SECONDS)
            step = max(disk.steps, default=0) + 1
            disk.steps = (*disk.steps[-1:], step)
            region.acknowledged = max(region.acknowledged, step)


def _named(kind: str, name: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": "Name", "Value": name}]}]
