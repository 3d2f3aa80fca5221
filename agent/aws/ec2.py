"""EC2 as this project sees it: dataclasses in and out. The only module, with `aws`, that knows EC2's error codes.

Describes are eventually consistent, seconds to minutes, both ways: an absent thing is never taken for a gone one here.
Every describe is filtered and paginated, so that the calls do not grow with the account. "Already so" is success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import Conflict, Fatal, NotFound, PermissionDenied, Retryable, SpothealError
from spotheal.agent.protocol.names import TAG_EC2_FLEET, TAG_FLEET_REQUEST, TAG_JOB, TAG_NAME, TAG_RUN

_IOPS_TYPES = ("gp3", "io1", "io2")
_TAG_VALUE_MAX = 256
_FILTER_VALUES_MAX = 200  # of all filters of a call
_UNCERTAIN = ("InternalError", "InternalFailure", "ServerInternal", "ServiceUnavailable", "Unavailable", "500", "502",
              "503", "504")  # fmt: skip
_SPOT_REASONS = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")  # codes of StateReason


class DeviceNameTaken(Conflict):
    """Another volume of the instance has this device name: take the next letter."""


class ZoneMismatch(Conflict):
    """Volume and instance are in different zones: what was observed is wrong, so observe again."""


class TokenUsed(Conflict):
    """The client token was used with other parameters, or for a volume that is gone: take the next attempt."""


def was_refused(error: SpothealError) -> bool:
    """Whether EC2 said that it did not do what was asked; False where nobody knows: no answer, or a server's fault."""
    return bool(error.code) and error.code not in _UNCERTAIN


@dataclass(frozen=True)
class Attachment:
    instance: str
    device: str
    state: str  # attaching, attached, detaching, detached, busy


@dataclass(frozen=True)
class Volume:
    id: str
    zone: str
    state: str  # creating, available, in-use, deleting, deleted, error
    size_gib: int
    type: str = "gp3"
    iops: int | None = None
    throughput: int | None = None
    encrypted: bool = False
    kms_key: str | None = None
    snapshot: str | None = None  # where it was created from
    tags: Mapping[str, str] = field(default_factory=dict)
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    id: str
    volume: str
    state: str  # pending, completed, error
    progress: int | None  # percent; None if EC2 names none, as it may of a pending one
    started: datetime
    size_gib: int
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Instance:
    id: str
    state: str  # pending, running, shutting-down, terminated, stopping, stopped
    zone: str
    type: str
    launched: datetime
    tags: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()  # device names that are taken
    state_reason: str = ""  # code of StateReason: who ended or stopped it

    @property
    def was_interrupted(self) -> bool:
        """Whether spot has taken it, as AWS tells afterwards: also where nothing there could note the notice."""
        return self.state not in ("pending", "running") and self.state_reason in _SPOT_REASONS


@dataclass(frozen=True)
class VolumeSpec:
    """What CreateVolume is asked for. `initialization_rate` in MiB/s, 0 = lazily; only with a snapshot."""

    zone: str
    size_gib: int
    type: str
    tags: Mapping[str, str]
    token: str
    snapshot: str | None = None
    iops: int | None = None
    throughput: int | None = None
    encrypted: bool = False
    kms_key: str | None = None
    initialization_rate: int = 0

    def request(self) -> dict[str, Any]:
        """Parameters of CreateVolume; what the type does not take is left out (a gp2 volume shows IOPS, too)."""
        request: dict[str, Any] = {
            "AvailabilityZone": self.zone,
            "Size": self.size_gib,
            "VolumeType": self.type,
            "ClientToken": self.token,
            "TagSpecifications": [{"ResourceType": "volume", "Tags": _tag_list(self.tags)}],
        }
        if self.snapshot:
            request["SnapshotId"] = self.snapshot
            if self.initialization_rate:
                request["VolumeInitializationRate"] = self.initialization_rate
        if self.iops and self.type in _IOPS_TYPES:
            request["Iops"] = self.iops
        if self.throughput and self.type == "gp3":
            request["Throughput"] = self.throughput
        if self.encrypted:
            request["Encrypted"] = True
            if self.kms_key:
                request["KmsKeyId"] = self.kms_key
        return request


def key_next_step(key: str) -> str:
    return (
        f"check that the key is enabled: `aws kms describe-key --key-id {key}`; the instances' role may use it if"
        " [volume] kms_key of job.toml names it at the next `fleetctl request`"
    )


