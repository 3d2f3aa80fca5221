"""Samples a second of the trainer with saves at the automatic interval, against the bare loop of the same model.

`python bench/throughput.py [--output json]`; both in one run, in turn, medians of the rounds. Exit 1 below 99 %.
The bare loop has none of ours: a plain DataLoader with a shuffling sampler, the same model, optimizer and schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from spotheal.training import build, loop, options
from spotheal.training.checkpoint import Store
from spotheal.training.notice import Watcher
from spotheal.training.pace import Pace
from spotheal.training.report import Metrics, Reporter

LIMIT = 0.99


class Quiet(Reporter):
    def say(self, text: str) -> None:
        pass


def bare(run: loop.Run, epochs: int) -> float:
    """Seconds of `epochs` epochs, validation included as in ours."""
    loader: DataLoader[Any] = DataLoader(run.train_loader.dataset, batch_size=run.train_loader.batch_size, shuffle=True)
    began = time.perf_counter()
    for _ in range(epochs):
        run.model.train()
        for inputs, targets in loader:
            run.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(run.model(inputs.to(run.device)), targets.to(run.device))
            loss.backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()
            run.scheduler.step()
        run.model.eval()
        with torch.no_grad():
            for inputs, targets in run.valid_loader:
                nn.functional.cross_entropy(run.model(inputs.to(run.device)), targets.to(run.device)).item()
    return time.perf_counter() - began


def ours(run: loop.Run, folder: Path, pace: Pace) -> float:
    report = Quiet(folder / "progress.json", Metrics(folder / "metrics.jsonl"))
    with Watcher() as watcher:
        store = Store(folder / "checkpoints")
        loop.resume(run, store, report)
        began = time.perf_counter()
        loop.train(run, store, pace, watcher, report)
        seconds = time.perf_counter() - began
        store.close()
    return seconds


def timed(call: Callable[..., float], *arguments: Any) -> tuple[float, float]:
    """Seconds as `call` tells them, and seconds of processor time of this process: these hold on a busy machine too."""
    began = time.process_time()
    seconds = call(*arguments)
    return seconds, time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    known, rest = parser.parse_known_args()
    arguments = ["--dataset", "digits", "--model", "convnet", "--epochs", "12", "--best", "", "--no-imds", *rest]
    chosen = options.parser().parse_args(arguments)
    ratios, cpu_ratios, rates = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(known.rounds):
            place = folder / str(number)
            os.mkdir(place)
            run = build.build(chosen, folder / "datasets", 0)

            def plainly() -> tuple[float, float]:
                return timed(bare, build.build(chosen, folder / "datasets", 0), chosen.epochs)

            def with_ours() -> tuple[float, float]:
                return timed(ours, run, place, Pace(chosen.save_every, chosen.interruption_hours * 3600))  # noqa: B023

            # The order changes from round to round: whoever is second finds warm caches and a warmer processor.
            if number % 2:
                mine, plain = with_ours(), plainly()
            else:
                plain, mine = plainly(), with_ours()
            ratios.append(plain[0] / mine[0])
            cpu_ratios.append(plain[1] / mine[1])
            rates.append((run.sampler.length * chosen.epochs / plain[0], run.sampler.length * chosen.epochs / mine[0]))
    ratio = statistics.median(ratios)
    body = {
        "schema_version": 1,
        "bare_samples_per_second": statistics.median(rate for rate, _ in rates),
        "ours_samples_per_second": statistics.median(rate for _, rate in rates),
        "ratio": ratio,
        "cpu_ratio": statistics.median(cpu_ratios),
        "load_average": os.getloadavg()[0],
        "limit": LIMIT,
        "met": ratio >= LIMIT,
    }
    print(json.dumps(body, indent=2) if known.output == "json" else _line(body))
    return 0 if body["met"] else 1


def _line(body: dict[str, Any]) -> str:
    return (
        f"bare {body['bare_samples_per_second']:.0f} samples/s, ours {body['ours_samples_per_second']:.0f},"
        f" {body['ratio']:.1%} (at least {LIMIT:.0%}): {'met' if body['met'] else 'MISSED'}"
        f"; by processor time {body['cpu_ratio']:.1%}, load average {body['load_average']:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
