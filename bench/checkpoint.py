"""Checkpoints beside their peers, in one run: `python bench/checkpoint.py [--size 300 1200] [--output json]`.

stall   training blocked: in the call, and before the optimizer's step
first   the same at the first save of a process
cost    extra training time until the save is durable, so hidden interference counts (peers that never fsync: ended)
final   a durable save with training stopped, against the same bytes written with O_DIRECT and fsynced
cpu     the same as cost in seconds of processor time of this process, which other programs disturb less
load    a cold load, against a cold raw read of the same file; ours verifies every byte, into fresh memory
fresh   what touching as many bytes of fresh memory takes, against that raw read: part of every load
bare    what a memcpy, and a write with O_DIRECT, of as many bytes in a thread cost the training, to compare
step    a step of the training beside the contender, with no save under way: idle threads of OpenMP slow it

Each has a process of its own (contest.py says why). Rounds are paired: the floors take their turn in each, ratios are
made within it, medians are printed. Peers have `--peer-rounds`, and are compared by their multiples of the memcpy
beside them. Exit 1 where a figure of ours is missed. Peers that are not installed, or do not work here, are named with
the reason and left out (`pip install --no-deps torch_checkpointing` for that one). A cost is the small difference of
long times: its standard error is printed.
The training computes on every core, where whatever runs beside it slows it down; `--threads 1` leaves the others free.
Where there is a CUDA device, a ResNet-50 and a model of 1 B parameters on it are measured as well (`--models`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, Ours


def measure(
    kind: str, device: str, threads: int, rounds: int, peer_rounds: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every contender in a process of its own, one after the other: see contest.py."""
    size = 0
    figures: dict[str, dict[str, list[float]]] = {}
    left_out = {}
    for one in CONTENDERS:
        turns = rounds if one is Ours else peer_rounds
        if not turns:
            continue
        say(f"{one.name}: {turns} rounds of {kind} on {device}")
        with tempfile.TemporaryDirectory(dir=folder) as own:
            body = in_own_process(one.name, kind, device, threads, turns, Path(own))
        size = body.get("bytes", size)
        if "left_out" in body:
            left_out[one.name] = body["left_out"]
            say(f"left out: {one.name}: {body['left_out']}")
        else:
            figures[one.name] = body["figures"]
    if Ours.name not in figures:
        raise SystemExit(f"{Ours.name} cannot be measured: {left_out[Ours.name]}")
    medians = {
        name: {figure: statistics.median(values) for figure, values in of_one.items()}
        | {"durable": next(one.durable for one in CONTENDERS if one.name == name)}
        for name, of_one in figures.items()
    }
    return {
        "state": title(kind, device, threads, size),
        "threads": threads,
        "bytes": size,
        "rounds": rounds,
        "memcpy": medians[Ours.name]["memcpy"],
        "cost_error": standard_error(figures[Ours.name]["cost/memcpy"]),
        "contenders": medians,
        "left_out": left_out,
    }


def in_own_process(name: str, kind: str, device: str, threads: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What contest.py says; `left_out` where it says nothing. What it leaves behind (peers have processes) is ended."""
    program = str(Path(__file__).with_name("contest.py"))
    command = [sys.executable, program, name, kind, device, str(rounds), str(folder)]
    # Not torch.set_num_threads, which the peers' own threads know nothing of.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        assert process.stdout is not None
        said = [line for line in iter(process.stdout.readline, "") if line.startswith('{"bytes"')][-1:]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return dict(json.loads(said[0])) if said else {"left_out": f"its process ended with {process.returncode}"}


def standard_error(values: list[float]) -> float:
    """Of their mean, in their unit; that of a median is about 1.25 times as large. 0 where there is one value only."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def title(kind: str, device: str, threads: int, size: int) -> str:
    name = "" if kind.isdigit() else f"{kind}, "
    return f"{name}{size / 1e6:.0f} MB on {device}, training on {threads} of {os.cpu_count()} cores"


def verdicts(result: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Name, figure, limit."""
    ours = result["contenders"][Ours.name]
    peers = [figures for name, figures in result["contenders"].items() if name != Ours.name]
    yield "stall / memcpy", ours["stall/memcpy"], 0.1
    if peers:
        best = min(figures["stall/memcpy"] for figures in peers) * ours["memcpy"]
        yield "stall, ms (1.2 x best peer, or 1)", ours["stall"] * 1e3, max(1.2 * best * 1e3, 1.0)
    yield "first save / memcpy", ours["first/memcpy"], 3.0
    yield "cost / memcpy", ours["cost/memcpy"], 2.0
    fsyncing = [figures["cost/memcpy"] for figures in peers if figures["durable"]]
    if fsyncing:
        yield "cost / best peer that fsyncs", ours["cost/memcpy"] / min(fsyncing), 0.5
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
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="cores the training computes on: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; its filesystem is what is measured")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if options.threads < 1:
        parser.error("--threads: 1 at least")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    cuda = torch.cuda.is_available()
    models = (["resnet50", "transformer:1000"] if cuda else []) if options.models is None else options.models
    device = options.device or ("cuda" if cuda else "cpu")
    states = [(str(size), "cpu") for size in sorted(options.size)] + [(model, device) for model in models]
    results = []
    for kind, where in states:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(
                measure(kind, where, options.threads, options.rounds, options.peer_rounds, Path(folder), say)
            )
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
        print(json.dumps({"schema_version": 4, "load_average": os.getloadavg(), "results": results}, indent=2))
    else:
        show(results)
        print(f"\nload average {os.getloadavg()[0]:.1f}; above 1 the times say little, the ratios more, the cpu most")
    return 1 if missed else 0


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"\n{result['state']}; memcpy {result['memcpy'] * 1e3:.0f} ms")
        print(
            f"{'':28}{'stall ms':>10}{'first ms':>10}{'cost ms':>10}{'cpu ms':>10}{'final/raw':>10}{'load/raw':>10}"
            f"{'step ms':>9}  durable"
        )
        for name, figures in result["contenders"].items():
            print(
                f"{name:28}{figures['stall'] * 1e3:10.1f}{figures['first'] * 1e3:10.1f}{figures['cost'] * 1e3:10.1f}"
                f"{figures['cpu'] * 1e3:10.1f}"
                f"{figures['final/raw']:10.2f}{figures['load/raw']:10.2f}"
                f"{figures['step'] * 1e3:9.0f}  {'yes' if figures['durable'] else 'no'}"
            )
        ours = result["contenders"][Ours.name]
        print(f"touching fresh memory, part of a load: {ours['fresh/raw']:.2f} x raw read")
        print(
            f"as many bytes in a thread beside the training cost it: copied {ours['bare copy/memcpy']:.2f} x memcpy, "
            f"written {ours['bare write/memcpy']:.2f} x; ours in all {ours['cost/memcpy']:.2f} x, "
            f"standard error {result['cost_error']:.2f}"
        )
        for name, why in result["left_out"].items():
            print(f"{name:28}  left out: {why}")
        for verdict in result["verdicts"]:
            met = "met" if verdict["met"] else "MISSED"
            print(f"  {verdict['figure']:36}{verdict['value']:10.2f}  limit {verdict['limit']:8.2f}  {met}")


if __name__ == "__main__":
    sys.exit(main())
