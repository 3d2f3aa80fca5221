"""Several ranks on one machine: torchrun around the command, never around a launcher; nothing idle without a word."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from trainer_bench import Bench, notice, run_with

from spotheal.agent.processes.launchers import is_launcher, launches, processes_asked
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Retryable, SetupFailed
from spotheal.agent.protocol.redaction import SECRETS
from spotheal.agent.trainer import idle_gpus
from spotheal.agent.trainer.ranks import World, describe, gpu_count, last_words, visible, world_of

PLAIN = ["python", "train.py", "--epochs", "3"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def nvidia_smi(folder: Path, body: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)


def world(
    asked: int | str, command: list[str], gpus: int, tmp_path: Path, rendezvous: tuple[str, ...] = ()
) -> World:
    return world_of(
        asked, command, gpus=gpus, directory=tmp_path, interpreter=Path("/env/python"), logs=tmp_path / "ranks",
        rendezvous=rendezvous,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- the GPUs that are there
def test_gpus_are_counted_by_nvidia_smi(programs: Path) -> None:
    nvidia_smi(programs, "printf '0\\n1\\n2\\n3\\n'")
    assert gpu_count() == 4


@pytest.mark.parametrize(
    "body", ["echo NVIDIA-SMI has failed because it could not communicate; exit 9", "exit 0", "echo No devices"]
)
def test_a_driver_that_fails_is_no_gpu(body: str, programs: Path) -> None:
    nvidia_smi(programs, body)
    assert gpu_count() == 0


def test_a_machine_without_nvidia_smi_has_no_gpu(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotheal.agent.processes.programs.SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", str(programs))
    assert gpu_count() == 0


def test_a_driver_that_hangs_is_tried_again_and_not_taken_for_none(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotheal.agent.trainer.ranks.NVIDIA_SMI_SECONDS_MAX", 0.2)
    nvidia_smi(programs, "exec sleep 20")
    with pytest.raises(Retryable):
        gpu_count()


def test_gpus_that_the_job_hides_from_itself_do_not_count() -> None:
    assert visible(4, {}) == 4
    assert visible(4, {"CUDA_VISIBLE_DEVICES": "0, 2"}) == 2
    assert visible(4, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible(0, {"CUDA_VISIBLE_DEVICES": "0"}) == 0


# ------------------------------------------------------------------------------------------------------------ the world
def test_torchrun_is_put_around_a_plain_command(tmp_path: Path) -> None:
    found = world("gpu", PLAIN, 4, tmp_path)
    assert found.argv[:3] == ("/env/python", "-m", "spotheal.training.launch")
    assert "--nproc_per_node=4" in found.argv
    assert "--redirects=1:3,2:3,3:3" in found.argv
    assert list(found.argv[-5:]) == ["--no_python", *PLAIN]
    assert is_launcher(found.argv)
    assert found.says == "world 4 = 1 machine x 4 GPUs"


def test_what_is_said_names_machines_and_gpus() -> None:
    assert describe(4, 4) == "world 4 = 1 machine x 4 GPUs"
    assert describe(2, 0) == "world 2 = 1 machine x 2 processes"


def test_one_gpu_gets_a_rank_of_its_own_too_where_that_was_asked(tmp_path: Path) -> None:
    """The same script, with init_process_group in it, must run on a machine with one GPU and on one with eight."""
    found = world("gpu", PLAIN, 1, tmp_path)
    assert "--nproc_per_node=1" in found.argv
    assert world(1, PLAIN, 1, tmp_path) == World(tuple(PLAIN), gpus=1)


def test_gpus_beside_a_single_process_are_warned_of(tmp_path: Path) -> None:
    found = world(1, PLAIN, 8, tmp_path)
    assert found.argv == tuple(PLAIN)
    assert "7 of 8 GPUs may stay idle" in found.warns


@pytest.mark.parametrize(
    ("asked", "gpus", "said"),
    [
        ("gpu", 0, "nvidia-smi shows no GPU"),
        (2, 4, "nproc_per_node = 2, but this machine has 4 GPUs: 2 would stay idle"),
        (8, 4, "two ranks cannot share one"),
    ],
)
def test_a_world_that_is_not_what_was_configured_ends_the_run(
    asked: int | str, gpus: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SetupFailed, match=said):
        world(asked, PLAIN, gpus, tmp_path)


def test_several_ranks_without_any_gpu_are_allowed(tmp_path: Path) -> None:
    assert world(2, PLAIN, 0, tmp_path).says == "world 2 = 1 machine x 2 processes"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node=4 train.py",
        "python -m torch.distributed.run --nproc_per_node 4 train.py",
        "accelerate launch --num_processes 4 train.py",
        "deepspeed --num_gpus 4 train.py",
        "horovodrun -np 4 python train.py",
        "mpirun -np 4 python train.py",
        "env NCCL_DEBUG=INFO torchrun --nproc-per-node=4 train.py",
        "uv run torchrun --nproc-per-node=4 train.py",
        "timeout 3600 python -m torch.distributed.run --nproc-per-node=4 train.py",
    ],
)
def test_a_command_that_launches_is_left_as_it_is(command: str, tmp_path: Path) -> None:
    argv = command.split()
    assert launches(argv, tmp_path)
    found = world("gpu", argv, 4, tmp_path)
    assert found.argv == tuple(argv)
    assert found.warns == ""
    assert world(1, argv, 4, tmp_path).argv == tuple(argv)
    assert "4 of 8 GPUs stay idle" in world(1, argv, 8, tmp_path).warns
    with pytest.raises(SetupFailed, match="starts 4 processes by itself"):
        world("gpu", argv, 8, tmp_path)


@pytest.mark.parametrize(
    ("command", "launching"),
    [
        ("bash train.sh", True),
        ("./train.sh", True),
        ("sh -c 'x'", False),
        ("bash plain.sh", False),
        ("bash gone.sh", False),
        ("python train.py torchrun", False),
        ("env A=b python train.py", False),
        ("./plain.py", False),
    ],
)
def test_shell_scripts_are_read(command: str, launching: bool, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/bash\nset -e\nexec torchrun --nproc-per-node=4 train.py\n")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n# start it with torchrun\npython train.py\n")
    (tmp_path / "plain.py").write_text("#!/usr/bin/env python\nimport torchrun\n")
    assert launches(command.split(), tmp_path) is launching
    assert launches(["bash", "-lc", "cd x && torchrun train.py"], tmp_path)


def test_what_a_launcher_says_of_its_processes_is_read() -> None:
    assert processes_asked(["torchrun", "--nproc-per-node", "gpu", "train.py"]) == "gpu"
    assert processes_asked(["torchrun", "train.py"]) is None


# ------------------------------------------------------------------------------------------------------------ idle GPUs
class Hurried(SystemClock):
    def sleep(self, seconds: float, until: object = None) -> bool:
        return super().sleep(min(seconds, 0.01), until)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("printf 'GPU-a, 1\\nGPU-a, 2\\n'", "only 1 of 2 GPUs have a process"),
        ("printf 'GPU-a, 1\\nGPU-b, 2\\n'", None),
        ("exit 0", None),
        ("exit 9", None),
    ],
)
def test_gpus_without_a_process_while_training_goes_on_are_told(
    body: str, expected: str | None, programs: Path
) -> None:
    nvidia_smi(programs, body)
    told: list[str] = []
    idle_gpus.watch(2, lambda: True, told.append, Hurried(), threading.Event())
    assert [said[:31] for said in told] == ([] if expected is None else [expected])


@pytest.mark.parametrize("asked", [{"nproc_per_node": 2}, {"gpus": 2}], ids=str)
def test_a_run_whose_gpus_stay_idle_fails_with_a_last_checkpoint(
    asked: dict[str, int], tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(programs, 'case "$1" in *apps*) echo GPU-a, 1;; *) printf "0\\n1\\n";; esac')
    monkeypatch.setattr(idle_gpus, "_POLL_SECONDS", 0.1)
    # A script that starts ranks in its own way.
    monkeypatch.setattr("spotheal.agent.trainer.ranks.launches", lambda *_: True)
    bench = Bench(tmp_path / "bench")
    ended = bench.trainer("counting", "4000", "0.02", job=asked).run()
    assert ended.kind == "failed"
    assert "only 1 of 2 GPUs have a process" in ended.reason
    assert ended.saved_step == ended.last_step
    assert bench.named("gpus-idle")


# ---------------------------------------------------------------------------------------------- real torchrun processes
@pytest.mark.torch
@pytest.mark.processes
def test_both_ranks_are_told_and_75_stays_75_and_only_rank_0_is_in_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    supervisor = bench.trainer("ranks", "one", "two words", job={"nproc_per_node": 2})

    def ready() -> bool:
        return len(list(bench.folders.results.glob("ready-*"))) == 2

    ended = run_with(supervisor, ready, lambda: supervisor.notify(notice(bench.clock, 30)), seconds=60)
    assert (ended.kind, ended.exit_code) == ("interrupted", 75), bench.lines
    assert sorted(path.name for path in bench.folders.checkpoints.iterdir()) == ["rank-0", "rank-1"]
    assert [line for line in bench.lines if "speaks" in line] == [
        "rank 0 of 2 speaks, arguments ['one', 'two words']"
    ]
    (other,) = (bench.folders.logs / "ranks" / "attempt-1").glob("*/attempt_0/1/stdout.log")
    assert other.read_text() == "rank 1 of 2 speaks, arguments ['one', 'two words']\n"
    assert bench.left() == []


@pytest.mark.torch
@pytest.mark.processes
def test_why_another_rank_failed_is_in_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ended = bench.trainer("ranks", "fail", job={"nproc_per_node": 2}, limits={"failures": 1}).run()
    assert (ended.kind, ended.exit_code) == ("failed", 1)
    assert "rank 1 | RuntimeError: rank 1 has lost its mind" in ended.tail
    assert any("error: rank 1 ended with exit code 1" in line for line in bench.lines)


def test_links_in_the_place_of_a_ranks_log_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("Error: secret\n")
    (folder / "stderr.log").symlink_to(tmp_path / "secret")
    assert last_words(tmp_path) == []


def test_last_words_of_a_rank_hold_no_secret_and_no_control_character(tmp_path: Path) -> None:
    folder = tmp_path / "x/attempt_0/1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_bytes(b"a canary-of-a-rank\n\x1b]0;owned\x07 Error: canary-of-a-rank\n")
    SECRETS.learn(["canary-of-a-rank"])
    try:
        words = last_words(tmp_path)
    finally:
        SECRETS.forget()
    assert words[-1] == "rank 1 |  Error: [redacted]" and not any("canary" in line for line in words)
