"""The entry of a container of AWS Batch: wiring only. What it does is in `child`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from spotheal.agent.aws import clients
from spotheal.agent.aws.imds import Metadata
from spotheal.agent.batch.child import Child
from spotheal.agent.batch.place import place, read_config
from spotheal.agent.files.paths import Paths
from spotheal.agent.life.world import World
from spotheal.agent.machine.host import Host
from spotheal.agent.money.notify import topic_region
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.record.logs import Logs


class ContainerLogs(Logs):
    """The trainer's lines go to standard output too, which Batch sends to CloudWatch Logs."""

    def trainer_line(self, line: str) -> None:
        super().trainer_line(line)
        try:
            print(line, file=sys.stdout, flush=True)
        except (OSError, ValueError):
            return  # a log driver that is gone ends no training


def run_container() -> int:
    """The exit code of the container; SpothealError where it does not come to its own."""
    container_place = place(os.environ)
    region = os.environ.get("AWS_REGION", "")
    if not region:
        raise ConfigError("AWS_REGION is not set", next_step="the job definition of `fleetctl batch create` sets it")
    paths = Paths.from_environment()
    if paths.is_whole_machine:
        raise ConfigError("SPOTHEAL_ROOT is not set: a container is no whole machine",
                          next_step="the image that `fleetctl batch image push` builds sets it")  # fmt: skip
    config = read_config(clients.client("s3", region), container_place)
    with Child(config, _world(config, paths), container_place) as child:
        return child.live()


def _world(config: InstanceConfig, paths: Paths) -> World:
    clock, topic = SystemClock(), config.job.notify.sns
    sns = clients.client("sns", topic_region(topic) or config.region) if topic else None
    s3, logs = clients.client("s3", config.region), ContainerLogs(paths.logs)
    world = World(clock, paths, Host(), Metadata(clock=clock), logs, ec2=None, s3=s3, sns=sns)

    def terminated(_: int, __: FrameType | None) -> None:
        world.asked_to_stop.set()

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, terminated)
    return world
