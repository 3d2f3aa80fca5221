"""What a run has lost is told on a real run by the rule of a rehearsal: in the ledger, status, receipt and report."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from report_stories import finished, seen

from spotheal.agent.files.folders import Folders
from spotheal.agent.money.bill_inputs import History
from spotheal.agent.protocol.clock import never
from spotheal.agent.record.lost_work import Attempt, FilesWritten, attempts_of, files_written, from_nothing, lost_work
from spotheal.agent.trainer.written_files import WrittenFiles, missing
from spotheal.fleet.report.page import page
from spotheal.fleet.report.report import make
from spotheal.fleet.status import screen
from spotheal.fleet.status.receipt import receipt
from spotheal.fleet.status.status import summarise

Event = dict[str, Any]


def event(name: str, instance: str, **fields: Any) -> Event:
    return {"event": name, "instance": instance, **fields}


def killed_and_begun_at(step: int, saved_step: int | None = 40) -> list[Event]:
    first = event("trainer-ended", "i-1", attempt=1, kind="interrupted", last_step=57, saved_step=saved_step)
    return [
        event("trainer-started", "i-1", attempt=1, resumed_step=0),
        first,
        event("trainer-started", "i-2", attempt=2, resumed_step=None),
        event("trainer-resumed", "i-2", attempt=2, resumed_step=step),
        event("trainer-ended", "i-2", attempt=2, kind="done", last_step=90, saved_step=90),
    ]


# ------------------------------------------------------------------------------------------------- began from nothing
def test_an_attempt_that_began_from_nothing_is_named_from_the_ledger_as_a_rehearsal_names_it() -> None:
    (line,) = lost_work(killed_and_begun_at(0))
    seen = [Attempt("attempt 1 on i-1", "i-1", 0, 57, 40), Attempt("attempt 2 on i-2", "i-2", 0, 90, 90)]
    assert [line] == list(from_nothing(seen))
    assert line.startswith("attempt 2 on i-2 began at step 0, although attempt 1 on i-1 had come to 57; load the")
    assert "save more often" in lost_work(killed_and_begun_at(0, saved_step=None))[0]


def test_an_attempt_that_resumed_is_no_loss() -> None:
    assert lost_work(killed_and_begun_at(40)) == ()


def test_a_killed_machine_counts_by_what_its_successor_says_of_it() -> None:
    events = [
        event("trainer-started", "i-1", attempt=1, resumed_step=0),
        event("predecessor", "i-2", predecessor="i-1", last_step=57),
        event("trainer-started", "i-2", attempt=2, resumed_step=0),
    ]
    assert attempts_of(events, 3)[0].last_step == 57
    assert lost_work(events, None) == lost_work(events, 0) == (), "the new attempt has gained nothing yet"
    assert len(lost_work(events, 3)) == 1


def test_a_trainer_that_reports_no_steps_is_not_said_to_have_lost_any() -> None:
    events = [event("trainer-started", "i-1", attempt=1, resumed_step=None),
              event("trainer-ended", "i-1", attempt=1, kind="interrupted", last_step=None, saved_step=None),
              event("trainer-started", "i-2", attempt=2, resumed_step=None)]  # fmt: skip
    assert lost_work(events) == ()


# ------------------------------------------------------------------------------------------------------ missing files
class Machines:
    """Machines one after the other that share a volume, each with a home of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def boot(self, name: str) -> WrittenFiles:
        volume = Folders.at(self.root / "shared", "/v")
        self.home = self.root / name / "home"
        self.home.mkdir(parents=True)
        volume.environments.mkdir(parents=True, exist_ok=True)
        return WrittenFiles(volume, self.home, "RUN", name, never())

    def write(self, *names: str) -> None:
        for name in names:
            path = self.home / name[5:] if name.startswith("home/") else self.root / "shared/v" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)


