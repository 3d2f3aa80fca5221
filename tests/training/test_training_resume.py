"""A resumed run is the run that was never interrupted, bit for bit; real processes, with BatchNorm, dropout, AdamW, a
scheduler, an average of the weights, and DataLoader workers."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from training_runs import STEPS_A_EPOCH, Place, ended

from spotheal.agent.protocol.contract import Notice, Progress, write_atomically

pytestmark = pytest.mark.processes
STEPS = 4 * STEPS_A_EPOCH
SLOW = ("--step-seconds", "0.05")
KILLS = int(os.environ.get("SPOTHEAL_TEST_KILLS", "20"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("reference"))
    assert place.run() == 0, place.log
    yield place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "run")


def give_notice(place: Place, seconds: float = 60) -> None:
    deadline = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    write_atomically(place.folder / "notice.json", Notice("terminate", deadline).to_json())


def test_an_uninterrupted_run_learns_and_leaves_weights_and_figures(reference: Place) -> None:
    lines = [line for line in reference.metrics() if "val_acc" in line]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["val_acc"] > 0.9
    assert reference.progress is not None
    assert (reference.progress.step, reference.progress.steps_total) == (STEPS, STEPS)
    assert reference.progress.saved is not None
    assert reference.progress.saved.step == STEPS
    assert "samples/s" in reference.log


def test_a_finished_run_started_again_ends_at_once(reference: Place) -> None:
    before = reference.weights
    assert reference.run() == 0
    assert "already finished" in reference.log
    assert reference.weights == before


def test_a_notice_in_mid_epoch_loses_no_step_and_changes_no_bit(place: Place, reference: Place) -> None:
    with ended(place.start(*SLOW)) as process:
        place.wait_for(lambda seen: seen.step > STEPS_A_EPOCH + 4, process)
        give_notice(place)
        process.join(20)
        assert process.exitcode == 75, place.log
    stopped = place.progress
    assert stopped is not None
    assert stopped.saved is not None
    assert stopped.saved.step == stopped.step < STEPS
    assert Path(stopped.saved.path).is_file()
    (place.folder / "notice.json").unlink()
    assert place.run() == 0, place.log
    assert f"resumed at step {stopped.step} " in place.log
    assert "differ" not in place.log
    assert place.weights == reference.weights


def test_sigterm_saves_and_stops_as_a_notice_does(place: Place, reference: Place) -> None:
    with ended(place.start(*SLOW)) as process:
        place.wait_for(lambda seen: seen.step > 5, process)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 75, place.log
    assert place.run() == 0, place.log
    assert place.weights == reference.weights


@pytest.mark.parametrize("by", ["SIGUSR1", "rebalance file"])
def test_a_request_to_save_is_obeyed_and_training_goes_on(by: str, place: Place) -> None:
    def saved(seen: Progress) -> bool:
        return seen.saved is not None

    with ended(place.start(*SLOW, "--save-every", "10000", "--best", "")) as process:
        before = place.wait_for(lambda seen: seen.step > 3, process)
        assert before.saved is None
        if by == "SIGUSR1":
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
        else:
            write_atomically(place.folder / "rebalance.json", "{}")
        at = place.wait_for(saved, process).step
        place.wait_for(lambda seen: seen.step > at, process)


def test_kills_at_random_moments_change_no_bit(tmp_path: Path, reference: Place) -> None:
    """Each life is killed after a random number of steps and milliseconds; half of them run with DataLoader workers.

    A run that reaches its end is compared, and the kills go on with a new one, until there were all of them.
    """
    randomly = random.Random(7)
    killed, runs = 0, [Place(tmp_path / "run-0")]
    while killed < KILLS:
        place = runs[-1]
        workers = randomly.choice(("0", "0", "0", "2"))
        with ended(place.start("--workers", workers, "--step-seconds", "0.004")) as process:
            at = place.progress.step if place.progress is not None else 0
            ahead = randomly.randint(1, 3 + 2 * STEPS // KILLS)
            place.wait_for(lambda seen: seen.step >= min(at + ahead, STEPS) or not process.is_alive(), process)  # noqa: B023
            process.join(randomly.random() * 0.05)
            process.kill()
            process.join()
            if process.exitcode == 0:
                runs.append(Place(tmp_path / f"run-{len(runs)}"))
                continue
            assert process.exitcode == -signal.SIGKILL, place.log  # a life that failed by itself is no kill
            killed += 1
    assert runs[-1].run("--workers", "2") == 0, runs[-1].log
    for place in runs:
        assert place.weights == reference.weights
        assert "broken" not in place.log
        steps = [(line["step"], "val_acc" in line) for line in place.metrics()]
        assert len(steps) == len(set(steps)), "a step's metrics stand there twice"


def test_a_finished_run_is_not_told_again_with_options_that_never_trained_it(reference: Place, place: Place) -> None:
    place.folder.mkdir()
    shutil.copytree(reference.folder / "checkpoints", place.folder / "checkpoints")
    assert place.run("--lr", "0.5") == 1
    assert "is finished, at step 92, with other options: lr " in place.log
    assert "name another checkpoint folder in SPOTHEAL_CHECKPOINT_DIR" in place.log
    assert not (place.folder / "results" / "metrics.json").exists()


def test_a_finished_run_that_is_gone_on_with_is_at_its_last_epoch(reference: Place, place: Place) -> None:
    place.folder.mkdir()
    shutil.copytree(reference.folder / "checkpoints", place.folder / "checkpoints")
    assert place.run() == 0, place.log
    assert f"resumed at step {STEPS} of {STEPS} (epoch 4) from " in place.log
    assert place.progress is not None and place.progress.epoch == 3


@pytest.mark.parametrize("kind", ["a file, not a folder", "a link to nothing"])
@pytest.mark.parametrize(
    ("name", "what", "variable"),
    [
        ("checkpoints", "no checkpoint can be saved", "SPOTHEAL_CHECKPOINT_DIR"),
        ("results", "no results can be written", "SPOTHEAL_RESULTS_DIR"),
        ("datasets", "no data set can be kept", "SPOTHEAL_DATASETS_DIR"),
    ],
)
def test_what_is_no_folder_is_named_before_anything_is_made(
    name: str, what: str, variable: str, kind: str, place: Place
) -> None:
    place.folder.mkdir()
    path = place.folder / name
    path.write_text("mine") if "file" in kind else path.symlink_to("nowhere")
    assert place.run() == 2
    error, following = place.log.splitlines()
    assert error == f"error: {what} in {path}: it is {kind}"
    assert following.startswith("  next: ") and following.endswith(f", or name a folder in {variable}")
    assert sorted(one.name for one in place.folder.iterdir()) == sorted(["log", name])


def test_another_model_in_the_same_checkpoint_folder_is_refused(reference: Place, place: Place) -> None:
    place.folder.mkdir()
    (place.folder / "checkpoints").symlink_to(reference.folder / "checkpoints")
    assert place.run("--model", "convnet") == 1
    assert "the checkpoint is of another run: model 'mlp' -> 'convnet'" in place.log
    assert "Traceback" not in place.log
