"""What the supervisor gives a trainer and what it does around it: environment, user, signals, launchers, files."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import QUICK, TRAINERS, Bench, is_alive, notice, run_with

from spotheal.agent.processes.account import trainer_account
from spotheal.agent.processes.foreign_command import Finished, Surroundings, run_command
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.repository.working_copy import link_kept
from spotheal.agent.trainer.hooks import Hooks

pytestmark = pytest.mark.processes


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench whose trainers leave no process behind."""
    bench = Bench(tmp_path)
    yield bench
    assert bench.left() == []


def told(bench: Bench, *arguments: str, **more: Any) -> dict[str, Any]:
    """What a trainer found around itself."""
    assert bench.trainer("tells_its_surroundings", *arguments, **more).run().kind == "done", bench.lines
    found: dict[str, Any] = json.loads((bench.folders.results / "told.json").read_text())
    return found


# --------------------------------------------------------------------------------------------------------- environment
def test_a_trainer_finds_every_variable_of_the_contract_and_every_folder(bench: Bench) -> None:
    found = told(bench, first_attempt=3)["environment"]
    folders = bench.folders
    assert {name: value for name, value in found.items() if name.startswith("SPOTHEAL_")} == {
        "SPOTHEAL_JOB": "j",
        "SPOTHEAL_RUN": "run",
        "SPOTHEAL_DATASETS_DIR": str(folders.datasets),
        "SPOTHEAL_CHECKPOINT_DIR": str(folders.checkpoints),
        "SPOTHEAL_RESULTS_DIR": str(folders.results),
        "SPOTHEAL_LOG_DIR": str(folders.logs),
        "SPOTHEAL_ATTEMPT": "3",
        "SPOTHEAL_NOTICE_FILE": str(folders.notice_file),
        "SPOTHEAL_REBALANCE_FILE": str(folders.rebalance_file),
        "SPOTHEAL_PROGRESS_FILE": str(folders.progress_file),
        "SPOTHEAL_METRICS_FILE": str(folders.metrics_file),
    }
    assert all(Path(found[name]).is_dir() for name in found if name.startswith("SPOTHEAL_") and name.endswith("_DIR"))
    assert found["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert found["PYTHONPATH"].split(":")[-1] == str(folders.trainer_lib)


def test_a_trainer_gets_no_credentials_of_the_agent_but_its_endpoints(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_PROFILE", "hidden")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:2")
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_INDEX", "4")
    found = told(bench, environment={"PYTHONPATH": "/mine", "AWS_PROFILE": "the-jobs-own"})["environment"]
    assert {name: value for name, value in found.items() if name.startswith("AWS_")} == {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:2",
        "AWS_REGION": "us-west-2",
        "AWS_BATCH_JOB_ARRAY_INDEX": "4",
        "AWS_PROFILE": "the-jobs-own",
    }
    assert found["SPOTHEAL_INDEX"] == "4"
    assert found["PYTHONPATH"] == f"/mine:{bench.folders.trainer_lib}"


def test_only_variables_of_the_contract_are_expanded_in_the_command(bench: Bench) -> None:
    found = told(bench, "--out=${SPOTHEAL_CHECKPOINT_DIR}/x", "${other}", "`id`")
    assert found["argv"] == [f"--out={bench.folders.checkpoints}/x", "${other}", "`id`"]


def test_an_unknown_variable_in_the_command_is_a_setup_failure(bench: Bench) -> None:
    with pytest.raises(SetupFailed, match="SPOTHEAL_CHECKPOINTS_DIR"):
        bench.trainer("plain", "${SPOTHEAL_CHECKPOINTS_DIR}").run()


def test_a_trainer_runs_in_the_folder_asked_for_and_reads_nothing_from_stdin(bench: Bench) -> None:
    (bench.folders.clone / "sub/dir").mkdir(parents=True)
    found = told(bench, job={"directory": "sub/dir"})
    assert (found["cwd"], found["stdin"]) == (str(bench.folders.clone / "sub/dir"), "")
    with pytest.raises(SetupFailed, match="no folder 'gone'"):
        bench.trainer("plain", job={"directory": "gone"}).run()


def test_python_means_the_interpreter_also_where_its_folder_has_no_python(bench: Bench, tmp_path: Path) -> None:
    program = tmp_path / "odd/python3.99"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nODD=1 exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    supervisor = bench.supervisor("sh", "-c", "python -c \"import os; print(os.environ['ODD'])\"", interpreter=program)
    assert (supervisor.run().kind, bench.lines) == ("done", ["1"])


# ----------------------------------------------------------------------------------------------------- signals and user
def test_signals_that_the_agent_ignores_or_blocks_are_the_trainers_default(bench: Bench) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        found = told(bench)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (found["odd"], found["blocked"], found["int_ignored"], found["umask"]) == ([], [], False, 0o022)
    assert found["session"] == found["pid"]
    assert found["environment"]["SPOTHEAL_JOB"] == "j"


def test_a_command_that_is_not_there_is_a_setup_failure_also_where_signals_are_reset(bench: Bench) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(SetupFailed, match="No such file"):
            bench.supervisor("no-such-trainer").run()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("ignored", [False, True])
def test_the_trainer_runs_as_its_own_user_and_owns_what_it_must_write(ignored: bool) -> None:
    account = trainer_account("nobody")
    if account is None or not shutil.which("python3", path="/usr/bin:/bin"):
        pytest.skip("this machine has no user nobody, or no Python that it may run")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    root = Path(tempfile.mkdtemp(prefix="spotheal-test-"))  # pytest's own folders are closed to others
    root.chmod(0o755)
    mask = os.umask(0o077)
    try:
        bench = Bench(root)
        script = root / "trainer.py"
        shutil.copy(TRAINERS / "tells_its_surroundings.py", script)
        script.chmod(0o644)
        for folder in ("volume", "var", "var/lib", "run"):
            (root / folder).mkdir(exist_ok=True)
            (root / folder).chmod(0o755)
        bench.folders.clone.chmod(0o755)
        python = Path(shutil.which("python3", path="/usr/bin:/bin") or "")
        supervisor = bench.supervisor("python", str(script), account=account, interpreter=python)
        assert supervisor.run().kind == "done", bench.lines
        found = json.loads((bench.folders.results / "told.json").read_text())
        assert (found["uid"], found["environment"]["USER"]) == (pwd.getpwnam("nobody").pw_uid, "nobody")
        assert 0 not in found["groups"]
        assert not os.access(bench.folders.run_dir / "notice.json", os.F_OK)
        assert bench.folders.run_dir.stat().st_uid == 0
        assert bench.folders.checkpoints.stat().st_uid == account.uid
        assert bench.left() == []
    finally:
        os.umask(mask)
        signal.signal(signal.SIGHUP, before)
        shutil.rmtree(root)


def test_no_account_is_used_where_we_are_not_root_or_it_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer_account("no-such-user-here") is None
    assert trainer_account("root") is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert trainer_account("nobody") is None


# ------------------------------------------------------------------------------------------------------------ launchers
@pytest.mark.torch
def test_ranks_under_torchrun_are_told_themselves_and_have_time_to_save(bench: Bench) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        pytest.skip("torchrun is not installed")
    supervisor = bench.supervisor(
        torchrun, "--standalone", "--nproc-per-node=2", str(TRAINERS / "torchrun_worker.py"),
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def both_ready() -> bool:
        return all((bench.folders.results / f"ready-{rank}").exists() for rank in (0, 1))

    ended = run_with(supervisor, both_ready, lambda: supervisor.notify(notice(bench.clock, 25)), seconds=60)
    assert (ended.kind, ended.exit_code) == ("interrupted", 0), bench.lines
    assert sorted(path.name for path in bench.folders.checkpoints.iterdir()) == ["rank-0", "rank-1"]


@pytest.mark.parametrize(
    ("command", "code"),
    [(["bash", str(TRAINERS / "wrapped.sh")], 75), (["python", str(TRAINERS / "wrapped_in_python.py")], None)],
)
def test_a_trainer_behind_a_wrapper_saves_before_the_deadline(
    bench: Bench, command: list[str], code: int | None
) -> None:
    supervisor = bench.supervisor(*command, str(TRAINERS / "counting.py"))
    ended = run_with(
        supervisor, lambda: (supervisor.best_step or 0) > 3, lambda: supervisor.notify(notice(bench.clock, 20))
    )
    assert (ended.kind, ended.exit_code) == ("interrupted", code)
    saved = int((bench.folders.checkpoints / "step.txt").read_text())
    assert ended.saved_step == ended.last_step == saved


# --------------------------------------------------------------------------------------------------------- what is left
def test_what_a_killed_agent_left_running_is_ended_before_another_trainer_starts(bench: Bench) -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={"SPOTHEAL_NOTICE_FILE": str(bench.folders.notice_file)},
        start_new_session=True,
    )
    assert bench.trainer("counting", "1", "0").run().kind == "done"
    assert left.wait(5) == -signal.SIGKILL


def test_programs_of_the_agent_itself_are_not_ended_with_the_trainer(bench: Bench) -> None:
    own: list[subprocess.Popen[bytes]] = []
    supervisor = bench.trainer("plain")

    def then() -> None:
        own.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        supervisor.notify(notice(bench.clock, 20))

    try:
        assert run_with(supervisor, bench.is_ready, then).kind == "interrupted"
        assert is_alive(own[0].pid)
    finally:
        own[0].kill()
        own[0].wait()


def test_programs_side_by_side_do_not_end_each_other(tmp_path: Path) -> None:
    where = Surroundings(None, SystemClock(), never())

    def run(code: str) -> Finished:
        environment = {"PATH": os.defpath}
        return run_command(
            [sys.executable, "-c", code], where, directory=tmp_path, environment=environment, seconds_max=20
        )

    slow: list[Finished] = []
    thread = threading.Thread(target=lambda: slow.append(run("import time; time.sleep(1.5)")))
    thread.start()
    assert all(run("pass").ok for _ in range(5))
    thread.join()
    assert slow[0].ok


# ---------------------------------------------------------------------------------------------------------------- files
def test_a_kept_folder_lets_a_trainer_that_writes_into_the_clone_resume(bench: Bench) -> None:
    job = {"keep": ["runs"]}
    for _ in range(2):
        shutil.rmtree(bench.folders.clone)
        bench.folders.clone.mkdir()
        bench.folders.make(None)
        clone = replace(bench.folders, fetched=bench.folders.clone)  # as on AWS Batch
        link_kept(["runs"], clone, Surroundings(None, SystemClock(), never()), Path(sys.executable))
        bench.trainer("writes_into_clone", job=job).run()
    assert bench.lines == ["fresh", "resumed"]
    assert bench.named("checkpoints-elsewhere") == []


def broken_checkpoint(bench: Bench) -> None:
    bench.folders.make(None)
    for number, content in ((100, b"state"), (200, b"")):
        folder = bench.folders.checkpoints / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "model.bin").write_bytes(content)
        os.utime(folder / "model.bin", (number, number))


