"""Whole rehearsals of the scripts in tests/innocents, with name, repository and command alone: `make innocents`.

SPOTHEAL_INNOCENTS: names of scenarios with a comma between them; all of one machine if it is "all".
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from innocent_scripts import GUILTY, INNOCENT, command, files

from spotheal.fleet.rehearsal.scenarios import job
from spotheal.fleet.rehearsal.scenarios.run import Options, rehearse
from spotheal.fleet.rehearsal.scenarios.scenario import NAMES, scenario
from spotheal.fleet.rehearsal.scenarios.summary import Summary

pytestmark = pytest.mark.processes
_CHOSEN = os.environ.get("SPOTHEAL_INNOCENTS", "standard")
_OF_ONE_MACHINE = [name for name in NAMES if not (scenario(name).module or scenario(name).ranks)]
SCENARIOS = _OF_ONE_MACHINE if _CHOSEN == "all" else _CHOSEN.split(",")


def rehearsed(name: str, chosen: str, folder: Path) -> Summary:
    # Half a minute an event, and as long again for the last one, which comes late on a busy machine; what saves only at
    # its end is interrupted after a minute.
    steps = 200 if name in GUILTY else 60 * (1 + len(scenario(chosen).events))
    words = command(name, steps, 0.5)
    example = job.example(folder / "job", command=words, files=files(name))
    for file in (folder / "job" / "repository").glob("*.sh"):
        file.chmod(0o755)
        job.git(file.parent, "commit", "--quiet", "--all", "--message", "It can be executed")
    done = rehearse(Options(example.fleet_file, example.job_file, chosen, seconds_max=1200.0))
    assert isinstance(done, Summary)
    return done


@pytest.mark.parametrize("chosen", SCENARIOS)
@pytest.mark.parametrize("name", INNOCENT)
def test_an_innocent_script_passes(name: str, chosen: str, tmp_path: Path) -> None:
    assert rehearsed(name, chosen, tmp_path).broken == ()


@pytest.mark.parametrize("name", GUILTY)
def test_a_script_that_loses_its_work_fails_and_is_told_how(name: str, tmp_path: Path) -> None:
    broken = rehearsed(name, "kill", tmp_path).broken
    assert any(GUILTY[name] in line for line in broken), broken
