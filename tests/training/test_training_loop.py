"""The example trainer from its command line, and the pieces of its loop."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checkpoint_faults import FailingFiles

from spotheal.agent.protocol.contract import Notice
from spotheal.agent.protocol.errors import ConfigError
from spotheal.training import state
from spotheal.training.__main__ import main
from spotheal.training.checkpoint import SaveFailed, Store
from spotheal.training.example import (
    build,
    data,
    loop,
    options,
)
from spotheal.training.notice import Watcher
from spotheal.training.pace import Every, Pace, best_interval, interruption_seconds
from spotheal.training.report import Metrics, Reporter

SMALL = ("--dataset", "digits", "--epochs", "1", "--batch-size", "128", "--no-imds", "--save-every", "4")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty folder with no agent, and torch's settings as they were afterwards."""
    for name in ("DATASETS_DIR", "CHECKPOINT_DIR", "RESULTS_DIR", "METRICS_FILE", "PROGRESS_FILE", "NOTICE_FILE"):
        monkeypatch.delenv(f"SPOTHEAL_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_deterministic_debug_mode("default")
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    "more",
    [
        ["--amp", "bf16", "--milestones", "1", "--best", "max:val_acc"],
        ["--model", "convnet", "--optimizer", "sgd", "--best", "min:val_loss", "--workers", "1"],
        ["--model", "mlp", "--dataset", "fake", "--batch-size", "1000", "--best", ""],
    ],
    ids=["mlp bf16", "convnet sgd", "fake"],
)
def test_without_the_agent_it_works_in_the_current_folder(more: list[str], here: Path, torchvision: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    assert main([*SMALL, *more]) == 0
    chosen = options.settled(options.parser().parse_args([*SMALL, *more]))
    wanted = build.build(chosen, here / "datasets", 0).model
    for path in (here / "results").glob("*.safetensors"):
        wanted.load_state_dict(safetensors.load_file(path))
    assert json.loads((here / "results" / "metrics.json").read_text())["finished"] is True
    assert list((here / "checkpoints").glob("step-*.safetensors"))
    assert ("--milestones" in more) == bool(list((here / "checkpoints").glob("milestone-*")))
    assert ("" not in more) == (here / "results" / "best.safetensors").exists()


def test_cifar10_on_a_resnet_trains_with_augmentation(
    here: Path, torchvision: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_training_models import make_cifar10

    (here / "datasets").mkdir()
    make_cifar10(here / "datasets", monkeypatch)
    arguments = [*("--model", "resnet18", "--epochs", "1"), *("--batch-size", "25", "--no-imds", "--save-every", "1")]
    assert main(arguments) == 0
    assert "epoch 1/1  step 2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--epochs", "0"],
        ["--save-every", "often"],
        ["--slots", "1"],
        ["--best", "max:luck"],
        ["--device", "cuda:99"],
        ["--amp", "fp16", "--device", "cpu"],
        ["--dataset", "imagenet"],
    ],
)
def test_wrong_options_are_said_in_a_line_with_exit_code_2(
    wrong: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*SMALL, *wrong])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("missing", ["fp16", "torchvision"])
def test_what_this_machine_lacks_is_said_before_a_data_set_is_made(
    missing: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where it is not installed
    more = ["--amp", "fp16", "--device", "cpu"] if missing == "fp16" else ["--model", "resnet18"]
    assert main([*SMALL, *more]) == 2
    assert missing in capsys.readouterr().err
    assert not (here / "datasets").exists()


def test_a_data_set_that_is_there_needs_no_folder_that_can_be_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    whole = data.load("digits", here / "datasets")
    monkeypatch.setattr(data, "keep", refuse)  # root may write to a folder of any mode
    again = data.load("digits", here / "datasets")
    assert all(torch.equal(*pair) for pair in zip(whole.train[:], again.train[:], strict=True))
    with pytest.raises(ConfigError, match=r"digits cannot be written to .*Read-only(.|\n)*SPOTHEAL_DATASETS_DIR"):
        data.load("digits", here / "others")


def test_half_of_torchruns_environment_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*SMALL]) == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_importing_it_brings_in_no_library_that_an_ami_may_lack() -> None:
    code = (
        "import sys, spotheal.training, spotheal.training.example.loop, spotheal.training.notice;"
        "import spotheal.training.checkpoint;"
        "print([n for n in ('requests', 'torchvision', 'sklearn', 'boto3', 'safetensors') if n in sys.modules])"
    )
    path = str(Path(__file__).resolve().parents[2] / ".ci" / "import_path")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout.strip() == "[]", done.stderr


# ----------------------------------------------------------------------------------------------------- resume
def new_run(here: Path, *more: str) -> loop.Run:
    return build.build(options.parser().parse_args([*SMALL, *more]), here / "datasets", 0)


def reporter(here: Path) -> Reporter:
    return Reporter(None, Metrics(here / "metrics.jsonl"))


