"""EBS volumes and their attachments, with the states they pass through and the errors on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spotheal.agent.protocol.names import TAG_TERM
from spotheal.fleet.rehearsal.ec2.filters import (
    Field,
    Item,
    named,
    no_ids_with_pages,
    page,
    plain,
    select,
    tag_list,
    tags_for,
)
from spotheal.fleet.rehearsal.ec2.world import ApiError, Attachment, Snapshot, Volume, World

Params = Mapping[str, Any]
_ATTACHMENTS_MAX = 27  # Nitro: 28 with the root volume
_TOKEN_SECONDS = 86400.0
REMEMBERED_SECONDS = 60.0  # how long a volume's token finds it after its end; a guess
_TYPES = ("gp2", "gp3", "io1", "io2", "st1", "sc1", "standard")
BUSY_LOOK_SECONDS = 1.0


# ------------------------------------------------------------------------------------------------------------- volumes
def create_volume(world: World, params: Params, caller: str | None) -> Item:
    zone = params.get("AvailabilityZone", "")
    if zone not in world.zones:
        raise ApiError("InvalidZone.NotFound", f"The zone '{zone}' does not exist.")
    token = params.get("ClientToken", "")
    earlier_volume = _known(world, token, zone, params)
    if earlier_volume is not None:
        return _volume(earlier_volume)
    source = _source(world, params)
    size = params.get("Size") or (source.size if source else 0)
    kind = params.get("VolumeType", "gp2")
    _check_volume(params, source, size, kind)
    volume = Volume(
        id=world.new_id("vol"),
        zone=zone,
        size=size,
        type=kind,
        iops=params.get("Iops") or _iops(kind, size),
        throughput=params.get("Throughput") or (125 if kind == "gp3" else None),
        encrypted=bool(params.get("Encrypted") or params.get("KmsKeyId") or (source and source.encrypted)),
        kms_key=params.get("KmsKeyId") or (source.kms_key if source else None),
        snapshot=source.id if source else "",
        created=world.now(),
        initialization_rate=params.get("VolumeInitializationRate"),
        tags=tags_for(params, "volume"),
    )
    world.volumes.put(volume)
    if token:
        world.tokens["CreateVolume", token, zone] = (_without_zone(params), volume.id, world.moment())
    world.tell(world.hooks.on_volume_created, volume.id, volume.snapshot or None)
    state = "error" if world.faults.take("volumes_fail") else "available"
    if world.faults.take("volumes_vanish") or not _may_encrypt(world, caller, volume.kms_key, source):
        world.later(world.latencies.create_volume, lambda: _gone(world, volume.id))
    else:
        world.later(world.latencies.create_volume, lambda: _set_state(world, volume.id, "creating", state))
    return _volume(volume)


def _may_encrypt(world: World, caller: str | None, key: str | None, source: Snapshot | None) -> bool:
    """KMS is asked after the answer (EC2 API reference, CreateVolume). A snapshot of another key is encrypted again."""
    source_key = source.kms_key if source is not None and source.kms_key != key else None
    into = ("ReEncryptTo",) if source_key else ()
    return (key is None or world.may_use_key(caller, key, ("GenerateDataKeyWithoutPlaintext", "Decrypt", *into))) and (
        source_key is None or world.may_use_key(caller, source_key, ("Decrypt", "ReEncryptFrom"))
    )


def _known(world: World, token: str, zone: str, params: Params) -> Volume | None:
    """What an earlier call with this token made. The zone is part of the token's scope, not of the comparison."""
    if not token:
        return None
    if len(token) > 64 or not token.isascii():
        raise ApiError("InvalidParameterValue", "Value for parameter ClientToken must be at most 64 ASCII characters")
    stored = world.tokens.get(("CreateVolume", token, zone))
    if stored is None or world.moment() - stored[2] > _TOKEN_SECONDS:
        return None
    if stored[0] != _without_zone(params):
        raise ApiError(
            "IdempotentParameterMismatch",
            "The request uses the same client token as a previous, but non-identical request.",
        )
    volume = world.volumes.get(stored[1])
    if volume is not None:
        return volume
    deleted, moment = world.deleted_volumes[stored[1]]
    if world.moment() - moment <= REMEMBERED_SECONDS:
        return deleted
    raise ApiError(
        "IdempotentParameterMismatch",
        "The client token you have provided is associated with a resource that is already deleted. Please use a"
        " different client token.",
    )


