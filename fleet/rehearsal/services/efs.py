"""EFS as AWS answers it: file systems and mount targets with their states, and what a machine can mount.

States take time; a second mount target in a zone, a file system deleted with mount targets, a token used twice and
modes that exclude each other are refused. Subnets and security groups are moto's. moto's own EFS has no states.
Source: EFS API reference, 2015-02-01.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from moto.ec2.models import ec2_backends

from spotheal.fleet.rehearsal.ec2.instances import security_groups
from spotheal.fleet.rehearsal.ec2.rulebook import ApiError, Rulebook

PORT = 2049
_PREFIX = "/2015-02-01"
_MODES = ("generalPurpose", "maxIO")
_THROUGHPUTS = ("bursting", "provisioned", "elastic")
_PROVISIONED_MAX = 3414.0  # MiB/s


@dataclass(frozen=True)
class Seconds:
    """What AWS takes; a file system some seconds, a mount target about a minute and a half."""

    file_system: float = 5.0
    mount_target: float = 80.0
    delete: float = 20.0


@dataclass(frozen=True)
class FileSystem:
    id: str
    token: str
    asked: Mapping[str, Any]
    made: float
    made_at: datetime
    deleted: float | None = None


@dataclass(frozen=True)
class MountTarget:
    id: str
    file_system: str
    subnet: str
    zone: str
    vpc: str
    address: str
    groups: tuple[str, ...]
    made: float
    deleted: float | None = None


@dataclass
class FileSystems:
    """`folder`: where machines find the content, one folder a file system."""

    rulebook: Rulebook
    folder: Path | None = None
    seconds: Seconds = field(default_factory=Seconds)

    def __post_init__(self) -> None:
        self._systems: dict[str, FileSystem] = {}
        self._targets: dict[str, MountTarget] = {}
        self._count = 0

    def tags_of(self, name: str) -> dict[str, str]:
        """Of a file system, or of the one that a mount target belongs to."""
        target = self._targets.get(name)
        resource = self._systems.get(target.file_system if target else name)
        return {tag["Key"]: tag["Value"] for tag in (resource.asked.get("Tags") or [] if resource else [])}

    # ------------------------------------------------------------------------------------------------------ the calls
    def create_file_system(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        token = str(parameters.get("CreationToken") or "")
        if not 1 <= len(token) <= 64:
            raise ApiError("ValidationException", "1 validation error detected: CreationToken must have 1 to 64", 400)
        earlier = next((candidate for candidate in self._live_systems() if candidate.token == token), None)
        if earlier is not None:
            raise ApiError("FileSystemAlreadyExists", f"File system '{earlier.id}' has this creation token", 409)
        mode, throughput = (
            parameters.get("PerformanceMode", _MODES[0]),
            parameters.get("ThroughputMode", _THROUGHPUTS[0]),
        )
        rate = parameters.get("ProvisionedThroughputInMibps")
        if mode not in _MODES or throughput not in _THROUGHPUTS:
            raise ApiError("ValidationException", "Member must satisfy enum value set", 400)
        if throughput == "elastic" and mode == "maxIO":
            raise ApiError("BadRequest", "Elastic throughput mode is not supported with maxIO performance mode.", 400)
        if (throughput == "provisioned") != (rate is not None):
            message = "ProvisionedThroughputInMibps must be set with throughput mode provisioned, and only with it."
            raise ApiError("BadRequest", message, 400)
        if rate is not None and not 1 <= float(rate) <= _PROVISIONED_MAX:
            raise ApiError("ThroughputLimitExceeded", f"The limit is {_PROVISIONED_MAX:.0f} MiB/s.", 400)
        file_system = FileSystem(self._new_id("fs"), token, dict(parameters), self._now(), self.rulebook.world.now())
        self._systems[file_system.id] = file_system
        if self.folder is not None:
            (self.folder / file_system.id).mkdir(parents=True, exist_ok=True)
        return self._shown(file_system)

    def describe_file_systems(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        systems = self._live_systems()
        if name := parameters.get("FileSystemId"):
            systems = [self._system(str(name))]
        if token := parameters.get("CreationToken"):
            systems = [system for system in systems if system.token == token]
        return {"FileSystems": [self._shown(system) for system in systems]}

    def delete_file_system(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        system = self._system(str(parameters["FileSystemId"]))
        if any(target.file_system == system.id for target in self._live_targets()):
            raise ApiError("FileSystemInUse", f"File system '{system.id}' has mount targets created in it.", 409)
        self._systems[system.id] = replace(system, deleted=self._now())
        return {}

    def create_mount_target(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        system = self._system(str(parameters["FileSystemId"]))
        if self._state(system, self.seconds.file_system) != "available":
            raise ApiError("IncorrectFileSystemLifeCycleState", "The file system is not in state available.", 409)
        subnet = self._subnet(str(parameters["SubnetId"]))
        groups = tuple(parameters.get("SecurityGroups") or ()) or (self._default_group(subnet.vpc_id),)
        for group in groups:
            if self._group(group) is None:
                raise ApiError("SecurityGroupNotFound", f"The SecurityGroup ID '{group}' does not exist", 400)
        siblings = [candidate for candidate in self._live_targets() if candidate.file_system == system.id]
        if any(candidate.zone == subnet.availability_zone for candidate in siblings):
            raise ApiError("MountTargetConflict", "mount target already exists in this AZ", 409)
        if any(candidate.vpc != subnet.vpc_id for candidate in siblings):
            raise ApiError("MountTargetConflict", "requested subnet for new mount target is not in the same VPC", 409)
        used_addresses = {candidate.address for candidate in self._targets.values()}
        base = subnet.cidr_block.rpartition(".")[0]
        address = next(
            candidate for candidate in (f"{base}.{last}" for last in range(77, 250)) if candidate not in used_addresses
        )
        target = MountTarget(
            self._new_id("fsmt"), system.id, subnet.id, subnet.availability_zone, subnet.vpc_id, address, groups,
            self._now(),
        )  # fmt: skip
        self._targets[target.id] = target
        return self._shown_target(target)

    def describe_mount_targets(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if name := parameters.get("MountTargetId"):
            return {"MountTargets": [self._shown_target(self._target(str(name)))]}
        if not parameters.get("FileSystemId"):
            raise ApiError("BadRequest", "One of FileSystemId, MountTargetId and AccessPointId must be given", 400)
        system = self._system(str(parameters["FileSystemId"]))
        targets = [target for target in self._live_targets() if target.file_system == system.id]
        return {"MountTargets": [self._shown_target(target) for target in targets]}

    def describe_mount_target_security_groups(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {"SecurityGroups": list(self._target(str(parameters["MountTargetId"])).groups)}

    def delete_mount_target(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        target = self._target(str(parameters["MountTargetId"]))
        self._targets[target.id] = replace(target, deleted=self._now())
        return {}

    # --------------------------------------------------------------------------------------------------- for machines
    def mountable(self, host: str, instance: str) -> dict[str, Any]:
        """What an instance finds under a name or an address: `address` "" where DNS has none, `open` whether a
        security group of the mount target lets the instance in."""
        record = self.rulebook.instance(instance)
        zone = record.zone if record else ""
        match = re.match(r"(fs-[0-9a-f]+)\.efs\.", host)
        for target in self._live_targets():
            is_named = (target.file_system, target.zone) == (match[1], zone) if match else target.address == host
            if is_named and self._state(target, self.seconds.mount_target) == "available" and self.folder is not None:
                break
        else:
            return {"address": "", "open": False, "folder": ""}
        groups = self._groups_of(record.spec if record else {}, target.vpc)
        is_open = any(self._lets_in(group, groups) for group in target.groups)
        return {"address": target.address, "open": is_open, "folder": str(self.folder / target.file_system)}

    def _groups_of(self, spec: Mapping[str, Any], vpc: str) -> set[str]:
        return set(security_groups(spec)) or {self._default_group(vpc)}

    def _lets_in(self, group: str, members: set[str]) -> bool:
        for rule in getattr(self._group(group), "ingress_rules", []):
            ports = rule.from_port is None or int(rule.from_port) <= PORT <= int(rule.to_port)
            is_member = str(rule.source_group.get("GroupId")) in members
            if str(rule.ip_protocol) in ("tcp", "-1", "6") and ports and (rule.ip_range or is_member):
                return True
        return False

    # --------------------------------------------------------------------------------------------------------- inside
    @property
    def _ec2(self) -> Any:
        return ec2_backends[self.rulebook.account][self.rulebook.region]

    def _subnet(self, name: str) -> Any:
        for subnets in self._ec2.subnets.values():
            if name in subnets:
                return subnets[name]
        raise ApiError("SubnetNotFound", f"The subnet ID '{name}' does not exist", 400)

    def _group(self, name: str) -> Any:
        return self._ec2.get_security_group_from_id(name)

    def _default_group(self, vpc: str) -> str:
        group = self._ec2.get_security_group_from_name("default", vpc)
        return str(group.id) if group else ""

    def _now(self) -> float:
        return self.rulebook.world.moment()

    def _new_id(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-{self._count:017x}"

    def _is_gone(self, resource: FileSystem | MountTarget) -> bool:
        return resource.deleted is not None and self._now() - resource.deleted >= self.seconds.delete

    def _live_systems(self) -> list[FileSystem]:
        return [system for system in self._systems.values() if not self._is_gone(system)]

    def _live_targets(self) -> list[MountTarget]:
        return [target for target in self._targets.values() if not self._is_gone(target)]

    def _state(self, resource: FileSystem | MountTarget, takes: float) -> str:
        if resource.deleted is not None:
            return "deleting"
        return "creating" if self._now() - resource.made < takes else "available"

    def _system(self, name: str) -> FileSystem:
        system = next((candidate for candidate in self._live_systems() if candidate.id == name), None)
        if system is None:
            raise ApiError("FileSystemNotFound", f"File system '{name}' does not exist.", 404)
        return system

    def _target(self, name: str) -> MountTarget:
        target = next((candidate for candidate in self._live_targets() if candidate.id == name), None)
        if target is None:
            raise ApiError("MountTargetNotFound", f"Mount target '{name}' does not exist.", 404)
        return target

    def _shown(self, system: FileSystem) -> dict[str, Any]:
        tags = list(system.asked.get("Tags") or [])
        scope = f"{self.rulebook.region}:{self.rulebook.account}"
        rate = system.asked.get("ProvisionedThroughputInMibps")
        return {
            "OwnerId": self.rulebook.account, "CreationToken": system.token, "FileSystemId": system.id,
            "FileSystemArn": f"arn:aws:elasticfilesystem:{scope}:file-system/{system.id}",
            "CreationTime": system.made_at.timestamp(),
            "LifeCycleState": self._state(system, self.seconds.file_system),
            "Name": next((tag["Value"] for tag in tags if tag["Key"] == "Name"), ""),
            "NumberOfMountTargets": sum(target.file_system == system.id for target in self._live_targets()),
            "SizeInBytes": {"Value": 6144, "ValueInIA": 0, "ValueInStandard": 6144},
            "PerformanceMode": system.asked.get("PerformanceMode", _MODES[0]),
            "Encrypted": bool(system.asked.get("Encrypted")),
            "ThroughputMode": system.asked.get("ThroughputMode", _THROUGHPUTS[0]), "Tags": tags,
            **({} if rate is None else {"ProvisionedThroughputInMibps": float(rate)}),
        }  # fmt: skip

    def _shown_target(self, target: MountTarget) -> dict[str, Any]:
        return {
            "OwnerId": self.rulebook.account, "MountTargetId": target.id, "FileSystemId": target.file_system,
            "SubnetId": target.subnet, "LifeCycleState": self._state(target, self.seconds.mount_target),
            "IpAddress": target.address, "NetworkInterfaceId": f"eni-{target.id[-17:]}", "VpcId": target.vpc,
            "AvailabilityZoneName": target.zone, "AvailabilityZoneId": f"usw2-az{ord(target.zone[-1]) - 96}",
        }  # fmt: skip

    # -------------------------------------------------------------------------------------------------------- the wire
    def answer(self, method: str, path: str, query: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """What AWS answers to an HTTP request, or its error with the `__type` that botocore reads."""
        parameters: dict[str, Any] = {name: values[-1] for name, values in parse_qs(query).items()}
        parameters |= json.loads(body) if body else {}
        kind, _, name = unquote(path.removeprefix(_PREFIX)).lstrip("/").partition("/")
        name, _, part = name.partition("/")
        if name:
            parameters["FileSystemId" if kind == "file-systems" else "MountTargetId"] = name
        calls: dict[tuple[str, str, str], tuple[int, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
            ("POST", "file-systems", ""): (201, self.create_file_system),
            ("GET", "file-systems", ""): (200, self.describe_file_systems),
            ("DELETE", "file-systems", ""): (204, self.delete_file_system),
            ("POST", "mount-targets", ""): (200, self.create_mount_target),
            ("GET", "mount-targets", ""): (200, self.describe_mount_targets),
            ("GET", "mount-targets", "security-groups"): (200, self.describe_mount_target_security_groups),
            ("DELETE", "mount-targets", ""): (204, self.delete_mount_target),
        }
        if (method, kind, part) not in calls:
            return 400, {"__type": "UnknownOperationException", "message": "not rehearsed"}
        status, call = calls[method, kind, part]
        try:
            with self.rulebook.inside():
                return status, call(parameters)
        except ApiError as error:
            return error.status, {"__type": error.code, "ErrorCode": error.code, "Message": error.message}


class InMemoryEfs:
    """boto3's client without HTTP; errors are botocore's."""

    def __init__(self, systems: FileSystems) -> None:
        self._systems = systems

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        calls = r"(create|delete)_(file_system|mount_target)|describe_(file_system|mount_target)(s|_security_groups)"
        if not re.fullmatch(calls, name):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def get_paginator(self, name: str) -> Any:
        """Everything in one page."""
        call = getattr(self, name)
        return type("Paginator", (), {"paginate": staticmethod(lambda **asked: [call(**asked)])})

    def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        from spotheal.fleet.rehearsal.services.client import client_error

        try:
            with self._systems.rulebook.inside():
                answer: dict[str, Any] = getattr(self._systems, operation)(parameters)
                return answer
        except ApiError as error:
            name = "".join(word.title() for word in operation.split("_"))
            raise client_error(name, error.code, error.message, error.status) from error
