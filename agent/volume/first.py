"""The first volume of a run: what `request` makes for a job, and an instance for an entry of a sweep. Pure."""

from __future__ import annotations

from spotheal.agent.aws.ec2 import VolumeSpec
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import TAG_JOB, TAG_NAME, TAG_RUN, TAG_STATE, TAG_TERM, VolumeState, volume_token


def first_volume(job: JobConfig, run: str, zone: str) -> VolumeSpec:
    """Empty and encrypted, or from `[volume] snapshot`. Only one that is made empty is `new`: nothing else is ever
    formatted."""
    snapshot = job.volume.snapshot
    state = VolumeState.CURRENT if snapshot else VolumeState.NEW
    tags = {TAG_JOB: job.job.name, TAG_RUN: run, TAG_TERM: "0", TAG_STATE: state.value, TAG_NAME: job.volume.name}
    return VolumeSpec(
        zone=zone,
        size_gib=job.volume.size_gib,
        type=job.volume.type,
        snapshot=snapshot or None,
        tags=tags,
        encrypted=not snapshot or bool(job.volume.kms_key),
        kms_key=job.volume.kms_key or None,
        initialization_rate=job.volume.initialization_rate if snapshot else 0,
        token=volume_token(run, 0, zone, snapshot, 1),
    )
