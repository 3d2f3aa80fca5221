"""The supervisor's rules without a process: what an end means, how output becomes lines, what files say."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotheal.agent.processes.launchers import is_launcher, is_shell, program
from spotheal.agent.processes.output import Lines
from spotheal.agent.trainer.attempts import AttemptEnd, Done, GiveUp, StartAgain, Stopped, Tally, decide
from spotheal.agent.trainer.progress_files import (
    drop_metrics_after,
    grown_elsewhere,
    mark_of,
    progress_of,
)


def end(code: int | None = 1, *, number: int | None = None, **more: bool) -> AttemptEnd:
    return AttemptEnd(code, number, **{"asked": False, "gained": False, "reports": True, **more})


# ---------------------------------------------------------------------------------------------------- what an end means
@pytest.mark.parametrize("code", [0, 1, 75, None])
def test_every_end_after_we_asked_is_an_interruption(code: int | None) -> None:
    assert decide(end(code, number=None if code is not None else 15, asked=True), Tally(), 3) == Stopped()


def test_exit_0_unasked_is_done_whatever_failed_before() -> None:
    assert decide(end(0), Tally(failures=2, unasked_stops=2), 3) == Done()


def test_pauses_double_up_to_a_minute() -> None:
    tally, pauses = Tally(), []
    for _ in range(8):
        verdict = decide(end(), tally, 100)
        assert isinstance(verdict, StartAgain)
        tally = verdict.tally
        pauses.append(verdict.after_seconds)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_only_a_step_gained_forgets_failures() -> None:
    gained = decide(end(gained=True), Tally(failures=2, failures_at_all=2), 3)
    assert isinstance(gained, StartAgain) and gained.tally.failures == 1
    saved = decide(end(75), Tally(failures=2, failures_at_all=2), 3)
    assert isinstance(saved, StartAgain) and saved.tally.failures == 2
    assert isinstance(decide(end(), Tally(failures=2), 3), GiveUp)


def test_changed_checkpoints_alone_do_not_feed_a_crash_loop_for_ever() -> None:
    tally, count = Tally(), 0
    while isinstance(verdict := decide(end(gained=True, reports=False), tally, 3), StartAgain):
        tally, count = verdict.tally, count + 1
    assert isinstance(verdict, GiveUp)
    assert count == 29


def test_an_end_reads_as_a_person_would_say_it() -> None:
    assert str(end(3)) == "exited with 3"
    assert str(end(None, number=signal.SIGSEGV)) == "was ended by SIGSEGV"
    assert str(end(None, number=signal.SIGKILL)) == "was ended by SIGKILL (out of memory?)"


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 75, None]), st.booleans(), st.booleans()), max_size=60),
    st.integers(1, 5),
)
def test_without_steps_every_trainer_comes_to_an_end(ends: list[tuple[int | None, bool, bool]], budget: int) -> None:
    """No sequence of ends without a step keeps a run alive beyond three starts a failure of the budget."""
    tally, starts = Tally(), 0
    for code, _, reports in ends:
        verdict = decide(end(code, number=None if code is not None else 9, reports=reports), tally, budget)
        starts += 1
        if not isinstance(verdict, StartAgain):
            break
        tally = verdict.tally
    assert starts <= 3 * budget


# ---------------------------------------------------------------------------------------------------- output to lines
def whole(data: bytes, size: int, line_bytes_max: int = 8192) -> list[str]:
    lines = Lines(line_bytes_max)
    found = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])]
    return found + lines.rest()


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_become_lines_that_hold_no_control_characters(data: bytes, size: int) -> None:
    assert not any(ord(char) < 32 and char != "\t" for line in whole(data, size, 50) for char in line)


@given(
    st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40), max_size=20), st.integers(1, 9)
)
def test_lines_come_out_as_they_went_in_however_they_are_cut(texts: list[str], size: int) -> None:
    assert whole("".join(f"{text}\n" for text in texts).encode(), size) == texts


def test_of_a_progress_bar_the_last_state_is_logged() -> None:
    lines = Lines()
    assert lines.feed(b"\r 1%\r 2%") == []
    assert lines.bar() == " 2%"
    assert lines.feed(b"\r100%\r\nnext\r\n") == ["100%", "next"]


def test_a_progress_bar_without_end_needs_no_memory() -> None:
    lines = Lines(line_bytes_max=100)
    assert [line for _ in range(1000) for line in lines.feed(b"\r" + b"#" * 50)] == []
    assert lines.rest() == ["#" * 50]


def test_colours_are_removed_and_what_is_no_text_is_shown_as_such() -> None:
    assert whole(b"\x1b[31mred\x1b[0m \xff\x00end\n", 100) == ["red \ufffd?end"]


# ------------------------------------------------------------------------------------------------------------ launchers
@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("torchrun train.py", True),
        ("/env/bin/python3.11 /env/bin/torchrun --standalone train.py", True),
        ("python -u -m torch.distributed.run train.py", True),
        ("python -X dev -W ignore -m accelerate.commands.launch train.py", True),
        ("accelerate launch train.py", True),
        ("python train.py torchrun", False),
        ("python -m train torch.distributed.run", False),
        ("python -c print() torchrun", False),
        ("bash torchrun", False),
        ("", False),
    ],
)
def test_a_launcher_is_told_by_what_is_run_and_not_by_its_arguments(command: str, launches: bool) -> None:
    assert is_launcher(command.split()) is launches


def test_shells_are_told_by_name() -> None:
    assert [is_shell(argv) for argv in (["/bin/bash", "x"], ["-sh"], ["python"], [])] == [True, True, False, False]
    assert program(["/usr/bin/env"]) == ("program", "/usr/bin/env")


# ---------------------------------------------------------------------------------------------------------------- files
def written(path: Path, content: bytes, at: float = 1000.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (at, at))
    return path


def test_small_files_beside_a_checkpoint_are_no_progress(tmp_path: Path) -> None:
    written(tmp_path / "model.pt", b"w" * 5000)
    before = mark_of([tmp_path])
    written(tmp_path / "config.json", b"{}", at=2000)
    assert mark_of([tmp_path]) == before
    written(tmp_path / "model.pt", b"w" * 5000, at=2000)
    assert mark_of([tmp_path]) - before


def test_links_are_not_followed_and_caches_do_not_count(tmp_path: Path) -> None:
    written(tmp_path / "elsewhere/big", b"x" * 9000)
    written(tmp_path / "clone/.git/objects/pack", b"x" * 9000)
    written(tmp_path / "clone/__pycache__/train.pyc", b"x" * 9000)
    written(tmp_path / "clone/out/weights.h5", b"x" * 2000)
    (tmp_path / "clone/link").symlink_to(tmp_path / "elsewhere")
    assert [seen.path for seen in grown_elsewhere(tmp_path / "clone", since=0)] == ["out/weights.h5"]
    assert grown_elsewhere(tmp_path / "clone", since=5000) == []


def test_a_progress_file_that_is_huge_a_link_or_no_json_is_no_progress(tmp_path: Path) -> None:
    good = written(tmp_path / "good", b'{"step": 3}')
    assert progress_of(good) is not None
    (tmp_path / "link").symlink_to(good)
    written(tmp_path / "huge", b'{"step": 3}' + b" " * (1 << 20))
    written(tmp_path / "text", b"step 3")
    assert [progress_of(tmp_path / name) for name in ("link", "huge", "text", "absent")] == [None] * 4


def test_metrics_of_no_step_are_kept_and_half_a_line_is_dropped(tmp_path: Path) -> None:
    lines = [b'{"step": 1}\n', b'{"epoch": 1}\n', b"not json\n", b'{"step": 5}\n', b'{"st']
    path = written(tmp_path / "metrics.jsonl", b"".join(lines))
    path.chmod(0o640)
    assert drop_metrics_after(path, 4) == 2
    assert path.read_bytes() == b"".join(lines[:3])
    assert path.stat().st_mode & 0o777 == 0o640
    assert drop_metrics_after(path, 4) == 0


def test_a_metrics_file_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    real = written(tmp_path / "real", json.dumps({"step": 9}).encode() + b"\n")
    (tmp_path / "metrics.jsonl").symlink_to(real)
    assert drop_metrics_after(tmp_path / "metrics.jsonl", 1) == 0
    assert real.stat().st_size > 0


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"step": ' + "9" * 5000 + "}", "[]", "null", '{"step": true}', '{"step": 5, "saved": 7}', "\0\0"],
)
def test_a_senseless_progress_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    assert progress_of(tmp_path / "progress.json") is None
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert drop_metrics_after(tmp_path / "metrics.jsonl", 5) == 0


def test_numbers_that_json_does_not_have_count_as_not_written(tmp_path: Path) -> None:
    """A loss that is NaN would end up in status.json, and what `fleetctl status --output json` prints is no JSON."""
    body = f'{{"step": 5, "loss": NaN, "samples_per_second": {"9" * 400}, "resumed_step": 1e400, "lr": 0.5}}'
    (tmp_path / "progress.json").write_text(body)
    found = progress_of(tmp_path / "progress.json")
    assert found is not None
    assert (found[0].loss, found[0].samples_per_second, found[0].extra) == (None, None, {"lr": 0.5})