def test_after_two_restarts_without_a_step_the_reason_names_the_incomplete_save(bench: Bench) -> None:
    broken_checkpoint(bench)
    ended = bench.trainer("crashes_on_broken_checkpoint", job={"set_aside_broken": False}).run()
    assert ended.kind == "failed"
    assert "; incomplete: checkpoint-200 (model.bin is empty)" in ended.reason


def test_an_incomplete_save_is_set_aside_whole(bench: Bench) -> None:
    broken_checkpoint(bench)
    ended = bench.trainer("crashes_on_broken_checkpoint").run()
    assert (ended.kind, ended.attempts, bench.lines[-1]) == ("done", 3, "loaded checkpoint-100")
    assert [path.name for path in bench.folders.checkpoints.iterdir()] == ["checkpoint-100"]
    aside = list((bench.folders.checkpoints.parent / "set-aside").iterdir())
    assert [path.name.split("-", 3)[-1] for path in aside] == ["checkpoints-checkpoint-200"]


def test_a_save_that_is_not_the_cause_lies_where_it_lay_again(bench: Bench) -> None:
    broken_checkpoint(bench)
    ended = bench.supervisor("python", "-c", "raise SystemExit('no such data set')").run()
    assert (ended.kind, ended.attempts) == ("failed", 3)
    assert [path.name for path in sorted(bench.folders.checkpoints.iterdir())] == ["checkpoint-100", "checkpoint-200"]
    assert bench.named("put-back") == [{"file": "checkpoint-200"}]