def terms_of_copies(world: World) -> set[str]:
    """`spotheal:term` of every request for a volume from a snapshot that was met; "0" is the operator's."""
    requests = [json.loads(value[0]) for key, value in world.tokens.items() if key[0] == "CreateVolume"]
    terms = {tags_for(request, "volume").get(TAG_TERM, "0") for request in requests if request.get("SnapshotId")}
    return terms - {"0"}


def _without_zone(params: Params) -> str:
    settings = {key: value for key, value in params.items() if key not in ("AvailabilityZone", "ClientToken", "DryRun")}
    return json.dumps(settings, sort_keys=True, default=str)


def _source(world: World, params: Params) -> Snapshot | None:
    if not params.get("SnapshotId"):
        return None
    snapshot = world.snapshot(params["SnapshotId"])
    if snapshot.state != "completed":
        raise ApiError("IncorrectState", f"Snapshot is in invalid state - {snapshot.state}")
    return snapshot


def _check_volume(params: Params, source: Snapshot | None, size: int, kind: str) -> None:
    if not size:
        raise ApiError("MissingParameter", "The request must contain the parameter size or snapshotId")
    if source is not None and size < source.size:
        raise ApiError(
            "InvalidParameterValue",
            f"Volume of size {size}GiB is smaller than snapshot '{source.id}', expect size >= {source.size}GiB",
        )
    if kind not in _TYPES:
        raise ApiError("InvalidParameterValue", f"Value ({kind}) for parameter volumeType is invalid.")
    if not 1 <= size <= 65536:
        raise ApiError("InvalidParameterValue", f"Volume size {size} GiB is out of range")
    if kind in ("io1", "io2") and not params.get("Iops"):
        raise ApiError("MissingParameter", f"The parameter iops must be specified for {kind} volumes.")
    if params.get("Throughput") and kind != "gp3":
        raise ApiError("InvalidParameterCombination", f"The parameter throughput is not supported for {kind} volumes.")
    rate = params.get("VolumeInitializationRate")
    if rate is not None and (source is None or not 100 <= rate <= 300):
        raise ApiError("InvalidParameterValue", f"Volume initialization rate {rate} needs a snapshot and 100-300 MiB/s")


def _iops(kind: str, size: int) -> int | None:
    return 3000 if kind == "gp3" else min(max(100, 3 * size), 16000) if kind == "gp2" else None


def _set_state(world: World, volume_id: str, old: str, new: str) -> None:
    volume = world.volumes.get(volume_id)
    if volume is not None and volume.state == old:
        world.volumes.put(replace(volume, state=new))


def describe_volumes(world: World, params: Params, caller: str | None) -> Item:
    no_ids_with_pages(params, "VolumeIds")
    items = [_volume(volume) for volume in world.volumes.at(world.viewed())]
    items = named(items, params.get("VolumeIds"), "VolumeId", "InvalidVolume.NotFound")
    return page(params, select(items, params.get("Filters"), _VOLUME_FIELDS), "Volumes", world.page_size, 5)


def delete_volume(world: World, params: Params, caller: str | None) -> Item:
    volume = world.volume(params["VolumeId"])
    if volume.attachment is not None:
        raise ApiError("VolumeInUse", f"Volume {volume.id} is currently attached to {volume.attachment.instance}")
    if volume.state == "creating":
        raise ApiError("IncorrectState", f"The volume '{volume.id}' is 'creating'")
    if volume.state != "deleting":
        world.volumes.put(replace(volume, state="deleting"))
        world.later(world.latencies.delete_volume, lambda: _gone(world, volume.id))
    return {}


