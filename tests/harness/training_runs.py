"""Real training processes for tests, forked from a server that has torch imported: a start takes 0.1 s, not 3."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked

from spotheal.agent.protocol import contract

OPTIONS = (
    *("--dataset", "digits", "--model", "mlp", "--batch-size", "64", "--epochs", "4"),
    *("--threads", "1", "--save-every", "3", "--ema", "0.9", "--no-imds"),
)
STEPS_A_EPOCH = 23  # 1,437 digits in batches of 64


@dataclass
class Place:
    """One run's folder: its environment, and what it left."""

    folder: Path

    def environment(self) -> dict[str, str]:
        names = {
            contract.CHECKPOINT_DIR: "checkpoints",
            contract.RESULTS_DIR: "results",
            contract.DATASETS_DIR: "datasets",
            contract.NOTICE_FILE: "notice.json",
            contract.REBALANCE_FILE: "rebalance.json",
            contract.PROGRESS_FILE: "progress.json",
            contract.METRICS_FILE: "metrics.jsonl",
        }
        return {name: str(self.folder / path) for name, path in names.items()}

    @property
    def progress(self) -> contract.Progress | None:
        return contract.read_progress(self.folder / "progress.json")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def weights(self) -> bytes:
        """Of the model and of its average, as they were stored at the end."""
        return b"".join((self.folder / "results" / f"{name}.safetensors").read_bytes() for name in ("model", "ema"))

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def start(self, *more: str) -> BaseProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = ([*OPTIONS, *more], self.environment(), str(self.folder))
        process = forked.context().Process(target=_train, args=arguments)
        process.start()
        return process

    def run(self, *more: str) -> int | None:
        """Train to the end; the exit code."""
        with ended(self.start(*more)) as process:
            process.join(60)
            return process.exitcode

    def wait_for(self, seen: Callable[[contract.Progress], bool], process: BaseProcess) -> contract.Progress:
        """The first progress for which `seen` holds; AssertionError where the process ends, or 30 s pass, before it."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            alive, progress = process.is_alive(), self.progress  # in this order: it may end between the two
            if progress is not None and seen(progress):
                return progress
            assert alive, f"it ended with {process.exitcode}:\n{self.log}"
            time.sleep(0.01)
        raise AssertionError(f"never seen:\n{self.log}")


class ended:
    """No process outlives its test."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def __enter__(self) -> BaseProcess:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def places(folder: Path) -> Iterator[Place]:
    number = 0
    while True:
        yield Place(folder / f"run-{number}")
        number += 1


def _train(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A trainer of its own forks its DataLoader's workers, and they end with it; here it would inherit this server's
    # method, whose workers wait for a server of their own and outlive a kill.
    multiprocessing.set_start_method("fork", force=True)
    from spotheal.training.__main__ import main

    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)
