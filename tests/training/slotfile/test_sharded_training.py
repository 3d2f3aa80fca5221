"""FSDP2 over real ranks: sets of shards are committed whole, resumed by any number of ranks, and never half."""

from __future__ import annotations

import errno
import os
import signal
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sharded_world
from interrupted import EPOCHS, SAMPLES, STEPS, environment, gone, options, saved_step

from spotheal.agent.protocol import contract
from spotheal.training.sharded import ShardedStore
from spotheal.training.slotfile.files import Files

pytestmark = [pytest.mark.torch, pytest.mark.processes]


# ------------------------------------------------------------------------------------------------- what the ranks run
def train(rank: int, size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """`notice`, `die`: [rank, step] at which that rank alone does so. Tells what was resumed, and the last weights."""
    import interrupted

    from spotheal.training.distributed import Ranks
    from spotheal.training.sampler import ExactSampler, exact_loader
    from spotheal.training.session import SavedAndStopped, resume
    from spotheal.training.sharded_session import ShardedSession

    model = sharded_world.network(size)
    torch.manual_seed(7 + rank)  # masks differ by rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sampler = ExactSampler(SAMPLES, seed=3, rank=rank, world_size=size)
    loader = exact_loader(interrupted.dataset(), sampler, 12 // size)
    session = ShardedSession(**options(folder, given.get("save_every", "1000")), ranks=Ranks(30))
    loop = resume(session, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    told = {"began_at": loop.step}
    parts = {name: sharded_world.whole(part.state_dict()) for name, part in loop.parts.items() if name != "sampler"}
    told["parts"] = parts if loop.step else None
    try:
        for _ in range(sampler.epoch, EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
                if given.get("die") == [rank, loop.step + 1]:
                    die()
                if given.get("notice") == [rank, loop.step + 1]:
                    session.watcher._on_sigterm(15, None)
                loop.after_step(samples=len(inputs))
            sampler.next_epoch()
        loop.finish()
    except SavedAndStopped as stopped:
        parts = {name: sharded_world.whole(part.state_dict()) for name, part in loop.parts.items() if name != "sampler"}
        return told | {"code": stopped.code, "step": stopped.step, "left": parts}
    return told | {"code": 0, "step": loop.step, "weights": sharded_world.whole(model.state_dict())}


class Failing(Files):
    """The operation number `at` (from 1) of this rank does `what`."""

    def __init__(self, at: int, what: Any) -> None:
        self.left, self.what = at, what

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.what()

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        self._count()
        super().write(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_failing(rank: int, size: int, folder: Path, given: dict[str, Any]) -> list[Any]:
    """Saves steps 1 and 2 whole, 3 with a fault on rank `given["rank"]`, and 4 where all are still there."""
    from spotheal.training.distributed import Ranks

    tree = {"model": sharded_world.network(size).state_dict(), "rank": 0}
    ranks = Ranks(10)
    told = []
    store = ShardedStore(folder / "sets", ranks=ranks)
    for step in (1, 2):
        store.save_now(step, {**tree, "step": step})
    for step in (3, 4):
        what = {"die": die, "no space": no_space}[given["what"]]
        failing = Failing(given["at"], what) if step == 3 and rank == given["rank"] else Files()
        store = ShardedStore(folder / "sets", ranks=ranks, files=failing)
        store.save(step, {**tree, "step": step})
        outcome = store.flush()
        assert outcome is not None
        told.append([step, outcome.path is not None, outcome.fault.message if outcome.fault else ""])
    return told


# -------------------------------------------------------------------------------------------------------- the facts
@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return sharded_world.run(tmp_path_factory.mktemp("whole"), 2, train, save_every="1")


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("noticed")
    return folder, sharded_world.run(folder, 2, train, notice=[1, 5])


def test_one_rank_hears_the_notice_and_all_save_one_step(noticed: tuple[Path, list[Any]]) -> None:
    folder, told = noticed
    assert [(one["code"], one["step"], one["began_at"]) for one in told] == [(75, 5, 0)] * 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000005"]
    assert saved_step(folder) == 5


def copied(folder: Path, target: Path) -> Path:
    import shutil

    shutil.copytree(folder / "checkpoints", target / "checkpoints")
    return target


def test_the_resumed_run_is_the_one_never_interrupted(
    noticed: tuple[Path, list[Any]], uninterrupted: list[Any], tmp_path: Path
) -> None:
    gone(noticed[0])
    told = sharded_world.run(copied(noticed[0], tmp_path), 2, train)
    assert [one["began_at"] for one in told] == [5, 5]
    assert [one["parts"] for one in told] == [one["left"] for one in noticed[1]]
    assert [one["weights"] for one in told] == [one["weights"] for one in uninterrupted]


def test_what_was_saved_behind_the_trainings_back_is_of_the_step_it_says(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    told = sharded_world.run(tmp_path, 2, train, save_every="2", die=[1, 7])
    assert told[1] is None
    resumed = sharded_world.run(tmp_path, 2, train, save_every="2")
    assert 0 < resumed[0]["began_at"] == resumed[1]["began_at"] < 7  # of the newest set that was whole by then
    assert [one["weights"] for one in resumed] == [one["weights"] for one in uninterrupted]


def test_another_number_of_ranks_resumes_with_the_same_values(noticed: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """2 -> 1 -> 3: each life loads what the one before it had."""
    folder = copied(noticed[0], tmp_path)
    (alone,) = sharded_world.run(folder, 1, train, notice=[0, 7])
    assert (alone["began_at"], alone["step"]) == (5, 7)
    assert alone["parts"] == noticed[1][0]["left"]
    three = sharded_world.run(folder, 3, train)
    assert [one["began_at"] for one in three] == [7] * 3
    assert [one["parts"] for one in three] == [alone["left"]] * 3
    assert {one["code"] for one in three} == {0}


def documented_block(rank: int, size: int, folder: Path, given: dict[str, Any]) -> int:
    import documented
    import interrupted

    os.chdir(folder)
    names = {"torch": torch, "model": interrupted.network(), "dataset": interrupted.dataset()}
    loop = documented.run("Sharded models: FSDP2", names)["loop"]
    loop.finish()
    return int(loop.step)


def test_the_block_in_the_docs_runs(tmp_path: Path) -> None:
    assert sharded_world.run(tmp_path, 1, documented_block) == [0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000"]


def example(rank: int, size: int, folder: Path, given: dict[str, Any]) -> int:
    """The exit code of the example trainer."""
    from spotheal.training.example import example_fsdp

    os.environ.update(environment(folder), AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9")
    os.environ[contract.RESULTS_DIR] = str(folder / "results")
    os.chdir(folder)
    try:
        example_fsdp.main(["--epochs", "1", "--save-every", "3", "--batch-size", "120"])
    except SystemExit as stopped:
        return int(str(stopped.code))
    return 0


def test_the_example_to_copy_stops_for_a_notice_and_is_ended_by_another_number_of_ranks(tmp_path: Path) -> None:
    deadline = datetime.now(timezone.utc) + timedelta(seconds=80)
    contract.write_atomically(tmp_path / "notice.json", contract.Notice("terminate", deadline).to_json())
    assert sharded_world.run(tmp_path, 2, example, uninitialized=True) == [75, 75]
    step = saved_step(tmp_path)
    assert step
    gone(tmp_path)
    assert sharded_world.run(tmp_path, 1, example, uninitialized=True) == [0]
    assert saved_step(tmp_path) == step + (1440 - 240 * step) // 120, "what two ranks left of the epoch, for one"
    assert (tmp_path / "results" / "model.safetensors").is_file()


def refused(rank: int, size: int, folder: Path, given: dict[str, Any]) -> None:
    from spotheal.training.session import Session, resume

    resume(Session(**options(folder)), model=sharded_world.network(size))


def test_a_plain_session_refuses_a_model_of_which_it_has_only_a_part(tmp_path: Path) -> None:
    told = sharded_world.run(tmp_path, 2, refused)
    assert [one["fault"] for one in told] == ["ConfigError"] * 2
    assert "ShardedSession" in told[0]["why"]


def test_one_rank_without_space_commits_nothing_and_tells_all(tmp_path: Path) -> None:
    told = sharded_world.run(tmp_path, 2, save_failing, what="no space", rank=1, at=3)
    assert told[0] == told[1]
    (third, fourth) = told[0]
    assert third[:2] == [3, False]
    assert "rank 1: No space left on device" in third[2]
    assert fourth == [4, True, ""]
    assert sorted(path.name[-1] for path in (tmp_path / "sets").glob("step-*")) == ["1", "2", "4"]


@pytest.mark.parametrize(("rank", "at"), [(1, 4), (0, 2), (0, 9)])
def test_a_rank_that_is_killed_in_a_save_leaves_a_whole_set(rank: int, at: int, tmp_path: Path) -> None:
    told = sharded_world.run(tmp_path, 2, save_failing, what="die", rank=rank, at=at)
    assert told[rank] is None
    assert told[1 - rank] is not None, "the other rank ended with an error of ours, in time"
    assert told[1 - rank]["fault"] == "RankLost"
    loaded = ShardedStore(tmp_path / "sets").load(dict)
    assert loaded is not None
    assert loaded.tree["step"] == loaded.step
    assert loaded.step in (2, 3)
    assert not list((tmp_path / "sets").glob("broken-*"))