def _gone(world: World, volume_id: str) -> None:
    # A retry of CreateVolume, with its token, is still answered with the volume that is gone, as if it were made just
    # now; a while later it is refused (github.com/kubernetes-sigs/aws-ebs-csi-driver issues 1916 and 1022).
    world.deleted_volumes[volume_id] = replace(world.volumes[volume_id], state="creating"), world.moment()
    world.volumes.remove(volume_id)
    world.tell(world.hooks.on_volume_deleted, volume_id)


# ---------------------------------------------------------------------------------------------------------- attachments
def attach_volume(world: World, params: Params, caller: str | None) -> Item:
    volume = world.volume(params["VolumeId"])
    instance = world.instance(params["InstanceId"])
    device = params["Device"]
    if instance.state not in ("running", "stopped"):
        raise ApiError("IncorrectState", f"Instance '{instance.id}' is not 'running'.")
    if volume.zone != instance.zone:
        raise ApiError(
            "InvalidVolume.ZoneMismatch",
            f"The volume '{volume.id}' is not in the same availability zone as instance '{instance.id}'",
        )
    if volume.attachment is not None:
        raise ApiError("VolumeInUse", f"{volume.id} is already attached to an instance")
    if volume.state != "available":
        raise ApiError("IncorrectState", f"Volume '{volume.id}' is '{volume.state}', not 'available'.")
    if volume.kms_key and not world.may_use_key(caller, volume.kms_key, ("CreateGrant",)):
        raise ApiError(
            "CustomerKeyHasBeenRevoked",
            f"Volume {volume.id} cannot be attached. The encrypted volume was unable to access the KMS master key.",
        )
    volumes = attached_to(world, instance.id)
    used_devices = {other.attachment.device for other in volumes if other.attachment} | {ROOT_DEVICE, "/dev/sda1"}
    if device in used_devices:
        raise ApiError(
            "InvalidParameterValue",
            f"Invalid value '{device}' for unixDevice. Attachment point {device} is already in use",
        )
    if len(volumes) >= _ATTACHMENTS_MAX:
        raise ApiError("AttachmentLimitExceeded", f"Attachment limit exceeded for instance {instance.id}")
    attachment = Attachment(instance.id, device, "attaching", world.now(), world.number())
    volume = world.volumes.put(replace(volume, state="in-use", attachment=attachment))
    if not world.faults.take("attaches_stuck"):
        world.later(world.latencies.attach, lambda: _attached(world, volume.id, attachment))
    return _attachment(volume)


ROOT_DEVICE = "/dev/xvda"


def _attached(world: World, volume_id: str, attachment: Attachment) -> None:
    volume = world.volumes.get(volume_id)
    if volume is None or volume.attachment != attachment:  # detached, or attached anew, meanwhile
        return
    attached = replace(attachment, state="attached")
    world.volumes.put(replace(volume, attachment=attached))

    def appears() -> None:
        volume = world.volumes.get(volume_id)
        if volume is not None and volume.attachment == attached:
            world.tell(world.hooks.on_attach, volume_id, attachment.instance, attachment.device)

    world.later(world.latencies.device_node, appears)


