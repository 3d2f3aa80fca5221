"""What all machines of a run share on EFS and one of them makes: the working copy, and the environment of `setup`.

`rendezvous/copy-claim.json` in the run's store says which machine makes something now. Its claim passes to another
machine only if it is given back, or if EC2 says that no process of that machine runs any more: two machines that write
into one copy would mix two commits. `rendezvous/working-copy.json` says which copy is complete.

NFS shows a machine for up to a minute what a folder held before (nfs(5), "Directory entry caching"). So each look at
what another machine has made is preceded by a change of our own in the same folder, which drops what is cached.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spotheal.agent.aws.s3 import Store
from spotheal.agent.files.folders import Folders
from spotheal.agent.life.boot import RunOver
from spotheal.agent.nodes.heard import Heard
from spotheal.agent.nodes.meeting import Cloud
from spotheal.agent.nodes.plan import End, Machine, Seen, machine_of, still_in_one
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.ends import End as RunEnd
from spotheal.agent.protocol.errors import Interrupted, Retryable, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT, SILENT_SECONDS, Phase
from spotheal.agent.repository.checkout import source_of
from spotheal.agent.repository.working_copy import is_on_volume

LOOK_SECONDS, LOOK_SECONDS_MAX = 0.5, 10.0
TURN_SECONDS_MAX = 2 * 3600.0  # one `setup` command may take an hour


class Meeting(Protocol):
    """What of `meeting.Meeting` is needed here."""

    def look(self) -> Seen: ...

    def check_end(self) -> None: ...

    def note(self, doing: str, **more: Any) -> None: ...


class SharedCopy:
    """Seen by the machine `me`. `folders.clone` and `folders.environments` lie where all machines see them."""

    def __init__(
        self, config: InstanceConfig, folders: Folders, store: Store, cloud: Cloud, meeting: Meeting, me: str,
        clock: Clock, stop: Stop, log: Any,
    ) -> None:  # fmt: skip
        self._config, self._folders, self._store, self._cloud, self._me = config, folders, store, cloud, me
        self._meeting, self._clock, self._stop, self._log = meeting, clock, stop, log
        self._heard = Heard(clock)
        self._wanted = {"source": source_of(config), "keep": list(config.job.job.keep)}

    # ------------------------------------------------------------------------------------------------- what is complete
    def made(self) -> str | None:
        """The `made` of the copy at the run's revision, if one is complete and this machine sees that very folder."""
        document = self._store.get_json(LAYOUT.working_copy) or {}
        if any(document.get(name) != value for name, value in self._wanted.items()):
            return None
        self._look_anew()
        try:
            inode = os.lstat(self._folders.clone).st_ino
        except OSError:
            return None
        return str(document.get("made")) if inode == document.get("inode") else None

    def publish(self, token: str) -> None:
        """The copy is complete, with its kept paths: the others use it."""
        inode = os.lstat(self._folders.clone).st_ino
        self._store.put_json(LAYOUT.working_copy, {**self._wanted, "made": token, "inode": inode, "instance": self._me})

    def _look_anew(self) -> None:
        for folder in dict.fromkeys((self._folders.clone.parent, self._folders.environments)):
            with contextlib.suppress(OSError):
                marker = Path(folder, f".look-{self._me}")
                marker.mkdir(exist_ok=True)
                marker.rmdir()

    # ------------------------------------------------------------------------------------------------- who makes it now
    @contextlib.contextmanager
    def turn(self, is_made: Callable[[], bool], subject: str) -> Iterator[bool]:
        """True: this machine makes `what`, and no other does until the block ends. False: another has made it.

        Interrupted if this machine goes away; RunOver if the run has ended, or nothing is made in `TURN_SECONDS_MAX`.
        """
        if not self._wait_for_turn(is_made, subject):
            yield False
            return
        try:
            yield True
        finally:
            self._give_back()

    def _wait_for_turn(self, is_made: Callable[[], bool], subject: str) -> bool:
        wait, holder_told = self._wait(), "the store"
        while True:
            try:
                self._meeting.check_end()
                if is_made():
                    return False
                holder = self._claim()
                if holder == self._me:
                    return self._is_needed(is_made)
                if holder != holder_told:
                    holder_told = holder
                    self._log.info(f"waiting for {subject}: another machine makes it", instance=holder)
                    self._meeting.note(f"waiting for {subject}, which {holder} makes")
            except Retryable as error:
                self._log.warning(f"whether {subject} is complete cannot be asked; trying again", error=error.message)
            wait.pause(f"{subject} is not complete: {holder_told} has not made it")

    def _is_needed(self, is_made: Callable[[], bool]) -> bool:
        """Asked again under the claim: the machine before may have completed it and given its claim back meanwhile."""
        try:
            self._look_anew()
            is_needed = not is_made()
        except BaseException:
            self._give_back()
            raise
        if not is_needed:
            self._give_back()
        return is_needed

    def wait_until_unused(self) -> None:
        """Until no machine trains in the copy of another commit, which is about to be replaced."""
        wait, reason_told = self._wait(), ""
        while not is_on_volume(self._config, self._folders):
            try:
                observed = self._meeting.look()
                action = still_in_one([machine for machine in observed.machines if machine.instance != self._me])
                if action is None:
                    return
                if isinstance(action, End):
                    self._cloud.terminate(action.instance)
                elif action.why != reason_told:
                    reason_told = action.why
                    self._log.info("the working copy of another commit is still in use", why=reason_told)
            except Retryable as error:
                self._log.warning("the other machines cannot be looked for; trying again", error=error.message)
            wait.pause(f"the working copy cannot change its commit: {reason_told}")

    def _wait(self) -> _Wait:
        return _Wait(self._clock, self._stop, self._clock.monotonic() + TURN_SECONDS_MAX)

    def _claim(self) -> str:
        """The machine that has the claim now."""
        body = {"instance": self._me, "held": True}
        return str(self._store.claim(LAYOUT.copy_claim, body, self._is_free)["instance"])

    def _is_free(self, claim: Mapping[str, Any]) -> bool:
        if not claim.get("held"):
            return True
        holder = self._machine(str(claim.get("instance")))
        if holder.age > SILENT_SECONDS and holder.state == "running":
            self._log.warning("a machine that has long said nothing is ended", instance=holder.instance)
            self._cloud.terminate(holder.instance)
        return holder.has_ended

    def _give_back(self) -> None:
        """A store that is down keeps the claim: this agent has it again at its next start, and a machine that ends
        loses it."""
        body = {"instance": self._me, "held": False}
        try:
            self._store.claim(LAYOUT.copy_claim, body, lambda claim: claim.get("instance") == self._me)
        except SpothealError as error:
            self._log.warning("the claim of the working copy cannot be given back", error=error.message)

    def _machine(self, instance: str) -> Machine:
        self._heard.look()
        document = self._store.get_json(LAYOUT.node(instance)) or {}
        states = {instance_now.id: instance_now.state for instance_now in self._cloud.instances([instance])}
        return machine_of(document, self._heard.age(instance, str(document.get("time"))), states.get(instance, ""))


@dataclass
class _Wait:
    clock: Clock
    stop: Stop
    until: float
    seconds: float = LOOK_SECONDS

    def pause(self, reason: str) -> None:
        """RunOver after `until`: what waits costs, and does nothing."""
        if self.clock.monotonic() > self.until:
            raise RunOver(RunEnd(
                Phase.PARKED,
                f"{reason} in {TURN_SECONDS_MAX / 60:.0f} min; `fleetctl logs` says what it does,"
                " `fleetctl request --resume` begins again",
            ))  # fmt: skip
        if self.clock.sleep(self.seconds, until=self.stop):
            raise Interrupted("this machine goes away")
        self.seconds = min(LOOK_SECONDS_MAX, self.seconds * 1.3)
