"""Programs that nobody here wrote, each through `fleetctl rehearse`: what came of them, as a table.

    python bench/foreign.py DIR... [--scenario kill] [--reference] [--jobs 1] [--kept FOLDER]

DIR holds a `job.toml`, whose `repository` is the program, and may hold a `measure.toml`:

    step = 'iter (\\d+):'    how the program prints its step (or epoch): the first group is a number
    save_every = 200        its own save interval, in the same unit
    resumes = true          whether it goes on from its own saves as it is run here

Without `step` the lost steps are unknown: leave it out if the program counts from 0 again after a resume (makemore).
A step is lost if a machine printed it and a later one prints it again. Ends with 1 if a program was not done, lost more
than one of its save intervals, or lost something and the rehearsal said nothing of it; also if the rehearsal of one
that resumes did not pass, or that of one that does not resume passed. Fetched code stays outside the repository.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spotheal.fleet.files.config import tomllib
from spotheal.fleet.rehearsal.scenarios.job import example_fleet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SECONDS_MAX = 3600
FLEETCTL = Path(sys.executable).with_name("fleetctl")


@dataclass(frozen=True)
class Row:
    """`lost`: steps printed again after each machine that was ended, None if its steps are not known."""

    program: str
    scenario: str
    exit_code: int
    phase: str
    ends: tuple[str, ...]
    lost: tuple[int | None, ...]
    save_every: int | None
    messages: tuple[str, ...]
    resumes: bool | None = None  # as its measure.toml has it

    @property
    def is_as_promised(self) -> bool:
        """A loss of more than a save interval is right only if it was named, or if the program does not resume."""
        known = [steps for steps in self.lost if steps is not None]
        within = self.save_every is not None and all(steps <= self.save_every for steps in known)
        if self.resumes is None:
            return self.phase == "done" and (within or not any(known) or bool(self.messages))
        verdict_is_right = (self.exit_code == 0) == self.resumes
        return self.phase == "done" and verdict_is_right and (within or not any(known) or not self.resumes)


def rehearse(folder: Path, scenario: str, kept: Path, reference: bool) -> Row:
    job = tomllib.loads((folder / "job.toml").read_text(encoding="utf-8"))
    measure_file = folder / "measure.toml"
    measure = tomllib.loads(measure_file.read_text(encoding="utf-8")) if measure_file.exists() else {}
    fleet_file = kept.parent / f"{kept.name}.json"
    fleet_file.write_text(json.dumps(example_fleet(job["job"]["name"])), encoding="utf-8")
    argv = [str(FLEETCTL), "rehearse", str(fleet_file), "--job", str(folder / "job.toml"), "--scenario", scenario]
    argv += [] if reference else ["--no-reference"]
    argv += ["--keep", str(kept), "--output", "json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return Row(folder.name, scenario, 124, "-", (), (), None, (f"not over after {_SECONDS_MAX} s",))
    kept.with_suffix(".log").write_text(done.stderr, encoding="utf-8")
    try:
        document = json.loads(done.stdout)
    except ValueError:
        told = [line for line in done.stderr.splitlines() if line.startswith("fleetctl:")] or ["it said nothing"]
        return Row(folder.name, scenario, done.returncode, "-", (), (), None, tuple(told))
    return Row(
        program=folder.name,
        scenario=scenario,
        exit_code=done.returncode,
        phase=str(document["phase"]),
        ends=tuple(machine["end"] for machine in document["timeline"]),
        lost=tuple(lost_steps(document["timeline"], kept, measure.get("step"))),
        save_every=measure.get("save_every"),
        messages=(*document["broken"], *document["notes"]),
        resumes=measure.get("resumes"),
    )


def lost_steps(timeline: list[Mapping[str, Any]], kept: Path, pattern: str | None) -> list[int | None]:
    """By the progress that the trainer reported, else by what it printed."""
    trained = [machine for machine in timeline if machine["trained"] is not None]
    if any(machine["last_step"] is not None for machine in trained):
        reported = [(machine["resumed_step"], machine["last_step"]) for machine in trained]
        return [_difference(last, first) for (_, last), (first, _) in pairwise(reported)]
    printed = [_printed(kept / "instances" / machine["instance"] / "logs" / "trainer.log", pattern)
               for machine in trained]  # fmt: skip
    return [_difference(max(before) + 1, after[0]) if before and after else None for before, after in pairwise(printed)]


def _difference(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else max(0, last - first)


def _printed(log: Path, pattern: str | None) -> list[int]:
    if pattern is None or not log.exists():
        return []
    return [int(found.group(1)) for found in re.finditer(pattern, log.read_text(encoding="utf-8", errors="replace"))]


def table(rows: list[Row]) -> Table:
    shown = Table(show_lines=True)
    for title in ("program", "scenario", "exit", "end", "machines", "steps lost", "saves every", "the rehearsal says"):
        shown.add_column(title, overflow="fold")
    for row in rows:
        lost = ", ".join("?" if steps is None else str(steps) for steps in row.lost) or "-"
        shown.add_row(
            row.program, row.scenario, str(row.exit_code), row.phase, ", ".join(row.ends), lost,
            "-" if row.save_every is None else str(row.save_every), "\n".join(row.messages) or "-",
            style="" if row.is_as_promised else "bold red",
        )  # fmt: skip
    return shown


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folders", metavar="DIR", type=Path, nargs="+")
    arguments.add_argument("--scenario", action="append", help="may be repeated; kill if left out")
    arguments.add_argument("--reference", action="store_true", help="also compare the weights, in twice the time")
    arguments.add_argument("--jobs", type=int, default=1, help="how many rehearsals at once")
    arguments.add_argument("--kept", type=Path, help="leaves volumes and logs there")
    options = arguments.parse_args()
    scenarios = options.scenario or ["kill"]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        kept: Path = options.kept or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        work = [(folder, scenario, kept / f"{folder.name}-{scenario}")
                for folder in options.folders for scenario in scenarios]  # fmt: skip
        rows = list(pool.map(lambda each: rehearse(*each, options.reference), work))
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    return 0 if all(row.is_as_promised for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
