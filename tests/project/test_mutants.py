"""The checks are checked: each safety line taken out in turn (tests/mutants) must make a test fall."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mutants"))

import run as mutants
from table import MUTANTS

NAMED_IN_PROMISES = (
    "term check before mount",
    "claim before create",
    "re-observation after the claim",
    "snapshot before detach",
    "purpose check at adoption",
    "later term mounted",
    "empty answer means wait",
    "serial check",
    "blank check before mkfs",
    "living holder never forced",
    "supersede only after verify",
    "retention only after a checkpoint",
    "token in CreateVolume",
    "401 refresh",
    "garbage is not a notice",
    "end-after-stop is an interruption",
    "failure budget reset only by a step",
    "foreign fleet never cancelled",
    "fsync of the file",
    "fsync of the directory",
    "checksum at load",
    "buffers copied before the step goes on",
)


def test_every_safety_line_has_a_mutant_and_every_mutant_its_line() -> None:
    assert [] == [name for name in NAMED_IN_PROMISES if name not in {mutant.name for mutant in MUTANTS}]
    assert [] == mutants.check_table()


@pytest.mark.processes
def test_the_quick_mutants_are_killed(tmp_path: Path) -> None:
    """The others: `make mutants`."""
    verdicts = mutants.run(tuple(mutant for mutant in MUTANTS if mutant.quick), tmp_path)
    print(mutants.score(verdicts))
    assert [] == [f"{one.mutant.name}: {one.said}" for one in verdicts if not one.killed]


@pytest.mark.processes
def test_a_mutant_that_changes_nothing_survives_and_one_that_breaks_the_import_is_an_error(tmp_path: Path) -> None:
    line = '    serial = volume.replace("-", "", 1)\n'
    tests = ("tests/agent/machine/test_host_devices.py::test_the_volume_is_the_disk_with_its_serial",)
    same = mutants.Mutant("same", "agent/machine/devices.py", line, line + "    assert serial\n", tests)
    broken = mutants.Mutant("broken", "agent/machine/devices.py", line, "    serial = (\n", tests)
    survives, error = mutants.run((same, broken), tmp_path)
    assert (False, False) == (survives.killed, survives.error)
    assert (False, True) == (error.killed, error.error)