def detach_volume(world: World, params: Params, caller: str | None) -> Item:
    volume = world.volume(params["VolumeId"])
    attachment = volume.attachment
    if attachment is None:
        raise ApiError("IncorrectState", f"Volume '{volume.id}' is in the '{volume.state}' state.")
    if params.get("InstanceId") and params["InstanceId"] != attachment.instance:
        world.instance(params["InstanceId"])
        raise ApiError(
            "InvalidAttachment.NotFound", f"Volume '{volume.id}' is not attached to '{params['InstanceId']}'"
        )
    if params.get("Device") and params["Device"] != attachment.device:
        raise ApiError("InvalidAttachment.NotFound", f"Volume '{volume.id}' is not attached as '{params['Device']}'")
    force = bool(params.get("Force"))
    if attachment.state in ("detaching", "busy") and not force:
        raise ApiError("IncorrectState", f"Volume '{volume.id}' is in the '{attachment.state}' state.")
    leaving = replace(attachment, state="detaching")
    volume = world.volumes.put(replace(volume, attachment=leaving))
    if force or not world.faults.take("detaches_stuck"):
        world.later(world.latencies.detach, lambda: _detach(world, volume.id, attachment, force))
    return _attachment(volume)


def _detach(world: World, volume_id: str, attachment: Attachment, force: bool) -> None:
    volume = world.volumes.get(volume_id)
    if volume is None or volume.attachment is None or volume.attachment.number != attachment.number:
        return
    mounted = world.hooks.is_mounted
    if not force and mounted is not None and mounted(volume_id, attachment.instance):
        world.volumes.put(replace(volume, attachment=replace(volume.attachment, state="busy")))
        world.later(BUSY_LOOK_SECONDS, lambda: _detach(world, volume_id, attachment, force))
        return
    let_go(world, volume)


def let_go(world: World, volume: Volume) -> None:
    """End the attachment of `volume` now (detached, or its instance is terminated)."""
    attachment = volume.attachment
    assert attachment is not None
    world.volumes.put(replace(volume, state="available" if volume.state == "in-use" else volume.state, attachment=None))
    world.tell(world.hooks.on_detach, volume.id, attachment.instance, attachment.device)


def attached_to(world: World, instance_id: str) -> list[Volume]:
    return [volume for volume in world.volumes.all() if volume.attachment and volume.attachment.instance == instance_id]


# --------------------------------------------------------------------------------------------------- shaped as by boto3
def _volume(volume: Volume) -> Item:
    item: Item = {
        "VolumeId": volume.id,
        "AvailabilityZone": volume.zone,
        "Size": volume.size,
        "VolumeType": volume.type,
        "Encrypted": volume.encrypted,
        "SnapshotId": volume.snapshot,
        "CreateTime": volume.created,
        "State": volume.state,
        "MultiAttachEnabled": False,
        "Attachments": [_attachment(volume)] if volume.attachment else [],
    }
    optional_fields = {
        "Iops": volume.iops,
        "Throughput": volume.throughput,
        "KmsKeyId": volume.kms_key,
        "VolumeInitializationRate": volume.initialization_rate,
        "Tags": tag_list(volume.tags) or None,
    }
    return item | {key: value for key, value in optional_fields.items() if value is not None}


def _attachment(volume: Volume) -> Item:
    attachment = volume.attachment
    assert attachment is not None
    return {
        "VolumeId": volume.id,
        "InstanceId": attachment.instance,
        "Device": attachment.device,
        "State": attachment.state,
        "AttachTime": attachment.time,
        "DeleteOnTermination": False,
    }


def _held(key: str) -> Field:
    return lambda item: [attachment[key] for attachment in item["Attachments"]]


_VOLUME_FIELDS: dict[str, Field] = {
    "volume-id": plain("VolumeId"),
    "availability-zone": plain("AvailabilityZone"),
    "status": plain("State"),
    "size": plain("Size"),
    "volume-type": plain("VolumeType"),
    "snapshot-id": plain("SnapshotId"),
    "encrypted": plain("Encrypted"),
    "create-time": plain("CreateTime"),
    "attachment.instance-id": _held("InstanceId"),
    "attachment.status": _held("State"),
    "attachment.device": _held("Device"),
    "attachment.delete-on-termination": _held("DeleteOnTermination"),
}
OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "CreateVolume": create_volume,
    "DescribeVolumes": describe_volumes,
    "DeleteVolume": delete_volume,
    "AttachVolume": attach_volume,
    "DetachVolume": detach_volume,
}