def test_a_save_is_put_back_however_the_next_start_fails_and_at_a_notice(bench: Bench) -> None:
    """A data set was moved, the trainer then missed it: another failure, and nothing came back."""
    broken_checkpoint(bench)
    torn = bench.folders.checkpoints / "checkpoint-200"
    code = f"import os; raise SystemExit('torn' if os.path.exists({str(torn)!r}) else 'no such file')"
    assert bench.supervisor("python", "-c", code).run().kind == "failed" and torn.exists()
    waits = f"import os, time; open({str(bench.folders.results / 'ready')!r}, 'w'); time.sleep(60)"
    code = f"import os\nif os.path.exists({str(torn)!r}): raise SystemExit('torn')\n{waits}"
    supervisor = bench.supervisor("python", "-c", code)
    ended = run_with(supervisor, bench.is_ready, lambda: supervisor.notify(notice(bench.clock, 5)))
    assert ended.kind == "interrupted" and torn.exists()


class Killed(BaseException):
    """The agent's end: nothing after it is done."""


def killed_at(attempt: int) -> Hooks:
    def on_attempt(number: int) -> None:
        if number == attempt:
            raise Killed

    return Hooks(on_attempt=on_attempt)


def test_an_agent_that_is_killed_while_a_save_is_aside_leaves_it_to_the_next(bench: Bench) -> None:
    broken_checkpoint(bench)
    torn = bench.folders.checkpoints / "checkpoint-200"
    with pytest.raises(Killed):
        bench.trainer("crashes_on_broken_checkpoint", hooks=killed_at(3)).run()
    assert not torn.exists()
    assert (
        bench.supervisor("python", "-c", f"import os; raise SystemExit(not os.path.exists({str(torn)!r}))").run().kind
        == "done"
    )
    assert torn.exists() and bench.named("put-back") == [{"file": "checkpoint-200"}]


