"""One machine's part in the meetings of a run's machines: what it says of itself, and how it finds the others.

`nodes/<instance>.json` is what each says of itself, and its heartbeat; `terms/<n>` and `rendezvous/<n>.json` say who
hosts the n-th rendezvous, and where. What is decided about them is in `plan`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spotheal.agent.aws.ec2 import Instance
from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.life.boot import RunOver
from spotheal.agent.money.bill_inputs import Known
from spotheal.agent.nodes.heard import Heard, age_of
from spotheal.agent.nodes.plan import (
    BEAT_SECONDS,
    FRESH_SECONDS,
    ClaimTerm,
    End,
    Join,
    Place,
    Seen,
    Wait,
    decide,
    machine_of,
    place_of,
)
from spotheal.agent.protocol.clock import Clock, Stop, rfc3339
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.ends import End as RunEnd
from spotheal.agent.protocol.errors import Interrupted, Retryable, SetupFailed, SpothealError
from spotheal.agent.protocol.names import LAYOUT, Phase

LOOK_SECONDS, LOOK_SECONDS_MAX = 1.0, 5.0
_ENDS = {phase.value: phase for phase in Phase if phase.is_end}


class Cloud(Protocol):
    """What of `ec2.Ec2` a meeting needs."""

    def instances(self, instances: Iterable[str]) -> tuple[Instance, ...]: ...

    def terminate(self, instance: str) -> None: ...


@dataclass(frozen=True)
class Timing:
    """Of torchrun's rendezvous, in seconds. A machine is lost after `keep_alive` times `missed` without a heartbeat."""

    join: int = 180
    last_call: int = 10
    keep_alive: int = 5
    missed: int = 5
    read: int = 60


@dataclass(frozen=True)
class Rendezvous:
    """The one to go to. `hosts`: this machine serves torchrun's store."""

    run: str
    place: Place
    address: str  # ours
    hosts: bool
    least: int
    most: int
    timing: Timing = Timing()

    def options(self) -> list[str]:
        """torchrun's."""
        t = self.timing
        settings = {
            "is_host": int(self.hosts), "join_timeout": t.join, "last_call_timeout": t.last_call,
            "keep_alive_interval": t.keep_alive, "keep_alive_max_attempt": t.missed, "read_timeout": t.read,
        }  # fmt: skip
        return [
            f"--nnodes={self.least}:{self.most}",
            "--rdzv_backend=c10d",
            f"--rdzv_id={self.run}-{self.place.term}",
            f"--rdzv_endpoint={self.place.address}:{self.place.port}",
            f"--local_addr={self.address}",
            "--rdzv_conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
        ]


