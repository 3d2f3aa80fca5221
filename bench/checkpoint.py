"""Checkpoints beside their peers, in one run: `python bench/checkpoint.py [--size 300 1200] [--output json]`.

stall   training blocked: in the call, and before the optimizer's step
first   the same at the first save of a process
cost    extra training time until the save is durable, so hidden interference counts (peers that never fsync: ended)
final   a durable save with training stopped, against the same bytes written with O_DIRECT and fsynced
cpu     the same as cost in seconds of processor time of this process, which other programs disturb less
load    a cold load, against a cold raw read of the same file; ours verifies every byte, into fresh memory
fresh   what touching as many bytes of fresh memory takes, against that raw read: part of every load

Rounds are paired: floors and contenders take their turns in each round, ratios are made within it, medians are printed.
Peers take part in the first `--peer-rounds`. Exit 1 where a figure of ours is missed. Peers that are not installed, or
do not work here, are named with the reason and left out (`pip install --no-deps torch_checkpointing` for that one).
Where there is a CUDA device, a ResNet-50 and a model of 1 B parameters on it are measured as well (`--models`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, Contender, Ours
from example_training import Training
from floors import Floors, drop_cache, timed

from spotheal.training import state
from spotheal.training.slots import SUFFIX


def newest(folder: Path) -> Path:
    paths = [path for path in folder.iterdir() if path.name.startswith(("save-", "step-"))]
    return max(paths, key=lambda path: int(path.name.removesuffix(SUFFIX).split("-")[1]))


# ------------------------------------------------------------------------------------------------------- measuring
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

    return {"stall": stall, "cost": seconds - steps * bare, "cpu": cpu - steps * bare_cpu, "final": timed(final)}


def measure(
    kind: str, device: str, rounds: int, peer_rounds: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    training, resumed = Training(kind, device), Training(kind, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.pack(training.tree())[0].values())
    floors = Floors(size, folder)
    results: dict[str, dict[str, list[float]]] = {}
    contenders: list[Contender] = []
    left_out = {}
    for one in CONTENDERS:
        if one is not Ours and not peer_rounds:
            continue
        contender = None
        try:
            contender = one(training, folder / one.__name__)
            memcpy = floors.copy()
            first = one_round(contender, 1)["stall"]
        except (ImportError, OSError, RuntimeError, ValueError, TypeError, AssertionError) as fault:
            left_out[one.name] = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
            say(f"left out: {one.name}: {left_out[one.name]}")
            if contender is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    contender.close()
            continue
        results[one.name] = {"first": [first], "first/memcpy": [first / memcpy]}
        contenders.append(contender)
    for number in range(rounds):
        say(f"{title(kind, device, size)}: round {number + 1} of {rounds}")
        for contender in contenders:
            if number < peer_rounds or isinstance(contender, Ours):
                for name, value in figures_of(contender, floors, resumed).items():
                    results[contender.name].setdefault(name, []).append(value)
                gc.collect()
    for contender in contenders:
        contender.close()
    medians = {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        | {"durable": next(one.durable for one in CONTENDERS if one.name == name)}
        for name, figures in results.items()
    }
    return {
        "state": title(kind, device, size),
        "bytes": size,
        "rounds": rounds,
        "memcpy": medians[Ours.name]["memcpy"],
        "contenders": medians,
        "left_out": left_out,
    }


def title(kind: str, device: str, size: int) -> str:
    name = "" if kind.isdigit() else f"{kind}, "
    return f"{name}{size / 1e6:.0f} MB on {device}"


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


def verdicts(result: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Name, figure, limit."""
    ours = result["contenders"][Ours.name]
    peers = [figures for name, figures in result["contenders"].items() if name != Ours.name]
    best_stall = min((figures["stall"] for figures in peers), default=0.0)
    yield "stall / memcpy", ours["stall/memcpy"], 0.1
    yield "stall, ms (1.2 x best peer, or 1)", ours["stall"] * 1e3, max(1.2 * best_stall * 1e3, 1.0)
    yield "first save / memcpy", ours["first/memcpy"], 3.0
    yield "cost / memcpy", ours["cost/memcpy"], 2.0
    fsyncing = [figures["cost"] for figures in peers if figures["durable"]]
    if fsyncing:
        yield "cost / best peer that fsyncs", ours["cost"] / min(fsyncing), 0.5
    yield "final / raw write", ours["final/raw"], 1.3
    yield "cold verified load / raw read", ours["load/raw"], 1.6


def growth(small: dict[str, Any], large: dict[str, Any]) -> tuple[str, float, float]:
    """Cost a byte of the larger state against that of the smaller: 1 where it grows linearly."""
    costs = [result["contenders"][Ours.name]["cost"] / result["bytes"] for result in (small, large)]
    return "cost a byte, large / small", costs[1] / max(costs[0], 1e-15), 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="*", default=[300, 1200], help="megabytes of state")
    parser.add_argument("--models", nargs="*", help="default: resnet50 transformer:1000 where there is a CUDA device")
    parser.add_argument("--device", help="of these models; default: cuda where there is one, else cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; its filesystem is what is measured")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    cuda = torch.cuda.is_available()
    models = (["resnet50", "transformer:1000"] if cuda else []) if options.models is None else options.models
    device = options.device or ("cuda" if cuda else "cpu")
    states = [(str(size), "cpu") for size in sorted(options.size)] + [(model, device) for model in models]
    results = []
    for kind, where in states:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(kind, where, options.rounds, options.peer_rounds, Path(folder), say))
    missed = False
    for number, result in enumerate(results):
        figures = list(verdicts(result))
        if 0 < number < len(options.size):
            figures.append(growth(results[0], result))
        result["verdicts"] = [
            {"figure": name, "value": value, "limit": limit, "met": value <= limit} for name, value, limit in figures
        ]
        missed = missed or not all(verdict["met"] for verdict in result["verdicts"])
    if options.output == "json":
        print(json.dumps({"schema_version": 1, "load_average": os.getloadavg(), "results": results}, indent=2))
    else:
        show(results)
        print(f"\nload average {os.getloadavg()[0]:.1f}; above 1 the times say little, the ratios more, the cpu most")
    return 1 if missed else 0


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"\n{result['state']}; memcpy {result['memcpy'] * 1e3:.0f} ms")
        print(
            f"{'':28}{'stall ms':>10}{'first ms':>10}{'cost ms':>10}{'cpu ms':>10}{'final/raw':>10}{'load/raw':>10}"
            "  durable"
        )
        for name, figures in result["contenders"].items():
            print(
                f"{name:28}{figures['stall'] * 1e3:10.1f}{figures['first'] * 1e3:10.1f}{figures['cost'] * 1e3:10.1f}"
                f"{figures['cpu'] * 1e3:10.1f}"
                f"{figures['final/raw']:10.2f}{figures['load/raw']:10.2f}  {'yes' if figures['durable'] else 'no'}"
            )
        ours = result["contenders"][Ours.name]
        print(f"touching fresh memory, part of a load: {ours['fresh/raw']:.2f} x raw read")
        for name, why in result["left_out"].items():
            print(f"{name:28}  left out: {why}")
        for verdict in result["verdicts"]:
            met = "met" if verdict["met"] else "MISSED"
            print(f"  {verdict['figure']:36}{verdict['value']:10.2f}  limit {verdict['limit']:8.2f}  {met}")


if __name__ == "__main__":
    sys.exit(main())
