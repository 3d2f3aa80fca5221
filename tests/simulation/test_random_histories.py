"""Random histories: a time of faults, kills and notices, then a time without, in which the run must converge.

A failure names its seed; `SPOTHEAL_HISTORIES=first:last` runs those seeds.
"""

from __future__ import annotations

import os
import random

import pytest
from simulated_world import Region
from test_simulated_healing import A, B, C, leaves_nothing_behind, run_until_training

FIRST, LAST = (int(part) for part in os.environ.get("SPOTHEAL_HISTORIES", "0:8").split(":"))


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_history_loses_nothing_and_converges(seed):
    dice = random.Random(seed)
    crashes = {dice.randrange(400): dice.choice(["before", "after"]) for _ in range(dice.randrange(6))}
    with Region(
        seed=seed,
        zones=(A, B, C),
        snapshot_seconds=dice.choice([None, 0.0, 90.0, 600.0]),
        crash=crashes,
        crash_kind=dice.choice(["agent", "machine"]),
    ) as region:
        region.replacement_zones = [dice.choice([A, B, C]) for _ in range(12)]
        region.faults.stale_seconds_max = dice.choice([0.0, 30.0])
        region.faults.lose_reply = dice.choice([0.0, 0.1])
        region.faults.throttle = dice.choice([0.0, 0.3])
        region.faults.attaches_stuck = dice.randrange(2)
        region.faults.detaches_stuck = dice.randrange(2)
        region.faults.snapshots_fail = dice.randrange(2)
        region.faults.volumes_fail = 0
        region.make_volume(A)
        for _ in range(dice.choice([1, 1, 2, 5])):
            region.launch(dice.choice([A, B, C]))
        region.faults.volumes_fail = dice.randrange(2)
        for _ in range(dice.randrange(1, 6)):
            region.time.run(region.time.seconds + dice.choice([1, 30, 100, 300, 900]) * (0.5 + dice.random()))
            alive = [machine for machine in region.machines.values() if machine.alive]
            if alive:
                dice.choice([region.kill, region.interrupt, region.hang])(dice.choice(alive))
            else:
                region.launch(dice.choice([A, B, C]))
        region.crash.clear()
        region.faults.clear()
        region.time.run(region.time.seconds + 200)
        if not any(machine.alive and not machine.hung for machine in region.machines.values()):
            region.launch(dice.choice([A, B, C]))
        run_until_training(region)
        leaves_nothing_behind(region)
