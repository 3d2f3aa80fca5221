"""One contender's rounds, in a process of its own: `python bench/contest.py NAME KIND DEVICE ROUNDS FOLDER`, JSON.

Beside each other in one process they would not be measured but each other: a second team of OpenMP threads makes
libgomp let the training's own wait without spinning, which slows its steps by a fifth to two fifths (so a save beside
them seems to cost nothing), and what ten of them keep in memory leaves none for a load.

Every process, the peers' too, keeps the memory that a step frees, as our trainer does (training/allocator.py): else the
kernel hands it out anew in each step, and how long that takes differs by more than what a save costs.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, Contender, Ours
from example_training import Training
from floors import Floors, drop_cache, timed

from spotheal.training.allocator import keep_freed_memory
from spotheal.training.slotfile import packing
from spotheal.training.slotfile.slots import SUFFIX

FAULTS = (ImportError, OSError, RuntimeError, ValueError, TypeError, AssertionError)  # of peers that do not work here


class Bare(Contender):
    """No checkpoint: as many bytes copied, or written, in a thread, to compare a save with."""

    def __init__(self, training: Training, folder: Path, work: Callable[[], object]) -> None:
        super().__init__(training, folder)
        self.work = work
        self.thread = threading.Thread()

    def save(self) -> None:
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def busy(self) -> bool:
        return self.thread.is_alive()

    def wait(self) -> None:
        self.thread.join()


def newest(folder: Path) -> Path:
    paths = [path for path in folder.iterdir() if path.name.startswith(("save-", "step-"))]
    return max(paths, key=lambda path: int(path.name.removesuffix(SUFFIX).split("-")[1]))


def bare_steps(training: Training, steps: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of a step with nothing beside it."""
    training.before_step = lambda: None
    began = time.process_time()
    wall = timed(lambda: [training.step() for _ in range(steps)])
    return wall / steps, (time.process_time() - began) / steps


def one_round(contender: Contender, steps_min: int) -> dict[str, float]:
    """A save while training, followed until it has ended, between as many bare steps; then one with training stopped.

    The machine's speed drifts: what a step takes is taken from both sides of the save.
    """
    training = contender.training
    training.step()  # what was measured before has left the caches cold
    before = bare_steps(training, steps_min)
    training.before_step = contender.before_step
    cpu_began, began = time.process_time(), time.perf_counter()
    contender.save()
    stall = time.perf_counter() - began
    steps = 0
    while contender.busy() or steps < steps_min:
        stall += training.step()
        steps += 1
    contender.wait()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    bare, bare_cpu = (statistics.fmean(pair) for pair in zip(before, bare_steps(training, steps_min), strict=True))

    def final() -> None:
        contender.save()
        contender.wait()

    return {
        "step": bare,
        "stall": stall,
        "cost": seconds - steps * bare,
        "cpu": cpu - steps * bare_cpu,
        "final": timed(final),
    }


def figures_of(contender: Contender, floors: Floors, resumed: Training) -> dict[str, float]:
    """One turn: the floors, then a save while training, a final one, and a cold load."""
    memcpy, raw = floors.copy(), floors.write()
    figures = one_round(contender, 3)
    if not contender.needs_state:
        resumed.optimizer.state.clear()  # as in a process that has just started
        gc.collect()
    fresh = floors.fresh()
    path = newest(contender.folder)
    raw_read = floors.read(path if path.is_file() else floors.path)
    drop_cache(path)
    load = timed(lambda: contender.load(path, resumed))
    return figures | {
        "memcpy": memcpy,
        "raw": raw,
        "load": load,
        "stall/memcpy": figures["stall"] / memcpy,
        "cost/memcpy": figures["cost"] / memcpy,
        "cpu/memcpy": figures["cpu"] / memcpy,
        "final/raw": figures["final"] / raw,
        "load/raw": load / raw_read,
        "fresh/raw": fresh / raw_read,
    }


def measure(name: str, kind: str, device: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Every figure of every round, or why the contender is `left_out`. Faults of its close are not looked at."""
    training, resumed = Training(kind, device), Training(kind, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in packing.pack(training.tree())[0].values())
    floors = Floors(size, folder)
    bare_steps(training, 4)  # a process's first steps are slower
    try:
        contender = next(one for one in CONTENDERS if one.name == name)(training, folder / "contender")
        bare = {}
        if name == Ours.name:
            bare["copy"] = Bare(training, folder / "bare-copy", floors.copy)
            bare["write"] = Bare(training, folder / "bare-write", floors.write)
        memcpy = floors.copy()
        first = one_round(contender, 1)["stall"]
        figures: dict[str, list[float]] = {"first": [first], "first/memcpy": [first / memcpy]}
        for number in range(rounds):
            print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            values = figures_of(contender, floors, resumed)
            for work, one in bare.items():
                values[f"bare {work}/memcpy"] = one_round(one, 3)["cost"] / values["memcpy"]
            for figure, value in values.items():
                figures.setdefault(figure, []).append(value)
            gc.collect()
    except FAULTS as fault:
        return {"bytes": size, "left_out": str(fault).splitlines()[0] if str(fault) else type(fault).__name__}
    return {"bytes": size, "figures": figures}


def main() -> int:
    name, kind, device, rounds, folder = sys.argv[1:]
    keep_freed_memory()
    body = measure(name, kind, device, int(rounds), Path(folder))
    print(json.dumps(body), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
