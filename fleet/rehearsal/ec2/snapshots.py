"""EBS snapshots: a point in time at the request, completed a good while later, and at times never."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from spotheal.fleet.rehearsal.ec2.world import ApiError, Snapshot, World

Params = Mapping[str, Any]
_AT_A_TIME = 5  # snapshots of one volume, those that have failed among them (EBS quotas; error codes of the API);
_AT_A_TIME_OF = {"st1": 1, "sc1": 1}  # of an HDD volume


def create_snapshot(world: World, params: Params, caller: str | None) -> Item:
    volume = world.volume(params["VolumeId"])
    if volume.state not in ("available", "in-use"):
        raise ApiError("IncorrectState", f"The volume '{volume.id}' is '{volume.state}'.")
    unfinished = [copy for copy in world.snapshots.all() if copy.volume == volume.id and copy.state != "completed"]
    pending = [copy for copy in unfinished if copy.state == "pending"]
    if len(unfinished) >= _AT_A_TIME_OF.get(volume.type, _AT_A_TIME):
        raise ApiError(
            "ConcurrentSnapshotLimitExceeded", "Maximum allowed in-progress snapshots for a single volume exceeded."
        )
    if any(world.moment() - copy.began < world.latencies.snapshot_interval for copy in pending):
        raise ApiError(
            "SnapshotCreationPerVolumeRateExceeded",
            "The maximum per volume CreateSnapshot request rate has been exceeded. Use an increasing or variable sleep"
            " interval between requests.",
        )
    seconds = world.faults.snapshot_seconds
    seconds = world.random.choice(world.latencies.snapshot) if seconds is None else seconds
    snapshot = Snapshot(
        id=world.new_id("snap"),
        volume=volume.id,
        size=volume.size,
        encrypted=volume.encrypted,
        kms_key=volume.kms_key,
        description=params.get("Description", ""),
        started=world.now(),
        began=world.moment(),
        due=world.moment() + seconds,
        tags=tags_for(params, "snapshot"),
    )
    world.snapshots.put(snapshot)
    world.tell(world.hooks.on_snapshot_taken, snapshot.id, volume.id)
    state = "error" if world.faults.take("snapshots_fail") else "completed"
    world.later(seconds, lambda: _complete(world, snapshot.id, state))
    return _snapshot(world, snapshot)


def _complete(world: World, snapshot_id: str, state: str) -> None:
    snapshot = world.snapshots.get(snapshot_id)
    if snapshot is not None:
        world.snapshots.put(replace(snapshot, state=state))


def describe_snapshots(world: World, params: Params, caller: str | None) -> Item:
    no_ids_with_pages(params, "SnapshotIds")
    items = [_snapshot(world, snapshot) for snapshot in world.snapshots.at(world.viewed())]
    items = named(items, params.get("SnapshotIds"), "SnapshotId", "InvalidSnapshot.NotFound")
    owners = params.get("OwnerIds")
    if owners and not {"self", world.account} & set(owners):
        items = []
    return page(params, select(items, params.get("Filters"), _SNAPSHOT_FIELDS), "Snapshots", world.page_size, 5)


def delete_snapshot(world: World, params: Params, caller: str | None) -> Item:
    snapshot = world.snapshot(params["SnapshotId"])
    world.snapshots.remove(snapshot.id)
    world.tell(world.hooks.on_snapshot_deleted, snapshot.id)
    return {}


def _snapshot(world: World, snapshot: Snapshot) -> Item:
    item: Item = {
        "SnapshotId": snapshot.id,
        "VolumeId": snapshot.volume,
        "State": snapshot.state,
        "StartTime": snapshot.started,
        "Progress": _progress(world, snapshot),
        "OwnerId": world.account,
        "VolumeSize": snapshot.size,
        "Encrypted": snapshot.encrypted,
        "Description": snapshot.description,
        "StorageTier": "standard",
    }
    if snapshot.kms_key:
        item["KmsKeyId"] = snapshot.kms_key
    if snapshot.tags:
        item["Tags"] = tag_list(snapshot.tags)
    return item


def _progress(world: World, snapshot: Snapshot) -> str:
    """It foretells nothing: all pending snapshots that were ever recorded had "" (the answer to CreateSnapshot), 0% or
    99% (tests/data/aws_facts.toml)."""
    if snapshot.state == "completed":
        return "100%"
    if world.viewed() <= snapshot.began:
        return ""
    return "99%" if world.viewed() - snapshot.began > (snapshot.due - snapshot.began) / 2 else "0%"


_SNAPSHOT_FIELDS: dict[str, Field] = {
    "snapshot-id": plain("SnapshotId"),
    "volume-id": plain("VolumeId"),
    "status": plain("State"),
    "progress": plain("Progress"),
    "volume-size": plain("VolumeSize"),
    "owner-id": plain("OwnerId"),
    "description": plain("Description"),
    "start-time": plain("StartTime"),
    "encrypted": plain("Encrypted"),
}
OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "CreateSnapshot": create_snapshot,
    "DescribeSnapshots": describe_snapshots,
    "DeleteSnapshot": delete_snapshot,
}