def test_a_broken_newest_checkpoint_is_named_and_the_one_before_it_used(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = new_run(here), Store(here / "checkpoints")
    tree = state.gather(run.parts(), config=run.config)
    info = {"digest": state.digest(tree["rng"], run.sampler.next_ids(64)), "save_seconds": 100.0}
    for step in (0, 1):
        store.save_now(step, tree, info=info)
    with open(store.slots.path(1), "r+b") as file:
        file.seek(-5000, 2)
        file.write(b"broken")
    loaded = loop.resume(run, store, reporter(here))
    assert loaded is not None
    assert loaded.step == 0
    said = capsys.readouterr()
    assert "broken-step-000000001.safetensors: the checksum of chunk" in said.err
    assert "resumed at step 0" in said.out
    assert "does not fit in the 60 s" in said.err, "a save that takes 100 s is warned of"
    assert "differ" not in said.err


def test_generators_that_differ_from_those_saved_are_seen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, store = new_run(here), Store(here / "checkpoints")
    tree = state.gather(run.parts(), config=run.config)
    store.save_now(3, tree, info={"digest": "0123456789ab", "save_seconds": 0})
    loop.resume(run, store, reporter(here))
    assert "(digest 0123456789ab)" in capsys.readouterr().err


def test_three_saves_in_a_row_that_fail_end_the_run_with_the_cause(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(FailingFiles):
        def _tick(self) -> None:
            raise OSError(28, "No space left on device")

    run, report = new_run(here, "--save-every", "1", "--step-seconds", "0.02"), reporter(here)
    store = Store(here / "checkpoints", files=Full(0))
    loop.resume(run, store, report)
    with pytest.raises(SaveFailed, match=r"No space left on device(.|\n)*df -h"):
        loop.train(run, store, Pace(Every(steps=1)), Watcher(), report)
    assert run.counters.step < 12
    assert "No space left on device" in capsys.readouterr().err


def test_a_line_of_metrics_after_the_resumed_step_is_dropped_and_a_torn_one_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 10, "epoch": 0},
        {"step": 20, "epoch": 0},
        {"step": 20, "epoch": 0, "closes": True},
        {"step": 30, "epoch": 1},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5'
    for epoch, kept in ((0, 2), (1, 3)):
        path.write_text(text)
        metrics = Metrics(path)
        metrics.begin(20, epoch)
        metrics.add(step=21, loss=float("nan"))
        metrics.close()
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert found == [*lines[:kept], {"step": 21, "loss": None}]


# -------------------------------------------------------------------------------------------------- notice, pace
class FixedNotice(Watcher):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._heard = Notice("terminate", datetime.now(timezone.utc) + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("last_safe_step", "seconds_left", "save_seconds", "leaves"),
    [(False, 80, 1, True), (True, 80, 1, False), (True, 6, 1, True), (True, 80, 60, True), (True, -5, 0, True)],
)
def test_at_a_notice_training_leaves_at_once_or_while_a_save_still_fits(
    last_safe_step: bool, seconds_left: float, save_seconds: float, leaves: bool, here: Path
) -> None:
    run = new_run(here)
    run.last_safe_step = last_safe_step
    saver = loop.Saver(run, Store(here / "checkpoints"), Pace(Every()), reporter(here))
    saver.save_seconds = save_seconds
    assert loop.must_leave(run, FixedNotice(seconds_left), saver, 0.1) is leaves
    assert not loop.must_leave(run, Watcher(), saver, 0.1)


def test_the_automatic_interval_follows_cost_and_interruptions() -> None:
    assert best_interval(2.0, 7200) == pytest.approx(200), "1 % of the time at most"
    assert best_interval(0.5, 7200) == pytest.approx((2 * 0.5 * 7200) ** 0.5), "Young: sqrt(2 C M)"
    assert best_interval(1e-9, 7200) == 2.0
    assert best_interval(60.0, 7200) == 6000.0, "above the usual limit, where each save costs a minute"


def test_a_pace_in_steps_does_not_drift_after_a_resume() -> None:
    pace = Pace(Every.parse("10"))
    assert [step for step in range(1, 35) if pace.due(step)] == [10, 20, 30]


def test_a_pace_in_seconds_counts_from_the_last_save() -> None:
    now = [0.0]
    pace = Pace(Every.parse("30s"), monotonic=lambda: now[0])
    assert not pace.due(1)
    now[0] = 30
    assert pace.due(2)
    pace.begun()
    assert not pace.due(3)


@pytest.mark.parametrize(
    ("said", "hours", "seconds"),
    [("1800", None, 1800.0), ("1800", 3.0, 10800.0), ("", None, 7200.0), ("soon", None, 7200.0), ("-1", None, 7200.0),
     ("nan", None, 7200.0), ("inf", None, 7200.0)],
)  # fmt: skip
def test_interruptions_come_as_the_agent_counts_them_unless_somebody_knows_better(
    said: str, hours: float | None, seconds: float
) -> None:
    assert interruption_seconds({"SPOTHEAL_SECONDS_BETWEEN_INTERRUPTIONS": said}, hours) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "", "1d", "x", "1.5"])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number of steps"):
        Every.parse(text)


def test_logging_is_left_to_the_caller_by_the_library() -> None:
    assert logging.getLogger("spotheal.training").handlers == []
