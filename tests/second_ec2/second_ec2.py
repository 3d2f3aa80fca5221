"""A second EC2, written from AWS's documentation and botocore's models alone, by another author than the rehearsal's.

A real boto3 client speaks to it: botocore checks and serializes each request and raises each error; each answer is
checked against botocore's model. What an id, a tag or a state shows is each as old as its own replica is.
Sources: EC2 API reference (error codes, eventual consistency, idempotency), EBS user guide (quotas, lifecycle).
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError
from botocore.validate import ParamValidator
from second_time import EPOCH, Time

REFUSALS = (
    ("RequestLimitExceeded", 503), ("Throttling", 400), ("InternalError", 500), ("Unavailable", 503),
    ("ServiceUnavailable", 503), ("RequestExpired", 400), ("ServerInternal", 500), ("InternalFailure", 500),
)  # fmt: skip
WITHOUT_RIGHTS = (("AuthFailure", 401), ("UnauthorizedOperation", 403))
LAG_SECONDS_MAX = 30.0
FORGOTTEN_SECONDS = 3600.0  # after which a terminated instance leaves the describes
PENDING_MAX = {"st1": 1, "sc1": 1}  # snapshots of one volume; 5 of any other type


class Refused(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        self.code, self.message, self.status = code, message, status


@dataclass
class Thing:
    """A resource, with all it ever was: what a describe shows may be older."""

    id: str
    born: float
    doc: dict[str, Any]
    tags: dict[str, str]
    history: list[tuple[float, dict[str, Any] | None]] = field(default_factory=list)
    tag_history: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    data: Data = field(default_factory=lambda: Data())
    gone: float | None = None
    shown: float = 0.0  # no describe has it before


@dataclass
class Data:
    """What is on a volume, or in a snapshot."""

    filesystem: str = ""
    steps: tuple[int, ...] = ()

    @property
    def newest(self) -> int:
        return max(self.steps, default=0)


class SecondEc2:
    current: SecondEc2

    def __init__(self, time: Time, rng: random.Random) -> None:
        self.time, self.rng = time, rng
        self.volumes: dict[str, Thing] = {}
        self.snapshots: dict[str, Thing] = {}
        self.instances: dict[str, Thing] = {}
        self.tokens: dict[str, tuple[dict[str, Any], str]] = {}
        self.snapshot_taken: dict[str, float] = {}
        self.mounted: dict[str, str] = {}  # volume -> instance whose kernel has it mounted
        self.fleets: dict[str, str] = {}
        self.calls = 0
        self.faults = 0.0  # probability of a fault a call
        self.without_rights_until = 0.0
        self.stuck = 0.0  # probability that a transition hangs
        self.ghosts = 0.0
        self.lag = LAG_SECONDS_MAX
        self.snapshot_seconds: Callable[[], float] = lambda: 30.0
        self.late = 0.0  # probability that an instance is shown only minutes after its launch
        self.on_change: Callable[[str], None] = lambda what: None
        self.on_call: Callable[[str, str], None] = lambda operation, moment: None
        self.on_end: Callable[[str], None] = lambda instance: None  # an instance is terminated or stopped
        self.violations: list[str] = []
        self._pages: dict[str, list[Any]] = {}
        self._validator = ParamValidator()
        self._length: dict[str, float] = {}  # of snapshots, in seconds
        self.client = _client()

    # ------------------------------------------------------------------------------------------------------- the wire
    def answer(self, model: Any, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        operation = model.name
        self.calls += 1
        self.on_call(operation, "before")
        self.time.sleep(self.rng.uniform(0.02, 0.3) if self.rng.random() < 0.98 else self.rng.uniform(2, 20))
        fault = self.rng.random() < self.faults
        lost = fault and self.rng.random() < 0.4
        try:
            if self.time.now < self.without_rights_until:
                code, status = self.rng.choice(WITHOUT_RIGHTS)
                raise Refused(code, "You are not authorized. Encoded authorization failure message: zX4…", status)
            if fault and not lost:
                if self.rng.random() < 0.2:
                    raise ConnectTimeoutError(endpoint_url="https://ec2.eu-west-1.amazonaws.com")
                if operation == "CreateTags" and self.rng.random() < 0.5:
                    raise Refused("ConcurrentTagAccess", "You can't run simultaneous commands to modify a tag")
                code, status = self.rng.choice(REFUSALS)
                raise Refused(code, "try again", status)
            answer = getattr(self, operation)(**{k: v for k, v in asked.items() if k != "DryRun"})
            report = self._validator.validate(answer, model.output_shape) if model.output_shape else None
            assert report is None or not report.has_errors(), report.generate_report()
            if not operation.startswith("Describe"):
                self.on_change(operation)
        except Refused as refused:
            error = {"Code": refused.code, "Message": refused.message}
            meta = {"HTTPStatusCode": refused.status, "RequestId": "r", "HTTPHeaders": {}, "RetryAttempts": 0}
            return _Http(refused.status), {"Error": error, "ResponseMetadata": meta}
        self.time.sleep(self.rng.uniform(0.0, 0.1))
        self.on_call(operation, "after")
        if lost:
            raise ReadTimeoutError(endpoint_url="https://ec2.eu-west-1.amazonaws.com")
        return _Http(200), {**answer, "ResponseMetadata": {"HTTPStatusCode": 200, "RequestId": "r"}}

    # ---------------------------------------------------------------------------------------------------- bookkeeping
    def _id(self, kind: str) -> str:
        return f"{kind}-{self.rng.getrandbits(68):017x}"

    def moment(self) -> datetime:
        return (EPOCH + timedelta(seconds=self.time.now)).astimezone(timezone.utc)

    def _new(
        self, where: dict[str, Thing], id: str, doc: dict[str, Any], tags: dict[str, str], data: Data | None = None
    ) -> Thing:
        thing = where[id] = Thing(id, self.time.now, doc, dict(tags), data=data or Data())
        thing.history.append((self.time.now, copy.deepcopy(doc)))
        thing.tag_history.append((self.time.now, dict(tags)))
        return thing

    def change(self, thing: Thing, **doc: Any) -> None:
        thing.doc.update(doc)
        thing.history.append((self.time.now, copy.deepcopy(thing.doc)))

    def _vanish(self, thing: Thing) -> None:
        if thing.gone is None:
            thing.gone = self.time.now
            thing.history.append((self.time.now, None))

    def _seen(self, thing: Thing) -> tuple[dict[str, Any], dict[str, str]] | None:
        """As one replica shows it: the document and its tags, each of a moment of its own."""
        stale = self.rng.random() < 0.5
        at = self.time.now - (self.rng.uniform(0, self.lag) if stale else 0.0)
        doc = next((doc for moment, doc in reversed(thing.history) if moment <= at), None)
        if doc is None or self.time.now < thing.shown:
            return None
        at -= self.rng.uniform(0, self.lag) / 2 if stale else 0.0
        tags = next((tags for moment, tags in reversed(thing.tag_history) if moment <= at), {})
        return doc, tags

    def _young(self, thing: Thing) -> bool:
        """A call that names it by id may not know it yet."""
        return self.lag > 0 and self.time.now - thing.born < 8 and self.rng.random() < 0.5

    def _known(self, where: dict[str, Thing], id: str, code: str) -> Thing:
        thing = where.get(id)
        if thing is None or thing.gone is not None or self._young(thing):
            raise Refused(code, f"The resource '{id}' does not exist.")
        return thing

    def _describe(
        self, key: str, where: dict[str, Thing], idkey: str, Filters: Any = (), NextToken: str | None = None
    ) -> dict[str, Any]:
        if NextToken is not None:
            if NextToken not in self._pages:
                raise Refused("InvalidPaginationToken", "The specified pagination token is not valid or is expired.")
            found = self._pages.pop(NextToken)
        else:
            assert Filters, "an unfiltered describe is throttled hard"
            found = []
            for thing in where.values():
                seen = self._seen(thing)
                if seen is None:
                    continue
                doc, tags = copy.deepcopy(seen[0]), seen[1]
                if all(_passes(doc, tags, idkey, each["Name"], each["Values"]) for each in Filters):
                    if tags:
                        doc["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
                    found.append(doc)
            self.rng.shuffle(found)  # "Applications should not assume the elements appear in a particular order."
        if not found or self.rng.random() < 0.8:
            return {key: found} if found or self.rng.random() < 0.5 else {}
        cut = self.rng.randrange(len(found))  # 0: an empty page with a token
        token = f"page{self.rng.getrandbits(40)}"
        self._pages[token] = found[cut:]
        return {key: found[:cut], "NextToken": token}

    # -------------------------------------------------------------------------------------------------------- describes
    def DescribeVolumes(self, **asked: Any) -> dict[str, Any]:
        return self._describe("Volumes", self.volumes, "VolumeId", **asked)

    def DescribeSnapshots(self, OwnerIds: Any = (), **asked: Any) -> dict[str, Any]:
        assert OwnerIds == ["self"], "without it every public snapshot is looked at"
        answer = self._describe("Snapshots", self.snapshots, "SnapshotId", **asked)
        for doc in answer.get("Snapshots", []):
            if doc["State"] == "pending":
                spent = (self.moment() - doc["StartTime"]).total_seconds()
                percent = min(99, int(100 * spent / self._length[doc["SnapshotId"]]))
                doc["Progress"] = self.rng.choice(["", f"{percent}%"])
        return answer

    def DescribeInstances(self, **asked: Any) -> dict[str, Any]:
        for thing in self.instances.values():
            if thing.doc["State"]["Name"] == "terminated" and self.time.now - thing.history[-1][0] > FORGOTTEN_SECONDS:
                self._vanish(thing)
        answer = self._describe("Instances", self.instances, "InstanceId", **asked)
        found = answer.pop("Instances", [])
        reservations = [{"ReservationId": "r-1", "OwnerId": "1", "Groups": [], "Instances": [doc]} for doc in found]
        return {**answer, "Reservations": reservations}

    # --------------------------------------------------------------------------------------------------------- volumes
    def CreateVolume(self, AvailabilityZone: str, ClientToken: str, **asked: Any) -> dict[str, Any]:
        assert len(ClientToken) <= 64 and ClientToken.isascii()
        if ClientToken in self.tokens:
            before, id = self.tokens[ClientToken]
            if before != asked:
                raise Refused("IdempotentParameterMismatch", "The client token was used with other parameters")
            if self.volumes[id].gone is not None or self.volumes[id].doc["State"] == "deleting":
                raise Refused("IdempotentParameterMismatch", "The client token is of a resource already deleted")
            return self._created(self.volumes[id])  # the zone is exempt
        type, size = asked.get("VolumeType", "gp2"), asked.get("Size")
        if asked.get("Iops") and type not in ("gp3", "io1", "io2"):
            raise Refused("InvalidParameterCombination", f"The parameter iops is not supported for {type} volumes.")
        if asked.get("Throughput") and type != "gp3":
            raise Refused("InvalidParameterCombination", f"The parameter throughput is not supported for {type}.")
        if type in ("io1", "io2") and not asked.get("Iops"):
            raise Refused("MissingParameter", "The parameter iops must be specified for io1 volumes.")
        if asked.get("KmsKeyId") and not asked.get("Encrypted"):
            raise Refused("InvalidParameterDependency", "The parameter KmsKeyId requires the parameter Encrypted.")
        rate = asked.get("VolumeInitializationRate")
        if rate is not None and (not asked.get("SnapshotId") or not 100 <= rate <= 300):
            raise Refused("InvalidParameterCombination", "VolumeInitializationRate")
        data, encrypted = Data(), bool(asked.get("Encrypted"))
        if asked.get("SnapshotId"):
            origin = self._known(self.snapshots, asked["SnapshotId"], "InvalidSnapshot.NotFound")
            if origin.doc["State"] != "completed":
                raise Refused("IncorrectState", f"Snapshot is in invalid state - {origin.doc['State']}")
            if size is not None and size < origin.doc["VolumeSize"]:
                raise Refused("InvalidParameterValue", "Volume of smaller size than the snapshot")
            data, encrypted = copy.copy(origin.data), encrypted or origin.doc["Encrypted"]
            size = size or origin.doc["VolumeSize"]
        doc = {
            "VolumeId": self._id("vol"), "AvailabilityZone": AvailabilityZone, "State": "creating", "Size": size,
            "VolumeType": type, "CreateTime": self.moment(), "Encrypted": encrypted, "MultiAttachEnabled": False,
            "SnapshotId": asked.get("SnapshotId", ""), "Attachments": [],
        }  # fmt: skip
        if type in ("gp2", "gp3", "io1", "io2"):
            doc["Iops"] = asked.get("Iops") or (3000 if type == "gp3" else max(100, 3 * size))
        if type == "gp3":
            doc["Throughput"] = asked.get("Throughput") or 125
        if encrypted:
            doc["KmsKeyId"] = asked.get("KmsKeyId") or "arn:aws:kms:eu-west-1:1:key/aws-ebs"
        thing = self._new(self.volumes, doc["VolumeId"], doc, _tags_of(asked, "volume"), data)
        self.tokens[ClientToken] = (copy.deepcopy(asked), thing.id)
        fate = self.rng.random()
        if fate < self.ghosts:  # KMS is asked later, and a volume that may not use its key vanishes without a trace
            self._later(2, 8, lambda: self._vanish(thing))
        elif fate < 1.5 * self.ghosts:
            self._later(2, 8, lambda: self.change(thing, State="error"))
        else:
            self._later(1, 5, lambda: thing.doc["State"] == "creating" and self.change(thing, State="available"))
        return self._created(thing)

    def _created(self, thing: Thing) -> dict[str, Any]:
        absent = ("Attachments",) if self.rng.random() < 0.7 else ("Attachments", "KmsKeyId")
        tags = [{"Key": key, "Value": value} for key, value in thing.tags.items()]
        return {**{k: copy.deepcopy(v) for k, v in thing.doc.items() if k not in absent}, "Tags": tags}

    def AttachVolume(self, VolumeId: str, InstanceId: str, Device: str) -> dict[str, Any]:
        volume = self._known(self.volumes, VolumeId, "InvalidVolume.NotFound")
        instance = self._known(self.instances, InstanceId, "InvalidInstanceID.NotFound")
        if volume.doc["State"] == "in-use":
            raise Refused("VolumeInUse", f"{VolumeId} is already attached to an instance")
        if volume.doc["State"] != "available":
            raise Refused("IncorrectState", f"{VolumeId} is not 'available'.")
        if volume.doc["AvailabilityZone"] != instance.doc["Placement"]["AvailabilityZone"]:
            code = self.rng.choice(["InvalidVolume.ZoneMismatch", "InvalidVolumeID.ZoneMismatch"])  # both are listed
            raise Refused(code, f"The volume '{VolumeId}' is not in the same availability zone as '{InstanceId}'")
        if instance.doc["State"]["Name"] not in ("running", "stopped"):
            code = self.rng.choice(["IncorrectState", "IncorrectInstanceState"])
            raise Refused(code, f"'{InstanceId}' is not 'running'.")
        taken = {mapping["DeviceName"] for mapping in instance.doc.get("BlockDeviceMappings", [])}
        if Device in taken:
            message = f"Invalid value '{Device}' for unixDevice. Attachment point {Device} is already in use"
            raise Refused("InvalidParameterValue", message)
        attachment = {
            "VolumeId": VolumeId, "InstanceId": InstanceId, "Device": Device, "State": "attaching",
            "AttachTime": self.moment(), "DeleteOnTermination": False,
        }  # fmt: skip
        self.change(volume, State="in-use", Attachments=[attachment])
        mapping = {"DeviceName": Device, "Ebs": {"VolumeId": VolumeId, "Status": "attaching"}}
        self.change(instance, BlockDeviceMappings=[*instance.doc.get("BlockDeviceMappings", []), mapping])

        def attached() -> None:
            if volume.doc["Attachments"] == [attachment]:
                self.change(volume, Attachments=[{**attachment, "State": "attached"}])

        if self.rng.random() >= self.stuck:
            self._later(1, 4, attached)
        return copy.deepcopy(attachment)

    def DetachVolume(self, VolumeId: str, InstanceId: str = "", Force: bool = False) -> dict[str, Any]:
        volume = self._known(self.volumes, VolumeId, "InvalidVolume.NotFound")
        held = volume.doc["Attachments"]
        if not held:
            raise Refused("IncorrectState", f"Volume '{VolumeId}' is in the '{volume.doc['State']}' state.")
        if InstanceId and held[0]["InstanceId"] != InstanceId:
            raise Refused("InvalidAttachment.NotFound", f"'{VolumeId}' is not attached to '{InstanceId}'")
        holder = held[0]["InstanceId"]
        if self.mounted.get(VolumeId) == holder:
            self.violations.append(f"{VolumeId} is detached from {holder}, which has it mounted (force: {Force})")
        if held[0]["State"] != "detaching":
            self.change(volume, Attachments=[{**held[0], "State": "detaching"}])
        if Force or self.rng.random() >= self.stuck:
            self._later(1, 4, lambda: self.free(volume, holder))
        return copy.deepcopy(volume.doc["Attachments"][0])

    def free(self, volume: Thing, holder: str) -> None:
        """The attachment has ended."""
        if volume.doc["Attachments"] and volume.doc["Attachments"][0]["InstanceId"] == holder:
            self.change(volume, State="available", Attachments=[])
            instance = self.instances[holder]
            left = [m for m in instance.doc["BlockDeviceMappings"] if m["Ebs"]["VolumeId"] != volume.id]
            self.change(instance, BlockDeviceMappings=left)

    def DeleteVolume(self, VolumeId: str) -> dict[str, Any]:
        volume = self._known(self.volumes, VolumeId, "InvalidVolume.NotFound")
        if volume.doc["State"] == "in-use":
            raise Refused("VolumeInUse", f"Volume {VolumeId} is currently attached to i-…")
        if volume.doc["State"] == "creating":
            raise Refused("IncorrectState", "The volume is being created")
        self.change(volume, State="deleting")
        self._later(1, 90, lambda: self._vanish(volume))
        return {}

    # ------------------------------------------------------------------------------------------------------- snapshots
    def CreateSnapshot(self, VolumeId: str, **asked: Any) -> dict[str, Any]:
        volume = self._known(self.volumes, VolumeId, "InvalidVolume.NotFound")
        if volume.doc["State"] not in ("available", "in-use"):
            raise Refused("IncorrectState", f"The volume '{VolumeId}' is '{volume.doc['State']}'")
        if self.time.now - self.snapshot_taken.get(VolumeId, -99.0) < 15:
            raise Refused("SnapshotCreationPerVolumeRateExceeded", "The maximum per volume CreateSnapshot request rate")
        own = [s for s in self.snapshots.values() if s.doc["VolumeId"] == VolumeId and s.gone is None]
        if sum(s.doc["State"] in ("pending", "error") for s in own) >= PENDING_MAX.get(volume.doc["VolumeType"], 5):
            raise Refused("ConcurrentSnapshotLimitExceeded", "Maximum allowed in-progress snapshots")
        self.snapshot_taken[VolumeId] = self.time.now
        doc = {
            "SnapshotId": self._id("snap"), "VolumeId": VolumeId, "State": "pending", "StartTime": self.moment(),
            "VolumeSize": volume.doc["Size"], "OwnerId": "1", "Encrypted": volume.doc["Encrypted"], "Progress": "",
            "Description": asked.get("Description", ""),
        }  # fmt: skip
        tags = _tags_of(asked, "snapshot")
        snapshot = self._new(self.snapshots, doc["SnapshotId"], doc, tags, copy.copy(volume.data))
        seconds = self._length[snapshot.id] = max(1.0, self.snapshot_seconds())
        state = "error" if self.rng.random() < self.stuck / 2 else "completed"
        self.time.at(self.time.now + seconds, lambda: self.change(snapshot, State=state, Progress="100%"))
        return {**doc, "Tags": [{"Key": key, "Value": value} for key, value in snapshot.tags.items()]}

    def DeleteSnapshot(self, SnapshotId: str) -> dict[str, Any]:
        self._vanish(self._known(self.snapshots, SnapshotId, "InvalidSnapshot.NotFound"))
        return {}

    # ------------------------------------------------------------------------------------------------ tags, instances
    def CreateTags(self, Resources: list[str], Tags: list[dict[str, str]]) -> dict[str, Any]:
        places = {"vol": (self.volumes, "Volume"), "snap": (self.snapshots, "Snapshot")}
        kinds = [(id, *places[id.split("-")[0]]) for id in Resources]
        found = [self._known(where, id, f"Invalid{kind}.NotFound") for id, where, kind in kinds]
        for tag in Tags:
            assert not tag["Key"].startswith("aws:") and len(tag["Key"]) <= 128 and len(tag["Value"]) <= 256
        for thing in found:
            thing.tags.update({tag["Key"]: tag["Value"] for tag in Tags})
            thing.tag_history.append((self.time.now, dict(thing.tags)))
        return {}

    def launch(self, zone: str, tags: dict[str, str], taken: tuple[str, ...] = ("/dev/sda1",)) -> str:
        """What a fleet does; the instance runs after 20 to 60 seconds."""
        root = [{"DeviceName": name, "Ebs": {"VolumeId": "vol-00000000000000000"}} for name in taken]
        doc = {
            "InstanceId": self._id("i"), "State": {"Name": "pending", "Code": 0}, "InstanceType": "g5.xlarge",
            "Placement": {"AvailabilityZone": zone}, "LaunchTime": self.moment(), "BlockDeviceMappings": root,
        }  # fmt: skip
        thing = self._new(self.instances, doc["InstanceId"], doc, tags)
        thing.shown = self.time.now + (self.rng.uniform(60, 400) if self.rng.random() < self.late else 0.0)
        self._later(20, 60, lambda: self.state(thing.id) == "pending" and self._state(thing, "running"))
        return thing.id

    def state(self, instance: str) -> str:
        return str(self.instances[instance].doc["State"]["Name"])

    def _state(self, thing: Thing, name: str, reason: str = "") -> None:
        more = {"StateReason": {"Code": reason, "Message": reason}} if reason else {}
        self.change(thing, State={"Name": name, "Code": 16}, **more)

    def TerminateInstances(self, InstanceIds: list[str]) -> dict[str, Any]:
        for id in InstanceIds:
            self._known(self.instances, id, "InvalidInstanceID.NotFound")
        for id in InstanceIds:
            self.end(id, "terminated", "Client.UserInitiatedShutdown", self.rng.uniform(5, 60))
        return {"TerminatingInstances": [{"InstanceId": id} for id in InstanceIds]}

    def end(self, instance: str, into: str, reason: str, seconds: float) -> None:
        """Terminate or stop: volumes come free of the terminated by themselves, sooner or later."""
        thing = self.instances[instance]
        before = "shutting-down" if into == "terminated" else "stopping"
        if self.state(instance) in ("terminated", before):
            return
        self._state(thing, before, reason)

        def ended() -> None:
            if self.state(instance) != before:
                return
            self.on_end(instance)
            self.mounted = {volume: holder for volume, holder in self.mounted.items() if holder != instance}
            self._state(thing, into, reason)
            for volume in self.volumes.values():
                held = volume.doc["Attachments"]
                if into == "terminated" and held and held[0]["InstanceId"] == instance and volume.gone is None:
                    if self.rng.random() < 0.5:
                        self.change(volume, Attachments=[{**held[0], "State": "detaching"}])
                    if self.rng.random() >= self.stuck:
                        self._later(0, 60, lambda volume=volume: self.free(volume, instance))

        self.time.at(self.time.now + seconds, ended)

    def start(self, instance: str) -> None:
        """AWS starts a stopped spot instance again."""
        if self.state(instance) == "stopped":
            self._state(self.instances[instance], "running")

    def CancelSpotFleetRequests(self, SpotFleetRequestIds: list[str], TerminateInstances: bool) -> dict[str, Any]:
        done = []
        for fleet in SpotFleetRequestIds:
            assert fleet in self.fleets
            self.fleets[fleet] = "cancelled_terminating"
            for id, thing in self.instances.items():
                if TerminateInstances and thing.tags.get("aws:ec2spot:fleet-request-id") == fleet:
                    self.end(id, "terminated", "Client.UserInitiatedShutdown", 10)
            done.append({"SpotFleetRequestId": fleet, "CurrentSpotFleetRequestState": "cancelled_terminating",
                         "PreviousSpotFleetRequestState": "active"})  # fmt: skip
        return {"SuccessfulFleetRequests": done, "UnsuccessfulFleetRequests": []}

    def _later(self, least: float, most: float, do: Callable[[], object]) -> None:
        self.time.at(self.time.now + self.rng.uniform(least, most), lambda: (do(), None)[1])


@functools.cache
def _client() -> Any:
    """One client for all worlds: to make one takes 30 ms."""
    client = boto3.client(
        "ec2", region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="b",
        config=Config(retries={"total_max_attempts": 1}),
    )  # fmt: skip

    def keep(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        context["asked"] = copy.deepcopy(params)

    def answer(model: Any, context: dict[str, Any], **_: Any) -> Any:
        return SecondEc2.current.answer(model, context["asked"])

    client.meta.events.register("before-parameter-build.ec2", keep)
    client.meta.events.register("before-call.ec2", answer)
    return client


class _Http:
    def __init__(self, status: int) -> None:
        self.status_code, self.headers = status, {}


def _passes(doc: dict[str, Any], tags: dict[str, str], idkey: str, name: str, values: list[str]) -> bool:
    if name.startswith("tag:"):
        return tags.get(name[4:]) in values
    assert name.replace("-", "") == idkey.lower(), f"no such filter: {name}"
    return doc[idkey] in values


def _tags_of(asked: dict[str, Any], resource: str) -> dict[str, str]:
    found = [spec for spec in asked.get("TagSpecifications", []) if spec["ResourceType"] == resource]
    return {tag["Key"]: tag["Value"] for spec in found for tag in spec["Tags"]}
