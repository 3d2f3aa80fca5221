"""Samples a second of the trainer with saves at the automatic interval, against the bare loop of the same model.

`python bench/throughput.py [--seconds 60 300] [--alike] [--output json]`. Both train in one process and take turns,
epoch by epoch, so that what the machine does meanwhile meets both; the trainer's time is all from its first step to its
end: saves (a pending one is waited for at the end of its turn, and the wait counted), progress file, metrics, the last
save. The bare loop has none of ours: a plain DataLoader with a shuffling sampler, the same model, optimizer and
schedule, the same figures of the validation. With `--alike` it draws its samples as the trainer does, by whole batches:
then what is left is what saving, watching and reporting take. One turn differs from the next by a tenth: it goes on, up
to the second number of seconds, until the standard error of the ratio is at most 0.3 %.
The trainer tells glibc's allocator to keep what a step frees (training/allocator.py). Here that speeds up both loops;
what it does is measured apart, by the bare loop in processes with it and without. Exit 1 below 99 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spotheal.training.allocator import keep_freed_memory
from spotheal.training.checkpoint import Store
from spotheal.training.example import build, loop, options
from spotheal.training.notice import Watcher
from spotheal.training.pace import Pace, interruption_seconds
from spotheal.training.report import Metrics, Reporter
from spotheal.training.sampler import collate
from spotheal.training.slotfile.outcome import Outcome

LIMIT = 0.99
ERROR_MAX = 0.003  # of the ratio, one standard deviation
PROGRESS_SECONDS = 10.0


class Turns(Reporter):
    """At the end of each of the trainer's epochs the bare loop has its turn, on a clock the trainer does not see."""

    def __init__(self, progress: Path, metrics: Path, bare: Iterator[None], seconds: list[float]) -> None:
        super().__init__(progress, Metrics(metrics))
        self.bare, self.seconds = bare, seconds
        self.over = False
        self.store: Store | None = None
        self.plain: list[tuple[float, float]] = []  # seconds, and seconds of processor time, of each turn
        self.mine: list[tuple[float, float]] = []
        self.trained = 0.0  # seconds of `mine`
        self.away = 0.0
        self.told = time.perf_counter()
        self.began = now()

    def say(self, text: str) -> None:
        if self.store is None or not text.startswith("epoch"):
            return
        self.store.wait_copied()
        self.store.flush()
        ended = now()
        self.mine.append(between(self.began, ended))
        self.trained += self.mine[-1][0]
        next(self.bare)
        self.began = now()
        self.plain.append(between(ended, self.began))
        self.away += self.began[0] - ended[0]
        least, most = self.seconds
        if time.perf_counter() - self.told >= PROGRESS_SECONDS:
            self.told = time.perf_counter()
            say(f"{self.trained:.0f} of {least:.0f} to {most:.0f} s trained, as many bare; error {self.error():.2%}")
        self.over = self.trained >= most or (self.trained >= least and self.error() <= ERROR_MAX)

    def error(self) -> float:
        """The standard error of plain over mine, from how much the turns differ among themselves."""
        pairs = [(plain[0], mine[0]) for plain, mine in zip(self.plain, self.mine, strict=False)]
        if len(pairs) < 2:
            return float("inf")
        plain, mine = map(sum, zip(*pairs, strict=True))
        rest = [one - plain / mine * other for one, other in pairs]
        return statistics.stdev(rest) * len(pairs) ** 0.5 / mine

    def monotonic(self) -> float:
        return time.monotonic() - self.away


def say(text: str) -> None:
    """Progress: not part of what is printed as the result."""
    print(text, file=sys.stderr, flush=True)


def now() -> tuple[float, float]:
    """Seconds, and seconds of processor time of this process: these hold on a busy machine too."""
    return time.perf_counter(), time.process_time()


