"""Kills the mutants: `python tests/mutants/run.py [--quick] [--only TEXT]`; exit 1 where one survives.

Each is made in a copy of the source tree, never in the tree itself; the tests named for it run there in a process of
their own. Killed is what makes a test fail: one that cannot even be collected proves nothing and counts as an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("agent", "fleet", "training", "userdata", "iam", "tests", ".ci", "setup.cfg", "pyproject.toml")
SECONDS_MAX = 300.0
AT_ONCE = 2
TESTS_FAILED = 1  # pytest's exit code


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed: bool
    said: str  # the test that fell, or why there is no verdict
    seconds: float
    error: bool = False


class Trees:
    """Copies of the source tree, one for each run that goes on at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._free, self._made = folder, list[Path](), 0
        self._lock = threading.Lock()

    def take(self) -> Path:
        with self._lock:
            if self._free:
                return self._free.pop()
            self._made += 1
            target = self._folder / f"tree-{self._made}"
        target.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache", ".hypothesis")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, target / name)
        return target

    def give_back(self, tree: Path) -> None:
        with self._lock:
            self._free.append(tree)


def check_table(mutants: tuple[Mutant, ...] = MUTANTS) -> list[str]:
    """What of the table no longer fits the sources."""
    faults = []
    for mutant in mutants:
        found = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.original)
        if found != 1:
            faults.append(f"{mutant.name}: its text stands in {mutant.file} {found} times, not once")
        missing = [test for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()]
        faults += [f"{mutant.name}: there is no {test}" for test in missing]
    return faults


def try_mutant(mutant: Mutant, trees: Trees) -> Verdict:
    tree = trees.take()
    file = tree / mutant.file
    intact = file.read_text(encoding="utf-8")
    began = time.monotonic()
    try:
        file.write_text(intact.replace(mutant.original, mutant.mutated), encoding="utf-8")
        code, out = run_tests(tree, mutant.tests)
    finally:
        file.write_text(intact, encoding="utf-8")
        trees.give_back(tree)
    seconds = time.monotonic() - began
    fallen = re.search(r"^FAILED (\S+)", out, re.MULTILINE)
    if code == TESTS_FAILED and fallen:
        return Verdict(mutant, True, fallen.group(1), seconds)
    if code == 0:
        return Verdict(mutant, False, "no test fell", seconds)
    return Verdict(mutant, False, f"pytest ended with {code}:\n{out[-1500:]}", seconds, error=True)


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit code and output; a suite that the mutant makes hang has fallen too."""
    # The copy must come before an editable install of the tree itself.
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / ".ci/import_path"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # hypothesis' plugin alone takes a second to import
    }
    environment.pop("PYTEST_CURRENT_TEST", None)
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            argv, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, f"FAILED {tests[0]} hangs"
    return done.returncode, done.stdout + done.stderr


def run(mutants: tuple[Mutant, ...], folder: Path) -> list[Verdict]:
    trees = Trees(folder)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda mutant: try_mutant(mutant, trees), mutants))


def score(verdicts: list[Verdict]) -> str:
    killed = sum(verdict.killed for verdict in verdicts)
    return f"{killed} of {len(verdicts)} mutants killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only those that `make test` runs")
    parser.add_argument("--only", default="", help="those whose name has this text")
    options = parser.parse_args()
    chosen = tuple(one for one in MUTANTS if options.only in one.name and (one.quick or not options.quick))
    faults = check_table()
    for fault in faults:
        print(f"error: {fault}")
    if faults:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        verdicts = run(chosen, Path(folder))
    for verdict in verdicts:
        word = "killed" if verdict.killed else "ERROR" if verdict.error else "SURVIVES"
        print(f"{word:<9}{verdict.mutant.name:<55}{verdict.seconds:5.1f} s  {verdict.said}")
    print(score(verdicts))
    return 0 if all(verdict.killed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
