"""A rehearsal of several ranks: machines that show GPUs, torchrun around a stranger's command, a kill on the way."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.programs import GPUS, INSTANCE_DIR
from spotheal.fleet.rehearsal.scenarios import job
from spotheal.fleet.rehearsal.scenarios.run import Options, check_ranks, rehearse
from spotheal.fleet.rehearsal.scenarios.scenario import Interrupt, Kill, scenario

# Ranks that need no torch: rank 0 keeps the contract, rank 1 stays as long as it does.
TRAINER = """
import json, os, sys, time

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = os.environ["SPOTHEAL_CHECKPOINT_DIR"]
checkpoint, over = os.path.join(folder, "state.json"), os.path.join(folder, "over")


def put(path, value):
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


print(f"rank {rank} of {size}")
while rank and not os.path.exists(over):
    time.sleep(0.05)
if rank:
    sys.exit(0)
step, total = 0, 60
if os.path.exists(checkpoint):
    with open(checkpoint) as file:
        step = json.load(file)["step"]
while True:
    put(checkpoint, {"step": step})
    saved = {"step": step, "path": checkpoint, "time": ""}
    put(os.environ["SPOTHEAL_PROGRESS_FILE"], {"step": step, "steps_total": total, "saved": saved})
    if step == total:
        break
    time.sleep(0.05)
    step += 1
put(os.path.join(os.environ["SPOTHEAL_RESULTS_DIR"], "weight.npy"), step)
put(over, True)
"""


def test_the_scenario_is_a_notice_and_a_kill_of_the_example_on_two_ranks(tmp_path: Path) -> None:
    chosen = scenario("ddp")
    assert chosen.ranks
    assert [type(event.faults[-1]) for event in chosen.events] == [Interrupt, Kill]
    example = job.example(tmp_path / "job", ranks=True)
    assert example.job.job.nproc_per_node == "gpu"
    assert job.gpus_of(example.job) == 2
    check_ranks(chosen, example)


def test_a_job_of_one_rank_is_refused_by_a_scenario_of_several(tmp_path: Path) -> None:
    example = job.example(tmp_path / "job")
    assert job.gpus_of(example.job) == 0
    with pytest.raises(ConfigError, match="asks for one"):
        check_ranks(scenario("ddp"), example)
    check_ranks(scenario("standard"), example)


def smi(folder: Path, query: str, gpus: int) -> tuple[int, str]:
    environment = {**os.environ, INSTANCE_DIR: str(folder), **({GPUS: str(gpus)} if gpus else {})}
    argv = [str(folder / "bin" / "nvidia-smi"), query, "--format=csv,noheader"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_machine_shows_the_gpus_that_it_is_said_to_have(tmp_path: Path) -> None:
    folder = Machine(tmp_path / "i-1", Launch("i-1", "z", "t", b"#!/bin/sh\n")).folder
    assert smi(folder, "--query-gpu=index", 2) == (0, "0\n1\n")
    assert smi(folder, "--query-gpu=memory.total", 1) == (0, "81559 MiB\n")
    assert smi(folder, "--query-compute-apps=gpu_uuid,pid", 2) == (0, "")
    assert smi(folder, "--query-gpu=index", 0)[0] == 9
    assert smi(folder, "--query-gpu=clocks", 2)[0] == 1


@pytest.mark.processes
@pytest.mark.torch
def test_a_strangers_ranks_are_started_killed_and_started_again_on_the_next_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "train.py").write_text(TRAINER)
    job.git(checkout, "init", "--quiet", "--initial-branch", "main")
    job.git(checkout, "add", "train.py")
    job.git(checkout, "commit", "--quiet", "--message", "Ranks")
    text = '[job]\nname = "ranks"\nrepository = "."\ncommand = ["python", "train.py"]\nnproc_per_node = "gpu"\n'
    (checkout / "job.toml").write_text(text + "[volume]\nsize_gib = 1\n")
    (checkout / "spot_fleet_config.json").write_text(json.dumps(job.example_fleet("ranks")))
    kept = tmp_path / "kept"
    fleet = checkout / "spot_fleet_config.json"
    # Seed 1: S3 answers 403 for each object that is absent; test_rehearsal_run.py has 404.
    summary = rehearse(Options(fleet, scenario="kill", seed=1, keep=kept, reference=False, seconds_max=400))
    found = summary.to_document()
    assert (found["outcome"], found["instances"], found["kills"]) == ("ok", 2, 1), summary.broken
    logs = [path.read_text() for path in (kept / "instances").glob("*/logs/agent.log")]
    assert [log.count("world 2 = 1 machine x 2 GPUs") for log in logs] == [1, 1]
    assert "trainer | rank 0 of 2" in "".join(logs)  # not in the first, where the kill comes before a slow torchrun
    assert "trainer | rank 1 of 2" not in "".join(logs)
    others = list((kept / "volume" / "logs" / "ranks").glob("*/*/attempt_0/1/stdout.log"))
    assert {path.read_text() for path in others} == {"rank 1 of 2\n"}
