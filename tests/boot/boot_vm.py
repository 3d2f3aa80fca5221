"""`make boot-vm`: a run in virtual machines, from its request to its end, with the time each part took.

    boot_vm.py [PART …]     of: notice, power-cut, reboot, agent-killed; all of them where none is named

Boot, train, then these, then done; after the first two another machine goes on. Ends with 1 where a fact does not hold.
Everything is emulated in software, so the times are not those of a real machine; what is told is where they go. Root
and Debian.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from booted_cloud import Job, booted_cloud, request, until
from debian_root import CannotMake
from vm_image import image
from vm_machine import VirtualMachine

from spotheal.agent.protocol.names import Phase
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
from spotheal.fleet.rehearsal.scenarios.scenario import Interrupt, Kill

BOOT_SECONDS_MAX = 900.0
PART_SECONDS_MAX = 600.0
NOTICE_SECONDS = 120.0  # as AWS gives it
SHUTDOWN_SECONDS = 90.0
CHECKPOINTS = "/dltraining/checkpoints"
# What appears on the console, in this order.
MARKS = {
    "kernel": "Linux version",
    "systemd": "Welcome to Debian",
    "user data": "spotheal: using ",
    "agent installed": "spotheal: the agent is installed",
    "agent runs": "spotheal: the agent runs",
    "volume": "action=Ready",
    "trainer": "starting the trainer",
}
_began = time.monotonic()


def say(text: str) -> None:
    print(f"boot-vm: {time.monotonic() - _began:7.1f} s  {text}", flush=True)


def hold(fact: bool, what: str) -> None:
    if not fact:
        raise AssertionError(what)
    say(f"holds: {what}")


class Console:
    """When each mark appeared on a machine's console, since its power came on."""

    def __init__(self, machine: VirtualMachine) -> None:
        self.machine, self.seen = machine, dict[str, float]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.3):
            text = self.machine.console.read_text(errors="replace")
            for mark, words in MARKS.items():
                if mark not in self.seen and words in text and self.machine.started_at is not None:
                    self.seen[mark] = time.monotonic() - self.machine.started_at

    def tell(self, first_step: float) -> None:
        self._end.set()
        self._thread.join()
        times = {**self.seen, "first step": first_step}
        say(f"{self.machine.launch.instance}: " + ", ".join(f"{mark} {at:.0f} s" for mark, at in times.items()))
        for line in self.machine.console.read_text(errors="replace").splitlines():
            if "after the user data began" in line:
                say(f"{self.machine.launch.instance}: {line[line.index('spotheal:') :].strip()}")


def machines(cloud: Cloud) -> list[VirtualMachine]:
    return [machine for machine in cloud.machines.all() if isinstance(machine, VirtualMachine)]


def new_machine(cloud: Cloud, count: int) -> VirtualMachine:
    found = until(f"instance {count}", lambda: machines(cloud)[count - 1 :], BOOT_SECONDS_MAX)[0]
    until("its power comes on", lambda: found.started_at, PART_SECONDS_MAX)
    return found


def read(machine: VirtualMachine, name: str) -> str:
    try:
        return machine.run(f"cat {CHECKPOINTS}/{name} 2>/dev/null || true")
    except OSError:
        return ""


def begins(machine: VirtualMachine) -> list[int]:
    return [int(line) for line in read(machine, "begins.txt").split() if line.isdigit()]


def trains(machine: VirtualMachine, attempts: int, seconds_max: float = PART_SECONDS_MAX) -> list[int]:
    """The steps the trainer began at, once it has done some in its start `attempts`."""

    def begun() -> list[int] | None:
        found, step = begins(machine), read(machine, "step.txt")
        return found if len(found) >= attempts and step.isdigit() and int(step) > found[-1] else None

    return until(f"the trainer's start {attempts} does a step", begun, seconds_max, pause=2.0)


def over(job: Job) -> str:
    """Why the run has ended; "" while it has not."""
    status = job.status()
    return str(status.get("reason")) if status.get("phase") in {end.value for end in Phase if end.is_end} else ""


def boots_and_trains(cloud: Cloud, job: Job, count: int, attempts: int) -> tuple[VirtualMachine, list[int]]:
    machine = new_machine(cloud, count)
    say(f"{machine.launch.instance} boots in {cloud.rules.instance(machine.launch.instance).zone}")  # type: ignore[union-attr]
    console = Console(machine)
    until("the trainer is started", lambda: "trainer" in console.seen or over(job), BOOT_SECONDS_MAX)
    if said := over(job):
        raise AssertionError(f"the run is over: {said}")
    found = trains(machine, attempts)
    console.tell(time.monotonic() - (machine.started_at or 0.0))
    return machine, found


def looks_like_ec2(machine: VirtualMachine, volume: str) -> None:
    init = machine.run("cat /proc/1/comm; cloud-init query platform subplatform 2>/dev/null; cloud-id")
    hold("systemd" in init and "aws" in init, f"systemd is process 1 and cloud-init says EC2 ({init.split()})")
    disks = machine.run("lsblk --nodeps --noheadings --output NAME,SERIAL,MOUNTPOINTS")
    (mounted,) = [line for line in disks.splitlines() if "/dltraining" in line]
    hold(volume.replace("-", "") in mounted, f"the NVMe disk with the volume's serial is mounted: {mounted.split()}")
    unit = machine.run("systemctl show spotheal-agent --property=Type,UnitFileState,ActiveState,StatusText")
    hold("Type=notify" in unit and "=enabled" in unit and "=active" in unit, "the service is active and enabled")


