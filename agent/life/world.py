"""What a life is given: everything that touches the world, so that a test can put its own in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotheal.agent.aws import clients
from spotheal.agent.aws.imds import Metadata
from spotheal.agent.files.paths import Paths
from spotheal.agent.machine.host import Host
from spotheal.agent.machine.systemd_notify import Notifier
from spotheal.agent.money.notify import topic_region
from spotheal.agent.protocol.clock import Clock, SystemClock
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.record.logs import Logs
from spotheal.agent.record.watchdog import Liveness


@dataclass(frozen=True)
class World:
    """boto3 clients, the machine, the clock, and SIGTERM."""

    clock: Clock
    paths: Paths
    host: Host
    metadata: Metadata
    logs: Logs
    ec2: Any  # boto3 clients
    s3: Any
    scheduler: Any = None  # where the run has an on-demand rescue
    sns: Any = None  # where [notify] names a topic
    asked_to_stop: threading.Event = field(default_factory=threading.Event)  # SIGTERM
    liveness: Liveness = field(default_factory=lambda: Liveness(SystemClock(), Notifier()))  # told to systemd
    client: Callable[[str], Any] | None = None  # of ssm, secretsmanager and sts; None: boto3's

    @classmethod
    def real(cls, config: InstanceConfig) -> World:
        clock, paths = SystemClock(), Paths.from_environment()
        ec2, s3 = clients.client("ec2", config.region), clients.client("s3", config.region)
        liveness = Liveness(clock, Notifier.from_environment())
        rescued = seconds(config.job.fleet.on_demand_after)
        scheduler = clients.client("scheduler", config.region) if rescued else None
        logs = Logs(paths.logs, console=Path("/dev/console") if paths.is_whole_machine else None)
        topic = config.job.notify.sns
        sns = clients.client("sns", topic_region(topic) or config.region) if topic else None
        return cls(clock, paths, Host(), Metadata(clock=clock), logs, ec2, s3, scheduler, sns, liveness=liveness)

    def power_off(self) -> None:
        """Unless somebody asks the agent to stop: that machine goes down already, or a person is at work on it."""
        if self.paths.is_whole_machine and not self.asked_to_stop.is_set():
            self.host.power_off()