class Meeting:
    """`on_term` is told each term that this machine has claimed, with its rendezvous; it may raise RunOver.

    `meet` and `leave` from one thread, `beat` from any. `leads`: this machine holds its rendezvous' term.
    """

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        clock: Clock,
        log: Any,
        identity: Identity,
        *,
        run: str,
        machines: tuple[int, int],
        wait_seconds: float,
        on_term: Callable[[int], None] = lambda term: None,
        timing: Timing | None = None,
    ) -> None:
        self._store, self._cloud, self._clock, self._log, self._here = store, cloud, clock, log, identity
        self._run, (self._least, self._most), self._wait_seconds = run, machines, wait_seconds
        self._on_term, self._timing = on_term, timing or Timing()
        self._lock = threading.Lock()
        self._heard = Heard(clock)
        self._last = 0  # term of the rendezvous that this machine was in last
        self._says: dict[str, Any] = {"term": None, "leads": False, "leaving": False, "doing": "booting"}

    @property
    def leads(self) -> bool:
        return bool(self._says["leads"])

    @property
    def term(self) -> int | None:
        term: int | None = self._says["term"]
        return term

    # ------------------------------------------------------------------------------------------- what it says of itself
    def beat(self) -> None:
        """Say again that this machine is here; a store that is down hears it the next time."""
        with contextlib.suppress(SpothealError):
            self._say()

    def beat_until(self, over: Stop) -> None:
        while not self._clock.sleep(BEAT_SECONDS, until=over):
            self.beat()

    def leave(self) -> None:
        """This machine goes away: its ranks have ended, and it comes to no rendezvous any more."""
        with contextlib.suppress(SpothealError):
            self._say(term=None, leads=False, leaving=True, doing="leaving")

    def note(self, doing: str, **more: Any) -> None:
        with contextlib.suppress(SpothealError):
            self._say(doing=doing, **more)

    def check_user(self, uid: int) -> None:
        """SetupFailed where the trainer's user has another number on a machine that is here: what lies on EFS belongs
        to numbers, and each machine would take the others' files from them."""
        try:
            documents = self._others()
        except Retryable as error:
            self._log.warning("the other machines cannot be looked for now", error=error.message)
            return
        for name, document in documents.items():
            theirs = document.get("uid")
            fresh = age_of(self._clock.now(), str(document.get("time"))) <= FRESH_SECONDS and not document.get(
                "leaving"
            )
            if fresh and isinstance(theirs, int) and theirs != uid:
                raise SetupFailed(
                    f"the trainer's user has the number {uid} here and {theirs} on {name}: they share files on EFS",
                    next_step="use one ImageId in all launch specifications of a run on several machines",
                )

    def _others(self) -> dict[str, dict[str, Any]]:
        documents = [document for key in self._store.keys(LAYOUT.nodes) if (document := self._store.get_json(key))]
        return {
            str(document.get("instance")): document
            for document in documents
            if document.get("instance") != self._here.instance
        }

    def _say(self, **fields: Any) -> None:
        with self._lock:
            self._says |= fields
            self._last = self._says["term"] or self._last
            identity = self._here
            self._store.put_json(LAYOUT.node(identity.instance), {
                "instance": identity.instance, "address": identity.address, "zone": identity.zone,
                "instance_type": identity.instance_type, **self._says, "time": rfc3339(self._clock.now()),
            })  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- meeting
    def meet(self, stop: Stop) -> Rendezvous | None:
        """The rendezvous to go to; None where `stop` is set. RunOver: the run has ended, or too few machines come.

        Whatever rendezvous this machine was in it has left: its ranks have ended.
        """
        few_since: float | None = None
        reason_told, pause = "", LOOK_SECONDS
        left = False
        while not stop.is_set():
            try:
                if not left:
                    self._say(term=None, leads=False, leaving=False)
                    left = True
                self.check_end()
                action = decide(self.look())
                if isinstance(action, Wait):
                    if action.why != reason_told:
                        reason_told = action.why
                        self._log.info("waiting for the other machines", why=reason_told)
                        self._say(doing=f"waiting: {reason_told}")
                    few_since = self._patience(action, few_since)
                elif (meeting_end := self._act(action)) is not None:
                    return meeting_end
                else:
                    pause = LOOK_SECONDS
            except Retryable as error:
                self._log.warning("the other machines cannot be looked for; trying again", error=error.message)
            self._clock.sleep(pause, until=stop)
            pause = min(LOOK_SECONDS_MAX, pause * 1.3)
        return None

    def check_end(self) -> None:
        """RunOver where the store has an end of the run."""
        status = self._store.read_status() or {}
        phase = _ENDS.get(str(status.get("phase")))
        if phase is not None:
            raise RunOver(RunEnd(phase, str(status.get("reason") or "")))

    def recorded_end(self, seconds_max: float, stop: Stop) -> RunEnd | None:
        """The end that another machine has recorded, or records within `seconds_max`; None: it is ours to record.

        Of machines that come to the end at the same moment one claims it; another only where that one is gone.
        Interrupted where `stop` is set meanwhile.
        """
        until, going = self._clock.monotonic() + seconds_max, False
        while True:
            try:
                self.check_end()
                if not going and self._claims_end():
                    return None
            except RunOver as over:
                return over.end
            except SpothealError as error:
                self._log.warning("who records the end is not known yet", error=error.message)
            if going:
                raise Interrupted("this machine goes away, and another records the end of the run")
            if self._clock.monotonic() > until:
                return None
            going = self._clock.sleep(LOOK_SECONDS, until=stop)  # that one may have cancelled our fleet

    def _claims_end(self) -> bool:
        me = self._here.instance

        def is_gone(document: Mapping[str, Any]) -> bool:
            instances = self._cloud.instances([str(document["instance"])])
            return str(document["instance"]) != me and not any(
                instance.state in ("pending", "running") for instance in instances
            )

        body = {"instance": me, "rendezvous": self._last}
        return bool(self._store.claim(LAYOUT.end_claim, body, is_gone)["instance"] == me)

    def look(self) -> Seen:
        """What the store and EC2 say of the run's machines now."""
        claim = self._store.highest_term()
        me = self._here.instance
        self._heard.look()
        documents = [document for key in self._store.keys(LAYOUT.nodes) if (document := self._store.get_json(key))]
        ages = {str(document.get("instance")): self._heard.age(str(document.get("instance")), str(document.get("time")))
                for document in documents}  # fmt: skip
        names = {str(document.get("instance")) for document in documents if document.get("term") is not None}
        names |= {claim.instance} if claim is not None else set()
        names -= {me}
        states = {instance.id: instance.state for instance in self._cloud.instances(names)} if names else {}
        machines = []
        for document in documents:
            name = str(document.get("instance"))
            machines.append(machine_of(document, ages[name], states.get(name, "") if name in names else None))
        if claim is None:
            return Seen(me, tuple(machines), self._least)
        place = place_of(self._store.get_json(LAYOUT.rendezvous(claim.number)), claim.number)
        age = self._heard.watched(f"term {claim.number}")
        return Seen(me, tuple(machines), self._least, claim.number, claim.instance, age, place)

    def known(self) -> Mapping[str, Known]:
        """What the others' documents tell a bill: who lives beside us, and who does not. SpothealError."""
        time = self._clock.now()
        return {
            name: Known(
                alive=True if age_of(time, str(document.get("time"))) <= FRESH_SECONDS else None,
                instance_type=str(document.get("instance_type") or ""),
                zone=str(document.get("zone") or ""),
            )
            for name, document in self._others().items()
        }

    def _act(self, action: Join | ClaimTerm | End) -> Rendezvous | None:
        match action:
            case Join(place):
                return self._join(place)
            case ClaimTerm(term):
                return self._claim(term)
            case End(instance):
                self._log.warning("a machine that has long said nothing is ended", instance=instance)
                self._cloud.terminate(instance)
                return None

    def _join(self, place: Place) -> Rendezvous | None:
        self._say(term=place.term, leads=False, doing="training")
        claim = self._store.highest_term()
        if claim is None or claim.number != place.term:  # it ended while we came
            self._say(term=None)
            return None
        self._log.info("joining the others", rendezvous=place.term, host=place.instance)
        return self._rendezvous(place, hosts=False)

    def _claim(self, term: int) -> Rendezvous | None:
        identity = self._here
        if not self._store.claim_term(Claim(term, identity.instance, identity.zone, rfc3339(self._clock.now()))):
            return None
        highest = self._store.highest_term()
        if highest is None or highest.number != term:
            return None
        place = Place(term, identity.instance, identity.address, free_port(identity.address))
        self._say(term=term, leads=True, doing="training")
        document = {"instance": place.instance, "address": place.address, "port": place.port}
        self._store.put_json(LAYOUT.rendezvous(term), {**document, "time": rfc3339(self._clock.now())})
        self._log.info("the others meet here", rendezvous=term, address=place.address, port=place.port)
        self._on_term(term)
        return self._rendezvous(place, hosts=True)

    def _rendezvous(self, place: Place, hosts: bool) -> Rendezvous:
        return Rendezvous(self._run, place, self._here.address, hosts, self._least, self._most, self._timing)

    def _patience(self, wait: Wait, since: float | None) -> float | None:
        """Since when there are too few. RunOver once that is too long: what is here costs, and does nothing."""
        if not wait.few:
            return None
        moment = self._clock.monotonic()
        since = moment if since is None else since
        if moment - since > self._wait_seconds:
            raise RunOver(RunEnd(
                Phase.PARKED,
                f"{wait.why}, and no more came within {self._wait_seconds / 60:.0f} min (nodes_wait in job.toml)",
            ))  # fmt: skip
        return since


def free_port(address: str) -> int:
    """A port on which nothing listens now. Interrupted where the address is not this machine's."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise Interrupted(f"{address} is not an address of this machine: {error.strerror}") from error
        return int(probe.getsockname()[1])