def test_a_save_stays_aside_if_the_killed_agents_trainer_had_saved_another(bench: Bench) -> None:
    broken_checkpoint(bench)
    with pytest.raises(Killed):
        bench.trainer("crashes_on_broken_checkpoint", hooks=killed_at(3)).run()
    (bench.folders.checkpoints / "last.pt").write_bytes(b"state")
    assert bench.supervisor("python", "-c", "").run().kind == "done"
    assert not (bench.folders.checkpoints / "checkpoint-200").exists() and bench.named("put-back") == []


def test_a_torn_file_in_a_kept_folder_is_set_aside(bench: Bench) -> None:
    """foreign.md F7: five of seven public repositories save below `keep`."""
    bench.folders.make(None)
    (bench.folders.keep / "out").mkdir()
    torn = bench.folders.keep / "out" / "checkpoint.pth.tar"
    torn.write_bytes(b"PK\x03\x04 half a save")
    code = f"import os; raise SystemExit(os.path.exists({str(torn)!r}))"
    assert bench.supervisor("python", "-c", code).run().kind == "done"


def test_resume_command_waits_for_something_to_resume_from(bench: Bench) -> None:
    """foreign.md F5: a run that is interrupted before its first save failed three times in its resume_command."""
    job = {"resume_command": ["python", "-c", "raise SystemExit('no checkpoint found')"]}
    assert bench.supervisor("python", "-c", "", job=job, first_attempt=2).run().kind == "done"
    (bench.folders.checkpoints / "last.pt").write_bytes(b"state")
    assert bench.supervisor("python", "-c", "", job=job, first_attempt=3).run().kind == "failed"


