"""One start of the agent on one machine: who the machine is, the launch that is counted, and the run's records."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from spotheal.agent.aws import clients
from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.life.spending import Money
from spotheal.agent.life.world import World
from spotheal.agent.machine.efs import Efs
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Fatal, NoCredentials, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import EfsUrl, Phase
from spotheal.agent.record.boot_record import Launch
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.status import Status

P = ParamSpec("P")


def ends_the_run(stage: Callable[P, End]) -> Callable[P, End]:
    """A permanent fault in a stage is an end of the run: set-up failed, unless the fault itself names another end."""

    @functools.wraps(stage)
    def run(*args: P.args, **kwargs: P.kwargs) -> End:
        try:
            return stage(*args, **kwargs)
        except RunOver as over:
            return over.end
        except NoCredentials:
            raise
        except Fatal as error:
            return End(Phase.SETUP_FAILED, str(error))

    return run


class RunOver(SpothealError):
    """A stage found that the run is over."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


@dataclass
class Boot:
    """`stop`: this machine goes away, and every wait ends. `closing`: the agent ends. `refused`: why the launch could
    not be counted. `over`: the store says how the run ended."""

    config: InstanceConfig
    world: World
    store: Store
    cloud: Ec2
    here: Identity
    launch: Launch
    ledger: Ledger
    money: Money
    status: Status
    stop: threading.Event
    closing: threading.Event
    refused: Fatal | None
    over: bool = False
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "stage"))

    @classmethod
    def register(cls, config: InstanceConfig, world: World) -> Boot:
        """Asks who this machine is, counts its launch, and notes the boot. Raises NoCredentials."""
        log, clock, job = world.logs.log, world.clock, config.job.job.name
        store, cloud = Store(world.s3, config.store), Ec2(world.ec2, job)
        identity = world.metadata.identity(progress=lambda why: log.warning(why))
        world.logs.bind(instance=identity.instance, zone=identity.zone)
        log.info("this instance", type=identity.instance_type, image=identity.image)
        refused: Fatal | None = None
        try:
            launch = Launch.count(store, identity, clock, config.requested_at)
        except NoCredentials:
            raise
        except Fatal as error:  # an end like any other, so that the fleet is cancelled and does not try for ever
            launch, refused = Launch(store, identity, {"starts": 1}), error
        ledger = Ledger(store, clock, identity.instance, identity.zone)
        money = Money.of(config, world, store, cloud, ledger, identity)
        ledger.note("boot", instance_type=identity.instance_type, **money.boot_fields(world.paths))
        status = Status(
            store, clock, log, job=job, run=config.run, revision=config.revision,
            instance=identity.instance, instance_type=identity.instance_type, zone=identity.zone,
        )  # fmt: skip
        stop, closing = threading.Event(), threading.Event()
        return cls(config, world, store, cloud, identity, launch, ledger, money, status, stop, closing, refused)

    @property
    def clock(self) -> Clock:
        return self.world.clock

    @property
    def log(self) -> Any:
        return self.world.logs.log

    def client(self, service: str) -> Any:
        """A boto3 client."""
        return self.world.client(service) if self.world.client else clients.client(service, self.config.region)

    def efs(self, place: EfsUrl) -> Efs:
        world = self.world
        return Efs(
            place, region=self.config.region, zone=self.here.zone, root=world.paths.root, host=world.host,
            client=lambda: self.client("efs"), clock=self.clock, stop=self.stop, log=self.log,
            for_trainer=self.config.job.on_machines,
        )  # fmt: skip

    def beside(self, name: str, work: Callable[[], object]) -> None:
        """Runs `work` in a thread of its own."""
        threading.Thread(target=work, name=name, daemon=True).start()

    def on_term(self, term: int) -> None:
        """This machine writes the run's records from now on. Raises RunOver if the run has ended meanwhile."""
        self.world.logs.bind(term=term)
        self.ledger.term = term
        self.status.update(term=term)
        if self.status.stands is not None:  # it ended while we waited for our turn
            self.over = True
            raise RunOver(End(*self.status.stands))
