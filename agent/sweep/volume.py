"""The volume of one run of a sweep: made when the run is taken, deleted when its results are stored."""

from __future__ import annotations

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import NotFound, Retryable, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT, TAG_STATE, VolumeState
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.agent.volume.first import first_volume

DELETE_SECONDS_MAX = 300.0
_LOOK_SECONDS = 2.0
_NOT_NEEDED = VolumeState.SUPERSEDED.value


def make(cloud: Ec2, store: Store, config: InstanceConfig, zone: str) -> None:
    """Make the run's volume unless it was made before. `store` is the run's own prefix.

    The zone and so the client token are settled in the store first: whoever goes on after a crash makes the same call,
    and AWS answers with the same volume. Once its id is stored it is never made again, whatever the describes say.
    """
    if cloud.volumes_of_run(config.run):
        return
    settled = store.claim(LAYOUT.first_volume, {"zone": zone, "volume": None}, lambda _: False)
    if settled.get("volume"):
        return
    spec = first_volume(config.job, config.run, str(settled["zone"]))
    volume = cloud.create_volume(spec)
    store.put_json(LAYOUT.first_volume, {**settled, "volume": volume.id})


def delete(cloud: Ec2, config: InstanceConfig, instance: str, clock: Clock) -> str:
    """Detach and delete what the run has of volumes and snapshots; returns "" or why something is left.

    Also under a notice: it takes seconds, and nobody else would do it.
    """

    def once() -> None:
        all_volumes = cloud.volumes_of_run(config.run)
        volumes = [volume for volume in all_volumes if volume.state not in ("deleting", "deleted")]
        # The role may delete only what bears this mark; the volume of a run that is done bears another.
        if unmarked := [volume.id for volume in volumes if volume.tags.get(TAG_STATE) != _NOT_NEEDED]:
            cloud.tag(unmarked, {TAG_STATE: _NOT_NEEDED})
        for volume in volumes:
            if any(attachment.instance == instance for attachment in volume.attachments):
                cloud.detach(volume.id, instance)
            elif not volume.attachments:
                cloud.delete_volume(volume.id)
        if volumes:
            raise Retryable(f"{', '.join(volume.id for volume in volumes)} cannot be deleted yet")
        for snapshot in cloud.snapshots_of_run(config.run):
            cloud.delete_snapshot(snapshot.id)

    try:
        # A describe may still show what is gone.
        passes = (Retryable, NotFound)
        until_it_works(once, clock, pause=_LOOK_SECONDS, seconds_max=DELETE_SECONDS_MAX, passes=passes)
    except SpothealError as error:
        return error.message
    return ""