def between(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def bare_epochs(run: loop.Run, alike: bool = False) -> Iterator[None]:
    """One epoch at each `next`, validation included as in ours."""
    datasets: list[Any] = [run.train_loader.dataset, run.valid_loader.dataset]
    if not alike:
        datasets = [TensorDataset(*dataset.tensors) for dataset in datasets]
    more: dict[str, Any] = {"batch_size": run.train_loader.batch_size, "collate_fn": collate if alike else None}
    loader, valid_loader = DataLoader(datasets[0], shuffle=True, **more), DataLoader(datasets[1], **more)
    while True:
        run.model.train()
        for inputs, targets in loader:
            run.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(run.model(inputs.to(run.device)), targets.to(run.device))
            loss.backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()
            run.scheduler.step()
        run.model.eval()
        total, right, count = 0.0, 0, 0
        with torch.no_grad():
            for inputs, targets in valid_loader:
                inputs, targets = inputs.to(run.device), targets.to(run.device)
                outputs = run.model(inputs)
                total += nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
                right += (outputs.argmax(1) == targets).sum().item()
                count += len(targets)
        yield


class Ends(Watcher):
    """A notice once the time is over: the trainer saves and leaves."""

    turns: Turns | None = None

    @property
    def notice(self) -> Any:
        turns = self.turns
        return "the time is over" if turns is not None and turns.over else super().notice


def measure(
    arguments: list[str], seconds: list[float], folder: Path, memory: Path, alike: bool = False
) -> dict[str, Any]:
    """`memory` is a folder in memory, for the progress file: as /run is, where the agent has it."""
    chosen = options.parser().parse_args([*arguments, "--epochs", "100000"])
    run, twin = build.build(chosen, folder / "datasets", 0), build.build(chosen, folder / "datasets", 0)
    bare = bare_epochs(twin, alike)
    next(bare)  # libraries are loaded, threads are there
    turns = Turns(memory / "progress.json", folder / "metrics.jsonl", bare, seconds)
    saves: list[Outcome] = []
    store = Store(folder / "checkpoints", on_end=saves.append)
    loop.resume(run, store, turns)
    pace = Pace(chosen.save_every, interruption_seconds(os.environ, chosen.interruption_hours), turns.monotonic)
    with Ends() as watcher:
        watcher.turns, turns.store, turns.began = turns, store, now()
        loop.train(run, store, pace, watcher, turns)
        turns.mine.append(between(turns.began, now()))
    store.close()
    plain, mine = [tuple(map(sum, zip(*rows, strict=True))) for rows in (turns.plain, turns.mine)]
    samples = run.sampler.length * len(turns.plain)
    trained = samples + run.sampler.state_dict()["position"]
    ratio, cpu_ratio = [(trained / ours) / (samples / without) for ours, without in zip(mine, plain, strict=True)]
    return {
        "bare_samples_per_second": samples / plain[0],
        "ours_samples_per_second": trained / mine[0],
        "ratio": ratio,
        "standard_error": turns.error(),
        "cpu_ratio": cpu_ratio,
        "seconds": mine[0],
        "epochs": len(turns.plain),
        "saves": len(saves),
        "interval_seconds": pace.interval_seconds,
    }


def allocator_gain(arguments: list[str], rounds: int) -> float:
    """How many times as long an epoch of the bare loop takes with glibc's allocator as it comes."""
    took: dict[str, list[float]] = {"kept": [], "as it comes": []}
    for kind, seconds in list(took.items()) * rounds:
        say(f"the bare loop by itself, the allocator {kind}: round {len(seconds) + 1} of {rounds}")
        command = [sys.executable, __file__, "--bare-epochs", kind, *arguments]
        seconds.append(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    return statistics.median(took["as it comes"]) / statistics.median(took["kept"])


def bare_epoch_seconds(arguments: list[str], kind: str, folder: Path) -> float:
    """The median epoch of the bare loop alone, in this process; the first ones are not counted."""
    if kind == "kept":
        keep_freed_memory()
    bare = bare_epochs(build.build(options.parser().parse_args(arguments), folder, 0))
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        next(bare)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[4:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs=2, default=[60.0, 300.0], metavar=("LEAST", "MOST"),
                        help="that the trainer trains; the bare loop as long")  # fmt: skip
    parser.add_argument("--alike", action="store_true", help="the bare loop draws whole batches too")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--bare-epochs", choices=("kept", "as it comes"), help=argparse.SUPPRESS)
    known, rest = parser.parse_known_args()
    arguments = ["--dataset", "digits", "--model", "convnet", "--best", "", "--no-imds", *rest]
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=shared) as memory:
        if known.bare_epochs:
            print(bare_epoch_seconds(arguments, known.bare_epochs, Path(folder)))
            return 0
        gain = allocator_gain(rest, 3)
        kept = keep_freed_memory()
        body = measure(arguments, known.seconds, Path(folder), Path(memory), known.alike)
    body |= {"allocator_gain": gain if kept else None, "alike": known.alike}
    body |= {"schema_version": 3, "load_average": os.getloadavg()[0], "limit": LIMIT, "met": body["ratio"] >= LIMIT}
    print(json.dumps(body, indent=2) if known.output == "json" else _line(body))
    return 0 if body["met"] else 1


def _line(body: dict[str, Any]) -> str:
    gain = body["allocator_gain"]
    return (
        f"bare {body['bare_samples_per_second']:.0f} samples/s, ours {body['ours_samples_per_second']:.0f},"
        f" {body['ratio']:.1%} +- {body['standard_error']:.1%} (at least {LIMIT:.0%}):"
        f" {'met' if body['met'] else 'MISSED'}; {body['epochs']} epochs,"
        f" {body['saves']} saves, the next after {body['interval_seconds']:.0f} s"
        f"; by processor time {body['cpu_ratio']:.1%}, load average {body['load_average']:.1f}"
        + (f"\nkeeping freed memory, which the trainer does: {gain:.2f} x the speed of both" if gain else "")
    )


if __name__ == "__main__":
    sys.exit(main())