def test_files_that_a_killed_machine_wrote_are_named_by_the_next_one_and_those_it_lacks(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    machines.write("working-copy/train.py")
    first = machines.boot("i-1")
    assert first.predecessor() == {}
    machines.write("working-copy/epoch-1.pt", "home/best.pt", "working-copy/train.log", "working-copy/.cache/x")
    first.look(1)
    first.look(1)
    told = machines.boot("i-2").predecessor()
    assert (told["predecessor"], told["attempt"]) == ("i-1", 1)
    assert told["written"] == ["home/best.pt", "working-copy/epoch-1.pt"] and told["written_count"] == 2
    assert (told["missing"], told["missing_count"]) == (["home/best.pt"], 1)


def test_the_places_that_the_rehearsal_looks_at_and_its_names_are_the_agents() -> None:
    from spotheal.fleet.rehearsal.scenarios import survival

    assert survival.missing is missing and survival.files_of.__module__ == "spotheal.agent.trainer.written_files"


def test_a_rotated_checkpoint_and_a_file_of_a_moment_are_no_loss(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    first = machines.boot("i-1")
    first.predecessor()
    machines.write("checkpoints/step-10.pt")
    first.look(1)
    machines.write("checkpoints/step-20.pt", "checkpoints/half")
    first.look(1)
    for name in ("step-10.pt", "half"):
        (tmp_path / "shared/v/checkpoints" / name).unlink()
    assert machines.boot("i-2").predecessor()["missing"] == []


def test_what_an_earlier_machine_wrote_and_a_later_one_left_alone_still_counts(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    first = machines.boot("i-1")
    first.predecessor()
    machines.write("results/data.bin")
    first.look(1)
    first.look(1)
    second = machines.boot("i-2")
    second.predecessor()
    machines.write("results/other.bin")
    second.look(2)
    second.look(2)
    for name in ("data", "other"):
        (tmp_path / f"shared/v/results/{name}.bin").unlink()
    told = machines.boot("i-3").predecessor()
    assert told["written"] == ["results/other.bin"]
    assert told["missing"] == ["results/data.bin", "results/other.bin"]


def test_the_record_is_bounded_however_much_a_trainer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spotheal.agent.trainer import written_files

    machines = Machines(tmp_path)
    first = machines.boot("i-1")
    first.predecessor()
    names = [f"working-copy/{chr(97 + n // 676)}{chr(97 + n // 26 % 26)}{chr(97 + n % 26)}" for n in range(700)]
    machines.write(*names, *(f"checkpoints/step-{n}.pt" for n in range(50)))
    first.look(1)
    first.look(1)
    record = tmp_path / "shared/v/.spotheal/files.json"
    assert record.stat().st_size < 500 * 210 * 2
    told = machines.boot("i-2").predecessor()
    assert len(told["written"]) == 20 and told["written_count"] == 750
    monkeypatch.setattr(written_files, "FILES_MAX", 100)
    assert machines.boot("i-3").predecessor() == {}, "a list that is cut would call the rest missing"


def test_a_record_that_cannot_be_read_or_is_another_runs_says_nothing(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    machines.boot("i-1")
    record = tmp_path / "shared/v/.spotheal/files.json"
    for text in ("", "{", "[]", '{"run": 1}', '{"run": "OTHER", "instance": "i", "attempt": 1, "written": [],'
                 ' "written_count": 0, "lasting": ["home/x"]}'):  # fmt: skip
        record.write_text(text)
        assert WrittenFiles(Folders.at(tmp_path / "shared", "/v"), tmp_path, "RUN", "i-9", never()).predecessor() == {}


# ------------------------------------------------------------------------------------------ status, receipt and report
TOLD = event("predecessor-files", "i-2", predecessor="i-1", attempt=1, written=["working-copy/a.pt"], written_count=3,
             missing=["home/b.pt"], missing_count=1)  # fmt: skip


def test_the_receipt_says_what_was_lost_and_which_files_interrupted_attempts_wrote() -> None:
    now = datetime(2026, 11, 21, tzinfo=timezone.utc)
    made = receipt(History(events=[*killed_and_begun_at(0), TOLD], now=now))
    document = made.to_document()
    assert len(document["lost"]) == 2 and "home/b.pt: written on i-1, missing when" in document["lost"][1]
    assert made.written == files_written([TOLD]) == (FilesWritten(1, "i-1", ("working-copy/a.pt",), 2),)
    expected = {"attempt": 1, "instance": "i-1", "files": ["working-copy/a.pt"], "more": 2}
    assert document["files_of_interrupted_attempts"] == [expected]


def test_status_says_what_was_lost() -> None:
    now = datetime(2026, 11, 21, tzinfo=timezone.utc)
    document = summarise(seen([*killed_and_begun_at(0), TOLD], {"phase": "training", "instance": "i-2"}), now)
    assert len(document["lost"]) == 2
    shown = screen.render(document, now, width=200, colour=False, ascii=True)
    assert "attempt 2 on i-2 began at step 0" in shown and "home/b.pt: written on i-1, missing" in shown


def test_the_report_names_the_files_that_interrupted_attempts_wrote_and_a_hostile_name_stays_text() -> None:
    material, now = finished()
    hostile = {**TOLD, "written": ["<script>x</script>"], "missing": ["<b>.pt"]}
    material = replace(material, facts=replace(material.facts, events=(*material.facts.events, hostile)))
    text = page(make(material, now))
    assert "What interrupted attempts wrote" in text and "&lt;script&gt;x&lt;/script&gt; and 2 more" in text
    assert "&lt;b&gt;.pt: written on i-1" in text and "<b>.pt" not in text
