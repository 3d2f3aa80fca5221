"""One start of the agent on a machine of the second witness, as `agent.life.Life` goes: heal, train, hand over."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from second_ec2 import Data
from second_machine import Log, Machine
from second_time import Flag, Killed, Process

from spotheal.agent.aws.s3 import Store
from spotheal.agent.interruption.handover import HandoverResult, Steps, hand_over
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import Fatal, Interrupted, SpothealError
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.heal import Held, heal, left_behind
from spotheal.agent.volume.release import create_base, create_handover, detach, leave
from spotheal.agent.volume.retention import clean_up
from spotheal.agent.volume.seen import Desired

if TYPE_CHECKING:
    from second_world import World

RUN, JOB, FLEET = "01KAJ00000000000000000000A", "resnet", "sfr-1"
MOUNT = "/dltraining"
SAVES_AT_LEAST = 40  # of the last machine, before it is done


@dataclass
class Life:
    """`saved`: the step that the trainer saved last under this start."""

    world: World
    machine: Machine
    process: Process
    held: Held | None = None
    context: Context | None = None
    fenced: bool = False
    saved: int | None = None

    def run(self) -> None:
        world, machine = self.world, self.machine
        self.store = Store(world.s3, StoreUrl("bucket", f"spotheal/{JOB}/{RUN}"))
        self.log = Log(world, machine.id)
        if world.done:  # as a look at the status says
            return
        try:
            while True:
                try:
                    return self._work()
                except Interrupted:
                    if not self._hand_over():
                        return
        except SpothealError as error:
            world.tell(f"{machine.id}: the agent ends: {type(error).__name__} {error.message}")
            if isinstance(error, Fatal):  # `life.ends_the_run` makes an end of it
                world.broken(f"I6: a fault that passes ends the run: {error.message}")
            world.begin_again(machine)

    def _work(self) -> None:
        world, machine = self.world, self.machine
        self.context = self._healing()
        found = heal(self.context)
        if isinstance(found, End):
            return world.ends(machine, found)
        assert isinstance(found, Held)
        self.held, self.fenced = found, False
        step = world.resumes(machine, found)
        world.time.spawn(self.process, self._beat, 5.0)
        gained, cleaned = 0, world.time.now
        while True:
            if world.time.sleep(world.rng.uniform(5, 40), machine.stop):
                if not self.fenced and world.rng.random() < 0.7:
                    self._save(step + 5)
                raise Interrupted("stop")
            step += 10
            self._save(step)
            gained += 1
            if gained == 1:
                world.time.spawn(self.process, lambda: self._clean(False), 0.5)
            if world.time.now - cleaned > 600:
                cleaned = world.time.now
                world.time.spawn(self.process, lambda: self._clean(False))
            if world.calm and gained > SAVES_AT_LEAST:
                break
        self._clean(True)
        machine.unmount(MOUNT)
        fleet = world.cloud.fleet_of(machine.id)
        assert fleet == FLEET
        world.cloud.cancel_fleet(fleet)
        world.tell(f"{machine.id}: done at step {step}")
        world.done = True

    def _on_term(self, term: int) -> None:
        if self.world.done:  # it ended while this one waited for its turn
            raise Killed

    def _save(self, step: int) -> None:
        assert self.held is not None
        self.world.writes(self.machine, self.held, step)
        self.saved = step

    def _clean(self, run_ends: bool) -> None:
        assert self.held is not None and self.context is not None
        try:
            gone = clean_up(self.context, self.held, acknowledged_step=self.saved, run_ends=run_ends)
            self.world.tell(f"{self.machine.id} deleted {gone}")
        except SpothealError as error:
            self.world.tell(f"{self.machine.id}: left over: {error.message}")

    def _beat(self) -> None:
        held = self.held
        while self.held is held and held is not None:
            try:
                highest = self.store.highest_term()
                if highest is not None and highest.number > held.term:
                    self.fenced = True
                    self.machine.stop.set()
                    return
                saved = None if self.saved is None else {"saved": {"step": self.saved}}
                self.store.write_status({
                    "term": held.term, "instance": self.machine.id, "heartbeat": rfc3339(self.machine.clock.now()),
                    "progress": saved, "phase": "training",
                })  # fmt: skip
            except SpothealError:
                pass
            if self.world.rebalance == self.machine.id:
                self.world.rebalance = ""
                try:
                    create_base(self.context, held, self.saved)  # type: ignore[arg-type]
                except SpothealError as error:
                    self.world.tell(f"no base: {error.message}")
            self.world.time.sleep(60.0 if self.world.rng.random() < 0.7 else 10.0)

    def _hand_over(self) -> bool:
        """Whether the agent goes on."""
        world, machine, context = self.world, self.machine, self.context
        assert context is not None
        if self.fenced:
            leave(context)
            return self._again()
        if machine.interruption is None:
            return self._again()
        saved, held = self.saved, self.held or left_behind(context)
        steps = Steps(
            end_trainer=lambda until: world.time.sleep(0.2) and None,
            leave_volume=lambda: None,
            create_handover=lambda: "" if held is None else create_handover(context, held, saved),
            detach=lambda: None if held is None else detach(context, held),
            report=lambda result: None,
            log=self.log.info,
            create_base=lambda: None if held is None else create_base(context, held, saved),
        )
        result: HandoverResult = hand_over(
            machine.interruption, MOUNT if held is not None else "", machine, steps, machine.clock, machine  # type: ignore[arg-type]
        )
        world.tell(f"{machine.id} handed over: {result}")
        return result.begin_again and self._again()

    def _again(self) -> bool:
        self.held = None
        self.machine.interruption, self.machine.withdrawn = None, Flag()
        self.machine.stop.clear()
        return True

    def _healing(self) -> Context:
        world, machine = self.world, self.machine
        like = world.first.doc

        def names(mountpoint: str) -> list[str]:
            data = world.ec2.volumes[machine.mounted].data if machine.mounted else Data()
            return [f"step-{step:08d}.safetensors" for step in data.steps]

        return Context(
            desired=Desired(
                run=RUN, instance=machine.id, zone=machine.zone, mountpoint=MOUNT, filesystem="xfs", size_gib=125,
                type=like["VolumeType"], tags={"spotheal:job": JOB, "spotheal:run": RUN, "Name": "DL"},
                initialization_rate=world.rng.choice([0, 50, 100]),
            ),
            ec2=world.cloud, store=self.store, host=machine, clock=machine.clock, stop=machine.stop, log=self.log,
            checkpoint_names=names, on_term=self._on_term, beside=lambda work: world.time.spawn(self.process, work),
            random=random.Random(world.rng.getrandbits(32)),
        )  # fmt: skip