class Ec2:
    """`client` is a boto3 EC2 client, or anything that answers like one.

    `job`: whose runs are asked for. Its role lets an instance write any run's id on a volume that it makes, but its own
    job's name alone: what carries another job's is never taken for the run's.
    """

    def __init__(self, client: Any, job: str = "") -> None:
        self._ec2, self._job = client, job

    # ------------------------------------------------------------------------------------------------------ describes
    def volumes_of_run(self, run: str, job: str = "") -> tuple[Volume, ...]:
        volumes = self._volumes([_filter(f"tag:{TAG_RUN}", run)], f"list the volumes of run {run}")
        return tuple(volume for volume in volumes if _is_of(volume.tags, job or self._job))

    def volumes_tagged(self, tag: str, value: str) -> tuple[Volume, ...]:
        return self._volumes([_filter(f"tag:{tag}", value)], f"list the volumes with tag {tag}={value}")

    def volumes_named(self, name: str) -> tuple[Volume, ...]:
        """Volumes by their Name tag: how the article's volumes, which have no tag of ours, are found."""
        return self.volumes_tagged(TAG_NAME, name)

    def volume(self, volume: str) -> Volume | None:
        """None where the describe does not show it (yet)."""
        volumes = self._volumes([_filter("volume-id", volume)], f"describe {volume}")
        return volumes[0] if volumes else None

    def snapshots_of_run(self, run: str) -> tuple[Snapshot, ...]:
        return tuple(snapshot for snapshot in self.snapshots_tagged(TAG_RUN, run) if _is_of(snapshot.tags, self._job))

    def snapshots_tagged(self, tag: str, value: str) -> tuple[Snapshot, ...]:
        return self._snapshots([_filter(f"tag:{tag}", value)], f"list the snapshots with tag {tag}={value}")

    def snapshot(self, snapshot: str) -> Snapshot | None:
        snapshots = self._snapshots([_filter("snapshot-id", snapshot)], f"describe {snapshot}")
        return snapshots[0] if snapshots else None

    def instance(self, instance: str) -> Instance | None:
        matches = self.instances([instance])
        return matches[0] if matches else None

    def instances(self, instances: Iterable[str]) -> tuple[Instance, ...]:
        """Those of `instances` that the describe shows; by filter, since one unknown id fails a describe by ids."""
        ids = sorted(set(instances))
        parts = [ids[start : start + _FILTER_VALUES_MAX] for start in range(0, len(ids), _FILTER_VALUES_MAX)]
        answers = [self._instances([_filter("instance-id", *part)], f"describe {', '.join(part)}") for part in parts]
        return tuple(instance for part in answers for instance in part)

    def instances_tagged(self, tag: str, value: str) -> tuple[Instance, ...]:
        return self._instances([_filter(f"tag:{tag}", value)], f"list the instances with tag {tag}={value}")

    def spot_prices(self, instance_type: str, zone: str, since: datetime) -> list[tuple[datetime, str]]:
        """Dollars an hour of a Linux instance, as AWS writes them, each with the moment from which it holds; by time.

        The first one held already at `since`.
        """
        records = self._pages(
            "describe_spot_price_history",
            "SpotPriceHistory",
            [_filter("availability-zone", zone)],
            f"read the spot price of {instance_type} in {zone}",
            InstanceTypes=[instance_type],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=since,
        )
        return sorted((item["Timestamp"], str(item["SpotPrice"])) for item in records)

    # -------------------------------------------------------------------------------------------------------- volumes
    def create_volume(self, spec: VolumeSpec, on_lazy: Callable[[str], object] = lambda why: None) -> Volume:
        """The new volume, or the one an earlier call with the same token made.

        An initialization rate that AWS refuses (a quota, a zone that has none) is left out, and `on_lazy` is told why:
        the volume is slow at first then, and a run must not end for that. TokenUsed where the token's volume is gone or
        was another; NotFound or Retryable where the snapshot is not visible yet.
        """
        try:
            return self._create_volume(spec)
        except (Retryable, NotFound, PermissionDenied):
            raise
        except SpothealError as error:
            if not (spec.snapshot and spec.initialization_rate):
                raise
            # With the token of a volume that was made without a rate AWS says IdempotentParameterMismatch: the same
            # call without the rate finds it.
            created = self._create_volume(replace(spec, initialization_rate=0))
            on_lazy(error.message)
            return created

    def _create_volume(self, spec: VolumeSpec) -> Volume:
        origin = f" from {spec.snapshot}" if spec.snapshot else ""
        try:
            with translated(f"create a volume in {spec.zone}{origin}"):
                answer = self._ec2.create_volume(**spec.request())
        except Conflict as error:
            raise _as(TokenUsed, error) if error.code == "IdempotentParameterMismatch" else error from None
        volume = _volume(answer)
        if volume.state in ("deleting", "deleted", "error") or volume.zone != spec.zone:
            raise TokenUsed(f"creating a volume in {spec.zone} answered {volume.id}, {volume.state} in {volume.zone}")
        return volume

    def attach(self, volume: str, instance: str, device: str) -> None:
        """Ask for the attachment; it takes seconds. Success where it is attached there already.

        DeviceNameTaken, ZoneMismatch; Conflict where another instance has it; Retryable while either is not ready.
        """
        try:
            with translated(f"attach {volume} to {instance} as {device}"):
                self._ec2.attach_volume(VolumeId=volume, InstanceId=instance, Device=device)
        except SpothealError as error:
            if error.code in ("InvalidVolume.ZoneMismatch", "InvalidVolumeID.ZoneMismatch"):
                raise _as(ZoneMismatch, error) from None
            if "already in use" in error.message and error.code in ("InvalidParameterValue", "InvalidDevice.InUse"):
                raise _as(DeviceNameTaken, error) from None
            if error.code == "VolumeInUse" and self._attached_to(volume, instance):
                return
            if error.code == "CustomerKeyHasBeenRevoked":
                error.next_step = key_next_step("KEY, which the volume names as its KmsKeyId")
            raise

    def detach(self, volume: str, instance: str, *, force: bool = False) -> None:
        """Ask for the end of the attachment. Success where it is not attached there.

        By force only where EC2 is stuck: from the instance that asks, of a volume it has not mounted, or from one that
        is stopped.
        """
        options = {"Force": True} if force else {}
        try:
            with translated(f"detach {volume} from {instance}"):
                self._ec2.detach_volume(VolumeId=volume, InstanceId=instance, **options)
        except SpothealError as error:
            # IncorrectState is EC2's answer for a volume that is not attached ("available").
            if error.code not in ("IncorrectState", "InvalidAttachment.NotFound", "InvalidVolume.NotFound"):
                raise

    def delete_volume(self, volume: str) -> None:
        self._gone(f"delete {volume}", "InvalidVolume.NotFound", lambda: self._ec2.delete_volume(VolumeId=volume))

    # ------------------------------------------------------------------------------------------------------ snapshots
    def create_snapshot(self, volume: str, tags: Mapping[str, str]) -> Snapshot:
        """The point in time is this call; completion can take hours. Takes no token: look for your own by tag first."""
        request = {"ResourceType": "snapshot", "Tags": _tag_list(tags)}
        with translated(f"take a snapshot of {volume}"):
            answer = self._ec2.create_snapshot(
                VolumeId=volume, Description=f"spotheal: {volume}", TagSpecifications=[request]
            )
        return _snapshot(answer)

    def delete_snapshot(self, snapshot: str) -> None:
        def call() -> None:
            self._ec2.delete_snapshot(SnapshotId=snapshot)

        self._gone(f"delete {snapshot}", "InvalidSnapshot.NotFound", call)

    # ----------------------------------------------------------------------------------------------- tags, instances
    def tag(self, resources: Iterable[str], tags: Mapping[str, str]) -> None:
        """Set `tags`; values longer than AWS's 256 characters are cut."""
        ids = list(resources)
        with translated(f"tag {', '.join(ids)}"):
            self._ec2.create_tags(Resources=ids, Tags=_tag_list(tags))

    def terminate(self, instance: str) -> None:
        def call() -> None:
            self._ec2.terminate_instances(InstanceIds=[instance])

        self._gone(f"terminate {instance}", "InvalidInstanceID.NotFound", call)

    # ---------------------------------------------------------------------------------------------------------- fleet
    def fleet_of(self, instance: str) -> str | None:
        """The fleet that keeps `instance`, from the tag AWS puts on it; None where it has none."""
        description = self.instance(instance)
        if description is None:
            raise Retryable(f"{instance} is not visible yet")
        return description.tags.get(TAG_FLEET_REQUEST) or description.tags.get(TAG_EC2_FLEET)

    def cancel_fleet(self, fleet: str) -> None:
        """Cancel `fleet` and end its instances, the caller's too. Success where it is cancelled already.

        AWS can refuse inside a successful answer (`UnsuccessfulFleetRequests`): that is Retryable, an unknown id Fatal.
        """
        with translated(f"cancel {fleet}"):
            if fleet.startswith("sfr-"):
                answer = self._ec2.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)
                refused = answer.get("UnsuccessfulFleetRequests") or []
            else:
                answer = self._ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
                refused = answer.get("UnsuccessfulFleetDeletions") or []
        for item in refused:
            code = str(item.get("Error", {}).get("Code", ""))
            message = str(item.get("Error", {}).get("Message", ""))
            if code in ("fleetRequestNotInCancellableState", "fleetNotInDeletableState"):
                continue
            kind = Fatal if code.endswith(("DoesNotExist", "Malformed")) else Retryable
            raise kind(f"could not cancel {fleet}: {message or code}", code=code)

    def set_capacity(self, fleet: str, instances: int, *, end_excess: bool = False) -> None:
        """How many instances the fleet keeps from now on; those that it has more go on, unless `end_excess`."""
        with translated(f"set {fleet} to {instances} instances"):
            if fleet.startswith("sfr-"):
                policy = "default" if end_excess else "noTermination"
                self._ec2.modify_spot_fleet_request(
                    SpotFleetRequestId=fleet, TargetCapacity=instances, ExcessCapacityTerminationPolicy=policy
                )
            else:
                self._ec2.modify_fleet(
                    FleetId=fleet,
                    ExcessCapacityTerminationPolicy="termination" if end_excess else "no-termination",
                    TargetCapacitySpecification={"TotalTargetCapacity": instances},
                )

    # --------------------------------------------------------------------------------------------------------- inside
    def _volumes(self, filters: list[dict[str, Any]], task: str) -> tuple[Volume, ...]:
        items = self._pages("describe_volumes", "Volumes", filters, task)
        return tuple(sorted((_volume(item) for item in items), key=lambda volume: volume.id))

    def _snapshots(self, filters: list[dict[str, Any]], task: str) -> tuple[Snapshot, ...]:
        items = self._pages("describe_snapshots", "Snapshots", filters, task, OwnerIds=["self"])
        return tuple(sorted((_snapshot(item) for item in items), key=lambda snapshot: snapshot.id))

    def _instances(self, filters: list[dict[str, Any]], task: str) -> tuple[Instance, ...]:
        reservations = self._pages("describe_instances", "Reservations", filters, task)
        described = [_instance(item) for reservation in reservations for item in reservation["Instances"]]
        return tuple(sorted(described, key=lambda instance: instance.id))

    def _pages(
        self, operation: str, key: str, filters: list[dict[str, Any]], task: str, **options: Any
    ) -> list[dict[str, Any]]:
        with translated(task):
            pages = self._ec2.get_paginator(operation).paginate(Filters=filters, **options)
            return [item for page in pages for item in page.get(key, [])]

    def _attached_to(self, volume: str, instance: str) -> bool:
        described = self.volume(volume)
        return described is not None and any(
            a.instance == instance and a.state in ("attaching", "attached") for a in described.attachments
        )

    def _gone(self, task: str, code: str, call: Any) -> None:
        try:
            with translated(task):
                call()
        except NotFound as error:
            if error.code != code:
                raise


