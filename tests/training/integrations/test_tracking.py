"""One curve in the users' tools: an interrupted training is one run in each of them, with no step in it twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documented
import pytest
import wandb_server
from trainer_bench import Bench

from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl, new_run_id
from spotheal.agent.sweep.worker import entry_of
from spotheal.agent.trainer.environment import trainer_environment
from spotheal.training.tracking import mlflow_run, next_step

EXTRA = "needs {}: pip install '.[tracking]'"
# Each attempt's steps. The second does 4 and 5 again, after a kill; the third was told to go, and lost nothing.
ATTEMPTS = (range(1, 6), range(4, 9), range(9, 12))
STEPS = list(range(1, 12))
ID = {"RUN_ID": "01RUN", "RESUME": "allow"}
PAGE = Path(__file__).resolve().parents[3] / "docs/tracking.md"


# ------------------------------------------------------------------------------------------------- what the agent gives
def config(run: str = "run", entries: int = 0, **environment: str) -> InstanceConfig:
    job = parse_job({"job": {"name": "j", "repository": "/r", "command": ["x"]}, "environment": environment})
    return InstanceConfig(job, run, "us-west-2", StoreUrl("bucket", "j/run"), "0" * 40, entries=entries)


def given(tmp_path: Path, config: InstanceConfig, attempt: int = 1, **secrets: str) -> dict[str, str]:
    """What a trainer has of W&B's variables."""
    folders = Bench(tmp_path / f"{len(os.listdir(tmp_path))}").folders
    found = trainer_environment(config, folders, Path(sys.executable), {}, None, attempt, secrets)
    return {name: value for name, value in found.items() if name.startswith("WANDB_")}


def test_each_attempt_of_a_run_has_the_same_id_and_another_run_another(tmp_path: Path) -> None:
    first = given(tmp_path, config("run"))
    assert first == {"WANDB_RUN_ID": "run", "WANDB_RESUME": "allow"}
    assert given(tmp_path, config("run"), attempt=3) == first != given(tmp_path, config("other"))


def test_each_entry_of_a_sweep_has_an_id_that_weights_and_biases_takes(tmp_path: Path) -> None:
    """On Batch, too: a child's configuration is `entry_of` the list's."""
    sweep = config(new_run_id(SystemClock().now()), entries=10_000)
    ids = [given(tmp_path, entry_of(sweep, index))["WANDB_RUN_ID"] for index in (0, 1, 9_999)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"[0-9A-Za-z]{1,64}", name) for name in ids)


def test_the_users_own_values_win(tmp_path: Path) -> None:
    assert given(tmp_path, config(WANDB_RUN_ID="mine")) == {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "allow"}
    assert given(tmp_path, config(), WANDB_RUN_ID="secret")["WANDB_RUN_ID"] == "secret"
    assert given(tmp_path, config(WANDB_RESUME="never")) == {"WANDB_RESUME": "never"}
    assert given(tmp_path, config(WANDB_RUN_ID="")) == {}, "W&B ends with an error at an empty value"


# ----------------------------------------------------------------------------------------------------- Weights & Biases
@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = pytest.importorskip("wandb", reason=EXTRA.format("wandb"))
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", **ID}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.chdir(tmp_path)
    yield module
    module.teardown()


def attempt(tool: str, steps: range) -> None:
    """The block of docs/tracking.md, as it stands there."""
    names = {"first": steps[0], "total": steps[-1], "train_one_step": lambda step: 1 / step}
    documented.run(tool, names, PAGE)


def test_three_offline_attempts_are_one_run_of_weights_and_biases_without_a_step_twice(
    wandb: Any, tmp_path: Path
) -> None:
    for steps in ATTEMPTS:
        attempt("Weights & Biases", steps)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [log.name for folder in folders for log in folder.glob("*.wandb")] == ["run-01RUN.wandb"] * 3
    with wandb_server.serve() as (url, rows):
        own = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "WANDB_CONFIG_DIR": str(tmp_path)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        sync = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, folders)]
        subprocess.run(sync, env=kept | own, check=True, capture_output=True, timeout=300)
    written = [json.loads(row) for row in rows.pop("01RUN")]
    assert (rows, [row["_step"] for row in written]) == ({}, STEPS)
    assert [row["loss"] for row in written] == [1 / step for step in STEPS]


def test_a_log_that_a_kill_has_cut_off_is_read_up_to_there(wandb: Any, tmp_path: Path) -> None:
    run = wandb.init(project="p")
    for step in range(1, 6):
        run.log({"padding": "x" * 9000}, step=step)  # so that records lie in several blocks
    run.finish()
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    whole = log.read_bytes()
    run = wandb.init(project="p")
    log.write_bytes(whole[: len(whole) - 15_000])
    assert 2 <= next_step(run) < 6
    log.write_bytes(whole[: len(whole) - 15_000] + b"\0" * 15_000)
    assert 2 <= next_step(run) < 6
    log.write_bytes(whole[:40_000] + bytes(range(256)) * 50)
    assert 2 <= next_step(run) < 6
    log.write_bytes(b"")
    assert next_step(run) == 0
    run.finish()


# --------------------------------------------------------------------------------------------------------------- MLflow
@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the store of files: that of SQLite takes seconds to be made."""
    module = pytest.importorskip("mlflow", reason=EXTRA.format("mlflow-skinny"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("SPOTHEAL_RUN", "01RUN")
    monkeypatch.chdir(tmp_path)
    module.set_tracking_uri(str(tmp_path / "mlruns"))
    module.set_experiment("cifar")
    return module


def test_three_attempts_are_one_run_of_mlflow_without_a_step_twice(
    mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in ATTEMPTS:
        attempt("MLflow", steps)
    (only,) = mlflow.search_runs(output_format="list")
    history = mlflow.MlflowClient().get_metric_history(only.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(step, 1 / step) for step in STEPS]
    monkeypatch.setenv("SPOTHEAL_RUN", "01OTHER")
    with mlflow_run() as run:
        assert run.info.run_id != only.info.run_id and next_step(run) == 0


def test_mlflow_refuses_an_id_that_it_does_not_have_so_the_agent_sets_none(
    mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "f" * 32)
    with pytest.raises(mlflow.exceptions.MlflowException, match="not found"):
        mlflow.start_run()


def test_the_users_own_run_of_mlflow_wins(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlflow.start_run() as run:
        mine = run.info.run_id
    with mlflow_run(run_id=mine) as run:
        assert run.info.run_id == mine
    monkeypatch.setenv("MLFLOW_RUN_ID", mine)
    with mlflow_run() as run:
        assert run.info.run_id == mine


# ---------------------------------------------------------------------------------------------------------- TensorBoard
def test_three_attempts_are_one_curve_of_tensorboard_without_a_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason=EXTRA.format("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    for steps in ATTEMPTS:
        attempt("TensorBoard", steps)
    curve = EventAccumulator(str(tmp_path / "runs/cifar")).Reload().Scalars("loss")
    assert [event.step for event in curve] == STEPS
