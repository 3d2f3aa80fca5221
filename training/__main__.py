"""`python -m spotheal.training`: the example trainer. It keeps the whole contract of docs/contract.md.

Without the agent's environment it works in the current folder: ./datasets, ./checkpoints, ./results.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.contract import write_atomically
from spotheal.agent.protocol.errors import ConfigError, SpothealError
from spotheal.training.example.options import THREADS_MAX, config_of, of_entry, parser
from spotheal.training.params import index, params

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 75 saved and stopped for an interruption, 2 wrong options, 130 Ctrl-C, 1 anything else."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    chosen = parser().parse_args(arguments)
    try:
        return run(chosen)
    except ConfigError as fault:
        print(f"error: {fault}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except SpothealError as fault:
        print(f"error: {fault}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except KeyboardInterrupt:  # SIGTERM saves first; Ctrl-C is for a person who wants it to end now
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def run(options: argparse.Namespace) -> int:
    options, position = of_this_run(options)
    folders = Folders(os.environ, position)
    from spotheal.training.distributed import Ranks, on_gpus, start, world

    ranks_started = world()
    if ranks_started.size == 1 and (finished := read_finished(folders, options)) is not None:
        print(f"already finished at step {finished['step']}: {folders.model / 'model.safetensors'}", flush=True)
        return contract.EXIT_DONE

    start(ranks_started, options.device)
    ranks = Ranks()
    if ranks.size > 1 and ranks.first(read_finished(folders, options)) is not None:
        return contract.EXIT_DONE
    if ranks.size > 1 and ranks.rank == 0:
        print(ranks_started.describe(on_gpus(options.device)), flush=True)
    from spotheal.training.allocator import keep_freed_memory
    from spotheal.training.checkpoint import Store
    from spotheal.training.example import build, loop
    from spotheal.training.notice import Watcher
    from spotheal.training.pace import Pace, interruption_seconds
    from spotheal.training.report import Metrics, Reporter

    if ranks.rank == 0:
        folders.refuse_unusable()
    with Watcher.from_environment(imds=not options.no_imds) as watcher:
        report = Reporter(folders.progress, Metrics(folders.metrics)) if ranks.rank == 0 else loop.silent_reporter()
        store = (
            loop.NoStore()
            if ranks.rank
            else Store(
                folders.checkpoints,
                options.slots,
                on_end=lambda outcome: report.saved(outcome.step, outcome.path) if outcome.path is not None else None,
                before_commit=report.metrics.sync,
            )
        )
        try:
            training = build.build(options, folders.datasets, ranks.first(saved_threads(store)), ranks)
            if training.device.type == "cpu":
                keep_freed_memory()
            loop.resume(training, store, report)
            pace = Pace(options.save_every, interruption_seconds(os.environ, options.interruption_hours))
            ended = loop.train(training, store, pace, watcher, report)
            if ended is loop.Ended.SAVED_AND_STOPPED:
                report.say(f"saved at step {training.counters.step} and stopped for the notice")
                return contract.EXIT_SAVED_AND_STOPPED
            if isinstance(store, Store):
                try:
                    write_results(training, store, folders, options)
                except OSError as fault:
                    raise results_lost(folders.results, fault) from fault
            ranks.first(True)  # no rank ends, and with it its launcher, before the results are there
            report.say(f"done: {training.counters.step} steps, {folders.model / 'model.safetensors'}")
            return contract.EXIT_DONE
        finally:
            store.close()
            report.metrics.close()


def of_this_run(options: argparse.Namespace) -> tuple[argparse.Namespace, int | None]:
    """The options of this run, those of its entry of a sweep over the command's own, and which entry that is."""
    entry_index = options.index if options.params or options.index is not None else None
    position = index() if entry_index is None else entry_index
    entry = params(entry_index, source=options.params)
    if entry:
        print(f"entry {position}: {json.dumps(entry)}", flush=True)
    return of_entry(options, entry, position), position


class Folders:
    """Where things lie: as the agent says, else below the current folder. Of a sweep's run the weights have a folder
    of their own, so that results of all runs beside each other are `<index>/model/…`."""

    def __init__(self, environment: Any, index: int | None = None) -> None:
        def path(name: str, default: str) -> Path:
            return Path(environment.get(name) or default)

        self.datasets = path(contract.DATASETS_DIR, "datasets")
        self.checkpoints = path(contract.CHECKPOINT_DIR, "checkpoints")
        self.results = path(contract.RESULTS_DIR, "results")
        self.model = self.results if index is None else self.results / "model"
        self.metrics = path(contract.METRICS_FILE, str(self.results / "metrics.jsonl"))
        progress = environment.get(contract.PROGRESS_FILE)
        self.progress = Path(progress) if progress else None

    def refuse_unusable(self) -> None:
        """Make those that are written to; ConfigError, and none is made, where something else has one's name."""
        from spotheal.training.slotfile.files import refuse_no_folder, refuse_unwritable

        written = (
            (self.checkpoints, "no checkpoint can be saved", contract.CHECKPOINT_DIR),
            (self.results, "no results can be written", contract.RESULTS_DIR),
        )
        # That of the data sets may be read-only where it has the data set already, and `fake` needs none.
        for folder in ((self.datasets, "no data set can be kept", contract.DATASETS_DIR), *written):
            refuse_no_folder(*folder)
        for folder in written:
            refuse_unwritable(*folder)


def saved_threads(store: Any) -> int:
    """The number of CPU threads that the newest checkpoint was made with; 0 where there is none."""
    info = store.newest_info()
    threads = info.get("threads") if isinstance(info, dict) else None
    return threads if isinstance(threads, int) and 0 < threads <= THREADS_MAX else 0


# -------------------------------------------------------------------------------------------------------- the results
def results_lost(folder: Path, fault: OSError) -> SpothealError:
    return SpothealError(
        f"training is done and saved, its results could not be written to {folder}: {fault.strerror or fault}",
        next_step="make room or mend the folder (`df -h`, `ls -ld`); the same command then writes them",
    )


def write_results(training: Any, store: Any, folders: Folders, options: argparse.Namespace) -> None:
    """model.safetensors (and ema, best), then metrics.json: its presence says that the run is finished."""
    from spotheal.training.example.export import export

    counters, folder = training.counters, folders.model
    sums = {"model.safetensors": export(folder / "model.safetensors", training.model.state_dict(), {})}
    if training.average is not None:
        sums["ema.safetensors"] = export(folder / "ema.safetensors", training.average.state_dict(), {})
    if options.best and (chosen := store.load_best()) is not None:
        weights = chosen.tree["parts"]["model"]
        sums["best.safetensors"] = export(folder / "best.safetensors", weights, {"step": chosen.step})
    body = {
        "finished": True,
        "step": counters.step,
        "epochs": training.epochs,
        "best": {"metric": options.best, "value": counters.best, "step": counters.best_step},
        "sha256": sums,
        "config": training.config,
    }
    write_atomically(folders.results / "metrics.json", json.dumps(body, indent=2) + "\n")


def read_finished(folders: Folders, options: argparse.Namespace) -> dict[str, Any] | None:
    """metrics.json of a run with these very options, where its weights are there too; else None."""
    try:
        body = json.loads((folders.results / "metrics.json").read_text(encoding="utf-8"))
        is_same = body["finished"] is True and body["config"] == config_of(options)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return body if is_same and (folders.model / "model.safetensors").is_file() else None


if __name__ == "__main__":
    sys.exit(main())
