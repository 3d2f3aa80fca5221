"""Random lives of one run on the second EC2, and the promises I1 to I6 checked by bookkeeping of its own.

Instances one after the other and side by side, in two zones, killed at any call, given notice, hung, stopped and
started; a time of faults, then a time without, in which the run must come to its end. `python second_world.py SEED`
tells a story.
"""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta

from second_ec2 import Data, SecondEc2, Thing
from second_life import FLEET, JOB, RUN, Life
from second_machine import Machine
from second_s3 import SecondS3
from second_time import EPOCH, Flag, Killed, MachineClock, Process, Time

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.interruption.watcher import Interruption, trainer_seconds
from spotheal.agent.protocol.contract import Notice
from spotheal.agent.protocol.ends import End
from spotheal.agent.volume.heal import Held

ZONES = ("eu-west-1a", "eu-west-1b")
HOUR = 3600.0


class Broken(AssertionError):
    """A promise is broken."""


class World:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.time = Time()
        self.ec2 = SecondEc2(self.time, self.rng)
        self.s3 = SecondS3(self.time, self.rng)
        self.cloud = Ec2(self.ec2.client, JOB)
        self.story: list[str] = []
        self.machines: dict[str, Machine] = {}
        self.acknowledged = 0
        self.calm = self.done = self.ended = False
        self.rebalance = ""  # the machine that is to take a base snapshot
        self.busy_until: dict[str, float] = {}
        settings = self.rng.choice(["quick", "slow", "stuck"])
        slow = settings == "slow"
        self.ec2.snapshot_seconds = lambda: self.rng.choice([5, 40, 90, 600, 3 * HOUR] if slow else [2, 20, 90])
        self.ec2.faults = self.s3.faults = self.rng.choice([0.0, 0.02, 0.1, 0.3])
        self.ec2.stuck = 0.1 if settings == "stuck" else 0.0
        self.ec2.ghosts = self.rng.choice([0.0, 0.0, 0.15])
        self.ec2.lag = self.rng.choice([0.0, 10.0, 30.0, 30.0, 90.0])
        self.ec2.late = self.rng.choice([0.0, 0.0, 0.5])
        self.together = self.rng.choice([1, 1, 1, 2, 3])
        self.ec2.on_call = self.s3.on_call = self._called
        self.ec2.on_change = lambda what: self.check(what)
        self.ec2.on_end = self._machine_ends
        self.ec2.fleets[FLEET] = "active"
        tags = {"spotheal:job": JOB, "spotheal:run": RUN, "spotheal:term": "0", "spotheal:state": "new", "Name": "DL"}
        self.first = self._volume(self.rng.choice(ZONES), tags)
        self.decoy = self._volume(ZONES[0], {**tags, "spotheal:job": "another", "spotheal:state": "current"})
        self.decoy_tags = dict(self.decoy.tags)

    def _volume(self, zone: str, tags: dict[str, str]) -> Thing:
        type = self.rng.choice(["gp3", "gp3", "gp2", "io2", "st1"])
        doc = {
            "VolumeId": self.ec2._id("vol"), "AvailabilityZone": zone, "State": "available", "Size": 125,
            "Attachments": [], "VolumeType": type, "CreateTime": EPOCH, "Encrypted": True, "KmsKeyId": "arn:k",
            "SnapshotId": "",
        }  # fmt: skip
        doc |= {"gp3": {"Iops": 4000, "Throughput": 250}, "gp2": {"Iops": 375}, "io2": {"Iops": 4000}}.get(type, {})
        made = self.ec2._new(self.ec2.volumes, doc["VolumeId"], doc, tags, Data())
        made.born, made.history, made.tag_history = -HOUR, [(-HOUR, dict(doc))], [(-HOUR, dict(tags))]
        return made

    # ------------------------------------------------------------------------------------------------- what is promised
    def tell(self, text: str) -> None:
        self.story.append(f"{self.time.now:8.1f} {text}")

    def broken(self, text: str) -> None:
        self.tell(f"BROKEN: {text}")
        raise Broken("\n".join([f"seed {self.seed}", *self.story[-40:]]))

    def highest(self) -> tuple[int, str]:
        claims = [(int(k.rsplit("/", 1)[1]), json.loads(v[0])["instance"]) for k, v in self.s3.objects.items()
                  if "/terms/" in k and k.rsplit("/", 1)[1].isdigit()]  # fmt: skip
        return max(claims, default=(0, ""))

    def alive_volumes(self) -> list[Thing]:
        return [v for v in self.ec2.volumes.values()
                if v.gone is None and v.doc["State"] not in ("deleting", "error") and v is not self.decoy]  # fmt: skip

    def check(self, what: str) -> None:
        """After each change of the cloud: the last copy, the decoy, no mounted volume detached."""
        if self.ec2.violations:
            self.broken(self.ec2.violations[0])
        kept = [s for s in self.ec2.snapshots.values() if s.gone is None and s.doc["State"] == "completed"]
        copies = [each.data.newest for each in (*self.alive_volumes(), *kept)]
        if max(copies, default=0) < self.acknowledged:
            self.broken(f"I3: after {what} no copy holds step {self.acknowledged}")
        if self.decoy.gone is not None or self.decoy.tags != self.decoy_tags or self.decoy.doc["State"] != "available":
            self.broken(f"another job's volume was touched by {what}")

    def mounts(self, machine: Machine, volume: str) -> None:
        holder = self.ec2.mounted.get(volume)
        if holder not in (None, machine.id):
            self.broken(f"I2: {machine.id} mounts {volume}, which {holder} has mounted")
        number, owner = self.highest()
        if owner != machine.id:
            self.broken(f"I2: {machine.id} mounts {volume}, and term {number} is {owner}'s")
        self.ec2.mounted[volume] = machine.id

    def writes(self, machine: Machine, held: Held, step: int) -> None:
        number, owner = self.highest()
        if (number, owner) != (held.term, machine.id):
            self.broken(f"I2: {machine.id} writes under term {held.term}, but {number} is {owner}'s")
        if machine.mounted != held.volume or self.ec2.mounted.get(held.volume) != machine.id:
            self.broken(f"I2: {machine.id} writes to {held.volume}, which it has not mounted")
        volume = self.ec2.volumes[held.volume]
        if volume.gone is not None or not volume.doc["Attachments"]:
            self.broken(f"{machine.id} writes to {held.volume}, which is {volume.doc['State']}")
        volume.data = Data(volume.data.filesystem, (*volume.data.steps[-2:], step))
        self.acknowledged = max(self.acknowledged, step)

    def resumes(self, machine: Machine, held: Held) -> int:
        found = self.ec2.volumes[held.volume].data.newest
        if found < self.acknowledged:
            self.broken(f"I1: {machine.id} resumes at {found}, and {self.acknowledged} was acknowledged")
        like, now = self.first.doc, self.ec2.volumes[held.volume].doc
        for key in ("VolumeType", "Size", "Iops", "Throughput", "Encrypted", "KmsKeyId"):
            if like.get(key) != now.get(key):
                self.broken(f"the volume's {key} was {like.get(key)} and is {now.get(key)}")
        self.tell(f"{machine.id} is ready: {held}, step {found}")
        return found

    def ends(self, machine: Machine, end: End) -> None:
        """Only what really came to nothing again and again is an end of the run."""
        self.tell(f"{machine.id}: {end}")
        term = str(self.highest()[0])
        copies = [v for v in self.ec2.volumes.values() if v.tags.get("spotheal:term") == term and v is not self.first]
        copies = [v for v in copies if v.gone is not None or v.doc["State"] == "error"]
        failed = [s for s in self.ec2.snapshots.values() if s.tags.get("spotheal:term") == term]
        failed = [s for s in failed if s.doc["State"] == "error"]
        if len(copies) < 5 and len(failed) < 3:
            self.broken(f"I6: {end}, but {len(copies)} copies and {len(failed)} snapshots failed")
        self.ended = self.done = True

    def check_converged(self) -> None:
        volumes = [v for v in self.ec2.volumes.values() if v.gone is None and v is not self.decoy]
        if len(volumes) != 1:
            self.broken(f"I4: {len(volumes)} volumes are left: {[(v.id, v.tags, v.doc['State']) for v in volumes]}")
        kept = [s for s in self.ec2.snapshots.values() if s.gone is None]
        if len(kept) > 2:
            self.broken(f"I4: {len(kept)} snapshots are left: {[(s.id, s.doc['State'], s.tags) for s in kept]}")

    # -------------------------------------------------------------------------------------------------------- machines
    def launch(self, boots_after: float | None = None) -> Machine:
        zone = self.rng.choice(ZONES)
        tags = {"spotheal:run": RUN, "spotheal:job": JOB, "aws:ec2spot:fleet-request-id": FLEET}
        taken = ("/dev/sda1", *(self.rng.choice([(), ("/dev/sdf",)])))
        id = self.ec2.launch(zone, tags, taken)
        skew = self.rng.choice([0.0, 0.0, 2.0, -90.0, 250.0])
        machine = Machine(self, id, zone, MachineClock(self.time, skew, self.rng.uniform(-9e4, 0)), Process(id))
        machine.nitro = self.rng.random() < 0.8
        self.machines[id] = machine
        self.tell(f"{id} is launched in {zone}")
        self._begin(machine, self.rng.uniform(30, 90) if boots_after is None else boots_after)
        return machine

    def _begin(self, machine: Machine, after: float) -> None:
        machine.process = Process(machine.id)
        process = machine.process
        self.time.spawn(process, lambda: Life(self, machine, process).run(), after)

    def begin_again(self, machine: Machine, after: float = 15.0) -> None:
        """systemd starts the agent again; the kernel's mounts stay."""
        machine.process.dead = True
        machine.stop, machine.interruption, machine.withdrawn = Flag(), None, Flag()

        def start() -> None:
            if self.ec2.state(machine.id) == "running" and not self.done and machine.process.dead:
                self._begin(machine, 0.0)

        self.time.at(self.time.now + after, start)

    def _called(self, operation: str, moment: str) -> None:
        process = self.time.process
        machine = None if process is None else self.machines.get(process.name)
        if machine is None or machine.process is not process:
            return
        machine.calls += 1
        if machine.calls == machine.kill_at:
            self.tell(f"{machine.id} dies {moment} {operation}")
            machine.kill_at = -1
            if self.rng.random() < 0.5:
                self.begin_again(machine)
            else:
                self.reclaim(machine, "terminated", self.rng.uniform(0, 30))
                machine.process.dead = True
            raise Killed

    def reclaim(self, machine: Machine, into: str, seconds: float = 5.0) -> None:
        reason = "Server.SpotInstanceShutdown" if into == "stopped" else "Server.SpotInstanceTermination"
        self.tell(f"{machine.id} is {into}")
        self.ec2.end(machine.id, into, reason, seconds)

    def _machine_ends(self, instance: str) -> None:
        machine = self.machines[instance]
        machine.process.dead = True
        machine.mounted = None
        machine.paths.clear()

    def notice(self, machine: Machine, action: str, withdrawn_after: float | None = None) -> None:
        if self.ec2.state(machine.id) != "running" or machine.interruption is not None:
            return
        self.tell(f"{machine.id} has a notice: {action}")
        now, left = machine.clock.monotonic(), self.rng.choice([118.0, 118.0, 60.0])
        kept = trainer_seconds(action, left)
        told = Notice(action, machine.clock.now() + timedelta(seconds=kept))
        machine.interruption = Interruption(f"n{self.time.now}", told, now + left, now + kept)
        machine.withdrawn = Flag()
        machine.stop.set()
        if withdrawn_after is not None:
            self.time.at(self.time.now + withdrawn_after, machine.withdrawn.set)
        else:
            machine.noticed = True
            into = "stopped" if action == "stop" else "terminated"
            self.time.at(self.time.now + left, lambda: self.reclaim(machine, into))

    # ----------------------------------------------------------------------------------------------------- the history
    def keep_fleet(self) -> None:
        """`maintain`, one instance; a fleet may launch early, after a notice."""
        wanted = [m for m in self.machines.values() if self.ec2.state(m.id) in ("pending", "running") and not m.noticed]
        if not wanted and not self.done:
            self.launch()
        if not self.done:
            self.time.at(self.time.now + self.rng.uniform(10, 90), self.keep_fleet)

    def holder(self) -> Machine | None:
        machine = self.machines.get(self.highest()[1])
        return machine if machine is not None and self.ec2.state(machine.id) == "running" else None

    def incident(self) -> None:
        alive = [m for m in self.machines.values() if self.ec2.state(m.id) == "running"]
        machine = self.holder() or (self.rng.choice(alive) if alive else None)
        kind = self.rng.choice(["kill", "notice", "notice", "stop", "withdrawn", "crash", "crash", "hang", "another",
                                "base", "rights", "busy", "restart"])  # fmt: skip
        self.tell(f"incident: {kind}")
        if kind == "rights":
            self.ec2.without_rights_until = self.time.now + self.rng.uniform(5, 50)
        elif kind == "another":
            self.launch()
        elif machine is None:
            return
        elif kind == "kill":
            self.reclaim(machine, "terminated", self.rng.uniform(1, 60))
        elif kind == "notice":
            self.notice(machine, "terminate")
        elif kind == "stop":
            self.notice(machine, "stop")
            self.time.at(self.time.now + self.rng.uniform(200, 1500), lambda: self._start(machine))
        elif kind == "withdrawn":
            self.notice(machine, "terminate", self.rng.uniform(1, 110))
        elif kind == "crash":
            machine.kill_at = machine.calls + self.rng.randrange(1, 40)
        elif kind == "hang":
            machine.process.hangs_until = self.time.now + self.rng.uniform(60, 2400)
        elif kind == "busy":
            self.busy_until[machine.id] = self.time.now + self.rng.uniform(5, 400)
            self.notice(machine, "terminate", self.rng.choice([None, 60.0]))
        elif kind == "restart":
            self.ec2.mounted.pop(machine.mounted or "", None)
            machine.mounted = None
            self.begin_again(machine, 40.0)
        elif kind == "base":
            self.rebalance = machine.id

    def _start(self, machine: Machine) -> None:
        if self.ec2.state(machine.id) == "stopped" and not self.done:
            self.tell(f"{machine.id} is started again")
            machine.noticed = False
            self.ec2.start(machine.id)
            self.begin_again(machine, 40.0)

    def run(self) -> None:
        moment = 0.0
        for _ in range(self.rng.randrange(2, 7)):
            moment += self.rng.choice([20, 120, 400, 900]) * self.rng.random() + 60
            self.time.at(moment, self.incident)
            if self.rng.random() < 0.5:
                self.time.at(moment + self.rng.uniform(0, 150), self.incident)
        calm = moment + 600

        def be_calm() -> None:
            self.tell("the faults are over")
            self.calm, self.ec2.faults, self.s3.faults, self.ec2.stuck, self.ec2.ghosts = True, 0.0, 0.0, 0.0, 0.0

        self.time.at(calm, be_calm)
        SecondEc2.current = self.ec2
        self.time.at(0.0, self.keep_fleet)
        for _ in range(self.together - 1):
            self.launch(boots_after=60.0)
        try:
            if not self.time.run(lambda: self.done, calm + 8 * HOUR):
                self.broken(f"I5: the run is not done {(self.time.now - calm) / HOUR:.1f} h after the last fault")
            self.time.run(lambda: False, self.time.now + 300)
            self.check("the end")
            if not self.ended:
                self.check_converged()
        finally:
            self.ec2.on_change = lambda what: None
            self.time.end()


if __name__ == "__main__":
    told = World(int(sys.argv[1]))
    try:
        told.run()
    finally:
        print("\n".join(told.story))
