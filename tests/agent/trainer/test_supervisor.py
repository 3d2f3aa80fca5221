"""The supervisor with real trainers: how they end, and what the run makes of it."""

from __future__ import annotations

import errno
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from trainer_bench import QUICK, TRAINERS, Bench, is_alive, notice, run_with

from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.trainer.supervisor import Hooks

pytestmark = pytest.mark.processes


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench whose trainers leave no process behind."""
    bench = Bench(tmp_path)
    yield bench
    assert bench.left() == []


# -------------------------------------------------------------------------------------------- ends without a notice
def test_a_trainer_that_exits_0_is_done(bench: Bench) -> None:
    ended = bench.trainer("counting", "3", "0.01").run()
    assert (ended.kind, ended.exit_code, ended.last_step, ended.saved_step) == ("done", 0, 3, 3)


def test_a_trainer_that_crashes_at_once_three_times_has_failed(bench: Bench) -> None:
    ended = bench.supervisor("python", "-c", "print('no module named x'); raise SystemExit(4)").run()
    assert (ended.kind, ended.exit_code, ended.attempts) == ("failed", 4, 3)
    assert "failed 3 times with no step gained in between; the last time it exited with 4" in ended.reason
    assert ended.tail == ("no module named x",)
    assert [seconds for seconds in bench.clock.slept if seconds >= 1] == [1.0, 2.0]


def test_a_trainer_that_gains_steps_between_its_crashes_goes_on(bench: Bench) -> None:
    code = "import os,runpy,sys; sys.argv=['', '6', '0', str(1 + 2 * int(os.environ['SPOTHEAL_ATTEMPT']))]; "
    ended = bench.supervisor("python", "-c", code + f"runpy.run_path({str(TRAINERS / 'counting.py')!r})").run()
    assert (ended.kind, ended.last_step, ended.attempts) == ("done", 6, 3)


def test_a_trainer_that_crashes_at_one_step_again_and_again_has_failed(bench: Bench) -> None:
    ended = bench.trainer("counting", "9", "0", "5").run()
    assert (ended.kind, ended.last_step, ended.saved_step, ended.attempts) == ("failed", 4, 4, 3)


def test_steps_done_again_after_a_move_are_no_steps_gained(bench: Bench) -> None:
    ended = bench.trainer("counting", "9", "0", "5", best_step=7, failures=1, first_attempt=4).run()
    assert (ended.kind, ended.attempts) == ("failed", 5)


def test_a_trainer_killed_for_memory_is_a_failure_that_names_the_signal(bench: Bench) -> None:
    ended = bench.supervisor("python", "-c", "import os; os.kill(os.getpid(), 9)", limits={"failures": 1}).run()
    assert (ended.kind, ended.exit_code, ended.signal) == ("failed", None, signal.SIGKILL)
    assert "was ended by SIGKILL (out of memory?)" in ended.reason


def test_75_without_a_notice_is_restarted_uncounted_and_three_times_without_a_step_is_a_failure(bench: Bench) -> None:
    ended = bench.supervisor("python", "-c", "raise SystemExit(75)", limits={"failures": 2}).run()
    assert (ended.kind, ended.exit_code, ended.attempts) == ("failed", 75, 6)


def test_75_with_a_notice_soon_after_is_an_interruption(bench: Bench) -> None:
    supervisor = bench.supervisor("python", "-c", "raise SystemExit(75)", timing=replace(QUICK, unasked_wait_seconds=9))
    bench.clock.sleep = SystemClock().sleep  # type: ignore[method-assign]
    ended = run_with(
        supervisor, lambda: bool(bench.named("trainer-started")), lambda: supervisor.notify(notice(bench.clock, 9))
    )
    assert (ended.kind, ended.exit_code, ended.attempts) == ("interrupted", 75, 1)


def test_growth_of_the_checkpoint_folder_is_progress_of_a_trainer_that_reports_none(bench: Bench) -> None:
    code = (
        "import os,pathlib; n=int(os.environ['SPOTHEAL_ATTEMPT']);"
        "pathlib.Path(os.environ['SPOTHEAL_CHECKPOINT_DIR'], f'epoch-{n}.pt').write_bytes(b'w'*5000);"
        "raise SystemExit(0 if n == 5 else 1)"
    )
    ended = bench.supervisor("python", "-c", code).run()
    assert (ended.kind, ended.last_step, ended.attempts) == ("done", None, 5)


def test_a_command_that_is_not_there_is_a_setup_failure(bench: Bench) -> None:
    with pytest.raises(SetupFailed, match=r"no-such-trainer: No such file"):
        bench.supervisor("no-such-trainer").run()


def test_resume_command_is_used_from_the_second_attempt_of_the_run_on(bench: Bench) -> None:
    bench.folders.make(None)
    (bench.folders.checkpoints / "last.pt").write_bytes(b"state")
    job = {"resume_command": ["python", "-c", "print('resumed', __import__('os').environ['SPOTHEAL_ATTEMPT'])"]}
    bench.supervisor("python", "-c", "raise SystemExit(1)", job=job).run()
    bench.supervisor("python", "-c", "raise SystemExit(1)", job=job, first_attempt=7).run()
    assert bench.lines == ["resumed 2", "resumed 7"]
    assert bench.attempts == [1, 2, 7]


# ---------------------------------------------------------------------------------------------------------- at a notice
def test_a_trainer_that_exits_0_half_way_at_sigterm_is_interrupted(bench: Bench) -> None:
    supervisor = bench.trainer("exits_0_at_sigterm")
    ended = run_with(supervisor, bench.is_ready, lambda: supervisor.notify(notice(bench.clock, 20)))
    assert (ended.kind, ended.exit_code) == ("interrupted", 0)
    assert json.loads(bench.folders.notice_file.read_text())["action"] == "terminate"


def test_a_trainer_that_makes_folders_of_the_agents_files_ends_no_agent(bench: Bench) -> None:
    """The next attempt removes them; a notice that finds one in the place of its file is still told by the signal."""
    makes = (
        "import os, pathlib, signal, sys, time\n"
        "first = os.environ['SPOTHEAL_ATTEMPT'] == '1'\n"
        "for name in ('SPOTHEAL_NOTICE_FILE', 'SPOTHEAL_REBALANCE_FILE', 'SPOTHEAL_PROGRESS_FILE'):\n"
        "    place = pathlib.Path(os.environ[name])\n"
        "    place.is_dir() and name == 'SPOTHEAL_NOTICE_FILE' and sys.exit(9)\n"
        "    (place / 'x').mkdir(parents=True, exist_ok=True)\n"
        "if first: sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    supervisor = bench.supervisor("python", "-c", makes)

    def then() -> None:
        supervisor.rebalance()
        bench.await_named("rebalance-told")
        supervisor.notify(notice(bench.clock, 20))

    ended = run_with(supervisor, lambda: "ready" in bench.lines, then)
    assert ("interrupted", 75, 2) == (ended.kind, ended.exit_code, ended.attempts)
    bench.supervisor("python", "-c", "pass").run()


def test_a_file_that_cannot_be_removed_is_said_and_ends_no_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path) -> None:
        raise OSError(errno.EIO, "rm: cannot remove", str(path))

    monkeypatch.setattr(untrusted_folders, "remove", refuses)
    assert "done" == bench.supervisor("python", "-c", "pass").run().kind


def test_a_trainer_that_dies_of_the_signal_is_interrupted(bench: Bench) -> None:
    supervisor = bench.trainer("plain")
    ended = run_with(supervisor, bench.is_ready, lambda: supervisor.notify(notice(bench.clock, 20)))
    assert (ended.kind, ended.signal) == ("interrupted", signal.SIGTERM)


def test_a_trainer_that_ignores_sigterm_is_killed_at_the_deadline_and_not_before(bench: Bench) -> None:
    supervisor = bench.trainer("ignores_sigterm")
    at: list[float] = []

    def tell() -> None:
        at.append(time.monotonic())
        supervisor.notify(notice(bench.clock, 1.5))

    ended = run_with(supervisor, bench.is_ready, tell)
    assert (ended.kind, ended.signal) == ("interrupted", signal.SIGKILL)
    assert time.monotonic() - at[0] >= 1.4


def test_a_trainer_that_saves_and_exits_75_is_interrupted_with_its_saved_step(bench: Bench) -> None:
    supervisor = bench.trainer("counting", "1000", "0.02")
    ended = run_with(
        supervisor, lambda: (supervisor.best_step or 0) > 3, lambda: supervisor.notify(notice(bench.clock, 20))
    )
    assert (ended.kind, ended.exit_code) == ("interrupted", 75)
    assert ended.saved_step == ended.last_step is not None


def test_a_trainer_that_finishes_in_the_very_moment_of_a_notice_loses_nothing(bench: Bench) -> None:
    supervisor = bench.trainer("counting", "5", "0.001")
    ended = run_with(supervisor, lambda: supervisor.best_step == 5, lambda: supervisor.notify(notice(bench.clock, 20)))
    assert ended.kind in ("done", "interrupted")
    assert bench.trainer("counting", "5", "0.001", first_attempt=2).run().kind == "done"


def test_a_trainer_that_had_ended_before_the_notice_is_done(bench: Bench) -> None:
    supervisor = bench.trainer("counting", "5", "0")
    supervisor_ended = supervisor.run()
    supervisor.notify(notice(bench.clock, 20))
    assert supervisor_ended.kind == "done"


def test_a_notice_between_two_attempts_starts_no_other(bench: Bench) -> None:
    supervisor = bench.supervisor("python", "-c", "raise SystemExit(1)", limits={"failures": 9})
    bench.clock.sleep = SystemClock().sleep  # type: ignore[method-assign]
    ended = run_with(
        supervisor, lambda: bool(bench.named("trainer-ended")), lambda: supervisor.notify(notice(bench.clock, 9))
    )
    assert (ended.kind, ended.attempts, ended.failures) == ("interrupted", 1, 1)


def test_a_limit_saves_first_and_stays_a_limit_when_a_notice_follows(bench: Bench) -> None:
    supervisor = bench.trainer("counting", "1000", "0.02")

    def reach_limit() -> None:
        supervisor.stop_for_limit("2 hours are used up")
        supervisor.notify(notice(bench.clock, 20))

    ended = run_with(supervisor, lambda: (supervisor.best_step or 0) > 3, reach_limit)
    assert (ended.kind, ended.exit_code) == ("limit", 75)
    assert ended.reason.startswith("2 hours are used up")


def test_an_operators_stop_saves_at_once_and_is_the_end_of_the_run_not_an_interruption(bench: Bench) -> None:
    supervisor = bench.trainer("counting", "1000", "0.02")

    def ask() -> None:
        supervisor.cancel("cancelled by fleetctl", 300)
        supervisor.notify(notice(bench.clock, 20))

    ended = run_with(supervisor, lambda: (supervisor.best_step or 0) > 3, ask)
    assert (ended.kind, ended.exit_code, ended.saved_step) == ("cancelled", 75, ended.last_step)
    assert ended.reason.startswith("cancelled by fleetctl")


def test_a_machine_that_goes_away_already_is_not_kept_by_an_operators_stop(bench: Bench) -> None:
    supervisor = bench.trainer("counting", "1000", "0.02")

    def ask() -> None:
        supervisor.notify(notice(bench.clock, 20))
        supervisor.cancel("cancelled by fleetctl", 300)

    assert "interrupted" == run_with(supervisor, lambda: (supervisor.best_step or 0) > 3, ask).kind


# ---------------------------------------------------------------------------------------------------------- a rebalance
def test_a_script_without_a_handler_survives_a_rebalance(bench: Bench) -> None:
    supervisor = bench.trainer("plain")

    def then() -> None:
        supervisor.rebalance()
        bench.await_named("rebalance-told")
        supervisor.notify(notice(bench.clock, 20))

    ended = run_with(supervisor, bench.is_ready, then)
    assert (ended.signal, bench.named("rebalance-told")) == (signal.SIGTERM, [{"signalled": 0}])
    assert bench.folders.rebalance_file.exists()


def test_a_handler_of_sigusr1_is_called_at_a_rebalance(bench: Bench) -> None:
    supervisor = bench.trainer("saves_at_sigusr1")
    assert run_with(supervisor, bench.is_ready, supervisor.rebalance).kind == "done"
    assert (bench.folders.results / "saved").exists()


# -------------------------------------------------------------------------------------------------- what is left behind
@pytest.mark.parametrize("code", ["0", "1"])
def test_no_grandchild_outlives_the_trainer(bench: Bench, code: str) -> None:
    bench.trainer("leaves_grandchildren", code, limits={"failures": 1}).run()
    left = [int(pid) for pid in (bench.folders.results / "pids").read_text().split()]
    assert [pid for pid in left if is_alive(pid)] == []


def test_huge_and_binary_output_reaches_the_log_as_lines(bench: Bench) -> None:
    ended = bench.trainer("prints_much", "1000").run()
    assert ended.kind == "done"
    assert bench.lines[:2] == ["line 0", "line 1"]
    assert sum(line.count("x") for line in bench.lines if line.startswith("xx")) == 100_000
    assert bench.lines[-2:] == ["100%", "last line, without an end"]


def test_a_log_that_stalls_does_not_stall_the_trainer(bench: Bench) -> None:
    free = threading.Event()
    hooks = Hooks(on_line=lambda line: (free.wait(20), bench.lines.append(line))[1])
    code = "import sys; [print('y' * 100) for _ in range(50_000)]; open(sys.argv[1], 'w')"
    done = bench.folders.clone / "done"
    supervisor = bench.supervisor("python", "-c", code, str(done), hooks=hooks)
    assert run_with(supervisor, done.exists, free.set).kind == "done"
    assert done.exists()
    assert any("came faster than they could be logged" in line for line in bench.lines)


def test_a_store_that_hangs_holds_up_neither_the_notice_nor_the_end(bench: Bench) -> None:
    free = threading.Event()
    hooks = Hooks(on_progress=lambda progress: free.wait(30) and None, on_event=lambda name, **fields: None)
    supervisor = bench.trainer("counting", "1000", "0.02", hooks=hooks)
    ended = run_with(
        supervisor, lambda: (supervisor.best_step or 0) > 3, lambda: supervisor.notify(notice(bench.clock, 20))
    )
    assert (ended.kind, ended.exit_code, free.is_set()) == ("interrupted", 75, False)
    free.set()


def test_files_that_will_be_lost_with_the_machine_are_named_while_the_checkpoint_folder_is_empty(bench: Bench) -> None:
    bench.folders = replace(bench.folders, clone=bench.folders.fetched)  # as on AWS Batch
    bench.folders.clone.mkdir(parents=True)
    bench.trainer("writes_into_clone").run()
    assert bench.named("checkpoints-elsewhere") == [{"files": ["runs/model.bin (5000 bytes)"]}]


def test_what_a_trainer_writes_into_its_working_copy_is_not_called_lost(bench: Bench) -> None:
    with capture_logs() as logged:
        bench.trainer("writes_into_clone").run()
    assert bench.named("checkpoints-elsewhere") == []
    assert [line["files"] for line in logged if "files" in line] == [["runs/model.bin (5000 bytes)"]]


def test_a_save_next_to_the_code_is_progress_and_a_log_there_is_none(bench: Bench) -> None:
    code = (
        "import os,pathlib; n=int(os.environ['SPOTHEAL_ATTEMPT']);"
        "pathlib.Path('{}').write_bytes(b'w' * 5000 + bytes(n)); raise SystemExit(0 if n == 5 else 1)"
    )
    expected = {"model.pt": "done", "checkpoints.txt": "failed", "train.log": "failed"}
    ended = {name: bench.supervisor("python", "-c", code.format(name)).run().kind for name in expected}
    assert ended == expected


def test_a_link_to_a_name_that_is_too_long_is_a_setup_failure(bench: Bench) -> None:
    bench.folders.clone.mkdir(parents=True, exist_ok=True)
    (bench.folders.clone / "sub").symlink_to("x" * 300)
    with pytest.raises(SetupFailed, match="has no folder 'sub'"):
        bench.supervisor("true", job={"directory": "sub"}).run()


def test_a_folder_in_the_place_of_the_progress_file_is_removed(bench: Bench) -> None:
    bench.folders.make(None)
    (bench.folders.progress_file / "inner").mkdir(parents=True)
    assert bench.supervisor("true").run().kind == "done"