METRICS = (
    "import json,os\n"
    "metrics = open(os.environ['SPOTHEAL_METRICS_FILE'], 'a+')\n"
    "if os.environ['SPOTHEAL_ATTEMPT'] == '2':\n"
    "    metrics.seek(0); print([json.loads(line)['step'] for line in metrics]); raise SystemExit(0)\n"
    "for step in range(1, 6): metrics.write(json.dumps({'step': step}) + '\\n')\n"
    'metrics.write(\'{"step": 6, "lo\')\n'
    "text = json.dumps({'step': 5, 'saved': {'step': 3}})\n"
    "open(os.environ['SPOTHEAL_PROGRESS_FILE'], 'w').write(text); raise SystemExit(1)\n"
)


def test_metrics_after_the_saved_step_are_dropped_before_a_restart(bench: Bench) -> None:
    assert bench.supervisor("python", "-c", METRICS).run().kind == "done"
    assert bench.lines == ["[1, 2, 3]"]


def test_metrics_of_an_earlier_machine_are_left_alone_where_its_last_save_is_not_certain(bench: Bench) -> None:
    bench.folders.make(None)
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 6))
    bench.folders.metrics_file.write_text(lines)
    bench.trainer("counting", "1", "0", saved_step=3, first_attempt=2).run()
    assert bench.folders.metrics_file.read_text() == lines


def test_a_stale_notice_is_gone_before_the_trainer_starts(bench: Bench) -> None:
    bench.folders.make(None)
    bench.folders.notice_file.write_text("{}")
    code = "import os; raise SystemExit(os.path.exists(os.environ['SPOTHEAL_NOTICE_FILE']))"
    assert bench.supervisor("python", "-c", code).run().kind == "done"


def test_start_and_end_of_each_attempt_are_told_with_the_step_resumed_from(bench: Bench) -> None:
    bench.trainer("counting", "1", "0.5").run()
    bench.trainer("counting", "2", "0.5", first_attempt=2).run()
    keys = ("attempt", "resumed_step", "last_step")
    assert [(name, *map(said.get, keys)) for name, said in bench.events] == [
        ("trainer-started", 1, 0, None),
        ("trainer-ended", 1, None, 1),
        ("trainer-started", 2, 1, None),
        ("trainer-ended", 2, None, 2),
    ]  # fmt: skip


REPORTS = (
    "import os, time; time.sleep({}); open(os.environ['SPOTHEAL_PROGRESS_FILE'], 'w').write({!r}); time.sleep(0.3)"
)


def test_a_first_report_without_a_save_is_the_step_that_the_start_began_at(bench: Bench) -> None:
    """operator.md 6: 'went on at step 0', so the whole run was counted as done again."""
    code = REPORTS.format(0, '{"step": 94, "saved": null}')
    bench.supervisor("python", "-c", code, first_attempt=2).run()
    assert bench.named("trainer-started") == [{"attempt": 2, "resumed_step": 94}]


def test_a_start_that_was_told_without_a_step_names_it_later(bench: Bench) -> None:
    slow = replace(QUICK, silent_seconds=0.0)
    code = REPORTS.format(0.5, '{"step": 94, "saved": {"step": 90}}')
    bench.supervisor("python", "-c", code, timing=slow).run()
    assert bench.named("trainer-started") == [{"attempt": 1, "resumed_step": None}]
    assert bench.named("trainer-resumed") == [{"attempt": 1, "resumed_step": 90}]


def test_a_progress_file_that_is_a_pipe_holds_nobody_up(bench: Bench) -> None:
    code = "import os,time; os.mkfifo(os.environ['SPOTHEAL_PROGRESS_FILE']); time.sleep(0.3)"
    began = time.monotonic()
    assert bench.supervisor("python", "-c", code, timing=QUICK).run().kind == "done"
    assert time.monotonic() - began < 20
