"""What a life needs of prices, limits and messages, made in one place from its configuration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.paths import Paths
from spotheal.agent.life.world import World
from spotheal.agent.money.bill_inputs import Disk
from spotheal.agent.money.billing import about
from spotheal.agent.money.budget import Budget, Cloud, Prices
from spotheal.agent.money.limits import Limits
from spotheal.agent.money.messages import end_message
from spotheal.agent.money.notify import Message, Messenger
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.ends import End, saved_step
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.metrics_shipping import Curves


@dataclass(frozen=True)
class Money:
    """Of one life on one instance."""

    config: InstanceConfig
    prices: Prices
    budget: Budget
    messenger: Messenger
    ledger: Ledger
    store: Store
    here: Identity
    clock: Clock
    log: Any

    @classmethod
    def of(
        cls, config: InstanceConfig, world: World, store: Store, cloud: Cloud, ledger: Ledger, identity: Identity
    ) -> Money:
        clock, log, job = world.clock, world.logs.log, config.job
        disk = Disk(job.volume.size_gib, job.volume.type)
        limit = Decimal(str(job.limits.dollars))
        return cls(
            config=config,
            prices=Prices(cloud, world.metadata, store, ledger, identity, clock, log),
            budget=Budget(limit, store, ledger, identity, clock, log, config.requested_at, disk),
            messenger=Messenger(
                job.notify,
                store,
                clock,
                log,
                {"job": job.job.name, "run": config.run, "store": str(config.store)},
                world.sns,
            ),
            ledger=ledger,
            store=store,
            here=identity,
            clock=clock,
            log=log,
        )

    def boot_fields(self, paths: Paths) -> dict[str, Any]:
        """What the boot's event says beside the type: since when it costs, and its root disk, which costs too."""
        root = _gib(Path("/"), "total") if paths.is_whole_machine else None
        return {"launched": self.here.launched or None, "root_gib": root}

    def note_predecessor(self, status: Mapping[str, Any]) -> None:
        """Until when the one before was heard of, and how far it was: it may have died without a word."""
        before, heard = str(status.get("instance") or ""), status.get("heartbeat")
        if before and before != self.here.instance and heard:
            step = (status.get("progress") or {}).get("step")
            self.ledger.note("predecessor", predecessor=before, heard=heard, last_step=step)

    def limits(self, tell: Callable[[Message], None]) -> Limits:
        limits = self.config.job.limits
        return Limits(limits.hours, limits.dollars, self.config.requested_at, self.budget, self.clock, self.log, tell)

    def curves(self, metrics_file: Path) -> Curves:
        return Curves(self.store, self.clock, self.here.instance, metrics_file)

    def end_message(self, end: End, status: Mapping[str, Any]) -> Message:
        step = (status.get("progress") or {}).get("step")
        facts = {"job": self.config.job.job.name, "step": step, "saved_step": saved_step(status)}
        try:
            spent, _ = self.budget.spent()
            cost = f"{about(spent)} since the request"
        except SpothealError:
            cost = ""
        return end_message(end, self.config.requested_at, facts, cost)


def used_gib(folder: Path) -> int | None:
    """GiB that are used on the volume mounted there, rounded up; None where none is."""
    return _gib(folder, "used") if os.path.ismount(folder) else None


def _gib(folder: Path, folder_name: str) -> int | None:
    try:
        return -(-int(getattr(shutil.disk_usage(folder), folder_name)) // (1 << 30))
    except OSError:
        return None
