"""EC2's rules for the rehearsal and for the simulations: one account, one region, a clock that is passed in.

`Rulebook.call(operation, params, caller)` takes and gives what boto3 takes and gives, and raises `ApiError`.
Time-driven changes happen at each call and at `tick()`; who owns a virtual clock asks `next_event_time()` where to go.
The verbs below `call` are the scenario's and no API: what AWS does to a spot instance.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from spotheal.agent.protocol.clock import Clock
from spotheal.fleet.rehearsal.ec2 import (
    ebs,
    ec2fleets,
    fleets,
    images,
    instances,
    snapshots,
    spotmarket,
    tags,
    templates,
)
from spotheal.fleet.rehearsal.ec2.faults import Faults, ReplyLost
from spotheal.fleet.rehearsal.ec2.world import (
    ApiError,
    Fleet,
    FleetEvent,
    Hooks,
    Instance,
    Latencies,
    Snapshot,
    SpotRequest,
    Volume,
    World,
)

__all__ = ["ApiError", "Call", "Faults", "Hooks", "Latencies", "ReplyLost", "Rulebook"]

OPERATIONS: dict[str, Callable[[World, Mapping[str, Any], str | None], dict[str, Any]]] = {
    **ebs.OPERATIONS,
    **snapshots.OPERATIONS,
    **spotmarket.OPERATIONS,
    **images.OPERATIONS,
    **instances.OPERATIONS,
    **tags.OPERATIONS,
    **templates.OPERATIONS,
    **fleets.OPERATIONS,
    **ec2fleets.OPERATIONS,
}


@dataclass(frozen=True)
class Call:
    """One call, for the figures: `outcome` is ok, an error code, or ReplyLost."""

    operation: str
    caller: str | None
    time: datetime
    moment: float
    outcome: str


class Rulebook:
    """See the module. `caller` is an instance id, or None for the operator; calls may come from several threads."""

    def __init__(
        self,
        clock: Clock,
        region: str = "us-west-2",
        zones: Sequence[str] = ("us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"),
        account: str = "123456789012",
        latencies: Latencies | None = None,
        seed: int = 0,
        faults: Faults | None = None,
        hooks: Hooks | None = None,
        page_size: int = 1000,
    ) -> None:
        self.world = World(clock, region, tuple(zones), account, latencies or Latencies(), seed)
        self.world.faults = faults or self.world.faults
        self.world.hooks = hooks or self.world.hooks
        self.world.page_size = page_size
        self.world.after_each = lambda: fleets.settle(self.world)
        self.calls: list[Call] = []
        # (operation, parameters, caller) -> what AWS says to a caller who may not, "" to one who may.
        self.authorize: Callable[[str, Mapping[str, Any], str | None], str] = lambda operation, params, caller: ""
        self.consoles: dict[str, Callable[[], str]] = {}  # instance -> its console's text, for GetConsoleOutput
        self._lock = threading.RLock()
        self._telling = threading.RLock()
        self._is_telling = False

    @property
    def faults(self) -> Faults:
        return self.world.faults

    @property
    def hooks(self) -> Hooks:
        return self.world.hooks

    @property
    def region(self) -> str:
        return self.world.region

    @property
    def zones(self) -> tuple[str, ...]:
        return self.world.zones

    @property
    def account(self) -> str:
        return self.world.account

    # ---------------------------------------------------------------------------------------------------------- the API
    def call(self, operation: str, params: Mapping[str, Any], caller: str | None = None) -> dict[str, Any]:
        """AWS's answer; raises ApiError, or ReplyLost after the call had its effect."""
        with self.inside():
            outcome = "ok"
            try:
                return self._answer(operation, params, caller)
            except ApiError as error:
                outcome = error.code
                raise
            except ReplyLost:
                outcome = "ReplyLost"
                raise
            finally:
                self.calls.append(Call(operation, caller, self.world.now(), self.world.moment(), outcome))

    def _answer(self, operation: str, params: Mapping[str, Any], caller: str | None) -> dict[str, Any]:
        world, faults = self.world, self.world.faults
        handler = OPERATIONS.get(operation) or (self._console_output if operation == "GetConsoleOutput" else None)
        if handler is None:
            raise ApiError("InvalidAction", f"The action {operation} is not valid for this web service.")
        if faults.throttled(operation):
            raise ApiError("RequestLimitExceeded", "Request limit exceeded.", 503)
        if refused := self.authorize(operation, params, caller):
            raise ApiError("UnauthorizedOperation", refused, 403)
        if planned := faults.planned_for(operation, after_effect=False):
            raise ApiError(planned.code, planned.message, planned.status)
        if params.get("DryRun"):
            raise ApiError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
        world.lag = faults.lag(describes=operation.startswith("Describe"))
        try:
            answer = handler(world, params, caller)
        finally:
            world.lag = 0.0
        if planned := faults.planned_for(operation, after_effect=True):
            if planned.code:
                raise ApiError(planned.code, planned.message, planned.status)
            raise ReplyLost(operation)
        if faults.reply_is_lost(operation):
            raise ReplyLost(operation)
        return answer

    def _console_output(self, world: World, params: Mapping[str, Any], caller: str | None) -> dict[str, Any]:
        instance = world.instance(params["InstanceId"])
        text = self.consoles[instance.id]() if instance.id in self.consoles else ""
        encoded = base64.b64encode(text.encode()[-65536:]).decode()
        return {"InstanceId": instance.id, "Output": encoded, "Timestamp": world.now()}

    @staticmethod
    def owns(operation: str) -> bool:
        """Whether the rule book answers this operation (else moto does)."""
        return operation in OPERATIONS or operation == "GetConsoleOutput"

    # ------------------------------------------------------------------------------------------------------------- time
    def tick(self) -> None:
        """Let everything happen that is due."""
        with self.inside():
            pass

    def next_event_time(self) -> float | None:
        """Monotonic time of the next change that comes by itself, or None."""
        with self._lock:
            return self.world.next_event_time()

    @contextmanager
    def inside(self) -> Iterator[World]:
        """The lock, with time up to date; then the hooks, which may call the rule book themselves."""
        try:
            with self._lock:
                self._settle()
                yield self.world
                self._settle()  # what takes no time has happened before the answer
        finally:
            self._tell()

    def _settle(self) -> None:
        self.world.tick()
        fleets.settle(self.world)
        self.world.tick()

    def _tell(self) -> None:
        with self._telling:
            if self._is_telling:  # a hook called us: its caller goes on with what it added
                return
            self._is_telling = True
            try:
                while self.world.told:
                    with self._lock:
                        hook = self.world.told.popleft()
                    hook()
            finally:
                self._is_telling = False

    # ----------------------------------------------------------------------------------------------------- the scenario
    def interrupt(self, instance: str, action: str = "terminate", lead: float | None = None) -> None:
        """The interruption notice now, its consequence in `lead` seconds; the fleet begins to replace at once."""
        with self.inside() as world:
            lead = world.latencies.notice if lead is None else lead
            instances.give_notice(world, instance, action, lead)

    def withdraw_notice(self, instance: str) -> None:
        """The notice disappears and nothing comes of it. The replacement that was begun stays."""
        with self.inside() as world:
            record = world.instances[instance]
            world.instances.put(replace(record, notice=None))

    def kill(self, instance: str) -> None:
        """Terminated by spot without a notice: the power is cut now."""
        with self.inside() as world:
            instances.cut(world, instance, instances.BY_SPOT)

    def rebalance(self, instance: str) -> None:
        """A rebalance recommendation; nothing else happens."""
        with self.inside() as world:
            world.instances.put(replace(world.instances[instance], rebalance=world.now().replace(microsecond=0)))

    def powered_off(self, instance: str) -> None:
        """The instance's operating system shut down by itself."""
        with self.inside() as world:
            instances.switched_off(world, instance)

    def no_capacity(self, zones: Sequence[str], seconds: float) -> None:
        """No spot instance can be launched in these zones for so long; on-demand instances can."""
        with self.inside() as world:
            for zone in zones or world.zones:
                world.no_capacity_until[zone] = world.moment() + seconds

    def limit_instances(self, limit: int | None) -> None:
        """The account's quota of instances; None lifts it."""
        with self.inside() as world:
            world.instances_max = limit

    def refuse_launches(self, name: str, message: str) -> None:
        """Fleets cannot launch with this image or instance profile; the history says `message`."""
        with self.inside() as world:
            world.unusable[name] = message

    def pin_next_zone(self, *zones: str) -> None:
        """The next launches of fleets go to these zones, one after the other, where the fleet may use them."""
        with self.inside() as world:
            world.next_zones.extend(zones)

    # --------------------------------------------------------------------------------------------------- looking inside
    def instance(self, instance: str) -> Instance | None:
        """As it is now, without any staleness: for hosts, IMDS and figures."""
        with self.inside() as world:
            return world.instances.get(instance)

    def instances(self) -> list[Instance]:
        with self.inside() as world:
            return world.instances.all()

    def volumes(self) -> list[Volume]:
        with self.inside() as world:
            return world.volumes.all()

    def volume(self, volume: str) -> Volume | None:
        with self.inside() as world:
            return world.volumes.get(volume)

    def snapshots(self) -> list[Snapshot]:
        with self.inside() as world:
            return world.snapshots.all()

    def fleets(self) -> list[Fleet]:
        with self.inside() as world:
            return world.fleets.all()

    def spot_requests(self) -> list[SpotRequest]:
        with self.inside() as world:
            return world.requests.all()

    def history(self, fleet: str) -> list[FleetEvent]:
        with self.inside() as world:
            return list(world.history.get(fleet, []))

    def attached(self, instance: str) -> list[tuple[str, str, str]]:
        """(volume, device, state) of what is attached to `instance`."""
        with self.inside() as world:
            pairs = [(state.id, state.attachment) for state in ebs.attached_to(world, instance)]
            return [(volume, state.device, state.state) for volume, state in pairs if state is not None]

    def zone_moves(self) -> int:
        """Terms under which an instance made its volume from a snapshot. The ledger is no witness of it: a machine that
        is killed may not have written there."""
        with self.inside() as world:
            return len(ebs.terms_of_copies(world))

    def counts(self) -> dict[str, int]:
        """Calls by operation."""
        return dict(Counter(call.operation for call in list(self.calls)))

    # ------------------------------------------------------------------------------------------------------ credentials
    @staticmethod
    def key_of(instance: str) -> str:
        """Access key id of the credentials that this instance gets from its IMDS."""
        return "ASIA" + base64.b32encode(hashlib.sha256(instance.encode()).digest())[:16].decode()

    def caller_of(self, key: str) -> str | None:
        """The instance that has this access key id, or None: an operator."""
        if not key.startswith("ASIA"):
            return None
        return next((record.id for record in self.instances() if self.key_of(record.id) == key), None)
