"""A rehearsal in which no agent ever says who it is: it fails in minutes, and says what the machine's console said."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_desk import HandClock

from spotheal.agent.protocol.errors import JobFailed
from spotheal.fleet.rehearsal.machines.machines import Machine
from spotheal.fleet.rehearsal.scenarios import first_word
from spotheal.fleet.rehearsal.scenarios.first_word import FirstWord
from spotheal.fleet.rehearsal.scenarios.run import Options, rehearse

pytestmark = [pytest.mark.processes, pytest.mark.torch]
USER_DATA = b"#!/bin/sh\necho Traceback; echo 'UnknownServiceError: scheduler'; echo; sleep 600\n"


# All of them, by `make options`: "quiet,sweep,elastic,batch".
SCENARIOS = os.environ.get("SPOTHEAL_SILENT_SCENARIOS", "quiet").split(",")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_agents_that_die_at_their_start_end_a_rehearsal_with_the_consoles_last_line(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    lay_out = Machine._lay_out

    def with_an_agent_that_dies(machine: Machine) -> None:
        lay_out(machine)
        (machine.folder / "user-data.sh").write_bytes(USER_DATA)

    monkeypatch.setattr(first_word, "SILENT_SECONDS_MAX", 6.0)
    monkeypatch.setattr(Machine, "_lay_out", with_an_agent_that_dies)
    kept = tmp_path / "kept"
    with pytest.raises(JobFailed, match=r"within 6 s; .*: UnknownServiceError: scheduler(\n|$)"):
        rehearse(Options(scenario=scenario, keep=kept, reference=False, seconds_max=100.0))
    assert "UnknownServiceError" in "".join(path.read_text() for path in kept.glob("instances/*/console.log"))


def test_a_rehearsal_that_was_stopped_for_an_hour_does_not_call_its_agents_silent(tmp_path: Path) -> None:
    clock = HandClock()
    silent: Any = SimpleNamespace(launches=list)
    cloud: Any = SimpleNamespace(folder=tmp_path, launched_at={"i-1": 0.0})
    word = FirstWord(cloud, [silent], clock)
    for seconds in (2.0, 3600.0, 2.0):
        clock.sleep(seconds)
        word.check()
    with pytest.raises(JobFailed, match="no agent has said who it is"):
        for _ in range(100):
            clock.sleep(2.0)
            word.check()