def _as(kind: type[Conflict], error: SpothealError) -> Conflict:
    return kind(error.message, next_step=error.next_step, code=error.code, request_id=error.request_id)


def _is_of(tags: Mapping[str, str], job: str) -> bool:
    return not job or tags.get(TAG_JOB, job) == job


def _filter(name: str, *values: str) -> dict[str, Any]:
    return {"Name": name, "Values": list(values)}


def _tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value[:_TAG_VALUE_MAX]} for key, value in sorted(tags.items())]


def _tags(item: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}


def _volume(item: Mapping[str, Any]) -> Volume:
    return Volume(
        id=item["VolumeId"],
        zone=item["AvailabilityZone"],
        state=item["State"],
        size_gib=int(item["Size"]),
        type=item.get("VolumeType", "gp3"),
        iops=item.get("Iops"),
        throughput=item.get("Throughput"),
        encrypted=bool(item.get("Encrypted")),
        kms_key=item.get("KmsKeyId"),
        snapshot=item.get("SnapshotId") or None,
        tags=_tags(item),
        attachments=tuple(
            Attachment(attachment["InstanceId"], attachment.get("Device", ""), attachment["State"])
            for attachment in item.get("Attachments") or []
            if attachment.get("InstanceId")
        ),
    )


def _snapshot(item: Mapping[str, Any]) -> Snapshot:
    progress = str(item.get("Progress") or "").rstrip("%")
    return Snapshot(
        id=item["SnapshotId"],
        volume=item["VolumeId"],
        state=item["State"],
        progress=int(progress) if progress.isdigit() else None,
        started=item["StartTime"],
        size_gib=int(item["VolumeSize"]),
        tags=_tags(item),
    )


def _instance(item: Mapping[str, Any]) -> Instance:
    return Instance(
        id=item["InstanceId"],
        state=item["State"]["Name"],
        zone=item.get("Placement", {}).get("AvailabilityZone", ""),
        type=item.get("InstanceType", ""),
        launched=item["LaunchTime"],
        tags=_tags(item),
        devices=tuple(mapping["DeviceName"] for mapping in item.get("BlockDeviceMappings") or []),
        state_reason=str((item.get("StateReason") or {}).get("Code") or ""),
    )
