"""Random histories of the whole agent: a time of faults, then a time without, in which the run must come to its end.

`python tests/simulation/histories.py 17` tells the story of seed 17; `0:10000` runs them all and prints figures.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / ".ci/import_path"), str(root / "tests/simulation")]

from simulated_life import RETENTION_SECONDS, LifeRegion, Machine
from simulated_world import RUN, Broken

from spotheal.agent.protocol.names import SNAPSHOTS_KEPT, TAG_RUN, TAG_STATE

A, B, C, D = "us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"
ZONES = (A, B, C)
AT_ONCE = 50  # histories of a test
SETTLE_SECONDS = 6 * 3600.0  # a copy of ten minutes, silences, waits of describes: all of them several times


@dataclass(frozen=True)
class Told:
    """How a history went. `fault` is empty where all held."""

    seed: int
    phase: str
    calls: int
    hours: float
    instances: int
    fault: str = ""


def tell(seed: int) -> Told:
    """Run history `seed`; what breaks is raised."""
    dice = random.Random(seed)
    crashes = {dice.randrange(600): dice.choice(["before", "after"]) for _ in range(dice.randrange(6))}
    ending = dice.choice(["done", "done", "done", "failed", "limit"])
    with LifeRegion(
        seed=seed,
        zones=(*ZONES, D),
        snapshot_seconds=dice.choice([None, 0.0, 90.0, 600.0]),
        crash=crashes,
        crash_kind=dice.choice(["agent", "machine"]),
        ending=(ending, dice.randrange(4, 60)),
    ) as region:
        region.add_another_job(D)
        _make_cruel(region, dice)
        zones = [dice.choice(ZONES) for _ in range(30)]
        region.request(dice.choice(ZONES), target=dice.choice([1, 1, 2, 5]), launch_in=zones)
        for _ in range(dice.randrange(1, 7)):
            region.time.run(region.time.seconds + dice.choice([1, 15, 60, 150, 400]) * (0.5 + dice.random()))
            alive = [machine for machine in region.machines.values() if machine.alive and not machine.going_down]
            if alive:
                _befall(region, dice, dice.choice(alive))
        quiet_since = region.time.seconds
        region.crash.clear()
        region.faults.clear()
        region.s3.faults.clear()
        alive = [machine for machine in region.machines.values() if machine.alive]
        for machine in alive:
            machine.shell = ""
            # Whom nobody can miss, nobody can fence: a fleet's only instance that hangs is replaced by no one.
            if machine.hung and (dice.random() < 0.3 or all(other.hung or other.noticed for other in alive)):
                region.kill(machine)
        if not region.time.run(region.time.seconds + SETTLE_SECONDS, region.is_over):
            raise Broken(f"the run has not come to its end in {SETTLE_SECONDS / 3600:.0f} hours")
        trained = region.acknowledged_at - max(region.training_since, quiet_since)
        phase = str(region.documents("status.json")[0]["phase"])
        leaves_nothing_behind(region, looked=trained > 0, cleaned=trained > 2 * RETENTION_SECONDS)
        return Told(seed, phase, len(region.calls), region.time.seconds / 3600, len(region.machines))


def _make_cruel(region: LifeRegion, dice: random.Random) -> None:
    faults = region.faults
    faults.stale_seconds_max = dice.choice([0.0, 30.0])
    faults.lose_reply = dice.choice([0.0, 0.1])
    faults.throttle = dice.choice([0.0, 0.3])
    faults.attaches_stuck, faults.detaches_stuck = dice.randrange(2), dice.randrange(2)
    faults.snapshots_fail, faults.cancels_unsuccessful = dice.randrange(2), dice.randrange(3)
    region.s3.faults.lose_reply = dice.choice([0.0, 0.1])
    region.s3.faults.throttle = dice.choice([0.0, 0.1])


def _befall(region: LifeRegion, dice: random.Random, machine: Machine) -> None:
    fates = ["kill", "notice", "notice", "hang", "agent", "withdrawn", "rebalance", "stop", "late", "volume"]
    what = dice.choice(fates)
    machine.shell = dice.choice(["", "", "", "shell", "stuck"])
    if what == "kill" and len(region.calls) % 2:
        region.break_down(machine)
    elif what == "kill":
        region.kill(machine)
    elif what == "notice":
        region.interrupt(machine)
    elif what == "late":
        region.interrupt(machine, lead=dice.choice([0.0, 5.0, 30.0, 60.0]))
    elif what == "hang":
        region.hang(machine)
    elif what == "agent":
        region.kill_agent(machine)
    elif what == "rebalance":
        region.rebalance(machine)
    elif what == "stop":
        region.interrupt(machine, action="stop")
    elif what == "volume":
        region.faults.volumes_fail = 1
    else:
        region.interrupt(machine)
        region.time.at(dice.choice([5.0, 30.0, 100.0]), lambda: region.withdraw(machine))


def leaves_nothing_behind(region: LifeRegion, looked: bool = False, cleaned: bool = False) -> None:
    """I4 and I1 of a run that is over. `looked`: its last writer has gained a checkpoint, so it has cleaned up once;
    `cleaned`: it had the time to do it again, which frees what is attached to a stopped machine."""
    volumes = [volume for volume in region.rules.volumes() if volume.tags.get(TAG_RUN) == RUN]
    snapshots = [snapshot for snapshot in region.rules.snapshots() if snapshot.tags.get(TAG_RUN) == RUN]
    kept = [volume for volume in volumes if volume.tags.get(TAG_STATE) in ("current", "done", "new")]
    left = volumes if cleaned else [one for one in volumes if one in kept or (looked and one.attachment is None)]
    if region.acknowledged and len(left) != 1:
        raise Broken(f"left behind: {[(volume.id, dict(volume.tags)) for volume in volumes]}")
    if region.acknowledged and max(region.disks[kept[0].id].steps, default=0) < region.acknowledged:
        raise Broken(f"{kept[0].id} ends before the acknowledged step {region.acknowledged}")
    if looked and sum(one.state != "pending" for one in snapshots) > SNAPSHOTS_KEPT:
        raise Broken(f"left behind: {[(one.id, one.state, dict(one.tags)) for one in snapshots]}")


def try_to_tell(seed: int) -> Told:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return tell(seed)
    except Exception as fault:  # noqa: BLE001 - whatever broke, the other seeds are told
        where = traceback.extract_tb(fault.__traceback__)[-1]
        said = f"{type(fault).__name__}: {fault} ({Path(where.filename).name}:{where.lineno})"
        return Told(seed, "", 0, 0.0, 0, said)


def faults_in(seeds: Iterable[int]) -> list[str]:
    """What broke, with the command that tells its story."""
    told = [try_to_tell(seed) for seed in seeds]
    return [f"python tests/simulation/histories.py {one.seed}: {one.fault}" for one in told if one.fault]


def batches(half: int) -> list[range]:
    """The seeds of one of two test files, a test each batch."""
    first, last = (int(part) for part in os.environ.get("SPOTHEAL_HISTORIES", "0:1000").split(":"))
    middle = (first + last + 1) // 2
    begin, end = ((first, middle), (middle, last))[half]
    return [range(one, min(one + AT_ONCE, end)) for one in range(begin, end, AT_ONCE)]


def main(arguments: list[str]) -> int:
    first, _, last = arguments[0].partition(":")
    if not last:
        print(tell(int(first)))
        return 0
    began = time.monotonic()
    with Pool(int(arguments[1]) if len(arguments) > 1 else 2) as pool:
        told = list(pool.imap_unordered(try_to_tell, range(int(first), int(last)), chunksize=10))
    broken = sorted((one for one in told if one.fault), key=lambda one: one.seed)
    for one in broken:
        print(f"seed {one.seed}: {one.fault}")
    seconds = time.monotonic() - began
    phases = {phase: sum(one.phase == phase for one in told) for phase in sorted({one.phase for one in told})}
    print(
        f"{len(told)} histories, {len(broken)} broken; {len(told) / seconds:.1f} a second; ends {phases};"
        f" {sum(one.instances for one in told)} instances, {sum(one.calls for one in told)} calls,"
        f" {sum(one.hours for one in told):.0f} simulated hours"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
