"""Two real processes over gloo: one committed step though one rank alone got the notice, and never a hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import forked
import sharded_world
from interrupted import EPOCHS, SAMPLES, STEPS, gone, options, saved_step
from training_runs import OPTIONS, Place

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import ConfigError
from spotheal.training import launch
from spotheal.training.checkpoint import Store
from spotheal.training.distributed import RankLost, Ranks, apart, sample, world
from spotheal.training.sampler import ExactSampler
from spotheal.training.session import Session, resume

pytestmark = [pytest.mark.torch, pytest.mark.processes]
IMPORTS = Path(__file__).resolve().parents[2] / ".ci" / "import_path"
HALF = 4  # samples of each of two ranks in a step


# ------------------------------------------------------------------------------------------------- what the ranks run
def train(rank: int, size: int, folder: Path, notice: dict[int, int], seconds_max: float) -> dict[str, Any]:
    """Data parallel by DistributedDataParallel; `notice` says at which step which rank hears of it.

    -1: the step in which rank 1 dies; -2: saves every so many steps.
    """
    import interrupted

    from spotheal.training.sampler import ExactSampler, exact_loader
    from spotheal.training.session import SavedAndStopped, Session, resume

    torch.manual_seed(7 + rank)  # DDP gives all ranks the weights of rank 0; masks differ by rank
    model = interrupted.network()
    replicated = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = ExactSampler(SAMPLES, seed=3, rank=rank, world_size=size)
    loader = exact_loader(interrupted.dataset(), sampler, HALF * 2 // size)
    session = Session(**options(folder, str(notice.get(-2, 1000))), ranks=Ranks(seconds_max))
    loop = resume(session, model=replicated, optimizer=optimizer, sampler=sampler)
    began_at = loop.step
    try:
        for _ in range(sampler.epoch, EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(replicated(inputs), targets).backward()
                optimizer.step()
                if notice.get(rank) == loop.step + 1:
                    session.watcher._on_sigterm(15, None)  # to this rank alone
                if notice.get(-1) == loop.step + 1 and rank == 1:
                    os._exit(9)
                loop.after_step(samples=len(inputs))
            sampler.next_epoch()
        loop.finish()
    except SavedAndStopped as stopped:
        return {"code": stopped.code, "step": stopped.step, "began_at": began_at}
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"code": 0, "step": loop.step, "began_at": began_at, "weights": weights}


def _rank(rank: int, size: int, port: int, folder: Path, notice: dict[int, int], seconds_max: float) -> None:
    import torch.distributed as dist

    from spotheal.training.distributed import RankLost

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(size))
    if size > 1:
        dist.init_process_group("gloo")
    try:
        told = train(rank, size, folder, notice, seconds_max)
    except RankLost as fault:
        told = {"code": "lost", "why": str(fault)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    os._exit(0)


def run(folder: Path, size: int = 2, notice: dict[int, int] | None = None, seconds_max: float = 60) -> list[Any]:
    """What each rank told; None for one that died."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.json"):
        old.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forked.context()
    arguments = (size, port, folder, notice or {}, seconds_max)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        until = time.monotonic() + 90
        for process in processes:
            process.join(max(0.1, until - time.monotonic()))
        assert not any(process.is_alive() for process in processes), "a rank hangs"
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [folder / f"rank-{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


# -------------------------------------------------------------------------------------------------------- the facts
@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_hears_the_notice_and_all_save_one_step(rank: int, tmp_path: Path, whole: list[Any]) -> None:
    told = run(tmp_path, notice={rank: 4})
    assert told == [{"code": 75, "step": 4, "began_at": 0}] * 2
    assert [step for step, _ in Store(tmp_path / "checkpoints").slots.found()] == [4]
    assert saved_step(tmp_path) == 4
    gone(tmp_path)
    resumed = run(tmp_path)
    assert [one["began_at"] for one in resumed] == [4, 4]
    assert [one["weights"] for one in resumed] == [one["weights"] for one in whole]


def test_the_world_may_shrink_to_one(tmp_path: Path) -> None:
    run(tmp_path, notice={1: 4})
    (alone,) = run(tmp_path, size=1)
    assert (alone["code"], alone["began_at"], alone["step"]) == (0, 4, STEPS)


def test_a_dead_rank_ends_the_others_with_the_reason_and_the_checkpoint_stays(tmp_path: Path) -> None:
    run(tmp_path, notice={0: 2})
    told = run(tmp_path, notice={-1: 4}, seconds_max=5)
    assert told[1] is None
    assert told[0] is None or told[0]["code"] == "lost"  # DDP's own all_reduce may be the first to notice
    assert [step for step, _ in Store(tmp_path / "checkpoints").slots.found()] == [2]


def test_after_a_kill_the_run_is_the_one_never_interrupted(tmp_path: Path, whole: list[Any]) -> None:
    run(tmp_path, notice={-1: 7, -2: 3}, seconds_max=20)
    resumed = run(tmp_path, notice={-2: 3})
    assert [one["step"] for one in resumed] == [STEPS, STEPS]
    assert resumed[0]["began_at"] in (3, 6)  # the save of step 6 may still have been on its way
    assert [one["weights"] for one in resumed] == [one["weights"] for one in whole]


def test_the_trainer_under_torchrun_saves_one_step_for_all_and_goes_on(tmp_path: Path) -> None:
    """The launcher itself, two ranks; the agent's notice file is there for both, the second run ends."""
    place = Place(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["spotheal.training", *OPTIONS, "--epochs", "2", "--device", "cpu", "--step-seconds", "0.05"]
    paths = os.pathsep.join([str(IMPORTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **place.environment(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    both: Any = {"env": environment, "cwd": tmp_path, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, stderr=subprocess.STDOUT, **both) as run:
        until = time.monotonic() + 60
        while (place.progress is None or place.progress.step < 3) and time.monotonic() < until and run.poll() is None:
            time.sleep(0.02)
        deadline = datetime.now(timezone.utc) + timedelta(seconds=80)
        contract.write_atomically(tmp_path / "notice.json", contract.Notice("terminate", deadline).to_json())
        said, _ = run.communicate(timeout=60)
    step = saved_step(tmp_path)
    assert f"saved at step {step} and stopped for the notice" in said
    gone(tmp_path)
    again = subprocess.run(command, stderr=subprocess.PIPE, timeout=90, check=False, **both)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resumed at step {step} of 24" in again.stdout
    assert again.stdout.count("done: 24 steps") == 1
    assert again.stdout.count("world 2 = 1 machine x 2 processes") == 1
    assert (tmp_path / "results" / "metrics.json").exists()


def trainer(rank: int, size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The example trainer as torchrun starts it, and what it said."""
    import contextlib
    import io

    from spotheal.training.__main__ import main

    os.chdir(folder)
    os.environ.update(Place(folder).environment())
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*OPTIONS, "--epochs", "2", "--device", "cpu", "--scale-lr", "linear", "--step-seconds", "0.02"])
    return {"code": code, "said": said.getvalue()}


def test_the_trainer_goes_on_alone_where_two_ranks_were_stopped(tmp_path: Path) -> None:
    deadline = datetime.now(timezone.utc) + timedelta(seconds=80)
    contract.write_atomically(tmp_path / "notice.json", contract.Notice("terminate", deadline).to_json())
    both = sharded_world.run(tmp_path, 2, trainer, uninitialized=True)
    assert [one["code"] for one in both] == [75, 75]
    step = saved_step(tmp_path)
    assert step is not None
    gone(tmp_path)
    (alone,) = sharded_world.run(tmp_path, 1, trainer, uninitialized=True)
    assert alone["code"] == 0
    assert "saved by 2 ranks, resumed by 1" in alone["said"]
    # One rank has twice the steps of what is left: 1,437 digits in batches of 64, of which `step` pairs were used.
    first = -(-(1437 - 128 * step) // 64) if 128 * step < 1437 else 0
    assert f"done: {step + first + 23} steps" in alone["said"]
    rates = [line["lr"] for line in Place(tmp_path).metrics() if line.get("closes")]
    assert 0 < rates[0] < 1e-3, "that of one rank, after half of the run"


def each_for_itself(rank: int, size: int, folder: Path, given: dict[str, Any]) -> int:
    """Ranks that no collective of the training brings together."""
    import interrupted

    torch.manual_seed(7)
    model = interrupted.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loop = resume(Session(**options(folder, "4")), model=model, optimizer=optimizer)
    inputs, targets = interrupted.dataset()[: 2 + 20 * rank]
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        loop.after_step()
    return loop.step


def test_ranks_that_train_each_a_model_of_its_own_are_refused_at_the_first_save(tmp_path: Path) -> None:
    told = sharded_world.run(tmp_path, 2, each_for_itself)
    assert [one["fault"] for one in told] == ["ConfigError"] * 2
    assert "rank 1's weights are not those of rank 0" in told[0]["why"]
    assert not list((tmp_path / "checkpoints").glob("step-*"))


# ---------------------------------------------------------------------------------------------------- without others
def test_a_sampler_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the sampler is of 2 ranks, and 1 train"):
        resume(Session(**options(tmp_path)), sampler=ExactSampler(SAMPLES, world_size=2))


def test_weights_may_differ_between_ranks_by_what_kernels_round_and_no_more() -> None:
    parameters = [torch.full((3, 100), 0.5, dtype=torch.bfloat16), torch.zeros(4), torch.ones(0)]
    first = sample(parameters)
    assert [len(values) for values in first] == [64, 4, 0]
    rounded = [values * 1.004 for values in first]
    assert apart([first, rounded]) is None
    assert apart([first, rounded, [first[0] * 1.05, *first[1:]]]) == 2
    assert apart([first, first[:2]]) == 1


def test_several_processes_without_a_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="not initialized"):
        Ranks(environment={"WORLD_SIZE": "2", "RANK": "1"})


def test_what_torchrun_says_is_read_and_nonsense_refused() -> None:
    said = world({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"})
    assert (said.rank, said.size, said.local_rank) == (3, 4, 1)
    said = world({"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert (said.describe(True), said.describe(False)) == (
        "world 8 = 2 machines x 4 GPUs",
        "world 8 = 2 machines x 4 processes",
    )
    with pytest.raises(ConfigError, match="are numbers"):
        world({"WORLD_SIZE": "four"})


def test_one_process_agrees_with_itself() -> None:
    ranks = Ranks(environment={})
    values: list[Callable[[], Any]] = [lambda: ranks.any(True, False), lambda: ranks.first(3), lambda: ranks.all(3)]
    assert [value() for value in values] == [(True, False), 3, [3]]


def test_a_launcher_that_is_told_to_end_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException

    def told(_: list[str]) -> None:
        raise SignalException("Process 1 got signal: 15", signal.SIGTERM)

    monkeypatch.setattr(torchrun, "main", told)
    monkeypatch.setenv(contract.NOTICE_FILE, str(tmp_path / "notice.json"))
    assert launch.main(["--standalone", "true"]) == 143
    (tmp_path / "notice.json").touch()
    assert launch.main(["--standalone", "true"]) == contract.EXIT_SAVED_AND_STOPPED
    assert capfd.readouterr().err == "ranks: told to end by SIGTERM, and so were all of them\n" * 2


def test_a_failed_collective_names_the_rank_and_the_limit() -> None:
    def broken() -> None:
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")

    with pytest.raises(RankLost, match="rank 0 waited"):
        Ranks(environment={}).met(broken)