def story(cloud: Cloud, folder: Path, parts: tuple[str, ...]) -> None:
    job = request(cloud, folder, 1.0, "ext4")
    say(f"fleetctl request: {job.volume}")
    machine, begun = boots_and_trains(cloud, job, 1, 1)
    hold(begun == [0], "the first instance begins at step 0")
    looks_like_ec2(machine, str(job.status().get("volume")))
    for part in parts:
        machine = PARTS[part](cloud, job, machine)
    machine.run("touch /dltraining/datasets/finish")
    until("done", lambda: job.status().get("phase") == Phase.DONE.value, PART_SECONDS_MAX)
    until("the fleet is cancelled", lambda: all(f.state == "cancelled" for f in cloud.rules.fleets()), PART_SECONDS_MAX)
    hold(job.store.get_bytes("results/sum.txt") is not None, "done: the result is in the store, the fleet is cancelled")
    hold({one.state for one in cloud.rules.instances()} == {"terminated"}, "no instance is left")


def notice(cloud: Cloud, job: Job, machine: VirtualMachine) -> VirtualMachine:
    # The replacement may be there before the hand-over is.
    attempts, count = len(begins(machine)), len(machines(cloud)) + 1
    cloud.make(Interrupt(NOTICE_SECONDS), machine.launch.instance)
    say(f"{machine.launch.instance} gets a notice, {NOTICE_SECONDS:.0f} s ahead")
    until("the volume is handed over", lambda: "handed over" in machine.console.read_text(), PART_SECONDS_MAX)
    say("handed over")
    successor, begun = boots_and_trains(cloud, job, count, attempts + 1)
    hold(begun[-1] == stopped_at(job, machine), "a notice loses no step")
    return successor


def power_cut(cloud: Cloud, job: Job, machine: VirtualMachine) -> VirtualMachine:
    attempts, before = len(begins(machine)), int(read(machine, "step.txt"))
    count = len(machines(cloud)) + 1
    cloud.make(Kill(), machine.launch.instance)
    say(f"{machine.launch.instance}'s power is cut at step {before} or later")
    successor, begun = boots_and_trains(cloud, job, count, attempts + 1)
    hold(begun[-1] >= before, f"no step is lost that was on the disk ({before}, resumed at {begun[-1]})")
    return successor


def reboot(cloud: Cloud, job: Job, machine: VirtualMachine) -> VirtualMachine:
    attempts, ordered = len(begins(machine)), time.monotonic()
    machine.run("systemctl reboot --no-block")
    say(f"{machine.launch.instance} reboots")
    begun = trains(machine, attempts + 1, BOOT_SECONDS_MAX)
    say(f"it goes on at step {begun[-1]}, {time.monotonic() - ordered:.0f} s after the order")
    hold(begun == sorted(begun), "no step is done again but what was not saved")
    hold(machine.run("grep -c 'user data, Python' /var/log/spotheal/user-data.log") == "1", "user data ran once")
    handed = machine.run("grep -c 'unmounted=True detached=True' /var/log/spotheal/agent.log")
    hold(handed == "1", "at the shutdown the volume was handed over while mount and network were there")
    return machine


def agent_killed(cloud: Cloud, job: Job, machine: VirtualMachine) -> VirtualMachine:
    attempts, killed = len(begins(machine)), time.monotonic()
    machine.run("systemctl kill --signal=KILL --kill-who=main spotheal-agent")
    say("the agent is killed")
    begun = trains(machine, attempts + 1)
    say(f"it goes on at step {begun[-1]}, {time.monotonic() - killed:.0f} s later")
    restarts = machine.run("systemctl show spotheal-agent --property=NRestarts --value")
    hold(restarts == "1", "systemd started it again")
    return machine


PARTS: dict[str, Callable[[Cloud, Job, VirtualMachine], VirtualMachine]] = {
    "notice": notice, "power-cut": power_cut, "reboot": reboot, "agent-killed": agent_killed,
}  # fmt: skip


def stopped_at(job: Job, machine: VirtualMachine) -> int:
    """The step that the trainer named when it stopped, by its log in the store."""

    def named() -> str | None:
        key = f"logs/{machine.launch.instance}/trainer.0000.log"
        return (job.store.get_bytes(key) or b"").decode().rpartition("stops at step ")[2].split("\n")[0] or None

    return int(until("the trainer's log in the store", named, PART_SECONDS_MAX))


def main() -> int:
    parts = tuple(sys.argv[1:]) or tuple(PARTS)
    if unknown := set(parts) - set(PARTS):
        print(f"boot-vm: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        found = image()
    except CannotMake as why:
        print(f"boot-vm: {why}", file=sys.stderr)
        return 2
    say("the image is made")
    keep = os.environ.get("SPOTHEAL_BOOT_VM_DIR")
    folder = Path(keep or tempfile.mkdtemp(prefix="spotheal-boot-vm-"))
    folder.mkdir(parents=True, exist_ok=True)

    def make(cloud: Callable[[], Cloud]):  # type: ignore[no-untyped-def]
        return lambda place, launch, on_end: VirtualMachine(place, launch, on_end, found, cloud)

    try:
        with booted_cloud(folder / "cloud", make, SHUTDOWN_SECONDS) as cloud:
            story(cloud, folder / "job", parts)
    except AssertionError as fault:
        say(f"FAILED: {fault}; consoles are below {folder}")
        return 1
    say("all facts hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
